"""Where the byte budget is charged: one hostile peer, and what it makes this node hold."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from swarmllm.errors import DeadlineExceeded, NodeUnreachable, RemoteError
from swarmllm.pipeline.stage.session_queue import PutResult, RelayedJob, SessionQueue
from swarmllm.swarm.byte_budget import (
    AT_ONCE_BYTES,
    LIMITS,
    ROOM_S,
    UNRESERVED_BYTES,
    BudgetKind,
    ByteBudget,
    Limit,
    PayloadRoom,
    reserve_within,
)
from swarmllm.swarm.data.bulk import Bulk, BulkKind
from swarmllm.swarm.data.connection import Connection
from swarmllm.swarm.data.wire import WireClosed
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.libp2p.request_protocol import EXCHANGES_PER_PEER, PeerRequests, RequestProtocol
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.trust import TrustEvent
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import MIB, REQUEST_MAX


class FakeHost:
    def __init__(self) -> None:
        self.handler: Any = None

    def serve(self, _protocol: str, handler: Any) -> None:
        self.handler = handler

    async def close_hard(self, _node_id: str) -> None: ...

    async def open_stream(self, *_: Any) -> Any:
        raise NodeUnreachable("gone")


class Stalled:
    """Announces a request, gives all of it but the last byte, and then nothing."""

    n_read = 0

    def __init__(self, announced: int) -> None:
        self._head = bytearray((announced + 1).to_bytes(4, "little"))
        self._left = announced

    async def read(self, n: int) -> bytes:
        if self._head:
            head = bytes(self._head[:n])
            del self._head[:n]
            return head
        if not self._left:
            await trio.sleep_forever()
        n_given = min(n, self._left)
        self._left -= n_given
        type(self).n_read += n_given
        await trio.lowlevel.checkpoint()
        return bytes(n_given)

    async def write(self, _data: bytes) -> None: ...
    async def reset(self) -> None: ...
    async def close(self) -> None: ...


async def answer(_sender: str, _kind: int, body: bytes) -> bytes:
    return body


@pytest.mark.parametrize("n_peers", [1, 64])
async def test_requests_are_not_read_beyond_their_room(
    autojump_clock: trio.testing.MockClock, n_peers: int
) -> None:
    Stalled.n_read = 0
    host, budget = FakeHost(), ByteBudget()
    async with trio.open_nursery() as nursery:
        RequestProtocol(host, nursery, answer, budget=budget)  # type: ignore[arg-type]

        async def ask(peer: str) -> None:
            try:
                await host.handler(peer, Stalled(REQUEST_MAX))
            except Exception:
                return

        for n in range(2 * EXCHANGES_PER_PEER):
            nursery.start_soon(ask, f"peer{n % n_peers}")
        await trio.sleep(2)
        limit = LIMITS[BudgetKind.REQUESTS]
        assert Stalled.n_read <= min(n_peers * limit.per_peer, limit.in_all)
        assert Stalled.n_read >= limit.per_peer - REQUEST_MAX - 1
        await trio.sleep(60)
        assert budget.n_bytes == 0
        nursery.cancel_scope.cancel()


class Whole(Stalled):
    """Gives all of its request, and keeps what is answered."""

    def __init__(self, announced: int) -> None:
        super().__init__(announced)
        self._left += 1
        self.written = b""
        self.was_reset = False

    async def write(self, data: bytes) -> None:
        self.written += data

    async def reset(self) -> None:
        self.was_reset = True


async def test_a_request_without_room_is_answered_busy_and_costs_no_trust(
    autojump_clock: trio.testing.MockClock,
) -> None:
    events: list[TrustEvent] = []
    host, budget = FakeHost(), ByteBudget({kind: Limit(2 * MIB, 2 * MIB) for kind in BudgetKind})
    async with trio.open_nursery() as nursery:
        RequestProtocol(
            host,  # type: ignore[arg-type]
            nursery,
            answer,
            budget=budget,
            note=lambda _node, event, _detail="": events.append(event),
        )
        assert budget.reserve("others", BudgetKind.REQUESTS, MIB + MIB // 2)
        stream = Whole(MIB)
        await host.handler("honest", stream)
    assert stream.written == (1).to_bytes(4, "little") + bytes((2,))
    assert not stream.was_reset
    assert events == []
    assert trio.current_time() < 10


async def test_a_length_that_none_may_have_costs_trust() -> None:
    events: list[tuple[str, TrustEvent]] = []

    def note(node_id: str, event: TrustEvent, detail: str = "") -> None:
        events.append((node_id, event))

    host = FakeHost()
    async with trio.open_nursery() as nursery:
        RequestProtocol(host, nursery, answer, note=note)  # type: ignore[arg-type]
        with pytest.raises(Exception, match="announced"):
            await host.handler("hostile", Stalled(REQUEST_MAX + 1))
    assert events == [("hostile", TrustEvent.BROKE_PROTOCOL)]


async def test_nothing_is_kept_of_nodes_that_were_asked() -> None:
    async with trio.open_nursery() as nursery:
        requests = RequestProtocol(FakeHost(), nursery, answer)  # type: ignore[arg-type]
        for n in range(100):
            with pytest.raises(NodeUnreachable):
                await requests.request(f"stranger{n}", 1, b"", timeout_s=1)
        await wait_all_tasks_blocked()
        assert not len(requests._peers)


async def test_nothing_is_kept_of_a_node_whose_answer_nobody_waits_for(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class SlowHost(FakeHost):
        async def open_stream(self, node_id: str, protocol: str, first: bytes = b"") -> None:
            await trio.sleep(5.0)
            raise NodeUnreachable("gone")

    async with trio.open_nursery() as nursery:
        requests = RequestProtocol(SlowHost(), nursery, answer)  # type: ignore[arg-type]
        with pytest.raises(DeadlineExceeded):
            await requests.request(NodeId("slow"), 1, b"", timeout_s=1)
        assert len(requests._peers) == 1
        await trio.sleep(5.0)
        assert not len(requests._peers)


async def test_a_payload_takes_room_as_it_comes(autojump_clock: trio.testing.MockClock) -> None:
    budget = ByteBudget({kind: Limit(4 * MIB, 4 * MIB) for kind in BudgetKind})

    async def reserve(n_bytes: int, seconds: float) -> Any:
        return await reserve_within(budget, "peer", BudgetKind.MESSAGES, n_bytes, seconds)

    room = PayloadRoom(reserve)
    assert room.take_now(0, UNRESERVED_BYTES)
    assert not room.is_in_use
    size = 100 * MIB
    assert not room.take_now(0, size)
    await room.take(0, size)
    assert budget.n_bytes == AT_ONCE_BYTES
    assert room.take_now(AT_ONCE_BYTES, size)
    assert budget.n_bytes == 2 * AT_ONCE_BYTES
    began_s = trio.current_time()
    for n_received in (2 * AT_ONCE_BYTES, 3 * AT_ONCE_BYTES - UNRESERVED_BYTES):
        assert room.take_now(n_received, size)
    assert not room.take_now(4 * AT_ONCE_BYTES, size)
    with pytest.raises(WireClosed, match="no room"):
        await room.take(4 * AT_ONCE_BYTES, size)
    assert trio.current_time() - began_s == pytest.approx(ROOM_S, abs=0.1)
    assert budget.n_bytes <= 4 * MIB
    room.release()
    assert budget.n_bytes == 0


class AskedConnection:
    """A bulk connection whose peer asks and never reads."""

    node_id = "hostile"

    def __init__(self) -> None:
        self.n_kept = 0
        self.kinds: list[int] = []
        self.ending = ""

    def end(self, how: str) -> None:
        self.ending = how

    async def send(self, header: bytes, payload: bytes) -> None:
        self.kinds.append(header[0])
        if header[0] == BulkKind.ANSWER:
            self.n_kept += len(payload)
            await trio.sleep_forever()


class NoWays:
    """No connection is to be had, and what is asked has a large answer."""

    def all_connections(self, node_id: NodeId) -> list[Connection]:
        return []

    async def dial_bulk(self, node_id: NodeId) -> None:
        return None

    async def open_bulk_stream(self, node_id: NodeId, old: Connection | None) -> None:
        return None

    async def answer(self, sender: NodeId, body: bytes) -> bytes:
        return bytes(MIB)


def open_bulk(nursery: trio.Nursery, budget: ByteBudget, note: Any = None) -> Bulk:
    options = {"note": note} if note else {}
    return Bulk(NodeId("me"), nursery, NoWays(), budget, **options)


async def test_answers_that_nobody_reads_stay_within_their_room() -> None:
    budget = ByteBudget({kind: Limit(8 * MIB, 12 * MIB) for kind in BudgetKind})
    connections = [AskedConnection() for _ in range(6)]
    async with trio.open_nursery() as nursery:
        bulk = open_bulk(nursery, budget)
        for number in range(60):
            header = bytes((BulkKind.ASK,)) + number.to_bytes(8, "little")
            await bulk.take(connections[number % 6], header, memoryview(b"x"))  # type: ignore[arg-type]
        await wait_all_tasks_blocked()
        assert sum(connection.n_kept for connection in connections) <= 8 * MIB
        assert BulkKind.BUSY in connections[5].kinds
        nursery.cancel_scope.cancel()
    assert budget.n_bytes == 0


async def test_a_question_larger_than_any_ends_the_bulk_connection() -> None:
    events: list[TrustEvent] = []
    connection = AskedConnection()
    async with trio.open_nursery() as nursery:
        bulk = open_bulk(nursery, ByteBudget(), lambda _node, event, _detail="": events.append(event))
        await bulk.take(connection, bytes(9), memoryview(np.zeros(REQUEST_MAX + 1, np.uint8)))  # type: ignore[arg-type]
    assert connection.ending
    assert events == [TrustEvent.BROKE_PROTOCOL]


async def test_a_requests_queue_holds_so_many_bytes_of_a_sender() -> None:
    budget = ByteBudget({kind: Limit(100, 2000) for kind in BudgetKind})
    queue, other = SessionQueue(2, budget), SessionQueue(2, budget)
    item = RelayedJob("b", b"", b"")

    def put(target: SessionQueue, sender: str) -> bool:
        was = target.put(item, is_foreign=True, sender=sender, n_bytes=40)
        assert was is not PutResult.OVERRUN
        return was is PutResult.QUEUED

    assert [put(queue, "a") for _ in range(3)] == [True, True, False]
    assert not put(other, "a")
    assert put(other, "b")
    assert other.put(item, is_foreign=False) is PutResult.QUEUED
    await queue.get()
    assert not put(queue, "a")
    await queue.get()
    assert put(queue, "a")
    queue.close()
    other.close()
    assert budget.n_bytes == 0
    assert queue.is_empty
    assert put(queue, "a")
    assert budget.n_bytes == 0


def test_without_a_budget_there_is_always_room() -> None:
    room = PayloadRoom(None)
    assert room.take_now(0, 100 * MIB)
    assert room.take_now(100 * MIB - 1, 100 * MIB)
    assert not room.is_in_use


class Silent(Stalled):
    def __init__(self) -> None:
        super().__init__(0)
        self._head.clear()

    async def read(self, n: int) -> bytes:
        await trio.sleep_forever()
        raise AssertionError


class SilentHost(FakeHost):
    async def open_stream(self, *_: Any) -> Any:
        return Silent()


async def test_a_peer_is_forgotten_with_its_last_request_and_not_before(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Its turns are counted there: it could have more than EXCHANGES_PER_PEER of them at a time."""
    host = SilentHost()
    peers: Parts[PeerRequests] = Parts.alone()
    node_id = node_id_named("peer")
    async with trio.open_nursery() as nursery:
        protocol = RequestProtocol(host, nursery, answer, peers=peers)  # type: ignore[arg-type]

        async def ask(timeout_s: float) -> None:
            with pytest.raises(DeadlineExceeded):
                await protocol.request(node_id, 1, b"", timeout_s=timeout_s)

        nursery.start_soon(ask, 1.0)
        nursery.start_soon(ask, 50.0)
        await trio.sleep(10.0)
        kept = peers.get(node_id)
        assert kept is not None
        assert (len(kept.waited_for), len(kept.outgoing)) == (1, 1)
        await trio.sleep(50.0)
        assert peers.get(node_id) is None


