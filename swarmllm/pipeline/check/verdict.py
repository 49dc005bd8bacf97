"""Judges rows that were computed again. Pure.

Rows travel between nodes without loss, so the rows that one stage sent and the next one received must have
equal bits. (A stage that rounds its rows does so before it sends or keeps them.) The results of two nodes for
the same rows may differ: other kernels, batches, types of KV and concurrent requests change the rounding.
Equal bits are reported, and a limit is held against the stage (`thresholds.py`), which lies between what
honest nodes differ by and what cheating does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np

from swarmllm.pipeline.check import fingerprints
from swarmllm.pipeline.check.reported_logprobs import ReportedLogprobs, logprob_distance
from swarmllm.pipeline.check.thresholds import ANY, TOLERANCE, TokenDistance
from swarmllm_proto.ipc import TokenLogprob
from swarmllm_proto.tensors import BLOCK_VALUES, Tensor, rounded

WORST_ROW: Final = 2.0
"""In the mean over the rows of a stretch a single one counts for no more: rows of another text are about so
far away."""

LIKELY: Final = 2.0
"""A greedy token may be so much less likely than the likeliest one (natural logarithm): logits of honest
nodes differ by some tenths."""
UNLIKELY_MIN: Final = 3
UNLIKELY_PART: Final = 0.75
"""So many, and such a part, of tokens that were drawn at random are not even among the likeliest ones: then
they were not drawn from this model's distribution."""


class Match(StrEnum):
    EQUAL = "equal bits"
    CLOSE = "within tolerance"
    WRONG = "other numbers"


