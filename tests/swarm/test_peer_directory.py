"""The directory of peers: a peer begins with its first part and is forgotten with its last."""

from __future__ import annotations

import contextlib
import gc
import random
import re
import typing
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarmllm.swarm.byte_budget import BudgetKind, ByteBudget, Limit
from swarmllm.swarm.data.bulk import BulkPeer
from swarmllm.swarm.data.holes import AGAIN_MAX_S, HoleTurn
from swarmllm.swarm.data.neighbour import FAILURES_COUNT_S, Neighbour
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.dht.messages import Contact
from swarmllm.swarm.discovery.dht.serving import BURST, QUESTIONS_PER_S, DhtAsker
from swarmllm.swarm.discovery.dht.table import ProviderBook
from swarmllm.swarm.discovery.dialler import Dialler
from swarmllm.swarm.discovery.reachability import DIAL_BACK_EVERY_S, DialBackTurn
from swarmllm.swarm.discovery.relay.client import ASK_AGAIN_S, RelayUse
from swarmllm.swarm.discovery.relay.service import RelayBook, Reservation
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.libp2p.gossip import MESSAGES_BURST, MESSAGES_PER_S, GossipAllowance, GossipBudget
from swarmllm.swarm.libp2p_router import open_libp2p_router
from swarmllm.swarm.membership.identity import Identity, verify
from swarmllm.swarm.membership.network_key import NetworkFile, new_secret, private_network
from swarmllm.swarm.peers import directory
from swarmllm.swarm.peers.directory import Peer, PeerDirectory
from swarmllm.swarm.peers.peer_table import Parts, PassingParts, PeerTable
from swarmllm.swarm.peers.trust import TrustBook, TrustEvent
from swarmllm.swarm.records.departures import FORGET_S, GAVE_UP_S, Departed, GaveUp
from swarmllm.swarm.records.envelope_book import EnvelopeBook
from swarmllm.swarm.records.registry import Registry, follow_router
from swarmllm.swarm.records.update_pace import COUNTS_AGAIN_S, CountedUpdate
from swarmllm.swarm.settings import SwarmSettings
from swarmllm_proto.codec import encode_record
from swarmllm_proto.envelope import Envelope, seal
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import NodeRecord

from .conftest import DEADLINE_S, until
from .handlers import Inbox
from .test_process_death import counted_on, node_process
from .test_records import new_identity

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
    names = {parts.name: parts for parts in held.parts}
    assert names.keys() == typing.get_type_hints(Peer).keys() - {"node_id", "n_parts"}
    source = typing.get_type_hints(Peer, vars(directory))
    for name, parts in names.items():
        (part_type, _) = typing.get_args(source[name])
        has_end = hasattr(part_type, "is_over")
        assert isinstance(parts, PassingParts) == has_end, name


def test_the_document_has_each_part() -> None:
    page = (Path(__file__).parents[2] / "docs" / "swarm.md").read_text("utf-8")
    table = page.partition("## What a node keeps of a peer")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(parts.name for parts in PeerDirectory().parts)


def test_a_peer_is_shown_without_what_it_has_proved() -> None:
    held = PeerDirectory()
    held.membership_keys.put(IDS[0], b"secret")
    assert "secret" not in repr(held._peers)


LATER_S = 1e5


async def echo(sender: str, body: bytes) -> bytes:
    return body


def homes_of(node_id: NodeId) -> list[str]:
    """The containers of this process that have the node as a key or a member, each with its owners."""
    gc.collect()
    found = [
        each
        for each in gc.get_objects()
        if isinstance(each, dict | set | frozenset | deque | list)
        and type(each).__module__ in ("builtins", "collections")
        and any(member == node_id for member in list(each) if type(member) is str)
    ]
    described = []
    for each in found:
        owners = [o for o in gc.get_referrers(each) if o is not found and not isinstance(o, FrameType)]
        described.append(f"{each!r:.200} of {[f'{type(owner)} {owner!r:.200}' for owner in owners]}")
    return described


