"""The models this node knows by name: where their files lie, and their manifests.

SQLite, because it is in the standard library, survives a kill in the middle of a write, and lets a second
process look on. A connection per call: calls come from whatever thread trio lends, and opening costs a
fraction of a millisecond.

Hashing a model costs minutes, so a manifest is kept with the size and modification time of the file it
describes and believed while those hold. The catalogue never owns a model file and never deletes one; files
that came from other nodes belong to the store, which keeps what it knows about them in this database too.

Every method blocks; call it in a thread.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from swarmllm.database import open_database
from swarmllm.errors import BadModel, Conflict, InvalidRequest, ModelNotFound, StoreFull
from swarmllm.models import names, projector
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.hashing import CHUNK_BYTES, DIGEST_BYTES, Progress, hash_model
from swarmllm.models.manifest import Manifest, TensorEntry
from swarmllm.models.model_files import FileState, PartFile, first_file
from swarmllm.models.names import check_name, normalise_name
from swarmllm.models.projector import Projector, ProjectorState
from swarmllm.models.verification import is_same_content
from swarmllm_proto.identifiers import ModelId

SCHEMA_VERSION = 2
MIN_ID_PREFIX = 6
"""Shorter prefixes of a ModelId are more likely typing errors than ids."""

_TABLES = (
    """
CREATE TABLE IF NOT EXISTS models (
    model_id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    path TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    mtime_ns INTEGER NOT NULL,
    added_at REAL NOT NULL,
    manifest BLOB NOT NULL
) STRICT
""",
    """
CREATE TABLE IF NOT EXISTS containers (
    model_id TEXT PRIMARY KEY,
    used_at REAL NOT NULL,
    pinned INTEGER NOT NULL
) STRICT
""",
    """
CREATE TABLE IF NOT EXISTS tensors (
    model_id TEXT NOT NULL,
    name TEXT NOT NULL,
    n_bytes INTEGER NOT NULL,
    complete INTEGER NOT NULL,
    PRIMARY KEY (model_id, name)
) STRICT, WITHOUT ROWID
""",
    """
CREATE TABLE IF NOT EXISTS chunk_lists (
    model_id TEXT NOT NULL,
    name TEXT NOT NULL,
    chunk_list BLOB NOT NULL,
    PRIMARY KEY (model_id, name)
) STRICT
""",
    names.TABLE,
    projector.TABLE,
    projector.STATES_TABLE,
    """
CREATE TABLE IF NOT EXISTS presets (
    name TEXT PRIMARY KEY,
    preset BLOB NOT NULL
) STRICT
""",
    """
