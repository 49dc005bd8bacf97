"""What a node reads back from its own files, where a disk, a crash or another program may have been at them,
and what web servers answer that models are fetched from. The part of `decoders.py` that needs a folder."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import trio

from bench.decoders.target import ADDRESS, NODE_ID, Target
from swarmllm.config_sources import load_config
from swarmllm.downloads.remote import Remote
from swarmllm.downloads.settings import DownloadSettings
from swarmllm.downloads.source import (
    ConnectionBroken,
    DownloadError,
    DownloadRefused,
    ServerBusy,
    listed_files,
)
from swarmllm.downloads.unidentified_model import PART, STATE_FILE, PartialModelState, read_waiting
from swarmllm.errors import BadModel, ConfigError
from swarmllm.guide import GUIDE_PATH
from swarmllm.keys import KeyFile
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.store import Store
from swarmllm.node.announcing.capability import _read as read_speed
from swarmllm.swarm.discovery.address_sources import usable
from swarmllm.swarm.membership.identity import KEY_NAME, load_or_create_identity
from swarmllm.swarm.membership.network_key import NetworkFile, private_network
from swarmllm.swarm.peers.store import FILE_NAME, PeerStore
from swarmllm.swarm.peers.trust import TrustBook, TrustEvent
from swarmllm.transfer.piece_client import fetch_container
from swarmllm_proto.swarm import Outline

URL = "https://huggingface.co/org/repo/resolve/main/model.gguf"


def file_targets(folder: Path) -> dict[str, Target]:
    """All of it happens in `folder`."""
    state = PartialModelState(url=URL, source="hf:o/r", name="m", size_bytes=4096, validator="e", sha256="")
    listing = {"siblings": [{"rfilename": "model-Q4_K_M.gguf", "size": 5}], "tags": ["gguf"]}
    speed = {"memory_bytes_per_s": 1e10, "flops": 1e11}
    store, catalogue = _peer_store(folder / "peers"), _catalogue(folder / "catalogue.sqlite")
    given = _Given(_new(folder / "given"))
    keys = KeyFile(_new(folder / "keys"))
    keys.create("laptop")
    network = NetworkFile(_new(folder / "network"))
    network.change(lambda _: private_network(bytes(32)).met_through((ADDRESS,)))
    identity = _new(folder / "identity")
    load_or_create_identity(identity)
    waiting = _new(folder / "waiting")
    (waiting / PART).write_bytes(GUIDE_PATH.read_bytes()[: state.size_bytes])
    config = b'[network]\nbootstrap = ["' + ADDRESS.encode() + b'"]\nmdns = true\n[api]\nport = 8800\n'
    return {
        "configuration": _file(folder / "c.toml", load_config, (ConfigError,), config),
        "network.json": _file(network.path, lambda _: network.read(), (ConfigError,)),
        "keys.json": _file(keys.path, lambda _: keys.list(), (ConfigError,)),
        "identity": _file(identity / KEY_NAME, lambda _: load_or_create_identity(identity), (ConfigError,)),
        "notes of a download": _file(
            waiting / STATE_FILE, lambda _: read_waiting(waiting), (), msgspec.json.encode(state)
        ),
        "measured speed": _file(folder / "speed.json", read_speed, (), msgspec.json.encode(speed)),
        "peers.sqlite": _file(folder / "peers" / FILE_NAME, lambda path: _peers(path.parent), ()),
        "reputation in peers.sqlite": _cell(store, "trust", ("counts", "recent", "score", "at"), _peers),
        "address in peers.sqlite": _cell(store, "peers", ("addresses", "seen_at"), _peers),
        "catalogue.sqlite": _file(catalogue, lambda path: Catalogue(path).list(), (BadModel,)),
        "manifest in the catalogue": _manifest(_catalogue(folder / "rows.sqlite")),
        "outline of a model": Target(given.outline, (BadModel,), {"record/outline": given.outline_bytes}),
        "header of a model": Target(given.header, (BadModel,), {"header": given.header_bytes}),
        "listing of a repository": Target(
            lambda data: listed_files(data, URL),
            (DownloadError,),
            {"example.json": msgspec.json.encode(listing)},
        ),
        "headers of a file on the web": Target(
            _headers,
            (DownloadRefused, ServerBusy, ConnectionBroken),
            {"range": RANGE, "whole": WHOLE, "busy": BUSY, "moved": MOVED},
        ),
    }


RANGE = b"206\ncontent-range: bytes 0-0/4096\netag: abc\n"
WHOLE = b"200\ncontent-length: 4096\nlast-modified: Sat, 21 Nov 2026 08:00:00 GMT\n"
BUSY = b"429\nretry-after: Sat, 21 Nov 2026 08:00:00 GMT\n"
MOVED = b"302\nlocation: https://example.org/model.gguf\nx-linked-etag: " + b"0" * 64 + b"\n"


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _file(
    path: Path, read: Callable[[Path], object], refusals: tuple[type[Exception], ...], content: bytes = b""
) -> Target:
    content = content or path.read_bytes()

    def decode(data: bytes) -> object:
        path.write_bytes(data)
        return read(path)

    return Target(decode, refusals, {f"example{path.suffix}": content})


def _peer_store(folder: Path) -> Path:
    store, book = PeerStore(_new(folder)), TrustBook()
    book.note(NODE_ID, TrustEvent.SERVED, 1.0, "layers 0:4")
    known = book.reputation(NODE_ID)
    assert known is not None
    store.keep_reputations({NODE_ID: known})
    store.keep_peers("", [(NODE_ID, [ADDRESS])], 1.0)
    return folder / FILE_NAME


def _peers(folder: Path) -> object:
    store, book = PeerStore(folder), TrustBook()
    book.restore(store.reputations())
    return [book.score(node_id, 2.0) for node_id in book.known()], [
        usable(a) for _, a in store.peers("", 0.0)
    ]


def _catalogue(path: Path) -> Path:
    Catalogue(path).ensure(GUIDE_PATH, "guide")
    return path


def _cell(original: Path, table: str, columns: tuple[str, ...], read: Callable[[Path], object]) -> Target:
    """A value of any type in the place of one that was written."""
    folder = _new(original.parent.parent / f"cells of {table}")
    path = folder / FILE_NAME
    path.write_bytes(original.read_bytes())
    seeds = {}
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        for column in columns:
            (value,) = database.execute(f"SELECT {column} FROM {table}").fetchone()
            seeds[f"{column}.json" if column in ("counts", "recent") else column] = str(value).encode()

    def decode(data: bytes) -> object:
        column = columns[len(data) % len(columns)]
        value = (data, data.decode("latin-1"), len(data), None)[sum(data) % 4]
        with (
            contextlib.closing(sqlite3.connect(path)) as database,
            database,
            contextlib.suppress(sqlite3.IntegrityError),
        ):
            database.execute(f"UPDATE {table} SET {column} = ?", (value,))
        return read(folder)

    return Target(decode, (), seeds)


def _manifest(path: Path) -> Target:
    with contextlib.closing(sqlite3.connect(path)) as database:
        (manifest,) = database.execute("SELECT manifest FROM models").fetchone()
    catalogue = Catalogue(path)

    def decode(data: bytes) -> object:
        with contextlib.closing(sqlite3.connect(path)) as database, database:
            database.execute("UPDATE models SET manifest = ?", (data,))
        return catalogue.list()

    return Target(decode, (BadModel,), {"record/manifest": manifest})


class _Given:
    """A model that another node gives: what it says of it, and the first bytes of the file."""

    def __init__(self, folder: Path) -> None:
        catalogue = Catalogue(_catalogue(folder / "catalogue.sqlite"))
        (entry,) = catalogue.list()
        tensors = entry.manifest.tensors
        outline = Outline(
            header_bytes=min(tensor.offset for tensor in tensors),
            size_bytes=entry.state.size_bytes,
            digests={tensor.name: tensor.blake3 for tensor in tensors},
        )
        catalogue.remove("guide")
        self._model_id = entry.model_id
        self._store = Store(catalogue, folder / "models")
        self.outline_bytes = msgspec.msgpack.encode(outline)
        self.header_bytes = GUIDE_PATH.read_bytes()[: outline.header_bytes]

    def outline(self, data: bytes) -> None:
        self._take(data, self.header_bytes)

    def header(self, data: bytes) -> None:
        announced = msgspec.msgpack.decode(self.outline_bytes) | {"header_bytes": len(data)}
        self._take(msgspec.msgpack.encode(announced), data)

    def _take(self, outline: bytes, header: bytes) -> None:
        async def whole(part: str, max_bytes: int) -> bytes:
            return outline if part == "outline" else header

        asking: Any = SimpleNamespace(whole=whole)
        entry = trio.run(fetch_container, asking, self._store, self._model_id, "guide")
        self._store.remove(entry)


def _headers(data: bytes) -> None:
    status, *lines = data.split(b"\n")
    headers = [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]

    def answer(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(int(status[:3]) if status[:3].isdigit() else 206, headers=headers)

    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            await Remote(http, URL, "", DownloadSettings(offline=False)).facts()

    trio.run(ask)
