"""Nodes that are worked with are dialled when they are needed, and not before."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from swarmllm.errors import DeadlineExceeded, NodeUnreachable, RemoteError
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.dialler import DOUBT_FIRST_S, WANTED_MAX, Dial, Dialler
from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.reachable import IDLE_S, PASSING_S, ReachableNodes, Use
from swarmllm.swarm.peers.reachable_index import UNTRIED_MAX
from swarmllm.swarm.records.exchange import KIND_MAY_LET_GO
from swarmllm.swarm.router import Change
from swarmllm.swarm.settings import SwarmSettings
from swarmllm_proto.identifiers import NodeId

from .conftest import DEADLINE_S, until

THERE = [Address("192.0.2.1", 8810)]


class Book:
    def __init__(self) -> None:
        self.heard: Parts[float] = Parts.alone()
        self.heard_at_s = self.heard.get
        self.watch = self.heard.watch

    def hears(self, name: str, at_s: float) -> None:
        self.heard.put(NodeId(name), at_s)


class Stand:
    """Of a node that is connected with nobody and looks for nobody."""

    def __init__(self) -> None:
        self.book = Book()
        self.connected: Parts[float] = Parts.alone()
        self.dialler = Dialler(NodeId("me"), random.Random(0), peers_max=0, heard_at_s=self.book.heard_at_s)
        self.feed = ChangeFeed()
        self.uses: Parts[Use] = Parts.alone()
        self.nodes = ReachableNodes(self.book, self.dialler, self.connected, self.feed, self.uses)
        self.answering: set[str] = set()
        self.dialled: list[str] = []

    def hears(self, *names: str, now: float = 0.0) -> None:
        for name in names:
            self.dialler.suggest(NodeId(name), THERE, now)
            self.book.hears(name, now)

    def reachable(self) -> frozenset[NodeId]:
        return self.nodes.at(trio.current_time())

    @asynccontextmanager
    async def dialling(self) -> AsyncIterator[None]:
        dial: Dial = self.dial
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.dialler.run, dial, lambda: set(self.connected))
            yield
            nursery.cancel_scope.cancel()

    async def dial(self, node_id: NodeId, addresses: list[Address]) -> None:
        self.dialled.append(node_id)
        await trio.sleep(0.1)
        if node_id not in self.answering:
            raise NodeUnreachable("nothing answers")
        self.connected.put_last(node_id, trio.current_time())
        self.dialler.answered(node_id)


def test_a_node_of_which_a_record_is_known_is_reachable_and_untried() -> None:
    stand = Stand()
    stand.hears("a", "b")
    stand.connected.put_last(NodeId("c"), 0.0)
    assert stand.nodes.at(200.0) == {"a", "b", "c"}
    assert stand.nodes.untried(200.0) == {"a", "b"}


def test_without_an_address_a_record_is_only_a_record() -> None:
    stand = Stand()
    stand.book.hears("a", 1.0)
    assert not stand.nodes.at(200.0)


def test_names_that_were_never_connected_do_not_count_without_end() -> None:
    stand = Stand()
    stand.hears(*(f"fake{number}" for number in range(UNTRIED_MAX + 50)))
    stand.hears("old friend")
    stand.dialler.answered(NodeId("old friend"))
    assert len(stand.nodes.untried(200.0)) == UNTRIED_MAX
    assert "old friend" in stand.nodes.at(200.0)


def test_of_too_many_names_those_count_that_routes_could_need() -> None:
    stand = Stand()
    stand.hears(*(f"n{number}" for number in range(UNTRIED_MAX)), "needed", "other")
    assert "needed" not in stand.nodes.at(200.0)
    stand.nodes.needed = lambda: [{NodeId("needed")}, {NodeId("unknown")}]
    assert stand.nodes.untried(200.0) == {"needed", *(f"n{number}" for number in range(UNTRIED_MAX - 1))}


def test_a_node_that_was_lost_counts_again_when_it_is_heard_of_later() -> None:
    stand = Stand()
    stand.hears("a", now=10.0)
    stand.dialler.answered(NodeId("a"))
    stand.dialler.lost(NodeId("a"), 11.0, on_purpose=False)
    assert not stand.nodes.at(200.0)
    stand.book.hears("a", 11.0 + DOUBT_FIRST_S)
    assert not stand.nodes.at(200.0), "that sign may have been under way"
    stand.book.hears("a", 11.1 + DOUBT_FIRST_S)
    assert stand.nodes.at(200.0) == stand.nodes.untried(200.0) == {"a"}


def test_dials_in_vain_of_a_lost_node_say_nothing_once_it_is_heard_again() -> None:
    """The network was cut, or it was restarted, and it was dialled again and again meanwhile."""
    stand = Stand()
    stand.hears("a", now=10.0)
    stand.dialler.answered(NodeId("a"))
    stand.dialler.lost(NodeId("a"), 11.0, on_purpose=False)
    for now in range(20, 100, 10):
        stand.dialler.dialled(NodeId("a"), float(now), succeeded=False)
    stand.book.hears("a", 100.0)
    assert stand.nodes.at(100.0) == {"a"}
    for _ in range(2):
        stand.dialler.dialled(NodeId("a"), 101.0, succeeded=False)
    stand.book.hears("a", 102.0)
    assert not stand.nodes.at(101.0 + 3 * DOUBT_FIRST_S), "it lives, and cannot be reached from here"
    assert stand.nodes.at(101.1 + 4 * DOUBT_FIRST_S) == {"a"}


def test_each_dial_in_vain_doubles_the_time_in_which_signs_of_life_do_not_count() -> None:
    stand = Stand()
    stand.hears("a")
    doubted_s = []
    for _ in range(12):
        stand.dialler.dialled(NodeId("a"), 100.0, succeeded=False)
        doubted_s.append(
            next(s for s in range(2000) if 100.5 + s > stand.dialler.may_answer_from_s(NodeId("a"), 0.0))
        )
    assert doubted_s[:4] == [4, 8, 16, 32]
    assert doubted_s[-1] == 600
    stand.dialler.dialled(NodeId("a"), 101.0, succeeded=True)
    assert stand.dialler.may_answer_from_s(NodeId("a"), 0.0) < 101.0


async def test_it_is_dialled_once_for_all_who_need_it(autojump_clock: MockClock) -> None:
    stand = Stand()
    stand.hears("a")
    stand.answering.add("a")
    async with stand.dialling():
        await trio.sleep(60)
        assert not stand.dialled, "it looks for no connections"
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(stand.nodes.reach, NodeId("a"), 5.0)
        await stand.nodes.reach(NodeId("a"), 5.0)
    assert stand.dialled == ["a"]


async def test_a_dial_in_vain_is_told_to_its_caller_and_not_repeated(autojump_clock: MockClock) -> None:
    stand = Stand()
    stand.hears("a")
    async with stand.dialling():
        with pytest.raises(NodeUnreachable, match="could not be reached"):
            await stand.nodes.reach(NodeId("a"), 5.0)
        with pytest.raises(NodeUnreachable, match="is not connected"):
            await stand.nodes.reach(NodeId("a"), 5.0)
        assert not stand.reachable()
    assert stand.dialled == ["a"]


async def test_who_does_not_answer_in_time_is_doubted(autojump_clock: MockClock) -> None:
    stand = Stand()
    stand.hears("a")
    stand.answering.add("a")
    async with stand.dialling():
        with pytest.raises(DeadlineExceeded):
            await stand.nodes.reach(NodeId("a"), 0.05)
        assert not stand.reachable()
        await trio.sleep(1)
        assert stand.reachable() == {"a"}, "it has answered after all"


async def test_a_node_that_is_forgotten_while_callers_wait_is_unreachable(autojump_clock: MockClock) -> None:
    stand = Stand()
    stand.hears("a")
    async with trio.open_nursery() as nursery:

        async def reach() -> None:
            with pytest.raises(NodeUnreachable):
                await stand.nodes.reach(NodeId("a"), 5.0)

        nursery.start_soon(reach)
        await trio.testing.wait_all_tasks_blocked()
        stand.dialler.forget(NodeId("a"))


def test_callers_wait_for_a_bounded_number_of_nodes() -> None:
    dialler = Dialler(NodeId("me"), random.Random(0))
    for number in range(WANTED_MAX + 1):
        dialler.suggest(NodeId(f"n{number}"), THERE, 0.0)
    for number in range(WANTED_MAX):
        dialler.want(NodeId(f"n{number}"), 0.0)
    with pytest.raises(NodeUnreachable, match="are being dialled"):
        dialler.want(NodeId(f"n{WANTED_MAX}"), 0.0)
    with pytest.raises(NodeUnreachable, match="not known where"):
        dialler.want(NodeId("stranger"), 0.0)


def test_the_needed_are_dialled_beyond_the_connections_that_are_looked_for() -> None:
    dialler = Dialler(NodeId("me"), random.Random(0), peers_max=1)
    dialler.suggest(NodeId("needed"), THERE, 0.0)
    dialler.suggest(NodeId("other"), THERE, 0.0)
    dialler.want(NodeId("needed"), 0.0)
    assert [node_id for node_id, _ in dialler.due(100.0, {"somebody"})[0]] == ["needed"]


async def test_connections_for_work_end_when_there_was_none_for_long(autojump_clock: MockClock) -> None:
    stand = Stand()
    stand.hears("a", "b")
    stand.answering |= {"a", "b"}
    async with stand.dialling():
        for name in ("a", "b"):
            await stand.nodes.reach(NodeId(name), 5.0)
    n_bytes = {NodeId("a"): 10, NodeId("b"): 10, NodeId("sought"): 10}
    idle, start_s = stand.nodes.idle, trio.current_time()
    assert idle(n_bytes, 3, start_s) == []
    stand.nodes.used(NodeId("b"), start_s + 100.0)
    assert idle(n_bytes, 3, start_s + IDLE_S) == ["a"]
    assert idle(n_bytes | {NodeId("a"): 11}, 3, start_s + IDLE_S) == []
    assert sorted(idle(n_bytes | {NodeId("a"): 11}, 3, start_s + 2 * IDLE_S)) == ["a", "b"]
    assert idle(n_bytes | {NodeId("a"): 11}, 1, start_s + 2 * IDLE_S) == ["b"], "the longest idle first"
    assert idle(n_bytes | {NodeId("a"): 11}, 0, start_s + 2 * IDLE_S) == []
    for later_s in (2 * IDLE_S, 4 * IDLE_S):
        assert idle(n_bytes, 3, start_s + later_s, kept={NodeId("a")}) == ["b"]
    assert idle(n_bytes, 3, start_s + 4 * IDLE_S) == ["b", "a"]


def test_who_was_met_in_passing_is_let_go_soon_unless_something_comes_of_it() -> None:
    stand = Stand()
    for name in "abc":
        stand.nodes.met_in_passing(NodeId(name), 0.0)
    idle, n_bytes = stand.nodes.idle, dict.fromkeys(map(NodeId, "abc"), 0)
    assert idle(n_bytes, 3, PASSING_S / 2) == []
    stand.nodes.used(NodeId("a"), PASSING_S / 2)
    n_bytes[NodeId("b")] = 1
    assert idle(n_bytes, 3, PASSING_S) == ["c"]
    stand.nodes.met_in_passing(NodeId("b"), PASSING_S)
    assert idle(n_bytes, 3, PASSING_S / 2 + IDLE_S) == ["c", "a"]
    assert idle(n_bytes, 3, PASSING_S + IDLE_S) == ["c", "a", "b"]


@asynccontextmanager
async def node(folder: Path, name: str, *bootstrap: str, max_peers: int = 1) -> AsyncIterator[Libp2pRouter]:
    settings = SwarmSettings(
        folder / name, "127.0.0.1", 0, 0, bootstrap=bootstrap, max_peers=max_peers, mdns=False, dht="off"
    )
    async with open_libp2p_router(settings) as router:
        taken: list[bytes] = []

        async def on_request(sender: NodeId, body: bytes) -> bytes:
            return b"answer to " + body

        async def on_message(sender: NodeId, header: bytes, payload: memoryview) -> None:
            taken.append(header)

        router.serve(on_request, on_message)
        router.taken = taken  # type: ignore[attr-defined]
        await router.publish(name.encode())
        yield router


async def test_real_nodes_answer_each_other_without_having_been_connected(tmp_path: Path) -> None:
    """Each looks for one connection and has it with the one in the middle."""
    async with node(tmp_path, "middle", max_peers=16) as middle:
        where = middle.addresses[0]
        async with (
            node(tmp_path, "a", where) as a,
            node(tmp_path, "b", where) as b,
            node(tmp_path, "c", where) as c,
        ):
            for each in (a, b, c):
                await until(each, lambda each=each: len(each.records()) == 4)  # type: ignore[misc]
                await until(each, lambda each=each: middle.node_id in each.connected())  # type: ignore[misc]
                assert len(each.connected()) == 1
            assert a.reachable() == {middle.node_id, b.node_id, c.node_id}
            assert a.untried() == {b.node_id, c.node_id}
            assert await a.request(b.node_id, b"1") == b"answer to 1"
            # The answer may be there before all records have been exchanged.
            await until(a, lambda: b.node_id in a.connected())
            assert a.untried() == {c.node_id}
            b.met_in_passing(a.node_id)
            assert await a.request(b.node_id, b"3") == b"answer to 3"
            use = b.directory.uses.get(a.node_id)
            assert use is not None
            assert use.idle_s == IDLE_S, "a request that comes is a use"
            await c.send(a.node_id, b"message")
            with trio.fail_after(DEADLINE_S):
                while not a.taken:  # type: ignore[attr-defined]  # noqa: ASYNC110 (no event tells)
                    await trio.sleep(0.01)
            assert bytes(await b.fetch(c.node_id, b"2")) == b"answer to 2"


async def test_a_dead_node_costs_one_dial_and_is_reachable_no_more(tmp_path: Path) -> None:
    async with (
        node(tmp_path, "middle", max_peers=16) as middle,
        node(tmp_path, "a", middle.addresses[0]) as a,
    ):
        await until(a, lambda: middle.node_id in a.connected())
        async with node(tmp_path, "b", middle.addresses[0]) as b:
            await until(a, lambda: b.node_id in a.untried())
            await until(middle, lambda: b.node_id in middle.connected())
        await until(middle, lambda: b.node_id not in middle.connected())
        assert b.node_id in a.reachable(), "nobody has told it"
        with pytest.raises(NodeUnreachable):
            await a.request(b.node_id, b"1")
        assert b.node_id not in a.reachable()
        assert b.node_id not in middle.reachable()


async def test_readers_hear_of_a_dial_in_vain_whether_it_fails_or_takes_too_long(
    autojump_clock: MockClock,
) -> None:
    stand = Stand()
    stand.hears("a", "b")
    stand.answering.add("b")
    async with stand.feed.subscribe() as changes, stand.dialling():
        with pytest.raises(NodeUnreachable):
            await stand.nodes.reach(NodeId("a"), 5.0)
        assert await anext(changes) == Change("reachable", NodeId("a"))
        with pytest.raises(DeadlineExceeded):
            await stand.nodes.reach(NodeId("b"), 0.05)
        assert await anext(changes) == Change("reachable", NodeId("b"))


async def test_readers_hear_once_of_what_time_alone_has_changed(autojump_clock: MockClock) -> None:
    stand = Stand()
    stand.hears("a", "b")
    async with stand.feed.subscribe() as changes:

        async def heard() -> set[str]:
            found = set()
            with trio.move_on_after(0.1):
                async for change in changes:
                    found.add(f"{change.kind} {change.node_id}")
            return found

        stand.nodes.announce_changes(200.0)
        assert await heard() == {"reachable a", "reachable b"}
        stand.nodes.announce_changes(201.0)
        assert await heard() == set()
        stand.dialler.dialled(NodeId("b"), 201.0, succeeded=False)
        stand.nodes.announce_changes(201.5)
        assert await heard() == {"reachable b"}


async def test_readers_hear_of_a_node_that_somebody_found_reachable_for_a_moment_only() -> None:
    """Of one whose record came and whose first dial failed, between two looks at the time."""
    stand = Stand()
    stand.nodes.announce_changes(100.0)
    stand.hears("a", now=101.0)
    assert stand.nodes.at(105.0) == {"a"}
    stand.dialler.dialled(NodeId("a"), 106.0, succeeded=False)
    async with stand.feed.subscribe() as changes:
        stand.nodes.announce_changes(107.0)
        with trio.fail_after(1.0):
            assert await anext(changes) == Change("reachable", NodeId("a"))
        assert stand.nodes.at(107.0) == set()
        stand.nodes.announce_changes(107.5)
        stand.feed.announce(Change("reachable", NodeId("nothing before this")))
        assert (await anext(changes)).node_id == "nothing before this"


def test_a_connected_node_takes_no_place_among_the_untried() -> None:
    stand = Stand()
    names = [f"n{number}" for number in range(UNTRIED_MAX + 1)]
    stand.hears(*names)
    stand.connected.put_last(NodeId(names[0]), 0.0)
    assert stand.nodes.untried(200.0) == set(names[1:])


async def test_of_a_connection_that_has_ended_nothing_is_kept(autojump_clock: MockClock) -> None:
    stand = Stand()
    stand.hears("a")
    stand.answering.add("a")
    async with stand.dialling():
        await stand.nodes.reach(NodeId("a"), 5.0)
    assert list(stand.uses) == ["a"]
    assert stand.nodes.idle({}, 1, 10 * IDLE_S) == []
    assert list(stand.uses) == []


async def test_one_that_never_had_a_message_is_idle_from_its_dial_on(autojump_clock: MockClock) -> None:
    stand = Stand()
    stand.hears("a")
    stand.answering.add("a")
    async with stand.dialling():
        await stand.nodes.reach(NodeId("a"), 5.0)
    reached_s = trio.current_time()
    assert stand.nodes.idle({NodeId("a"): 0}, 1, reached_s + IDLE_S) == ["a"]


async def test_connected_nodes_are_taken_down_as_there_for_gossip_and_are_not_ended_alone() -> None:
    stand = Stand()
    n_bytes = {NodeId("a"): 0, NodeId("b"): 0}
    for now in (0.0, IDLE_S, 2 * IDLE_S):
        assert stand.nodes.idle(n_bytes, 2, now) == []
    uses = dict(stand.uses.items())
    assert [(use.since_s, use.is_for_gossip) for use in uses.values()] == [(0.0, True)] * 2
    stand.nodes.used(NodeId("a"), 2 * IDLE_S)
    stand.nodes.idle(n_bytes | {NodeId("b"): 1}, 2, 2 * IDLE_S + 1)
    assert [use.since_s for use in uses.values()] == [2 * IDLE_S, 2 * IDLE_S + 1]
    stand.nodes.idle({NodeId("b"): 1}, 2, 2 * IDLE_S + 2)
    assert list(stand.uses) == ["b"]


@asynccontextmanager
async def idle_pair(folder: Path, max_peers: int) -> AsyncIterator[tuple[Libp2pRouter, Libp2pRouter]]:
    """Two that are connected, of which the second looks for `max_peers`. Nothing was said for long."""
    async with node(folder, "a", max_peers=0) as a, node(folder, "b", max_peers=max_peers) as b:
        await a.connect(b.addresses[0])
        for one, other in ((a, b), (b, a)):
            await until(one, lambda one=one, other=other: other.node_id in one.connected())  # type: ignore[misc]
            with trio.fail_after(DEADLINE_S):
                while one._gossiping() != {other.node_id}:  # noqa: ASYNC110 (no event tells)
                    await trio.sleep(0.01)
            one._unused.end(trio.current_time())
            for use in one.directory.uses.values():
                use.since_s -= IDLE_S
        yield a, b


async def test_two_nodes_with_enough_connections_end_theirs_and_take_each_other_for_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with idle_pair(tmp_path, max_peers=0) as (a, b):
        spare = a._unused._spare
        assert spare.offered([b.node_id], trio.current_time(), a._unused._kept()) == [], (
            "gossip goes that way"
        )
        for one in (a, b):
            monkeypatch.setattr(one._unused, "_gossiping", set)
        a._unused.end(trio.current_time())
        for one, other in ((a, b), (b, a)):
            await until(one, lambda one=one: not one.connected())  # type: ignore[misc]
            assert other.node_id in one.reachable()
            assert other.node_id not in one.untried()
        assert await b.request(a.node_id, b"2") == b"answer to 2"


async def test_a_connection_that_is_used_while_its_end_is_offered_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with idle_pair(tmp_path, max_peers=0) as (a, b):
        for one in (a, b):
            monkeypatch.setattr(one._unused, "_gossiping", set)
        offered_at_s = trio.current_time()
        assert a._unused._spare.offered([b.node_id], offered_at_s, ()) == [b.node_id]
        assert await a.request(b.node_id, b"1") == b"answer to 1"
        for use in b.directory.uses.values():
            use.since_s -= IDLE_S
        await a._unused._offer(b.node_id, offered_at_s)
        assert b.node_id in a.connected()


async def test_a_node_that_needs_a_connection_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with idle_pair(tmp_path, max_peers=1) as (a, b):
        for one in (a, b):
            monkeypatch.setattr(one._unused, "_gossiping", set)
        with pytest.raises(RemoteError, match="needs the connection"):
            await a._ask(b.node_id, KIND_MAY_LET_GO, b"")
        a._unused.end(trio.current_time())
        assert await a.request(b.node_id, b"1") == b"answer to 1"
        assert a.node_id in b.connected()


def test_one_that_was_looked_at_before_it_is_known_why_it_was_dialled_is_let_go_soon() -> None:
    stand = Stand()
    n_bytes = {NodeId("a"): 0}
    assert stand.nodes.idle(n_bytes, 1, 0.0) == []
    stand.nodes.met_in_passing(NodeId("a"), 1.0)
    assert stand.nodes.idle(n_bytes, 1, 1.0 + PASSING_S) == ["a"]
