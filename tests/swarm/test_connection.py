"""The life of one data connection, over wires in memory and under a clock that jumps."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from swarmllm.errors import NodeUnreachable
from swarmllm.shared_ticks import REST_TICK_S
from swarmllm.swarm.byte_budget import PayloadRoom
from swarmllm.swarm.data.connection import _ASK_AGAIN_S, HELLO_S, NOW_MAX_BYTES, Connection
from swarmllm.swarm.data.connection_timer import ConnectionTimer
from swarmllm.swarm.data.keepalive import (
    CHECK_S,
    LAST_LOOK_S,
    MEASURE_S,
    PING_S,
    REST_AFTER_S,
    REST_MEASURE_S,
    REST_PING_S,
    REST_SILENCE_S,
    RR_ACK_TIMEOUT_S,
    SILENCE_S,
)
from swarmllm.swarm.data.wire import FrameKind, WireClosed
from swarmllm.swarm.peers.trust import TrustEvent
from swarmllm_proto.errors import FrameTooLarge
from swarmllm_proto.frames import Frame, FrameDecoder
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import SWARM_HEADER_MAX

PIECES_UNDER_WAY = 4
_HEADER_AT = 4
"""Of a frame, behind the header's length."""


class MemoryWire:
    """One end of a pipe that holds a few pieces; `write_now` takes what fits without waiting."""

    kind: Literal["direct"] = "direct"
    has_leftover = False
    seen_at = ""
    port = 0

    def __init__(self, out: trio.MemorySendChannel[bytes], into: trio.MemoryReceiveChannel[bytes]) -> None:
        self._out = out
        self._into = into
        self.frozen = False
        self.kinds: list[int] = []
        """Of the frames that were written at once."""

    def write_now(self, pieces: Sequence[bytes | memoryview]) -> bool:
        try:
            self._out.send_nowait(content := b"".join(pieces))
            self.kinds.append(content[_HEADER_AT])
        except trio.WouldBlock:
            return False
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            raise WireClosed("ended by the peer") from None
        return True

    async def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        try:
            await self._out.send(b"".join(pieces))
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            raise WireClosed("ended by the peer") from None

    async def receive_frames(self, decoder: FrameDecoder) -> tuple[int, list[Frame]]:
        if self.frozen:
            await trio.sleep_forever()
        try:
            content = await self._into.receive()
            return len(content), decoder.feed(content)
        except (trio.ClosedResourceError, trio.EndOfChannel):
            raise WireClosed("ended by the peer") from None

    def abort(self) -> None:
        self._out.close()
        self._into.close()


class UnboundedUser:
    """Has room for every payload, and drops what arrives."""

    async def receive(self, connection: Connection, header: bytes, payload: memoryview) -> None:
        await trio.lowlevel.checkpoint()

    async def yield_to_messages(self) -> None:
        await trio.lowlevel.checkpoint()

    def payload_room(self, node_id: NodeId) -> PayloadRoom:
        return PayloadRoom(None)


class End(UnboundedUser):
    """A connection, what arrived on it, and a handler that can be held."""

    def __init__(self, name: str, wire: MemoryWire) -> None:
        self.wire = wire
        self.timer = ConnectionTimer()
        self.connection = Connection(f"the peer of {name}", wire, self, self.timer, dialled=name == "a")
        self.arrived: list[tuple[bytes, bytes]] = []
        self.may_handle = trio.Event()
        self.may_handle.set()
        self.ended = trio.Event()

    async def run(self) -> None:
        await self.connection.run()
        self.ended.set()

    async def receive(self, connection: Connection, header: bytes, payload: memoryview) -> None:
        await self.may_handle.wait()
        self.arrived.append((header, bytes(payload)))


@asynccontextmanager
async def joined() -> AsyncIterator[tuple[End, End, trio.Nursery]]:
    a_to_b = trio.open_memory_channel[bytes](PIECES_UNDER_WAY)
    b_to_a = trio.open_memory_channel[bytes](PIECES_UNDER_WAY)
    a = End("a", MemoryWire(a_to_b[0], b_to_a[1]))
    b = End("b", MemoryWire(b_to_a[0], a_to_b[1]))
    async with trio.open_nursery() as nursery:
        for end in (a, b):
            nursery.start_soon(end.timer.run)
            nursery.start_soon(end.run)
        await a.connection.ready.wait()
        await b.connection.ready.wait()
        yield a, b, nursery
        nursery.cancel_scope.cancel()


async def test_an_idle_connection_stays_and_measures_its_round_trip(autojump_clock: MockClock) -> None:
    async with joined() as (a, b, _):
        await trio.sleep(3600)
        assert a.connection.alive
        assert b.connection.alive
        assert a.connection.rtt_s == 0.0