CREATE TABLE IF NOT EXISTS parts (
    model_id TEXT PRIMARY KEY,
    parts BLOB NOT NULL
) STRICT
""",
)
"""`containers`: the models whose files the store owns, and `tensors`: what those hold of them (see
`store.py`). `chunk_lists`: of tensors of more than one chunk (see `hashing`). `parts`: the files of
models that are in several; `size_bytes` and `mtime_ns` of such a model are those of `FileState`. `presets`:
by name. `projectors` and `projector_states`: by model."""

_COLUMNS = "model_id, name, path, size_bytes, mtime_ns, manifest"

_manifest_decoder = msgspec.msgpack.Decoder(Manifest)
_Attached = tuple[Projector | None, ProjectorState]
_parts_decoder = msgspec.msgpack.Decoder(tuple[PartFile, ...])


class Catalogue:
    def __init__(self, path: Path) -> None:
        """`path`: the database file; its folder must exist. Raises BadModel for a database of another
        version."""
        self._path = path
        self.names: Mapping[ModelId, str] = {}
        """As `list` last had them, so that nothing has to be read to name a model."""
        with self.database() as database:
            version = database.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, SCHEMA_VERSION):
                raise BadModel(
                    f"{path} was written by another version of swarmllm (schema {version}, this one reads"
                    f" {SCHEMA_VERSION}); move it away and add the models again"
                )
            if not version:
                # All at once: each statement by itself would wait for the disk.
                database.execute("BEGIN IMMEDIATE")
            for table in _TABLES:
                database.execute(table)
            if not version:
                # Written only once: a node must start, and remove models, on a disk that is full.
                database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def __repr__(self) -> str:
        return f"<Catalogue {self._path}>"

    def add(self, path: Path, name: str | None = None, progress: Progress | None = None) -> CatalogueEntry:
        """Hash the GGUF at `path` and remember it; the same unchanged file is not hashed twice. Of a model
        in several files, `path` is any of them, or their folder.

        A model that is known under another name keeps that one too. Where the file that is known is as it
        was, it stays the model's file and the new name is a further one; else `path` and the new name take
        its place. Takes the name over from an entry whose file is this one or is gone. Raises BadModel,
        InvalidRequest (name), and Conflict where another model has the name.
        """
        if name is not None:
            check_name(name)
        path = first_file(path.expanduser().absolute())
        read = self._remembered(path) or self._hashed(path, progress)
        wanted = name or self._known_name(read.manifest) or normalise_name(read.manifest.name)
        return self._insert(_read_entry(wanted, path, read), takes_over=False)

    def ensure(self, path: Path, name: str) -> CatalogueEntry:
        """`add` for a model that belongs to the program itself: the name is always its own, whatever had it
        before."""
        path = path.absolute()
        read = self._remembered(path) or self._hashed(path, None)
        return self._insert(_read_entry(name, path, read), takes_over=True)

    def list(self) -> tuple[CatalogueEntry, ...]:
        """Every model, by name. Does not look at the files."""
        with self.database() as database:
            rows = database.execute(f"SELECT {_COLUMNS} FROM models ORDER BY name").fetchall()
            entries = tuple(_entry(row, *_stored(database, row[0])) for row in rows)
        self.names = {entry.model_id: entry.name for entry in entries}
        return entries

    def of_size(self, size_bytes: int) -> tuple[CatalogueEntry, ...]:
        """The models whose file has this size. Does not look at the files."""
        with self.database() as database:
            rows = database.execute(
                f"SELECT {_COLUMNS} FROM models WHERE size_bytes = ?", (size_bytes,)
            ).fetchall()
            return tuple(_entry(row, *_stored(database, row[0])) for row in rows)

    def get(self, name_or_id: str) -> CatalogueEntry:
        """By name, or by the first digits of the ModelId. Raises ModelNotFound, InvalidRequest (ambiguous
        digits)."""
        with self.database() as database:
            found = database.execute(
                f"SELECT {_COLUMNS} FROM models WHERE name = ?", (name_or_id,)
            ).fetchall()
            if not found and (owner := names.owner_of(database, name_or_id)) is not None:
                found = database.execute(
                    f"SELECT {_COLUMNS} FROM models WHERE model_id = ?", (owner,)
                ).fetchall()
            if not found and re.fullmatch(f"[0-9a-f]{{{MIN_ID_PREFIX},64}}", name_or_id):
                found = database.execute(
                    f"SELECT {_COLUMNS} FROM models WHERE substr(model_id, 1, ?) = ? LIMIT 2",
                    (len(name_or_id), name_or_id),
                ).fetchall()
            if not found:
                known = [row[0] for row in database.execute("SELECT name FROM models ORDER BY name")]
                raise ModelNotFound(names.not_found(name_or_id, known), field="model")
            if len(found) > 1:
                raise InvalidRequest(
                    f"several models' ids begin with {name_or_id}; give more digits", field="model"
                )
            return _entry(found[0], *_stored(database, found[0][0]))

    def resolve(self, name_or_id: str) -> CatalogueEntry:
        """`get`, for use: also raises BadModel where the file is gone or has changed. One that looks newer,
        and has the same size and content as far as `is_same_content` reads, has only been touched."""
        entry = self.get(name_or_id)
        now = entry.check_file()
        if entry.is_stored or now == entry.state:
            return entry
        if not is_same_content(entry.path, entry.manifest, partial(self.chunk_list, entry.model_id)):
            raise entry.has_changed()
        entry = replace(entry, state=now, parts=_touched(entry.parts))
        with self.database() as database:
            database.execute(
                "UPDATE models SET mtime_ns = ? WHERE model_id = ?", (now.mtime_ns, entry.model_id)
            )
            _write_parts(database, entry)
        return entry

    def revise(self, model_id: ModelId, manifest: Manifest) -> CatalogueEntry:
        """Replace what was derived of a model, which stays the same. Raises ModelNotFound."""
        assert manifest.model_id == model_id
        with self.database() as database:
            database.execute(
                "UPDATE models SET manifest = ? WHERE model_id = ?",
                (msgspec.msgpack.encode(manifest), model_id),
            )
        return self.get(model_id)

    def remove(self, name_or_id: str) -> CatalogueEntry:
        """Forget a model, all its names included; its file stays. Raises as `get` does."""
        entry = self.get(name_or_id)
        with self.database() as database:
            _forget(database, entry.model_id)
            _forget_for_good(database, entry.model_id)
            names.drop_names(database, entry.model_id)
        return entry

    def attach(self, model_id: ModelId, attached: Projector) -> CatalogueEntry:
        """Let a projector be this model's from now on. Raises ModelNotFound, and BadModel where it does not
        fit."""
        entry = self.get(model_id)
        projector.require_fit(attached, entry.manifest)
        with self.database() as database:
            projector.keep(database, model_id, attached)
        return replace(entry, projector=attached, projector_state="on_demand", unloaded_projector=None)

    def detach(self, model_id: ModelId) -> CatalogueEntry:
        """Forget the projector of a model. Raises ModelNotFound."""
        with self.database() as database:
            projector.drop(database, model_id)
        return self.get(model_id)

    def set_projector_state(self, model_id: ModelId, state: ProjectorState) -> CatalogueEntry:
        """Raises ModelNotFound."""
        with self.database() as database:
            projector.set_state(database, model_id, state)
        return self.get(model_id)

    def alias(self, name_or_id: str, name: str) -> CatalogueEntry:
        """Let a further name lead to a model. Raises as `get` does, InvalidRequest for what is no name, and
        Conflict where another model has it."""
        check_name(name)
        entry = self.get(name_or_id)
        with self.database() as database:
            database.execute("BEGIN IMMEDIATE")
            row = database.execute("SELECT model_id FROM models WHERE name = ?", (name,)).fetchone()
            owner = row[0] if row else names.owner_of(database, name)
            if owner not in (None, entry.model_id):
                raise Conflict(f"the name {name} already belongs to another model", field="name")
            if row is None:
                names.give_name(database, name, entry.model_id)
        return self.get(entry.model_id)

    def drop_name(self, name: str) -> CatalogueEntry | None:
        """Forget one of several names of a model, which stays; None: it is no name, or the only one."""
        with self.database() as database:
            database.execute("BEGIN IMMEDIATE")
            if (owner := names.owner_of(database, name)) is not None:
                names.drop_name(database, name)
            else:
                row = database.execute("SELECT model_id FROM models WHERE name = ?", (name,)).fetchone()
                others = names.further_names(database, row[0]) if row else ()
                if not others:
                    return None
                owner = row[0]
                names.drop_name(database, others[0])
                database.execute("UPDATE models SET name = ? WHERE model_id = ?", (others[0], owner))
        return self.get(owner)

    def adopt(self, entry: CatalogueEntry, present: Iterable[TensorEntry] = ()) -> CatalogueEntry:
        """Make known a model whose file, holding the tensors `present`, the store owns from now on. A name
        that is taken gets the first digits of the id added."""
        with self.database() as database:
            database.execute("BEGIN IMMEDIATE")
            name = normalise_name(entry.name)
            row = database.execute("SELECT model_id FROM models WHERE name = ?", (name,)).fetchone()
            owner = row[0] if row is not None else names.owner_of(database, name)
            if owner not in (None, entry.model_id):
                name = f"{name[: names.MAX_NAME_LENGTH - 13]}-{entry.model_id[:12]}"
            _forget(database, entry.model_id)
            _write(database, replace(entry, name=name))
            database.execute("INSERT INTO containers VALUES (?, ?, 0)", (entry.model_id, time.time()))
            rows = [(entry.model_id, tensor.name, tensor.size_bytes) for tensor in present]
            database.executemany("INSERT INTO tensors VALUES (?, ?, ?, 1)", rows)
        return self.get(entry.model_id)

    def chunk_list(self, model_id: ModelId, tensor: TensorEntry) -> bytes | None:
        """None: not known here."""
        if tensor.size_bytes <= CHUNK_BYTES:
            return bytes.fromhex(tensor.blake3)
        with self.database() as database:
            row = database.execute(
                "SELECT chunk_list FROM chunk_lists WHERE model_id = ? AND name = ?", (model_id, tensor.name)
            ).fetchone()
        return row[0] if row else None

    def keep_chunk_lists(self, model_id: ModelId, chunk_lists: Mapping[str, bytes]) -> None:
        """By the tensors' names; the caller has checked them."""
        rows = [(model_id, name, each) for name, each in chunk_lists.items() if len(each) > DIGEST_BYTES]
        with self.database() as database:
            database.executemany("INSERT OR REPLACE INTO chunk_lists VALUES (?, ?, ?)", rows)

    @contextmanager
    def database(self) -> Iterator[sqlite3.Connection]:
        try:
            with open_database(self._path) as database:
                yield database
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
                raise StoreFull(
                    f"the model catalogue {self._path} cannot be written: the disk is full"
                ) from error
            raise BadModel(f"the model catalogue {self._path} cannot be used: {error}") from error
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadModel(
                f"the model catalogue {self._path} is damaged ({type(error).__name__}); move it away and add "
                "the models again"
            ) from error

    def _remembered(self, path: Path) -> _Read | None:
        with self.database() as database:
            rows = database.execute(f"SELECT {_COLUMNS} FROM models WHERE path = ?", (str(path),)).fetchall()
            entries = [_entry(row, *_stored(database, row[0])) for row in rows]
        for entry in entries:
            if entry.is_as_hashed():
                return _Read(entry.manifest, entry.state, entry.parts)
        return None

    def _hashed(self, path: Path, progress: Progress | None) -> _Read:
        hashed = hash_model(path, progress)
        self.keep_chunk_lists(hashed.manifest.model_id, hashed.chunk_lists)
        return _Read(hashed.manifest, hashed.state, hashed.parts)

    def _known_name(self, manifest: Manifest) -> str | None:
        with self.database() as database:
            row = database.execute(
                "SELECT name FROM models WHERE model_id = ?", (manifest.model_id,)
            ).fetchone()
        return row[0] if row else None

    def _insert(self, entry: CatalogueEntry, *, takes_over: bool) -> CatalogueEntry:
        with self.database() as database:
            # Taken before the check, so that of two callers with one name exactly one is refused.
            database.execute("BEGIN IMMEDIATE")
            self._take_name(database, entry, takes_over=takes_over)
            row = database.execute(
                f"SELECT {_COLUMNS} FROM models WHERE model_id = ?", (entry.model_id,)
            ).fetchone()
            known = _entry(row, *_stored(database, row[0])) if row else None
            if known is not None and known.name != entry.name:
                elsewhere = not takes_over and not known.is_stored and known.path != entry.path
                if elsewhere and known.is_as_hashed():
                    names.give_name(database, entry.name, entry.model_id)
                    return replace(known, further_names=names.further_names(database, entry.model_id))
                names.give_name(database, known.name, entry.model_id)
            names.drop_name(database, entry.name)
            _forget(database, entry.model_id)
            _write(database, entry)
            kept = replace(entry, further_names=names.further_names(database, entry.model_id))
            return _seeing(kept, _attached(database, entry.model_id))

    def _take_name(self, database: sqlite3.Connection, entry: CatalogueEntry, *, takes_over: bool) -> None:
        """From the other model that has it, which is forgotten with it unless it has another one. Raises
        Conflict."""
        owner = names.owner_of(database, entry.name)
        row = database.execute(
            "SELECT model_id, path FROM models WHERE name = ? OR model_id = ?", (entry.name, owner)
        ).fetchone()
        if row is None or row[0] == entry.model_id:
            return
        if row[1] != str(entry.path) and not takes_over and Path(row[1]).exists():
            raise Conflict(
                f"the name {entry.name} already belongs to another model ({row[1]}); choose with --name",
                field="name",
            )
        if owner is not None and takes_over:
            names.drop_name(database, entry.name)
            return
        _forget(database, row[0])
        _forget_for_good(database, row[0])
        names.drop_names(database, row[0])


