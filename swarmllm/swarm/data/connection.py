"""One connection of the data plane: frames over a wire, with one writer, and a keepalive.

Frames are `swarmllm_proto.frames`; the first byte of a frame's header says what it is, the rest is the
sender's header:

    0 hello    MessagePack {v, link}: the first frame, both ways
    1 message  for the daemon
    2 ping     8 bytes, sent back as pong
    3 pong
    4 goodbye  the sender leaves on purpose
    5 link     the connection has become a link (see data_plane), as the dialler's hello asked
    6 last     the sender has turned to another connection: no message follows here
    7 ack      u64: so many of the peer's messages have been handed on (see keepalive)
    8 load     what the sender has to do (see `node_load`); empty: asks the peer to tell its own, from now on

**Writing.** A message that fits the kernel's buffer is written by its sender on the spot; else it queues and
its sender waits until it is written, so a slow neighbour holds up exactly those who send to it, and no more
memory is bound than they hold. The writer task is never cancelled in the middle of a write, because half a
Noise message makes the rest undecipherable; a sender that is cancelled leaves its message to the writer if it
has begun. A connection that must end is ended by closing its wire.

**State.** The connection is in one state of the table in `connection_states`; frames and this node's own
decisions pass the table before they have an effect.

**Keepalive.** See `keepalive`; one `ConnectionTimer` serves all connections of a node.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from struct import Struct
from typing import Final, Literal, Protocol

import msgspec
import trio

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.byte_budget import UNRESERVED_BYTES, PayloadRoom
from swarmllm.swarm.data.connection_states import (
    ALIVE,
    LEFT_BY_PEER,
    LEFT_HERE,
    LIFECYCLE,
    TAKES_FRAMES,
    ConnectionEvent,
    ConnectionState,
)
from swarmllm.swarm.data.connection_timer import ConnectionTimer
from swarmllm.swarm.data.keepalive import PING_S, RR_ACK_TIMEOUT_S, SILENCE_S, Deliveries, Keepalive
from swarmllm.swarm.data.load_frames import LoadFrames
from swarmllm.swarm.data.transfer_pacing import FramePace, Throughput
from swarmllm.swarm.data.wire import VERSION, FrameKind, Hello, Outgoing, Wire, WireClosed, checked_hello
from swarmllm.swarm.peers.trust import TrustEvent
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.frames import Frame, FrameDecoder, encode_frame
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import SWARM_HEADER_MAX, SWARM_PAYLOAD_MAX

log = logging.getLogger(__name__)

_ASK_AGAIN_S = 0.1
_ACKNOWLEDGE_S = 1.0
"""Between two acknowledgements, about."""
_CHUNKS_PER_TURN = 8
"""Pieces of at most 64 KiB decoded before other tasks get their turn."""
_BULK_SLICE_BYTES = 65519
"""One Noise message: what a transfer may move before messages get their turn."""
HELLO_S: Final = 5.0
"""For a peer's hello, once there is a connection."""
NOW_MAX_BYTES: Final = 4096
"""Of a message that is written without a task's turn: a token, and no rows."""
_RTT_WEIGHT = 0.2
"""Of a round trip that was measured PING_S after the one before."""
_RTT_FIRST = 5
"""Of so many samples the least counts: a node that has just started answers late."""
_RTTS_KEPT = 10
"""Of which `least_rtt_s` is the least."""
_TIME = Struct("<d")
_NUMBER = Struct("<Q")
_MARKS = -1e12
"""A ping with this number less n is the nth mark of `settle`: no time, and so no round trip."""


class _LinkAsked(Exception):
    """The peer wants a link and not a connection."""


class ConnectionUser(Protocol):
    """Takes the messages of connections, and has the room for them."""

    async def receive(self, connection: Connection, header: bytes, payload: memoryview) -> None:
        """Takes a message; the next one is read when this returns."""
        ...

    async def yield_to_messages(self) -> None:
        """Awaited between the slices of a transfer on a bulk connection."""
        ...

    def payload_room(self, node_id: NodeId) -> PayloadRoom:
        """For the large payloads that one connection of the peer receives."""
        ...


