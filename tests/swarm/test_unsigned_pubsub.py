"""Gossip of which nobody claims the authorship: what a claim would have done, it cannot do any more."""

from __future__ import annotations

import gc
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing
from gossip_reader import ValidGossip
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.peer.peerstore import env_to_send_in_RPC
from libp2p.pubsub import pubsub
from libp2p.pubsub.gossipsub import PROTOCOL_ID, GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.stream_muxer.yamux.yamux import YamuxStream
from libp2p.tools.anyio_service.trio_tasks import FunctionTask
from libp2p.utils import encode_varint_prefixed

from swarmllm.swarm.discovery.addresses import Address, own_addresses
from swarmllm.swarm.libp2p import gossip_mesh
from swarmllm.swarm.libp2p.gossip import (
    AUDIENCE_MAX,
    MODELS,
    TAKEN_AT_ONCE,
    Gossip,
    UnsignedPubsub,
    run_gossip,
)
from swarmllm.swarm.libp2p.gossip_mesh import (
    BETTER_PEERS_S,
    DEGREE_LOW,
    SETTLED_S,
    SETTLED_UPKEEP_S,
    UPKEEP_S,
    WORTH_OFFERING_BYTES,
    UnsignedGossipSub,
)
from swarmllm.swarm.libp2p.host import Host, run_libp2p
from swarmllm.swarm.membership.connection_gater import ConnectionGater
from swarmllm.swarm.membership.identity import load_or_create_identity
from swarmllm_proto.envelope import audience_of
from swarmllm_proto.identifiers import NodeId

from .conftest import DEADLINE_S

pytestmark = pytest.mark.slow


class Listener:
    """A host that gossips, and what it has heard."""

    def __init__(self, host: Host, gossip: Gossip) -> None:
        self.host = host
        self.gossip = gossip
        self.heard: list[bytes] = []
        self._changed = trio.lowlevel.ParkingLot()

    def take(self, _topic: str, content: bytes) -> None:
        self.heard.append(content)
        self._changed.unpark_all()

    async def hears(self, content: bytes) -> None:
        with trio.fail_after(DEADLINE_S):
            while content not in self.heard:
                await self._changed.park()


@asynccontextmanager
async def listener(folder: Path, reader: type[ValidGossip] = ValidGossip) -> AsyncIterator[Listener]:
    await trio.Path(folder).mkdir()
    identity = load_or_create_identity(folder)
    made: list[Listener] = []
    host = Host(identity, ConnectionGater())
    gossip = Gossip(
        "",
        reader(lambda topic, content: made[0].take(topic, content)),
        size_max_bytes={MODELS: 6000},
    )
    async with run_libp2p(host, own_addresses("127.0.0.1"), 0), run_gossip(gossip, host):
        made.append(Listener(host, gossip))
        yield made[0]


async def connect(one: Listener, other: Listener) -> None:
    with trio.fail_after(DEADLINE_S):
        await one.host.dial(other.host.node_id, [Address("127.0.0.1", other.host.port)])


async def speak_as(sender: Listener, receiver: Listener, message: rpc_pb2.Message) -> None:
    """Put a message of any making on the wire."""
    stream = await sender.host.open_stream(receiver.host.node_id, "/meshsub/1.1.0")
    rpc = rpc_pb2.RPC(publish=[message])
    await stream.write(encode_varint_prefixed(rpc.SerializeToString()))


async def test_a_message_travels_over_a_node_in_between(tmp_path: Path) -> None:
    async with (
        listener(tmp_path / "a") as a,
        listener(tmp_path / "b") as b,
        listener(tmp_path / "c") as c,
    ):
        await connect(a, b)
        await connect(c, b)
        await a.gossip.publish(MODELS, b"valid first")
        await c.hears(b"valid first")
        # More in a second than the library takes from one neighbour, which in a mesh speaks for everybody.
        burst = [b"valid %d" % n for n in range(25)]
        for content in burst:
            await a.gossip.publish(MODELS, content)
        for content in burst:
            await c.hears(content)
        assert not c.host.is_connected(a.host.node_id)


