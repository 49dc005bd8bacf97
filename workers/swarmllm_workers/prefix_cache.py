"""Rows that one request computed, given to another: `Prefixes` and what runs decide, segments do it.

Requests get rows from three places: from a request that still runs and began alike (`n` answers to one
prompt), from cells that an earlier one left, and from host memory, where those went for which the cells had
become too few. The first two share cells and cost nothing; the third is copied.

Nothing is kept of models with recurrent layers, whose state is that of the last row only. Of models with
sliding windows the cells hold every row, so any beginning of them is as good as new; bytes hold the window
only, and go on where they end or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_workers.kv_state import BadState, read_state
from swarmllm_workers.prefixes import Kept, Name, Prefixes, n_common_tokens
from swarmllm_workers.segment import EngineSettings, Segment
from swarmllm_workers.slots import Slots

Segments = tuple[Segment, ...]


@dataclass(frozen=True)
class _Running:
    where: Segments
    name: Callable[[], Name]
    """Of the rows that it has so far, or more."""


class PrefixCache:
    def __init__(self, settings: EngineSettings, slots: Slots) -> None:
        self._n_ctx = settings.n_ctx
        self._min_tokens = settings.prefixes.min_tokens
        self._is_on = settings.prefixes.n_entries > 0
        self._slots = slots
        self._index = Prefixes(settings.n_slots, settings.prefixes)
        self._scratch = settings.n_slots + settings.prefixes.n_cells_entries
        self._running: dict[str, _Running] = {}

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[Kept]:
        return iter(self._index)

    @property
    def n_bytes(self) -> int:
        """Host memory in use."""
        return self._index.n_bytes

    def n_free(self, where: Segments) -> int:
        """KV rows that every segment has left."""
        return min(self._n_ctx - segment.n_rows for segment in where)

    def make_room(self, where: Segments, n_rows: int) -> int:
        """Move kept rows out of their cells, the least wanted first, until `n_rows` are free or none are
        kept there; what is free then."""
        while (n_free := self.n_free(where)) < n_rows:
            kept = self._index.least_wanted(in_cells=True)
            if kept is None:
                break
            self._evict(kept)
        return n_free

    def follow(self, request_id: str, where: Segments, name: Callable[[], Name]) -> None:
        """The request runs: others may have its rows."""
        if self._is_on:
            self._running[request_id] = _Running(where, name)

    def forget(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def reuse(self, request_id: str, where: Segments, wanted: Name, n_max: int) -> int:
        """Give the request, which has no rows yet, at most `n_max` rows that were computed before; how
        many."""
        if not self._is_on or any(segment.is_recurrent for segment in where):
            return 0
        self.expire()
        slot = self._slots.take(request_id)
        found = self._index.find(where, wanted, n_max, time.monotonic())
        source, n_live = self._find_running(request_id, where, wanted, n_max)
        if source is not None and (found is None or n_live >= found[1]):
            return _share(where, source, slot, n_live)
        if found is None:
            return 0
        kept, n = found
        if kept.sequence is not None:
            return _share(where, kept.sequence, slot, n)
        return n if self._restore(where, kept, slot, n) else 0

    def keep(self, request_id: str, where: Segments, name: Name) -> None:
        """The request is over: keep what `name` names of its rows."""
        slot = self._slots.get(request_id)
        if not self._is_on or slot is None or any(segment.is_recurrent for segment in where):
            return
        self.expire()
        n_rows = len(name.tokens) if name.session else len(name.hashes) * BLOCK_TOKENS
        now = time.monotonic()
        if n_rows < self._min_tokens or any(segment.lengths[slot] < n_rows for segment in where):
            return
        if self._index.is_known(where, name, now):
            return
        self._free(self._index.replaced_by(where, name))
        while not self._index.has_free_sequence:
            oldest = self._index.least_wanted(in_cells=True)
            if oldest is None:
                return
            self._evict(oldest)
        sequence = self._index.take_sequence()
        _share(where, slot, sequence, n_rows)
        self._free(self._index.add(Kept(where, name, n_rows, now, sequence)))

    def expire(self) -> None:
        self._free(self._index.expired(time.monotonic()))

    def next_expiry_s(self) -> float | None:
        """Seconds until an entry expires, None where there is none."""
        at = self._index.next_expiry()
        return None if at is None else max(0.0, at - time.monotonic())

    def clear(self) -> None:
        self._free(self._index.clear())

    def _find_running(
        self, request_id: str, where: Segments, wanted: Name, n_max: int
    ) -> tuple[int | None, int]:
        """(slot, rows) of the running request that shares the most."""
        best, n_best = None, self._min_tokens - 1
        for other, running in self._running.items():
            slot = self._slots.get(other)
            if other == request_id or slot is None or running.where != where:
                continue
            name = running.name()
            n = max(name.common(wanted), n_common_tokens(name.tokens, wanted.tokens))
            n = min(n, n_max, *(segment.lengths[slot] for segment in where))
            if n > n_best:
                best, n_best = slot, n
        return best, n_best

    def _evict(self, kept: Kept) -> None:
        """Out of its cells: into host memory, where that is possible."""
        sequence = kept.sequence
        assert sequence is not None
        saved = self._save(kept.where, sequence, kept.n_rows)  # type: ignore[arg-type]
        if saved is None:
            self._free(self._index.drop(kept))
            return
        states, is_whole = saved
        dropped = self._index.stow(kept, states, is_whole=is_whole)
        self._free([Kept(kept.where, kept.name, 0, 0.0, sequence), *dropped])

    def _save(self, where: Segments, sequence: int, n_rows: int) -> tuple[tuple[bytes, ...], bool] | None:
        """The rows as bytes, and whether any beginning of them can be used. None where they would exceed
        the budget or are of a kind that is not understood."""
        if not self._index.fits(sum(segment.state_size(sequence) for segment in where)):
            return None
        states = tuple(segment.save(sequence) for segment in where)
        try:
            read = [read_state(state) for state in states]
        except BadState:
            return None
        if any(state.n_rows != n_rows for state in read):
            return None
        return states, all(state.is_whole for state in read)

    def _restore(self, where: Segments, kept: Kept, slot: int, n: int) -> bool:
        states = kept.states  # making room may drop the entry
        if self.make_room(where, kept.n_rows) < kept.n_rows:
            return False
        for segment, state in zip(where, states, strict=True):
            if not segment.restore(slot, state, kept.n_rows):
                for each in where:
                    each.truncate(slot, 0)
                return False
        for segment in where:
            segment.truncate(slot, n)
        return True

    def _free(self, dropped: Iterable[Kept]) -> None:
        for kept in dropped:
            if kept.sequence is not None:
                for segment in kept.where:  # type: ignore[attr-defined]
                    if not segment.is_closed:
                        segment.truncate(kept.sequence, 0)


def _share(where: Segments, source: int, target: int, n: int) -> int:
    for segment in where:
        segment.share(source, target, n)
    return n
