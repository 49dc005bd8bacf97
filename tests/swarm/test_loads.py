"""What nodes say of their load between two records: how it is read, spread and taken over."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.in_memory.network import InMemoryNetwork, node_id_named
from swarmllm.swarm.libp2p.gossip import HEALTH, MODELS
from swarmllm.swarm.membership.identity import verify
from swarmllm.swarm.records.registry import Registry, follow_router
from swarmllm.swarm.records.spread import HEARTBEAT_S, RecordSpread
from swarmllm.swarm.router import Change
from swarmllm_proto.codec import encode_record
from swarmllm_proto.envelope import Heartbeat, seal, unseal
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.limits import LOAD_MAX
from swarmllm_proto.node_load import NodeLoad, decode_load, encode_load, load_of, with_load
from swarmllm_proto.swarm import NodeCapability, NodeRecord

from .conftest import Swarm, until
from .handlers import Listener, pair
from .test_records import ME, OTHER, HeardGossip, book, envelope, no_answer

NEAR = node_id_named("near")
COUNTS = st.integers(0, 2**53)


@given(st.builds(NodeLoad, COUNTS, COUNTS, COUNTS, COUNTS, COUNTS))
def test_a_load_comes_out_as_it_went_in_and_changes_nothing_else(load: NodeLoad) -> None:
    content = encode_load(load)
    assert len(content) <= LOAD_MAX
    assert decode_load(content) == load
    before = NodeRecord(node_id=NEAR, capability=NodeCapability(max_requests=7, active_requests=3))
    after = with_load(before, load)
    assert load_of(after.capability) == load
    assert with_load(after, load_of(before.capability)) == before


def test_fields_that_a_later_version_adds_are_ignored() -> None:
    assert decode_load(msgspec.msgpack.encode([1, 2, 3, 4, 5, 6])) == NodeLoad(1, 2, 3, 4, 5)


@given(
    st.one_of(st.binary(max_size=2 * LOAD_MAX), st.builds(lambda n: msgspec.msgpack.encode([n]), st.floats()))
)
def test_noise_is_refused_or_a_load(noise: bytes) -> None:
    with contextlib.suppress(BadMessage):
        assert all(0 <= count <= 2**53 for count in msgspec.structs.astuple(decode_load(noise)))


@pytest.mark.parametrize("content", [b"", b"\xc1", msgspec.msgpack.encode([-1]), msgspec.msgpack.encode({})])
def test_what_is_no_load_is_refused(content: bytes) -> None:
    with pytest.raises(BadMessage, match="load"):
        decode_load(content)


def test_the_book_takes_the_newest_load_of_the_envelope_that_it_has() -> None:
    reader = book()
    reader.take(envelope(OTHER, sequence=3), 0.0)
    assert not reader.hear_load(ME.node_id, (1000, 3), 1, b"of nobody known")
    assert not reader.hear_load(OTHER.node_id, (1000, 2), 9, b"of an older one")
    assert not reader.hear_load(OTHER.node_id, (1000, 4), 9, b"of a newer one")
    assert reader.loads() == {}
    assert reader.hear_load(OTHER.node_id, (1000, 3), 5, b"five")
    assert not reader.hear_load(OTHER.node_id, (1000, 3), 5, b"again")
    assert not reader.hear_load(OTHER.node_id, (1000, 3), 4, b"late")
    assert reader.hear_load(OTHER.node_id, (1000, 3), 6, b"six")
    assert reader.loads() == {OTHER.node_id: b"six"}
    reader.take(envelope(OTHER, sequence=4), 1.0)
    assert reader.loads() == {}, "the new record says it"
    assert reader.hear_load(OTHER.node_id, (1000, 4), 1, b"one")


def heartbeat(load: bytes, beat: int) -> bytes:
    told = Heartbeat(node_id=OTHER.node_id, started_at_ms=1000, sequence=0, beat=beat, load=load)
    return seal(told, OTHER.sign)


class KeepingGossip(HeardGossip):
    def __init__(self) -> None:
        super().__init__()
        self.contents: list[tuple[str, bytes]] = []

    async def publish(self, topic: str, content: bytes) -> None:
        self.contents.append((topic, content))
        await super().publish(topic, content)


async def test_a_load_travels_in_heartbeats_until_the_next_record(
    autojump_clock: trio.testing.MockClock,
) -> None:
    gossip = KeepingGossip()
    async with trio.open_nursery() as nursery:
        feed = ChangeFeed()
        spread = RecordSpread(ME, verify, 1, nursery, feed, ask=no_answer, connected=(), listener=Listener())
        spread.begin(gossip, (), ())
        await spread.publish(b"record")
        await trio.sleep(3)
        async with feed.subscribe() as changes:
            await spread.publish_load(b"load")
            assert (await anext(changes)).node_id == ME.node_id
        assert spread.loads() == {ME.node_id: b"load"}
        n_before = len(gossip.contents)
        await trio.sleep(60)
        await spread.reach_through(("/ip4/192.0.2.1/tcp/8810/p2p/" + OTHER.node_id + "/p2p-circuit",))
        assert spread.loads() == {ME.node_id: b"load"}, "the record is the same, only its addresses are not"
        told = [unseal(content, Heartbeat, verify) for topic, content in gossip.contents if topic == HEALTH]
        await spread.publish(b"another")
        assert spread.loads() == {}
        await trio.sleep(1.5 * HEARTBEAT_S)
        nursery.cancel_scope.cancel()
    loads = [each.load for each in told]
    assert loads.count(b"load") >= 3
    assert len({each.beat for each in told}) == len(told), "no two are the same bytes"
    topics = [topic for topic, _ in gossip.contents[n_before:]]
    assert MODELS in topics
    topic, content = gossip.contents[-1]
    assert topic == HEALTH
    assert not unseal(content, Heartbeat, verify).load


async def test_a_load_that_is_heard_is_a_change_once() -> None:
    async with trio.open_nursery() as nursery:
        feed = ChangeFeed()
        spread = RecordSpread(ME, verify, 1, nursery, feed, ask=no_answer, connected=(), listener=Listener())
        spread.receive(MODELS, envelope(OTHER))
        async with feed.subscribe() as changes:
            for content in (heartbeat(b"one", 1), heartbeat(b"one", 1), heartbeat(b"two", 2)):
                assert spread.validate(HEALTH, content) is not False
                spread.receive(HEALTH, content)
            feed.announce(Change("record", ME.node_id))
            assert [(await anext(changes)).node_id for _ in range(3)] == [OTHER.node_id] * 2 + [ME.node_id]
        assert spread.loads() == {OTHER.node_id: b"two"}
        nursery.cancel_scope.cancel()


def test_a_heartbeat_with_too_long_a_load_is_refused() -> None:
    with pytest.raises(BadMessage, match="load"):
        unseal(heartbeat(bytes(LOAD_MAX + 1), 1), Heartbeat, verify)


async def test_every_node_hears_a_load_and_a_record_ends_it(swarm: Swarm) -> None:
    a, b = await pair(swarm)
    await a.publish(b"record")
    await until(b, lambda: b.records().get(a.node_id) == b"record")
    await a.publish_load(b"load")
    await until(b, lambda: dict(b.loads()) == {a.node_id: b"load"})
    assert dict(a.loads()) == {a.node_id: b"load"}
    await a.publish_load(b"more")
    await until(b, lambda: dict(b.loads()) == {a.node_id: b"more"})
    await a.publish(b"another")
    await until(b, lambda: b.records().get(a.node_id) == b"another")
    assert dict(b.loads()) == dict(a.loads()) == {}


async def test_a_load_that_is_empty_or_too_long_is_refused(swarm: Swarm) -> None:
    a = await swarm.start("a")
    await a.publish(b"record")
    for load in (b"", bytes(LOAD_MAX + 1)):
        with pytest.raises(ValueError, match="load"):
            await a.publish_load(load)


async def test_the_registry_shows_a_record_with_the_load_said_since() -> None:
    def record(sequence: int, n_running: int) -> bytes:
        capability = NodeCapability(stage_requests=n_running, max_requests=8)
        return encode_record(NodeRecord(node_id=NEAR, sequence=sequence, capability=capability))

    async with InMemoryNetwork() as network:
        me, near = network.add(ME.node_id), network.add(NEAR)
        registry = Registry(ME.node_id)
        await network.nursery.start(follow_router, registry, me)

        def shown() -> tuple[int, int]:
            node = registry.working_nodes()[NEAR]
            assert node is registry.node(NEAR)
            return node.capability.stage_requests, node.capability.max_requests

        await near.publish(record(1, 2))
        for said, expected in (
            (encode_load(NodeLoad(stage_requests=5)), 5),
            (b"\xc1", 5),
            (encode_load(NodeLoad(stage_requests=6)), 6),
        ):
            await near.publish_load(said)
            await trio.testing.wait_all_tasks_blocked()
            assert shown() == (expected, 8)
        await near.publish(record(2, 3))
        await trio.testing.wait_all_tasks_blocked()
        assert shown() == (3, 8)
        network.kill(NEAR)
        await trio.testing.wait_all_tasks_blocked()


def test_a_load_without_a_record_means_nothing() -> None:
    registry = Registry(ME.node_id)
    registry.apply_load(NEAR, encode_load(NodeLoad(1)))
    assert registry.node(NEAR) is None
