"""Which rows of which works go into the next batches: a pure core, without libllama, clock or sockets.

One round is `schedule`, then for each of its batches `preempt` (does it fit the KV?), the run, and
`postprocess`. Works are known by number, in the order of their arrival; what they could run is described by
a `Demand`, made anew for every round, so that the planner never holds a stale idea of a work.

Decode steps go first and all of them go: their readers are waiting. Prompts fill what is left, a chunk per
work, whoever has waited longest first. While anybody decodes, all prompts together get one chunk per round:
that bounds what a long prompt adds to the time between two tokens. A first come, first served order of
prompts would give a better mean time to the first token, but leaves a short prompt behind a long one.

KV that runs out is taken from whoever came last, and only from works that can compute it again (a Generate
has its tokens, a Forward's rows belong to another node). Such a work starts over when there is room; its
reader sees a pause, not an error. A Forward waits for a while, because other requests' rows go when those
end; a work is refused where waiting cannot help or has not.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

CAPACITY: Final = 512
"""Rows of one batch."""
CHUNK: Final = 128
"""Rows of one prompt in one batch, and of all prompts while somebody decodes."""


@dataclass(frozen=True)
class Demand:
    """What one work could run now."""

    key: int
    """The work; larger for a later one."""
    lane: Hashable
    """Works of one lane may share a batch."""
    n_rows: int
    """Rows that wait to be run, at least 1."""
    is_decode: bool
    """A short step that somebody waits for, as opposed to a piece of a prompt. Always runs in one piece."""
    n_cells: int = 0
    """KV rows that it has."""
    can_restart: bool = False
    """Its KV may be dropped: it computes it again."""
    can_wait: bool = False
    """For others to free what it needs, although none of them is sure to."""


@dataclass(frozen=True)
class Share:
    key: int
    n_rows: int


@dataclass(frozen=True)
class Batch:
    lane: Hashable
    shares: tuple[Share, ...]

    @property
    def n_rows(self) -> int:
        return sum(share.n_rows for share in self.shares)


@dataclass(frozen=True)
class Fit:
    """What becomes of a batch in the KV that there is."""

    batch: Batch
    """What runs; empty where nothing can."""
    restarted: tuple[int, ...] = ()
    """Whose KV is to be dropped before."""
    refused: tuple[int, ...] = ()
    """Who can never go on: nothing that ends by itself holds the cells it needs."""


class Planner:
    """Remembers nothing but whose turn it is."""

    def __init__(self, *, capacity: int = CAPACITY, chunk: int = CHUNK, batching: bool = True) -> None:
        if not 0 < chunk < capacity:
            raise ValueError(f"a chunk of {chunk} rows in batches of {capacity}")
        self._capacity = capacity
        self._chunk = chunk
        self._batching = batching
        self._turns: dict[int, int] = {}
        self._n_turns = 0

    def schedule(self, demands: Collection[Demand]) -> tuple[Batch, ...]:
        """The batches of one round: at most one per lane, or, without batching, one per work."""
        queue = sorted(demands, key=lambda demand: (self._turns.get(demand.key, 0), demand.key))
        if not self._batching:
            return tuple(Batch(d.lane, (Share(d.key, self._piece(d)),)) for d in queue)
        decodes = [demand for demand in queue if demand.is_decode]
        prompts = [demand for demand in queue if not demand.is_decode]
        n_prompt_rows = self._chunk if decodes else len(prompts) * self._chunk
        # Decodes leave room for a chunk, or prompts might wait for ever.
        n_decode_rows_max = self._capacity - self._chunk if prompts else self._capacity
        shares: dict[Hashable, list[Share]] = {}
        n_rows: dict[Hashable, int] = {}
        for demand in decodes:
            used = n_rows.get(demand.lane, 0)
            if used + demand.n_rows <= n_decode_rows_max or not used:
                shares.setdefault(demand.lane, []).append(Share(demand.key, demand.n_rows))
                n_rows[demand.lane] = used + demand.n_rows
        for demand in prompts:
            used = n_rows.get(demand.lane, 0)
            n = min(self._piece(demand), n_prompt_rows, self._capacity - used)
            if n > 0:
                shares.setdefault(demand.lane, []).append(Share(demand.key, n))
                n_rows[demand.lane] = used + n
                n_prompt_rows -= n
        return tuple(Batch(lane, tuple(chosen)) for lane, chosen in shares.items())

    def preempt(self, batch: Batch, demands: Sequence[Demand], n_free: int) -> Fit:
        """What of `batch` runs where `n_free` KV rows are free in its lane. `demands` are those of the
        round, also of works that are in no batch.

        A work without KV begins only where all its rows fit, so that two prompts do not take turns in
        throwing each other out.
        """
        lane = {demand.key: demand for demand in demands if demand.lane == batch.lane}
        holders = sorted((d.key for d in lane.values() if d.can_restart and d.n_cells), reverse=True)
        kept: list[Share] = []
        restarted: list[int] = []
        refused: list[int] = []
        for share in batch.shares:
            if share.key in restarted:
                continue
            demand = lane[share.key]
            needed = share.n_rows if demand.n_cells or not demand.can_restart else demand.n_rows
            victims = self._victims(demand, needed - n_free, holders, kept, lane)
            if victims is not None:
                restarted += victims
                holders = [key for key in holders if key not in victims]
                n_free += sum(lane[key].n_cells for key in victims) - share.n_rows
                kept.append(share)
            elif demand.can_wait or (demand.can_restart and self._will_free(demand, holders, kept, lane)):
                continue
            else:
                refused.append(share.key)
        return Fit(Batch(batch.lane, tuple(kept)), tuple(restarted), tuple(refused))

    def _victims(
        self, demand: Demand, n_missing: int, holders: list[int], kept: list[Share], lane: dict[int, Demand]
    ) -> list[int] | None:
        """The youngest works that hold `n_missing` rows together; none for a work that must give way
        itself. A Forward has no age: its next step is a new call, and it cannot wait."""
        running = {share.key for share in kept}
        victims: list[int] = []
        for key in holders:
            if n_missing <= 0:
                break
            if key in running or key == demand.key or (demand.can_restart and key < demand.key):
                continue
            victims.append(key)
            n_missing -= lane[key].n_cells
        return victims if n_missing <= 0 else None

    def _will_free(
        self, demand: Demand, holders: list[int], kept: list[Share], lane: dict[int, Demand]
    ) -> bool:
        """Whether another work that ends by itself has cells, or gets some in this batch."""
        others = {*holders, *(share.key for share in kept if lane[share.key].can_restart)}
        return bool(others - {demand.key})

    def postprocess(self, batch: Batch) -> None:
        """The works of a scheduled batch had their turn, also those that found no room: whoever waits for
        room must not keep those out who would make it."""
        self._n_turns += 1
        for share in batch.shares:
            self._turns[share.key] = self._n_turns

    def forget(self, key: int) -> None:
        """The work is over."""
        self._turns.pop(key, None)

    def _piece(self, demand: Demand) -> int:
        return demand.n_rows if demand.is_decode else min(demand.n_rows, self._chunk)