class Verdict(StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    """The stage is."""
    DISPUTED_AFTER = "the stage and the one after it contradict each other"
    DISPUTED_BEFORE = "the stage and the one before it contradict each other"
    UNKNOWN = "unknown"
    """Nothing follows: rows are not there any more."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence about one stretch of one stage. Rows: f32 [n, n_embd]."""

    came_in: Tensor
    """All rows before the stretch, and its own."""
    n_rows: int
    """Of the stretch."""
    sent: Tensor | None
    """By the stage, as it says; None: it does not say."""
    received: Tensor | None
    """From it, as the next one says."""
    is_received_here: bool
    """The next one is this node, or both have signed for the same rows."""
    is_agreed: bool | None
    """The stage says that the same rows came in; None: it does not say. (Of rows that this node sent,
    true.)"""
    is_rounded: bool = False
    """The stage was to round what it sent."""


def distance(recomputed: Tensor, reported: Tensor, came_in: Tensor, *, is_rounded: bool = False) -> float:
    """Mean over the rows of a stretch: length of the difference / length of what the layers added to the row.
    0: alike; rows that no layer has touched are 1 away. `is_rounded`: of what was told, not of what was
    recomputed; what rounding alone may have done does not count."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        differences = reported.astype(np.float64) - recomputed
        if is_rounded:
            differences = np.maximum(np.abs(differences) - _rounding_error(recomputed), 0)
        off = np.linalg.norm(differences, axis=1)
        added = np.linalg.norm(recomputed.astype(np.float64) - came_in, axis=1)
        parts = np.where(off == 0, 0.0, off / added)
    return float(np.mean(np.minimum(np.where(np.isnan(parts), WORST_ROW, parts), WORST_ROW)))


def _rounding_error(rows: Tensor) -> Tensor:
    """The most by which rounding moves each value: half a step of its block of 32, and what the scale, an
    f16, is off by. By the recomputed rows: who sent the others has no say in it."""
    if rows.shape[1] % BLOCK_VALUES:
        return np.zeros(rows.shape)
    largest = np.abs(rows.astype(np.float64)).reshape(len(rows), -1, BLOCK_VALUES).max(axis=2)
    off = largest / 127 / 2 + np.maximum(largest * 2.0**-11, 127 * 2.0**-25)
    return np.repeat(off, BLOCK_VALUES, axis=1)


def compare(
    recomputed: Tensor,
    reported: Tensor,
    came_in: Tensor,
    *,
    is_rounded: bool = False,
    limit: float = TOLERANCE,
) -> Match:
    """`came_in`: the same rows before the layers. `is_rounded`: of what was told. `limit`: of `distance`."""
    if recomputed.shape != reported.shape:
        return Match.WRONG
    if (rounded(recomputed) if is_rounded else recomputed).tobytes() == reported.tobytes():
        return Match.EQUAL
    off = distance(recomputed, reported, came_in, is_rounded=is_rounded)
    return Match.CLOSE if off <= limit else Match.WRONG


def before_computing(evidence: Evidence | TokenEvidence) -> Verdict | None:
    """What can be said without computing anything; None: nothing yet."""
    if isinstance(evidence, TokenEvidence):
        if not evidence.is_possible:
            return Verdict.WRONG
        return Verdict.DISPUTED_BEFORE if evidence.is_agreed is False else None
    if evidence.sent is None and evidence.received is None:
        return Verdict.UNKNOWN
    if evidence.is_agreed is False:
        return Verdict.DISPUTED_BEFORE
    return None


def judge(evidence: Evidence, recomputed: Tensor, limit: float = TOLERANCE) -> tuple[Verdict, Match]:
    """`recomputed`: the stretch, by layers that are trusted. `limit`: of the distance. The match is that of
    what went on."""

    def match_of(rows: Tensor) -> Match:
        return compare(recomputed, rows, own, is_rounded=evidence.is_rounded, limit=limit)

    own = evidence.came_in[-evidence.n_rows :]
    sent, received = evidence.sent, evidence.received
    went_on = received if received is not None else sent
    assert went_on is not None, "see before_computing"
    match = match_of(went_on)
    says_right = sent is not None and match_of(sent) is not Match.WRONG
    if match is not Match.WRONG:
        return (Verdict.RIGHT if sent is None or says_right else Verdict.WRONG), match
    if evidence.is_agreed is None:
        return Verdict.DISPUTED_BEFORE, match
    if evidence.is_received_here or (sent is not None and not says_right):
        return Verdict.WRONG, match
    return Verdict.DISPUTED_AFTER, match


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token that was sampled again."""

    token: int
    likeliest: tuple[tuple[int, float], ...] = ()
    """(token, logarithm of its probability), the likeliest first; empty: not told."""
    is_end: bool = False
    """The model ends its text with it."""
    fingerprint: Tensor | None = None
    """Of its logits, f32 [N_VALUES], where the computing node tells it."""
    reported_logprob: float | None = None
    """Of the token that was told; None: see `likeliest`."""
    apart: float | None = None
    """So much probability lies between the random number and the token that was told; None: not known."""


@dataclass(frozen=True, slots=True)
class TokenEvidence:
    """The evidence about tokens of a last stage."""

    came_in: Tensor
    """Rows f32 [n, n_embd] up to the one that the last of these tokens was sampled from. Where the stage has
    all layers, the prompt's tokens instead, i32 [n]."""
    first: int
    """Index of the first of these tokens."""
    before: tuple[int, ...]
    """All that were generated before."""
    reported: tuple[int, ...]
    """As the stage told this node."""
    is_agreed: bool | None
    """As in Evidence."""
    is_ended: bool = False
    """The stage said that the model ended its text with the last of these tokens."""
    fingerprints: Tensor | None = None
    """That came with these tokens, f32 [n, N_VALUES]; None: the stage tells none."""
    is_possible: bool = True
    """The fingerprints agree with each other and with the tokens, and so do the log-probabilities."""
    logprobs: tuple[ReportedLogprobs, ...] = ()
    """That came with these tokens; empty: nobody asked for them."""


def fingerprints_of(sampled: Sequence[Sampled]) -> Tensor | None:
    """f32 [n, N_VALUES]; None: one of them has none."""
    found = [each.fingerprint for each in sampled if each.fingerprint is not None]
    return np.stack(found) if found and len(found) == len(sampled) else None


def fingerprint_distance(evidence: TokenEvidence, sampled: Sequence[Sampled]) -> float | None:
    """How far the fingerprints that were told are from those of the same rows; None: one has none."""
    both = _both_fingerprints(evidence, sampled)
    return None if both is None else fingerprints.distance(*both)


def _both_fingerprints(evidence: TokenEvidence, sampled: Sequence[Sampled]) -> tuple[Tensor, Tensor] | None:
    """Those of the tokens that were sampled again, and those that were told."""
    again = fingerprints_of(sampled)
    if evidence.fingerprints is None or again is None:
        return None
    reported = evidence.fingerprints[: len(again)]
    for at, (token, each) in enumerate(zip(evidence.reported, sampled, strict=False)):
        if each.reported_logprob is None and each.token != token:
            # Another holder tells the logit of the token that it took itself.
            again[at, fingerprints.OWN] = reported[at, fingerprints.OWN]
    return again, reported


def is_drawn_falsely(evidence: TokenEvidence, sampled: Sequence[Sampled], distance_max: float) -> bool:
    """Whether a token was not drawn from the very logits that were told with it: more probability than
    `distance_max` lies between it and the random number."""
    both = _both_fingerprints(evidence, sampled)
    if both is None:
        return False
    near = fingerprints.distances(*both) <= fingerprints.NEAR
    return any(
        is_near and reported != again.token and again.apart is not None and again.apart > distance_max
        for reported, again, is_near in zip(evidence.reported, sampled, near, strict=False)
    )


def token_distance(evidence: TokenEvidence, sampled: Sequence[Sampled]) -> TokenDistance:
    """Of what both tell; 0 where there is nothing."""
    off = logprob_distance(evidence.logprobs, _computed(evidence, sampled))
    return TokenDistance(fingerprint_distance(evidence, sampled) or 0.0, off.size, off.shift)


def with_recomputed(evidence: TokenEvidence, again: Sequence[Sampled]) -> TokenEvidence:
    """With what was computed of the same rows in place of what was told."""
    logprobs = tuple(
        tuple(TokenLogprob(each.token, known[each.token], b"") for each in reported if each.token in known)
        for reported, known in zip(evidence.logprobs, _computed(evidence, again), strict=False)
    )
    return replace(evidence, fingerprints=fingerprints_of(again), logprobs=logprobs)


def _computed(evidence: TokenEvidence, sampled: Sequence[Sampled]) -> list[dict[int, float]]:
    """Log-probabilities of some tokens, for each of the answer."""
    return [
        dict(again.likeliest) | ({} if again.reported_logprob is None else {reported: again.reported_logprob})
        for reported, again in zip(evidence.reported, sampled, strict=False)
    ]


def judge_tokens(
    evidence: TokenEvidence,
    sampled: Sequence[Sampled],
    *,
    greedy: bool,
    limit: TokenDistance = ANY,
    distance_max: float = math.inf,
) -> tuple[Verdict, Match]:
    """`sampled`: from the same rows, in order; each after the tokens that were told. `limit`: of
    `token_distance`; `distance_max`: of `is_drawn_falsely`."""
    pairs = list(zip(evidence.reported, sampled, strict=False))
    if not pairs:
        return Verdict.UNKNOWN, Match.WRONG
    ends_falsely = evidence.is_ended and len(pairs) == len(evidence.reported) and _ends_falsely(*pairs[-1])
    off = token_distance(evidence, sampled)
    is_above = any(one > most for one, most in zip(off, limit, strict=True))
    if is_above or is_drawn_falsely(evidence, sampled, distance_max):
        return Verdict.DISPUTED_BEFORE if evidence.is_agreed is None else Verdict.WRONG, Match.WRONG
    if all(reported == again.token for reported, again in pairs) and not ends_falsely:
        return Verdict.RIGHT, Match.CLOSE if off.logits else Match.EQUAL
    n_unlikely = sum(_is_unlikely(reported, again, greedy=greedy) for reported, again in pairs)
    n_allowed = 0 if greedy else max(UNLIKELY_MIN, math.ceil(UNLIKELY_PART * len(pairs))) - 1
    if n_unlikely <= n_allowed and not ends_falsely:
        return Verdict.RIGHT, Match.CLOSE
    return (Verdict.DISPUTED_BEFORE if evidence.is_agreed is None else Verdict.WRONG), Match.WRONG


def _ends_falsely(reported: int, again: Sampled) -> bool:
    """Whether the stage ended the text with a token that ends no text."""
    return reported == again.token and not again.is_end


def _is_unlikely(reported: int, again: Sampled, *, greedy: bool) -> bool:
    if reported == again.token or not again.likeliest:
        return False
    found = [logprob for token, logprob in again.likeliest if token == reported]
    return not found or (greedy and found[0] < again.likeliest[0][1] - LIKELY)
