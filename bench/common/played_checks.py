"""Plays requests of a stage that cheats until it gets no more work.

What is played: which requests are drawn for a check, and what the check says. The rows and tokens that it
judges were computed before, by honest nodes and by cheats (`bench.cheats`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from swarmllm.pipeline.check.fingerprints import is_possible
from swarmllm.pipeline.check.likelihood import IMPOSSIBLE, distance_max, end_chance, is_far, with_apart
from swarmllm.pipeline.check.reported_logprobs import ReportedLogprobs
from swarmllm.pipeline.check.sampling import (
    BATCHED_TOKENS,
    Budget,
    Stretch,
    draw_tokens,
    rate,
)
from swarmllm.pipeline.check.tallies import CERTAIN, Bias, observations
from swarmllm.pipeline.check.thresholds import (
    Limits,
    TokenLimits,
)
from swarmllm.pipeline.check.verdict import (
    Sampled,
    TokenEvidence,
    Verdict,
    judge_tokens,
    token_distance,
    with_recomputed,
)
from swarmllm.swarm.peers.trust import NEUTRAL
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.tensors import Tensor

N_PLAYS: Final = 200
N_REQUESTS: Final = 2000
CHECK_RATE: Final = 1 / 16
"""The default of `inference.check_rate`."""
RISES: Final = 0.01
"""Of the way to full trust, for a request that was served and for a check that was right."""
NO_ROWS: Final = np.zeros((1, 1), np.float32)
Check = Callable[[random.Random, bool], bool]
"""Whether a check of a request in which it cheated (true) or was honest takes its work away."""


@dataclass
class Answer:
    """Of a last stage."""

    reported: list[int]
    fingerprints: Tensor
    """That it told, f32 [n, N_VALUES]."""
    rows: Tensor
    """That came to it, f32 [n, n_embd]."""
    again: list[Sampled]
    regrouped: list[Sampled]
    """The same in other batches."""
    key: int
    is_ended: bool = False
    logprobs: tuple[ReportedLogprobs, ...] = ()
    """That it told."""


COST: Final = {"middle": 0.06, "last": 0.12}
"""Of a check, in requests (docs/security.md)."""


def requests_until_out(check: Check, generator: random.Random, cost: float, every: int = 1) -> int:
    """A stranger's, that cheats in each `every`th request; N_REQUESTS: it is never out."""
    score, budget = NEUTRAL, Budget(CHECK_RATE)
    for number in range(1, N_REQUESTS):
        is_drawn = generator.random() < budget.scaled(rate(score, CHECK_RATE))
        score += RISES * (1 - score)
        budget.served(1.0)
        if not is_drawn:
            continue
        budget.spend(cost)
        if check(generator, number % every == 0):
            return number
        score += RISES * (1 - score)
    return N_REQUESTS


def found(make: Callable[[], Check], cost: float, every: int, seed: int) -> str:
    """Requests until it is out: the median of all plays, and in parentheses the 95th percentile."""
    generator = random.Random(seed)
    counts = sorted(requests_until_out(make(), generator, cost, every) for _ in range(N_PLAYS))
    middle, most = counts[N_PLAYS // 2], counts[N_PLAYS * 95 // 100]
    if middle >= N_REQUESTS:
        n_found = sum(count < N_REQUESTS for count in counts)
        return "never" if not n_found else f"{n_found} of {N_PLAYS} within {N_REQUESTS}"
    return f"{middle} ({most})" if most < N_REQUESTS else f"{middle} (more than {N_REQUESTS})"


def of_rows(measured: Sequence[float], spreads: Sequence[float], allowed: Limits) -> Callable[[], Check]:
    """`spreads`: between the auditor's two results, of the same stretches."""
    is_wrong = [off > allowed.limit(spread) for off, spread in zip(measured, spreads, strict=True)]
    return lambda: lambda generator, cheats: cheats and generator.choice(is_wrong)


@dataclass(frozen=True)
class Seen:
    """What a check of some tokens of an answer says."""

    is_wrong: bool
    moves: Mapping[Bias, tuple[float, float]]
    """By what a sum of `Tallies` changes, and the most that it has at the end from any token on."""


class TokenChecks:
    """Of answers; each stretch is judged once."""

    def __init__(
        self, answers: Sequence[Answer], stated: Sampling, n_vocab: int, allowed: TokenLimits
    ) -> None:
        self._answers = answers
        self._stated = stated
        self._n_vocab = n_vocab
        self._allowed = allowed
        self._seen: dict[tuple[int, Stretch], Seen] = {}

    def draw(self, generator: random.Random) -> Seen:
        index = generator.randrange(len(self._answers))
        answer = self._answers[index]
        drawn = draw_tokens(
            0, len(answer.reported), 1, 4, generator.random, n_wanted=BATCHED_TOKENS, is_ended=answer.is_ended
        )
        assert drawn is not None
        if (index, drawn) not in self._seen:
            self._seen[index, drawn] = self._judged(answer, drawn)
        return self._seen[index, drawn]

    def _judged(self, answer: Answer, drawn: Stretch) -> Seen:
        stated, part = self._stated, slice(drawn.position, drawn.end)
        reported, fingerprints = tuple(answer.reported[part]), answer.fingerprints[part]
        is_ended, is_greedy = answer.is_ended and drawn.end == len(answer.reported), stated.temperature == 0
        possible = is_possible(
            fingerprints, reported, drawn.position, answer.key, self._n_vocab, is_likeliest=is_greedy
        )
        evidence = TokenEvidence(
            NO_ROWS,
            drawn.position,
            (),
            reported,
            True,
            is_ended,
            fingerprints,
            possible,
            answer.logprobs[part],
        )
        sampled = with_apart(answer.again[part], reported, stated, self._n_vocab)
        spread = token_distance(with_recomputed(evidence, answer.regrouped[part]), sampled)
        verdict, _ = judge_tokens(
            evidence,
            sampled,
            greedy=is_greedy,
            limit=self._allowed.of_tokens(len(reported)).limit(spread),
            distance_max=distance_max(stated, IMPOSSIBLE),
        )
        far = partial(is_far, sampling=stated, n_vocab=self._n_vocab)
        moves = dict.fromkeys(Bias, (0.0, 0.0))
        chance = partial(end_chance, sampling=stated, n_tokens=drawn.position + len(reported))
        for bias, step in observations(evidence, sampled, is_greedy=is_greedy, is_far=far, end_chance=chance):
            total, most = moves[bias]
            moves[bias] = total + step, max(0.0, most + step)
        return Seen(not possible or verdict is Verdict.WRONG, moves)


def of_tokens(cheating: TokenChecks, honest: TokenChecks) -> Callable[[], Check]:
    """`honest`: of the requests in which it does not cheat."""

    def make() -> Check:
        sums = dict.fromkeys(Bias, 0.0)

        def check(generator: random.Random, cheats: bool) -> bool:
            seen = (cheating if cheats else honest).draw(generator)
            for bias, (total, most) in seen.moves.items():
                sums[bias] = max(sums[bias] + total, most)
            return seen.is_wrong or max(sums.values()) >= CERTAIN

        return check

    return make