async def test_one_ping_serves_both_ends_and_the_other_measures_now_and_then(
    autojump_clock: MockClock,
) -> None:
    async with joined() as (a, b, _):
        a.timer.is_working = b.timer.is_working = lambda: True
        await trio.sleep(60)
        written: dict[str, list[int]] = {"a": [], "b": []}
        for name, end in (("a", a), ("b", b)):
            end.wire.kinds = written[name]
        await trio.sleep(60)
        by_dialler, by_other = written["a"].count(FrameKind.PING), written["b"].count(FrameKind.PING)
        assert 60 / PING_S - 5 <= by_dialler <= 60 / PING_S + 1
        assert 60 / MEASURE_S - 1 <= by_other <= 60 / MEASURE_S + 1
        assert b.connection._n_rtts > 5


async def test_of_the_first_round_trips_the_least_counts_and_later_their_mean(
    autojump_clock: MockClock,
) -> None:
    async with joined() as (a, _, _):
        connection = a.connection
        connection.rtt_s, connection._n_rtts = None, 0

        def measured(rtt_s: float) -> float | None:
            connection._take_pong(struct.pack("<d", trio.current_time() - rtt_s))
            return connection.rtt_s

        assert measured(0.5) == pytest.approx(0.5)
        assert measured(0.01) == pytest.approx(0.01)
        assert [measured(0.03) for _ in range(3)] == pytest.approx([0.01] * 3)
        assert measured(0.11) == pytest.approx(0.03)
        assert measured(-1.0) == pytest.approx(0.03), "its clock is not ours"
        connection._rtt_at_s -= 5 * PING_S
        assert measured(0.01) == pytest.approx(0.01 + 0.02 * 0.8**5), "as after five pings"


async def test_the_least_of_the_latest_round_trips_is_known(autojump_clock: MockClock) -> None:
    async with joined() as (a, _, _):
        connection = a.connection
        connection._latest_rtts.clear()
        assert connection.least_rtt_s is None
        for rtt_s in (0.03, 0.02, *(0.2 for _ in range(8)), -1.0):
            connection._take_pong(struct.pack("<d", trio.current_time() - rtt_s))
        assert connection.least_rtt_s == pytest.approx(0.02)
        for rtt_s in (0.3, 0.3):
            connection._take_pong(struct.pack("<d", trio.current_time() - rtt_s))
        assert connection.least_rtt_s == pytest.approx(0.2)


def freeze(end: End) -> None:
    """It neither reads nor beats, nor judges."""
    end.wire.frozen = True
    end.connection._queue_control = lambda kind, content: None  # type: ignore[method-assign]
    end.connection.look = lambda now, check_at_s: math.inf  # type: ignore[method-assign]


async def test_a_peer_that_falls_silent_is_given_up(autojump_clock: MockClock) -> None:
    async with joined() as (a, b, _):
        freeze(b)
        started_s = trio.current_time()
        await a.ended.wait()
        assert a.connection.ending == "silent"
        assert SILENCE_S - PING_S <= trio.current_time() - started_s <= SILENCE_S + PING_S + 1
        with pytest.raises(NodeUnreachable, match="silent"):
            await a.connection.send(b"", b"")


@pytest.mark.parametrize("wakes_by", ["a message", "a request on another way", "work", "nothing"])
async def test_a_connection_at_rest_beats_rarely_and_wakes_up_when_it_is_used(
    autojump_clock: MockClock, wakes_by: str
) -> None:
    async with joined() as (a, b, _):
        await trio.sleep(2 * REST_AFTER_S)
        a.wire.kinds.clear()
        b.wire.kinds.clear()
        await trio.sleep(100)
        n_pings = (a.wire.kinds + b.wire.kinds).count(FrameKind.PING)
        assert n_pings <= 100 / REST_PING_S + 2 * (100 / REST_MEASURE_S + 1)
        freeze(b)
        frozen_s = trio.current_time()
        if wakes_by == "a message":
            await a.connection.send(b"header", b"")
        elif wakes_by == "a request on another way":
            a.connection.used()
        elif wakes_by == "work":
            a.timer.is_working = lambda: True
        with trio.fail_after(REST_SILENCE_S + REST_TICK_S + LAST_LOOK_S):
            await a.ended.wait()
        assert a.connection.ending == "silent"
        took_s = trio.current_time() - frozen_s
        if wakes_by in ("a message", "a request on another way"):
            assert SILENCE_S <= took_s <= 5.0
        elif wakes_by == "work":
            assert took_s <= 5.0 + REST_TICK_S