@pytest.mark.slow
async def test_a_peer_that_has_gone_leaves_nothing_behind(tmp_path: Path) -> None:
    """It was connected on both planes, proved its membership, asked and answered. Where its record, its
    candidacy and its limits have expired there is nothing left that has its id for a key."""
    network = private_network(new_secret())
    for name in ("a", "other"):
        (tmp_path / name).mkdir()
        NetworkFile(tmp_path / name).change(lambda _: network)
    settings = SwarmSettings(tmp_path / "a", "127.0.0.1", 0, 0, mdns=False, relay_service=True)
    async with open_libp2p_router(settings) as a, trio.open_nursery() as nursery:
        registry = Registry(a.node_id, parts=a.directory.registry)
        await nursery.start(follow_router, registry, a)
        inbox = Inbox()
        a.serve(echo, inbox)
        async with node_process(tmp_path / "other", *a.addresses) as (process, text):
            node_id = NodeId(text)
            await until(a, lambda: a.connected() == {node_id})
            await counted_on(registry, [node_id])
            assert await a.request(node_id, b"question") == b"question"
            assert await a.fetch(node_id, b"x" * 300_000) == b"x" * 300_000
            await a.send(node_id, b"to and fro", bytes(300_000))
            await inbox.wait_for(1)
            had = {parts.name for parts in a.directory.parts if node_id in parts}
            assert process.stdin is not None
            await process.stdin.aclose()
            await until(a, lambda: not a.connected())
        assert {
            "connected_since_s",
            "membership_key",
            "envelope",
            "announced",
            "indexed_record",
            "neighbour",
        } <= had
        assert {"bulk", "gossip_allowance", "candidate"} <= had
        with trio.fail_after(DEADLINE_S):
            while node_id in a.host.connected() or node_id in a.directory.membership_keys:  # noqa: ASYNC110
                await trio.sleep(0.05)
        # As the tasks that forget do, each at its time.
        now = trio.current_time() + LATER_S
        a.spread.expire(now)
        a.directory.tidy(now)
        a._reachable.announce_changes(now)
        a.wide_area.dht.core.table.failed(node_id)
        with trio.fail_after(DEADLINE_S):
            while node_id in a.directory.registry.announced:  # noqa: ASYNC110
                await trio.sleep(0.05)
        left = [parts.name for parts in a.directory.parts if node_id in parts]
        assert left == []
        assert node_id not in a.directory
        assert homes_of(node_id) == []
        nursery.cancel_scope.cancel()


def state_of(held: PeerDirectory, node_id: NodeId) -> str:
    return repr([(parts.name, parts.get(node_id)) for parts in held.parts])


def says(identity: Identity, record: bytes, sequence: int = 1) -> bytes:
    said = Envelope(node_id=identity.node_id, started_at_ms=1, sequence=sequence, record=record)
    return seal(said, identity.sign)


