"""Serves as a relay: takes reservations, and carries bytes between two nodes that cannot reach each other.

`RelayBook` knows what the relay has promised, and whether it can promise more (pure, bounded). Its limits are
what an operator agrees to with `network.relay_service`, or with `swarmllm bootstrap`, which allows more. They
are no settings: where a swarm needs more, a second relay is better.

The relay cannot read what it carries. It serves nodes that reserved over their own connections, within those
limits. A pipe is never cancelled in the middle of a write, which would destroy the connection under it with
everything else on it: it ends by both of its streams being reset.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

import trio

from swarmllm.errors import NodeUnreachable
from swarmllm.log_filter import provoked_by
from swarmllm.swarm.data.stream_fallback import StreamWire
from swarmllm.swarm.data.wire import WireClosed
from swarmllm.swarm.discovery.relay.messages import (
    HOP,
    MESSAGE_MAX_BYTES,
    STOP,
    Hop,
    Status,
    Stop,
    decode_hop,
    decode_stop,
    encode_hop,
    encode_stop,
)
from swarmllm.swarm.libp2p.host import Host, Stream
from swarmllm.swarm.libp2p.stream_framing import framed, read_framed
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.settings import RELAY_LIMITS, RelayLimits
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import NodeId

RESERVED_S = 3600.0
CIRCUITS_PER_NODE = 16
"""At either end."""
CIRCUIT_S = 2 * 3600.0
CIRCUIT_BYTES = 8 * 2**30


@dataclass(frozen=True, slots=True)
class Reservation:
    """A peer's reservation with this relay."""

    until_s: float

    def is_over(self, now: float) -> bool:
        return self.until_s <= now


class RelayBook:
    """`now` is any clock that does not run backwards, in seconds."""

    def __init__(
        self,
        peers: Parts[Reservation] | None = None,
        limits: RelayLimits = RELAY_LIMITS,
        n_circuits: Parts[int] | None = None,
    ) -> None:
        """`n_circuits`: those that each peer is an end of."""
        self._limits = limits
        self._reservations: Parts[Reservation] = Parts.alone() if peers is None else peers
        self._n_of_node: Parts[int] = Parts.alone() if n_circuits is None else n_circuits
        self.n_circuits = 0

    def __repr__(self) -> str:
        return f"<RelayBook {len(self._reservations)} reservations, {self.n_circuits} circuits>"

    @property
    def n_reservations(self) -> int:
        return len(self._reservations)

    def holders(self) -> set[NodeId]:
        return set(self._reservations)

    def users(self) -> set[NodeId]:
        """Those, and the ends of circuits."""
        return {*self._reservations, *self._n_of_node}

    def reserve(self, node_id: NodeId, now: float) -> Status:
        """For RESERVED_S from now; again before they are over renews."""
        for over in [each for each, held in self._reservations.items() if held.is_over(now)]:
            self._reservations.drop(over)
        if node_id not in self._reservations and len(self._reservations) >= self._limits.reservations:
            return Status.RESERVATION_REFUSED
        self._reservations.put(node_id, Reservation(now + RESERVED_S))
        return Status.OK

    def lost(self, node_id: NodeId) -> None:
        """It is no longer connected: nothing can be carried to it."""
        self._reservations.drop(node_id)

    def begin(self, dialler: NodeId, target: NodeId, now: float) -> Status:
        """One more circuit; to be followed by `end` if this is OK."""
        if dialler == target:
            return Status.PERMISSION_DENIED
        reservation = self._reservations.get(target)
        if reservation is None or reservation.is_over(now):
            return Status.NO_RESERVATION
        for node_id in (dialler, target):
            if (self._n_of_node.get(node_id) or 0) >= CIRCUITS_PER_NODE:
                return Status.RESOURCE_LIMIT_EXCEEDED
        if self.n_circuits >= self._limits.circuits:
            return Status.RESOURCE_LIMIT_EXCEEDED
        self.n_circuits += 1
        for node_id in (dialler, target):
            self._n_of_node.put(node_id, (self._n_of_node.get(node_id) or 0) + 1)
        return Status.OK

    def end(self, dialler: NodeId, target: NodeId) -> None:
        """Of a circuit that was begun."""
        self.n_circuits -= 1
        for node_id in (dialler, target):
            n_left = (self._n_of_node.get(node_id) or 0) - 1
            if n_left > 0:
                self._n_of_node.put(node_id, n_left)
            else:
                self._n_of_node.drop(node_id)


log = logging.getLogger(__name__)

READ_S = 10.0
STREAMS_MAX = 128
"""Questions that are being answered; circuits have their own limit."""


