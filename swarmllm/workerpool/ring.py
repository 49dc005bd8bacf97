"""Calls by which workers of neighbouring stages learn to send jobs to each other without the daemons."""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType

from swarmllm.workerpool.hosted_models import HostedModels
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.ipc import CloseLinks, Done, Sampling, StageTiming, TakeLink, TakePrompt, TakeSeat
from swarmllm_proto.ipc.base import RowFormat
from swarmllm_proto.picture_runs import PictureRun
from swarmllm_proto.tensors import encode_tensor

CALL_TIMEOUT_S: Final = 10.0
"""A worker in the middle of a long prompt answers after its step; a link may wait that long, but no more."""

_KEY_AND_NONCE: Final = Struct("<32sQ")


@dataclass(frozen=True, slots=True)
class RingHint:
    """Sent with a forward whose result the worker may pass to the next stage itself."""

    seat: int | None = None
    """The stage."""
    timings: tuple[StageTiming, ...] = ()
    """Of the stages before it."""
    waited_s: float = 0.0
    """Since the job came to this node."""
    resent: bool = False
    """It may have come by a link before."""
    number: int | UnsetType = UNSET
    """As in `LayerForward`, as the next one."""
    fresh: int | UnsetType = UNSET


NO_RING: Final = RingHint()


class RingCalls:
    """Calls to the running worker. All raise what `Worker.call` raises, and do nothing where no worker
    runs."""

    def __init__(self, hosts: HostedModels) -> None:
        self._hosts = hosts

    def pid(self, model_id: ModelId) -> int | None:
        """Of the process that has the links; another one has none of them."""
        worker = self._hosts.worker(model_id)
        return worker.pid if worker is not None else None

    async def take_seat(
        self,
        model_id: ModelId,
        *,
        request_id: str,
        stage: int,
        start: int,
        end: int,
        before: NodeId,
        after: NodeId,
        origin: NodeId,
        n_prompt_tokens: int,
        sampling: Sampling | None,
        row_format: RowFormat = "f32",
        exact_rows: int = 0,
        picture_runs: tuple[PictureRun, ...] = (),
        owner: str = "",
        ring: str = "",
    ) -> None:
        """Before any decode job of the stage can come by a link. `sampling`: of the last stage.
        `row_format`: in which rows go to the next one. `exact_rows`, `picture_runs`, `owner`: as in
        `WorkerPool.forward`. `ring`: as in `TakeSeat`."""
        worker = self._hosts.worker(model_id)
        if worker is None:
            return
        message = TakeSeat(
            id=worker.new_id(),
            request_id=request_id,
            stage=stage,
            start=start,
            end=end,
            before=before,
            after=after,
            origin=origin,
            n_prompt_tokens=n_prompt_tokens,
            sampling=sampling,
            row_format=row_format,
            exact_rows=exact_rows,
            picture_runs=picture_runs,
            owner=owner or UNSET,
            ring=ring or UNSET,
        )
        await worker.call(message, Done, timeout_s=CALL_TIMEOUT_S)

    async def take_prompt(
        self,
        model_id: ModelId,
        *,
        request_id: str,
        stage: int,
        prompt: npt.NDArray[np.int32],
        begins: bool = False,
    ) -> None:
        """After its seat: what the last stage guesses from. `prompt`: i32 [n_prompt_tokens]. `begins`: as in
        `TakePrompt`."""
        worker = self._hosts.worker(model_id)
        if worker is None:
            return
        message = TakePrompt(id=worker.new_id(), request_id=request_id, stage=stage, begins=begins or UNSET)
        payload = b"".join(encode_tensor(prompt))
        await worker.call(message, Done, payload=payload, timeout_s=CALL_TIMEOUT_S)

    async def take_link(
        self,
        model_id: ModelId,
        peer: NodeId,
        direction: Literal["sending", "receiving"],
        descriptor: int,
        key: bytes,
        nonce: int,
    ) -> int | None:
        """Give the worker its end; the caller still has to close its own copy. Returns the worker's pid."""
        worker = self._hosts.worker(model_id)
        if worker is None:
            return None
        await worker.call(
            TakeLink(id=worker.new_id(), peer=peer, direction=direction),
            Done,
            payload=_KEY_AND_NONCE.pack(key, nonce),
            descriptor=descriptor,
            timeout_s=CALL_TIMEOUT_S,
        )
        return worker.pid

    async def close_links(self, model_id: ModelId, peer: NodeId) -> None:
        worker = self._hosts.worker(model_id)
        if worker is not None:
            await worker.call(CloseLinks(id=worker.new_id(), peer=peer), Done, timeout_s=CALL_TIMEOUT_S)