async def test_what_is_not_valid_is_neither_taken_in_nor_passed_on(tmp_path: Path) -> None:
    async with (
        listener(tmp_path / "liar") as liar,
        listener(tmp_path / "between") as between,
        listener(tmp_path / "far", Credulous) as far,
    ):
        await connect(liar, between)
        await connect(far, between)
        await speak_as(liar, between, rpc_pb2.Message(data=b"a lie", topicIDs=[MODELS]))
        await speak_as(liar, between, rpc_pb2.Message(data=b"valid", topicIDs=[MODELS]))
        await far.hears(b"valid")
        assert (between.heard, far.heard) == ([b"valid"], [b"valid"])


class Credulous(ValidGossip):
    def validate(self, topic: str, content: bytes) -> bool | None:
        return True


class Failing(ValidGossip):
    def receive(self, topic: str, content: bytes) -> None:
        super().receive(topic, content)
        raise ValueError


async def test_who_fails_to_take_a_message_in_passes_it_on_and_goes_on_reading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        listener(tmp_path / "a") as a,
        listener(tmp_path / "b", Failing) as b,
        listener(tmp_path / "c") as c,
    ):
        await connect(a, b)
        await connect(c, b)
        for content in (b"valid first", b"valid second"):
            await a.gossip.publish(MODELS, content)
            await b.hears(content)
            await c.hears(content)
    assert "taking in gossip on swarm/models" in caplog.text


async def test_many_messages_of_one_packet_give_others_their_turn(tmp_path: Path) -> None:
    async with listener(tmp_path / "a") as a, listener(tmp_path / "b") as b, trio.open_nursery() as nursery:
        await connect(a, b)
        order: list[str] = []

        async def another() -> None:
            while True:
                order.append("another")
                await trio.lowlevel.checkpoint()

        nursery.start_soon(another)
        rpc = rpc_pb2.RPC(
            publish=[
                rpc_pb2.Message(data=b"valid %d" % n, topicIDs=[MODELS]) for n in range(4 * TAKEN_AT_ONCE)
            ]
        )
        await a.gossip._pubsub._take(ID.from_base58(b.host.node_id), rpc)
        n_heard, n_turns = len(a.heard), len(order)
        nursery.cancel_scope.cancel()
    assert n_heard == 4 * TAKEN_AT_ONCE
    assert 1 <= n_turns < TAKEN_AT_ONCE


async def test_a_message_waits_for_the_subscription_of_a_peer_and_not_for_who_does_not_want_it(
    tmp_path: Path,
) -> None:
    async with (
        listener(tmp_path / "a") as a,
        listener(tmp_path / "b") as b,
        listener(tmp_path / "c") as c,
    ):
        await connect(a, b)
        await connect(c, b)
        await a.gossip.publish(MODELS, b"valid before")
        await c.hears(b"valid before")
        pubsub, late = b.gossip._pubsub, ID.from_base58(c.host.node_id)
        # As though it had not subscribed yet.
        pubsub.peer_topics[MODELS].discard(late)
        pubsub.router.mesh[MODELS].discard(late)
        await a.gossip.publish(MODELS, b"valid meanwhile")
        await b.hears(b"valid meanwhile")
        await trio.testing.wait_all_tasks_blocked()
        assert b"valid meanwhile" not in c.heard
        pubsub.handle_subscription(late, rpc_pb2.RPC.SubOpts(subscribe=True, topicid=MODELS))
        await c.hears(b"valid meanwhile")
        pubsub.router.mesh[MODELS].add(late)
        unwanted = pubsub.get_message_id(rpc_pb2.Message(data=b"valid, not wanted", topicIDs=[MODELS]))
        pubsub.router.dont_send_message_ids.setdefault(late, set()).add(unwanted)
        for content in (b"valid, not wanted", b"valid, wanted"):
            await a.gossip.publish(MODELS, content)
        await c.hears(b"valid, wanted")
        assert b"valid, not wanted" not in c.heard


