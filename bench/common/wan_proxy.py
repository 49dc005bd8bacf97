"""A wide-area network on one machine: TCP relays in user space that delay, narrow and lose.

A node listens on 127.0.0.1 and announces another loopback address, where a relay listens on the same port:
whoever dials the node goes through the relay. Root and network namespaces are not needed.

What is relayed is a TCP stream, so a lost packet shows as what it costs a stream: nothing behind it arrives
before it was sent again, one round trip and at least MIN_STALL_S later. Congestion control is not modelled.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

PACKET_BYTES = 1448
PIECE_BYTES = 64 * 1024
MIN_STALL_S = 0.2
"""Linux's shortest retransmission timeout; fast retransmission takes one round trip."""


@dataclass(frozen=True, slots=True)
class Wan:
    rtt_s: float = 0.0
    bytes_per_s: float = 125e6
    loss: float = 0.0
    """Chance of each packet."""


class _Lane:
    """One direction of one connection."""

    def __init__(self, wan: Wan, rng: random.Random) -> None:
        self._wan = wan
        self._rng = rng
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._changed = trio.lowlevel.ParkingLot()
        self._free_at_s = 0.0
        self._arrives_at_s = 0.0
        self._n_queued_bytes = 0
        # What may be under way at once: twice what the line holds.
        self._window_bytes = max(4 * PIECE_BYTES, int(2 * wan.rtt_s * wan.bytes_per_s))
        self._over = False

    async def carry(self, source: trio.SocketStream, target: trio.SocketStream) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._deliver, target)
            try:
                while piece := await source.receive_some(PIECE_BYTES):
                    self._send(piece)
                    while self._n_queued_bytes > self._window_bytes:
                        await self._changed.park()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            self._over = True
            self._changed.unpark_all()

    def _send(self, piece: bytes) -> None:
        wan, now = self._wan, trio.current_time()
        self._free_at_s = max(self._free_at_s, now) + len(piece) / wan.bytes_per_s
        arrives_at_s = self._free_at_s + wan.rtt_s / 2
        n_packets = -(-len(piece) // PACKET_BYTES)
        if self._rng.random() < 1 - (1 - wan.loss) ** n_packets:
            # Packets behind it tell the sender at once; of the last ones only a timer does.
            arrives_at_s += wan.rtt_s if n_packets > 3 else max(MIN_STALL_S, wan.rtt_s)
        self._arrives_at_s = max(self._arrives_at_s, arrives_at_s)
        self._pieces.append((self._arrives_at_s, piece))
        self._n_queued_bytes += len(piece)
        self._changed.unpark_all()

    async def _deliver(self, target: trio.SocketStream) -> None:
        while not (self._over and not self._pieces):
            if not self._pieces:
                await self._changed.park()
                continue
            arrives_at_s, piece = self._pieces.popleft()
            await trio.sleep_until(arrives_at_s)
            try:
                await target.send_all(piece)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            self._n_queued_bytes -= len(piece)
            self._changed.unpark_all()
        try:
            await target.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            return


@asynccontextmanager
async def relayed(ports: Sequence[int], ip: str, wan: Wan, *, seed: int = 1) -> AsyncIterator[None]:
    """127.0.0.1's `ports` are reached at `ip` through this network, until the context is left."""
    rng = random.Random(seed)

    async def relay(port: int, outer: trio.SocketStream) -> None:
        try:
            # The handshake of the real connection would have taken a round trip.
            await trio.sleep(wan.rtt_s)
            inner = await trio.open_tcp_stream("127.0.0.1", port)
        except OSError:
            await trio.aclose_forcefully(outer)
            return
        async with inner, outer, trio.open_nursery() as nursery:
            nursery.start_soon(_Lane(wan, rng).carry, outer, inner)
            nursery.start_soon(_Lane(wan, rng).carry, inner, outer)

    async with trio.open_nursery() as nursery:
        for port in ports:
            listeners = await trio.open_tcp_listeners(port, host=ip)
            nursery.start_soon(trio.serve_listeners, lambda s, port=port: relay(port, s), listeners)
        yield
        nursery.cancel_scope.cancel()
