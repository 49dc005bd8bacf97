"""Judges log-probabilities that a last stage told with its tokens. Pure.

A log-probability is a logit less the logarithm of the sum over all tokens (the total). So of each token whose
logit and log-probability are both told, the difference is the same, but for what f16 rounds. And the same
rows give nearly the same when somebody computes them again. All of them are those of the model's own
distribution, whatever penalties, biases or a grammar make of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from swarmllm_proto.fingerprints import N_DRAWN, drawn_tokens
from swarmllm_proto.ipc import TokenLogprob
from swarmllm_proto.ipc.base import LOGPROB_MIN
from swarmllm_proto.tensors import Tensor

WORST: Final = 1.0
"""In the means a single difference counts for no more, nats."""
_F16: Final = 2.0**-10
"""Twice what f16 rounds, in parts of a value."""
_LEAST: Final = 0.01

ReportedLogprobs = tuple[TokenLogprob, ...]
"""Of one token: its own, then those of the likeliest."""


def total(reported: ReportedLogprobs, values: Tensor) -> float:
    """What lies between its logit and its log-probability, by its fingerprint, f32 [N_VALUES]; NaN: not
    known."""
    if not reported or reported[0].logprob <= LOGPROB_MIN:
        return math.nan
    return float(values[N_DRAWN + 1]) - reported[0].logprob


def are_possible(
    reported: Sequence[ReportedLogprobs],
    fingerprints: Tensor,
    tokens: Sequence[int],
    first: int,
    key: int,
    n_vocab: int,
) -> bool:
    """Whether there are logits with these fingerprints, f32 [n, N_VALUES], and these log-probabilities of the
    tokens, of which `first` is the index of the first."""
    return all(
        _is_possible(said, values, token, drawn_tokens(key, first + at, n_vocab))
        for at, (said, values, token) in enumerate(zip(reported, fingerprints, tokens, strict=True))
        if said
    )


def _is_possible(reported: ReportedLogprobs, values: Tensor, token: int, ids: Tensor) -> bool:
    likeliest = reported[1:]
    logprobs = [each.logprob for each in likeliest]
    is_ordered = all(one >= other for one, other in pairwise(logprobs))
    is_part = math.fsum(math.exp(each) for each in logprobs) <= 1 + _LEAST
    if reported[0].token != token or not is_ordered or not is_part:
        return False
    own, known = total(reported, values), dict(zip(ids.tolist(), values[:N_DRAWN].tolist(), strict=True))
    return all(
        abs(own - (logit - logprob)) <= _LEAST + _F16 * (abs(logit) + abs(float(values[N_DRAWN + 1])))
        for logit, logprob in _both(likeliest, float(values[N_DRAWN]), known)
        if not math.isnan(own) and logprob > LOGPROB_MIN
    )


def _both(
    likeliest: ReportedLogprobs, largest: float, known: dict[int, float]
) -> Iterator[tuple[float, float]]:
    """(logit, log-probability)"""
    for rank, each in enumerate(likeliest):
        if rank == 0:
            yield largest, each.logprob
        if each.token in known:
            yield known[each.token], each.logprob


class LogprobDistance(NamedTuple):
    """How far log-probabilities are from those of the same rows, in nats; means over tokens."""

    size: float
    """Of the differences, whatever their signs."""
    shift: float
    """Of the differences with their signs: rounding errors cancel there, what was added to all does not."""


def logprob_distance(
    reported: Sequence[ReportedLogprobs], again: Sequence[Mapping[int, float]]
) -> LogprobDistance:
    """0 where there is nothing that both tell. `again`: for each token of the answer the log-probabilities of
    some tokens, computed from the same rows."""
    sizes, shifts = [], []
    for said, known in zip(reported, again, strict=False):
        off = [
            min(max(each.logprob - known[each.token], -WORST), WORST)
            for each in said
            if each.token in known and min(each.logprob, known[each.token]) > LOGPROB_MIN
        ]
        if off:
            sizes.append(math.fsum(map(abs, off)) / len(off))
            shifts.append(math.fsum(off) / len(off))
    if not sizes:
        return LogprobDistance(0.0, 0.0)
    return LogprobDistance(math.fsum(sizes) / len(sizes), abs(math.fsum(shifts)) / len(shifts))
