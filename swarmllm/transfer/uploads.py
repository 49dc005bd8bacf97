"""Serves pieces of this node's models to other nodes.

Requests come over bulk connections, so the decode of running requests, which has connections of its own,
never waits behind them; what is bounded here is the disk and the bandwidth. A node that would wait too long
is told that the node is busy, and asks again or elsewhere: a queue without end would only grow old.

Only models of the catalogue are served, and only bytes that have not changed since they were hashed.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import msgspec
import trio

from swarmllm.errors import BadModel, SwarmLLMError
from swarmllm.models import Catalogue, CatalogueEntry, TensorEntry
from swarmllm.models.manifest import checked_unit
from swarmllm.models.projector import Projector
from swarmllm.models.tensor_locations import TensorLocations
from swarmllm.transfer.settings import TransferSettings
from swarmllm_proto.identifiers import Digest, ModelId
from swarmllm_proto.limits import PIECE_MAX
from swarmllm_proto.swarm import FetchPiece, Outline, Piece

REMEMBERED_MODELS = 8
REMEMBER_S = 2.0
"""A manifest takes milliseconds to read from the catalogue, a piece less."""

_ABSENT = Piece(status="absent")
_BUSY = Piece(status="busy")


@dataclass(frozen=True, slots=True)
class _Source:
    """A model that is served."""

    entry: CatalogueEntry
    tensors: dict[str, TensorEntry]
    header_bytes: int
    outline: bytes
    places: TensorLocations
    until_s: float

    @classmethod
    def of(cls, entry: CatalogueEntry, until_s: float) -> _Source:
        tensors = entry.manifest.tensors
        there = {t.name: t for t in tensors if entry.present is None or t.name in entry.present}
        header_bytes = min((tensor.offset for tensor in tensors), default=0)
        outline = Outline(
            header_bytes=header_bytes,
            size_bytes=entry.state.size_bytes,
            digests={tensor.name: Digest(tensor.blake3) for tensor in tensors},
            checked_unit=checked_unit(entry.manifest),
        )
        return cls(
            entry,
            there,
            header_bytes,
            msgspec.msgpack.encode(outline),
            TensorLocations(entry, only_unchanged=True),
            until_s,
        )


class Uploads:
    def __init__(self, catalogue: Catalogue, settings: TransferSettings) -> None:
        self._catalogue = catalogue
        self._settings = settings
        self._turns = trio.CapacityLimiter(settings.max_uploads)
        self._n_waiting = 0
        self._free_at_s = 0.0
        """When the bandwidth given so far is used up."""
        self._sources: OrderedDict[str, _Source] = OrderedDict()
        self.n_bytes = 0
        """Given since the start."""

    def configure(self, settings: TransferSettings) -> None:
        self._settings = settings
        self._turns.total_tokens = settings.max_uploads

    async def answer(self, request: FetchPiece) -> Piece:
        """Never raises for what a request asks."""
        if not self._settings.share:
            return _ABSENT
        if self._n_waiting >= self._settings.max_waiting_uploads:
            return _BUSY
        self._n_waiting += 1
        n_reserved = min(request.size_bytes, PIECE_MAX)
        try:
            if not await self._wait_for_bandwidth(n_reserved):
                return _BUSY
            async with self._turns:
                source = await self._source(request.model_id)
                data = None
                if source is not None:
                    data = await trio.to_thread.run_sync(_read, self._catalogue, source, request)
            self._give_back_bandwidth(n_reserved - len(data or b""))
        finally:
            self._n_waiting -= 1
        if data is None:
            return _ABSENT
        self.n_bytes += len(data)
        return Piece(status="ok", data=memoryview(data))

    def forget(self, model_id: ModelId) -> None:
        """The model has changed."""
        self._sources.pop(model_id, None)

    async def _wait_for_bandwidth(self, n_bytes: int) -> bool:
        if not self._settings.upload_bytes_s:
            return True
        now_s = trio.current_time()
        start_s = max(now_s, self._free_at_s)
        if start_s - now_s > self._settings.upload_wait_s:
            return False
        self._free_at_s = start_s + n_bytes / self._settings.upload_bytes_s
        await trio.sleep_until(start_s)
        return True

    def _give_back_bandwidth(self, n_bytes: int) -> None:
        """Only bytes that were given count."""
        if self._settings.upload_bytes_s:
            self._free_at_s -= n_bytes / self._settings.upload_bytes_s

    async def _source(self, model_id: ModelId) -> _Source | None:
        now_s = trio.current_time()
        source = self._sources.get(model_id)
        if source is None or source.until_s < now_s:
            try:
                entry = await trio.to_thread.run_sync(self._catalogue.get, model_id)
                source = await trio.to_thread.run_sync(_Source.of, entry, now_s + REMEMBER_S)
            except SwarmLLMError:
                return None
            self._sources[model_id] = source
            while len(self._sources) > REMEMBERED_MODELS:
                self._sources.popitem(last=False)
        return source


def _read(catalogue: Catalogue, source: _Source, request: FetchPiece) -> bytes | None:
    """None: that is not here."""
    if request.part == "outline":
        return source.outline[request.offset : request.offset + request.size_bytes]
    if request.part == "chunks":
        return _chunk_list(catalogue, source, request)
    if request.part == "projector":
        return _of_projector(source.entry.projector, request)
    tensor = source.tensors.get(request.tensor) if request.part == "tensor" else None
    if tensor is None and request.part == "tensor":
        return None
    size_bytes = tensor.size_bytes if tensor else source.header_bytes
    n_bytes = min(request.size_bytes, PIECE_MAX, size_bytes - request.offset)
    if n_bytes <= 0:
        return b""
    try:
        if tensor is None:
            data = source.places.read_container(request.offset, n_bytes)
        else:
            data = source.places.read(tensor, request.offset, n_bytes)
    except (OSError, BadModel):
        return None
    return data if len(data) == n_bytes else None


def _of_projector(projector: Projector | None, request: FetchPiece) -> bytes | None:
    if projector is None or projector.blake3 != request.projector:
        return None
    try:
        projector.check_file()
        with Path(projector.path).open("rb") as file:
            return os.pread(file.fileno(), min(request.size_bytes, PIECE_MAX), request.offset)
    except (OSError, BadModel):
        return None


def _chunk_list(catalogue: Catalogue, source: _Source, request: FetchPiece) -> bytes | None:
    tensor = source.tensors.get(request.tensor)
    chunk_list = catalogue.chunk_list(source.entry.model_id, tensor) if tensor else None
    return chunk_list and chunk_list[request.offset : request.offset + request.size_bytes]
