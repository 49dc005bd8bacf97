"""What the messages about kept KV do: name, export, import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from blake3 import blake3

from swarmllm_proto import ipc
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.ipc_prefix import NAME_SIZE, split_names
from swarmllm_workers.cache.prefixes import Name
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.kv_state import BadState
from swarmllm_workers.errors import CallError


class PrefixHandlers:
    """Without state: what is kept is the engine's."""

    def __init__(self, engine: Callable[[], Engine], send: Callable[..., None]) -> None:
        self._engine = engine
        self._send = send

    @property
    def by_type(self) -> dict[type, Callable[[Any, memoryview], None]]:
        return {
            ipc.PrefixFetchProbe: self._probe,
            ipc.ExportPrefixSnapshot: self._export,
            ipc.ImportPrefixSnapshot: self._import,
        }

    def _probe(self, message: ipc.PrefixFetchProbe, payload: memoryview) -> None:
        engine, name = self._engine(), Name(_names(payload), scope=message.scope)
        route = engine.route(message.request_id, message.start, message.end)
        try:
            n_rows = engine.prefixes.name(message.request_id, route.segments, name)
        except CallError:
            engine.release_if_empty(message.request_id)
            raise
        self._send(ipc.PrefixFetchResult(id=message.id, n_blocks=n_rows // BLOCK_TOKENS))

    def _export(self, message: ipc.ExportPrefixSnapshot, payload: memoryview) -> None:
        engine, name = self._engine(), Name(_names(payload), scope=message.scope)
        found = engine.prefixes.export(engine.segments_for(message.start, message.end), name)
        if found is None:
            self._send(ipc.PrefixSnapshotResponse(id=message.id, n_blocks=0))
            return
        n_blocks, states = found
        response = ipc.PrefixSnapshotResponse(
            id=message.id,
            n_blocks=n_blocks,
            sizes=tuple(map(len, states)),
            digest=_digest(states),
        )
        self._send(response, list(states))

    def _import(self, message: ipc.ImportPrefixSnapshot, payload: memoryview) -> None:
        engine = self._engine()
        n_names = message.n_blocks * NAME_SIZE
        names, data = _names(payload[:n_names]), payload[n_names:]
        if len(names) != message.n_blocks or len(data) != sum(message.sizes):
            raise CallError("bad_message", "the payload is not as long as is said", "sizes")
        if _digest([data]) != message.digest:
            raise CallError("bad_message", "the bytes have another digest", "digest")
        ends = accumulate(message.sizes, initial=0)
        states = tuple(bytes(data[start:end]) for start, end in pairwise(ends))
        where = engine.segments_for(message.start, message.end)
        try:
            is_taken = engine.prefixes.take(where, Name(names, scope=message.scope), states)
        except BadState as error:
            raise CallError("bad_tensor", f"this is no KV of these layers: {error}", "payload") from None
        self._send(ipc.PrefixFetchResult(id=message.id, n_blocks=message.n_blocks if is_taken else 0))


def _names(payload: memoryview) -> tuple[bytes, ...]:
    try:
        return split_names(payload)
    except BadMessage as error:
        raise CallError("bad_message", error.reason, error.field) from None


def _digest(parts: Sequence[bytes | memoryview]) -> str:
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()
