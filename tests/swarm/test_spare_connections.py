"""Connections that only carry gossip end where both ends have enough, and nobody is left with too few."""

from __future__ import annotations

import random
from collections.abc import Collection, Container

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.reachable import IDLE_S, Use
from swarmllm.swarm.peers.spare_connections import AGREES_AFTER_S, OFFERS_MAX, SpareConnections
from swarmllm_proto.identifiers import NodeId

PEERS_MAX = 4
TOLERATED_N = 5
NAMES = [NodeId(f"n{number}") for number in range(20)]


class End:
    """One node, with the uses of its connections."""

    def __init__(self, seed: int = 0) -> None:
        self.uses: Parts[Use] = Parts.alone()
        self.chosen: set[NodeId] = set()
        self.spare = SpareConnections(
            PEERS_MAX, self.uses, lambda node_id: node_id in self.chosen, random.Random(seed)
        )

    def connect(self, *names: NodeId, since_s: float = 0.0, is_for_gossip: bool = True) -> None:
        for name in names:
            self.uses.put(name, Use(0, since_s, is_for_gossip=is_for_gossip))

    def drop(self, name: NodeId) -> None:
        self.uses.drop(name)
        self.chosen.discard(name)

    def offered(self, now: float, kept: Container[NodeId] = ()) -> list[NodeId]:
        return self.spare.offered(list(self.uses), now, kept)

    def agrees(
        self, name: NodeId, staying: Collection[NodeId], now: float, kept: Container[NodeId] = ()
    ) -> bool:
        return self.spare.agrees(name, staying, now, kept)


def test_offers_are_made_beyond_the_tolerated_number_and_for_what_is_beyond_it() -> None:
    end = End()
    end.connect(*NAMES[:TOLERATED_N])
    assert end.offered(IDLE_S) == []
    end.connect(*NAMES[TOLERATED_N : TOLERATED_N + 2])
    assert len(end.offered(IDLE_S)) == 2


def test_so_many_are_offered_at_a_time_and_each_once() -> None:
    end = End()
    end.connect(*NAMES)
    first, then = end.offered(IDLE_S), end.offered(IDLE_S)
    assert len(first) == OFFERS_MAX
    assert set(first).isdisjoint(then)
    # Those that refused have their turn again.
    assert set(end.offered(2 * IDLE_S + 1)) & {*first, *then}


@pytest.mark.parametrize(
    "why", ["it has been used lately", "it was made for work", "it is kept"], ids=lambda why: why
)
def test_a_connection_of_use_is_neither_offered_nor_given_up(why: str) -> None:
    end = End()
    end.connect(*NAMES[:TOLERATED_N], since_s=IDLE_S)
    the_one = NAMES[TOLERATED_N]
    end.connect(
        the_one,
        since_s=IDLE_S if why == "it has been used lately" else 0.0,
        is_for_gossip=why != "it was made for work",
    )
    kept = [the_one] if why == "it is kept" else []
    assert end.offered(IDLE_S, kept) == []
    assert not end.agrees(the_one, list(end.uses), IDLE_S, kept)


ENOUGH = NAMES[: PEERS_MAX + 1]


def test_who_keeps_as_many_as_it_looks_for_agrees_and_nobody_else() -> None:
    end = End()
    end.connect(NAMES[0])
    assert end.agrees(NAMES[0], ENOUGH, AGREES_AFTER_S)
    assert not end.agrees(NAMES[1], ENOUGH, AGREES_AFTER_S), "nothing is known of it"
    assert not end.agrees(NAMES[0], ENOUGH, AGREES_AFTER_S - 0.1)
    assert not end.agrees(NAMES[0], ENOUGH[:PEERS_MAX], AGREES_AFTER_S)
    assert not end.agrees(NAMES[0], ENOUGH, 2 * AGREES_AFTER_S - 0.1), "it has just been refused"
    assert end.agrees(NAMES[0], ENOUGH, 2 * AGREES_AFTER_S)


def test_half_of_those_that_are_looked_for_stay_of_the_chosen_ones() -> None:
    """Whoever fills a node with connections of his own does not get the others ended."""
    end = End()
    end.connect(*NAMES)
    end.chosen |= set(NAMES[: PEERS_MAX // 2])
    assert not end.agrees(NAMES[0], NAMES, IDLE_S)
    assert end.agrees(NAMES[-1], NAMES, IDLE_S)
    for round_number in range(1, 6):
        assert end.chosen.isdisjoint(end.offered(round_number * IDLE_S * 2))
    end.chosen.add(NAMES[PEERS_MAX])
    assert end.agrees(NAMES[0], NAMES, 20 * IDLE_S)
    offered = {name for number in range(11, 40) for name in end.offered(number * IDLE_S * 2)}
    assert offered & end.chosen
    assert all(len(end.chosen.intersection(end.offered(n * IDLE_S * 2))) <= 1 for n in range(41, 60))


def test_work_between_offer_and_answer_is_seen() -> None:
    end = End()
    end.connect(*NAMES)
    (offered, *_) = end.offered(IDLE_S)
    assert not end.spare.was_used_since(offered, IDLE_S)
    use = end.uses.get(offered)
    assert use is not None
    use.again(IDLE_S + 0.01)
    assert end.spare.was_used_since(offered, IDLE_S)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), n_nodes=st.integers(12, 40))
def test_a_swarm_through_which_others_have_passed_keeps_few_connections_and_stays_one(
    seed: int, n_nodes: int
) -> None:
    """All know the first one, and each looks for its own connections beside it, wherever they are."""
    rng = random.Random(seed)
    ids = [NodeId(f"{number}") for number in range(n_nodes)]
    ends = {node_id: End(rng.randrange(2**32)) for node_id in ids}

    def connect(a: NodeId, b: NodeId) -> None:
        if b not in ends[a].uses:
            ends[a].chosen.add(b)
        ends[a].connect(b)
        ends[b].connect(a)

    for at, node_id in enumerate(ids[1:], 1):
        connect(node_id, ids[0])
        for other in rng.sample(ids[:at], min(at, rng.randrange(PEERS_MAX, 3 * PEERS_MAX))):
            if other != node_id:
                connect(node_id, other)
    looked_for = {node_id: min(PEERS_MAX, len(end.uses)) for node_id, end in ends.items()}
    chosen_kept = {node_id: min(PEERS_MAX // 2, len(end.chosen)) for node_id, end in ends.items()}
    for round_number in range(1, 3 * n_nodes):
        now = round_number * (IDLE_S + 1)
        for node_id in rng.sample(ids, n_nodes):
            for other in ends[node_id].offered(now):
                # The other one has been offered nothing since: it has no use of its own in the meantime.
                their = ends[other].uses.get(node_id)
                assert their is not None
                their.since_s = min(their.since_s, now - AGREES_AFTER_S)
                if ends[other].agrees(node_id, list(ends[other].uses), now):
                    ends[node_id].drop(other)
                    ends[other].drop(node_id)
    for node_id, end in ends.items():
        assert len(end.uses) >= looked_for[node_id]
        assert len(end.chosen) >= chosen_kept[node_id]
        if len(end.uses) > TOLERATED_N:
            assert all(
                len(ends[other].uses) <= PEERS_MAX
                or (node_id in ends[other].chosen and len(ends[other].chosen) <= PEERS_MAX // 2)
                or (other in end.chosen and len(end.chosen) <= PEERS_MAX // 2)
                for other in end.uses
            )
    seen, left = {ids[0]}, [ids[0]]
    while left:
        for other in set(ends[left.pop()].uses) - seen:
            seen.add(other)
            left.append(other)
    assert len(seen) == n_nodes
