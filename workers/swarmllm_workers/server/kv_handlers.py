"""Messages about KV that outlives its request: release, hold and resume requests, and share kept prefixes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from blake3 import blake3
from msgspec import UNSET

from swarmllm_proto import ipc
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.ipc.kv import NAME_SIZE, split_names
from swarmllm_proto.limits import PREFIX_KV_MAX, PREFIX_READ_MAX
from swarmllm_proto.tensors import encode_tensor
from swarmllm_workers.build_info import build_info
from swarmllm_workers.cache.prefix_cache import Snapshot
from swarmllm_workers.cache.prefixes import Buffer, Name
from swarmllm_workers.engine.kv_layout import KvLayout, kv_encoding
from swarmllm_workers.engine.kv_state import BadState, converted, layers_of, rows_in_order
from swarmllm_workers.engine.operation import Operation
from swarmllm_workers.engine.segment import Segment
from swarmllm_workers.errors import CallError
from swarmllm_workers.schedule.check_work import CheckPrefixWork
from swarmllm_workers.server.worker_state import WorkerState

_OfLayers: TypeAlias = (
    ipc.PrefixFetchProbe | ipc.LookUpPrefix | ipc.ExportPrefixSnapshot | ipc.ImportPrefixSnapshot
)


class EndingHandlers:
    """How requests end: cancelled, released, or held for another one that goes on with what they leave.
    Without state: what is held is the engine's."""

    def __init__(self, state: WorkerState, stop: Callable[[str], None]) -> None:
        """`stop` ends all that happens of a request; its rows stay."""
        self._state = state
        self._stop = stop

    @property
    def by_type(self) -> dict[type, Callable[[Any, memoryview], None]]:
        return {
            ipc.CancelRequest: self._cancel,
            ipc.ReleaseRequestKv: self._release,
            ipc.HoldRequest: self._hold,
            ipc.ResumeRequest: self._resume,
            ipc.ReadJournal: self._read_journal,
        }

    def _cancel(self, message: ipc.CancelRequest, _payload: memoryview) -> None:
        self._free(message)

    def _release(self, message: ipc.ReleaseRequestKv, _payload: memoryview) -> None:
        self._state.refuse_running(message.request_id)
        self._free(message)

    def _free(self, message: ipc.CancelRequest | ipc.ReleaseRequestKv) -> None:
        self._stop(message.request_id)
        if (engine := self._state.model) is not None:
            engine.release(message.request_id)
        self._state.send(ipc.Done(id=message.id))

    def _hold(self, message: ipc.HoldRequest, _payload: memoryview) -> None:
        engine = self._state.engine()
        self._stop(message.request_id)
        if engine.slots.get(message.request_id) is not None:
            engine.held.add(message.request_id, message.hold_s)
        self._state.send(ipc.Done(id=message.id))

    def _resume(self, message: ipc.ResumeRequest, _payload: memoryview) -> None:
        engine = self._state.engine()
        self._state.refuse_running(message.request_id)
        if engine.slots.get(message.request_id) is not None:
            raise CallError("bad_message", f"request {message.request_id} has rows", "request_id")
        if message.resumes in engine.held:
            engine.rename(message.resumes, message.request_id, message.n_rows)
        kept = tuple(
            ipc.KeptRows(
                engine.n_rows(message.request_id, start, end),
                min(message.n_rows, engine.n_sent_rows(message.request_id, start, end)),
            )
            for start, end in message.ranges
        )
        self._state.send(ipc.Resumed(id=message.id, kept=kept))

    def _read_journal(self, message: ipc.ReadJournal, _payload: memoryview) -> None:
        engine = self._state.engine()
        rows = engine.rows_at(message.request_id, message.end, message.position, message.n_rows)
        self._state.send(ipc.LayerResult(id=message.id, request_id=message.request_id), encode_tensor(rows))


