"""The directory of peers: a peer begins with its first part and is forgotten with its last."""

from __future__ import annotations

import typing
from dataclasses import fields, is_dataclass

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers import directory
from swarmllm.swarm.peers.directory import Peer, PeerDirectory
from swarmllm.swarm.peers.parts import Parts, PassingParts, PeerTable
from swarmllm_proto.identifiers import NodeId

IDS = [node_id_named(name) for name in "abcde"]
ids = st.sampled_from(IDS)


class Lasts:
    def __init__(self, until_s: float) -> None:
        self.until_s = until_s

    def is_over(self, now: float) -> bool:
        return now >= self.until_s


class TwoRooms(PeerTable):
    class Peer:
        def __init__(self, node_id: NodeId) -> None:
            self.node_id = node_id
            self.n_parts = 0
            self.one: float | None = None
            self.other: Lasts | None = None

    def __init__(self) -> None:
        super().__init__(TwoRooms.Peer)
        self.one: Parts[float] = Parts(self, "one")
        self.other: PassingParts[Lasts] = PassingParts(self, "other")


class DirectoryBesideDictionaries(RuleBasedStateMachine):
    """Two rooms' parts behave as two dictionaries would, and the peers are those that are in either."""

    def __init__(self) -> None:
        super().__init__()
        self.table = TwoRooms()
        self.one: dict[NodeId, float] = {}
        self.other: dict[NodeId, Lasts] = {}

    @rule(node_id=ids, value=st.floats(0, 9))
    def put(self, node_id: NodeId, value: float) -> None:
        self.one[node_id] = value
        assert self.table.one.put(node_id, value) == value

    @rule(node_id=ids, value=st.floats(0, 9))
    def put_last(self, node_id: NodeId, value: float) -> None:
        self.one.pop(node_id, None)
        self.one[node_id] = value
        self.table.one.put_last(node_id, value)

    @rule(node_id=ids, until_s=st.floats(0, 9))
    def put_other(self, node_id: NodeId, until_s: float) -> None:
        self.other[node_id] = self.table.other.put(node_id, Lasts(until_s))

    @rule(node_id=ids)
    def drop(self, node_id: NodeId) -> None:
        assert self.table.one.drop(node_id) == self.one.pop(node_id, None)

    @rule(now=st.floats(0, 9))
    def tidy(self, now: float) -> None:
        self.other = {node_id: each for node_id, each in self.other.items() if each.until_s > now}
        self.table.tidy(now)

    @rule()
    def drop_first(self) -> None:
        if self.one:
            del self.one[next(iter(self.one))]
            self.table.one.drop_first()

    @invariant()
    def is_the_same(self) -> None:
        assert list(self.table.one.items()) == list(self.one.items())
        assert list(self.table.other.items()) == list(self.other.items())
        assert list(self.table.one) == list(self.one)
        assert list(self.table.one.values()) == list(self.one.values())
        assert (len(self.table.one), len(self.table.other)) == (len(self.one), len(self.other))
        known = {*self.one, *self.other}
        for node_id in IDS:
            assert self.table.one.get(node_id) == self.one.get(node_id)
            assert (node_id in self.table.one) == (node_id in self.one)
            assert (node_id in self.table) == (node_id in known)
        assert len(self.table) == len(known)


TestDirectoryBesideDictionaries = DirectoryBesideDictionaries.TestCase


@given(st.sets(ids))
def test_a_part_alone_keeps_a_peer_only_while_it_is_there(node_ids: set[NodeId]) -> None:
    parts: Parts[float] = Parts.alone()
    for node_id in node_ids:
        parts.put(node_id, 0.0)
    assert set(parts) == node_ids
    for node_id in node_ids:
        assert parts.drop(node_id) == 0.0
    assert not parts._peers
    assert not parts._having


def test_each_part_of_a_peer_is_one_rooms_and_of_its_type() -> None:
    held = PeerDirectory()
    rooms = [getattr(held, name) for name in vars(held)]
    rooms += [getattr(room, each.name) for room in rooms if is_dataclass(room) for each in fields(room)]
    names = {parts._name: parts for parts in rooms if isinstance(parts, Parts)}
    assert names.keys() == typing.get_type_hints(Peer).keys() - {"node_id", "n_parts"}
    source = typing.get_type_hints(Peer, vars(directory))
    for name, parts in names.items():
        (part_type, _) = typing.get_args(source[name])
        has_end = hasattr(part_type, "is_over")
        assert isinstance(parts, PassingParts) == has_end, name


def test_a_peer_is_shown_without_what_it_has_proved() -> None:
    held = PeerDirectory()
    held.membership_keys.put(IDS[0], b"secret")
    assert "secret" not in repr(held._peers)
