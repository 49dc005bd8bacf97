"""Gossip that waits for more of its kind, and what its waiting saves."""

from __future__ import annotations

import heapq
import itertools
import math
import random

import pytest

from swarmllm.swarm.libp2p.held_gossip import WAITING_MAX, HeldGossip


def test_what_waits_goes_together_when_the_first_of_it_is_due() -> None:
    held = HeldGossip(random.Random(1))
    assert held.due_at_s == math.inf
    held.hold("peer", b"1", "first", 4.0, now=10.0)
    assert 12.0 <= held.due_at_s <= 14.0
    held.hold("peer", b"2", "second", 4.0, now=11.9)
    held.hold("other", b"2", "second", 100.0, now=11.9)
    assert held.due(11.9) == []
    assert held.due(14.0) == [("peer", ["first", "second"])]
    assert held.due_at_s > 14.0


def test_what_is_in_a_hurry_takes_along_what_is_not() -> None:
    held = HeldGossip(random.Random(1))
    held.hold("peer", b"1", "patient", 100.0, now=0.0)
    held.hold("peer", b"2", "urgent", 0.2, now=0.0)
    assert held.due(0.2) == [("peer", ["patient", "urgent"])]


def test_nobody_is_told_what_he_has_told_meanwhile() -> None:
    held = HeldGossip(random.Random(1))
    for peer in ("a", "b"):
        held.hold(peer, b"1", "first", 4.0, now=0.0)
        held.hold(peer, b"2", "second", 4.0, now=0.0)
    held.knows("a", b"1")
    held.knows("a", b"3")
    held.knows("stranger", b"1")
    assert dict(held.due(4.0)) == {"a": ["second"], "b": ["first", "second"]}
    held.hold("a", b"4", "fourth", 4.0, now=4.0)
    held.knows("a", b"4")
    assert held.due_at_s == math.inf


def test_so_many_wait_and_no_more() -> None:
    held = HeldGossip(random.Random(1))
    for number in range(WAITING_MAX):
        assert held.due(0.0) == []
        held.hold("peer", b"%d" % number, number, 4.0, now=0.0)
    assert held.due(0.0) == [("peer", list(range(WAITING_MAX)))]


def test_nothing_waits_for_who_is_gone() -> None:
    held = HeldGossip(random.Random(1))
    held.hold("peer", b"1", "first", 4.0, now=0.0)
    held.forget("peer")
    held.forget("peer")
    assert (held.due_at_s, held.due(100.0)) == (math.inf, [])


def copies_of_each(n_nodes: int, degree: int, wait_s: float, way_s: float) -> tuple[float, float]:
    """(copies of a message that comes to a node of a random mesh, seconds until the last one has it)"""
    rng = random.Random(1)
    mesh: list[set[int]] = [set() for _ in range(n_nodes)]
    for node in range(n_nodes):
        while len(mesh[node]) < degree // 2:
            other = rng.choice([n for n in range(n_nodes) if n != node])
            mesh[node].add(other)
    for node, others in enumerate(mesh):
        for other in list(others):
            mesh[other].add(node)
    held = [HeldGossip(random.Random(node)) for node in range(n_nodes)]
    counter = itertools.count()
    events: list[tuple[float, int, int, int | None]] = [(0.0, next(counter), 0, None)]
    """(when, -, to whom, from whom); to -1: what is due at a node."""
    has: dict[int, float] = {}
    n_copies = 0
    while events:
        now, _, node, sender = heapq.heappop(events)
        if node < 0:
            assert sender is not None
            for peer, _messages in held[sender].due(now):
                heapq.heappush(events, (now + way_s, next(counter), peer, sender))
            continue
        n_copies += sender is not None
        if sender is not None:
            held[node].knows(sender, b"it")
        if node in has:
            continue
        has[node] = now
        for peer in sorted(mesh[node] - {sender}):
            held[node].hold(peer, b"it", "it", wait_s, now)
            heapq.heappush(events, (held[node]._waiting[peer].due_at_s, next(counter), -1, node))
    assert len(has) == n_nodes
    return n_copies / n_nodes, max(has.values())


@pytest.mark.parametrize("n_nodes", [100, 1000])
def test_waiting_saves_the_copies_that_would_cross_on_the_way(n_nodes: int) -> None:
    at_once, _ = copies_of_each(n_nodes, 4, 0.0, 0.05)
    waiting, until_s = copies_of_each(n_nodes, 4, 3.0, 0.05)
    assert at_once > 2.4
    assert waiting < 2.1
    assert until_s < 30.0
