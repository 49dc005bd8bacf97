"""Shares the processor's time in a worker among those for whom it computes: a pure core, without a clock.

An owner is a node that asks for work, or all nodes together that have earned no trust; "" stands for the
node's own users. Within an owner works take turns. Work is charged in rows of a prompt times layers, where a
step counts as what it takes when it runs alone. So each of n owners goes on at least at an n-th of the speed
that it has alone, and what is gained by running their rows in one batch is everybody's. Only what runs while
several owners have work is charged: who is alone may use all of the time, and owes nothing for that later.
Own users count as OWN_WEIGHT times as many as all others together.

Who has used more than another by QUANTUM waits: its pieces of prompts, and its steps of several rows. Single
rows of readers cost least in one batch, so some of them go all the same: as many as leave the others no
slower than they are with their share of the time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

OWN: Final = ""
OWN_WEIGHT: Final = 3.0
"""The node's own users get at least three quarters, where they want them."""
LONE_ROW: Final = 4.5
"""What a row that is computed alone takes, in rows of a prompt; of several together each takes one, beside
what all take once (docs/security.md)."""
QUANTUM: Final = 768.0
"""Rows times layers: 64 rows of the bundled model."""
CREDIT: Final = 2 * QUANTUM
"""Who had nothing to compute for a while begins so far behind the others: the step of a reader whose token
was on its way around is not to wait for their prompts."""
OWNERS_MAX: Final = 256


def work_of(n_rows: int, n_layers: int, *, is_step: bool) -> float:
    """The work of a batch, in rows of a prompt times layers. `is_step`: these few rows are a step that a
    reader waits for."""
    return n_layers * (n_rows + (LONE_ROW - 1 if is_step else 0.0))


def single_rows_max(n_owners: int) -> int:
    """The number of rows for which a batch takes as long as `n_owners` single rows one after the other."""
    return int(LONE_ROW * n_owners - (LONE_ROW - 1))


class OwnerShares:
    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        self._level = 0.0
        """What each has used that had work all the time; it never falls."""
        self._n_others = 1
        """Of the latest round."""

    def ahead(self, owners: Collection[str]) -> frozenset[str]:
        """The owners that have to wait in a round in which all of these have work."""
        present = frozenset(owners)
        if len(present) < 2:
            return frozenset()
        self._n_others = len(present - {OWN})
        for owner in present:
            self._used[owner] = max(self.used(owner), self._level - CREDIT)
        least = min(self._used[owner] for owner in present)
        self._level = max(self._level, least)
        if len(self._used) > OWNERS_MAX:
            most = sorted(self._used, key=lambda owner: -self._used[owner])[: OWNERS_MAX // 2]
            self._used = {owner: self._used[owner] for owner in {*most, *present}}
        return frozenset(owner for owner in present if self._used[owner] - least > QUANTUM)

    def used(self, owner: str) -> float:
        return self._used.get(owner, 0.0)

    def charge(self, work: Mapping[str, float]) -> None:
        """Charge each owner with its work in a batch (see `work_of`), in which several owners had some."""
        for owner, amount in work.items():
            weight = OWN_WEIGHT * self._n_others if owner == OWN else 1.0
            self._used[owner] = self.used(owner) + amount / weight