def test_bad_facts_about_some_peers_disturb_no_other() -> None:
    """Each room hears what no honest node says, of many nodes and in their names, and each forgets them."""
    held, now = PeerDirectory(), 1000.0
    me, good, *liars = [new_identity(number) for number in range(1, 30)]
    book = EnvelopeBook(me.node_id, verify, held.records.envelopes)
    trust = TrustBook(peers=held.trust)
    gossip = GossipBudget(peers=held.gossip_allowances)
    budget = ByteBudget({kind: Limit(1000, 4000) for kind in BudgetKind}, held.held_bytes)
    relays = RelayBook(held.wide_area.reservations, n_circuits=held.wide_area.n_circuits)
    providers = ProviderBook(held.wide_area.dht.n_entries)
    dialler = Dialler(me.node_id, random.Random(0), peers=held.candidates)
    registry = Registry(me.node_id, parts=held.registry)

    record = encode_record(NodeRecord(node_id=good.node_id))
    book.take(says(good, record), now)
    registry.set_reachable([good.node_id])
    registry.apply(good.node_id, record)
    trust.note(good.node_id, TrustEvent.SERVED, now)
    gossip.admit(good.node_id, 10, now)
    assert budget.reserve(good.node_id, BudgetKind.REQUESTS, 10) is not None
    relays.reserve(good.node_id, now)
    providers.add(b"key", Contact(good.node_id), now)
    dialler.suggest(good.node_id, [Address("192.0.2.1", 1)], now)
    before = state_of(held, good.node_id)

    for liar in liars:
        in_anothers_name = says(good, b"forged", 2)[:-1] + b"!"
        for forged in (in_anothers_name, says(liar, b"\xc1"), b"\xc1", b""):
            with contextlib.suppress(ProtocolError):
                book.take(forged, now, ages_s={good.node_id: 1e9})
        for wrong in (record, b"\xc1"):
            with pytest.raises(ProtocolError):
                registry.apply(liar.node_id, wrong)
        registry.set_reachable([good.node_id, liar.node_id])
        for event in TrustEvent:
            trust.note(liar.node_id, event, now)
        while gossip.admit(liar.node_id, 2**20, now):
            pass
        assert budget.reserve(liar.node_id, BudgetKind.REQUESTS, 1001) is None
        budget.reserve(liar.node_id, BudgetKind.REQUESTS, 1000)
        for number in range(1000):
            providers.add(b"%d" % number, Contact(liar.node_id), now)
        relays.reserve(liar.node_id, now)
        dialler.suggest(liar.node_id, [], now, max_failures=1)
        assert state_of(held, good.node_id) == before
    everybody = len(held)
    for liar in liars:
        dialler.dialled(liar.node_id, now, succeeded=False)
        relays.lost(liar.node_id)
        registry.forget(liar.node_id)
        assert state_of(held, good.node_id) == before
    registry.set_reachable([good.node_id])
    book.expire(now + 1e6, {good.node_id})
    held.gossip_allowances.tidy(now)
    assert state_of(held, good.node_id) == before
    assert everybody == len(held) == 1 + len(liars), "the node itself, and of the others their events"


FAILED_AT_S = 100.0
SAYS_NOTHING_AFTER_S: dict[str, tuple[Any, float]] = {
    "counted_update": (CountedUpdate(FAILED_AT_S), COUNTS_AGAIN_S),
    "neighbour": (Neighbour(n_failures=3, retry_at_s=FAILED_AT_S), FAILURES_COUNT_S),
    "bulk": (BulkPeer(retry_at_s=FAILED_AT_S), 0.0),
    "hole_turn": (HoleTurn(n_failures=1, again_at_s=FAILED_AT_S), AGAIN_MAX_S),
    "gossip_allowance": (GossipAllowance(FAILED_AT_S, n_messages=0.0), MESSAGES_BURST / MESSAGES_PER_S),
    "dial_back_turn": (DialBackTurn(FAILED_AT_S), DIAL_BACK_EVERY_S),
    "reservation": (Reservation(FAILED_AT_S), 0.0),
    "relay": (RelayUse(FAILED_AT_S), ASK_AGAIN_S),
    "dht_asker": (DhtAsker(allowance=0.0, at_s=FAILED_AT_S), BURST / QUESTIONS_PER_S),
    "departed": (Departed(NodeId("12D3KooW"), "", (), FAILED_AT_S, 0.0), FORGET_S),
    "gave_up": (GaveUp((), FAILED_AT_S), GAVE_UP_S),
}
"""Of each part that time makes superfluous, the seconds after FAILED_AT_S until it is."""
IN_USE: dict[str, Any] = {
    "relay": RelayUse(0.0, reserved_until_s=1e9),
    "dht_asker": DhtAsker(n_streams=1),
    "bulk": BulkPeer(is_looking=True),
    "neighbour": Neighbour(connections={object()}),  # type: ignore[arg-type]
}


def test_a_part_goes_when_it_says_no_more_than_its_absence() -> None:
    held = PeerDirectory()
    passing = [parts for parts in held.parts if isinstance(parts, PassingParts)]
    assert {parts.name for parts in passing} == SAYS_NOTHING_AFTER_S.keys()
    for parts in passing:
        part, after_s = SAYS_NOTHING_AFTER_S[parts.name]
        parts.put(IDS[0], part)
        if parts.name in IN_USE:
            parts.put(IDS[1], IN_USE[parts.name])
        held.tidy(FAILED_AT_S + after_s - 0.01)
        assert IDS[0] in parts
        held.tidy(FAILED_AT_S + after_s)
        assert IDS[0] not in parts
        held.tidy(1e8)
        assert (IDS[1] in parts) == (parts.name in IN_USE)