class PrefixHandlers:
    """Kept prefixes: name, export, import. Without state: what is kept is the engine's. What is in cells is
    read between two decode steps, a segment at a time. What takes longer than that is done beside the steps:
    whole prefixes, conversions, checks of what came."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state

    @property
    def by_type(self) -> dict[type, Callable[[Any, memoryview], None]]:
        return {
            ipc.PrefixFetchProbe: self._probe,
            ipc.ExportPrefixSnapshot: self._export,
            ipc.ImportPrefixSnapshot: self._import,
            ipc.LookUpPrefix: self._look_up,
            ipc.CheckPrefix: self._check,
        }

    def _check(self, message: ipc.CheckPrefix, payload: memoryview) -> None:
        """Compute blocks of what came from another node again."""
        tokens = self._state.tokens(payload)
        self._state.refuse_running(message.request_id)
        self._state.running().add(CheckPrefixWork(message, tokens, self._state.engine(), self._state.send))

    def _look_up(self, message: ipc.LookUpPrefix, payload: memoryview) -> None:
        engine, name = self._state.engine(), Name(_names(payload), scope=message.scope)
        where = engine.layers.find_segments(message.start, message.end)
        if where is None and message.cuts is True:
            self._after_cutting(message, partial(self._look_up, message, payload))
            return
        found = ipc.PrefixLookedUp(id=message.id, n_blocks=0)
        if where is not None and engine.prefixes.travels(where):
            found = ipc.PrefixLookedUp(
                id=message.id,
                n_blocks=engine.prefixes.look_up(where, name),
                row_bytes=engine.footprint.row_bytes(message.start, message.end),
                kv_format=kv_format(engine.settings.kv_type, engine.settings.flash_attention),
                kv_type=UNSET if engine.kv_layout is None else engine.settings.kv_type,
                kv_encoding=UNSET if engine.kv_layout is None else kv_encoding(),
            )
        self._state.send(found)

    def _probe(self, message: ipc.PrefixFetchProbe, payload: memoryview) -> None:
        engine, name = self._state.engine(), Name(_names(payload), scope=message.scope)
        route = engine.known_route(message.request_id, message.start, message.end)
        if route is None:
            self._after_cutting(message, partial(self._probe, message, payload))
            return
        engine.make_slot(message.request_id)
        try:
            n_rows = engine.prefixes.name(message.request_id, route.segments, name)
        except CallError:
            engine.release_if_empty(message.request_id)
            raise
        self._state.send(ipc.PrefixFetchResult(id=message.id, n_blocks=n_rows // BLOCK_TOKENS))

    def _export(self, message: ipc.ExportPrefixSnapshot, payload: memoryview) -> None:
        engine, name = self._state.engine(), Name(_names(payload), scope=message.scope)
        where = engine.layers.find_segments(message.start, message.end)
        if message.n_rows:
            rows = None
            wanted = (message.start, message.end) if message.layers is UNSET else message.layers
            n_given = message.n_rows * engine.footprint.row_bytes(*wanted)
            n_read = message.n_rows * engine.footprint.row_bytes(message.start, message.end)
            if where is not None and n_given <= PREFIX_KV_MAX and n_read <= PREFIX_READ_MAX:
                rows = engine.prefixes.export_rows(where, name, message.first_row, message.n_rows)
            if message.layers is UNSET and message.kv_type is UNSET:
                # To hash them takes less time than to copy them did. Beside the steps the answer would wait
                # for the next one, and each slice behind it for another.
                self._send_rows(message, name, rows, _digest([rows]) if rows else "")
                return
            self._state.parsing.begin(
                self._sending(message, name, rows, engine.kv_layout), partial(self._state.fail, message.id)
            )
        elif where is None:
            self._after_cutting(message, partial(self._export, message, payload))
        else:
            self._state.parsing.begin(
                self._exporting(message, where, name), partial(self._state.fail, message.id)
            )

    def _sending(
        self, message: ipc.ExportPrefixSnapshot, name: Name, rows: Buffer | None, layout: KvLayout | None
    ) -> Operation[None]:
        """`layout`: of the engine that gave the rows."""
        try:
            if rows and message.layers is not UNSET:
                first, end = (layer - message.start for layer in message.layers)
                rows = yield partial(layers_of, rows, message.end - message.start, first, end)
            if rows and message.kv_type is not UNSET:
                rows = (yield partial(converted, rows, layout.rounded)) if layout is not None else None
        except BadState:
            rows = None
        self._send_rows(message, name, rows, (yield partial(_digest, [rows])) if rows else "")

    def _send_rows(
        self, message: ipc.ExportPrefixSnapshot, name: Name, rows: Buffer | None, digest: str
    ) -> None:
        if not rows:
            self._state.send(ipc.PrefixSnapshotResponse(id=message.id, n_blocks=0))
            return
        response = ipc.PrefixSnapshotResponse(
            id=message.id, n_blocks=len(name.hashes), sizes=(len(rows),), digest=digest
        )
        self._state.send(response, [rows])

    def _exporting(
        self, message: ipc.ExportPrefixSnapshot, where: tuple[Segment, ...], name: Name
    ) -> Operation[None]:
        found = yield from self._state.engine().prefixes.exporting(where, name)
        if found is None:
            self._state.send(ipc.PrefixSnapshotResponse(id=message.id, n_blocks=0))
            return
        n_blocks, states = found
        digest = yield partial(_digest, states)
        response = ipc.PrefixSnapshotResponse(
            id=message.id, n_blocks=n_blocks, sizes=tuple(map(len, states)), digest=digest
        )
        self._state.send(response, list(states))

    def _import(self, message: ipc.ImportPrefixSnapshot, payload: memoryview) -> None:
        self._state.engine()
        n_names = message.n_blocks * NAME_SIZE
        names, data = _names(payload[:n_names]), payload[n_names:]
        if len(names) != message.n_blocks or len(data) != sum(message.sizes):
            raise CallError("bad_message", "the payload is not as long as is said", "sizes")
        name = Name(names, scope=message.scope)
        fail = partial(self._state.fail, message.id)
        self._state.parsing.begin(self._importing(message, name, data), fail, len(data))

    def _importing(self, message: ipc.ImportPrefixSnapshot, name: Name, data: memoryview) -> Operation[None]:
        ends = accumulate(message.sizes, initial=0)
        parts = [data[start:end] for start, end in pairwise(ends)]
        digest = yield partial(_digest_of_parts if message.from_peer else _digest, parts)
        if digest != message.digest:
            raise CallError("bad_message", "the bytes have another digest", "digest")
        try:
            if message.from_peer:
                layout = None
                if message.other_format is True:
                    layout = self._state.engine().kv_layout
                    if layout is None:
                        self._state.send(ipc.PrefixFetchResult(id=message.id, n_blocks=0))
                        return
                slices = yield partial(_slices, parts, layout)
                yield from self._taking(message, name, slices)
                return
            snapshot = yield partial(Snapshot.read, parts)
        except BadState as error:
            raise _no_kv(error) from None
        self._take(message, name, snapshot)

    def _taking(
        self,
        message: ipc.ImportPrefixSnapshot,
        name: Name,
        slices: Sequence[tuple[Buffer, int]],
    ) -> Operation[None]:
        engine = self._state.engine()
        where, is_taken = engine.layers.find_segments(message.start, message.end), False
        if where is not None:
            is_taken = yield from engine.prefixes.taking_from_peer(
                where, name, slices, other_format=message.other_format is True
            )
        self._state.send(ipc.PrefixFetchResult(id=message.id, n_blocks=message.n_blocks if is_taken else 0))

    def _take(self, message: ipc.ImportPrefixSnapshot, name: Name, snapshot: Snapshot) -> None:
        engine = self._state.engine()
        where = engine.layers.find_segments(message.start, message.end)
        if where is None:
            self._after_cutting(message, partial(self._take, message, name, snapshot))
            return
        try:
            is_taken = engine.prefixes.take(where, name, snapshot)
        except BadState as error:
            raise _no_kv(error) from None
        self._state.send(ipc.PrefixFetchResult(id=message.id, n_blocks=message.n_blocks if is_taken else 0))

    def _after_cutting(self, message: _OfLayers, again: Callable[[], None]) -> None:
        """Call `again` when there are segments for the message's layers."""
        self._state.loading.begin(self._cutting(message, again), partial(self._state.fail, message.id))

    def _cutting(self, message: _OfLayers, again: Callable[[], None]) -> Operation[None]:
        layers = self._state.engine().layers
        yield from layers.cutting(message.start, message.end)
        again()
        yield from layers.filling()


