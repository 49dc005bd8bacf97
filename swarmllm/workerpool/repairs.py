"""What workers keep of requests whose pipeline broke: hold them, resume them, read their journals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from swarmllm.models.layers import LayerRange
from swarmllm.workerpool.forward_result import Hidden, checked_tensor
from swarmllm.workerpool.hosts import Hosts
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import (
    Done,
    HoldRequest,
    KeptRows,
    LayerResult,
    ReadJournal,
    Resumed,
    ResumeRequest,
)


class Repairs:
    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts

    async def hold(self, model_id: ModelId, request_id: str, hold_s: float) -> None:
        """Stop the request, but keep its KV and its journal for `resume`; unknown requests and absent workers
        are fine."""
        if (hosted := self._hosts.get(model_id)) is not None:
            hosted.forget(request_id)
        if (worker := self._hosts.worker(model_id)) is not None:
            message = HoldRequest(id=worker.new_id(), request_id=request_id, hold_s=hold_s)
            await worker.call(message, Done, timeout_s=self._hosts.settings.call_timeout_s)

    async def resume(
        self,
        model: ModelFile,
        *,
        request_id: str,
        resumes: str,
        n_rows: int,
        ranges: Sequence[LayerRange],
    ) -> tuple[KeptRows, ...]:
        """Give what is held of `resumes` to a request that has nothing yet: at most `n_rows` rows. What there
        is, for each range. Raises as `forward` does."""
        worker = await self._hosts.of(model).worker_for(request_id, 0)
        message = ResumeRequest(
            id=worker.new_id(),
            request_id=request_id,
            resumes=resumes,
            n_rows=n_rows,
            ranges=tuple((layers.start, layers.end) for layers in ranges),
        )
        resumed, _ = await worker.call(message, Resumed, timeout_s=self._hosts.settings.call_timeout_s)
        return resumed.kept

    async def read_journal(
        self, model: ModelFile, *, request_id: str, end: int, position: int, n_rows: int
    ) -> Hidden:
        """f32 [n_rows, n_embd]: what the layers before `end` gave. Raises as `forward` does."""
        worker = await self._hosts.of(model).worker_for(request_id, position)
        message = ReadJournal(
            id=worker.new_id(), request_id=request_id, end=end, position=position, n_rows=n_rows
        )
        _, payload = await worker.call(message, LayerResult, timeout_s=self._hosts.settings.call_timeout_s)
        return checked_tensor(payload, "journal", np.dtype(np.float32), 2, n_rows=n_rows)