async def test_who_speaks_in_the_name_of_another_does_not_silence_it(tmp_path: Path) -> None:
    """The library takes the second message under a name and number for a contradiction, and drops it."""
    async with (
        listener(tmp_path / "victim") as victim,
        listener(tmp_path / "between") as between,
        listener(tmp_path / "far") as far,
        listener(tmp_path / "attacker") as attacker,
    ):
        await connect(victim, between)
        await connect(far, between)
        await connect(attacker, between)
        name = ID.from_base58(victim.host.node_id).to_bytes()
        for number in range(20):
            claim = rpc_pb2.Message(
                data=b"valid, says the attacker",
                topicIDs=[MODELS],
                from_id=name,
                seqno=number.to_bytes(8, "big"),
            )
            await speak_as(attacker, between, claim)
        await victim.gossip.publish(MODELS, b"valid, says the victim")
        await far.hears(b"valid, says the victim")
        assert b"valid, says the attacker" not in between.heard + far.heard


def saying_to_whom(speaker: Listener) -> bytes:
    audience = speaker.gossip.audience(MODELS)
    assert audience is not None
    return b"|".join((b"valid", speaker.host.node_id.encode(), audience.hex().encode()))


async def until_subscribed(listeners: list[Listener], n_neighbours: dict[int, int]) -> None:
    """Each has so many neighbours."""
    with trio.fail_after(DEADLINE_S):
        for n, wanted in n_neighbours.items():
            pubsub = listeners[n].gossip._pubsub
            while len(pubsub.neighbours(MODELS)) != wanted:  # noqa: ASYNC110 (the library tells nobody)
                await trio.sleep(0.01)


@pytest.mark.parametrize("is_full", [True, False])
async def test_who_has_a_message_from_its_author_passes_it_on_only_to_those_who_lack_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    async with (
        listener(tmp_path / "a") as a,
        listener(tmp_path / "b") as b,
        listener(tmp_path / "c") as c,
    ):
        await connect(a, b)
        await connect(b, c)
        if is_full:
            await connect(a, c)
        await until_subscribed([a, b, c], {0: 2, 1: 2, 2: 2} if is_full else {0: 1, 1: 2, 2: 1})
        content = saying_to_whom(a)
        arrived: list[tuple[Listener, Listener]] = []
        """Who sent the content to whom."""

        def note(receiver: Listener) -> None:
            budget = receiver.gossip._pubsub.budget
            admit = budget.admit

            def noted(sender: NodeId, n_bytes: int, now: float) -> bool:
                if n_bytes == len(content):
                    arrived.append((next(n for n in (a, b, c) if n.host.node_id == sender), receiver))
                return bool(admit(sender, n_bytes, now))

            monkeypatch.setattr(budget, "admit", noted)

        for each in (a, b, c):
            note(each)
        await a.gossip.publish(MODELS, content)
        await b.hears(content)
        await c.hears(content)
        # What comes behind it over the same connections shows that nothing else was on its way.
        for sender, receiver in ((b, c), (c, b)):
            behind = b"valid, behind it, of %s" % sender.host.node_id.encode()
            await sender.gossip.publish(MODELS, behind)
            await receiver.hears(behind)
        assert len(arrived) == 2
        assert set(arrived) == ({(a, b), (a, c)} if is_full else {(a, b), (b, c)})


def test_of_many_subscribers_one_more_than_may_be_told_is_looked_at() -> None:
    looked_at: list[int] = []

    class Queues(dict[int, None]):
        def __contains__(self, peer: object) -> bool:
            looked_at.append(cast("int", peer))
            return super().__contains__(peer)

    peers = dict.fromkeys(range(500))
    pubsub: Any = SimpleNamespace(peer_topics={MODELS: peers}, peer_queues=Queues(peers))
    assert UnsignedPubsub.neighbours(pubsub, MODELS) == []
    assert len(looked_at) == AUDIENCE_MAX + 1
    del pubsub.peer_queues[1]
    pubsub.peer_topics[MODELS] = dict.fromkeys(range(1, AUDIENCE_MAX + 2))
    assert UnsignedPubsub.neighbours(pubsub, MODELS) == list(range(2, AUDIENCE_MAX + 2))


