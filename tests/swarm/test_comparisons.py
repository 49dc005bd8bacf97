"""When a node compares its records again with those that it is connected with."""

from __future__ import annotations

import random

import pytest
import trio
from trio.testing import MockClock

from bench.common.record_swarm import RecordNetwork, RecordNode
from bench.disturbances import RecordSwarm, started
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.records.comparison_pace import BUSY_MAX_S, BUSY_SHARE, FIRST_S, MAX_S, ComparisonPace
from swarmllm.swarm.records.envelope_book import EnvelopeBook
from swarmllm.swarm.records.exchange import RecordExchange
from swarmllm_proto.identifiers import NodeId

A, B = node_id_named("a"), node_id_named("b")


def pace() -> ComparisonPace:
    made = ComparisonPace(random.Random(1))
    made.begin(0.0)
    return made


def test_where_nothing_is_new_it_is_ever_rarer() -> None:
    p = pace()
    assert p.due_at_s >= 0.75 * MAX_S
    p.learned(10.0)
    assert p.due_at_s <= 10.0 + 1.25 * FIRST_S
    waits_s = []
    now = p.due_at_s
    for _ in range(12):
        p.compared(0, 0.0, now)
        waits_s.append(p.due_at_s - now)
        now = p.due_at_s
    assert waits_s[0] <= 2.5 * FIRST_S
    assert waits_s == sorted(waits_s) or min(waits_s[-4:]) >= 0.75 * MAX_S
    assert max(waits_s) <= 1.25 * MAX_S
    p.compared(3, 0.0, now)
    assert p.due_at_s - now <= 1.25 * FIRST_S


def test_who_asks_and_knows_something_else_is_asked_next_and_only_so_often() -> None:
    p = pace()
    p.differs(A, 10.0)
    p.differs(B, 10.0)
    assert p.first == A
    assert p.due_at_s <= 10.0 + FIRST_S
    p.compared(0, 0.0, 11.0)
    assert p.first is None
    p.differs(A, 11.0)
    assert p.first is None, "one drawn by lot comes between"
    p.compared(0, 0.0, 20.0)
    p.differs(B, 20.0)
    assert p.first == B
    assert p.due_at_s >= 20.0 + 0.75 * FIRST_S, "whatever it says how often"


def test_a_slow_comparison_is_followed_by_a_longer_pause() -> None:
    p = pace()
    p.compared(1, FIRST_S, 10.0)
    assert p.due_at_s >= 10.0 + 0.75 * BUSY_SHARE * FIRST_S
    p.compared(1, 100 * BUSY_MAX_S, 100.0)
    assert 100.0 + 0.75 * BUSY_MAX_S <= p.due_at_s <= 100.0 + 1.25 * BUSY_MAX_S
    p.learned(100.0)
    assert p.due_at_s >= 100.0 + 0.75 * BUSY_MAX_S


async def test_all_learn_of_all_without_gossip(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of nodes that start together, most news comes by comparisons, each of which only two take part in."""
    monkeypatch.setattr(RecordNode, "_fill_mesh", lambda self: None)
    async with trio.open_nursery() as nursery:
        swarm = RecordSwarm(RecordNetwork(nursery, 1), random.Random(1), peers_max=3)
        with trio.fail_after(90.0):
            await started(swarm, 60)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("has_room", [True, False])
async def test_only_nodes_that_can_know_all_compare_again(
    has_room: bool, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In full books each comparison would drive out what the one before it brought."""
    compared: list[RecordExchange] = []
    synchronise = RecordExchange.synchronise

    async def counted(self: RecordExchange, node_id: NodeId, **options: bool) -> int:
        compared.append(self)
        return await synchronise(self, node_id, **options)

    monkeypatch.setattr(RecordExchange, "synchronise", counted)
    monkeypatch.setattr(EnvelopeBook, "has_room", has_room)
    async with trio.open_nursery() as nursery:
        swarm = RecordSwarm(RecordNetwork(nursery, 1), random.Random(1))
        await started(swarm, 12)
        await trio.sleep(MAX_S)
        compared.clear()
        await trio.sleep(2 * MAX_S)
        assert (len(compared) >= 12) == has_room, len(compared)
        nursery.cancel_scope.cancel()
