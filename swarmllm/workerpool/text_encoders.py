"""Encodes whole texts in worker processes of their own kind, one for each model of the BERT kind in use.

Texts of one model are encoded one after the other, each with a deadline, at which the process is killed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import trio

from swarmllm.errors import InvalidRequest, Overloaded, WorkerError
from swarmllm.supervision import spawn
from swarmllm.workerpool.forward_result import Hidden, checked_tensor
from swarmllm.workerpool.hosted_models import Hosts
from swarmllm.workerpool.settings import ModelFile
from swarmllm.workerpool.worker import Worker
from swarmllm_proto.frames import Payload
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import EncodeText, OpenTextEncoder, PoolingKind, TextEncoded, TextEncoderOpened
from swarmllm_proto.tensors import encode_tensor

log = logging.getLogger("swarmllm.workerpool")

TEXT_TIMEOUT_S: Final = 120.0
"""For one text."""
TURN_TIMEOUT_S: Final = 300.0
"""For its turn behind others."""


@dataclass(frozen=True, slots=True)
class EncodedText:
    values: Hidden
    """f32 [n_outputs]: a vector, not normalised, or scores; f32 [n, n_embd] where the model pools nothing."""
    pooling: PoolingKind
    n_tokens: int


@dataclass(slots=True)
class _Encoder:
    """One model, and the worker that has it open, if there is one."""

    turn: trio.Lock = field(default_factory=trio.Lock)
    worker: Worker | None = None
    model: ModelFile | None = None
    opened: TextEncoderOpened | None = None
    n_waiting: int = 0


class TextEncoders:
    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._by_model: dict[ModelId, _Encoder] = {}
        hosts.when_idle.append(self._stop_idle)

    async def encode_text(
        self, model: ModelFile, text: str | npt.NDArray[np.int32], document: str | None = None
    ) -> EncodedText:
        """A text, or i32 [n] token ids; `document`: what the text asks about, for a model that ranks. Raises
        ContextFull for a text that is too long, InvalidRequest, BadModel, WorkerDied (also at the deadline),
        WorkerError, Overloaded."""
        encoder = self._by_model.setdefault(model.model_id, _Encoder())
        async with _turn(encoder):
            worker, opened = await self._open(encoder, model)
            if document is not None and opened.pooling != "rank":
                raise InvalidRequest("this model does not rank documents.", field="model")
            if isinstance(text, str):
                message = EncodeText(id=worker.new_id(), text=text, document=document)
                payload: Payload = b""
            else:
                message, payload = EncodeText(id=worker.new_id()), encode_tensor(text)
            told, data = await worker.call(message, TextEncoded, payload=payload, timeout_s=TEXT_TIMEOUT_S)
        n_dimensions = 2 if opened.pooling == "none" else 1
        values = checked_tensor(data, "a text's values", np.dtype(np.float32), n_dimensions)
        if values.shape[-1] != opened.n_outputs or not values.size or not np.isfinite(values).all():
            raise WorkerError("the worker returned values of a text that cannot be used")
        return EncodedText(values, opened.pooling, told.n_tokens)

    async def forget(self, model_id: ModelId) -> None:
        """End the model's worker of this kind."""
        encoder = self._by_model.pop(model_id, None)
        if encoder is not None and encoder.worker is not None:
            await encoder.worker.stop("was stopped because its model is forgotten")

    async def _open(self, encoder: _Encoder, model: ModelFile) -> tuple[Worker, TextEncoderOpened]:
        is_open = encoder.worker is not None and encoder.worker.alive and encoder.model == model
        if is_open and encoder.worker is not None and encoder.opened is not None:
            return encoder.worker, encoder.opened
        if encoder.worker is not None:
            await encoder.worker.stop("was stopped because its model is to be opened anew")
            encoder.worker = None
        settings = self._hosts.settings
        worker = await Worker.spawn(
            (*self._hosts.command, "--texts", "--log-level", settings.log_level),
            self._hosts.socket_dir,
            start_timeout_s=settings.start_timeout_s,
            stop_timeout_s=settings.stop_timeout_s,
        )
        spawn(self._hosts.nursery(), "worker", worker.run)
        try:
            await worker.ready()
            message = OpenTextEncoder(id=worker.new_id(), path=str(model.path), n_threads=settings.n_threads)
            opened, _ = await worker.call(message, TextEncoderOpened, timeout_s=settings.load_timeout_s)
        except BaseException:
            worker.kill("could not open its model")
            raise
        log.info("worker %d encodes texts with model %s", worker.pid, model.model_id)
        encoder.worker, encoder.model, encoder.opened = worker, model, opened
        return worker, opened

    async def _stop_idle(self) -> None:
        for model_id, encoder in tuple(self._by_model.items()):
            worker = encoder.worker
            if encoder.n_waiting:
                continue
            if worker is None or not worker.alive:
                del self._by_model[model_id]
            elif trio.current_time() - worker.last_used_at >= self._hosts.settings.idle_timeout_s:
                del self._by_model[model_id]
                await worker.stop("was stopped because it was idle")


@asynccontextmanager
async def _turn(encoder: _Encoder) -> AsyncIterator[None]:
    """One after the other. Raises Overloaded where that takes too long."""
    encoder.n_waiting += 1
    try:
        try:
            with trio.fail_after(TURN_TIMEOUT_S):
                await encoder.turn.acquire()
        except trio.TooSlowError:
            raise Overloaded("too many texts wait for this model") from None
        try:
            yield
        finally:
            encoder.turn.release()
    finally:
        encoder.n_waiting -= 1
