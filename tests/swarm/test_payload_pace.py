"""Payloads that trickle: each has a deadline, and the largest slow one gives way to others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import msgspec
import pytest
import trio
from trio.testing import MockClock

from swarmllm.swarm.byte_budget import BudgetKind, ByteBudget, Limit, PayloadRoom, reserve_or_displace
from swarmllm.swarm.data.connection import Connection
from swarmllm.swarm.data.connection_timer import ConnectionTimer
from swarmllm.swarm.data.data_plane import DataPlane
from swarmllm.swarm.data.transfer_pacing import (
    FIRST_S,
    MIN_BYTES_PER_S,
    SLOW_AFTER_S,
    SLOW_BYTES_PER_S,
    FramePace,
)
from swarmllm.swarm.data.wire import VERSION, FrameKind, Hello
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.trust import TrustEvent
from swarmllm_proto.frames import encode_frame
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import KIB, MIB, SWARM_HEADER_MAX, SWARM_PAYLOAD_MAX

from .test_connection import MemoryWire, UnboundedUser


class Sender:
    """The peer of a connection, as a script."""

    def __init__(self, out: Any) -> None:
        self._out = out

    async def hello(self) -> None:
        await self.frame(bytes((FrameKind.HELLO,)) + msgspec.msgpack.encode(Hello(v=VERSION)))

    async def frame(self, header: bytes, payload: bytes = b"") -> None:
        await self._out.send(
            b"".join(
                encode_frame(header, payload, header_max=SWARM_HEADER_MAX + 1, payload_max=SWARM_PAYLOAD_MAX)
            )
        )

    async def trickle(self, size: int, bytes_per_s: float, *, step_s: float = 1.0) -> None:
        """A message with such a payload, as slowly as that."""
        header = bytes((FrameKind.MESSAGE,)) + b"m"
        content = encode_frame(header, bytes(size), header_max=SWARM_HEADER_MAX + 1, payload_max=2 * size)
        await self._out.send(bytes(content[0]))
        left = size
        try:
            while left:
                await trio.sleep(step_s)
                n = min(left, int(bytes_per_s * step_s))
                await self._out.send(bytes(n))
                left -= n
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return


class Receiving(UnboundedUser):
    """A node's connections, with one budget."""

    def __init__(self, nursery: trio.Nursery, budget: ByteBudget) -> None:
        self.nursery, self.budget = nursery, budget
        self.connections: list[Connection] = []
        self.timer = ConnectionTimer()
        nursery.start_soon(self.timer.run)
        self.arrived: list[tuple[str, int]] = []

    async def connect(self, node_id: str) -> tuple[Connection, Sender]:
        there, here = trio.open_memory_channel[bytes](4)
        away, _ = trio.open_memory_channel[bytes](100000)
        connection = Connection(
            cast("Any", node_id),
            MemoryWire(away, here),
            self,
            self.timer,
            dialled=False,
        )
        self.connections.append(connection)
        self.nursery.start_soon(connection.run)
        sender = Sender(there)
        await sender.hello()
        return connection, sender

    def payload_room(self, node_id: NodeId) -> PayloadRoom:
        return PayloadRoom(partial(reserve_or_displace, self.budget, lambda: self.connections, node_id))

    async def receive(self, connection: Connection, header: bytes, payload: memoryview) -> None:
        self.arrived.append((connection.node_id, len(payload)))


@asynccontextmanager
async def receiving(in_all: int, per_peer: int) -> AsyncIterator[Receiving]:
    async with trio.open_nursery() as nursery:
        yield Receiving(nursery, ByteBudget({kind: Limit(per_peer, in_all) for kind in BudgetKind}))
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("size", [40 * KIB, 8 * MIB])
async def test_a_steady_trickle_ends_at_the_deadline_of_the_whole(
    autojump_clock: MockClock, size: int
) -> None:
    async with receiving(64 * MIB, 64 * MIB) as node:
        connection, sender = await node.connect("slow")
        since_s = trio.current_time()
        await sender.trickle(size, size / (FIRST_S + size / MIN_BYTES_PER_S) / 2)
        assert trio.current_time() - since_s < FIRST_S + size / MIN_BYTES_PER_S + 5
        assert connection.ending == "a message came too slowly"
        assert connection.trust_event == TrustEvent.TOO_SLOW
        await trio.testing.wait_all_tasks_blocked()
        assert node.budget.n_bytes == 0


async def test_a_slow_but_steady_payload_arrives_while_nobody_needs_the_room(
    autojump_clock: MockClock,
) -> None:
    async with receiving(64 * MIB, 64 * MIB) as node:
        connection, sender = await node.connect("slow")
        await sender.trickle(8 * MIB, 2 * MIN_BYTES_PER_S)
        await sender.trickle(8 * MIB, 2 * MIN_BYTES_PER_S)
        await trio.sleep(1)
        assert node.arrived == [("slow", 8 * MIB)] * 2
        assert connection.alive


