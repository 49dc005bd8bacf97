"""Tokens computed one after the other, or a few at a time."""

from __future__ import annotations

import numpy as np

from swarmllm_workers.engine.libllama import Context


def step_logits(context: Context, tokens: np.ndarray, start: int, n_rows: int) -> np.ndarray:
    """f32 [len(tokens) - start, n_vocab]: the logits of the tokens from `start` on, `n_rows` at a time, in
    sequence 0, which has those before."""
    found = []
    for at in range(start, len(tokens), n_rows):
        rows = tokens[at : at + n_rows]
        context.decode(rows, np.arange(at, at + len(rows)), 0, True)
        found += [context.logits(row).copy() for row in range(len(rows))]
    return np.array(found)