async def test_who_has_many_neighbours_leaves_it_to_the_mesh(tmp_path: Path) -> None:
    async with listener(tmp_path / "a") as a:
        pubsub = a.gossip._pubsub
        assert a.gossip.audience(MODELS) is None, "nobody is there"
        for n_neighbours in (1, AUDIENCE_MAX, AUDIENCE_MAX + 1):
            peers = {ID(b"%d" % n): None for n in range(n_neighbours)}
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(pubsub.peer_topics, MODELS, set(peers))
                patch.setattr(pubsub, "peer_queues", peers)
                is_told = n_neighbours <= AUDIENCE_MAX
                expected = audience_of([a.host.node_id, *map(str, peers)])
                assert a.gossip.audience(MODELS) == (expected if is_told else None)


async def test_what_is_offered_can_be_recognised(tmp_path: Path) -> None:
    """The recent messages are kept under the ids by which peers ask for them, but for small ones."""
    once = b"valid once" + bytes(WORTH_OFFERING_BYTES)
    async with listener(tmp_path / "a") as a:
        await a.gossip.publish(MODELS, b"valid and small")
        await a.gossip.publish(MODELS, once)
        pubsub = a.gossip._pubsub
        message = rpc_pb2.Message(data=once, topicIDs=[MODELS])
        message_id = pubsub.get_message_id(message)
        assert pubsub.router.mcache.get(message_id) == message
        assert pubsub.router.mcache.window(MODELS) == [message_id]
        assert TProtocol("/meshsub/1.2.0") in pubsub.protocols


def recorded(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, of: Callable[..., Any]) -> list[Any]:
    """What `of` makes of the arguments of each call to a method that goes on as before."""
    calls: list[Any] = []
    original: Callable[..., Awaitable[Any]] = getattr(owner, name)

    async def record(*arguments: Any, **options: Any) -> Any:
        calls.append(of(*arguments))
        return await original(*arguments, **options)

    monkeypatch.setattr(owner, name, record)
    return calls


async def test_a_newcomer_is_told_what_a_node_says_itself_and_not_what_it_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        listener(tmp_path / "far") as far,
        listener(tmp_path / "between") as between,
        listener(tmp_path / "newcomer") as newcomer,
    ):
        await between.gossip.publish(MODELS, b"valid, and old")
        await connect(far, between)
        await far.gossip.publish(MODELS, b"valid, from far away")
        await between.hears(b"valid, from far away")
        await between.gossip.publish(MODELS, b"valid, and new")
        await far.hears(b"valid, and new")
        await connect(newcomer, between)
        await newcomer.hears(b"valid, and new")
        stock = between.gossip._pubsub
        told = recorded(monkeypatch, stock, "write_msg", lambda _, rpc: [m.data for m in rpc.publish])
        await stock.router.send_recent_messages(ID.from_base58(newcomer.host.node_id), MODELS)
        assert [each for each in told if each] == [[b"valid, and new"]]
        monkeypatch.setattr(gossip_mesh, "JUST_SAID_S", 0.0)
        await stock.router.send_recent_messages(ID.from_base58(newcomer.host.node_id), MODELS)
        assert len([each for each in told if each]) == 1, "what was said a while ago is no news"


async def test_neighbours_are_told_of_large_messages_only_that_they_need_not_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with listener(tmp_path / "a") as a, listener(tmp_path / "b") as b:
        await connect(a, b)
        router = b.gossip._pubsub.router
        told = recorded(monkeypatch, router, "emit_idontwant", lambda ids, _peer: ids)
        with trio.fail_after(DEADLINE_S):
            while not router.mesh[MODELS]:  # noqa: ASYNC110 (the library tells nobody)
                await trio.sleep(0.02)
        await a.gossip.publish(MODELS, b"valid and small")
        await b.hears(b"valid and small")
        await trio.testing.wait_all_tasks_blocked()
        assert told == []
        large = b"valid and large" + bytes(5000)
        await a.gossip.publish(MODELS, large)
        await b.hears(large)
        await trio.testing.wait_all_tasks_blocked()
        message_id = a.gossip._pubsub.get_message_id(rpc_pb2.Message(data=large, topicIDs=[MODELS]))
        assert told == [[message_id]]


