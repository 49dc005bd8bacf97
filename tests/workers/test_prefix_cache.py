"""Whose rows a request gets, whatever came before: sequences of events over segments without libllama."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_workers.cache import prefix_cache as prefix_cache_module
from swarmllm_workers.cache.prefix_cache import PrefixCache, Snapshot
from swarmllm_workers.cache.prefixes import Name, PrefixSettings, token_name
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.kv_state import BadState
from swarmllm_workers.engine.operation import complete
from swarmllm_workers.engine.slots import Cells, Slots

B = BLOCK_TOKENS
N_SLOTS, N_CELLS_ENTRIES, N_ENTRIES = 3, 2, 4
N_CELLS = 14 * B
BYTES_MAX = 2 * 4 * 9 * B
"""Of two segments, nine blocks each."""
THEIRS = 10_000
"""Added to a token: the row that another node says comes of it."""


class Rows:
    """A segment whose row is the token that it was computed of."""

    def __init__(self, n_cells: int = N_CELLS) -> None:
        n_sequences = N_SLOTS + N_CELLS_ENTRIES + 1
        self._n_cells = n_cells
        self._cells = Cells(n_sequences)
        self.rows: list[list[int]] = [[] for _ in range(n_sequences)]
        self.is_recurrent = False
        self.n_window = 0
        self.has_grid_positions = False
        self.is_closed = False
        self.takes_states = True

    @property
    def lengths(self) -> list[int]:
        return self._cells.lengths

    @property
    def n_free(self) -> int:
        return self._n_cells - self._cells.n_used

    def compute(self, sequence: int, tokens: list[int]) -> None:
        self._cells.append(sequence, len(tokens))
        self.rows[sequence] += tokens
        assert self.n_free >= 0, "there was no room"

    def share(self, source: int, target: int, n_rows: int) -> None:
        assert self.rows[target] == []
        assert n_rows <= len(self.rows[source])
        self._cells.share(source, target, n_rows)
        self.rows[target] = self.rows[source][:n_rows]

    def truncate(self, sequence: int, n_rows: int) -> None:
        self._cells.truncate(sequence, n_rows)
        del self.rows[sequence][n_rows:]

    def state_size(self, sequence: int) -> int:
        return 4 * len(self.rows[sequence])

    def save(self, sequence: int) -> bytes:
        return np.array(self.rows[sequence], np.int32).tobytes()

    def save_rows(self, sequence: int, first: int, end: int) -> bytes:
        return np.array(self.rows[sequence][first:end], np.int32).tobytes()

    def append_rows(self, sequence: int, state: Any, n_rows: int) -> bool:
        if not self.takes_states:
            return False
        rows = np.frombuffer(state, np.int32).tolist()
        assert len(rows) == n_rows
        self.compute(sequence, rows)
        return True

    def restore(self, sequence: int, state: Any, n_rows: int) -> bool:
        assert self.rows[sequence] == []
        if not self.takes_states:
            return False
        rows = np.frombuffer(state, np.int32).tolist()
        assert len(rows) == n_rows
        self.compute(sequence, rows)
        return True


def read_state(state: Any) -> Any:
    if not len(state):
        raise BadState("nothing")
    return SimpleNamespace(n_rows=len(state) // 4, n_min=0)


def named(tokens: list[int], session: str = "", clients_of: str | None = None) -> Name:
    return token_name(b"root", np.array(tokens, np.int32), session, clients_of=clients_of)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class Worker:
    """A cache, its slots, and its segments."""

    def __init__(self, patch: pytest.MonkeyPatch, n_segments: int = 2, **changed: Any) -> None:
        self.clock = Clock()
        patch.setattr(prefix_cache_module, "time", self.clock)
        patch.setattr(prefix_cache_module, "read_state", read_state)
        kept = {"n_cells_entries": N_CELLS_ENTRIES, "n_entries": N_ENTRIES, "max_bytes": BYTES_MAX} | changed
        self.slots = Slots(N_SLOTS)
        self.cache = PrefixCache(
            EngineSettings(n_slots=N_SLOTS, prefixes=PrefixSettings(min_tokens=B, **kept)), self.slots
        )
        self.segments = tuple(Rows() for _ in range(n_segments))
        self.where: Any = self.segments
        self.running: dict[str, list[int]] = {}
        """Request -> its tokens."""

    def begin(
        self, request_id: str, tokens: list[int], clients_of: str | None = None, **how: Any
    ) -> int | None:
        """How many rows it got; None where there was no room for the others."""
        name = named(tokens, clients_of=clients_of)
        slot = self.slots.take(request_id)
        n_reused = self.cache.reuse(request_id, self.where, name, len(tokens) - 1, **how)
        for segment in self.segments:
            assert [row % THEIRS for row in segment.rows[slot]] == tokens[:n_reused]
        n_missing = len(tokens) - n_reused
        if self.cache.make_room(self.where, n_missing) < n_missing:
            self._leave(request_id)
            return None
        for segment in self.segments:
            segment.compute(slot, tokens[n_reused:])
        self.running[request_id] = tokens
        self.cache.follow(request_id, self.where, lambda: name)
        return n_reused

    def end(self, request_id: str, *, keeps: bool = True) -> None:
        tokens = self.running.pop(request_id)
        if keeps:
            self.cache.keep(request_id, self.where, named(tokens))
        self._leave(request_id)

    def _leave(self, request_id: str) -> None:
        self.cache.end(request_id, self.segments)
        slot = self.slots.release(request_id)
        assert slot is not None
        for segment in self.segments:
            segment.truncate(slot, 0)

    def run(self, tokens: list[int], request_id: str = "r") -> int:
        n_reused = self.begin(request_id, tokens)
        assert n_reused is not None
        self.end(request_id)
        return n_reused

    def check(self) -> None:
        """Nothing is kept that is not what it is called, and no cell is lost."""
        used = {self.slots.get(request_id) for request_id in self.running}
        for kept in self.cache:
            tokens = kept.name.tokens.tolist()[: kept.n_rows]
            if kept.sequence is not None:
                assert kept.sequence not in used
                used.add(kept.sequence)
                rows = [segment.rows[kept.sequence] for segment in self.segments]
            else:
                rows = [np.frombuffer(state, np.int32).tolist() for state in kept.states]
                assert len(rows) == len(self.segments)
            is_theirs = bool(kept.unchecked)
            for each in rows:
                assert len(each) == kept.n_rows
                assert is_theirs or all(row < THEIRS for row in each) or self.trusts_theirs
                if tokens:
                    assert [row % THEIRS for row in each] == tokens
        for segment in self.segments:
            for sequence, of_sequence in enumerate(segment.rows):
                assert sequence in used or not of_sequence
        assert self.cache.n_bytes <= BYTES_MAX
        assert len(self.cache) <= N_ENTRIES

    trusts_theirs = False
    """Whether a check has found rows of another node right."""


STEMS = [list(range(100 * i, 100 * i + 6 * B)) for i in range(2)]
TOKENS = st.builds(
    lambda stem, n_common, n_more, other: STEMS[stem][:n_common] + [9000 + other] * n_more,
    st.integers(0, 1),
    st.integers(1, 4).map(lambda n: n * B),
    st.integers(1, B),
    st.integers(0, 1),
)


class Events(RuleBasedStateMachine):
    @initialize(n_segments=st.integers(1, 2))
    def open(self, n_segments: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.worker = Worker(self.patch, n_segments)
        self.n_begun = 0

    @rule(tokens=TOKENS, own_kv=st.booleans())
    def begin(self, tokens: list[int], own_kv: bool) -> None:
        worker = self.worker
        if len(worker.running) == N_SLOTS:
            return
        name = named(tokens)
        n_kept = worker.cache.look_up(worker.where, name) * B
        request_id = f"r{self.n_begun}"
        self.n_begun += 1
        n_reused = worker.begin(request_id, tokens, own_kv=own_kv)
        if n_reused is None:
            return
        slot = worker.slots.get(request_id)
        assert slot is not None
        if own_kv and not worker.trusts_theirs:
            assert all(row < THEIRS for segment in worker.segments for row in segment.rows[slot])
        elif worker.cache.n_bytes == 0 and not own_kv:
            assert n_reused >= min(n_kept, (len(tokens) - 1) // B * B)

    @rule(data=st.data(), keeps=st.booleans())
    def end(self, data: st.DataObject, keeps: bool) -> None:
        if self.worker.running:
            self.worker.end(data.draw(st.sampled_from(sorted(self.worker.running))), keeps=keeps)

    @rule()
    def need_room(self) -> None:
        n_free = self.worker.cache.make_room(self.worker.where, N_CELLS)
        assert n_free == min(segment.n_free for segment in self.worker.segments)
        assert all(kept.sequence is None for kept in self.worker.cache)

    @rule(seconds=st.sampled_from([1.0, 300.0, 601.0]))
    def wait(self, seconds: float) -> None:
        self.worker.clock.now_s += seconds
        self.worker.cache.expire()
        assert all(self.worker.clock.now_s - kept.used_at <= 600.0 for kept in self.worker.cache)
        expires_s = self.worker.cache.next_expiry_s()
        assert (expires_s is None) == (len(self.worker.cache) == 0)

    @rule(tokens=TOKENS)
    def export(self, tokens: list[int]) -> None:
        worker = self.worker
        exported = complete(worker.cache.exporting(worker.where, named(tokens)))
        if exported is not None:
            n_blocks, states = exported
            assert len(states) == len(worker.segments)
            for state in states:
                assert np.frombuffer(state, np.int32).tolist() == tokens[: n_blocks * B]

    @rule(tokens=TOKENS)
    def hear_of_rows(self, tokens: list[int]) -> None:
        """From another node, with all blocks."""
        worker, tokens = self.worker, tokens[: len(tokens) // B * B]
        theirs = np.array([token + THEIRS for token in tokens], np.int32).tobytes()
        name = Name(named(tokens).hashes)
        is_taken = complete(worker.cache.taking_from_peer(worker.where, name, in_slices(theirs, len(tokens))))
        assert len(worker.segments) == 1 or not is_taken

    @rule(tokens=TOKENS)
    def refute(self, tokens: list[int]) -> None:
        tokens = tokens[: len(tokens) // B * B]
        self.worker.cache.judge(named(tokens), is_right=False)
        wrong = named(tokens).hashes[-1]
        assert all(kept.unchecked != wrong for kept in self.worker.cache)

    @rule(tokens=TOKENS)
    def export_slice(self, tokens: list[int]) -> None:
        worker, n = self.worker, len(tokens) // B * B
        rows = worker.cache.export_rows(worker.where, named(tokens[:n]), n - 5, 5)
        if rows is not None:
            assert np.frombuffer(rows, np.int32).tolist() == tokens[n - 5 : n]
        assert worker.cache.export_rows(worker.where, named(tokens[:n]), n - 5, 6) is None

    @invariant()
    def everything_is_what_it_is_called(self) -> None:
        if hasattr(self, "worker"):
            self.worker.check()

    def teardown(self) -> None:
        if not hasattr(self, "worker"):
            return
        for request_id in list(self.worker.running):
            self.worker.end(request_id)
        self.worker.check()
        self.worker.cache.clear()
        assert [any(each.rows) for each in self.worker.segments] == [False] * len(self.worker.segments)
        assert self.worker.cache.n_bytes == 0
        self.patch.undo()


TestEvents = Events.TestCase
TestEvents.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(monkeypatch, n_segments=1)


def in_slices(state: bytes, n_rows: int, n_each: int = 50) -> list[tuple[bytes, int]]:
    return [(state[4 * at : 4 * (at + n_each)], min(n_each, n_rows - at)) for at in range(0, n_rows, n_each)]


def from_peer(worker: Worker, tokens: list[int], *, shift: int = THEIRS, other_format: bool = False) -> bool:
    theirs = np.array([token + shift for token in tokens], np.int32).tobytes()
    name = Name(named(tokens).hashes)
    whole = [(theirs, len(tokens))]
    return complete(worker.cache.taking_from_peer(worker.where, name, whole, other_format=other_format))


def right_rows_of_another_format(worker: Worker, tokens: list[int]) -> None:
    assert from_peer(worker, tokens, other_format=True)
    worker.cache.judge(named(tokens), is_right=True)
    worker.trusts_theirs = True


def test_the_fullest_segment_says_how_much_room_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch)
    worker.segments[1].compute(0, STEMS[0][:B])
    assert worker.cache.n_free(worker.where) == N_CELLS - B
    assert worker.cache.make_room(worker.where, N_CELLS) == N_CELLS - B


def test_a_request_shares_the_rows_of_one_that_runs_in_the_same_segments(worker: Worker) -> None:
    tokens = STEMS[0][: 2 * B + 5]
    assert worker.begin("first", tokens, "a") == 0
    assert worker.begin("second", [*tokens, 1], "a") == len(tokens), "to the last row"
    for clients_of in ("b", None):
        assert worker.begin("of another node", [*tokens, 1], clients_of) == 2 * B
        worker.end("of another node", keeps=False)
    other = (Rows(),)
    assert worker.cache.reuse("third", other, named(tokens), len(tokens)) == 0  # type: ignore[arg-type]
    worker.slots.release("third")
    assert worker.cache.look_up(worker.where, named(tokens)) == 2
    for request_id in ("first", "second"):
        worker.end(request_id, keeps=False)
    assert worker.cache.look_up(worker.where, named(tokens)) == 0
    assert worker.begin("fourth", tokens) == 0


def test_a_request_that_has_no_slot_any_more_lends_nothing(worker: Worker) -> None:
    tokens = STEMS[0][: 2 * B]
    worker.cache.follow("gone", worker.where, lambda: named(tokens))
    assert worker.begin("r", tokens) == 0


def test_less_than_is_worth_it_is_neither_kept_nor_shared(worker: Worker) -> None:
    assert worker.run(STEMS[0][: B - 1]) == 0
    assert len(worker.cache) == 0
    assert worker.run(STEMS[0][:B]) == 0
    assert len(worker.cache) == 1
    assert worker.run([*STEMS[0][:B], 1]) == B


def test_a_beginning_of_what_is_kept_is_not_kept_again_and_a_longer_one_replaces_it(worker: Worker) -> None:
    worker.run(STEMS[0][: 2 * B])
    worker.run(STEMS[0][:B])
    assert [kept.n_rows for kept in worker.cache] == [2 * B]
    worker.run(STEMS[0][: 3 * B])
    assert [kept.n_rows for kept in worker.cache] == [3 * B]
    assert worker.cache.n_changes == 3


def test_what_nobody_uses_expires_also_without_a_word(worker: Worker) -> None:
    tokens = STEMS[0][: 2 * B]
    assert worker.cache.next_expiry_s() is None
    worker.run(tokens)
    worker.clock.now_s += 599.0
    assert worker.cache.next_expiry_s() == 1.0
    assert worker.begin("r", tokens) == B, "the last row is run again, and blocks are whole"
    worker.end("r", keeps=False)
    worker.clock.now_s += 601.0
    assert worker.cache.next_expiry_s() == 0.0
    assert worker.begin("r", tokens) == 0, "it has expired, although nobody was told to look"
    worker.check()


def test_where_it_is_turned_off_nothing_is_kept_shared_or_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, n_segments=1, n_entries=0)
    tokens = STEMS[0][: 2 * B]
    worker.begin("first", tokens)
    assert worker.begin("second", tokens) == 0
    worker.end("first")
    assert len(worker.cache) == 0
    assert not from_peer(worker, tokens)
    state = np.array(tokens, np.int32).tobytes()
    assert not worker.cache.take(worker.where, named(tokens), Snapshot((state,), len(tokens), 0))
    assert complete(worker.cache.exporting(worker.where, named(tokens))) is None


def test_rows_of_a_peer_are_taken_where_they_just_fit(worker: Worker) -> None:
    tokens = STEMS[0][: 4 * B]
    worker.segments[0].compute(0, [1] * (N_CELLS - 4 * B + 1))
    assert not from_peer(worker, tokens)
    worker.segments[0].truncate(0, N_CELLS - 4 * B)
    assert from_peer(worker, tokens)
    assert worker.segments[0].n_free == 0
    assert from_peer(worker, tokens), "they are there"
    assert len(worker.cache) == 1
    worker.segments[0].truncate(0, 0)
    worker.check()


@pytest.mark.parametrize("meanwhile", ["a step", "no room", "closed"])
def test_rows_of_a_peer_come_in_slices_between_which_others_step(worker: Worker, meanwhile: str) -> None:
    tokens = STEMS[0][: 2 * B]
    theirs = np.array([token + THEIRS for token in tokens], np.int32).tobytes()
    slices = in_slices(theirs, len(tokens))
    taking = worker.cache.taking_from_peer(worker.where, Name(named(tokens).hashes), slices)
    (segment,) = worker.segments
    next(taking)
    assert len(worker.cache) == 0, "nobody uses a part of it"
    segment.compute(0, list(range(segment.n_free if meanwhile == "no room" else 5)))
    segment.is_closed = meanwhile == "closed"
    n_more, is_taken = 0, None
    try:
        while True:
            next(taking)
            n_more += 1
    except StopIteration as end:
        is_taken = end.value
    segment.is_closed = False
    assert is_taken is (meanwhile == "a step")
    assert n_more == (len(slices) - 1 if is_taken else 0)
    assert len(worker.cache) == is_taken
    segment.truncate(0, 0)
    if meanwhile != "closed":
        worker.check()


def test_rows_of_a_peer_that_are_not_these_are_refused_and_take_nothing(worker: Worker) -> None:
    tokens = STEMS[0][: 2 * B]
    name = Name(named(tokens).hashes)
    for slices in ([(b"", 2 * B - 1)], [(b"", B), (b"", B + 1)], []):
        with pytest.raises(BadState, match="rows"):
            complete(worker.cache.taking_from_peer(worker.where, name, slices))
    with pytest.raises(BadState):
        complete(worker.cache.taking_from_peer(worker.where, Name(()), []))
    worker.segments[0].takes_states = False
    for _ in range(2 * N_CELLS_ENTRIES):
        with pytest.raises(BadState, match="other layers"):
            from_peer(worker, tokens)
    assert len(worker.cache) == 0
    worker.segments[0].takes_states = True
    assert from_peer(worker, tokens)
    worker.check()


def test_a_peers_rows_take_the_sequence_of_what_is_wanted_least(worker: Worker) -> None:
    for i in range(N_CELLS_ENTRIES):
        worker.clock.now_s += 1.0
        worker.run(STEMS[i][: 2 * B])
    worker.clock.now_s += 1.0
    assert from_peer(worker, list(range(500, 500 + 2 * B)))
    in_cells = [kept.sequence is not None for kept in worker.cache]
    assert in_cells == [False, True, True]
    worker.check()


@pytest.mark.parametrize("is_right", [True, False])
def test_what_rests_on_rows_of_a_peer_shares_their_verdict(worker: Worker, is_right: bool) -> None:
    stem = STEMS[0]
    assert from_peer(worker, stem[: 2 * B])
    assert worker.begin("own", stem[: 2 * B + 5], own_kv=True) == 0
    worker.end("own", keeps=False)
    assert worker.begin("first", stem[: 3 * B]) == 2 * B
    assert worker.begin("second", stem[: 4 * B]) == 3 * B, "by way of the first one"
    worker.end("first")
    assert all(kept.unchecked for kept in worker.cache)
    assert worker.cache.export_rows(worker.where, named(stem[: 2 * B]), 0, B) is None
    worker.trusts_theirs = is_right
    worker.cache.judge(named(stem[: 2 * B]), is_right=is_right)
    assert [kept.unchecked for kept in worker.cache] == [b""] * (is_right and len(worker.cache))
    worker.end("second")
    assert bool(len(worker.cache)) is is_right
    assert (worker.cache.export_rows(worker.where, named(stem[: 2 * B]), 0, B) is not None) is is_right
    worker.check()


def test_rows_to_be_checked_are_lent_from_cells_or_host_memory_while_they_are_kept(worker: Worker) -> None:
    tokens = STEMS[0][: 2 * B]
    assert not worker.cache.lend("check", worker.where, named(tokens), B)
    assert from_peer(worker, tokens)
    for in_cells in (True, False):
        if not in_cells:
            worker.cache.make_room(worker.where, N_CELLS)
            assert worker.cache.n_bytes > 0
        assert worker.cache.lend("check", worker.where, named(tokens), B)
        slot = worker.slots.get("check")
        assert slot is not None
        assert worker.segments[0].rows[slot] == [token + THEIRS for token in tokens[:B]]
        worker.segments[0].truncate(slot, 0)
        worker.slots.release("check")
    worker.cache.judge(named(tokens), is_right=True)
    assert not worker.cache.lend("check", worker.where, named(tokens), B), "nothing is left to check"


def test_rows_come_back_from_host_memory_only_where_there_is_room_for_them(worker: Worker) -> None:
    tokens = STEMS[0][: 4 * B]
    worker.run(tokens)
    worker.cache.make_room(worker.where, N_CELLS)
    (kept,) = worker.cache
    assert kept.sequence is None
    worker.segments[0].compute(0, [1] * (N_CELLS - 4 * B + 1))
    assert worker.cache.export_rows(worker.where, named(tokens), 0, B) is None
    worker.segments[0].truncate(0, N_CELLS - 4 * B)
    rows = worker.cache.export_rows(worker.where, named(tokens), B, B)
    assert rows is not None
    assert np.frombuffer(rows, np.int32).tolist() == tokens[B : 2 * B]
    worker.segments[0].truncate(0, 0)
    worker.check()


@pytest.mark.parametrize("which", [0, -1])
def test_rows_that_a_segment_does_not_take_back_are_computed_anew_and_leave_nothing(
    worker: Worker, which: int
) -> None:
    tokens = STEMS[0][: 4 * B]
    worker.run(tokens)
    worker.cache.make_room(worker.where, N_CELLS)
    worker.segments[which].takes_states = False
    for _ in range(2 * N_CELLS_ENTRIES):
        assert worker.cache.export_rows(worker.where, named(tokens), 0, B) is None
    assert worker.begin("r", tokens) == 0
    worker.end("r", keeps=False)
    worker.segments[which].takes_states = True
    assert worker.begin("r", tokens) == len(tokens) - B
    worker.end("r", keeps=False)
    worker.check()


def test_a_request_that_is_renamed_keeps_what_is_said_of_it(worker: Worker) -> None:
    tokens = STEMS[0][: 3 * B]
    assert from_peer(worker, tokens[: 2 * B])
    slot = worker.slots.take("old")
    assert worker.cache.name("old", worker.where, named(tokens)) == 2 * B
    worker.segments[0].compute(slot, tokens[2 * B :])
    worker.cache.rename("old", "new")
    worker.slots.rename("old", "new")
    assert worker.begin("other", [*tokens, 1]) == 3 * B, "it runs"
    worker.end("other", keeps=False)
    worker.cache.end("new", worker.segments)
    longest = max(worker.cache, key=lambda kept: kept.n_rows)
    assert (longest.n_rows, longest.name.hashes) == (3 * B, named(tokens).hashes)
    assert longest.unchecked
    worker.segments[0].truncate(slot, 0)
    worker.slots.release("new")
    worker.cache.rename("unknown", "unknown too")
    worker.check()


def test_a_named_request_is_kept_as_far_as_it_came_and_only_of_segments_that_are_there(
    worker: Worker,
) -> None:
    tokens = STEMS[0][: 3 * B]
    for present, n_kept in (((), 0), (worker.segments, 2 * B)):
        slot = worker.slots.take("r")
        assert worker.cache.name("r", worker.where, named(tokens)) == 0
        worker.segments[0].compute(slot, tokens[: 2 * B + 7])
        worker.cache.end("r", present)
        assert sum(kept.n_rows for kept in worker.cache) == n_kept
        worker.segments[0].truncate(slot, 0)
        worker.slots.release("r")
    assert worker.cache.look_up(worker.where, named(tokens)) == 2


def test_segments_that_are_recurrent_or_see_a_window_take_no_part_in_travel(worker: Worker) -> None:
    tokens = STEMS[0][: 2 * B]
    (segment,) = worker.segments
    assert worker.cache.travels(worker.where)
    assert not worker.cache.travels((*worker.where, Rows()))  # type: ignore[arg-type]
    segment.n_window = 8
    assert not worker.cache.travels(worker.where)
    assert not from_peer(worker, tokens)
    segment.n_window, segment.is_recurrent = 0, True
    assert not worker.cache.travels(worker.where)
    assert worker.run(tokens) == 0
    assert len(worker.cache) == 0, "nor is anything kept of a recurrent one"
    segment.is_recurrent, segment.has_grid_positions = False, True
    assert not worker.cache.travels(worker.where)
    segment.has_grid_positions = False
    worker.run(tokens)
    segment.is_recurrent = True
    assert worker.begin("r", tokens) == 0
    assert complete(worker.cache.exporting(worker.where, named(tokens))) is None


def test_bytes_from_elsewhere_are_taken_where_they_fit_and_are_what_they_are_called(worker: Worker) -> None:
    tokens = STEMS[0][: 2 * B]
    state = np.array(tokens, np.int32).tobytes()
    good = Snapshot((state,), 2 * B, 0)
    for snapshot in (Snapshot((state, state), 2 * B, 0), Snapshot((state,), B, 0)):
        with pytest.raises(BadState):
            worker.cache.take(worker.where, named(tokens), snapshot)
    huge = Snapshot((bytes(BYTES_MAX + 1),), 2 * B, 0)
    assert not worker.cache.take(worker.where, named(tokens), huge)
    assert worker.cache.take(worker.where, named(tokens), good)
    assert worker.cache.take(worker.where, named(tokens), good)
    assert (len(worker.cache), worker.cache.n_bytes) == (1, len(state))
    assert worker.begin("r", tokens) == B, "the last row is run again, and blocks are whole"
    worker.end("r", keeps=False)
    worker.check()


def exported(worker: Worker, tokens: list[int]) -> list[list[int]] | None:
    found = complete(worker.cache.exporting(worker.where, named(tokens)))
    worker.check()  # Nothing is left where rows were copied from.
    if found is None:
        return None
    n_blocks, states = found
    rows = [np.frombuffer(state, np.int32).tolist() for state in states]
    assert all(len(each) == n_blocks * B for each in rows)
    return rows


def test_rows_are_exported_from_cells_and_from_host_memory_as_far_as_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, stem = Worker(monkeypatch), STEMS[0]
    assert exported(worker, stem[: 2 * B]) is None
    worker.run(stem[: 3 * B])
    for in_cells in (True, False):
        if not in_cells:
            worker.cache.make_room(worker.where, N_CELLS)
            assert worker.cache.n_bytes > 0
        for n_wanted, n_given in ((3, 3), (2, 2), (4, 3)):
            assert exported(worker, stem[: n_wanted * B]) == [stem[: n_given * B]] * 2
        assert exported(worker, STEMS[1][:B]) is None
    # In host memory they are what is sent, and nothing is copied.
    (kept,) = worker.cache
    found = complete(worker.cache.exporting(worker.where, named(stem[: 3 * B])))
    assert found is not None
    assert all(a is b for a, b in zip(found[1], kept.states, strict=True))


def test_rows_that_host_memory_has_no_room_for_are_neither_exported_nor_moved_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = Worker(monkeypatch, max_bytes=2 * 4 * 2 * B - 1)
    worker.run(STEMS[0][: 2 * B])
    assert exported(worker, STEMS[0][: 2 * B]) is None
    assert exported(worker, STEMS[0][:B]) == [STEMS[0][:B]] * 2
    worker.cache.make_room(worker.where, N_CELLS)
    assert len(worker.cache) == 0
    worker.check()


def test_an_export_ends_where_a_segment_is_closed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch)
    worker.run(STEMS[0][: 2 * B])
    export = worker.cache.exporting(worker.where, named(STEMS[0][: 2 * B]))
    next(export)
    worker.segments[1].is_closed = True
    with pytest.raises(StopIteration) as end:
        export.send(None)
    assert end.value.value is None
    assert worker.segments[0].rows[N_SLOTS + N_CELLS_ENTRIES] == []


def test_rows_that_can_only_be_used_to_some_length_stay_so_wherever_they_are(worker: Worker) -> None:
    stem = STEMS[0]
    state = np.array(stem[: 3 * B], np.int32).tobytes()
    assert worker.cache.take(worker.where, named(stem[: 3 * B]), Snapshot((state,), 3 * B, 2 * B))
    shorter, longer = [*stem[:B], *[1] * B], [*stem[: 2 * B], *[1] * B]
    assert worker.begin("r", [*stem[: 3 * B], 1]) == 3 * B
    for request_id, tokens, n_reused in (("s", shorter, 0), ("t", longer, 2 * B)):
        assert worker.begin(request_id, tokens) == n_reused
        worker.end(request_id, keeps=False)
    worker.end("r")
    for _ in range(2):
        for request_id, tokens, n_reused in (("s", shorter, 0), ("t", longer, 2 * B)):
            assert worker.begin(request_id, tokens) == n_reused
            worker.end(request_id, keeps=False)
        assert worker.begin("u", [*stem[: 3 * B], 1], any_length=True) == 0
        worker.end("u", keeps=False)
        worker.cache.make_room(worker.where, N_CELLS)


def test_checked_work_shares_the_rows_of_a_request_that_runs_on_no_others(worker: Worker) -> None:
    tokens = STEMS[0][: 2 * B]
    worker.begin("first", tokens)
    assert worker.begin("second", [*tokens, 1], own_kv=True) == 2 * B
    for request_id in ("first", "second"):
        worker.end(request_id, keeps=False)
    assert from_peer(worker, tokens)
    assert worker.begin("first", [*tokens, 1]) == 2 * B
    assert worker.begin("second", [*tokens, 1], own_kv=True) == 0
    assert worker.begin("third", [*tokens, 1], own_kv=True) == 2 * B, "of the second one"


def test_what_rests_on_rows_of_another_format_says_so_until_it_ends(worker: Worker) -> None:
    stem, says_so = STEMS[0], worker.cache.is_of_other_format
    right_rows_of_another_format(worker, stem[: 2 * B])
    assert worker.begin("first", stem[: 3 * B]) == 2 * B
    assert worker.begin("second", stem[: 4 * B]) == 3 * B, "by way of the first one"
    assert worker.begin("own", [*stem[: 3 * B], 1], own_kv=True) == 0
    assert [says_so(each) for each in ("first", "second", "own")] == [True, True, False]
    worker.end("own", keeps=False)
    worker.cache.rename("first", "renamed")
    worker.slots.rename("first", "renamed")
    worker.running["renamed"] = worker.running.pop("first")
    assert (says_so("first"), says_so("renamed")) == (False, True)
    for request_id in ("renamed", "second"):
        worker.end(request_id)
        assert not says_so(request_id)
    assert all(kept.other_format for kept in worker.cache)
    assert worker.cache.export_rows(worker.where, named(stem[: 2 * B]), 0, B) is None
    worker.check()


def test_rows_of_another_format_are_kept_once_and_own_ones_beside_them(worker: Worker) -> None:
    stem = STEMS[0]
    right_rows_of_another_format(worker, stem[: 3 * B])
    n_changes = worker.cache.n_changes
    assert worker.begin("again", stem[: 3 * B]) == 2 * B
    worker.end("again")
    assert worker.cache.n_changes == n_changes, "they are known"
    assert worker.begin("own", stem[: 3 * B], own_kv=True) == 0
    worker.end("own")
    assert [kept.other_format for kept in worker.cache] == [False], "own ones take their place"
    worker.check()


def test_own_rows_stay_and_come_first_also_from_host_memory(worker: Worker) -> None:
    stem, says_so = STEMS[0], worker.cache.is_of_other_format
    worker.run(stem[: 2 * B])
    worker.cache.make_room(worker.where, N_CELLS)
    right_rows_of_another_format(worker, stem[: 4 * B])
    assert worker.begin("long", stem[: 5 * B]) == 4 * B
    assert says_so("long")
    for runs in (True, False):
        if not runs:
            worker.end("long")
        assert worker.begin("short", stem[: 2 * B + 1]) == 2 * B
        assert not says_so("short")
        worker.end("short", keeps=False)
    worker.check()
