"""Checks the result of a forward: a worker may be wrong, and its tensors go to other nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from swarmllm.errors import WorkerError
from swarmllm_proto.codec import decode_again, decode_scores
from swarmllm_proto.errors import BadMessage, BadTensor
from swarmllm_proto.ipc import Done, LayerResult, Scores, Token, TokensAgain, WorkerMessage
from swarmllm_proto.tensors import decode_tensor

Hidden = npt.NDArray[np.float32]
Want = Literal["hidden", "none", "token", "normed", "scores", "again"]


@dataclass(frozen=True, slots=True)
class ForwardResult:
    tensor: Hidden | None
    """f32 [n, n_embd], read-only, where "hidden" was wanted."""
    token: Token | None
    piece: bytes
    """UTF-8 to show with the token."""
    compute_s: float
    """Inside the worker."""
    scores: Scores = ()
    """Of each row, where "scores" were wanted."""
    onward: bool = False
    """It has gone to the next stage already, or had been here before."""
    again: TokensAgain = ()
    """What rows gave that were sampled "again"."""


def forward_result(
    answer: WorkerMessage,
    payload: memoryview,
    *,
    want: Want,
    n_rows: int,
    n_top: int = 0,
) -> ForwardResult:
    """Of the three answers that a Forward may have. `n_top`: likeliest tokens with each score. Raises
    WorkerError."""
    if isinstance(answer, Done):
        return ForwardResult(None, None, b"", 0.0, onward=True)
    if isinstance(answer, Token):
        return ForwardResult(None, answer, bytes(payload), answer.compute_s, onward=answer.onward)
    assert isinstance(answer, LayerResult)
    hidden = None
    if want in ("hidden", "normed") and not answer.onward:
        hidden = checked_tensor(payload, "hidden states", np.dtype(np.float32), 2, n_rows=n_rows)
    scores: Scores = ()
    if want == "scores":
        try:
            scores = decode_scores(payload, n_rows, n_top)
        except BadMessage as error:
            raise WorkerError(f"the worker returned broken scores: {error}") from error
        if len(scores) != n_rows:
            raise WorkerError(f"the worker returned scores of {len(scores)} rows instead of {n_rows}")
    again: TokensAgain = ()
    if want == "again":
        try:
            again = decode_again(payload, n_rows)
        except BadMessage as error:
            raise WorkerError(f"the worker returned broken tokens: {error}") from error
    return ForwardResult(hidden, None, b"", answer.compute_s, scores, onward=answer.onward, again=again)


def checked_tensor(
    payload: memoryview, what: str, dtype: np.dtype[Any], n_dimensions: int, *, n_rows: int | None = None
) -> npt.NDArray[Any]:
    try:
        array = decode_tensor(payload, field=what)
    except BadTensor as error:
        raise WorkerError(f"the worker returned broken {what}: {error}") from error
    if array.dtype != dtype or array.ndim != n_dimensions or (n_rows is not None and len(array) != n_rows):
        raise WorkerError(f"the worker returned {what} of the wrong kind: {array.dtype} {array.shape}")
    return array
