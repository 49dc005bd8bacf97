"""Rows that one request computed, given to another: `Prefixes` and what runs decide, segments do it.

Requests get rows from three places: from a request that still runs and began alike (`n` answers to one
prompt), from cells that an earlier one left, and from host memory, where those went for which the cells had
become too few. The first two share cells and cost nothing; the third is copied.

Nothing is kept of models with recurrent layers, whose state is that of the last row only. Of models with
sliding windows the cells hold every row, so any beginning of them is as good as new; bytes hold the window
only, and go on where they end or not at all.

Rows that another node computed are marked until a check has found them right: requests may use them, and what
rests on them is marked, too. Where they came in another format, that mark stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_workers.cache.kept_rows import BlockKey
from swarmllm_workers.cache.prefixes import Buffer, Kept, Name, Prefixes, n_common_tokens
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.kv_state import BadState, read_state
from swarmllm_workers.engine.operation import Operation
from swarmllm_workers.engine.segment import Segment
from swarmllm_workers.engine.slots import Slots

Segments = tuple[Segment, ...]
_REFUTED: Final = b"wrong"
"""In place of the name of rows that a check found wrong."""


@dataclass(frozen=True)
class Snapshot:
    """Rows as bytes, one part per segment, parsed as far as possible without libllama."""

    states: tuple[Buffer, ...]
    n_rows: int
    """Of each part; -1 where they differ."""
    n_min: int
    """A beginning of fewer rows cannot be used."""

    @staticmethod
    def read(states: Sequence[Buffer]) -> Snapshot:
        """Parse the bytes. Any thread may call it; the time it takes grows with the number of bytes. Raises
        BadState."""
        read = [read_state(state) for state in states]
        n_rows = {state.n_rows for state in read}
        n_min = max((state.n_min for state in read), default=0)
        states = tuple(memoryview(state).toreadonly() for state in states)
        return Snapshot(states, n_rows.pop() if len(n_rows) == 1 else -1, n_min)


def _let_others_step() -> None:
    pass


class PrefixCache:
    def __init__(self, settings: EngineSettings, slots: Slots) -> None:
        self._min_tokens = settings.prefixes.min_tokens
        self._is_on = settings.prefixes.n_entries > 0
        self._slots = slots
        self._index = Prefixes(settings.n_slots, settings.prefixes)
        self._scratch = settings.n_slots + settings.prefixes.n_cells_entries
        self._running: dict[str, dict[Segments, Callable[[], Name]]] = {}
        """Per request, what names the rows that it has or will have in which segments."""
        self._n_min: dict[str, int] = {}
        """Requests of whose rows no beginning shorter than this can be used (see `Kept`)."""
        self._unchecked: dict[str, bytes] = {}
        """Requests whose first rows are unchecked ones of another node (see `Kept`); _REFUTED: wrong ones."""
        self._of_other_format: set[str] = set()
        """Requests whose first rows came from another node in another format."""
        self._named: dict[str, dict[Segments, Name]] = {}
        """Requests that are kept under names from outside."""

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[Kept]:
        return iter(self._index)

    @property
    def n_bytes(self) -> int:
        """Host memory in use."""
        return self._index.n_bytes

    @property
    def n_changes(self) -> int:
        """The number of entries that were added or removed since the start."""
        return self._index.n_changes

    def n_free(self, where: Segments) -> int:
        """The number of KV rows that are free in every segment."""
        return min(segment.n_free for segment in where)

    def make_room(self, where: Segments, n_rows: int) -> int:
        """Move kept rows out of their cells, the least wanted first, until `n_rows` are free or none are kept
        there. Returns how many are free then."""
        while (n_free := self.n_free(where)) < n_rows:
            kept = self._index.least_wanted(in_cells=True)
            if kept is None:
                break
            self._evict(kept)
        return n_free

    def follow(self, request_id: str, where: Segments, name: Callable[[], Name]) -> None:
        """Register a running request, so that others may use its rows."""
        if self._is_on:
            self._running.setdefault(request_id, {})[where] = name

    def name(self, request_id: str, where: Segments, name: Name) -> int:
        """Set the name of the request's rows, those that are still to be computed included. If the request
        has no rows, it gets those that are kept under the name. Returns how many of the named rows it has."""
        slot = self._slots.take(request_id)
        n_named = len(name.hashes) * BLOCK_TOKENS
        n_rows = min(segment.lengths[slot] for segment in where)
        if not any(segment.lengths[slot] for segment in where):
            n_rows = self.reuse(request_id, where, name, n_named, any_length=True)
        self._named.setdefault(request_id, {})[where] = name
        self.follow(request_id, where, lambda: name)
        return min(n_rows, n_named)

    def block_keys(self, request_id: str, where: Segments, n_rows: int) -> list[BlockKey]:
        """The keys of the blocks of the first `n_rows` rows, as far as somebody outside has named them."""
        name = self._named.get(request_id, {}).get(where)
        return [] if name is None else [(name.scope, each) for each in name.hashes[: n_rows // BLOCK_TOKENS]]

    def rename(self, request_id: str, new_id: str) -> None:
        """Transfer the name and the rows of a request to another request, which has no rows of its own."""
        if request_id in self._running:
            self._running[new_id] = self._running.pop(request_id)
        if request_id in self._named:
            self._named[new_id] = self._named.pop(request_id)
        if request_id in self._n_min:
            self._n_min[new_id] = self._n_min.pop(request_id)
        if request_id in self._unchecked:
            self._unchecked[new_id] = self._unchecked.pop(request_id)
        if request_id in self._of_other_format:
            self._of_other_format.remove(request_id)
            self._of_other_format.add(new_id)

    def end(self, request_id: str, present: Sequence[Segment]) -> None:
        """End a request: keep its named rows, if its segments are among those `present`."""
        self._running.pop(request_id, None)
        slot = self._slots.get(request_id)
        for where, name in self._named.pop(request_id, {}).items():
            if slot is None or not all(segment in present for segment in where):
                continue
            n_blocks = min(segment.lengths[slot] for segment in where) // BLOCK_TOKENS
            self.keep(request_id, where, Name(name.hashes[:n_blocks], scope=name.scope))
        self._n_min.pop(request_id, None)
        self._unchecked.pop(request_id, None)
        self._of_other_format.discard(request_id)

    def is_of_other_format(self, request_id: str) -> bool:
        """Whether the request's first rows came from another node in another format."""
        return request_id in self._of_other_format

    def travels(self, where: Segments) -> bool:
        """Whether KV of these segments may be sent to other nodes and received from them. That needs one
        segment in which every layer sees and keeps every row, and one position per row."""
        if not self._is_on or len(where) != 1 or where[0].has_grid_positions:
            return False
        return not where[0].is_recurrent and not where[0].n_window

    def look_up(self, where: Segments, name: Name) -> int:
        """How many of these blocks a request could get now."""
        n_max = len(name.hashes) * BLOCK_TOKENS
        found = self._index.find(where, name, n_max, time.monotonic())
        _, n_live = self._find_running("", where, name, n_max, any_length=False)
        return max(n_live, found[1] if found else 0) // BLOCK_TOKENS

    def export_rows(self, where: Segments, name: Name, first: int, n_rows: int) -> Buffer | None:
        """The rows of a prefix as bytes. All its blocks have to be here, kept or of a request that runs or is
        held, and all have to be checked."""
        n_named, now = len(name.hashes) * BLOCK_TOKENS, time.monotonic()
        if not self.travels(where) or first + n_rows > n_named:
            return None
        found = self._index.find(where, name, n_named, now, own_kv=True)
        if found is None or found[1] < n_named:
            return self._rows_of_running(where, name, first, n_rows)
        kept, _ = found
        if kept.sequence is None and not self._back_in_cells(kept):
            return None
        assert kept.sequence is not None
        return where[0].save_rows(kept.sequence, first, first + n_rows)

    def _rows_of_running(self, where: Segments, name: Name, first: int, n_rows: int) -> Buffer | None:
        n_named = len(name.hashes) * BLOCK_TOKENS
        request_id, n_live = self._find_running("", where, name, n_named, any_length=False, own_kv=True)
        slot = None if request_id is None else self._slots.get(request_id)
        if slot is None or n_live < n_named:
            return None
        return where[0].save_rows(slot, first, first + n_rows)

    def taking_from_peer(
        self,
        where: Segments,
        name: Name,
        slices: Sequence[tuple[Buffer, int]],
        *,
        other_format: bool = False,
    ) -> Operation[bool]:
        """Keep rows that another node computed, in cells, unchecked. `slices`: bytes of rows that follow each
        other from row 0 on, each with how many they are; steps go on between two of them. `other_format`:
        they came in another one. False where there is no room. Raises BadState for bytes that are not those
        rows in this model's KV."""
        n_rows = len(name.hashes) * BLOCK_TOKENS
        if not n_rows or sum(n for _, n in slices) != n_rows:
            raise BadState(f"it is not {n_rows} rows")
        if not self.travels(where):
            return False
        if self._index.is_known(where, name, time.monotonic()):
            return True
        if not self._has_sequence() or self.make_room(where, n_rows) < n_rows:
            return False
        (segment,), sequence = where, self._index.take_sequence()
        for state, n in slices:
            has_room = self.make_room(where, n) >= n
            is_taken = has_room and segment.append_rows(sequence, state, n)
            if not is_taken:
                segment.truncate(sequence, 0)
                self._index.give_back(sequence)
                if has_room:
                    raise BadState("it is of other layers or of another type")
                return False
            yield _let_others_step
            if segment.is_closed:
                self._index.give_back(sequence)
                return False
        now = time.monotonic()
        if self._index.is_known(where, name, now):
            segment.truncate(sequence, 0)
            self._index.give_back(sequence)
            return True
        self._free(self._index.replaced_by(where, name, other_format=other_format))
        kept = Kept(where, name, n_rows, now, sequence, unchecked=name.hashes[-1], other_format=other_format)
        self._free(self._index.add(kept))
        return True

    def judge(self, name: Name, *, is_right: bool) -> None:
        """Take the result of a check of rows that another node computed. `name` has their tokens."""
        unchecked = name.hashes[-1]
        self._free(self._index.judged(unchecked, name.tokens, is_right=is_right))
        for request_id in [each for each, of in self._unchecked.items() if of == unchecked]:
            if is_right:
                del self._unchecked[request_id]
            else:
                self._unchecked[request_id] = _REFUTED

    def lend(self, request_id: str, where: Segments, name: Name, n_rows: int) -> bool:
        """Give a request, which has no rows, the first rows that another node sent under this name. False:
        they are no longer kept."""
        kept = self._index.unchecked(where, name)
        if kept is None or (kept.sequence is None and not self._back_in_cells(kept)):
            return False
        assert kept.sequence is not None
        _share(where, kept.sequence, self._slots.take(request_id), n_rows)
        if kept.other_format:
            self._of_other_format.add(request_id)
        return True

    def _has_sequence(self) -> bool:
        """A free one, after another entry has left its own where it had to."""
        while not self._index.has_free_sequence:
            oldest = self._index.least_wanted(in_cells=True)
            if oldest is None:
                return False
            self._evict(oldest)
        return True

    def _back_in_cells(self, kept: Kept) -> bool:
        """From host memory."""
        where: Segments = kept.where  # type: ignore[assignment]
        states = kept.states  # making room may drop the entry
        if not self._has_sequence() or self.make_room(where, kept.n_rows) < kept.n_rows:
            return False
        if kept not in self._index or not self._index.has_free_sequence:
            return False
        sequence = self._index.take_sequence()
        for segment, state in zip(where, states, strict=True):
            if not segment.restore(sequence, state, kept.n_rows):
                for each in where:
                    each.truncate(sequence, 0)
                self._index.give_back(sequence)
                return False
        kept.sequence, kept.states = sequence, ()
        return True

    def exporting(self, where: Segments, name: Name) -> Operation[tuple[int, tuple[Buffer, ...]] | None]:
        """How many of the blocks are kept, and their rows as bytes, part by part."""
        if not self._is_on or any(segment.is_recurrent for segment in where):
            return None
        found = self._index.find(where, name, len(name.hashes) * BLOCK_TOKENS, time.monotonic(), own_kv=True)
        if found is None:
            return None
        kept, n_rows = found
        n_rows = n_rows // BLOCK_TOKENS * BLOCK_TOKENS
        if kept.sequence is None and n_rows == kept.n_rows:
            return n_rows // BLOCK_TOKENS, kept.states
        if kept.sequence is not None:
            _share(where, kept.sequence, self._scratch, n_rows)
        elif not self._restore(where, kept, self._scratch, n_rows):
            return None
        states: list[Buffer] = []
        try:
            if not self._index.fits(sum(segment.state_size(self._scratch) for segment in where)):
                return None
            for segment in where:
                if segment.is_closed:
                    return None
                states.append(segment.save(self._scratch))
                yield _let_others_step
        finally:
            for segment in where:
                if not segment.is_closed:
                    segment.truncate(self._scratch, 0)
        try:
            snapshot = yield partial(Snapshot.read, states)
        except BadState:
            return None
        return (n_rows // BLOCK_TOKENS, snapshot.states) if snapshot.n_rows == n_rows else None

    def take(self, where: Segments, name: Name, snapshot: Snapshot) -> bool:
        """Keep rows that were computed elsewhere, in host memory. False where they do not fit. Raises
        BadState for bytes that are not those rows, as far as can be seen."""
        n_rows, states, n_min = len(name.hashes) * BLOCK_TOKENS, snapshot.states, snapshot.n_min
        if len(states) != len(where):
            raise BadState(f"{len(states)} parts for {len(where)} segments")
        if not n_rows or snapshot.n_rows != n_rows:
            raise BadState(f"it is not {n_rows} rows everywhere")
        if not self._is_on or any(segment.is_recurrent for segment in where):
            return False
        if not self._index.fits(sum(map(len, states))):
            return False
        now = time.monotonic()
        if not self._index.is_known(where, name, now):
            self._free(self._index.replaced_by(where, name))
            self._free(self._index.add(Kept(where, name, n_rows, now, None, states, n_min)))
        return True

    def reuse(
        self,
        request_id: str,
        where: Segments,
        wanted: Name,
        n_max: int,
        *,
        any_length: bool = False,
        own_kv: bool = False,
    ) -> int:
        """Give the request, which has no rows yet, at most `n_max` rows that were computed before; how
        many. `any_length`: the request may have to begin at an earlier one. `own_kv`: only own ones."""
        if not self._is_on or any(segment.is_recurrent for segment in where):
            return 0
        self.expire()
        slot = self._slots.take(request_id)
        found = self._index.find(where, wanted, n_max, time.monotonic(), any_length=any_length, own_kv=own_kv)
        source, n_live = self._find_running(request_id, where, wanted, n_max, any_length, own_kv=own_kv)
        is_worse = source in self._of_other_format and found is not None and not found[0].other_format
        if source is not None and (found is None or n_live >= found[1] + is_worse):
            self._n_min[request_id] = self._n_min.get(source, 0)
            if source in self._unchecked:
                self._unchecked[request_id] = self._unchecked[source]
            if source in self._of_other_format:
                self._of_other_format.add(request_id)
            source_slot = self._slots.take(source)
            return _share(where, source_slot, slot, n_live)
        if found is None:
            return 0
        kept, n = found
        self._n_min[request_id] = kept.n_min
        if kept.unchecked:
            self._unchecked[request_id] = kept.unchecked
        if kept.other_format:
            self._of_other_format.add(request_id)
        if kept.sequence is not None:
            return _share(where, kept.sequence, slot, n)
        return n if self._restore(where, kept, slot, n) else 0

    def keep(self, request_id: str, where: Segments, name: Name) -> None:
        """End a request and keep those of its rows that `name` names."""
        slot = self._slots.get(request_id)
        if not self._is_on or slot is None or any(segment.is_recurrent for segment in where):
            return
        self.expire()
        is_whole = bool(name.session) or name.clients_of is not None
        n_rows = len(name.tokens) if is_whole else len(name.hashes) * BLOCK_TOKENS
        now = time.monotonic()
        if n_rows < self._min_tokens or any(segment.lengths[slot] < n_rows for segment in where):
            return
        unchecked = self._unchecked.get(request_id, b"")
        other_format = request_id in self._of_other_format
        own_kv = not unchecked and not other_format
        if unchecked == _REFUTED or self._index.is_known(where, name, now, own_kv=own_kv):
            return
        self._free(self._index.replaced_by(where, name, other_format=other_format))
        while not self._index.has_free_sequence:
            oldest = self._index.least_wanted(in_cells=True)
            if oldest is None:
                return
            self._evict(oldest)
        sequence = self._index.take_sequence()
        _share(where, slot, sequence, n_rows)
        n_min = self._n_min.get(request_id, 0)
        kept = Kept(
            where, name, n_rows, now, sequence, n_min=n_min, unchecked=unchecked, other_format=other_format
        )
        self._free(self._index.add(kept))

    def expire(self) -> None:
        self._free(self._index.expired(time.monotonic()))

    def next_expiry_s(self) -> float | None:
        """Seconds until an entry expires, None where there is none."""
        at = self._index.next_expiry()
        return None if at is None else max(0.0, at - time.monotonic())

    def clear(self) -> None:
        self._free(self._index.clear())

    def _find_running(
        self,
        request_id: str,
        where: Segments,
        wanted: Name,
        n_max: int,
        any_length: bool,
        *,
        own_kv: bool = False,
    ) -> tuple[str | None, int]:
        """The running request that shares the most rows, and how many."""
        best, n_best = None, self._min_tokens - 1
        for other, names in self._running.items():
            slot = self._slots.get(other)
            if other == request_id or slot is None or where not in names:
                continue
            unchecked = self._unchecked.get(other)
            is_own = not unchecked and other not in self._of_other_format
            if unchecked == _REFUTED or (own_kv and not is_own):
                continue
            name = names[where]()
            n = max(name.common(wanted), n_common_tokens(name.tokens, wanted.tokens))
            n = min(n, n_max, *(segment.lengths[slot] for segment in where))
            if not name.goes_by_token(wanted):
                n -= n % BLOCK_TOKENS
            n_min = self._n_min.get(other, 0)
            if n > n_best and n >= n_min and not (any_length and n_min):
                best, n_best = other, n
        return best, n_best

    def _evict(self, kept: Kept) -> None:
        """Out of its cells: into host memory, where that is possible."""
        sequence = kept.sequence
        assert sequence is not None
        saved = self._save(kept.where, sequence, kept.n_rows)  # type: ignore[arg-type]
        if saved is None:
            self._free(self._index.drop(kept))
            return
        states, n_min = saved
        dropped = self._index.swap_out(kept, states, max(n_min, kept.n_min))
        self._free([Kept(kept.where, kept.name, 0, 0.0, sequence), *dropped])

    def _save(self, where: Segments, sequence: int, n_rows: int) -> tuple[tuple[Buffer, ...], int] | None:
        """The rows as bytes, and the shortest beginning of them that can be used. None where they would
        exceed the budget or are of a kind that is not understood."""
        if not self._index.fits(sum(segment.state_size(sequence) for segment in where)):
            return None
        try:
            snapshot = Snapshot.read([segment.save(sequence) for segment in where])
        except BadState:
            return None
        return (snapshot.states, snapshot.n_min) if snapshot.n_rows == n_rows else None

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
    """Where these rows end in a picture that is not divisible, its part is not among those that are shared; a
    request that has the picture goes on from its first row all the same."""
    for segment in where:
        segment.share(source, target, n)
    return n