async def test_small_messages_are_not_answered_with_window_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with listener(tmp_path / "a") as a, listener(tmp_path / "b") as b:
        await connect(a, b)
        await a.gossip.publish(MODELS, b"valid before")
        await b.hears(b"valid before")
        updates = recorded(monkeypatch, YamuxStream, "send_window_update", lambda _, size: size)
        for number in range(20):
            await a.gossip.publish(MODELS, b"valid %d" % number)
            await b.hears(b"valid %d" % number)
        assert updates == []


async def test_gossip_goes_without_the_addresses_of_who_passes_it_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with listener(tmp_path / "a") as a, listener(tmp_path / "b") as b:
        taken: list[rpc_pb2.RPC] = recorded(monkeypatch, b.gossip._pubsub, "_take", lambda _peer, rpc: rpc)
        await connect(a, b)
        await a.gossip.publish(MODELS, b"valid message")
        await b.hears(b"valid message")
        assert [rpc.HasField("senderRecord") for rpc in taken if rpc.publish] == [False]


class WaitingGossip(ValidGossip):
    def may_wait_s(self, topic: str, content: bytes) -> float:
        return 1.0 if b"patient" in content else 0.0


async def test_what_may_wait_goes_together_and_what_may_not_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        listener(tmp_path / "a") as a,
        listener(tmp_path / "b", WaitingGossip) as b,
        listener(tmp_path / "c") as c,
    ):
        taken = recorded(
            monkeypatch, c.gossip._pubsub, "_take", lambda _, rpc: [each.data for each in rpc.publish]
        )
        await connect(a, b)
        await connect(b, c)
        await until_subscribed([a, b, c], {0: 1, 1: 2, 2: 1})
        with trio.fail_after(DEADLINE_S):
            while len(b.gossip._pubsub.router.mesh[MODELS]) < 2:  # noqa: ASYNC110 (the library tells nobody)
                await trio.sleep(0.02)
        patient = [b"valid, patient %d" % number for number in range(3)]
        for content in patient:
            await a.gossip.publish(MODELS, content)
            await b.hears(content)
        assert b.gossip._pubsub.router.held.due_at_s < trio.current_time() + 1.0
        await a.gossip.publish(MODELS, b"valid, urgent")
        await c.hears(b"valid, urgent")
        assert not any(content in c.heard for content in patient)
        for content in patient:
            await c.hears(content)
        assert [each for each in taken if each] == [[b"valid, urgent"], patient]


async def test_what_came_from_a_neighbour_does_not_wait_for_it(tmp_path: Path) -> None:
    async with listener(tmp_path / "a") as a, listener(tmp_path / "b") as b:
        await connect(a, b)
        pubsub, peer = a.gossip._pubsub, ID.from_base58(b.host.node_id)
        for content in (b"valid first", b"valid second"):
            message = rpc_pb2.Message(data=content, topicIDs=[MODELS])
            message_id = pubsub.get_message_id(message)
            pubsub.router.held.hold(peer, message_id, message, 1000.0, trio.current_time())
        await b.gossip.publish(MODELS, b"valid first")
        await a.hears(b"valid first")
        ((_, left),) = pubsub.router.held.due(trio.current_time() + 1000.0)
        assert [each.data for each in left] == [b"valid second"]


async def test_what_waits_is_offered_to_neighbours_outside_the_mesh_all_the_same(tmp_path: Path) -> None:
    """A node that is in no mesh yet hears of news in no other way, and news waits where many nodes start."""
    large = b"valid, patient" + bytes(WORTH_OFFERING_BYTES)
    async with listener(tmp_path / "a") as a, listener(tmp_path / "b", WaitingGossip) as b:
        await connect(a, b)
        await until_subscribed([a, b], {0: 1, 1: 1})
        recent = b.gossip._pubsub.router.mcache
        await a.gossip.publish(MODELS, large)
        await b.hears(large)
        assert [recent.get(message_id).data for message_id in recent.window(MODELS)] == [large]


