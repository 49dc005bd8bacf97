"""Models that come from other nodes: one file per model, of which only some tensors are there.

A *container* is a sparse GGUF in the layout of the file it comes from: the whole header, each tensor at its
place, a hole where one is absent. So whatever reads GGUF files reads it as it is, provided it reads only
what is there, and layers can be added at any time. The alternative, a file per layer, would need a reader of
its own everywhere and assembly before every use.

What is there is written in the catalogue's database, tensor by tensor, and only after the tensor's bytes
have the right BLAKE3 and are on the disk; of a tensor on its way, how many of its first bytes are. A process
killed at any moment leaves nothing that counts but is not there. Folders that the catalogue does not know
(killed between two steps of adopting or removing) are swept at start.

A container keeps its modification time, whatever is added, because segment files are cut from it and
recognised by that time; it moves on when damage is found.

Layers that are loaded move to segment files beside the container and leave holes in it, so that nothing lies
on the disk twice (see `tensor_locations`).

Every method blocks; call it in a thread. One process at a time (the daemon locks its data folder).
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from swarmllm.errors import BadModel, Conflict, ModelNotFound, StoreFull, SwarmLLMError
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.damage import find_damage, lose, seal, write_copy
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.gguf_header import MAX_HEADER_BYTES, read_header
from swarmllm.models.hashing import Progress, TensorHasher, digest_of, hash_model, manifest_of
from swarmllm.models.manifest import Manifest, TensorEntry, with_reported_unit
from swarmllm.models.model_files import (
    FileState,
    allocated_bytes,
    drop_all,
    give_back,
    put,
    share_file,
    take_back,
    whole_seconds_ns,
)
from swarmllm.models.tensor_writer import TensorWriter, disk_faults, pieces
from swarmllm.models.verification import (
    segments_of,
    strays_of_copies,
    unfinished_files,
)
from swarmllm.private_files import sync_folder
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.segment_names import FOLDER
from swarmllm_proto.swarm import Outline

FILE_NAME = "model.gguf"
INCOMING = ".incoming-"
MAX_GAP_BYTES = 2**20
"""Between two tensors: the largest alignment a GGUF may have."""
MAX_CONTAINER_HEADER_BYTES = MAX_HEADER_BYTES + MAX_GAP_BYTES


class Store:
    def __init__(
        self,
        catalogue: Catalogue,
        folder: Path,
        quota_bytes: int = 0,
        incoming: Path | None = None,
        copies: Path | None = None,
        projectors: Path | None = None,
    ) -> None:
        """`folder` is made where it is missing. `quota_bytes` 0: no limit but the disk. What lies in the
        folders of `incoming` counts too: it is to become models. `copies`: where workers keep segment files
        of users' files. `projectors`: where fetched projectors lie, which count too, and are not removed."""
        self.catalogue = catalogue
        self._folder = folder
        self._quota_bytes = quota_bytes
        self._incoming = incoming
        self._copies = copies
        self._projectors = projectors
        with disk_faults(folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def __repr__(self) -> str:
        return f"<Store {self._folder}>"

    def sweep(self) -> int:
        """Remove what belongs to no model or was not finished; returns how many files and folders. Only while
        nothing else uses the store."""
        stored = self._entries()
        known = {entry.path.parent for entry in stored}
        strays = [path for path in self._folder.iterdir() if path not in known]
        for entry in stored:
            # A kill while damage was being removed: its file still lies there, and would be read.
            absent = {tensor.name for tensor in entry.absent(entry.manifest.tensors)}
            n_layers = entry.manifest.n_layers
            segments = segments_of(entry, None)
            spoilt = [s for s in segments if any(s.name.holds(name, n_layers) for name in absent)]
            lose(self.catalogue, entry, (), spoilt)
            strays += unfinished_files(entry.path.parent)
        strays += strays_of_copies(self._copies, self.catalogue.list())
        for path in strays:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        return len(strays)

    def adopt(self, model_id: ModelId, name: str, outline: Outline, header: bytes) -> CatalogueEntry:
        """A new container from what another node says the model looks like; no tensor is there yet.

        Everything is checked against `model_id`, which covers every byte of metadata and every tensor's
        digest. Raises BadModel where it is not that model's, StoreFull.
        """
        with self._new_container(model_id) as (incoming, final):
            entry = self._write_header(incoming / FILE_NAME, model_id, name, outline, header)
            put(incoming, final)
            return self.catalogue.adopt(replace(entry, path=final / FILE_NAME))

    def take_in(self, path: Path, name: str) -> CatalogueEntry:
        """A complete GGUF becomes a container: it is hashed, and moved (it must lie on the same disk), so
        that nothing is copied. Where this machine has the model already, the file is removed. Raises
        BadModel, StoreFull; then the file stays where it is, as it does until the catalogue knows the
        container."""
        hashed = hash_model(path)
        manifest, state = hashed.manifest, hashed.state
        try:
            known = self.catalogue.resolve(manifest.model_id)
        except (ModelNotFound, BadModel):
            known = None
        tensors = manifest.tensors
        if known is not None and not known.absent(tensors):
            path.unlink()
            return known
        entry = self._settle(manifest, name, state, hashed.chunk_lists, path)
        path.unlink(missing_ok=True)
        return entry

    def manifest_of_parts(self, part: Path, name: str, digests: Mapping[str, str]) -> Manifest:
        """Of a file of which only the header and some tensors are there, given all tensors' digests. Raises
        BadModel."""
        with disk_faults(part), part.open("rb") as file:
            return manifest_of(file, read_header(file), digests, name)

    def take_in_parts(
        self, part: Path, name: str, manifest: Manifest, names: Collection[str]
    ) -> CatalogueEntry:
        """The tensors `names` of a file in the layout of `manifest` (on the same disk) become a container, or
        a part of the one that is there. Only those count whose bytes are the model's. The file stays and
        shares the container's bytes until it is removed, so that a kill at any moment loses nothing. Raises
        BadModel, StoreFull."""
        tensors = [tensor for tensor in manifest.tensors if tensor.name in names]
        with disk_faults(part), part.open("rb") as file:
            hashed = {tensor.name: _chunk_list(file.fileno(), tensor) for tensor in tensors}
            state = FileState(os.fstat(file.fileno()).st_size, whole_seconds_ns())
        right = [tensor for tensor in tensors if digest_of(hashed[tensor.name]) == tensor.blake3]
        try:
            known = self.catalogue.resolve(manifest.model_id)
        except (ModelNotFound, BadModel):
            with disk_faults(part):
                os.utime(part, ns=(state.mtime_ns, state.mtime_ns))
            chunk_lists = {tensor.name: hashed[tensor.name] for tensor in right}
            return self._settle(manifest, name, state, chunk_lists, part)
        if not known.is_stored:
            return known
        self.copy_tensors(known, known.absent(right), part)
        return self.seal(known)

    def _settle(
        self,
        manifest: Manifest,
        name: str,
        state: FileState,
        chunk_lists: Mapping[str, bytes],
        origin: Path,
    ) -> CatalogueEntry:
        """A new container, whose file is the one at `origin`, with the tensors of `chunk_lists`."""
        tensors = manifest.tensors
        with self._new_container(manifest.model_id, origin) as (incoming, final):
            share_file(origin, incoming / FILE_NAME)
            write_copy(incoming / FILE_NAME, min(tensor.offset for tensor in tensors))
            put(incoming, final)
            self.catalogue.keep_chunk_lists(manifest.model_id, chunk_lists)
            return self.catalogue.adopt(
                CatalogueEntry(manifest.model_id, name, final / FILE_NAME, manifest, state),
                [tensor for tensor in tensors if tensor.name in chunk_lists],
            )

    @contextmanager
    def _new_container(self, model_id: ModelId, origin: Path | None = None) -> Iterator[tuple[Path, Path]]:
        """(a folder to be filled, where `put` brings it). What fails in the block leaves everything as it
        was, the file at `origin` included."""
        incoming = self._folder / f"{INCOMING}{uuid.uuid4().hex}"
        final = self._folder / model_id
        try:
            with disk_faults(final):
                incoming.mkdir(mode=0o700)
                yield incoming, final
        except SwarmLLMError:
            if origin is not None:
                give_back(origin, [incoming / FILE_NAME, final / FILE_NAME])
            take_back(incoming, final)
            raise
        finally:
            drop_all(incoming)

    def open_tensor(
        self, entry: CatalogueEntry, tensor: TensorEntry, chunk_list: bytes | None = None
    ) -> TensorWriter:
        """For adding a tensor to a container, from where an earlier attempt was interrupted. Raises
        BadModel."""
        with self.catalogue.database() as database:
            row = database.execute(
                "SELECT n_bytes FROM tensors WHERE model_id = ? AND name = ? AND NOT complete",
                (entry.model_id, tensor.name),
            ).fetchone()
        return TensorWriter(self.catalogue, entry, tensor, row[0] if row else 0, chunk_list)

    def copy_tensors(self, entry: CatalogueEntry, tensors: Iterable[TensorEntry], source: Path) -> None:
        """Bring tensors into a container from a file of the same layout. Raises BadModel where they are not
        the model's, StoreFull."""
        with disk_faults(source), source.open("rb") as file:
            for tensor in tensors:
                writer = self.open_tensor(entry, tensor)
                try:
                    writer.restart()
                    for data in pieces(file.fileno(), tensor.offset, tensor.size_bytes):
                        writer.append(data)
                    if not writer.finish():
                        raise BadModel(f"tensor {tensor.name} in {source} is not the model's")
                finally:
                    writer.close()

    def seal(self, entry: CatalogueEntry) -> CatalogueEntry:
        """After a change; returns the entry as it is now."""
        return seal(self.catalogue, entry)

    def touch(self, entry: CatalogueEntry) -> None:
        """It is used now: what was not used for longest goes first when room is needed."""
        with self.catalogue.database() as database:
            database.execute(
                "UPDATE containers SET used_at = ? WHERE model_id = ?", (time.time(), entry.model_id)
            )

    def pin(self, entry: CatalogueEntry, pinned: bool) -> CatalogueEntry:
        """Keep a container, or no longer, when room is needed. Raises Conflict for a file of the user's,
        which stays anyway."""
        if not entry.is_stored:
            raise Conflict(
                f"{entry.name} is a file of this machine, which is never removed to make room", field="model"
            )
        with self.catalogue.database() as database:
            database.execute(
                "UPDATE containers SET pinned = ? WHERE model_id = ?", (int(pinned), entry.model_id)
            )
        return self.catalogue.get(entry.model_id)

    def used_bytes(self) -> int:
        """On the disk, holes not counted."""
        return sum(_size_on_disk(entry) for entry in self._entries()) + self._bytes_beside()

    def _bytes_beside(self) -> int:
        parts = list(self._incoming.glob("*/*")) if self._incoming is not None else []
        parts += self._projectors.glob("*") if self._projectors is not None else ()
        return sum(allocated_bytes(part) for part in parts)

    def make_room(self, n_bytes: int, may_go: Callable[[CatalogueEntry], bool]) -> list[CatalogueEntry]:
        """Remove what was not used for longest, as long as `n_bytes` more do not fit and it `may_go`;
        returns what was removed. What is pinned stays. Raises StoreFull where that is not enough, having
        removed nothing."""
        sizes = {entry.model_id: _size_on_disk(entry) for entry in self._entries()}
        with disk_faults(self._folder):
            excess = n_bytes - shutil.disk_usage(self._folder).free
        if self._quota_bytes:
            used_bytes = sum(sizes.values()) + self._bytes_beside()
            excess = max(excess, used_bytes + n_bytes - self._quota_bytes)
        going: list[CatalogueEntry] = []
        for entry in self._entries():
            if excess <= 0:
                break
            if not entry.pinned and may_go(entry):
                going.append(entry)
                excess -= sizes[entry.model_id]
        if excess > 0:
            raise StoreFull(
                f"{n_bytes} bytes do not fit: {excess} too many for "
                f"{'the quota (store.quota_gib) or ' if self._quota_bytes else ''}the disk of {self._folder};"
                " remove a model with swarmllm models rm NAME"
            )
        for entry in going:
            self.remove(entry)
        return going

    def remove(self, entry: CatalogueEntry) -> None:
        """Forget a model; its file goes only if it is the store's."""
        try:
            self.catalogue.remove(entry.model_id)
        except StoreFull:
            # Forgetting takes some room, too. A kill here leaves a model without a file, to be removed again.
            self._remove_files(entry)
            self.catalogue.remove(entry.model_id)
        self._remove_files(entry)

    def _remove_files(self, entry: CatalogueEntry) -> None:
        if entry.is_stored:
            shutil.rmtree(entry.path.parent, ignore_errors=True)
        else:
            for copy in segments_of(entry, self._copies):
                copy.path.unlink(missing_ok=True)

    def verify(self, entry: CatalogueEntry, progress: Progress) -> tuple[str, ...]:
        """See `find_damage`."""
        return find_damage(self.catalogue, entry, self._copies, progress)

    def _entries(self) -> list[CatalogueEntry]:
        """The containers, those that were not used for longest first."""
        with self.catalogue.database() as database:
            ids = [row[0] for row in database.execute("SELECT model_id FROM containers ORDER BY used_at")]
        return [self.catalogue.get(model_id) for model_id in ids]

    def _write_header(
        self, path: Path, model_id: ModelId, name: str, outline: Outline, header: bytes
    ) -> CatalogueEntry:
        n_bytes = outline.header_bytes
        if not len(header) == n_bytes <= outline.size_bytes < 2**62:
            raise BadModel("the header has not the size that was announced")
        with path.open("wb+") as file:
            file.write(header)
            file.flush()
            # A hole: the parser wants to know where the file ends.
            os.ftruncate(file.fileno(), outline.size_bytes)
            parsed = read_header(file)
            tensor_bytes = sum(tensor.size_bytes for tensor in parsed.tensors)
            if not parsed.tensors or parsed.tensors[0].offset != n_bytes:
                raise BadModel("the header does not end where the first tensor begins")
            if outline.size_bytes > n_bytes + tensor_bytes + MAX_GAP_BYTES * (len(parsed.tensors) + 1):
                raise BadModel("the file is much larger than its tensors")
            manifest = with_reported_unit(
                manifest_of(file, parsed, outline.digests, name), outline.checked_unit
            )
            if manifest.model_id != model_id:
                raise BadModel("the header or the tensors' digests are those of another model")
            state = FileState(outline.size_bytes, whole_seconds_ns())
            os.utime(file.fileno(), ns=(state.mtime_ns, state.mtime_ns))
            os.fsync(file.fileno())
        write_copy(path, n_bytes)
        sync_folder(path.parent)
        return CatalogueEntry(model_id, name, path, manifest, state)


def _chunk_list(file: int, tensor: TensorEntry) -> bytes:
    hasher = TensorHasher()
    for data in pieces(file, tensor.offset, tensor.size_bytes):
        hasher.update(data)
    return hasher.chunk_list()


def _size_on_disk(entry: CatalogueEntry) -> int:
    """Of a container, with its segment files."""
    folder = entry.path.parent
    return sum(allocated_bytes(file) for file in (*folder.glob("*.gguf"), *(folder / FOLDER).glob("*")))