def _no_kv(error: BadState) -> CallError:
    return CallError("bad_tensor", f"this is no KV of these layers: {error}", "payload")


def _names(payload: memoryview) -> tuple[bytes, ...]:
    try:
        return split_names(payload)
    except BadMessage as error:
        raise CallError("bad_message", error.reason, error.field) from None


def _slices(parts: Sequence[Buffer], layout: KvLayout | None) -> list[tuple[Buffer, int]]:
    """The parts and how many rows each has. `layout`: brought to it first. Raises BadState for parts that
    are not understood, not finite, or do not follow each other."""
    if layout is not None:
        parts = [converted(part, layout) for part in parts]
    return list(zip(parts, rows_in_order(parts), strict=True))


@cache
def kv_format(kv_type: str, flash_attention: str) -> str:
    """Equal where KV has the same bytes for the same numbers and is computed with the same kernels: by the
    libllama, by what it uses of the processor, and by its settings."""
    built = build_info()
    of = json.dumps([built["version"], built["features"], built["gpu"], kv_type, flash_attention])
    return blake3(of.encode()).hexdigest(length=16)


def _digest_of_parts(parts: Sequence[memoryview]) -> str:
    return _digest([blake3(part).digest() for part in parts])


def _digest(parts: Sequence[bytes | memoryview]) -> str:
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()