async def test_what_a_node_says_that_may_wait_goes_to_its_mesh_only(tmp_path: Path) -> None:
    async with listener(tmp_path / "a", WaitingGossip) as a:
        pubsub = a.gossip._pubsub
        peers = {ID(b"%d" % n): None for n in range(8)}
        near = set(list(peers)[:DEGREE_LOW])
        told: list[tuple[ID, bytes]] = []

        def tell(peer_id: ID, rpc: Any, priority: bool = False) -> None:
            told.extend((peer_id, each.data) for each in rpc.publish)

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(pubsub.peer_topics, MODELS, set(peers))
            patch.setitem(pubsub.router.mesh, MODELS, near)
            patch.setattr(pubsub, "peer_queues", peers)
            patch.setattr(pubsub, "peers", peers)
            patch.setattr(pubsub.router, "send_rpc", tell)
            named = saying_to_whom(a).replace(b"valid", b"valid patient")
            for content in (b"valid, patient", b"valid, urgent", named):
                await a.gossip.publish(MODELS, content)
            pubsub.router.mesh[MODELS] = set(list(near)[1:])
            await a.gossip.publish(MODELS, b"valid, patient too")
        to = {content: {peer for peer, each in told if each == content} for _, content in told}
        assert to == {
            b"valid, patient": near,
            b"valid, urgent": set(peers),
            named: set(peers),
            b"valid, patient too": set(peers),
        }


