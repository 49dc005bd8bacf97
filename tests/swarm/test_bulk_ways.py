"""Which connection a transfer takes, when a better one replaces it, and what is told when one ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from struct import Struct
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from node_ids import A, B, C
from trio.testing import MockClock, wait_all_tasks_blocked

from swarmllm.errors import DeadlineExceeded, NodeBusy, NodeUnreachable, RemoteError
from swarmllm.swarm.byte_budget import BudgetKind, ByteBudget, Limit
from swarmllm.swarm.data import bulk as bulk_module
from swarmllm.swarm.data.bulk import _NO_WAY_S as NO_WAY_S
from swarmllm.swarm.data.bulk import PENDING_MAX, Bulk, BulkKind, BulkPeer, NoBulkConnection
from swarmllm.swarm.data.connection import HELLO_S
from swarmllm.swarm.data.data_plane import DataPlane
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.trust import TrustEvent
from swarmllm.swarm.router import RequestRefused
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import REQUEST_MAX

HEADER = Struct("<BQ")


class Connection:
    bulk = True

    def __init__(
        self, node_id: NodeId, wire_kind: str = "direct", *, dialled: bool = True, ready: bool = True
    ) -> None:
        self.node_id, self.wire_kind, self.dialled = node_id, wire_kind, dialled
        self.alive = True
        self.ready = trio.Event()
        if ready:
            self.ready.set()
        self.wire = None
        self.sent: list[tuple[int, int, bytes]] = []
        self.ending = ""

    async def send(self, header: bytes, payload: Any) -> None:
        await trio.lowlevel.checkpoint()
        if not self.alive:
            raise NodeUnreachable("it has ended")
        self.sent.append((*HEADER.unpack(header), bytes(payload)))

    async def introduced(self) -> None:
        await trio.lowlevel.checkpoint()

    async def says_hello(self) -> bool:
        with trio.move_on_after(HELLO_S):
            await self.ready.wait()
            return True
        self.end("no hello came")
        return False

    def end(self, how: str) -> None:
        self.alive = False
        self.ending = self.ending or how

    @property
    def last_number(self) -> int:
        """Of what was asked on it last."""
        return next(number for kind, number, _ in reversed(self.sent) if kind == BulkKind.ASK)


class Node:
    """`A`, whose ways a test opens."""

    def __init__(self, nursery: trio.Nursery, budget: ByteBudget | None = None) -> None:
        self.direct: list[Connection] = []
        """What the next dials give."""
        self.streams: list[Connection] = []
        self.better_streams: list[Connection] = []
        self.n_dialled = 0
        self.there: list[Connection] = []
        self.dial_s = 0.0
        self.let_answer = trio.Event()
        self.events: list[TrustEvent] = []
        self.peers: Parts[BulkPeer] = Parts.alone()
        ways: Any = self
        self.bulk = Bulk(
            B, nursery, ways, budget, lambda _node, event, _detail="": self.events.append(event), self.peers
        )
        self._nursery = nursery

    def _note(self, _node_id: NodeId, event: TrustEvent, _detail: str = "") -> None:
        self.events.append(event)

    def all_connections(self, _node_id: NodeId) -> list[Connection]:
        return self.there

    async def dial_bulk(self, _node_id: NodeId) -> Connection | None:
        self.n_dialled += 1
        await trio.sleep(self.dial_s)
        return self.direct.pop(0) if self.direct else None

    async def open_bulk_stream(self, _node_id: NodeId, old: Connection | None) -> Connection | None:
        streams = self.streams if old is None else self.better_streams
        return streams.pop(0) if streams else None

    async def answer(self, _sender: NodeId, body: bytes) -> bytes:
        await self.let_answer.wait()
        if body == b"refuse":
            raise RequestRefused("not here")
        return body[::-1]

    async def asks(self, body: bytes = b"?", node_id: NodeId = A, timeout_s: float = 60.0) -> Asked:
        asked = Asked()

        async def ask() -> None:
            try:
                asked.answer = bytes(await self.bulk.fetch(node_id, body, timeout_s))
            except Exception as error:
                asked.error = error

        self._nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        return asked

    async def says(self, connection: Any, kind: int, number: int, payload: bytes = b"") -> None:
        await self.bulk.take(connection, HEADER.pack(kind, number), memoryview(payload))
        await wait_all_tasks_blocked()

    def loses(self, connection: Any) -> None:
        connection.end("lost")
        self.bulk.lost(connection)


class Asked:
    answer: bytes | None = None
    error: Exception | None = None


@asynccontextmanager
async def node(budget: ByteBudget | None = None) -> AsyncIterator[Node]:
    async with trio.open_nursery() as nursery:
        yield Node(nursery, budget)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("kind", "payload", "error"),
    [
        (BulkKind.ANSWER, b"yes", None),
        (BulkKind.REFUSED, b"no, \xff", RemoteError),
        (BulkKind.BUSY, b"", NodeBusy),
        (None, b"", NodeUnreachable),
    ],
)
async def test_what_is_said_to_a_question_is_its_outcome_and_nobody_elses(
    autojump_clock: MockClock, kind: BulkKind | None, payload: bytes, error: type[Exception] | None
) -> None:
    async with node() as it:
        it.direct = [connection := Connection(A)]
        first = await it.asks(b"one")
        number = connection.last_number
        second = await it.asks(b"two")
        assert [body for _, _, body in connection.sent] == [b"one", b"two"]
        await it.says(connection, BulkKind.ANSWER, number + 1000, b"to nothing that was asked")
        if kind is None:
            it.loses(connection)
            await wait_all_tasks_blocked()
            assert isinstance(second.error, NodeUnreachable)
        else:
            await it.says(connection, kind, number, payload)
            assert (second.answer, second.error) == (None, None)
        assert first.answer == (payload if error is None else None)
        assert error is None or type(first.error) is error
        assert it.n_dialled == 1


async def test_a_question_ends_in_time_and_takes_its_connection_along_if_that_says_nothing(
    autojump_clock: MockClock,
) -> None:
    async with node() as it:
        it.direct = [connection := Connection(A)]
        asked = await it.asks(timeout_s=3.0)
        await trio.sleep(4.0)
        assert isinstance(asked.error, DeadlineExceeded)
        assert connection.alive
        it.loses(connection)
        it.direct = [mute := Connection(A, ready=False)]
        both = [await it.asks(body, timeout_s=2 * HELLO_S) for body in (b"one", b"two")]
        assert [body for _, _, body in mute.sent] == [b"one", b"two"], "no hello is waited for"
        await trio.sleep(HELLO_S + 1.0)
        assert not mute.alive
        it.loses(mute)
        await wait_all_tasks_blocked()
        assert [type(each.error) for each in both] == [NoBulkConnection] * 2
        assert it.n_dialled == 2, "a stream is tried, and the port is not dialled again"


async def test_a_node_without_a_way_is_dialled_again_after_a_while(autojump_clock: MockClock) -> None:
    async with node() as it:
        for seconds, n_dialled in ((0.0, 1), (NO_WAY_S - 1.0, 1), (1.0, 2)):
            await trio.sleep(seconds)
            asked = await it.asks()
            assert isinstance(asked.error, NoBulkConnection)
            assert it.n_dialled == n_dialled
        it.streams = [stream := Connection(A, "libp2p")]
        await it.asks()
        assert (it.n_dialled, len(stream.sent)) == (2, 1)


async def test_a_connection_that_the_other_has_dialled_is_as_good(autojump_clock: MockClock) -> None:
    async with node() as it:
        stream, unready, dead = Connection(A, "libp2p"), Connection(A, ready=False), Connection(A)
        dead.alive = False
        messages = Connection(A)
        messages.bulk = False
        it.there = [stream, unready, dead, messages, theirs := Connection(A, dialled=False)]
        await it.asks()
        assert (it.n_dialled, len(theirs.sent)) == (0, 1)
        assert [*stream.sent, *unready.sent, *dead.sent, *messages.sent] == []


@pytest.mark.parametrize("is_lost", [False, True])
async def test_new_questions_take_a_better_way_and_the_old_one_ends_with_its_last_answer(
    autojump_clock: MockClock, is_lost: bool
) -> None:
    async with node() as it:
        it.streams = [stream := Connection(A, "libp2p")]
        first = await it.asks()
        await trio.sleep(NO_WAY_S)
        it.direct, it.dial_s = [direct := Connection(A)], 1.0
        n_dialled = it.n_dialled
        for _ in range(2):
            await it.asks()
        assert len(stream.sent) == 3
        if is_lost:
            it.loses(stream)
        await trio.sleep(2.0)
        assert it.n_dialled == n_dialled + 1, "one look at a time"
        if is_lost:
            assert not direct.alive, "by then it was lost, and what comes next dials anew"
            assert isinstance(first.error, NodeUnreachable)
            return
        await it.asks()
        assert (len(direct.sent), len(stream.sent), stream.alive) == (1, 3, True)
        for kind, number, _ in list(stream.sent):
            assert (kind, stream.alive) == (BulkKind.ASK, True)
            await it.says(stream, BulkKind.ANSWER, number, b"late")
        assert first.answer == b"late"
        assert not stream.alive
        assert direct.alive
        await trio.sleep(2 * NO_WAY_S)
        await it.asks()
        await trio.sleep(2.0)
        assert it.n_dialled == n_dialled + 1, "there is no better way than a direct one"


@pytest.mark.parametrize(("peer", "keeps_own"), [(A, False), (C, True)])
async def test_of_two_connections_that_of_the_smaller_id_stays(
    autojump_clock: MockClock, peer: NodeId, keeps_own: bool
) -> None:
    """This node is B. The other one asks on the connection that it has dialled."""
    async with node() as it:
        it.let_answer.set()
        it.direct = [own := Connection(peer)]
        asked = await it.asks(node_id=peer)
        it.there = [own, theirs := Connection(peer, dialled=False)]
        await it.says(theirs, BulkKind.ASK, 1, b"abc")
        assert theirs.sent == [(BulkKind.ANSWER, 1, b"cba")]
        await it.asks(node_id=peer)
        assert len(own.sent) == (2 if keeps_own else 1)
        await it.says(own, BulkKind.ANSWER, own.sent[0][1], b"!")
        assert asked.answer == b"!"
        assert own.alive is keeps_own


async def test_questions_are_answered_refused_or_told_that_this_node_is_busy(
    autojump_clock: MockClock,
) -> None:
    small = ByteBudget({kind: Limit(1000, 1000) for kind in BudgetKind})
    async with node(small) as it:
        connection = Connection(A, dialled=False)
        for number in range(PENDING_MAX):
            await it.says(connection, BulkKind.ASK, number, b"refuse" if number == 1 else b"ab")
        assert connection.sent == []
        await it.says(connection, BulkKind.ASK, 99, b"ab")
        assert connection.sent == [(BulkKind.BUSY, 99, b"")]
        assert small.held(A, BudgetKind.REQUESTS) == 2 * PENDING_MAX + 4, "nothing for what was refused"
        it.let_answer.set()
        await wait_all_tasks_blocked()
        said = {number: (kind, payload) for kind, number, payload in connection.sent}
        assert said.pop(99) == (BulkKind.BUSY, b"")
        assert said.pop(1) == (BulkKind.REFUSED, b"not here")
        assert set(said.values()) == {(BulkKind.ANSWER, b"ba")}
        assert len(said) == PENDING_MAX - 1
        await it.says(connection, BulkKind.ASK, 100, b"xy")
        assert connection.sent[-1] == (BulkKind.ANSWER, 100, b"yx")
        for size in (1001, 500):
            await it.says(connection, BulkKind.ASK, 200 + size, bytes(size))
        assert [kind for kind, number, _ in connection.sent if number > 200] == [
            BulkKind.BUSY,
            BulkKind.ANSWER,
        ]
        assert small.n_bytes == 0


async def test_what_is_no_question_is_passed_over_and_what_is_too_long_ends_the_connection(
    autojump_clock: MockClock,
) -> None:
    async with node() as it:
        it.let_answer.set()
        connection: Any = Connection(A, dialled=False)
        await it.bulk.take(connection, b"short", memoryview(b"ab"))
        await it.says(connection, 77, 1, b"ab")
        assert (connection.sent, connection.alive) == ([], True)
        await it.says(connection, BulkKind.ASK, 1, bytes(REQUEST_MAX))
        assert (len(connection.sent), it.events) == (1, [])
        await it.says(connection, BulkKind.ASK, 2, bytes(REQUEST_MAX + 1))
        assert (len(connection.sent), it.events, connection.alive) == (1, [TrustEvent.BROKE_PROTOCOL], False)


async def test_an_answer_that_nobody_can_get_disturbs_nobody(autojump_clock: MockClock) -> None:
    async with node() as it:
        connection = Connection(A, dialled=False)
        await it.says(connection, BulkKind.ASK, 1, b"ab")
        it.loses(connection)
        it.let_answer.set()
        await wait_all_tasks_blocked()
        assert connection.sent == []


async def test_a_better_stream_replaces_one_through_a_relay(autojump_clock: MockClock) -> None:
    async with node() as it:
        it.streams = [relayed := Connection(A, "relay")]
        await it.asks()
        await it.says(relayed, BulkKind.ANSWER, relayed.last_number)
        await trio.sleep(NO_WAY_S)
        it.better_streams = [better := Connection(A, "libp2p")]
        asked = await it.asks()
        assert relayed.alive, "it is asked there"
        await it.says(relayed, BulkKind.ANSWER, relayed.last_number, b"!")
        assert asked.answer == b"!"
        assert not relayed.alive
        await it.asks()
        assert len(better.sent) == 1


async def test_a_better_way_that_was_not_found_is_looked_for_again_only_after_a_while(
    autojump_clock: MockClock,
) -> None:
    async with node() as it:
        it.streams = [relayed := Connection(A, "relay")]

        async def ask() -> int:
            await it.asks()
            await it.says(relayed, BulkKind.ANSWER, relayed.last_number)
            return it.n_dialled

        await ask()
        await trio.sleep(NO_WAY_S)
        n_dialled = await ask()
        assert await ask() == n_dialled, "the same moment"
        await trio.sleep(NO_WAY_S)
        assert await ask() == n_dialled + 1


async def test_a_connection_that_has_ended_is_asked_nothing_more(autojump_clock: MockClock) -> None:
    async with node() as it:
        it.direct = [first := Connection(A), second := Connection(A)]
        await it.asks()
        first.end("broken, and nobody has said so yet")
        await it.asks()
        assert (len(first.sent), len(second.sent)) == (1, 1)


async def test_the_others_connection_counts_once_it_asks_there_and_an_idle_one_ends_at_once(
    autojump_clock: MockClock,
) -> None:
    async with node() as it:
        it.let_answer.set()
        theirs = Connection(A, dialled=False)
        it.direct, it.dial_s = [own := Connection(A)], 1.0
        await it.asks()
        it.there = [theirs]  # It came while this node dialled.
        await trio.sleep(2.0)
        await it.asks()
        assert (len(own.sent), theirs.sent) == (2, [])
        for _, number, _ in list(own.sent):
            await it.says(own, BulkKind.ANSWER, number)
        assert own.alive
        await it.says(theirs, BulkKind.ASK, 1, b"abc")
        assert not own.alive
        await it.asks()
        assert theirs.sent[-1][0] == BulkKind.ASK
        it.loses(own)
        await it.asks()
        assert len([kind for kind, _, _ in theirs.sent if kind == BulkKind.ASK]) == 2


async def test_of_nodes_that_cannot_be_reached_only_so_many_are_remembered(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk_module, "_PEERS_MAX", 3)
    async with node() as it:
        it.direct = [connection := Connection(A)]
        await it.asks()
        for i in range(10):
            await it.asks(node_id=NodeId(f"peer{i}"))
            assert len(it.peers) <= 3
        await it.asks()
        assert len(connection.sent) == 2, "one that is in use is kept"


@pytest.mark.parametrize(
    ("wire_kind", "is_direct", "opens"),
    [("relay", True, True), ("relay", False, False), ("direct", True, False)],
)
async def test_a_stream_takes_the_place_of_a_relayed_one_only(
    wire_kind: str, is_direct: bool, opens: bool
) -> None:
    async def open_stream(_node_id: NodeId, _protocol: str) -> str:
        await trio.lowlevel.checkpoint()
        return "a stream"

    plane: Any = SimpleNamespace(
        _host=SimpleNamespace(is_direct=lambda _node_id: is_direct), _open_stream=open_stream
    )
    old: Any = SimpleNamespace(wire_kind=wire_kind)
    assert (await DataPlane.open_bulk_stream(plane, B, old) == "a stream") is opens  # type: ignore[comparison-overlap]