async def test_a_look_before_its_time_ends_the_rest_where_the_node_works(autojump_clock: MockClock) -> None:
    async with joined() as (a, _, _):
        await trio.sleep(2 * REST_AFTER_S + 1)
        now = trio.current_time()
        assert a.connection.look(now, now + CHECK_S) > now + CHECK_S
        a.timer.is_working = lambda: True
        assert a.connection.look(now, now + CHECK_S) <= now + CHECK_S


async def test_both_ends_of_a_connection_that_was_at_rest_beat_as_before(autojump_clock: MockClock) -> None:
    async with joined() as (a, b, _):
        await trio.sleep(2 * REST_AFTER_S)
        await b.connection.send(b"header", b"")
        a.wire.kinds.clear()
        await trio.sleep(0.9 * REST_AFTER_S)
        assert a.wire.kinds.count(FrameKind.PING) >= 0.9 * REST_AFTER_S / (PING_S + CHECK_S) - 1
        assert a.arrived == [(b"header", b"")]


async def test_a_peer_that_is_busy_for_minutes_is_not_silent(autojump_clock: MockClock) -> None:
    async with joined() as (a, b, nursery):
        b.may_handle = trio.Event()
        n_messages = PIECES_UNDER_WAY * 3

        async def send_all() -> None:
            for number in range(n_messages):
                await a.connection.send(b"%d" % number, bytes(1000))

        nursery.start_soon(send_all)
        await trio.sleep(300)
        assert a.connection.alive
        assert b.connection.alive
        assert b.arrived == []
        b.may_handle.set()
        await trio.sleep(10)
        assert [header for header, _ in b.arrived] == [b"%d" % number for number in range(n_messages)]


async def test_both_ends_busy_with_each_other_recover(autojump_clock: MockClock) -> None:
    async with joined() as (a, b, nursery):
        a.may_handle, b.may_handle = trio.Event(), trio.Event()

        async def send_all(end: End) -> None:
            for number in range(PIECES_UNDER_WAY * 3):
                await end.connection.send(b"%d" % number, b"")

        nursery.start_soon(send_all, a)
        nursery.start_soon(send_all, b)
        await trio.sleep(60)
        a.may_handle.set()
        b.may_handle.set()
        await trio.sleep(60)
        assert len(a.arrived) == len(b.arrived) == PIECES_UNDER_WAY * 3
        assert a.connection.alive
        assert b.connection.alive


async def test_goodbye_ends_the_other_side_and_says_why(autojump_clock: MockClock) -> None:
    async with joined() as (a, b, _):
        await a.connection.send_goodbye()
        await b.ended.wait()
        assert b.connection.ending == "goodbye"


async def test_who_waits_for_the_hello_is_told_at_once_of_the_end(autojump_clock: MockClock) -> None:
    async with joined() as (a, _, _):
        assert await a.connection.says_hello()
    waited_s: list[float] = []
    for ends in (True, False):
        out, into = trio.open_memory_channel[bytes](PIECES_UNDER_WAY)
        alone = End("a", MemoryWire(out, into)).connection
        began_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            if ends:
                nursery.start_soon(_end_after, alone, 1.0)
            assert not await alone.says_hello()
        waited_s.append(trio.current_time() - began_s)
        assert alone.ending == ("for the test" if ends else "no hello came")
    assert waited_s == [pytest.approx(1.0), pytest.approx(HELLO_S)]


async def _end_after(connection: Connection, seconds: float) -> None:
    await trio.sleep(seconds)
    connection.end("for the test")


async def test_everybody_who_waits_to_send_is_told_of_the_end(autojump_clock: MockClock) -> None:
    async with joined() as (a, b, nursery):
        b.may_handle = trio.Event()
        failures: list[str] = []

        async def send() -> None:
            try:
                await a.connection.send(b"", bytes(10))
            except NodeUnreachable as error:
                failures.append(error.message)

        n_senders = PIECES_UNDER_WAY * 4
        for _ in range(n_senders):
            nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        n_under_way = n_senders - len(a.connection._queue) - 1
        a.connection.end("for the test")
        await trio.testing.wait_all_tasks_blocked()
        assert len(failures) == n_senders - n_under_way
        assert all("for the test" in message for message in failures)


