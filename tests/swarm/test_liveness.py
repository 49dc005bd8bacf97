"""Who counts as connected, from its first connection to its last, and what happens beside it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from node_ids import A, B, C, D
from trio.testing import MockClock, wait_all_tasks_blocked

from swarmllm.errors import DeadlineExceeded, NodeUnreachable, SwarmLLMError
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.data.keepalive import CHECK_S, SILENCE_S
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.dialler import HOLD_BACK_S, Dialler, NodeUnresponsive
from swarmllm.swarm.libp2p.host import PeerWatcher
from swarmllm.swarm.peers import liveness as liveness_module
from swarmllm.swarm.peers.connection_limits import CONNECTIONS_MAX, Standing
from swarmllm.swarm.peers.early_connections import EARLY_DATA_PEERS, SLOW_EXCHANGE_S, UNHURRIED_MAX_S
from swarmllm.swarm.peers.liveness import (
    GUEST_S,
    GUESTS_MAX,
    Liveness,
    LivenessParts,
)
from swarmllm.swarm.records.exchange import KIND_LET_GO
from swarmllm_proto.identifiers import NodeId

from .dht.swarm_of import contacts

HERE = (Address("192.0.2.1", 8810),)


class Talker:
    """What carries the streams of a peer that is always heard."""

    peer_id = _ping_id = 0

    def __init__(self) -> None:
        self.secured_conn = self

    @property
    def _heard_at_s(self) -> float:
        return trio.current_time()

    async def _write_frame(self, frame: bytes) -> None: ...


class Host:
    """Connections as a test opens and ends them."""

    def __init__(self, node_id: NodeId) -> None:
        self.node_id = node_id
        self.n_of: Counter[NodeId] = Counter()
        self.is_busy = False
        """Whether surplus connections are in use."""
        self.n_looks = 0
        """At those."""
        self.defect: Exception | None = None
        self.closed: list[NodeId] = []
        self.voices: list[Any] = [Talker()]
        """What carries the streams of every peer."""
        self.watcher: PeerWatcher | None = None
        self.ips: dict[NodeId, str] = {}

    def watch_peers(self, watcher: PeerWatcher) -> None:
        self.watcher = watcher

    def open(self, node_id: NodeId) -> None:
        assert self.watcher is not None
        self.n_of[node_id] += 1
        self.watcher.libp2p_connected(node_id)

    def end(self, node_id: NodeId) -> None:
        assert self.watcher is not None
        del self.n_of[node_id]
        self.watcher.libp2p_disconnected(node_id)

    async def dial(self, node_id: NodeId, addresses: list[Address]) -> None:
        self.open(node_id)

    def is_connected(self, node_id: NodeId) -> bool:
        return bool(self.n_of[node_id])

    def n_connections(self) -> dict[NodeId, int]:
        return {node_id: n for node_id, n in self.n_of.items() if n}

    def remote_ip(self, node_id: NodeId) -> str:
        return self.ips.get(node_id, "192.0.2.1")

    def surplus(self, node_id: NodeId) -> list[int]:
        return [0] * (self.n_of[node_id] - 1)

    async def end_idle_surplus(self, node_id: NodeId) -> None:
        self.n_looks += 1
        if self.defect is not None:
            raise self.defect
        if not self.is_busy:
            self.n_of[node_id] = 1

    def muxers(self, node_id: NodeId) -> list[Any]:
        return self.voices

    async def close_hard(self, node_id: NodeId) -> None:
        self.closed.append(node_id)
        if self.n_of.pop(node_id, 0) and self.watcher is not None:
            self.watcher.libp2p_disconnected(node_id)


class Plane:
    def __init__(self) -> None:
        self.connected: set[NodeId] = set()
        self.reached: list[tuple[NodeId, float]] = []
        self.is_in_reach = True

    def has_connection(self, node_id: NodeId) -> bool:
        return node_id in self.connected

    def close(self, node_id: NodeId, how: str) -> None:
        self.connected.discard(node_id)

    async def reach(self, node_id: NodeId) -> None:
        self.reached.append((node_id, trio.current_time()))
        if not self.is_in_reach:
            raise NodeUnreachable("there is no way")
        self.connected.add(node_id)


class Requests:
    def __init__(self) -> None:
        self.lost: list[NodeId] = []
        self.asked: list[tuple[NodeId, int]] = []

    async def request(self, node_id: NodeId, kind: int, body: bytes, *, timeout_s: float) -> bytes:
        await trio.lowlevel.checkpoint()
        self.asked.append((node_id, kind))
        raise NodeUnreachable("it has left")

    def lose(self, node_id: NodeId) -> None:
        self.lost.append(node_id)


class Known:
    def lets_in(self, node_id: NodeId) -> bool:
        return True

    def standing(self, node_id: NodeId) -> Standing:
        return Standing.REMEMBERED if node_id == A else Standing.STRANGER


class Node:
    def __init__(self, nursery: trio.Nursery, node_id: NodeId, connections_max: int) -> None:
        self.host, self.plane, self.requests = Host(node_id), Plane(), Requests()
        self.dialler = Dialler(node_id, random.Random(0))
        self.parts = LivenessParts()
        self.greeted: list[NodeId] = []
        self.refusals: list[SwarmLLMError] = []
        """What the next greetings end with."""
        self.greeting_s = 0.0
        self.changes: list[tuple[str, NodeId]] = []
        self.feed = ChangeFeed()
        host: Any = self.host
        requests: Any = self.requests
        self.liveness = Liveness(
            host,
            nursery,
            self.feed,
            self.dialler,
            requests,
            self._exchange_records,
            Known(),
            self.parts,
            connections_max,
        )
        nursery.start_soon(self._follow)
        plane: Any = self.plane
        self.liveness.begin(plane)

    async def _exchange_records(self, node_id: NodeId) -> None:
        self.greeted.append(node_id)
        await trio.sleep(self.greeting_s)
        if self.refusals:
            raise self.refusals.pop(0)

    async def _follow(self) -> None:
        async with self.feed.subscribe() as changes:
            async for change in changes:
                self.changes.append((change.kind, change.node_id))

    def due(self) -> list[str]:
        """Whom the dialler would dial now."""
        return [each for each, _ in self.dialler.due(trio.current_time(), set(self.liveness.connected))[0]]


@asynccontextmanager
async def node(node_id: NodeId = B, connections_max: int = CONNECTIONS_MAX) -> AsyncIterator[Node]:
    async with trio.open_nursery() as nursery:
        made = Node(nursery, node_id, connections_max)
        await wait_all_tasks_blocked()
        yield made
        nursery.cancel_scope.cancel()


async def test_a_peer_counts_once_its_records_are_there_and_nothing_more_is_kept_of_it(
    autojump_clock: MockClock,
) -> None:
    async with node() as it:
        it.greeting_s = 1.0
        it.host.open(A)
        await wait_all_tasks_blocked()
        assert (list(it.liveness.connected), it.changes) == ([], [])
        assert list(it.parts.attempts) == [A]
        it.host.open(A)
        await trio.sleep(1.5)
        assert it.greeted == [A], "a second connection is no second greeting"
        assert it.changes == [("connected", A)]
        await trio.sleep(10.0)
        assert list(it.parts.attempts) == []
        assert it.host.n_of[A] == 1, "the surplus has ended"


async def test_this_node_does_not_greet_itself(autojump_clock: MockClock) -> None:
    async with node() as it:
        it.host.open(B)
        await trio.sleep(5.0)
        assert it.greeted == []
        assert (list(it.parts.attempts), list(it.liveness.connected)) == ([], [])


@pytest.mark.parametrize("n_refusals", [0, 2, 5, 6])
async def test_a_peer_that_does_not_answer_as_a_node_is_let_go_after_some_tries(
    autojump_clock: MockClock, n_refusals: int
) -> None:
    async with node() as it:
        it.refusals = [NodeUnreachable("no node") for _ in range(n_refusals)]
        it.host.open(A)
        await trio.sleep(20.0)
        is_let_go = n_refusals > len(liveness_module._EXCHANGE_RETRY_S)
        assert len(it.greeted) == min(n_refusals, 5) + 1
        assert it.changes == ([] if is_let_go else [("connected", A)])
        assert it.host.closed == ([A] if is_let_go else [])
        assert list(it.parts.attempts) == []


async def test_tries_are_a_quarter_of_their_wait_off_at_most(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda least, most: most)
    async with node() as it:
        it.refusals = [NodeUnreachable("no node")]
        it.host.open(A)
        await trio.sleep(1.25 * liveness_module._EXCHANGE_RETRY_S[0] + 0.05)
        assert it.changes == [("connected", A)]


async def test_a_peer_that_is_slow_has_tries_left_where_others_have_none(autojump_clock: MockClock) -> None:
    async with node() as it:
        n_tries = len(liveness_module._EXCHANGE_RETRY_S)
        it.refusals = [NodeUnreachable("no node") for _ in range(n_tries)]
        it.refusals += [DeadlineExceeded("slow") for _ in range(3)]
        it.host.open(A)
        await trio.sleep(60.0)
        assert it.changes == [("connected", A)]
        assert len(it.greeted) == n_tries + 4


async def test_an_error_of_ours_beside_surplus_connections_ends_them_all(autojump_clock: MockClock) -> None:
    async with node() as it:
        it.host.defect = RuntimeError("a defect")
        for _ in range(2):
            it.host.open(A)
        await trio.sleep(20.0)
        assert (it.host.closed, it.changes) == ([A], [("connected", A), ("disconnected", A)])
        assert list(it.parts.attempts) == []


async def test_a_slow_peer_is_asked_far_more_often_and_not_for_ever(autojump_clock: MockClock) -> None:
    async with node() as it:
        it.refusals = [DeadlineExceeded("slow") for _ in range(11)]
        it.host.open(A)
        await trio.sleep(100.0)
        assert (len(it.greeted), it.changes) == (12, [("connected", A)])
        it.refusals = [DeadlineExceeded("slow") for _ in range(99)]
        it.host.open(C)
        await trio.sleep(100.0)
        assert it.greeted.count(C) == 12
        assert it.host.closed == [C]


async def test_routes_do_without_a_peer_from_its_first_answer_that_is_late(autojump_clock: MockClock) -> None:
    """Its record may be here already, from others."""
    async with node() as it:
        it.refusals = [NodeUnreachable("no node"), DeadlineExceeded("slow"), DeadlineExceeded("slow")]
        it.dialler.suggest(A, HERE, trio.current_time())
        it.host.open(A)
        await wait_all_tasks_blocked()
        assert it.changes == []
        assert not it.dialler.is_lost(A, 0.0)
        await trio.sleep(1.25 * liveness_module._EXCHANGE_RETRY_S[0])
        assert it.changes == [("reachable", A)]
        assert it.dialler.is_lost(A, trio.current_time())
        await trio.sleep(20.0)
        assert it.changes[-1] == ("connected", A)
        assert not it.dialler.is_lost(A, 0.0)


async def test_a_peer_that_is_gone_before_it_has_answered_is_not_asked_again(
    autojump_clock: MockClock,
) -> None:
    async with node() as it:
        it.refusals = [NodeUnreachable("gone")]
        it.host.open(A)
        await wait_all_tasks_blocked()
        it.host.end(A)
        await trio.sleep(20.0)
        assert (it.greeted, it.host.closed, it.changes) == ([A], [], [])
        assert list(it.parts.attempts) == []


async def test_one_that_leaves_while_it_is_greeted_does_not_count(autojump_clock: MockClock) -> None:
    async with node() as it:
        it.greeting_s = 1.0
        it.host.open(A)
        await trio.sleep(0.5)
        it.host.end(A)
        await trio.sleep(5.0)
        assert it.changes == []
        assert list(it.parts.attempts) == []


async def test_one_that_leaves_while_it_is_greeted_is_not_counted_on_until_it_is_heard_again(
    autojump_clock: MockClock,
) -> None:
    async with node() as it:
        it.greeting_s = 1.0
        now = trio.current_time()
        it.dialler.suggest(A, HERE, now)
        assert now + 10.0 > it.dialler.may_answer_from_s(A, now)
        it.host.open(A)
        await trio.sleep(0.5)
        it.host.end(A)
        await trio.sleep(5.0)
        assert it.changes == [("reachable", A)]
        heard_s, now = now, trio.current_time()
        assert now + 3600.0 <= it.dialler.may_answer_from_s(A, heard_s)
        assert now + 3.0 > it.dialler.may_answer_from_s(A, now)
        assert it.due() == [A], "it is dialled as soon as it would have been"


async def test_an_error_of_ours_ends_the_connection_and_keeps_nothing(autojump_clock: MockClock) -> None:
    async with node() as it:
        defect: Any = RuntimeError("a defect")
        it.refusals = [defect]
        it.host.open(A)
        await trio.sleep(5.0)
        assert (it.changes, it.host.closed) == ([], [A])
        assert list(it.parts.attempts) == []


async def test_a_dial_returns_once_the_node_counts_and_says_that_it_does_not_answer(
    autojump_clock: MockClock,
) -> None:
    async with node() as it:
        it.greeting_s = 3.0
        began_s = trio.current_time()
        await it.liveness.dial(A, list(HERE))
        assert trio.current_time() - began_s == pytest.approx(3.0)
        assert A in it.liveness.connected
        it.greeting_s = 300.0
        began_s = trio.current_time()
        with pytest.raises(NodeUnresponsive):
            await it.liveness.dial(C, list(HERE))
        assert trio.current_time() - began_s == pytest.approx(liveness_module._DIAL_AND_EXCHANGE_S)


async def test_so_many_are_greeted_at_a_time_and_a_slow_one_does_not_keep_its_turn(
    autojump_clock: MockClock,
) -> None:
    async with node() as it:
        it.greeting_s = 60.0
        for i in range(2 * liveness_module.EXCHANGES_MAX):
            it.host.open(NodeId(f"peer{i}"))
        await trio.sleep(liveness_module._TURN_S / 2)
        assert len(it.greeted) == liveness_module.EXCHANGES_MAX
        await trio.sleep(liveness_module._TURN_S)
        assert len(it.greeted) == 2 * liveness_module.EXCHANGES_MAX


@pytest.mark.parametrize("node_id", [A, C])
async def test_of_two_nodes_the_one_with_the_smaller_id_opens_the_data_connection(
    autojump_clock: MockClock, node_id: NodeId
) -> None:
    async with node(node_id) as it:
        it.host.open(B)
        await trio.sleep(0.1)
        dials_first = node_id < B
        assert bool(it.plane.reached) is dials_first
        await trio.sleep(10.0)
        assert len(it.plane.reached) == 1
    async with node(C) as it:
        it.host.open(B)
        await trio.sleep(0.1)
        it.plane.connected.add(B)
        await trio.sleep(10.0)
        assert it.plane.reached == [], "there is one"


async def test_a_peer_without_a_data_connection_is_lost_with_its_last_one_of_libp2p(
    autojump_clock: MockClock,
) -> None:
    async with node(C) as it:
        it.dialler.suggest(A, HERE, trio.current_time())
        it.host.open(A)
        await trio.sleep(0.1)
        it.host.end(A)
        assert list(it.liveness.connected) == []
        await wait_all_tasks_blocked()
        assert it.changes == [("connected", A), ("disconnected", A)]
        assert it.requests.lost == [A]


async def test_a_data_connection_carries_a_peer_until_libp2p_has_found_it_again(
    autojump_clock: MockClock,
) -> None:
    """Meanwhile it is dialled, as one that was lost just now, however late its next turn was."""
    async with node(A) as it:
        now = trio.current_time()
        it.dialler.suggest(B, HERE, now)
        for _ in range(8):
            it.dialler.dialled(B, now, succeeded=False)
        it.host.open(B)
        await trio.sleep(0.1)
        assert it.plane.has_connection(B)
        it.host.end(B)
        await trio.sleep(1.0)
        assert list(it.liveness.connected) == [B]
        assert [each for each, _ in it.dialler.due(trio.current_time(), set())[0]] == [B]
        await trio.sleep(1.0)
        it.host.open(B)
        await trio.sleep(30.0)
        assert it.changes == [("connected", B)]
        it.host.end(B)
        await trio.sleep(liveness_module._LIBP2P_GRACE_S - 0.5)
        assert list(it.liveness.connected) == [B]
        await trio.sleep(1.0)
        assert it.changes == [("connected", B), ("disconnected", B)]
        assert not it.plane.has_connection(B)


@pytest.mark.parametrize(("how", "is_called_back"), [("goodbye", False), ("lost", True)])
async def test_one_that_said_goodbye_is_not_called_back_at_once(
    autojump_clock: MockClock, how: str, is_called_back: bool
) -> None:
    async with node(A) as it:
        it.dialler.suggest(B, HERE, trio.current_time())
        it.host.open(B)
        await trio.sleep(0.1)
        it.liveness.drop(B, how)
        assert list(it.liveness.connected) == []
        assert not it.plane.has_connection(B)
        await trio.sleep(1.0)
        assert it.host.closed == [B]
        assert (it.due() == [B]) is is_called_back
        await trio.sleep(HOLD_BACK_S + 10.0)
        assert (it.due() == [B]) is not is_called_back, "it is being dialled, or is now"


NEIGHBOURS = [contact.node_id for contact in contacts(EARLY_DATA_PEERS + 2, seed=11)]


async def test_some_peers_have_a_data_connection_early_and_the_others_when_there_is_work(
    autojump_clock: MockClock,
) -> None:
    async with node("1" + A) as it:
        for peer in NEIGHBOURS:
            it.host.open(peer)
            await trio.sleep(1.0)
        await trio.sleep(60.0)
        assert it.plane.connected == set(NEIGHBOURS[:EARLY_DATA_PEERS])
        assert set(it.liveness.connected) == set(NEIGHBOURS)
        it.liveness.warm(NEIGHBOURS[-1])
        it.liveness.warm(NEIGHBOURS[0])
        it.liveness.warm(C)
        await trio.sleep(1.0)
        assert [peer for peer, _ in it.plane.reached] == [*NEIGHBOURS[:EARLY_DATA_PEERS], NEIGHBOURS[-1]]
        it.plane.close(NEIGHBOURS[0], "lost")
        it.host.voices = [Voice()]
        it.host.open(C)
        await trio.sleep(60.0)
        assert not it.plane.has_connection(C), "there are enough"
        assert ("disconnected", C) not in it.changes, "nobody listens for it"


@pytest.mark.parametrize(
    ("took_s", "waits_s"), [(SLOW_EXCHANGE_S, 0.0), (1.2, 24.0), (20.0, UNHURRIED_MAX_S)]
)
async def test_where_records_come_slowly_the_data_connection_waits_unless_there_is_work(
    autojump_clock: MockClock, took_s: float, waits_s: float
) -> None:
    async with node(A) as it:
        it.greeting_s = took_s
        began_s = trio.current_time()
        for peer in (B, C, D):
            it.host.open(peer)
        await trio.sleep(took_s / 2)
        it.liveness.warm(C)
        assert it.plane.reached == [], "it does not count yet"
        await trio.sleep(took_s / 2 + 0.1)
        it.liveness.warm(D)
        await trio.sleep(60.0)
        after_s = {peer: at_s - began_s - took_s for peer, at_s in it.plane.reached}
        wanted_s = {B: waits_s, C: 0.0, D: min(0.1, waits_s)}
        assert after_s == {peer: pytest.approx(at_s, abs=0.01) for peer, at_s in wanted_s.items()}
        assert list(it.parts.attempts) == []


@pytest.mark.parametrize("took_s", [SLOW_EXCHANGE_S, 1.2])
async def test_where_records_come_slowly_nobody_listens_for_a_peer_before_something_is_asked_of_it(
    autojump_clock: MockClock, took_s: float
) -> None:
    async with node(A) as it:
        it.greeting_s, it.plane.is_in_reach = took_s, False
        it.host.voices = [Voice()]
        it.host.open(B)
        await trio.sleep(took_s + 20.0)
        assert (("disconnected", B) in it.changes) is (took_s <= SLOW_EXCHANGE_S)
        it.liveness.warm(B)
        await trio.sleep(20.0)
        assert ("disconnected", B) in it.changes


async def test_surplus_connections_end_once_they_are_idle(autojump_clock: MockClock) -> None:
    async with node() as it:
        it.host.is_busy = True
        for _ in range(3):
            it.host.open(A)
        await trio.sleep(20.0)
        assert it.host.n_of[A] == 3
        assert it.host.n_looks <= 20.0 / liveness_module._SURPLUS_S, "one looks"
        it.host.is_busy = False
        await trio.sleep(2 * liveness_module._SURPLUS_S)
        assert it.host.n_of[A] == 1
        assert list(it.parts.attempts) == []
        it.host.open(A)
        await trio.sleep(2 * liveness_module._SURPLUS_S)
        assert it.host.n_of[A] == 1, "the next one, too"


async def test_where_there_are_too_many_strangers_give_way_and_their_places_count_once(
    autojump_clock: MockClock,
) -> None:
    async with node(connections_max=2) as it:
        for node_id in (A, C):
            it.host.open(node_id)
        await trio.sleep(0.1)
        it.host.open(NodeId("newcomer"))
        await trio.sleep(GUEST_S - 0.5)
        assert it.host.closed == [], "it may ask whom this node knows"
        assert it.requests.asked == []
        await trio.sleep(1.0)
        assert sorted(it.greeted) == [A, C]
        assert it.requests.asked == [(NodeId("newcomer"), KIND_LET_GO)]
        assert it.host.closed == ["newcomer"]
        assert sorted(it.liveness.connected) == [A, C]
        assert list(it.parts.attempts) == []
        # C has gone, and there is room again.
        it.host.end(C)
        it.host.open(NodeId("newcomer"))
        await trio.sleep(5.0)
        assert "newcomer" in it.liveness.connected


async def test_one_that_gives_way_and_comes_again_before_it_has_left_takes_a_place_again(
    autojump_clock: MockClock,
) -> None:
    async with node(connections_max=2) as it:
        for node_id in (A, C):
            it.host.open(node_id)
        await trio.sleep(0.1)
        newcomer = NodeId("newcomer")
        it.host.open(newcomer)
        it.host.open(newcomer)
        await trio.sleep(2 * GUEST_S)
        assert sorted(it.greeted) == [A, C], "its second connection is one too many, too"
        assert sorted(it.liveness.connected) == [A, C]
        assert list(it.parts.attempts) == []


async def test_so_many_guests_stay_and_those_of_one_network_push_out_each_other(
    autojump_clock: MockClock,
) -> None:
    async with node(connections_max=2) as it:
        for node_id in (A, C):
            it.host.open(node_id)
        await trio.sleep(0.1)
        honest = NodeId("honest")
        it.host.ips[honest] = "203.0.113.9"
        it.host.ips[C] = "192.0.2.2"
        crowd = [NodeId(f"crowd {number}") for number in range(2 * GUESTS_MAX)]
        it.host.ips |= dict.fromkeys(crowd, "198.51.100.1")
        for node_id in crowd[:GUESTS_MAX]:
            it.host.open(node_id)
        it.host.open(honest)
        for node_id in crowd[GUESTS_MAX:]:
            it.host.open(node_id)
        await trio.sleep(GUEST_S / 2)
        assert len(set(it.host.closed)) == GUESTS_MAX + 1
        assert set(it.host.closed) <= set(crowd)
        await trio.sleep(GUEST_S)
        assert set(it.host.closed) == {*crowd, honest}
        assert sorted(it.liveness.connected) == [A, C]
        assert list(it.parts.attempts) == []


class Voice:
    """What carries the streams of a peer that answers no ping: it speaks when the test says so."""

    def __init__(self) -> None:
        self.secured_conn = self
        self.peer_id = A
        self._ping_id = 0
        self._heard_at_s = trio.current_time()

    def speak(self) -> None:
        self._heard_at_s = trio.current_time()

    async def _write_frame(self, frame: bytes) -> None: ...


@asynccontextmanager
async def silent_peer() -> AsyncIterator[tuple[Node, Voice]]:
    """A peer without a data connection that counts no more because it has been silent."""
    async with node() as it:
        voice = Voice()
        it.host.voices = [voice]
        it.plane.is_in_reach = False
        it.host.open(A)
        await trio.sleep(SILENCE_S + 3 * CHECK_S)
        assert it.changes == [("connected", A), ("disconnected", A)]
        yield it, voice


async def test_a_peer_at_rest_is_listened_to_closely_once_there_is_work_with_it(
    autojump_clock: MockClock,
) -> None:
    async with node() as it:
        it.plane.is_in_reach = False
        it.host.open(A)
        await trio.sleep(100.0)
        it.host.voices = [Voice()]
        it.liveness.warm(A)
        await trio.sleep(SILENCE_S + 3 * CHECK_S)
        assert it.changes == [("connected", A), ("disconnected", A)]


async def test_many_requests_to_a_peer_that_cannot_be_reached_are_one_dial(autojump_clock: MockClock) -> None:
    async with node() as it:
        it.plane.is_in_reach = False
        it.host.open(A)
        await trio.sleep(100.0)
        n_before = len(it.plane.reached)
        for _ in range(3):
            for _ in range(10):
                it.liveness.warm(A)
            await trio.sleep(1.0)
        assert len(it.plane.reached) == n_before + 3
        assert list(it.parts.attempts) == []


async def test_a_silent_peer_that_speaks_counts_again_without_being_greeted(
    autojump_clock: MockClock,
) -> None:
    async with silent_peer() as (it, voice):
        voice.speak()
        await trio.sleep(CHECK_S)
        assert it.changes[2:] == [("connected", A)]
        assert it.greeted == [A]
        await trio.sleep(SILENCE_S + 3 * CHECK_S)
        assert it.changes[3:] == [("disconnected", A)], "it is watched as before"
        await trio.sleep(liveness_module._SILENT_TOO_LONG_S + CHECK_S)
        assert it.host.closed == [A]


async def test_a_silent_peer_that_is_greeted_anew_counts_once_that_is_over(autojump_clock: MockClock) -> None:
    async with silent_peer() as (it, voice):
        it.greeting_s = 3.0
        it.host.open(A)
        await trio.sleep(0.1)
        voice.speak()
        await trio.sleep(CHECK_S)
        assert it.changes[2:] == []
        await trio.sleep(3.0)
        assert it.changes[2:] == [("connected", A)]
        assert it.greeted == [A, A]


async def test_a_last_word_of_a_peer_whose_connection_has_ended_does_not_count(
    autojump_clock: MockClock,
) -> None:
    async with silent_peer() as (it, voice):
        it.host.end(A)
        voice.speak()
        await trio.sleep(CHECK_S)
        assert it.changes[2:] == []
        assert list(it.liveness.connected) == []