class Connection:
    def __init__(
        self,
        node_id: NodeId,
        wire: Wire,
        user: ConnectionUser,
        timer: ConnectionTimer,
        *,
        dialled: bool,
        bulk: bool = False,
    ) -> None:
        self._state = LIFECYCLE.first
        self.node_id = node_id
        self.dialled = dialled
        self.bulk = bulk
        """For large answers; known of an accepted connection once it is ready."""
        self.ending = ""
        """How it ended: "goodbye", "silent", or the wire's words; empty while it lives."""
        self.ready = trio.Event()
        """The peer's hello has come."""
        self._ready_or_over = trio.Event()
        self._introduced_or_over = trio.Event()
        self.retired = False
        """The peer has turned to a newer connection: what still arrives here is out of order."""
        self.trust_event: TrustEvent | None = None
        """What the peer did that ended it, where that costs trust."""
        self.link_asked = ""
        """What the peer wants a link for, where that is how this ended; its wire is then still open."""
        self.seen = ""
        """Where the peer says it sees this end, as a multiaddr."""
        self.rtt_s: float | None = None
        self._n_rtts = 0
        self._latest_rtts: deque[float] = deque(maxlen=_RTTS_KEPT)
        self._rtt_at_s = 0.0
        self.loads = LoadFrames(self._write_load)
        self.n_bytes_sent = 0
        self.n_bytes_received = 0
        self.throughput = Throughput()
        self._user = user
        self._room = user.payload_room(node_id)
        self._pace = FramePace()
        self._wire = wire
        self._queue: deque[Outgoing] = deque()
        self._queued = trio.lowlevel.ParkingLot()
        self._writing = False
        self._timer = timer
        self._keepalive = Keepalive(dialled=dialled)
        self._acknowledge_at_s = 0.0
        self._tasks = trio.CancelScope()
        self._handling = False
        self._last = Outgoing(encode_frame(bytes((FrameKind.LAST,))))
        self.deliveries = Deliveries()
        self._mark_passed = trio.lowlevel.ParkingLot()
        self._acknowledges = False
        """Whether the peer does."""
        self._acknowledgement = Outgoing([])
        """The last one; the next waits until it is written."""
        self._acknowledgement.done.set()
        self._decoder = FrameDecoder(SWARM_HEADER_MAX + 1, SWARM_PAYLOAD_MAX)

    def __repr__(self) -> str:
        direction = "to" if self.dialled else "from"
        state = self.ending or self._state.name
        return f"<Connection {self._wire.kind} {direction} {self.node_id} {state}>"

    @property
    def state(self) -> ConnectionState:
        return self._state

    @property
    def alive(self) -> bool:
        return self._state in ALIVE

    @property
    def least_rtt_s(self) -> float | None:
        return min(self._latest_rtts, default=None)

    @property
    def has_left(self) -> bool:
        """This node has turned to another connection: it sends no more messages here."""
        return self._state in LEFT_HERE

    @property
    def peer_has_left(self) -> bool:
        """The peer has."""
        return self._state in LEFT_BY_PEER

    def _pass(self, event: ConnectionEvent) -> bool:
        """The event happens; whether it changes the state. Raises UnknownTransition where it cannot."""
        before, self._state = self._state, LIFECYCLE.after(self._state, event)
        return self._state is not before

    @property
    def wire_kind(self) -> Literal["direct", "libp2p", "relay"]:
        return self._wire.kind

    @property
    def wire(self) -> Wire:
        """For the caller that goes on with it after `link_asked`."""
        return self._wire

    async def run(self) -> None:
        """Until it ends, however it ends; `ending` then says how."""
        self._keepalive.heard(trio.current_time())
        try:
            with self._tasks, self._timer.looking_at(self):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write_queue)
                    seen = self._wire.seen_at
                    hello = Hello(v=VERSION, bulk=self.bulk, acks=True, rests=True, seen=seen)
                    self._queue_control(FrameKind.HELLO, msgspec.msgpack.encode(hello))
                    self._introduced_or_over.set()
                    await self._read()
        except* _LinkAsked:
            if self.alive:
                self._pass(ConnectionEvent.BECOME_LINK)
                self.ending = "became a link"
        except* WireClosed as lost:
            self.end(str(lost.exceptions[0]))
        except* ProtocolError as wrong:
            self.trust_event = self.trust_event or TrustEvent.BROKE_PROTOCOL
            self.end(f"broke the protocol ({wrong.exceptions[0]})")
        finally:
            self._room.release()
            self.end("closed here")

    async def introduced(self) -> None:
        """Returns when this end has said hello, so that messages may follow, or when it has ended. Whoever
        dialled need not wait for the peer's hello to send: the peer's end knows this node by then."""
        await self._introduced_or_over.wait()

    async def says_hello(self) -> bool:
        """Whether the peer does, once it has, or has not in HELLO_S: then this ends the connection. False at
        once where it ends by itself before."""
        with trio.move_on_after(HELLO_S):
            await self._ready_or_over.wait()
        if not self._ready_or_over.is_set():
            self.end("no hello came")
        return self.ready.is_set()

    def end(self, how: str) -> None:
        """Now. A task that waits to send gets NodeUnreachable. Idempotent: the first reason stays."""
        was_alive = self.alive
        self._pass(ConnectionEvent.END)
        if not was_alive:
            return
        self.ending = how
        self._ready_or_over.set()
        self._introduced_or_over.set()
        self._wire.abort()
        for outgoing in self._queue:
            outgoing.failed = True
            outgoing.done.set()
        self._queue.clear()

    @property
    def n_reserved_bytes(self) -> int:
        """For the payload in progress."""
        return self._room.n_bytes

    @property
    def is_slow(self) -> bool:
        """Whether that payload comes so slowly that it gives way to others."""
        return not self._handling and self._pace.is_slow(trio.current_time(), self._decoder.payload_received)

    def give_way(self) -> None:
        """Others need the room of the payload in progress."""
        self.trust_event = self.trust_event or TrustEvent.TOO_SLOW
        self.end("others need the room that its payload takes so slowly")
        self._room.release()

    async def send(self, header: bytes, payload: bytes | memoryview) -> None:
        """Returns when the message is on its way. Raises NodeUnreachable."""
        pieces, size_bytes = _message_frame(header, payload)
        await trio.lowlevel.checkpoint_if_cancelled()
        self._require_alive()
        is_long = self.bulk and size_bytes > _BULK_SLICE_BYTES
        if is_long or not self._write_at_once(pieces):
            await self._write_in_turn(Outgoing(pieces, is_message=True))
        else:
            self._message_sent()
            await trio.lowlevel.cancel_shielded_checkpoint()
        self.n_bytes_sent += size_bytes

    def send_now(self, header: bytes, payload: bytes | memoryview) -> bool:
        """Sends a message of at most NOW_MAX_BYTES if nothing waits to be written and the kernel takes it.
        False: it was not sent."""
        payload_bytes = payload.nbytes if isinstance(payload, memoryview) else len(payload)
        if self.bulk or not self.alive or len(header) + payload_bytes > NOW_MAX_BYTES:
            return False
        pieces, size_bytes = _message_frame(header, payload)
        try:
            if not self._write_at_once(pieces):
                return False
        except NodeUnreachable:
            return False
        self._message_sent()
        self.n_bytes_sent += size_bytes
        return True

    def used(self) -> None:
        """A message is sent or has come, or one is to be expected: the keepalive does not rest."""
        if self._keepalive.used(trio.current_time()):
            self._timer.wake(self)

    def _message_sent(self) -> None:
        self.deliveries.sent(trio.current_time())
        self.used()

    async def send_goodbye(self) -> None:
        """Tell the peer that this node leaves; returns when it is on its way or cannot be."""
        if self.alive:
            outgoing = Outgoing(encode_frame(bytes((FrameKind.GOODBYE,))))
            try:
                await self._write_in_turn(outgoing)
            except NodeUnreachable:
                return

    async def settle(self) -> None:
        """Returns when the peer has handled all messages sent so far. Raises NodeUnreachable."""
        mark = self.deliveries.mark()
        while not self.deliveries.has_passed(mark):
            ping = bytes((FrameKind.PING,)) + _TIME.pack(_MARKS - mark)
            await self._write_in_turn(Outgoing(encode_frame(ping)))
            # A pong is left out where the peer has other things to write.
            with trio.move_on_after(_ASK_AGAIN_S):
                while not self.deliveries.has_passed(mark):
                    await self._mark_passed.park()

    def leave(self) -> None:
        """No message will follow."""
        if self._pass(ConnectionEvent.LEAVE):
            self._enqueue(self._last)

    @property
    def is_over(self) -> bool:
        """Both ends have turned away, and this one has said so: an end without that word is a loss there."""
        return self._state is ConnectionState.PARTED

    def _require_alive(self) -> None:
        if not self.alive:
            raise NodeUnreachable(f"the connection to node {self.node_id} was lost: {self.ending}")

    def _write_at_once(self, pieces: list[bytes | memoryview]) -> bool:
        """Raises NodeUnreachable."""
        if self._queue or self._writing:
            return False
        try:
            taken = self._wire.write_now(pieces)
        except WireClosed as lost:
            self.end(str(lost))
            self._require_alive()
        if taken:
            self._keepalive.wrote(trio.current_time())
        if self._wire.has_leftover:
            self._enqueue(Outgoing([]))
        return taken

    def _enqueue(self, outgoing: Outgoing) -> None:
        self._queue.append(outgoing)
        self._queued.unpark()

    async def _write_in_turn(self, outgoing: Outgoing) -> None:
        self._require_alive()
        self._enqueue(outgoing)
        try:
            await outgoing.done.wait()
        except trio.Cancelled:
            if not outgoing.begun and outgoing in self._queue:
                self._queue.remove(outgoing)
            raise
        if outgoing.failed:
            self._require_alive()

    def _queue_control(self, kind: FrameKind, content: bytes) -> None:
        """Without waiting, and without piling up behind a neighbour that does not read."""
        if self._queue or self._writing or not self.alive:
            return
        pieces = encode_frame(bytes((kind,)) + content)
        try:
            if not self._write_at_once(pieces):
                self._enqueue(Outgoing(pieces))
        except NodeUnreachable:
            return  # `ending` says why.

    def _write_load(self, content: bytes) -> bool:
        if self._queue or self._writing:
            return False
        self._queue_control(FrameKind.LOAD, content)
        return True

    async def _write_queue(self) -> None:
        while True:
            while not self._queue:
                await self._queued.park()
            outgoing = self._queue.popleft()
            outgoing.begun = self._writing = True
            outgoing.failed = True
            if outgoing.is_message:
                self._message_sent()
            try:
                await self._write(outgoing.pieces)
                self._keepalive.wrote(trio.current_time())
                outgoing.failed = False
                if outgoing is self._last:
                    self._pass(ConnectionEvent.LAST_WRITTEN)
            except WireClosed as lost:
                self.end(str(lost))
                raise
            finally:
                self._writing = False
                if outgoing.failed:
                    self.end("closed here")
                outgoing.done.set()

    async def _write(self, pieces: Sequence[bytes | memoryview]) -> None:
        if not self.bulk:
            await self._wire.write(pieces)
            return
        n_unpaused = 0
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, len(view), _BULK_SLICE_BYTES):
                part = view[start : start + _BULK_SLICE_BYTES]
                await self._wire.write([part])
                n_unpaused += len(part)
                if n_unpaused >= _BULK_SLICE_BYTES:
                    n_unpaused = 0
                    with trio.CancelScope(shield=True):
                        await self._user.yield_to_messages()

    async def _read(self) -> None:
        n_chunks = n_unpaused = 0
        while True:
            n_bytes, frames = await self._wire.receive_frames(self._decoder)
            now = trio.current_time()
            self._keepalive.heard(now)
            self.n_bytes_received += n_bytes
            self.throughput.arrived(n_bytes, now)
            if frames:
                self.throughput.message_ended(now)
                self._pace.ended()
            for frame in frames:
                await self._take(frame)
            if self._decoder.inside_frame:
                self._pace.arrived(trio.current_time())
            if self._room.is_in_use or self._decoder.payload_size > UNRESERVED_BYTES:
                await self._keep_room(is_new=bool(frames))
            n_chunks += 1
            n_unpaused += n_bytes
            if self.bulk and n_unpaused >= _BULK_SLICE_BYTES:
                n_unpaused = 0
                await self._user.yield_to_messages()
            elif n_chunks % _CHUNKS_PER_TURN == 0:
                await trio.lowlevel.checkpoint()

    async def _keep_room(self, *, is_new: bool) -> None:
        """Raises WireClosed."""
        decoder, room = self._decoder, self._room
        if is_new:
            room.release()
        if room.take_now(decoder.payload_received, decoder.payload_size):
            return
        since_s = trio.current_time()
        self._handling = True
        try:
            await room.take(decoder.payload_received, decoder.payload_size)
        finally:
            self._handling = False
            self._keepalive.heard(now := trio.current_time())
            self._pace.excuse(now - since_s)

    async def _take(self, frame: Frame) -> None:
        kind, header = (frame.header[0] if frame.header else None), frame.header[1:]
        if self._state not in TAKES_FRAMES:
            if kind != FrameKind.HELLO:
                raise WireClosed("the peer did not say hello")
            self._on_hello(checked_hello(header))
        elif kind == FrameKind.MESSAGE:
            self.used()
            self._handling = True
            try:
                await self._user.receive(self, header, frame.payload)
            finally:
                self._handling = False
                self._keepalive.heard(trio.current_time())
            self.deliveries.taken()
        elif kind == FrameKind.PING:
            self._queue_control(FrameKind.PONG, header[: _TIME.size])
        elif kind == FrameKind.PONG:
            self._take_pong(header)
        elif kind == FrameKind.ACK and len(header) == _NUMBER.size:
            self.deliveries.acknowledged(_NUMBER.unpack(header)[0], trio.current_time())
        elif kind == FrameKind.LOAD:
            self.loads.take(bytes(header), trio.current_time())
        elif kind == FrameKind.LAST:
            self._pass(ConnectionEvent.LAST)
            if self.is_over:
                raise WireClosed("no longer needed")
        elif kind == FrameKind.GOODBYE:
            raise WireClosed("goodbye")
        # Other kinds belong to a later version, which may only add what can be ignored.

    def _on_hello(self, hello: Hello) -> None:
        is_link = bool(hello.link) and not self.dialled
        self._pass(ConnectionEvent.LINK_HELLO if is_link else ConnectionEvent.HELLO)
        if is_link:
            self.link_asked = hello.link
            raise _LinkAsked
        self.bulk |= hello.bulk and not self.dialled
        self.seen = hello.seen
        self._acknowledges = hello.acks
        if hello.rests:
            self._keepalive.may_rest(trio.current_time())
        self.ready.set()
        self._ready_or_over.set()

    def _take_pong(self, echoed: bytes) -> None:
        if len(echoed) != _TIME.size:
            return
        (time_s,) = _TIME.unpack(echoed)
        if time_s < _MARKS:
            self.deliveries.passed(_MARKS - time_s)
            self._mark_passed.unpark_all()
            return
        rtt_s = trio.current_time() - time_s
        if not 0 <= rtt_s < SILENCE_S:
            return
        self._n_rtts += 1
        self._latest_rtts.append(rtt_s)
        known_s = rtt_s if self.rtt_s is None else self.rtt_s
        is_first = self._n_rtts <= _RTT_FIRST
        now_s = trio.current_time()
        # As many times as pings would have come meanwhile: a connection that rests is asked rarely.
        weight = 1 - (1 - _RTT_WEIGHT) ** max(1.0, (now_s - self._rtt_at_s) / PING_S)
        self.rtt_s = min(known_s, rtt_s) if is_first else known_s + weight * (rtt_s - known_s)
        self._rtt_at_s = now_s

    def _acknowledge(self) -> None:
        is_at_work = self._handling or self._decoder.inside_frame
        if is_at_work or self._writing or not self._acknowledges:
            self.deliveries.excuse(trio.current_time())
        if self._acknowledgement.done.is_set():
            n_taken = self.deliveries.to_tell(is_at_work=is_at_work)
            if n_taken is not None:
                header = bytes((FrameKind.ACK,)) + _NUMBER.pack(n_taken)
                self._acknowledgement = Outgoing(encode_frame(header))
                self._enqueue(self._acknowledgement)

    def look(self, now: float, check_at_s: float) -> float:
        """At the clock, for the timer: ping, acknowledge, and end a connection whose peer is silent or slow.
        Returns when to look again: at `check_at_s`, if not before."""
        if not self.alive:
            return check_at_s
        if self._handling or self._writing or self._decoder.inside_frame or self._timer.is_working():
            self._keepalive.used(now)
        due_s = self._keepalive.look_at_s
        if now < due_s:
            return due_s
        if now >= self._acknowledge_at_s:
            self._acknowledge_at_s = now + _ACKNOWLEDGE_S
            self._acknowledge()
        self.loads.tell_what_waits()
        state = self._keepalive.look(now, is_reading=not self._handling)
        if state == "silent":
            self._give_up("silent")
        elif state == "unknown":
            self.deliveries.excuse(now)
            self._pace.restart(now)
        elif not self._handling and self._pace.is_late(now, self._decoder.payload_size):
            self.trust_event = self.trust_event or TrustEvent.TOO_SLOW
            self._give_up("a message came too slowly")
        elif self.deliveries.is_overdue(now):
            self._give_up(f"a message was not acknowledged for {RR_ACK_TIMEOUT_S:g} s")
        if self._keepalive.ping_is_due(now, is_measured=self._n_rtts >= _RTT_FIRST):
            self._queue_control(FrameKind.PING, _TIME.pack(now))
        return self._keepalive.next_look_s(now, check_at_s)

    def _give_up(self, how: str) -> None:
        self.end(how)
        self._tasks.cancel()


def _message_frame(header: bytes, payload: bytes | memoryview) -> tuple[list[bytes | memoryview], int]:
    """The pieces of a message's frame, and their size in bytes."""
    pieces = encode_frame(
        bytes((FrameKind.MESSAGE,)) + header,
        payload,
        header_max=SWARM_HEADER_MAX + 1,
        payload_max=SWARM_PAYLOAD_MAX,
    )
    return pieces, sum(len(piece) for piece in pieces)
