"""How the time of a worker is shared among those for whom it computes."""

from __future__ import annotations

import itertools

import pytest

from bench.processor_shares import MINE, OWNERS, THEIRS, part
from swarmllm_workers.schedule.owner_shares import (
    CREDIT,
    OWN,
    OWNERS_MAX,
    QUANTUM,
    OwnerShares,
    single_rows_max,
    work_of,
)
from swarmllm_workers.schedule.planner import Demand, Planner

SECONDS = 20.0


@pytest.mark.parametrize(
    ("whose", "mine", "theirs"), list(itertools.product(OWNERS, MINE, THEIRS)), ids="-".join
)
def test_a_request_beside_seven_others_goes_on_at_its_owners_share_of_its_speed(
    whose: str, mine: str, theirs: str
) -> None:
    fair = 1 / (len(set(OWNERS[whose])) + 1)
    # A token that goes around waits for the batch that runs when it comes back.
    least = 0.85 if mine.endswith("pipeline") else 0.95
    assert part(mine, theirs, OWNERS[whose], SECONDS) >= least * fair


@pytest.mark.parametrize("theirs", THEIRS)
def test_own_users_get_three_quarters_of_the_time(theirs: str) -> None:
    assert part("a prompt", theirs, OWNERS["seven members"], SECONDS, OWN) >= 0.7
    assert part("a prompt", theirs, OWNERS["one member"], SECONDS, OWN) >= 0.7


def demand(key: int, owner: str, n_rows: int = 1000) -> Demand:
    return Demand(key, "a", n_rows, is_decode=n_rows <= 16, owner=owner)


def keys(planner: Planner, demands: list[Demand]) -> list[int]:
    return [share.key for batch in planner.schedule(demands) for share in batch.shares]


def test_who_is_alone_owes_nothing_for_that_later() -> None:
    planner = Planner()
    for _ in range(100):
        assert keys(planner, [demand(1, "a")]) == [1]
        planner.charge({"a": 10 * QUANTUM})
    assert set(keys(planner, [demand(1, "a"), demand(2, "b")])) == {1, 2}


def test_who_has_used_more_waits_but_for_single_rows() -> None:
    planner, others = Planner(), [demand(1, "a"), demand(2, "a", 16), demand(3, "a", 1)]
    demands = [*others, demand(4, "b", 1)]
    assert set(keys(planner, demands)) == {1, 2, 3, 4}
    planner.charge({"a": QUANTUM, "b": 0.0})
    assert set(keys(planner, demands)) == {1, 2, 3, 4}
    planner.charge({"a": 1.0})
    assert set(keys(planner, demands)) == {3, 4}
    planner.charge({"b": QUANTUM + 1})
    assert set(keys(planner, demands)) == {1, 2, 3, 4}


def test_single_rows_of_who_has_used_more_leave_the_others_no_slower_than_their_share() -> None:
    planner = Planner()
    demands = [*(demand(key, "a", 1) for key in range(20)), demand(20, "b", 1)]
    assert len(keys(planner, demands)) == 21
    planner.charge({"a": 2 * QUANTUM})
    assert len(keys(planner, demands)) == single_rows_max(2) == 5
    assert work_of(5, 12, is_step=True) <= 2 * work_of(1, 12, is_step=True)


def test_prompts_of_who_has_used_least_come_first() -> None:
    planner, demands = Planner(), [demand(1, "a"), demand(2, "b")]
    keys(planner, demands)
    planner.charge({"a": 1.0})
    assert keys(planner, demands) == [2, 1]


def test_nobody_waits_for_a_work_that_finds_no_room() -> None:
    planner = Planner()
    demands = [demand(1, "a"), demand(2, "b")]
    keys(planner, demands)
    planner.charge({"a": 2 * QUANTUM})
    (batch,) = planner.schedule(demands)
    assert [share.key for share in batch.shares] == [2]
    planner.preempt(batch, demands, 0)
    assert set(keys(planner, demands)) == {1, 2}


def test_who_had_nothing_to_compute_begins_a_little_behind_the_others() -> None:
    shares = OwnerShares()
    shares.ahead({"a", "b"})
    shares.charge({"a": 100 * QUANTUM, "b": 100 * QUANTUM})
    assert not shares.ahead({"a", "b"})
    assert shares.ahead({"a", "b", "late"}) == {"a", "b"}
    assert shares.used("late") == 100 * QUANTUM - CREDIT


def test_only_so_many_owners_are_remembered() -> None:
    shares = OwnerShares()
    for number in range(3 * OWNERS_MAX):
        shares.ahead({"a", f"{number}"})
        shares.charge({"a": QUANTUM, f"{number}": 2 * QUANTUM})
    assert len(shares._used) <= OWNERS_MAX + 2
