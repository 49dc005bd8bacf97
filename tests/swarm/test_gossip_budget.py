"""Gossip that one peer passes on: floods and replays cost it, an honest swarm's traffic does not."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import trio
from hypothesis import given
from hypothesis import strategies as st
from libp2p.pubsub.pb import rpc_pb2

from swarmllm.swarm.libp2p.gossip import (
    BYTES_BURST,
    BYTES_PER_S,
    MESSAGES_BURST,
    MESSAGES_PER_S,
    GossipBudget,
    UnsignedPubsub,
)
from swarmllm.swarm.libp2p.held_gossip import HeldGossip
from swarmllm.swarm.peers.trust import TrustEvent


@given(
    st.lists(st.tuples(st.sampled_from("abcde"), st.floats(0, 0.5), st.integers(0, 600_000)), max_size=300)
)
def test_no_peer_passes_on_more_than_its_rate(messages: list[tuple[str, float, int]]) -> None:
    budget = GossipBudget(peers_max=8)
    now, n_admitted, n_bytes = 0.0, dict.fromkeys("abcde", 0), dict.fromkeys("abcde", 0)
    for peer, passed_s, size in messages:
        now += passed_s
        if budget.admit(peer, size, now):
            n_admitted[peer] += 1
            n_bytes[peer] += size
    for peer in "abcde":
        assert n_admitted[peer] <= MESSAGES_BURST + now * MESSAGES_PER_S
        assert n_bytes[peer] <= BYTES_BURST + now * BYTES_PER_S + 1


def test_a_flood_of_one_peer_leaves_the_others_theirs() -> None:
    budget = GossipBudget()
    assert sum(budget.admit("hostile", 200, 0.0) for _ in range(20_000)) == MESSAGES_BURST
    assert budget.admit("honest", 200, 0.0)


def test_a_full_mesh_that_works_and_starts_up_stays_within() -> None:
    """All records of 256 nodes at once, and then a record of each every second, by way of one neighbour."""
    budget = GossipBudget()
    assert all(budget.admit("neighbour", 8192, 0.0) for _ in range(4 * 256))
    for second in range(1, 120):
        assert all(budget.admit("neighbour", 4096, float(second)) for _ in range(256))


def test_peers_that_left_are_forgotten() -> None:
    budget = GossipBudget(peers_max=16)
    for n in range(1000):
        budget.admit(f"peer{n}", 1, 0.0)
    assert len(budget) == 16


async def test_a_flood_is_dropped_and_noted_with_the_peer_that_passed_it_on() -> None:
    events: list[tuple[str, TrustEvent]] = []
    taken: list[str] = []
    pubsub: Any = UnsignedPubsub.__new__(UnsignedPubsub)
    pubsub.budget = GossipBudget()
    pubsub.note = lambda node_id, event, _detail="": events.append((node_id, event))

    pubsub._is_subscribed_to_msg = lambda _message: True
    pubsub._is_msg_seen = lambda _message: False
    pubsub.router = SimpleNamespace(held=HeldGossip(Random(1)))
    pubsub.get_message_id = lambda message: message.data

    async def push(forwarder: Any, _message: Any) -> None:
        taken.append(str(forwarder))

    pubsub.push_msg = push

    async def send(peer: str, n: int) -> None:
        for first in range(0, n, 100):
            messages = [
                rpc_pb2.Message(data=b"%d" % each, topicIDs=["t"]) for each in range(first, first + 100)
            ]
            await pubsub._take(peer, rpc_pb2.RPC(publish=messages))

    pubsub.max_subscriptions_per_rpc = 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, "hostile", 6000)
        nursery.start_soon(send, "honest", 600)
    assert taken.count("honest") == 600
    assert MESSAGES_BURST <= taken.count("hostile") < 6000
    assert set(events) == {("hostile", TrustEvent.FLOODED)}
