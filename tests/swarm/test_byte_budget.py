"""The byte budget: no peer and no sum of peers holds more than it may, and room for others always stays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarmllm.swarm.byte_budget import (
    GUARANTEED_PEERS,
    LIMITS,
    TOTAL_MIB,
    BudgetKind,
    ByteBudget,
    Grant,
    Limit,
    largest_slow,
    reserve_within,
)
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import KIB, MIB, REQUEST_MAX, SWARM_PAYLOAD_MAX

SMALL = {kind: Limit(60, 100) for kind in BudgetKind}


class Use(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.budget = ByteBudget(SMALL)
        self.grants: list[Grant] = []

    @rule(peer=st.sampled_from("abcdef"), kind=st.sampled_from(BudgetKind), n=st.integers(0, 120))
    def reserve(self, peer: str, kind: BudgetKind, n: int) -> None:
        if (grant := self.budget.reserve(peer, kind, n)) is not None:
            self.grants.append(grant)

    @rule(data=st.data(), n=st.integers(0, 80))
    def grow(self, data: st.DataObject, n: int) -> None:
        if self.grants:
            data.draw(st.sampled_from(self.grants)).grow(n)

    @rule(data=st.data(), again=st.booleans())
    def release(self, data: st.DataObject, again: bool) -> None:
        if self.grants:
            grant = data.draw(st.sampled_from(self.grants))
            grant.release()
            if again:
                grant.release()
                assert not grant.grow(1)
            self.grants.remove(grant)

    @invariant()
    def sums_are_right_and_within_limits(self) -> None:
        assert self.budget.n_bytes == sum(grant.n_bytes for grant in self.grants)
        for kind in BudgetKind:
            of_kind = [grant for grant in self.grants if grant.kind is kind]
            assert sum(grant.n_bytes for grant in of_kind) <= SMALL[kind].in_all
            for peer in "abcdef":
                held = sum(grant.n_bytes for grant in of_kind if grant.peer == peer)
                assert held == self.budget.held(peer, kind) <= SMALL[kind].per_peer

    @invariant()
    def nothing_is_kept_of_who_holds_nothing(self) -> None:
        holders = {(grant.peer, grant.kind) for grant in self.grants if grant.n_bytes}
        assert {(peer, kind) for peer, held in self.budget._peers.items() for kind in held} == holders

    def teardown(self) -> None:
        for grant in self.grants:
            grant.release()
        assert self.budget.n_bytes == 0
        assert not self.budget._peers


TestUse = Use.TestCase


@given(st.sampled_from(BudgetKind), st.integers(1, GUARANTEED_PEERS - 1))
def test_every_peer_has_its_part_whatever_the_greedy_hold(kind: BudgetKind, n_greedy: int) -> None:
    budget = ByteBudget()
    size = 64 * KIB
    for n in range(n_greedy):
        while budget.reserve(f"greedy{n}", kind, size) is not None:
            size = min(MIB, 2 * size)
        size = 64 * KIB
    assert budget.n_bytes <= LIMITS[kind].in_all
    assert LIMITS[kind].guaranteed >= 64 * KIB
    for n in range(GUARANTEED_PEERS - n_greedy):
        assert budget.reserve(f"honest{n}", kind, LIMITS[kind].guaranteed) is not None


def test_what_one_grant_absorbs_is_released_once() -> None:
    budget = ByteBudget(SMALL)
    first, second = budget.reserve("peer", BudgetKind.JOBS, 3), budget.reserve("peer", BudgetKind.JOBS, 4)
    assert first is not None
    assert second is not None
    second.absorb(first)
    first.release()
    assert budget.held("peer", BudgetKind.JOBS) == 7
    second.release()
    assert budget.n_bytes == 0


def test_what_is_not_held_any_more_or_in_another_budget_is_not_absorbed() -> None:
    budget, other = ByteBudget(SMALL), ByteBudget(SMALL)
    grants = [each.reserve("peer", BudgetKind.JOBS, 5) for each in (budget, budget, other)]
    grant, released, elsewhere = (grant for grant in grants if grant is not None)
    released.release()
    for each in (released, elsewhere):
        grant.absorb(each)
        assert grant.n_bytes == 5
    grant.release()
    assert (budget.n_bytes, other.n_bytes) == (0, 5)


def test_nothing_may_be_reserved_of_a_full_budget_and_less_than_nothing_never() -> None:
    budget = ByteBudget(SMALL)
    assert budget.reserve("peer", BudgetKind.JOBS, SMALL[BudgetKind.JOBS].per_peer) is not None
    assert budget.reserve("peer", BudgetKind.JOBS, 1) is None
    assert budget.reserve("peer", BudgetKind.JOBS, 0) is not None
    with pytest.raises(ValueError, match="-1 bytes"):
        budget.reserve("peer", BudgetKind.JOBS, -1)


def test_what_others_hold_may_become_free_and_what_a_peer_holds_itself_counts_against_it() -> None:
    budget, kind = ByteBudget(SMALL), BudgetKind.MESSAGES
    assert budget.reserve("a", kind, 50) is not None
    assert budget.is_for_others_to_give("a", kind, 10)
    assert not budget.is_for_others_to_give("a", kind, 11)
    assert budget.is_for_others_to_give("b", kind, 60)
    assert not budget.is_for_others_to_give("b", kind, 61)


def test_the_largest_request_and_message_fit() -> None:
    budget = ByteBudget()
    assert budget.reserve("peer", BudgetKind.MESSAGES, SWARM_PAYLOAD_MAX)
    assert budget.reserve("peer", BudgetKind.JOBS, SWARM_PAYLOAD_MAX)
    for kind in (BudgetKind.REQUESTS, BudgetKind.RESPONSES, BudgetKind.ANSWERS):
        assert budget.reserve("peer", kind, REQUEST_MAX + 1)


def test_limits_follow_the_configured_total() -> None:
    assert ByteBudget.of_mib(TOTAL_MIB)._limits == LIMITS
    half = ByteBudget.of_mib(TOTAL_MIB // 2)
    assert half.reserve("peer", BudgetKind.REQUESTS, 17 * MIB) is None
    assert half.reserve("peer", BudgetKind.REQUESTS, 15 * MIB)


async def test_who_waits_gets_what_is_released(autojump_clock: object) -> None:
    budget = ByteBudget(SMALL)
    grant = budget.reserve("peer", BudgetKind.JOBS, 60)
    assert grant is not None
    assert await reserve_within(budget, "peer", BudgetKind.JOBS, 1, 1.0) is None
    assert await reserve_within(budget, "peer", BudgetKind.JOBS, 61, 1e9) is None
    grant.release()
    assert await reserve_within(budget, "peer", BudgetKind.JOBS, 60, 1.0)


class Payload:
    """What receives a payload."""

    def __init__(self, node_id: str, n_bytes: int, *, is_slow: bool) -> None:
        self.node_id, self.n_reserved_bytes, self.is_slow = NodeId(node_id), n_bytes, is_slow

    def give_way(self) -> None:
        raise AssertionError("nobody asked it to")


def test_of_slow_payloads_the_largest_of_another_node_gives_way() -> None:
    quick = Payload("a", 90, is_slow=False)
    own, idle = Payload("me", 80, is_slow=True), Payload("b", 0, is_slow=True)
    small, large = Payload("c", 1, is_slow=True), Payload("d", 2, is_slow=True)
    assert largest_slow([quick, own, idle, small, large], NodeId("me")) is large
    assert largest_slow([large, small], NodeId("me")) is large
    assert largest_slow([quick, own, idle], NodeId("me")) is None