class _Read(NamedTuple):
    """The facts about a file that has been read completely, now or earlier."""

    manifest: Manifest
    state: FileState
    parts: tuple[PartFile, ...]


def _read_entry(name: str, path: Path, read: _Read) -> CatalogueEntry:
    manifest, state, parts = read
    return CatalogueEntry(manifest.model_id, name, path, manifest, state, parts=parts)


def _touched(parts: tuple[PartFile, ...]) -> tuple[PartFile, ...]:
    """With the modification times that the files have now."""
    return tuple(msgspec.structs.replace(part, mtime_ns=Path(part.path).stat().st_mtime_ns) for part in parts)


def _write_parts(database: sqlite3.Connection, entry: CatalogueEntry) -> None:
    if entry.parts:
        database.execute(
            "INSERT OR REPLACE INTO parts VALUES (?, ?)",
            (entry.model_id, msgspec.msgpack.encode(entry.parts)),
        )


def _write(database: sqlite3.Connection, entry: CatalogueEntry) -> None:
    _write_parts(database, entry)
    database.execute(
        f"INSERT INTO models ({_COLUMNS}, added_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            entry.model_id,
            entry.name,
            str(entry.path),
            entry.state.size_bytes,
            entry.state.mtime_ns,
            msgspec.msgpack.encode(entry.manifest),
            time.time(),
        ),
    )


