"""How requests end here: cancelled, released, or held for another one that goes on with what they leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swarmllm_proto import ipc
from swarmllm_proto.tensors import encode_tensor
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.errors import CallError
from swarmllm_workers.schedule.work import Work


class EndingHandlers:
    """Without state: what is held is the engine's."""

    def __init__(
        self,
        engine: Callable[[], Engine | None],
        send: Callable[..., None],
        works_of: Callable[[str], list[Work]],
        stop: Callable[[str], None],
    ) -> None:
        """`stop` ends all that happens of a request; its rows stay."""
        self._opened = engine
        self._send = send
        self._works_of = works_of
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
        self._refuse_running(message.request_id)
        self._free(message)

    def _free(self, message: ipc.CancelRequest | ipc.ReleaseRequestKv) -> None:
        self._stop(message.request_id)
        if (engine := self._opened()) is not None:
            engine.release(message.request_id)
        self._send(ipc.Done(id=message.id))

    def _hold(self, message: ipc.HoldRequest, _payload: memoryview) -> None:
        engine = self._engine()
        self._stop(message.request_id)
        if engine.slots.get(message.request_id) is not None:
            engine.held.add(message.request_id, message.hold_s)
        self._send(ipc.Done(id=message.id))

    def _resume(self, message: ipc.ResumeRequest, _payload: memoryview) -> None:
        engine = self._engine()
        self._refuse_running(message.request_id)
        if engine.slots.get(message.request_id) is not None:
            raise CallError("bad_message", f"request {message.request_id} has rows", "request_id")
        if message.resumes in engine.held:
            engine.rename(message.resumes, message.request_id, message.n_rows)
        kept = tuple(
            ipc.KeptRows(
                engine.n_rows(message.request_id, start, end),
                min(message.n_rows, engine.journals.n_rows(message.request_id, end)),
            )
            for start, end in message.ranges
        )
        self._send(ipc.Resumed(id=message.id, kept=kept))

    def _read_journal(self, message: ipc.ReadJournal, _payload: memoryview) -> None:
        engine = self._engine()
        # A boundary between two stages that are both here has the same rows in either.
        is_sent = engine.journals.has(message.request_id, message.end)
        journals = engine.journals if is_sent else engine.received
        rows = journals.read(message.request_id, message.end, message.position, message.n_rows)
        self._send(ipc.LayerResult(id=message.id, request_id=message.request_id), encode_tensor(rows))

    def _engine(self) -> Engine:
        if (engine := self._opened()) is None:
            raise CallError("bad_message", "no model is open: Open comes first", "type")
        return engine

    def _refuse_running(self, request_id: str) -> None:
        if self._works_of(request_id):
            raise CallError("bad_message", "the request is running: cancel it", "request_id")
