"""Judges rows and tokens of an exact request that were computed again by kernels of the same class.

An exact request's rows have the same bits wherever such kernels compute them, so one different bit is an
error. The check needs whole pieces of the prompt, because the rows of a piece are computed together; rows
after the prompt are computed one by one. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from swarmllm.pipeline.check.sampling import EVIDENCE_BYTES_MAX, STRETCH_ROWS, Chance, Stretch
from swarmllm.pipeline.check.thresholds import TokenDistance
from swarmllm.pipeline.check.verdict import (
    Evidence,
    Match,
    Sampled,
    TokenEvidence,
    Verdict,
    judge,
    judge_tokens,
)
from swarmllm.pipeline.request import exact_chunk_tokens
from swarmllm_proto.limits import EXACT_ROWS
from swarmllm_proto.tensors import Tensor

_NONE: Final = -1.0
"""A distance that no two rows have: only equal bits are right."""
_EXACT: Final = TokenDistance(math.inf, 0.001, 0.001)
"""Of log-probabilities of equal logits. (Fingerprints that differ at all are not equal.)"""


def exact_batches(n_rows: int, n_prompt: int, chunk_tokens: int) -> Iterator[slice]:
    """Of rows [0, n_rows): whole pieces of the prompt, then rows that the worker computes one by one."""
    at_once = exact_chunk_tokens(chunk_tokens)
    position = 0
    while position < n_rows:
        is_prompt = position < n_prompt
        end = min(position + at_once, n_prompt) if is_prompt else position + STRETCH_ROWS
        yield slice(position, min(end, n_rows))
        position = min(end, n_rows)


def draw_piece(n_rows: int, n_prompt: int, row_bytes: int, chance: Chance, first: int = 0) -> Stretch | None:
    """Of rows `first` to `n_rows`, which a stage computed, some that end with a piece of the prompt, or come
    after the prompt; None: not even the first piece is small enough."""
    n_reached = min(n_rows, EVIDENCE_BYTES_MAX // row_bytes)
    if n_reached < n_prompt:
        n_reached -= n_reached % EXACT_ROWS
    starts = range(first - first % EXACT_ROWS, n_reached, EXACT_ROWS)
    if first >= n_reached or not starts:
        return None
    start = starts[int(chance() * len(starts))]
    position = max(first, start)
    return Stretch(position, min(start + EXACT_ROWS, n_reached) - position)


def judge_bits(evidence: Evidence | TokenEvidence, results: Tensor | list[Sampled]) -> tuple[Verdict, Match]:
    """`results`: rows of the stretch, or tokens sampled from the same rows, in order."""
    if not isinstance(evidence, TokenEvidence):
        assert not isinstance(results, list)
        return judge(evidence, results, _NONE)
    assert isinstance(results, list)
    verdict, match = judge_tokens(evidence, results, greedy=True, limit=_EXACT)
    if match is Match.EQUAL or verdict is Verdict.UNKNOWN:
        return verdict, match
    return (Verdict.DISPUTED_BEFORE if evidence.is_agreed is None else Verdict.WRONG), Match.WRONG


def are_equal(one: Tensor | list[Sampled], other: Tensor | list[Sampled]) -> bool:
    """Rows bit for bit; tokens by their ids."""
    if isinstance(one, list) or isinstance(other, list):
        return (
            isinstance(one, list)
            and isinstance(other, list)
            and [(each.token, each.is_end) for each in one] == [(each.token, each.is_end) for each in other]
        )
    return one.shape == other.shape and np.array_equal(one.view(np.uint32), other.view(np.uint32))
