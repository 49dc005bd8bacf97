"""The index of reachable nodes, against what a look at every node would say."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.dialler import Dialler
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.reachable import ReachableNodes
from swarmllm.swarm.peers.reachable_index import TURN_NODES, TURN_S, ContactState, Look, ReachableIndex
from swarmllm.swarm.records.envelope_book import Digest, EnvelopeBook
from swarmllm_proto.envelope import Envelope, seal
from swarmllm_proto.identifiers import NodeId

ME = node_id_named("me")
NODES = [node_id_named(f"node {number}") for number in range(24)]
UNTRIED_MAX = 3


def sealed(node_id: NodeId, sequence: int, record: bytes = b"record") -> bytes:
    envelope = Envelope(node_id=node_id, started_at_ms=1, sequence=sequence, record=record)
    return seal(envelope, lambda content: b"s" * 64)


class Swarm:
    """One node's knowledge of some others, to which anything may happen at any time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 1000.0
        self.connected: Parts[float] = Parts.alone()
        self.book = EnvelopeBook(ME, lambda *_: True, nodes_max=18)
        self.dialler = Dialler(ME, random.Random(seed))
        self.nodes = ReachableNodes(
            self.book, self.dialler, self.connected, ChangeFeed(), untried_max=UNTRIED_MAX
        )
        self.needed: set[NodeId] = set()
        self.nodes.needed = lambda: [self.needed]

    def anything(self) -> None:
        node_id, sequence = self.random.choice(NODES), self.random.randrange(4)
        age_s = self.random.choice([0.0, 1.0, 30.0])
        match self.random.randrange(17):
            case 0 | 1:
                record = self.random.choice([b"", b"record", b"record"])
                self.book.take(sealed(node_id, sequence, record), self.now, connected=self.connected)
            case 2:
                self.book.hear(node_id, (1, sequence), self.now)
            case 3:
                self.book.lacking([Digest(node_id, 1, sequence, age_s)], self.now)
            case 4:
                self.book.take(sealed(node_id, sequence), self.now, ages_s={node_id: age_s})
            case 5 | 6 | 15 | 16:
                where = Address("192.0.2.1", self.random.randrange(1, 4))
                self.dialler.suggest(node_id, [where][: self.random.randrange(4)], self.now, max_failures=3)
            case 7:
                self.dialler.answered(node_id)
                self.connected.put_last(node_id, self.now)
            case 8:
                if self.connected.drop(node_id) is not None:
                    self.dialler.lost(node_id, self.now, on_purpose=self.random.random() < 0.5)
            case 9:
                if self.random.random() < 0.5:
                    self.dialler.doubt(node_id, self.now)
                else:
                    self.dialler.answered(node_id)
            case 10:
                self.dialler.dialled(node_id, self.now, succeeded=self.random.random() < 0.3)
            case 11:
                self.dialler.lost_early(node_id, self.now)
            case 12:
                for each in self.book.expire(self.now, self.connected) or [node_id]:
                    self.dialler.forget(each)
            case 13:
                self.needed ^= {node_id}
            case 14:
                self.now += self.random.choice([0.0, 0.5, 2.5, 5.0, 10.0, 70.0])

    def looked_at_one_by_one(self) -> tuple[set[NodeId], set[NodeId]]:
        """(connected or tried, untried), without a limit to the untried."""
        certain, untried = set(self.connected), set()
        for node_id in NODES:
            heard_at_s = self.book.heard_at_s(node_id)
            if node_id in certain or heard_at_s is None:
                continue
            if self.now > self.dialler.may_answer_from_s(node_id, heard_at_s):
                (certain if self.dialler.is_tried(node_id) else untried).add(node_id)
        return certain, untried


@pytest.mark.parametrize("seed", range(4))
def test_after_any_events_it_says_what_a_look_at_every_node_would_say(seed: int) -> None:
    swarm = Swarm(seed)
    n_crowded = n_untried = 0
    for _ in range(3000):
        swarm.anything()
        if swarm.random.random() < 0.3:
            continue
        reachable, untried = swarm.nodes.at(swarm.now), swarm.nodes.untried(swarm.now)
        certain, all_untried = swarm.looked_at_one_by_one()
        assert reachable - untried == certain
        assert untried <= all_untried
        assert len(untried) == min(UNTRIED_MAX, len(all_untried))
        assert len(untried & swarm.needed) == min(UNTRIED_MAX, len(all_untried & swarm.needed))
        n_crowded += len(all_untried) > UNTRIED_MAX
        n_untried += bool(untried)
    assert (n_crowded > 20, n_untried > 200) == (True, True), "the events must lead somewhere"


class Names:
    """Untried nodes that could all be dialled at once."""

    def __init__(self, *names: str, untried_max: int) -> None:
        self.n_looks = 0
        self.index = ReachableIndex(self.look, untried_max=untried_max)
        self.hears(*names)

    def hears(self, *names: str) -> None:
        for name in names:
            self.index.changed(NodeId(name))

    def look(self, node_id: NodeId) -> Look:
        self.n_looks += 1
        return Look(ContactState.UNTRIED, 0.0)

    def counted(self, now: float, *needed: Collection[str]) -> frozenset[NodeId]:
        self.index.settle(now, lambda: [set(map(NodeId, each)) for each in needed])
        return self.index.untried


def test_no_name_keeps_another_out_for_ever() -> None:
    """However many say that they hold what is asked for, and however long they have been there."""
    fakes = [f"fake {number}" for number in range(10 * TURN_NODES)]
    names = Names(*fakes, untried_max=2 * TURN_NODES)
    assert names.counted(1.0, fakes) < set(fakes)
    names.hears("newcomer")
    everybody = [*fakes, "newcomer"]
    now, counted = 1.0, names.counted(1.0, everybody)
    seen, n_turns = set(counted), 0
    while "newcomer" not in counted:
        now, n_turns = now + TURN_S, n_turns + 1
        before, counted = counted, names.counted(now, everybody)
        assert len(counted) == 2 * TURN_NODES
        assert len(counted - before) <= TURN_NODES, "not all at once"
        seen |= counted
        assert n_turns <= 10
    assert names.counted(now + TURN_S / 2, everybody) == counted, "a turn lasts for some time"
    assert len(seen) == 10 * TURN_NODES + 1


def test_it_looks_at_those_only_of_which_something_has_changed() -> None:
    names = Names(*(f"n{number}" for number in range(1000)), untried_max=10)
    names.counted(1.0)
    assert names.n_looks == 1000
    names.counted(2.0)
    names.hears("n3", "n3", "n4")
    names.counted(2.0)
    assert names.n_looks == 1002
