"""Adds up evidence about sampled tokens over all checks of a node, because one check has too few tokens.
Pure.

A token that was sampled is a function of the logits and a seed that the origin knows. Where another node
computes it again with other kernels, the logits differ a little, and now and then another token comes out.
Such differences are about as often in favour of the likelier of the two tokens as of the less likely one,
however large they are. A last stage that takes the likeliest token instead of drawing one differs in one
direction only, one that draws from a flatter distribution in the other. Such differences
are small, too: where much probability lies between the two tokens (`likelihood.py`), the token was drawn
from other logits or with another number. An end of the text that the seed does not give, and that is not even
among the likeliest tokens, is rare at honest nodes, the more so the less likely it is: a token of which the
model says one in a million ends one text in a million. A stage says so itself, by the logits that come with
its tokens; that is looked at in every request.

Each of these is a sequential test (a CUSUM of log-likelihood ratios). Its sum starts again at 0 whenever
honesty is the better explanation, so an honest past does not cover later cheating.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from swarmllm.pipeline.check.verdict import Sampled, TokenEvidence
from swarmllm_proto.identifiers import NodeId

CERTAIN: Final = 12.0
"""A sum of log-likelihood ratios that accuses: by chance it is reached once in e^12 (160,000) observations
at least, if honest nodes deviate as often as `_DeviationRates.honest` says; they deviate less often."""
TALLIES_MAX: Final = 1024
"""Pairs of nodes that are remembered; the one that was longest without a check is forgotten."""


EndChance = Callable[[int, Sampled], float]
"""How likely it is at most that the text of an honest node ends with the token that was told."""
IsFar = Callable[[int, Sampled], bool]
"""Whether a token that was told is far from the one that was sampled again."""


class Bias(StrEnum):
    """A direction that the deviations of a node have in common."""

    LIKELIER = "its tokens are likelier than those that its seeds give"
    UNLIKELIER = "its tokens are less likely than those that its seeds give"
    FAR = "its tokens are not those that its seeds give"
    ENDS_EARLY = "it ends texts where the model does not"


@dataclass(frozen=True, slots=True)
class _DeviationRates:
    """The share of observations that count against a node."""

    honest: float
    """At most."""
    cheat: float

    def step(self, *, against: bool) -> float:
        if against:
            return math.log(self.cheat / self.honest)
        return math.log((1 - self.cheat) / (1 - self.honest))


_CALIBRATION: Final = 0.1
"""How a chance becomes odds: half of them say nothing, the others are this times the chance to the power of
this less one. On average, honest nodes come to odds of at most 1."""


def _odds_of_chance(chance: float) -> float:
    """The logarithm. `chance`: of an honest node to come to something as unlikely as that."""
    return math.log(0.5 + 0.5 * _CALIBRATION * max(chance, 1e-30) ** (_CALIBRATION - 1))


ODDS: Final = {
    Bias.LIKELIER: _DeviationRates(honest=0.7, cheat=0.98),
    Bias.UNLIKELIER: _DeviationRates(honest=0.7, cheat=0.98),
    Bias.FAR: _DeviationRates(honest=0.003, cheat=0.05),
    Bias.ENDS_EARLY: _DeviationRates(honest=0.02, cheat=0.9),
}


@dataclass(slots=True)
class Tallies:
    """The sums of each node, kept apart by the node that computed its tokens again: that node may lie too, so
    their observations are not mixed."""

    _sums: OrderedDict[tuple[NodeId, NodeId], dict[Bias, float]] = field(default_factory=OrderedDict)
    """By (node, who computed); of what a node told itself, by (node, node)."""
    _accused: OrderedDict[NodeId, NodeId] = field(default_factory=OrderedDict)
    """Nodes of which something was certain, each by the first who computed that."""

    def add(
        self,
        node_id: NodeId,
        by: NodeId,
        evidence: TokenEvidence,
        sampled: Sequence[Sampled],
        *,
        is_greedy: bool = False,
        is_far: IsFar | None = None,
        end_chance: EndChance | None = None,
    ) -> Bias | None:
        """Tokens of `node_id` were sampled again by `by`. What is certain now, if anything; it is reported
        once, then the sum begins anew. `is_far`, `end_chance`: None where nothing can be said about that."""
        steps = observations(evidence, sampled, is_greedy=is_greedy, is_far=is_far, end_chance=end_chance)
        return self._add(node_id, by, steps)

    def add_end(self, node_id: NodeId, chance: float) -> bool:
        """A text of `node_id` ended with a token that by its own logits has at most this chance to end a text
        as long as that. Whether it is certain that it ends texts where the model does not."""
        return self._add(node_id, node_id, [(Bias.ENDS_EARLY, _odds_of_chance(chance))]) is not None

    def _add(self, node_id: NodeId, by: NodeId, steps: Iterable[tuple[Bias, float]]) -> Bias | None:
        sums = self._sums.setdefault((node_id, by), dict.fromkeys(Bias, 0.0))
        self._sums.move_to_end((node_id, by))
        while len(self._sums) > TALLIES_MAX:
            self._sums.popitem(last=False)
        for bias, step in steps:
            sums[bias] = max(0.0, sums[bias] + step)
        certain = next((bias for bias, total in sums.items() if total >= CERTAIN), None)
        if certain is not None:
            sums[certain] = 0.0
        return certain

    def is_confirmed(self, node_id: NodeId, by: NodeId) -> bool:
        """What `by` computed accuses `node_id`: whether what another one computed has done so before."""
        first = self._accused.setdefault(node_id, by)
        self._accused.move_to_end(node_id)
        while len(self._accused) > TALLIES_MAX:
            self._accused.popitem(last=False)
        return first != by

    def accuser(self, node_id: NodeId) -> NodeId | None:
        """Who computed what first accused it."""
        return self._accused.get(node_id)


def observations(
    evidence: TokenEvidence,
    sampled: Sequence[Sampled],
    *,
    is_greedy: bool = False,
    is_far: IsFar | None = None,
    end_chance: EndChance | None = None,
) -> Iterator[tuple[Bias, float]]:
    """Each with the logarithm of the odds by which it speaks against the node. As `Tallies.add`."""
    if not is_greedy:
        yield from _of_draws(evidence, sampled, end_chance)
    if is_far is not None:
        for reported, again in zip(evidence.reported, sampled, strict=False):
            yield Bias.FAR, ODDS[Bias.FAR].step(against=is_far(reported, again))


def _of_draws(
    evidence: TokenEvidence, sampled: Sequence[Sampled], end_chance: EndChance | None
) -> Iterator[tuple[Bias, float]]:
    # An end is looked at because it came, which is no matter of chance.
    free = evidence.reported[:-1] if evidence.is_ended else evidence.reported
    for reported, again in zip(free, sampled, strict=False):
        ranks = {token: rank for rank, (token, _) in enumerate(again.likeliest)}
        told_rank, again_rank = (ranks.get(token, len(ranks)) for token in (reported, again.token))
        if told_rank != again_rank:
            yield Bias.LIKELIER, ODDS[Bias.LIKELIER].step(against=told_rank < again_rank)
            yield Bias.UNLIKELIER, ODDS[Bias.UNLIKELIER].step(against=told_rank > again_rank)
    if evidence.is_ended and sampled and len(sampled) == len(evidence.reported):
        yield Bias.ENDS_EARLY, _odds_of_end(evidence.reported[-1], sampled[-1], end_chance)


def _odds_of_end(reported: int, again: Sampled, end_chance: EndChance | None) -> float:
    rates, against = ODDS[Bias.ENDS_EARLY], is_unexplained_end(reported, again)
    odds = rates.step(against=against)
    if not against or end_chance is None:
        return odds
    # Of so few ends that are unexplained at all, at most this part is as unlikely as this one.
    return odds + _odds_of_chance(min(1.0, end_chance(reported, again) / rates.honest))


def is_unexplained_end(reported: int, again: Sampled) -> bool:
    """The last stage said that the model ended its text with the token `reported`."""
    if reported == again.token:
        return not again.is_end
    return bool(again.likeliest) and all(token != reported for token, _ in again.likeliest)