class RelayService:
    def __init__(
        self,
        host: Host,
        peers: Parts[Reservation] | None = None,
        limits: RelayLimits = RELAY_LIMITS,
        n_circuits: Parts[int] | None = None,
    ) -> None:
        self._host = host
        self._n_asking = 0
        self.book = RelayBook(peers, limits, n_circuits)
        self.n_bytes = 0
        host.serve(HOP, self.serve)

    async def serve(self, sender: NodeId, stream: Stream) -> None:
        if self._n_asking >= STREAMS_MAX:
            await stream.reset()
            return
        self._n_asking += 1
        try:
            with trio.fail_after(READ_S):
                asked = decode_hop(await read_framed(stream, MESSAGE_MAX_BYTES))
        except (ProtocolError, trio.TooSlowError) as error:
            provoked_by(log, sender).debug("a question to the relay: %s", error)
            await stream.reset()
            return
        finally:
            self._n_asking -= 1
        if asked.kind == "reserve":
            await self._reserve(sender, stream)
        elif asked.node_id is not None:
            await self._connect(sender, asked.node_id, stream)
        else:
            await _say(stream, Hop("status", status=Status.UNEXPECTED_MESSAGE))

    def tidy(self) -> None:
        """Who is not connected has no reservation."""
        connected = self._host.connected()
        for node_id in self.book.holders() - connected:
            self.book.lost(node_id)

    async def _reserve(self, sender: NodeId, stream: Stream) -> None:
        # A circuit over a circuit would carry everything twice, and hide who is at its end.
        if self._host.is_relayed(stream):
            await _say(stream, Hop("status", status=Status.PERMISSION_DENIED))
            return
        self.tidy()
        status = self.book.reserve(sender, trio.current_time())
        expires_at = int(time.time() + RESERVED_S) if status is Status.OK else 0
        await _say(stream, Hop("status", status=status, expires_at=expires_at))

    async def _connect(self, sender: NodeId, target: NodeId, stream: Stream) -> None:
        if self._host.is_relayed(stream):
            await _say(stream, Hop("status", status=Status.PERMISSION_DENIED))
            return
        self.tidy()
        status = self.book.begin(sender, target, trio.current_time())
        if status is not Status.OK:
            await _say(stream, Hop("status", status=status))
            return
        try:
            onward = await self._call(sender, target)
            if onward is None:
                await _say(stream, Hop("status", status=Status.CONNECTION_FAILED))
                return
            await _say(stream, Hop("status", status=Status.OK))
            provoked_by(log, sender).info("a circuit from %s to %s begins", sender, target)
            self.n_bytes += await _Pipe(stream, onward).run()
            provoked_by(log, sender).info("the circuit from %s to %s has ended", sender, target)
        finally:
            self.book.end(sender, target)

    async def _call(self, sender: NodeId, target: NodeId) -> Stream | None:
        """The stream to the node that is dialled, once it has agreed."""
        stream: Stream | None = None
        try:
            stream = await self._host.open_stream(target, STOP)
            await stream.write(framed(encode_stop(Stop("connect", sender))))
            with trio.fail_after(READ_S):
                answer = decode_stop(await read_framed(stream, MESSAGE_MAX_BYTES))
            if answer == Stop("status", status=Status.OK):
                return stream
            provoked_by(log, sender).debug(
                "node %s does not take a circuit from %s: %s", target, sender, answer.status.name
            )
        except NodeUnreachable as error:
            log.debug("%s", error)
        except Exception as error:  # libp2p's, of many kinds
            provoked_by(log, sender).debug("calling %s for %s: %s", target, sender, type(error).__name__)
        if stream is not None:
            await _reset(stream)
        return None


class _Pipe:
    """Carries bytes in both directions between two streams."""

    def __init__(self, one: Stream, other: Stream) -> None:
        self._streams = one, other
        self._wires = [StreamWire(stream, lambda: None) for stream in (one, other)]
        self._reading = [trio.CancelScope(), trio.CancelScope()]
        self._has_ended = False
        self._n_bytes = 0

    async def run(self) -> int:
        """Until one end closes, a limit is reached, or its time is over; the bytes carried."""
        with trio.move_on_after(CIRCUIT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._carry, 0)
                nursery.start_soon(self._carry, 1)
        await self._end()
        return self._n_bytes

    async def _carry(self, index: int) -> None:
        source, sink = self._wires[index], self._wires[1 - index]
        try:
            while self._n_bytes < CIRCUIT_BYTES and not self._has_ended:
                data = b""
                with trio.CancelScope() as self._reading[index]:
                    data = await source.receive()
                self._n_bytes += len(data)
                with trio.CancelScope(shield=True):
                    await sink.write([data])
        except WireClosed:
            pass
        finally:
            with trio.CancelScope(shield=True):
                await self._end()

    async def _end(self) -> None:
        self._has_ended = True
        for wire, scope in zip(self._wires, self._reading, strict=True):
            wire.abort()
            scope.cancel()
        for stream in self._streams:
            await _reset(stream)


async def _say(stream: Stream, message: Hop) -> None:
    if message.status is not Status.OK:
        await stream.write(framed(encode_hop(message)))
        return
    limited = replace(message, data_bytes=CIRCUIT_BYTES)
    await stream.write(framed(encode_hop(limited, duration_s=int(CIRCUIT_S))))


async def _reset(stream: Stream) -> None:
    with trio.move_on_after(2.0):
        try:
            await stream.reset()
        except Exception as error:
            log.debug("resetting a stream: %s", type(error).__name__)
