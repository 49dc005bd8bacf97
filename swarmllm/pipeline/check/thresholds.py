"""Limits how far apart the rows of two honest nodes for the same input may be. Pure.

Bits are equal only where nothing but the request runs on the stage. Beside other requests its cells lie
elsewhere and its rows share batches, and the order of sums changes: distances up to 0.010 were measured
within one kind of kernels, as many as between kinds. The type of the keys and values does make a difference.
So there are two classes, one limit for two nodes of the same class and one for nodes of different classes
(`python -m bench.honest_rows` measures them).
A node that has the layers computes the rows with either type, and holds the first limit against the stage.

Both were measured with one model. In another model rounding may matter more, so no node is charged for a
distance up to `TOLERANCE` alone. The checking node then computes the rows twice, the second time in other
batches, and the distance between its own two results shows how much rounding matters in these rows. Where the
two are equal, as of rows over quantised KV, only the tolerance applies, unless the node has the layers: then
the distance between the types of KV counts, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

TOLERANCE: Final = 0.05
"""What is farther is wrong, whatever the classes are."""
SPREAD_MIN: Final = 0.001
"""Where an own second result is nearer than that, the other batches have shown nothing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for `verdict.distance`."""

    least: float
    """What is nearer is right."""
    of_spread: float
    """So many times the distance between two of the recomputing node's own results is right as well."""
    most: float = TOLERANCE
    """What is farther is wrong, whatever lies between these two."""

    def limit(self, spread: float) -> float:
        """Above it rows are wrong. `spread`: the distance between these two results."""
        if spread < SPREAD_MIN:
            return self.most
        return min(self.most, max(self.least, self.of_spread * spread))


class TokenDistance(NamedTuple):
    """How far what was told with tokens is from what is computed of the same rows; or the most that it may
    be."""

    logits: float
    """See `fingerprints.distance`."""
    size: float
    """Of log-probabilities, see `reported_logprobs.LogprobDistance`; so is `shift`."""
    shift: float


ANY: Final = TokenDistance(math.inf, math.inf, math.inf)


SAME_KV: Final = Limits(least=0.0135, of_spread=1.4)
OTHER_KV: Final = Limits(least=0.022, of_spread=2.2)
LOGITS_SAME_KV: Final = Limits(least=0.023, of_spread=1.6, most=0.1)
"""Of the distance of `fingerprints.distance`, of many tokens."""
LOGITS_OTHER_KV: Final = Limits(least=0.034, of_spread=2.0, most=0.1)


OF_KV_TYPES: Final = 0.75
"""This part of what lies between two types of KV shows as well how much rounding matters."""


def spread_with_kv(regrouped: float, between_types: float) -> float:
    """Of rows that this node computed in other batches, and with the other type of KV. Rows that attend to
    quantised KV are the same in all batches, so the first may be 0."""
    return max(regrouped, OF_KV_TYPES * between_types)


def limits(kv_type: str | None, recomputed_in: str | None) -> Limits:
    """By the types of KV that the two nodes announce; None: it announces none."""
    return SAME_KV if kv_type is not None and kv_type == recomputed_in else OTHER_KV


class TokenLimits(NamedTuple):
    """Of a `TokenDistance`."""

    logits: Limits
    size: Limits
    shift: Limits

    @property
    def least(self) -> TokenDistance:
        return TokenDistance(*(each.least for each in self))

    @property
    def most(self) -> TokenDistance:
        return TokenDistance(*(each.most for each in self))

    def limit(self, spread: TokenDistance) -> TokenDistance:
        """As `Limits.limit`. What the sizes say of roundings holds for shifts: of one pair of results, they
        may cancel by chance."""
        return TokenDistance(
            self.logits.limit(spread.logits), self.size.limit(spread.size), self.shift.limit(spread.size)
        )

    def of_tokens(self, n: int) -> TokenLimits:
        """For so many tokens."""
        return TokenLimits(*(of_tokens(each, n) for each in self))


TOKENS_SAME_KV: Final = TokenLimits(
    LOGITS_SAME_KV,
    size=Limits(least=0.06, of_spread=2.0, most=0.5),
    shift=Limits(least=0.04, of_spread=1.2, most=0.5),
)
TOKENS_OTHER_KV: Final = TokenLimits(
    LOGITS_OTHER_KV,
    size=Limits(least=0.08, of_spread=2.5, most=0.5),
    shift=Limits(least=0.06, of_spread=1.6, most=0.5),
)
"""Honest nodes came to sizes of 0.036 and 0.045 over 64 tokens, of 0.047 and 0.064 over 8, and to shifts of
0.006 and 0.013, and of 0.035 and 0.033 (`python -m bench.honest_heads`)."""
FEW_TOKENS: Final = 4.0
"""The fewer tokens there are, the more a single one weighs: of so many, limits are twice as large."""


def of_tokens(limits: Limits, n: int) -> Limits:
    """The limits of the distance of so many tokens."""
    more = 1 + FEW_TOKENS / max(1, n)
    return Limits(limits.least * more, limits.of_spread * more, limits.most * more)


def token_limits(kv_type: str | None, recomputed_in: str | None, n_tokens: int) -> TokenLimits:
    """`limits` for what is told with so many tokens."""
    is_same = limits(kv_type, recomputed_in) is SAME_KV
    return (TOKENS_SAME_KV if is_same else TOKENS_OTHER_KV).of_tokens(n_tokens)
