"""Encodes whole texts in worker processes of their own kind, one for each model of the BERT kind in use.

Texts of one model are encoded one after the other, each with a deadline, at which the process is killed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from swarmllm.errors import InvalidRequest, WorkerError
from swarmllm.workerpool.encoder_workers import EncoderWorkers
from swarmllm.workerpool.forward_result import Hidden, checked_tensor
from swarmllm.workerpool.hosted_models import HostedModels
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.frames import Payload
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import EncodeText, OpenTextEncoder, PoolingKind, TextEncoded, TextEncoderOpened
from swarmllm_proto.tensors import encode_tensor

TEXT_TIMEOUT_S: Final = 120.0
"""For one text."""


@dataclass(frozen=True, slots=True)
class EncodedText:
    values: Hidden
    """f32 [n_outputs]: a vector, not normalised, or scores; f32 [n, n_embd] where the model pools nothing."""
    pooling: PoolingKind
    n_tokens: int


class TextEncoders:
    def __init__(self, hosts: HostedModels) -> None:
        self._hosts = hosts
        self._workers = EncoderWorkers[ModelId, TextEncoderOpened](hosts, "texts", TextEncoderOpened)

    async def encode_text(
        self, model: ModelFile, text: str | npt.NDArray[np.int32], document: str | None = None
    ) -> EncodedText:
        """A text, or i32 [n] token ids; `document`: what the text asks about, for a model that ranks. Raises
        ContextFull for a text that is too long, InvalidRequest, BadModel, WorkerDied (also at the deadline),
        WorkerError, Overloaded."""
        async with self._workers.turn(model.model_id) as encoder:
            worker, opened = await self._workers.open(
                encoder, model.model_id, model, partial(self._open, model)
            )
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
        await self._workers.end(lambda key: key == model_id, "was stopped because its model is forgotten")

    def _open(self, model: ModelFile, call_id: int) -> OpenTextEncoder:
        return OpenTextEncoder(id=call_id, path=str(model.path), n_threads=self._hosts.settings.n_threads)