async def test_a_mesh_is_bettered_once_a_minute(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would replace a neighbour at each look."""
    bettered: list[str] = []

    async def replace(_router: Any, _topic: str) -> None:
        bettered.append("replaced")
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr(GossipSub, "_maintain_mesh_quality", replace)
    monkeypatch.setattr(
        GossipSub, "_perform_opportunistic_grafting", lambda *_: bettered.append("added") or 1
    )
    router = UnsignedGossipSub(protocols=[PROTOCOL_ID], degree=5, degree_low=4, degree_high=8)
    for expected in (["replaced", "added"], [], ["replaced", "added"]):
        bettered.clear()
        await router._maintain_mesh_quality("a topic")
        assert router._perform_opportunistic_grafting("a topic", {}) == len(expected) // 2
        assert bettered == expected
        await trio.sleep(BETTER_PEERS_S if not expected else BETTER_PEERS_S - 1)


async def test_what_a_peer_says_of_its_addresses_is_neither_checked_nor_made_anew(tmp_path: Path) -> None:
    async with listener(tmp_path / "a") as a, listener(tmp_path / "b") as b:
        await connect(a, b)
        stream = await a.host.open_stream(b.host.node_id, "/meshsub/1.1.0")
        message = rpc_pb2.Message(data=b"valid message", topicIDs=[MODELS])
        rpc = rpc_pb2.RPC(publish=[message], senderRecord=b"no record at all")
        await stream.write(encode_varint_prefixed(rpc.SerializeToString()))
        await b.hears(b"valid message")
        described, _ = pubsub.env_to_send_in_RPC(a.host.libp2p_host)
        assert described == env_to_send_in_RPC(a.host.libp2p_host)[0]
        assert pubsub.env_to_send_in_RPC(a.host.libp2p_host)[0] is described


async def test_the_heartbeat_is_as_fast_where_the_mesh_is_in_a_bad_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is kept of recent messages is cleared away at its beats."""
    beats = trio.lowlevel.ParkingLot()
    beat = UnsignedGossipSub.mesh_heartbeat

    def count(self: UnsignedGossipSub) -> Any:
        beats.unpark_all()
        self.network_health_score = 0.0
        self._update_network_health = lambda: None
        return beat(self)

    monkeypatch.setattr(UnsignedGossipSub, "mesh_heartbeat", count)
    async with listener(tmp_path / "alone"):
        with trio.fail_after(DEADLINE_S):
            for _ in range(3):
                await beats.park()


async def test_the_mesh_is_looked_at_more_rarely_once_nobody_comes_or_goes(
    autojump_clock: trio.testing.MockClock,
) -> None:
    router = UnsignedGossipSub(protocols=[PROTOCOL_ID], degree=5, degree_low=4, degree_high=8)
    peer = ID(b"a peer")
    changes: list[Callable[[], None]] = [
        lambda: None,
        lambda: router.add_peer(peer, PROTOCOL_ID),
        lambda: router.remove_peer(peer),
    ]
    for change in changes:
        change()
        assert router.heartbeat_interval == UPKEEP_S
        await trio.sleep(SETTLED_S)
        assert router.heartbeat_interval == SETTLED_UPKEEP_S


async def test_a_message_that_comes_twice_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with listener(tmp_path / "a") as a, listener(tmp_path / "b") as b:
        await connect(a, b)
        looked_at = recorded(
            monkeypatch, b.gossip._pubsub, "push_msg", lambda _forwarder, message: message.data
        )
        twice = rpc_pb2.Message(data=b"valid, twice", topicIDs=[MODELS])
        once = rpc_pb2.Message(data=b"valid, after", topicIDs=[MODELS])
        stream = await a.host.open_stream(b.host.node_id, "/meshsub/1.1.0")
        await stream.write(encode_varint_prefixed(rpc_pb2.RPC(publish=[twice]).SerializeToString()))
        await b.hears(twice.data)
        for message in (twice, once):
            await stream.write(encode_varint_prefixed(rpc_pb2.RPC(publish=[message]).SerializeToString()))
        await b.hears(once.data)
        assert looked_at == [twice.data, once.data]


async def test_no_times_of_messages_and_connections_pile_up(tmp_path: Path) -> None:
    async with listener(tmp_path / "a") as a, listener(tmp_path / "b") as b:
        for each in (a, b):
            # What nobody is there to hear goes the library's own way.
            await each.gossip.publish(MODELS, b"valid, and alone" + each.host.node_id.encode())
        await connect(a, b)
        for sender, receiver in ((a, b), (b, a)):
            await sender.gossip.publish(MODELS, b"valid message" + sender.host.node_id.encode())
            await receiver.hears(b"valid message" + sender.host.node_id.encode())
        await trio.testing.wait_all_tasks_blocked()
        for router in (a.gossip._pubsub.router, b.gossip._pubsub.router):
            assert MODELS in router.recent_message_deliveries
            kept = [*router.recent_message_deliveries.values(), router.recent_peer_connections]
            assert all(len(times) == 0 for times in kept)


def n_library_tasks() -> int:
    gc.collect()
    return sum(type(each) is FunctionTask for each in gc.get_objects())


async def test_of_a_message_that_was_passed_on_no_task_is_left(tmp_path: Path) -> None:
    async with listener(tmp_path / "a") as a, listener(tmp_path / "b") as b:
        await connect(a, b)
        await a.gossip.publish(MODELS, b"valid before")
        await b.hears(b"valid before")
        before = n_library_tasks()
        for number in range(30):
            await a.gossip.publish(MODELS, b"valid %d" % number)
            await b.hears(b"valid %d" % number)
        await trio.testing.wait_all_tasks_blocked()
        assert n_library_tasks() < before + 15


async def test_who_came_back_before_its_old_stream_ended_goes_on_hearing(tmp_path: Path) -> None:
    """A node that was killed and starts again at once has told its subscriptions by its new connection."""
    async with listener(tmp_path / "a") as a, listener(tmp_path / "b") as b:
        await connect(a, b)
        await b.gossip.publish(MODELS, b"valid before")
        await a.hears(b"valid before")
        came_back = ID.from_base58(a.host.node_id)
        b_pubsub = b.gossip._pubsub
        b_pubsub._handle_dead_peer(came_back)
        with trio.fail_after(DEADLINE_S):
            while came_back not in b_pubsub.peers:  # noqa: ASYNC110
                await trio.sleep(0.01)
        n_heard = len(a.heard)
        for i in itertools.count():
            # Nobody is in its mesh until the next heartbeat of gossip.
            await b.gossip.publish(MODELS, b"valid after %d" % i)
            await trio.sleep(0.1)
            if len(a.heard) > n_heard:
                break
            assert i < 10 * DEADLINE_S
