"""The count of cells, against a plain simulation in which every cell is an object."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_workers.engine.slots import Cells, HeldRequests, Slots
from swarmllm_workers.errors import CallError

N_SEQUENCES = 4
SEQUENCE = st.integers(0, N_SEQUENCES - 1)
STEP = st.one_of(
    st.tuples(st.just("append"), SEQUENCE, st.integers(0, 5)),
    st.tuples(st.just("truncate"), SEQUENCE, st.integers(0, 8)),
    st.tuples(st.just("share"), st.tuples(SEQUENCE, SEQUENCE), st.integers(0, 8)),
)


@given(st.lists(STEP, max_size=40))
def test_what_is_shared_counts_once(steps: list[tuple[str, int | tuple[int, int], int]]) -> None:
    cells = Cells(N_SEQUENCES)
    plain: list[list[object]] = [[] for _ in range(N_SEQUENCES)]
    for what, which, n in steps:
        if isinstance(which, tuple):
            source, target = which
            if source != target and not plain[target]:
                cells.share(source, target, n)
                plain[target] = plain[source][:n]
        elif what == "append":
            cells.append(which, n)
            plain[which] += [object() for _ in range(n)]
        else:
            unused = cells.truncate(which, n)
            others = {id(row) for i, each in enumerate(plain) if i != which for row in each}
            gone = [at for at in range(n, len(plain[which])) if id(plain[which][at]) not in others]
            assert sorted(at for first, end in unused for at in range(first, end)) == gone
            assert all(first < end for first, end in unused)
            del plain[which][n:]
        assert cells.lengths == [len(rows) for rows in plain]
        assert cells.n_used == len({id(row) for rows in plain for row in rows})
        for sequence, rows in enumerate(plain):
            others = {id(row) for i, each in enumerate(plain) if i != sequence for row in each}
            assert cells.n_alone(sequence) == len({id(row) for row in rows} - others)


def test_the_smallest_free_slot_is_taken_and_a_request_keeps_its_own() -> None:
    slots = Slots(2)
    assert [slots.take(each) for each in ("a", "b", "a")] == [0, 1, 0]
    with pytest.raises(CallError, match="all 2 slots are taken") as refused:
        slots.take("c")
    assert refused.value.kind == "no_slot"
    assert slots.release("a") == 0
    assert slots.take("c") == 0


def test_held_requests_go_in_the_order_in_which_they_were_held_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("swarmllm_workers.engine.slots.time.monotonic", lambda: now_s)
    released: list[str] = []

    def release(request_id: str) -> None:
        released.append(request_id)
        held.discard(request_id)

    held = HeldRequests(release)
    assert held.next_expiry_s() is None
    assert not held.let_go()
    for request_id, hold_s in (("a", 5.0), ("b", 30.0), ("c", 40.0), ("a", 60.0)):
        held.add(request_id, hold_s)
    assert held.next_expiry_s() == 30.0
    assert held.let_go()
    assert (released, "b" in held, "a" in held) == (["b"], False, True)
    now_s += 40.0
    held.expire()
    assert released == ["b", "c"]
    assert held.next_expiry_s() == 20.0


def test_slots_are_full_until_one_is_released_and_a_renamed_request_keeps_its_slot() -> None:
    slots = Slots(2)
    assert not slots.is_full
    slots.take("a")
    assert (slots.is_full, len(slots)) == (False, 1)
    slots.take("b")
    assert (slots.is_full, len(slots)) == (True, 2)
    slots.rename("a", "c")
    slots.rename("unknown", "d")
    assert [slots.get(each) for each in "abcd"] == [None, 1, 0, None]
    assert slots.release("a") is None
    assert slots.is_full
    assert slots.release("b") == 1
    assert slots.release("c") == 0
    assert (slots.is_full, len(slots)) == (False, 0)
    assert slots.take("e") == 0, "the smallest, whatever the order in which they were released"
