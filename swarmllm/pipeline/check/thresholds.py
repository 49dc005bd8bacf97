"""Limits how far apart the rows of two honest nodes for the same input may be. Pure.

Bits are equal only where nothing but the request runs on the stage. Beside other requests its cells lie
elsewhere and its rows share batches, and the order of sums changes: distances up to 0.010 were measured
within one kind of kernels, as many as between kinds. What does make a difference is the type in which keys
and values are kept. So there are two classes, and a limit for nodes of one and one for nodes of two
(`python -m bench.honest_rows` measures them).

Both were measured with one model. In another one roundings may weigh more, so nobody is charged for a
distance up to `TOLERANCE` alone: who computes the rows again then does so twice, the second time in other
batches, and what lies between its own two results says how much roundings weigh in these very rows. Where
nothing lies between them, because fewer than 64 rows are there, only the tolerance is held against the stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TOLERANCE: Final = 0.05
"""What is farther is wrong, whatever the classes are."""
SPREAD_MIN: Final = 0.001
"""Where an own second result is nearer than that, the other batches have shown nothing."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the distance of `verdict.distance`."""

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


SAME_KV: Final = Limits(least=0.0135, of_spread=1.4)
OTHER_KV: Final = Limits(least=0.022, of_spread=2.2)
LOGITS_SAME_KV: Final = Limits(least=0.023, of_spread=1.6, most=0.1)
"""Of the distance of `fingerprints.distance`, of many tokens."""
LOGITS_OTHER_KV: Final = Limits(least=0.034, of_spread=2.0, most=0.1)


def limits(kv_type: str | None, recomputed_in: str | None) -> Limits:
    """By the types of KV that the two nodes announce; None: it announces none."""
    return SAME_KV if kv_type is not None and kv_type == recomputed_in else OTHER_KV


def limits_of_logits(kv_type: str | None, recomputed_in: str | None) -> Limits:
    """The same for fingerprints."""
    return LOGITS_SAME_KV if limits(kv_type, recomputed_in) is SAME_KV else LOGITS_OTHER_KV