async def test_two_that_trickle_give_way_the_largest_first(autojump_clock: MockClock) -> None:
    async with receiving(40 * MIB, 20 * MIB) as node:
        small, of_small = await node.connect("small")
        large, of_large = await node.connect("large")
        node.nursery.start_soon(of_small.trickle, 19 * MIB, 200 * KIB)
        node.nursery.start_soon(of_large.trickle, 19 * MIB, 300 * KIB)
        await trio.sleep(50)
        assert small.n_reserved_bytes < large.n_reserved_bytes
        honest, of_honest = await node.connect("honest")
        await of_honest.trickle(10 * MIB, 10 * MIB, step_s=0.1)
        await trio.sleep(1)
        assert node.arrived == [("honest", 10 * MIB)]
        assert large.trust_event == TrustEvent.TOO_SLOW
        assert "others need the room" in large.ending
        assert small.alive
        assert honest.alive


async def test_who_is_quick_does_not_give_way(autojump_clock: MockClock) -> None:
    async with receiving(40 * MIB, 40 * MIB) as node:
        quick, of_quick = await node.connect("quick")
        node.nursery.start_soon(of_quick.trickle, 28 * MIB, 2 * MIB)
        await trio.sleep(13)
        waits, of_waiting = await node.connect("waits")
        await of_waiting.trickle(10 * MIB, 10 * MIB, step_s=0.1)
        await trio.sleep(5)
        assert quick.trust_event is None
        assert waits.trust_event is None
        assert sorted(node.arrived) == [("quick", 28 * MIB), ("waits", 10 * MIB)]


def test_the_slow_are_noted_and_have_not_broken_the_protocol() -> None:
    noted: list[TrustEvent] = []
    plane = DataPlane.__new__(DataPlane)
    plane._note = lambda _node, event, _detail="": noted.append(event)  # type: ignore[method-assign, assignment]
    plane._neighbours = Parts.alone()
    plane.bulk = cast("Any", type("NoBulk", (), {"lost": lambda *_: None})())
    away, into = trio.open_memory_channel[bytes](1)

    connection = Connection(
        cast("Any", "slow"), MemoryWire(away, into), UnboundedUser(), ConnectionTimer(), dialled=False
    )
    connection.give_way()
    plane._has_ended(connection)
    assert noted == [TrustEvent.TOO_SLOW]


def test_what_this_side_did_not_read_is_not_the_senders_slowness() -> None:
    pace = FramePace()
    assert not pace.is_late(1e9, 0)
    pace.arrived(0.0)
    pace.arrived(5.0)
    assert pace.is_late(FIRST_S + 1, 0)
    assert not pace.is_late(FIRST_S + 1, 2 * MIN_BYTES_PER_S)
    pace.excuse(10.0)
    assert not pace.is_late(FIRST_S + 1, 0)
    assert pace.is_slow(11 + SLOW_AFTER_S, 0)
    assert not pace.is_slow(11 + SLOW_AFTER_S, int((2 + SLOW_AFTER_S) * SLOW_BYTES_PER_S))
    assert not pace.is_slow(10 + SLOW_AFTER_S, 0)
    pace.restart(100.0)
    assert not pace.is_late(100.0 + FIRST_S, 0)
    pace.ended()
    assert not pace.is_late(1e9, 0)


async def test_a_payload_keeps_its_room_to_its_end_and_the_next_one_takes_it_over(
    autojump_clock: MockClock,
) -> None:
    """There is room for one of them. What ends the first comes in one piece with what begins the second."""
    size = 4 * MIB
    async with receiving(2 * size, size + MIB) as node:
        connection, sender = await node.connect("peer")
        header = bytes((FrameKind.MESSAGE,)) + b"m"
        pieces = encode_frame(
            header, bytes(size), header_max=SWARM_HEADER_MAX + 1, payload_max=SWARM_PAYLOAD_MAX
        )
        stream = b"".join(pieces) * 2
        step = MIB - 1000
        for start in range(0, len(stream), step):
            await sender._out.send(stream[start : start + step])
            await trio.sleep(0.01)
            n_left_over = min(start + step, len(stream)) % (len(stream) // 2)
            assert n_left_over - KIB <= connection.n_reserved_bytes <= node.budget.n_bytes <= size + MIB
        assert node.arrived == [("peer", size)] * 2
        assert connection.alive
        assert node.budget.n_bytes == connection.n_reserved_bytes == 0
