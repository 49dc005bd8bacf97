"""How likely the chosen token was, and which others were likely.

The distribution is the model's own, softmax(logits), as in OpenAI's API and by default in llama.cpp's server
(`post_sampling_probs: false`): temperature, penalties, biases, grammars and truncation change what is drawn,
not what is told here. A token that was forced by them may so have a very low value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from swarmllm_proto.ipc import TokenLogprob

LOGPROB_MIN: Final = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI's choice."""
PIECE_MAX: Final = 1024
"""Bytes of a token's text that are told; the wire's limit."""


def logprobs(
    logits: np.ndarray, token: int, n_top: int, piece: Callable[[int], bytes]
) -> tuple[TokenLogprob, ...]:
    """`token`, then the `n_top` likeliest, the first of equals first. `logits` f32 [n_vocab]."""
    best = float(logits.max())
    log_total = best + float(np.log(np.exp(logits - np.float32(best)).sum(dtype=np.float64)))
    n_top = min(n_top, len(logits))
    top: list[int] = []
    if n_top:
        threshold = np.partition(logits, len(logits) - n_top)[len(logits) - n_top]
        candidates = np.flatnonzero(logits >= threshold)
        top = candidates[np.argsort(-logits[candidates], kind="stable")][:n_top].tolist()
    return tuple(
        TokenLogprob(each, _bounded(float(logits[each]) - log_total), piece(each)[:PIECE_MAX])
        for each in (token, *top)
    )


def _bounded(value: float) -> float:
    return min(max(value, LOGPROB_MIN), 0.0)