@pytest.mark.parametrize("is_whole", [True, False])
async def test_a_stream_is_reset_where_its_request_was_not_answered(
    autojump_clock: trio.testing.MockClock, is_whole: bool
) -> None:
    """A stream that is closed in order says that the answer was whole."""
    host = FakeHost()
    async with trio.open_nursery() as nursery:
        RequestProtocol(host, nursery, answer)  # type: ignore[arg-type]
        stream = Whole(10)
        stream._left -= 0 if is_whole else 1
        with contextlib.suppress(trio.TooSlowError):
            await host.handler(node_id_named("peer"), stream)
        assert stream.was_reset is not is_whole


async def test_a_peer_has_so_many_requests_answered_at_a_time_and_the_next_is_told_that_it_is_busy(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A long one is not even read. Once others are answered, there is room again."""
    host, release = FakeHost(), trio.Event()

    async def answer_later(_sender: str, _kind: int, body: bytes) -> bytes:
        await release.wait()
        return body

    peers: Parts[PeerRequests] = Parts.alone()
    async with trio.open_nursery() as nursery:
        RequestProtocol(host, nursery, answer_later, peers=peers)  # type: ignore[arg-type]
        streams = [Whole(10) for _ in range(EXCHANGES_PER_PEER)]
        for stream in streams:
            nursery.start_soon(host.handler, "peer", stream)
        await wait_all_tasks_blocked()
        assert all(stream.written == b"" for stream in streams)
        late, long, other = Whole(10), Whole(MIB), Whole(10)
        await host.handler("peer", late)
        assert (late.written, late.was_reset) == ((1).to_bytes(4, "little") + bytes((2,)), False)
        Whole.n_read = 0
        with pytest.raises(RemoteError, match="too many"):
            await host.handler("peer", long)
        assert (long.written, long.was_reset, Whole.n_read) == (b"", True, 0)
        nursery.start_soon(host.handler, "other", other)
        release.set()
        await wait_all_tasks_blocked()
        again = Whole(10)
        await host.handler("peer", again)
        for stream in [*streams, other, again]:
            assert stream.written == (11).to_bytes(4, "little") + bytes(11)
            assert not stream.was_reset
    assert not len(peers)


async def test_a_request_for_which_there_is_no_room_is_read_to_its_end() -> None:
    """Else its writer would never come to read that this node is busy."""
    host, budget = FakeHost(), ByteBudget({kind: Limit(MIB, MIB) for kind in BudgetKind})
    async with trio.open_nursery() as nursery:
        RequestProtocol(host, nursery, answer, budget=budget)  # type: ignore[arg-type]
        Whole.n_read = 0
        stream = Whole(2 * MIB)
        await host.handler("honest", stream)
        assert Whole.n_read == 2 * MIB + 1
        assert stream.written == (1).to_bytes(4, "little") + bytes((2,))


async def test_an_answer_for_which_there_is_no_room_is_not_kept_and_its_asker_told_so() -> None:
    host, budget = FakeHost(), ByteBudget({kind: Limit(MIB, MIB) for kind in BudgetKind})

    async def answer_at_length(_sender: str, _kind: int, _body: bytes) -> bytes:
        return bytes(2 * MIB)

    async with trio.open_nursery() as nursery:
        RequestProtocol(host, nursery, answer_at_length, budget=budget)  # type: ignore[arg-type]
        stream = Whole(10)
        await host.handler("honest", stream)
        assert (stream.written, stream.was_reset) == ((1).to_bytes(4, "little") + bytes((2,)), False)
    assert budget.n_bytes == 0


class Replying(FakeHost):
    """Another node, which answers every request so."""

    def __init__(self, *pieces: bytes) -> None:
        super().__init__()
        self.pieces = list(pieces)
        self.asked: list[tuple[bytes, bytes]] = []
        """What came with the first message of each stream, and after it."""
        self.ends: list[str] = []

    async def open_stream(self, _node_id: str, _protocol: str, first: bytes = b"") -> Any:
        host, left = self, list(self.pieces)

        class Stream:
            async def read(self, n: int) -> bytes:
                await trio.lowlevel.checkpoint()
                piece, rest = (left[0][:n], left[0][n:]) if left else (b"", b"")
                left[:1] = [rest] if rest else []
                return piece

            async def write(self, data: bytes) -> None:
                host.asked[-1] = (first, data)

            async def close(self) -> None:
                host.ends.append("closed")

            async def reset(self) -> None:
                host.ends.append("reset")

        self.asked.append((first, b""))
        return Stream()


def reply(status: int, content: bytes) -> bytes:
    return (1 + len(content)).to_bytes(4, "little") + bytes((status,)) + content


@pytest.mark.parametrize(
    ("pieces", "outcome"),
    [
        ([reply(0, b"yes")], b"yes"),
        ([reply(0, b"")], b""),
        ([reply(0, b"yes")[:3], reply(0, b"yes")[3:5], reply(0, b"yes")[5:]], b"yes"),
        ([reply(1, b"not you")], "not you"),
        ([reply(2, b"")], "it is busy"),
        ([reply(0, b"yes")[:-1]], "lost"),
        ([], "ended early"),
        ([(0).to_bytes(4, "little")], "announced"),
        ([(REQUEST_MAX + 2).to_bytes(4, "little")], "announced"),
    ],
)
async def test_what_a_node_answers_is_taken_or_refused_and_the_stream_ended_accordingly(
    pieces: list[bytes], outcome: bytes | str
) -> None:
    host = Replying(*pieces)
    async with trio.open_nursery() as nursery:
        requests = RequestProtocol(host, nursery, answer)  # type: ignore[arg-type]
        for size in (5, MIB):
            if isinstance(outcome, bytes):
                assert await requests.request(NodeId("peer"), 7, bytes(size), timeout_s=60) == outcome
            else:
                with pytest.raises((RemoteError, NodeUnreachable)) as refused:
                    await requests.request(NodeId("peer"), 7, bytes(size), timeout_s=60)
                assert outcome in refused.value.message or outcome == "lost"
            first, more = host.asked[-1]
            assert first + more == (1 + size).to_bytes(4, "little") + bytes((7,)) + bytes(size)
            assert bool(more) is (size == MIB), "a short one opens the stream"
        await wait_all_tasks_blocked()
    is_whole = isinstance(outcome, bytes) or outcome in ("not you", "it is busy")
    assert host.ends == ["closed" if is_whole else "reset"] * 2
