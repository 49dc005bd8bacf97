"""State that the handlers of a worker share: the model that is open, the work in progress, and answers to
calls.
"""

from __future__ import annotations

import logging

import numpy as np

from swarmllm_proto import ipc
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.errors import CallError
from swarmllm_workers.kernels.kernel_tuning import KernelTuning
from swarmllm_workers.payloads import check_tokens, read_tensor
from swarmllm_workers.schedule.scheduler import Scheduler
from swarmllm_workers.schedule.work import Send, Work
from swarmllm_workers.server.background import Place
from swarmllm_workers.speculation.speculation import Speculation

log = logging.getLogger(__name__)


class WorkerState:
    def __init__(self, send: Send, loading: Place, parsing: Place) -> None:
        """`loading` and `parsing`: where layers are made, and where what came from elsewhere is read."""
        self.send = send
        self.loading = loading
        self.parsing = parsing
        self.model: Engine | None = None
        """None before `Open`; the following as well."""
        self.scheduler: Scheduler | None = None
        self.speculation: Speculation | None = None
        self.kernels = KernelTuning()
        self.is_finished = False

    def engine(self) -> Engine:
        """The engine of the open model. Raises CallError bad_message while no model is open."""
        if self.model is None:
            raise CallError("bad_message", "no model is open: Open comes first", "type")
        return self.model

    def running(self) -> Scheduler:
        """Raises as `engine` does."""
        self.engine()
        assert self.scheduler is not None
        return self.scheduler

    @property
    def has_work(self) -> bool:
        return self.scheduler is not None and bool(self.scheduler.works)

    def works_of(self, request_id: str) -> list[Work]:
        return self.scheduler.of_request(request_id) if self.scheduler is not None else []

    def refuse_running(self, request_id: str) -> None:
        """Raises CallError bad_message if the request already runs."""
        if self.works_of(request_id):
            raise CallError("bad_message", f"request {request_id} is running: cancel it first", "request_id")

    def fail(self, call_id: int, error: Exception, request_id: str = "") -> None:
        """Answer a call with an error."""
        if isinstance(error, CallError):
            self.send(
                ipc.Error(
                    id=call_id,
                    kind=error.kind,
                    message=error.message,
                    field=error.field,
                    request_id=request_id,
                )
            )
        elif isinstance(error, MemoryError):
            self.send(
                ipc.Error(id=call_id, kind="out_of_memory", message="out of memory", request_id=request_id)
            )
        else:
            log.exception("call %d failed", call_id, exc_info=error)
            text = f"{type(error).__name__}: {error}"[:300]
            self.send(ipc.Error(id=call_id, kind="engine", message=text, request_id=request_id))

    def fail_work(self, work: Work, error: Exception) -> None:
        self.fail(work.call_id, error, work.request_id)

    def finish(self, call_id: int) -> None:
        """Answer the call that ends the worker, and stop."""
        self.send(ipc.Bye(id=call_id))
        self.is_finished = True

    def tokens(self, payload: memoryview) -> np.ndarray:
        """Decode tokens, i32 [n], every id inside the vocabulary. Raises CallError."""
        tokens = read_tensor(payload)
        check_tokens(self.engine(), tokens)
        return tokens

    def close(self) -> None:
        if self.speculation is not None:
            self.speculation.close()
        if self.model is not None:
            self.model.close()
