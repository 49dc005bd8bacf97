"""The giving end: pieces of this node's models for whoever asks.

Requests come over the control connection, so the decode of running requests, which has connections of its
own, never waits behind them; what is bounded here is the disk and the bandwidth. Whoever would wait too long
is told that the node is busy, and asks again or elsewhere: a queue without end would only grow old.

Only what the catalogue knows is given, and only bytes that are what they were when they were hashed.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import dataclass

import msgspec
import trio

from swarmllm.errors import SwarmLLMError
from swarmllm.models import Catalogue, CatalogueEntry, TensorEntry
from swarmllm.models.cuts import checked_unit
from swarmllm.models.hashing import FileState
from swarmllm.travel.settings import TravelSettings
from swarmllm_proto.limits import PIECE_MAX
from swarmllm_proto.swarm import FetchPiece, Outline, Piece

REMEMBERED_MODELS = 8
REMEMBER_S = 2.0
"""A manifest takes milliseconds to read from the catalogue, a piece less."""

_ABSENT = Piece(status="absent")
_BUSY = Piece(status="busy")


@dataclass(frozen=True, slots=True)
class _Source:
    """A model as it is given."""

    entry: CatalogueEntry
    tensors: dict[str, TensorEntry]
    header_bytes: int
    outline: bytes
    until_s: float

    @classmethod
    def of(cls, entry: CatalogueEntry, until_s: float) -> _Source:
        tensors = [tensor for shard in entry.manifest.shards for tensor in shard.tensors]
        there = {t.name: t for t in tensors if entry.present is None or t.name in entry.present}
        header_bytes = min((tensor.offset for tensor in tensors), default=0)
        outline = Outline(
            header_bytes=header_bytes,
            size_bytes=entry.state.size_bytes,
            digests={tensor.name: tensor.blake3 for tensor in tensors},
            checked_unit=checked_unit(entry.manifest),
        )
        return cls(entry, there, header_bytes, msgspec.msgpack.encode(outline), until_s)


class Uploads:
    def __init__(self, catalogue: Catalogue, settings: TravelSettings) -> None:
        self._catalogue = catalogue
        self._settings = settings
        self._turns = trio.CapacityLimiter(settings.max_uploads)
        self._n_waiting = 0
        self._free_at_s = 0.0
        """When the bandwidth given so far is used up."""
        self._sources: OrderedDict[str, _Source] = OrderedDict()
        self.n_bytes = 0
        """Given since the start."""

    def configure(self, settings: TravelSettings) -> None:
        self._settings = settings
        self._turns.total_tokens = settings.max_uploads

    async def answer(self, request: FetchPiece) -> Piece:
        """Never raises for what a request asks."""
        if not self._settings.share:
            return _ABSENT
        if self._n_waiting >= self._settings.max_waiting_uploads:
            return _BUSY
        self._n_waiting += 1
        try:
            if not await self._wait_for_bandwidth(request.size_bytes):
                return _BUSY
            async with self._turns:
                source = await self._source(request.model_id)
                data = await trio.to_thread.run_sync(_read, source, request) if source else None
        finally:
            self._n_waiting -= 1
        if data is None:
            return _ABSENT
        self.n_bytes += len(data)
        return Piece(status="ok", data=memoryview(data))

    def forget(self, model_id: str) -> None:
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

    async def _source(self, model_id: str) -> _Source | None:
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


def _read(source: _Source, request: FetchPiece) -> bytes | None:
    """None: that is not here."""
    if request.part == "outline":
        return source.outline[request.offset : request.offset + request.size_bytes]
    if request.part == "header":
        start, size_bytes = 0, source.header_bytes
    elif request.tensor in source.tensors:
        tensor = source.tensors[request.tensor]
        start, size_bytes = tensor.offset, tensor.size_bytes
    else:
        return None
    n_bytes = max(0, min(request.size_bytes, PIECE_MAX, size_bytes - request.offset))
    try:
        file = os.open(source.entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if not source.entry.is_stored and FileState.of(os.fstat(file)) != source.entry.state:
            return None
        data = os.pread(file, n_bytes, start + request.offset) if n_bytes else b""
    except OSError:
        return None
    finally:
        os.close(file)
    return data if len(data) == n_bytes else None
