"""Decodes and checks the tensors that come with messages."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from swarmllm_proto.errors import BadMessage, BadTensor
from swarmllm_proto.tensors import decode_tensor
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.errors import CallError


def read_tensor(payload: memoryview) -> np.ndarray:
    """Decode a tensor. Raises CallError bad_tensor."""
    return read_as(lambda: decode_tensor(payload, field="payload"))


def read_as(decode: Callable[[], np.ndarray]) -> np.ndarray:
    """Call `decode`, and map the errors of the protocol. Raises CallError bad_tensor, bad_message."""
    try:
        return decode()
    except BadTensor as error:
        raise CallError("bad_tensor", error.reason, error.field) from None
    except BadMessage as error:
        raise CallError("bad_message", error.reason, error.field) from None


def check_tokens(engine: Engine, tokens: np.ndarray) -> None:
    """Check that it is i32 [n] with every id inside the vocabulary. Raises CallError bad_tensor."""
    if tokens.dtype != np.int32 or tokens.ndim != 1:
        raise CallError("bad_tensor", "token ids are i32 [n]", "payload")
    engine.embedding.check(tokens)


def check_hidden(data: np.ndarray, n_embd: int) -> None:
    """Check that it is finite f32 [n, n_embd]. Raises CallError bad_tensor."""
    if data.dtype != np.float32 or data.ndim != 2:
        raise CallError("bad_tensor", f"hidden states are f32 [n, {n_embd}]", "payload")
    if data.shape[1] != n_embd:
        raise CallError("bad_tensor", f"rows are {data.shape[1]} wide, where {n_embd} are due", "payload")
    # Where the sum is finite, all of them are, and one call takes less time than two.
    if not math.isfinite(np.add.reduce(data, axis=None)) and not np.isfinite(data).all():
        raise CallError("bad_tensor", "hidden states hold NaN or infinity", "payload")