async def test_a_cancelled_sender_takes_its_message_out_of_the_queue(autojump_clock: MockClock) -> None:
    async with joined() as (a, b, nursery):
        b.may_handle = trio.Event()
        scopes = [trio.CancelScope() for _ in range(20)]

        async def send(number: int) -> None:
            with scopes[number]:
                await a.connection.send(b"%d" % number, b"")

        for number in range(20):
            nursery.start_soon(send, number)
            await trio.testing.wait_all_tasks_blocked()
        for number in (15, 17, 19):
            scopes[number].cancel()
        await trio.testing.wait_all_tasks_blocked()
        b.may_handle.set()
        await a.connection.send(b"last", b"")
        await trio.sleep(1)
        kept = [number for number in range(20) if number not in (15, 17, 19)]
        assert [header for header, _ in b.arrived] == [*(b"%d" % number for number in kept), b"last"]


async def test_a_message_is_sent_now_only_where_nothing_waits_and_the_way_takes_it(
    autojump_clock: MockClock,
) -> None:
    async with joined() as (a, b, nursery):
        assert not a.connection.send_now(b"", bytes(NOW_MAX_BYTES + 1))
        b.may_handle = trio.Event()
        numbers = itertools.count()
        sent: list[int] = []
        while a.connection.send_now(b"%d" % (number := next(numbers)), b""):
            sent.append(number)
        assert sent
        waiting = next(numbers)
        nursery.start_soon(a.connection.send, b"%d" % waiting, b"")
        await trio.testing.wait_all_tasks_blocked()
        assert not a.connection.send_now(b"overtakes", b"")
        b.may_handle.set()
        await trio.sleep(1)
        assert a.connection.send_now(b"after", b"")
        await trio.sleep(1)
        assert [header for header, _ in b.arrived] == [*(b"%d" % x for x in (*sent, waiting)), b"after"]
        assert (a.connection.deliveries.n_sent, a.connection.n_bytes_sent > 0) == (len(b.arrived), True)
        a.connection.end("for the test")
        assert not a.connection.send_now(b"", b"")


async def test_what_is_too_large_is_refused_before_anything_is_written(autojump_clock: MockClock) -> None:
    async with joined() as (a, b, _):
        with pytest.raises(FrameTooLarge):
            await a.connection.send(bytes(SWARM_HEADER_MAX + 1), b"")
        await a.connection.send(b"fine", b"")
        await trio.sleep(1)
        assert b.arrived == [(b"fine", b"")]


async def test_frames_of_a_later_version_are_ignored(autojump_clock: MockClock) -> None:
    async with joined() as (a, b, _):
        await a.wire.write([b"\x02\x00\x00\x00\xc8!\x03\x00\x00\x00???"])
        await a.connection.send(b"known", b"")
        await trio.sleep(1)
        assert b.arrived == [(b"known", b"")]
        assert b.connection.alive


async def test_messages_are_acknowledged_and_an_idle_connection_says_nothing(
    autojump_clock: MockClock,
) -> None:
    async with joined() as (a, b, _):
        for number in range(5):
            await a.connection.send(b"%d" % number, b"")
        await trio.sleep(2)
        assert repr(a.connection.deliveries) == "<Deliveries 5/5 acknowledged, 0 taken>"
        assert repr(b.connection.deliveries) == "<Deliveries 0/0 acknowledged, 5 taken>"
        await trio.sleep(3600)
        assert a.connection.alive


async def test_a_message_that_is_not_acknowledged_ends_the_connection_and_says_so(
    autojump_clock: MockClock,
) -> None:
    async with joined() as (a, b, _):
        # It beats, and what it takes is lost in it.
        b.connection.deliveries.taken = lambda: None  # type: ignore[method-assign]
        await a.connection.send(b"lost", b"")
        started_s = trio.current_time()
        await a.ended.wait()
        assert RR_ACK_TIMEOUT_S <= trio.current_time() - started_s <= RR_ACK_TIMEOUT_S + 2
        with pytest.raises(NodeUnreachable, match="not acknowledged for 10 s"):
            await a.connection.send(b"", b"")


async def test_a_peer_of_an_earlier_version_need_not_acknowledge(autojump_clock: MockClock) -> None:
    async with joined() as (a, b, _):
        a.connection._acknowledges = False
        b.connection.deliveries.taken = lambda: None  # type: ignore[method-assign]
        await a.connection.send(b"taken in silence", b"")
        await trio.sleep(3600)
        assert a.connection.alive


@pytest.mark.parametrize("acknowledged", [2, 2**63])
async def test_who_acknowledges_what_was_never_sent_breaks_the_protocol(
    autojump_clock: MockClock, acknowledged: int
) -> None:
    async with joined() as (a, b, _):
        await a.connection.send(b"the only one", b"")
        b.connection._queue_control(FrameKind.ACK, acknowledged.to_bytes(8, "little"))
        await a.ended.wait()
        assert a.connection.trust_event == TrustEvent.BROKE_PROTOCOL
        assert "ack" in a.connection.ending