def _forget(database: sqlite3.Connection, model_id: ModelId) -> None:
    for table in ("models", "containers", "tensors", "parts"):
        database.execute(f"DELETE FROM {table} WHERE model_id = ?", (model_id,))


def _forget_for_good(database: sqlite3.Connection, model_id: ModelId) -> None:
    """What stays where a model is added again."""
    database.execute("DELETE FROM chunk_lists WHERE model_id = ?", (model_id,))
    projector.drop(database, model_id)


def _stored(
    database: sqlite3.Connection, model_id: ModelId
) -> tuple[frozenset[str] | None, bool, tuple[str, ...], tuple[PartFile, ...], _Attached]:
    """(tensors present, pinned, further names, parts, projector)"""
    further = names.further_names(database, model_id)
    attached = _attached(database, model_id)
    row = database.execute("SELECT pinned FROM containers WHERE model_id = ?", (model_id,)).fetchone()
    if row is None:
        kept = database.execute("SELECT parts FROM parts WHERE model_id = ?", (model_id,)).fetchone()
        return None, False, further, _parts_decoder.decode(kept[0]) if kept else (), attached
    rows = database.execute("SELECT name FROM tensors WHERE model_id = ? AND complete", (model_id,))
    return frozenset(name for (name,) in rows), bool(row[0]), further, (), attached


def _entry(
    row: tuple[str, str, str, int, int, bytes],
    present: frozenset[str] | None = None,
    pinned: bool = False,
    further: tuple[str, ...] = (),
    parts: tuple[PartFile, ...] = (),
    attached: _Attached = (None, "on_demand"),
) -> CatalogueEntry:
    model_id, name, path, size_bytes, mtime_ns, manifest = row
    entry = CatalogueEntry(
        ModelId(model_id),
        name,
        Path(path),
        _manifest_decoder.decode(manifest),
        FileState(size_bytes, mtime_ns),
        present,
        pinned,
        further,
        parts,
    )
    return _seeing(entry, attached)


def _attached(database: sqlite3.Connection, model_id: ModelId) -> _Attached:
    return projector.of_model(database, model_id), projector.state_of(database, model_id)


def _seeing(entry: CatalogueEntry, attached: _Attached) -> CatalogueEntry:
    found, state = attached
    if state == "unloaded":
        return replace(entry, projector_state=state, unloaded_projector=found)
    return replace(entry, projector=found, projector_state=state)
