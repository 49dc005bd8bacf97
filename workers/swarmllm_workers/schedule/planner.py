"""Plans which rows of which works go into the next batches: a pure core, without libllama, clock or sockets.

One round is `schedule`, then for each of its batches `preempt` (does it fit the KV?), `postprocess`, the run,
and `ran`. Works are known by number, in the order of their arrival; what they could run is described by
a `Demand`, made anew for every round, so that the planner never holds a stale idea of a work.

Decode steps go first and all of them go: their readers are waiting. Prompts fill what is left, a chunk per
work, the one that has waited longest first. A first come, first served order of prompts would give a better
mean time to the first token, but leaves a short prompt behind a long one.

While anybody reads, a long prompt may neither hold the next token up for long nor take the whole machine. So
all prompts together get one piece per round, which makes BESIDE rows with the decode steps, and after it
readers get time of their own, half as long, or less where prompts are more than readers. A prompt then takes
half as long again; with a piece in every batch, readers of the bundled model had a 200th of their speed. Time
that readers do not need is the prompts'.

Where several owners have work, each gets its share of the time (`owner_shares.py`): who has used more waits
with its prompts, and of prompts those of the owner that has used least come first.

KV that runs out is taken from the work that came last, and only from works that can compute it again (a
Generate has its tokens, a Forward's rows belong to another node). Such a work starts over when there is room;
its reader sees a pause, not an error. A Forward waits for a while, because other requests' rows go when those
end; a work is refused where waiting cannot help or has not.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from swarmllm_workers.schedule.owner_shares import OwnerShares, single_rows_max

CAPACITY: Final = 512
"""Rows of one batch."""
CHUNK: Final = 128
"""Rows of one prompt in one batch."""
BESIDE: Final = 64
"""Rows of a batch that has pieces of prompts, while somebody reads. ggml's fused attention takes rows in
tiles of 64, also where the last one is not full, and fewer than 64 one by one: behind 4,096 others, batches
of 62, 64, 66 and 128 rows take the bundled model 144, 48, 80 and 96 ms."""
OWED: Final = 0.5
"""Of the time that a piece took, what readers get after it where prompts are not more than readers."""
READING: Final = 4
"""Batches without a decode step after which nobody is thought to read: in a pipeline a reader's next step is
not here before the token has been around."""


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
    rows_of_piece: int = 0
    """Pieces of a prompt have exactly so many rows, but for the last; 0: as many as there is room for."""
    can_wait: bool = False
    """For others to free what it needs, although none of them is sure to."""
    owner: str = ""
    """For whom it is; see `owner_shares`."""


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
class FittedBatch:
    """The part of a batch that fits the free KV, and the works that have to give way."""

    batch: Batch
    """What runs; empty where nothing can."""
    restarted: tuple[int, ...] = ()
    """Whose KV is to be dropped before."""
    refused: tuple[int, ...] = ()
    """Who can never go on: nothing that ends by itself holds the cells it needs."""


class Planner:
    """Plans the batches. Remembers which works had their turn, and how far readers are behind."""

    def __init__(
        self,
        *,
        capacity: int = CAPACITY,
        chunk: int = CHUNK,
        beside: int = BESIDE,
        owes: bool = True,
        batching: bool = True,
    ) -> None:
        """`owes`: whether readers get time of their own after a piece of a prompt."""
        if not 0 < chunk < capacity:
            raise ValueError(f"a chunk of {chunk} rows in batches of {capacity}")
        self._capacity = capacity
        self._chunk = chunk
        self._beside = min(beside, chunk)
        self._owes = owes
        self._batching = batching
        self._turns: dict[int, int] = {}
        self._n_turns = 0
        self._n_prompts = 0
        """Of the latest round, those that have to wait among them."""
        self._n_readers = 0
        self._n_since_read = READING
        """Batches since a decode step ran."""
        self._owed_s = 0.0
        self._claimed_s = 0.0
        """What of it a round is meant for that has yet to run."""
        self._owners = OwnerShares()
        self._is_contended = False
        """Several owners had work in the latest round."""
        self._without_room: set[int] = set()
        """Works that found no room: nobody else waits for them, who might make it."""

    def schedule(
        self, demands: Collection[Demand], cohorts: Mapping[Hashable, int] | None = None
    ) -> tuple[Batch, ...]:
        """The batches of one round: at most one per lane, or, without batching, one per work. `cohorts`: per
        lane, the rows of decode steps that one batch takes at most, because more of them are better run in
        batches of their own (`cohorts.py`); a batch that has pieces of prompts takes all."""
        queue = sorted(demands, key=lambda demand: (self._turns.get(demand.key, 0), demand.key))
        queue = self._without_those_ahead(queue)
        if not self._batching:
            return tuple(Batch(d.lane, (Share(d.key, self._piece(d)),)) for d in queue)
        decodes = [demand for demand in queue if demand.is_decode]
        prompts = [demand for demand in queue if not demand.is_decode]
        self._n_prompts = len(prompts)
        has_readers = bool(decodes) or self._n_since_read < READING
        n_prompt_rows = self._beside if has_readers else len(prompts) * self._chunk
        # Decodes leave room for a piece, or prompts might wait for ever.
        n_decode_rows_max = self._capacity - self._beside if prompts else self._capacity
        shares: dict[Hashable, list[Share]] = {}
        n_rows: dict[Hashable, int] = {}
        ends: dict[Hashable, int] = {}
        if decodes and prompts and self._owed_s > 0:
            prompts = []
            # Gone where none of them runs: for want of room, which prompts may be the ones to make.
            self._claimed_s, self._owed_s = self._owed_s, 0.0
        limits = {} if cohorts is None or prompts else cohorts
        for demand in decodes:
            used = n_rows.get(demand.lane, 0)
            n_max = min(n_decode_rows_max, limits.get(demand.lane, n_decode_rows_max))
            if used + demand.n_rows <= n_max or not used:
                shares.setdefault(demand.lane, []).append(Share(demand.key, demand.n_rows))
                n_rows[demand.lane] = used + demand.n_rows
        for demand in prompts:
            used = n_rows.get(demand.lane, 0)
            end = ends.setdefault(demand.lane, self._end(used) if has_readers else self._capacity)
            n = self._piece(demand)
            if not demand.rows_of_piece:
                n = min(n, n_prompt_rows, end - used)
            elif n_prompt_rows <= 0:
                n = 0
            if n > 0:
                shares.setdefault(demand.lane, []).append(Share(demand.key, n))
                n_rows[demand.lane] = used + n
                n_prompt_rows -= n
        return tuple(Batch(lane, tuple(chosen)) for lane, chosen in shares.items())

    def _without_those_ahead(self, queue: list[Demand]) -> list[Demand]:
        """Those whose turn it is by what their owners have used; prompts of the owner that has used least
        come first."""
        owners = {demand.owner for demand in queue}
        self._is_contended = len(owners) > 1
        if not self._is_contended:
            return queue
        self._without_room &= {demand.key for demand in queue}
        ahead = self._owners.ahead({d.owner for d in queue if d.key not in self._without_room})
        queue.sort(key=lambda demand: self._owners.used(demand.owner))
        n_single, kept = single_rows_max(len(owners)), list[Demand]()
        for demand in queue:
            if demand.owner not in ahead:
                n_single -= demand.n_rows
            elif demand.is_decode and demand.n_rows == 1 and n_single > 0:
                n_single -= 1
            else:
                continue
            kept.append(demand)
        return kept

    def _end(self, n_decode_rows: int) -> int:
        """Rows at which a batch ends that has pieces of prompts beside decode steps: whole tiles, half of one
        at least for prompts."""
        n_tiles = -(-(n_decode_rows + (self._beside + 1) // 2) // self._beside)
        return min(n_tiles * self._beside, self._capacity)

    def preempt(self, batch: Batch, demands: Sequence[Demand], n_free: int) -> FittedBatch:
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
        self._without_room |= {share.key for share in batch.shares} - {share.key for share in kept}
        return FittedBatch(Batch(batch.lane, tuple(kept)), tuple(restarted), tuple(refused))

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
        """The works of a scheduled batch had their turn, also those that found no room: a work that waits for
        room must not keep those out who would make it."""
        self._n_turns += 1
        for share in batch.shares:
            self._turns[share.key] = self._n_turns

    def ran(self, n_decodes: int, n_prompts: int, seconds: float) -> None:
        """Record the time of a batch with steps of so many readers and pieces of so many prompts."""
        if n_decodes:
            self._n_readers, self._n_since_read = n_decodes, 0
        else:
            self._n_since_read += 1
        if not n_prompts:
            self._owed_s += self._claimed_s - seconds
        elif self._owes and self._n_since_read < READING:
            self._owed_s = OWED * seconds * min(1.0, self._n_readers / max(self._n_prompts, 1))
        self._claimed_s = 0.0

    def charge(self, work: Mapping[str, float]) -> None:
        """Charge each owner for a batch of the latest round (see `owner_shares.work_of`)."""
        if self._is_contended:
            self._owners.charge(work)

    def forget(self, key: int) -> None:
        """Remove a work that is over."""
        self._turns.pop(key, None)

    def _piece(self, demand: Demand) -> int:
        if demand.is_decode:
            return demand.n_rows
        return min(demand.n_rows, demand.rows_of_piece or self._chunk)
