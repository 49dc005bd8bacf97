"""Two ends that agree over a relay on a moment, and dial each other then."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import trio
from node_ids import A, B
from trio.testing import MockClock, memory_stream_pair

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.relay.hole_punching import (
    AT_ONCE_MAX,
    PAUSE_S,
    SETTLE_S,
    TRIES,
    Punching,
)
from swarmllm.swarm.discovery.relay.messages import Punch, encode_punch
from swarmllm.swarm.discovery.relay.moment import TALK_S
from swarmllm.swarm.libp2p.stream_framing import framed
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm_proto.identifiers import NodeId

LATENCY_S = 0.1
SEEN_AT = {A: Address("192.0.2.1", 8810), B: Address("192.0.2.2", 8810)}
SAID_AT = {A: Address("198.51.100.1", 8810), B: Address("198.51.100.2", 8810)}


class Stream:
    """One end of a stream through the relay; what is written takes LATENCY_S."""

    def __init__(self, stream: trio.abc.HalfCloseableStream, nursery: trio.Nursery) -> None:
        self._stream = stream
        self._nursery = nursery
        self.was_reset = False

    async def read(self, n: int) -> bytes:
        return bytes(await self._stream.receive_some(n))

    async def write(self, data: bytes) -> None:
        self._nursery.start_soon(self._carry, data)

    async def _carry(self, data: bytes) -> None:
        await trio.sleep(LATENCY_S)
        with contextlib.suppress(trio.ClosedResourceError, trio.BrokenResourceError):
            await self._stream.send_all(data)

    async def reset(self) -> None:
        self.was_reset = True
        await self._stream.aclose()

    close = reset


class End:
    """A node that is connected with the other one through a relay."""

    def __init__(self, node_id: NodeId, nursery: trio.Nursery) -> None:
        self.node_id = node_id
        self.listening = ("0.0.0.0",)
        self.nursery = nursery
        self.other: End | None = None
        self.dials: list[tuple[float, Address, bool]] = []
        """When, where, and whether as the listener."""
        self.opens_at: Callable[[Address, float], bool] = lambda *_: False
        self.turned: list[str] = []
        self.has_direct = False
        self.is_gone = False
        self.is_by_relay = True
        self.under_way: Parts[bool] = Parts.alone()
        self.answer: Any = None
        host: Any = self
        self.punching = Punching(host, self, self.under_way)

    def serve(self, _protocol: str, handler: Any) -> None:
        self.answer = handler

    def is_relayed(self, _stream: Any) -> bool:
        return self.is_by_relay

    def is_direct(self, _node_id: str) -> bool:
        return self.has_direct

    def is_connected(self, _node_id: str) -> bool:
        return not self.is_gone

    async def open_stream(self, _node_id: str, _protocol: str) -> Stream:
        if self.other is None:
            raise NodeUnreachable("nobody is there")
        here, there = (Stream(each, self.nursery) for each in memory_stream_pair())
        self.nursery.start_soon(self.other.answer, self.node_id, there)
        return here

    async def dial_from_listening_port(self, _node_id: str, address: Address, *, as_listener: bool) -> None:
        self.dials.append((trio.current_time(), address, as_listener))
        if not self.opens_at(address, trio.current_time()):
            raise NodeUnreachable("a firewall")
        self.has_direct = True

    def own_addresses(self) -> tuple[Address, ...]:
        return (SEEN_AT[self.node_id],)

    def known_addresses(self, node_id: NodeId) -> tuple[Address, ...]:
        return (SAID_AT[node_id],)

    async def turned_direct(self, node_id: NodeId) -> None:
        self.turned.append(node_id)


def ends(nursery: trio.Nursery) -> tuple[End, End]:
    a, b = End(A, nursery), End(B, nursery)
    a.other, b.other = b, a
    return a, b


async def test_the_other_end_is_dialled_first_which_may_be_reachable_after_all(
    autojump_clock: MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        a, b = ends(nursery)
        a.opens_at = lambda address, _: address == SAID_AT[B]
        began_s = trio.current_time()
        await a.punching.punch(B)
        assert a.dials == [(began_s + SETTLE_S, SAID_AT[B], False)]
        assert (a.turned, a.punching.n_punched) == ([B], 1)
        assert b.dials == []


async def test_both_dial_where_the_other_was_seen_at_one_moment(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        a, b = ends(nursery)
        for each, theirs in ((a, B), (b, A)):
            each.opens_at = lambda address, _, theirs=theirs: address == SEEN_AT[theirs]
        await a.punching.punch(B)
        (at_s, address, as_listener), (b_at_s, b_address, b_as_listener) = a.dials[-1], b.dials[-1]
        assert (address, as_listener) == (SEEN_AT[B], True)
        assert (b_address, b_as_listener) == (SEEN_AT[A], False)
        assert math.isclose(at_s, b_at_s, abs_tol=LATENCY_S / 2)
        assert at_s > b_at_s, "the handshake's dialler comes first"
        assert (len(a.dials), len(b.dials)) == (2, 1)
        assert (a.turned, b.turned) == ([B], [A])
        assert (a.punching.n_punched, b.punching.n_punched) == (1, 1)
    assert not len(a.under_way)
    assert not len(b.under_way)


async def test_it_is_tried_so_often_and_nothing_is_lost(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        a, b = ends(nursery)
        began_s = trio.current_time()
        await a.punching.punch(B)
        assert trio.current_time() - began_s >= SETTLE_S + TRIES * PAUSE_S
        assert [as_listener for _, _, as_listener in a.dials] == [False, *[True, False] * TRIES]
        assert [address for _, address, _ in b.dials] == [SEEN_AT[A]] * TRIES
        assert (a.turned, b.turned, a.punching.n_punched) == ([], [], 0)
        # And again another time.
        await a.punching.punch(B)
        assert len(a.dials) == 2 * (1 + 2 * TRIES)


async def test_one_node_is_dialled_by_one_task(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        a, _ = ends(nursery)
        async with trio.open_nursery() as both:
            for _ in range(2):
                both.start_soon(a.punching.punch, B)
        assert len(a.dials) == 1 + 2 * TRIES


async def test_an_end_that_lets_in_everybody_once_it_has_dialled_is_dialled_after_that(
    autojump_clock: MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        a, b = ends(nursery)
        # A's router gives each connection another port, so that B's packets go nowhere. Each open a full cone
        # at B, behind which a listener answers, and so A has to take the dialler's part.
        a.opens_at = lambda address, _: bool(b.dials) and address == SEEN_AT[B] and not a.dials[-1][2]
        await a.punching.punch(B)
        assert [as_listener for _, _, as_listener in a.dials] == [False, True, False]
        assert (a.turned, a.punching.n_punched) == ([B], 1)


async def test_an_end_that_is_gone_or_cannot_be_asked_ends_it(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        a, b = ends(nursery)
        a.is_gone = True
        await a.punching.punch(B)
        assert (len(a.dials), b.dials) == (1, [])
        a.is_gone, a.other = False, None
        await a.punching.punch(B)
        assert (len(a.dials), a.turned) == (2, [])


ASKED = framed(encode_punch(Punch("connect", (SEEN_AT[A],))))


@pytest.mark.parametrize(
    "said",
    [b"\x01x", framed(encode_punch(Punch("sync"))), ASKED, ASKED + ASKED, b""],
    ids=["nonsense", "too early", "no moment", "twice", "nothing"],
)
async def test_one_that_does_not_keep_to_it_is_dialled_by_nobody(
    autojump_clock: MockClock, said: bytes
) -> None:
    async with trio.open_nursery() as nursery:
        _, b = ends(nursery)
        here, there = (Stream(each, nursery) for each in memory_stream_pair())
        nursery.start_soon(b.answer, A, there)
        if said:
            await here.write(said)
        await trio.sleep(TALK_S + 1.0)
        assert (b.dials, there.was_reset) == ([], True)
    assert not len(b.under_way)


async def test_who_comes_by_no_relay_or_too_often_is_refused(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        _, b = ends(nursery)
        b.is_by_relay = False
        here, there = (Stream(each, nursery) for each in memory_stream_pair())
        await b.answer(A, there)
        assert there.was_reset
        b.is_by_relay = True
        streams: list[tuple[Stream, Stream]] = []
        for sender in [A, A, *(f"peer{i}" for i in range(AT_ONCE_MAX))]:
            here, there = (Stream(each, nursery) for each in memory_stream_pair())
            streams.append((here, there))
            nursery.start_soon(b.answer, sender, there)
            await trio.testing.wait_all_tasks_blocked()
        refused = [there.was_reset for _, there in streams]
        assert refused == [False, True, *[False] * (AT_ONCE_MAX - 1), True]
        assert len(b.under_way) == AT_ONCE_MAX
        # Nor does this end begin one more, nor one with the same.
        await b.punching.punch(NodeId("one more"))
        assert (b.dials, len(b.under_way)) == ([], AT_ONCE_MAX)
        nursery.cancel_scope.cancel()
    assert not len(b.under_way)
