"""Which load of a node everybody hears of in a large swarm, and which those that use it."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.data.load_frames import FRAMES_BURST, FRAMES_PER_S, LoadFrames
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers.trust import TrustEvent
from swarmllm.swarm.records.details_exchange import DetailsExchange
from swarmllm.swarm.records.load_publisher import LoadPublisher
from swarmllm.swarm.records.registry import Registry, follow_router
from swarmllm.swarm.records.spread import RecordSpread, heartbeat_interval_s
from swarmllm.swarm.records.sustained_load import BURST, LASTS_S, LOADS_PER_S, SustainedLoad
from swarmllm.swarm.router import Change
from swarmllm_proto.codec import decode_record, encode_record
from swarmllm_proto.envelope import Envelope, Heartbeat
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.frames import FrameKind
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import LOAD_MAX
from swarmllm_proto.node_load import NodeLoad, encode_load, load_of
from swarmllm_proto.swarm import NodeCapability, NodeRecord

from .test_connection import joined
from .test_loads import KeepingGossip
from .test_record_details import Asking, brief_envelope, details_of, ids, speaking, told
from .test_records import ME, OTHER, book, envelope, new_identity

N_NODES = 100
EACH_S = N_NODES / LOADS_PER_S
FREE = NodeLoad(free_slots=8)


def working(n: int) -> NodeLoad:
    return NodeLoad(stage_requests=n, free_slots=max(0, 8 - n))


def noted(*steps: tuple[float, NodeLoad]) -> SustainedLoad:
    sustained = SustainedLoad()
    for at_s, load in steps:
        sustained.note(load, at_s)
    return sustained


def test_the_first_load_counts_at_once() -> None:
    assert SustainedLoad().at(0.0) == NodeLoad()
    sustained = noted((0.0, working(3)))
    assert sustained.at(0.0) == working(3)
    assert not sustained.is_due(100.0, N_NODES)
    assert sustained.look_at_s(100.0, N_NODES) == float("inf")


def test_a_load_that_comes_and_goes_is_no_news() -> None:
    sustained = noted((0.0, FREE), *((1.0 + n, working(8 * (n % 2))) for n in range(20)))
    assert sustained.at(21.0) == FREE
    assert not any(sustained.is_due(at_s / 10, N_NODES) for at_s in range(0, 210))


def test_a_load_that_lasts_is_news_once_and_so_is_its_end() -> None:
    sustained = noted((0.0, FREE), (5.0, working(2)), (7.0, working(3)))
    assert sustained.look_at_s(7.0, N_NODES) == 5.0 + LASTS_S
    assert not sustained.is_due(5.0 + LASTS_S - 0.01, N_NODES)
    assert sustained.is_due(5.0 + LASTS_S, N_NODES)
    assert sustained.at(5.0 + LASTS_S) == working(2), "the least of them"
    sustained.told(sustained.at(5.0 + LASTS_S))
    assert not sustained.is_due(30.0, N_NODES), "2 and 3 are alike"
    sustained.note(FREE, 40.0)
    assert not sustained.is_due(49.0, N_NODES)
    assert sustained.is_due(50.0, N_NODES)
    assert sustained.at(50.0) == FREE


def test_that_nothing_is_free_is_news() -> None:
    sustained = noted((0.0, NodeLoad(free_slots=1)), (1.0, NodeLoad(free_slots=0)))
    assert sustained.is_due(1.0 + LASTS_S, N_NODES)
    sustained = noted((0.0, NodeLoad(free_slots=8)), (1.0, NodeLoad(free_slots=1)))
    assert not sustained.is_due(1.0 + LASTS_S, N_NODES)


def say_when_due(sustained: SustainedLoad, now: float) -> bool:
    is_due = sustained.is_due(now, N_NODES)
    if is_due:
        sustained.told(sustained.at(now))
    return is_due


def test_all_nodes_together_tell_so_much_and_the_last_word_is_less() -> None:
    sustained, now, said = SustainedLoad(), 0.0, list[int]()
    sustained.note(FREE, now)
    for n in itertools.islice(itertools.cycle((4, 0)), 20):
        sustained.note(working(n), now)
        now += LASTS_S + 1.0
        if say_when_due(sustained, now):
            said.append(n)
    assert said == [4, 0, 4, 0], "as many as may follow each other"
    sustained = noted((0.0, FREE))
    now = 0.0
    for n in (1, 2, 4):
        sustained.note(working(n), now)
        now += LASTS_S
        assert say_when_due(sustained, now)
    sustained.note(working(8), now)
    now += LASTS_S
    assert not say_when_due(sustained, now), "the last one is for less"
    assert sustained.look_at_s(now, N_NODES) == pytest.approx(10.0 + EACH_S)
    sustained.note(FREE, now)
    assert say_when_due(sustained, now + LASTS_S)


def test_what_could_not_be_told_is_told_later() -> None:
    sustained, now = noted((0.0, FREE)), 0.0
    for n in (1, 2, 4, 8):
        sustained.note(working(n), now)
        now += LASTS_S
        say_when_due(sustained, now)
    now = sustained.look_at_s(now, N_NODES)
    assert not say_when_due(sustained, now - 1.0)
    assert say_when_due(sustained, now)
    assert sustained.at(now) == working(8)


LOADS = st.builds(NodeLoad, *[st.integers(0, 9)] * 5)


@given(st.lists(st.tuples(st.floats(0, 30), LOADS), min_size=1, max_size=40))
def test_what_is_told_was_so_lately_and_is_told_seldom(steps: list[tuple[float, NodeLoad]]) -> None:
    sustained, now, said = SustainedLoad(), 0.0, list[float]()
    history: list[tuple[float, NodeLoad]] = []
    for passed_s, load in steps:
        now += passed_s
        sustained.note(load, now)
        history.append((now, load))
        at = msgspec.structs.astuple(sustained.at(now))
        began = [begins_s for begins_s, _ in history if begins_s <= now - LASTS_S]
        lately = [each for begins_s, each in history if begins_s >= max(began, default=0.0)]
        for number, *numbers in zip(at, *map(msgspec.structs.astuple, lately), strict=True):
            assert min(numbers) <= number <= max(numbers)
        if say_when_due(sustained, now):
            said.append(now)
        assert sustained.look_at_s(now, N_NODES) > now
    assert len(said) <= BURST + now / EACH_S


class HeardDirectly:
    """Those that use this node."""

    def __init__(self) -> None:
        self.told: list[bytes] = []
        self.asked: list[NodeId] = []

    def tell_load(self, load: bytes) -> None:
        self.told.append(load)

    def ask_for_load(self, node_id: NodeId) -> None:
        self.asked.append(node_id)


def record(n: int, speech: str = "") -> bytes:
    capability = NodeCapability(stage_requests=n, free_slots=8 - n)
    return encode_record(NodeRecord(node_id=ME.node_id, nickname=speech, capability=capability))


def among_others(
    nursery: trio.Nursery, gossip: KeepingGossip, direct: HeardDirectly, *, n_others: int = 5
) -> RecordSpread:
    spread = speaking(nursery, gossip, direct=direct)
    for number in range(n_others):
        spread.take(brief_envelope(new_identity(100 + number)), {})
    return spread


def loads(gossip: KeepingGossip) -> list[bytes]:
    return [each.load for each in told(gossip) if isinstance(each, Heartbeat) and each.load]


def test_loads_of_the_last_seconds_are_kept_and_no_others() -> None:
    """Also while nobody asks for what lasts, as in a small swarm."""
    sustained = SustainedLoad()
    for second in range(1000):
        sustained.note(working(second % 8), float(second))
    assert len(sustained._steps) <= LASTS_S + 1


async def test_in_a_large_swarm_everybody_hears_of_what_lasts(autojump_clock: MockClock) -> None:
    gossip, direct = KeepingGossip(), HeardDirectly()
    async with trio.open_nursery() as nursery:
        spread = among_others(nursery, gossip, direct)
        await spread.publish(record(0))
        await trio.sleep(200)
        gossip.contents.clear()
        for n in (1, 0, 3, 0):
            await spread.publish_load(encode_load(working(n)))
            await trio.sleep(2)
        assert spread.loads() == {ME.node_id: encode_load(working(0))}, "this node knows itself"
        assert direct.told == [encode_load(working(n)) for n in (0, 1, 0, 3, 0)]
        assert loads(gossip) == []
        assert len(gossip.contents) <= 1, "a regular heartbeat"
        await spread.publish_load(encode_load(working(3)))
        await trio.sleep(LASTS_S + 1)
        assert loads(gossip) == [encode_load(working(3))]
        await trio.sleep(200)
        assert set(loads(gossip)[1:]) == {encode_load(working(3))}, "later heartbeats say it too"
        nursery.cancel_scope.cancel()


async def test_a_brief_record_says_what_lasts(autojump_clock: MockClock) -> None:
    gossip, direct = KeepingGossip(), HeardDirectly()
    async with trio.open_nursery() as nursery:
        spread = among_others(nursery, gossip, direct)
        await spread.publish(record(0))
        await trio.sleep(100)
        await spread.publish(record(5, "another"))
        said = [each for each in told(gossip) if isinstance(each, Envelope)][-1]
        assert load_of(decode_record(said.record).capability) == working(0)
        assert decode_record(said.record).nickname == "another"
        assert spread.records[ME.node_id] == record(5, "another")
        assert direct.told == [encode_load(working(0)), encode_load(working(5))]
        n_before = len(gossip.contents)
        await trio.sleep(LASTS_S + 1)
        assert encode_load(working(5)) in loads(gossip)
        await spread.reach_through(("/ip4/192.0.2.1/tcp/8810/p2p/" + OTHER.node_id + "/p2p-circuit",))
        said = [each for each in told(gossip)[n_before:] if isinstance(each, Envelope)][-1]
        assert load_of(decode_record(said.record).capability) == working(5)
        await spread.publish_load(encode_load(working(4)))
        n_told = len(direct.told)
        await spread.reach_through(())
        assert set(direct.told[n_told:]) <= {encode_load(working(4))}, "not what the record said"
        assert not await spread.publish_details(record(5, "another"), soon=False), "a load that has settled"
        nursery.cancel_scope.cancel()


async def test_in_a_small_swarm_everybody_hears_of_each_change(autojump_clock: MockClock) -> None:
    gossip, direct = KeepingGossip(), HeardDirectly()
    async with trio.open_nursery() as nursery:
        spread = among_others(nursery, gossip, direct, n_others=0)
        await spread.publish(record(0))
        await trio.sleep(1)
        for n in (1, 0, 3):
            await spread.publish_load(encode_load(working(n)))
            await trio.sleep(1)
        assert loads(gossip) == [encode_load(working(n)) for n in (1, 0, 3)]
        nursery.cancel_scope.cancel()


async def test_a_load_that_cannot_be_read_is_told_to_nobody(autojump_clock: MockClock) -> None:
    direct = HeardDirectly()
    news = LoadPublisher(direct)
    news.changed(b"\xc1")
    news.in_record(b"\xc1")
    assert direct.told == []
    assert news.sustained() == NodeLoad()


async def test_heartbeats_say_what_the_record_does_not(autojump_clock: MockClock) -> None:
    publisher = LoadPublisher(HeardDirectly())
    publisher.in_record(record(0))
    publisher.recorded(publisher.sustained())
    assert publisher.for_heartbeat() == b""
    publisher.changed(encode_load(working(4)))
    await trio.sleep(LASTS_S)
    assert publisher.for_heartbeat() == encode_load(working(4))
    publisher.changed(encode_load(working(0)))
    await trio.sleep(LASTS_S)
    assert publisher.for_heartbeat() == encode_load(working(0)), "others take it for busy"
    publisher.recorded(publisher.sustained())
    assert publisher.for_heartbeat() == b""


@pytest.mark.parametrize("is_large", [True, False])
async def test_what_lasts_is_told_by_itself_in_a_large_swarm_only(
    autojump_clock: MockClock, is_large: bool
) -> None:
    publisher, told_at_s = LoadPublisher(HeardDirectly()), list[float]()

    async def tell() -> None:
        await trio.lowlevel.checkpoint()
        told_at_s.append(trio.current_time())
        publisher.for_heartbeat()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(publisher.run, lambda: is_large, lambda: N_NODES, tell)
        publisher.in_record(record(0))
        await trio.sleep(1)
        publisher.changed(encode_load(working(4)))
        began_s = trio.current_time()
        await trio.sleep(100)
        assert told_at_s == ([began_s + LASTS_S] if is_large else [])
        nursery.cancel_scope.cancel()


async def test_after_a_record_a_heartbeat_waits_as_after_a_heartbeat(autojump_clock: MockClock) -> None:
    gossip = KeepingGossip()
    async with trio.open_nursery() as nursery:
        spread = among_others(nursery, gossip, HeardDirectly(), n_others=N_NODES)
        interval_s = heartbeat_interval_s(N_NODES + 1, 8)
        await trio.sleep(0.7 * interval_s)
        gossip.contents.clear()
        await spread.publish(record(0))
        await trio.sleep(0.7 * interval_s)
        assert [each for each in told(gossip) if isinstance(each, Heartbeat)] == []
        await trio.sleep(0.6 * interval_s)
        assert [each for each in told(gossip) if isinstance(each, Heartbeat)] != []
        nursery.cancel_scope.cancel()


def test_what_a_node_says_directly_is_newer_than_what_everybody_hears() -> None:
    reader = book()
    assert not reader.hear_direct_load(OTHER.node_id, b"of nobody known")
    reader.take(envelope(OTHER, sequence=3), 0.0)
    reader.hear_load(OTHER.node_id, (1000, 3), 5, b"five")
    assert reader.hear_direct_load(OTHER.node_id, b"direct")
    assert not reader.hear_direct_load(OTHER.node_id, b"direct")
    assert reader.loads() == {OTHER.node_id: b"direct"}
    reader.hear_load(OTHER.node_id, (1000, 3), 6, b"six")
    assert reader.load(OTHER.node_id) == b"direct"
    reader.take(envelope(OTHER, sequence=4), 1.0)
    assert reader.loads() == {OTHER.node_id: b"direct"}, "what the record says is what lasts"
    assert reader.hear_direct_load(OTHER.node_id, b"")
    assert reader.loads() == {}


async def test_who_uses_connected_nodes_asks_them_for_their_loads(autojump_clock: MockClock) -> None:
    asking, direct = Asking(ids(OTHER)), HeardDirectly()
    asking.knows(OTHER, new_identity(50))
    asking.answers[OTHER.node_id] = msgspec.msgpack.encode([details_of(OTHER)])
    asking.connected[new_identity(51).node_id] = 0.0
    exchange = DetailsExchange(
        asking.book, asking.exchange._ask, asking.connected, asking.reader, ChangeFeed(), loads=direct
    )
    exchange.interests = asking.exchange.interests
    await exchange.look()
    assert direct.asked == ids(OTHER)


async def test_a_connection_tells_the_load_to_who_has_asked(autojump_clock: MockClock) -> None:
    came: list[tuple[str, bytes]] = []
    async with joined() as (a, b, _):
        a.connection.loads.on_load = lambda load: came.append(("a", load))
        b.connection.loads.on_load = lambda load: came.append(("b", load))
        b.connection.loads.tell(b"\x91\x01")
        await trio.sleep(1)
        assert came == [], "nobody has asked"
        a.connection.loads.ask()
        await trio.sleep(1)
        assert came == [("b", b"")]
        assert b.connection.loads.is_asked
        assert not a.connection.loads.is_asked
        b.connection.loads.tell(b"\x91\x02")
        await trio.sleep(1)
        assert came[1:] == [("a", b"\x91\x02")]


async def test_only_the_latest_load_waits_for_a_peer_that_does_not_read(autojump_clock: MockClock) -> None:
    came: list[bytes] = []
    async with joined() as (a, b, nursery):
        a.connection.loads.on_load = came.append
        a.connection.loads.ask()
        await trio.sleep(1)
        a.may_handle = trio.Event()
        for _ in range(40):
            nursery.start_soon(b.connection.send, b"h", b"")
        await trio.sleep(1)
        for n in range(1, 6):
            b.connection.loads.tell(encode_load(working(n)))
        a.may_handle.set()
        await trio.sleep(2)
        assert came == [encode_load(working(5))]


@pytest.mark.parametrize("load", [b"\xc1", msgspec.msgpack.encode([-1]), bytes(LOAD_MAX + 1)])
async def test_a_load_that_cannot_be_read_ends_the_connection(autojump_clock: MockClock, load: bytes) -> None:
    async with joined() as (a, b, _):
        b.connection._queue_control(FrameKind.LOAD, load)
        await a.ended.wait()
        assert a.connection.trust_event is TrustEvent.BROKE_PROTOCOL
        assert "load" in a.connection.ending


def test_a_peer_that_tells_loads_without_pause_is_refused() -> None:
    """As it is that tells one that cannot be read: its connection ends."""
    frames = LoadFrames(lambda _: True)
    frames.ask()
    for n in range(int(FRAMES_BURST)):
        frames.take(encode_load(working(n % 8)), 5.0)
    for n in range(int(FRAMES_PER_S)):
        frames.take(encode_load(working(n)), 6.0)
    with pytest.raises(BadMessage, match="more often"):
        frames.take(b"", 6.1)


async def test_the_registry_goes_back_to_what_everybody_heard(autojump_clock: MockClock) -> None:
    """When the data connection ends on which a node told more."""

    class OneNode:
        node_id = ME.node_id

        def __init__(self) -> None:
            self.feed = ChangeFeed()
            self.said = {OTHER_ID: encode_load(NodeLoad(stage_requests=5))}

        def records(self) -> dict[NodeId, bytes]:
            return RECORDS

        def loads(self) -> dict[NodeId, bytes]:
            return self.said

        def reachable(self) -> frozenset[NodeId]:
            return frozenset({OTHER_ID})

        def changes(self) -> object:
            return self.feed.subscribe()

    router, registry = OneNode(), Registry(ME.node_id)
    async with trio.open_nursery() as nursery:
        await nursery.start(follow_router, registry, router)

        def shown() -> int:
            return registry.working_nodes()[OTHER_ID].capability.stage_requests

        assert shown() == 5
        router.said = {}
        router.feed.announce(Change("record", OTHER_ID))
        await trio.testing.wait_all_tasks_blocked()
        assert shown() == 2
        assert registry.loaded() == frozenset()
        nursery.cancel_scope.cancel()


OTHER_ID = node_id_named("near")
RECORDS = {OTHER_ID: encode_record(NodeRecord(node_id=OTHER_ID, capability=NodeCapability(stage_requests=2)))}