async def test_a_transfer_gives_way_after_every_slice_on_both_ends(autojump_clock: MockClock) -> None:
    out, into = trio.open_memory_channel[bytes](PIECES_UNDER_WAY)
    back, home = trio.open_memory_channel[bytes](PIECES_UNDER_WAY)
    arrived = trio.Event()

    class Yielding(UnboundedUser):
        n_yielded = 0

        async def receive(self, connection: Connection, header: bytes, payload: memoryview) -> None:
            arrived.set()

        async def yield_to_messages(self) -> None:
            self.n_yielded += 1
            await trio.sleep(1.0)

    slice_bytes, n_slices = 65519, 20
    timer = ConnectionTimer()
    at_a, at_b = Yielding(), Yielding()
    a = Connection("b", MemoryWire(out, home), at_a, timer, dialled=True, bulk=True)
    b = Connection("a", MemoryWire(back, into), at_b, timer, dialled=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(a.run)
        nursery.start_soon(b.run)
        await a.ready.wait()
        await b.ready.wait()
        await a.send(b"small", b"")
        await arrived.wait()
        assert at_a.n_yielded == at_b.n_yielded == 0
        arrived = trio.Event()
        await a.send(b"large", bytes(slice_bytes * n_slices))
        await arrived.wait()
        assert at_a.n_yielded == n_slices
        assert n_slices - 1 <= at_b.n_yielded <= n_slices
        nursery.cancel_scope.cancel()


async def test_what_was_sent_is_settled_once_it_is_handled(autojump_clock: MockClock) -> None:
    async with joined() as (a, b, nursery):
        b.may_handle = trio.Event()
        await a.connection.send(b"message", b"")
        settled: list[list[tuple[bytes, bytes]]] = []

        async def settle() -> None:
            await a.connection.settle()
            settled.append(list(b.arrived))

        for _ in range(2):
            nursery.start_soon(settle)
        await trio.sleep(20.0)
        assert settled == []
        b.may_handle.set()
        await trio.sleep(1.0)
        assert settled == [[(b"message", b"")]] * 2
        assert a.connection.rtt_s is None or a.connection.rtt_s < 60.0, "a mark is no round trip"


async def test_who_waits_for_what_was_sent_goes_on_with_the_pong(autojump_clock: MockClock) -> None:
    async with joined() as (a, b, nursery):
        b.may_handle = trio.Event()
        await a.connection.send(b"message", b"")
        settled_s: list[float] = []

        async def settle() -> None:
            await a.connection.settle()
            settled_s.append(trio.current_time())

        nursery.start_soon(settle)
        await trio.sleep(_ASK_AGAIN_S / 4)
        b.may_handle.set()
        since_s = trio.current_time()
        await trio.sleep(1.0)
        assert settled_s == [since_s], "it waited until it asked again"


async def test_a_pong_that_is_left_out_is_asked_for_again(autojump_clock: MockClock) -> None:
    async with joined() as (a, b, nursery):
        # b is writing when the mark comes, and answers no ping then.
        b.connection._writing = True
        settled = trio.Event()

        async def settle() -> None:
            await a.connection.settle()
            settled.set()

        nursery.start_soon(settle)
        await trio.sleep(0.5)
        assert not settled.is_set()
        b.connection._writing = False
        await trio.sleep(0.5)
        assert settled.is_set()


async def test_who_waits_for_what_was_sent_hears_of_the_end(autojump_clock: MockClock) -> None:
    async with joined() as (a, b, _):
        b.may_handle = trio.Event()
        await a.connection.send(b"message", b"")

        async def settle() -> None:
            with pytest.raises(NodeUnreachable):
                await a.connection.settle()

        async with trio.open_nursery() as waiting:
            waiting.start_soon(settle)
            await trio.sleep(1.0)
            a.connection.end("a test")


@pytest.mark.parametrize("mark", [-math.inf, math.nan, -1e300, -1e12 - 2, -1e12])
async def test_a_pong_with_a_mark_that_was_not_set_settles_nothing(
    mark: float, autojump_clock: MockClock
) -> None:
    async with joined() as (a, b, nursery):
        b.may_handle = trio.Event()
        await a.connection.send(b"message", b"")
        nursery.start_soon(a.connection.settle)
        await trio.sleep(1.0)
        a.connection._take_pong(struct.pack("<d", mark))
        await trio.sleep(1.0)
        assert not a.connection.deliveries.has_passed(1)
        a.connection._take_pong(struct.pack("<d", -1e12 - 1))
        assert a.connection.deliveries.has_passed(1)
        assert a.connection.alive
        b.may_handle.set()
