"""Requests between nodes: `/swarmllm/1.0.0`, one libp2p stream each.

    request:   [u32 length][u8 kind][body]        length counts kind and body, little-endian
    response:  [u32 length][u8 status][body]

A stream per request costs some five small messages, which control messages can afford, and gives each its own
fate; the request goes with the proposal of its stream, so that it takes one round trip.
The read loop is exact. It checks the length and reserves room in the byte budget before it reads (the
library's own request helper stops short above 4 MB); a request for which there is no room is not read
meanwhile. If no room comes, it is read piece by piece, kept nowhere and answered with "busy": others may have
used the room up, so it costs its sender neither trust nor the stream.

Cancelling a blocked write leaves half a message in the connection's cipher stream and destroys every stream
on it. So the exchange runs in a task of its own that the caller's cancellation does not reach: an abandoned
exchange only stops reading. One that is still stuck a minute after its deadline takes the connection with
it, by closing its socket.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from struct import Struct

import trio

from swarmllm.errors import DeadlineExceeded, NodeBusy, NodeUnreachable, RemoteError, SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.supervision import Outcome, detach
from swarmllm.swarm.byte_budget import BudgetKind, ByteBudget, reserve_within
from swarmllm.swarm.libp2p.host import Host, Stream
from swarmllm.swarm.libp2p.negotiation import FIRST_MAX_BYTES
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.trust import Note, TrustEvent, ignored_event
from swarmllm.swarm.router import RequestRefused, UnreadableRequest
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import REQUEST_MAX

log = logging.getLogger(__name__)

PROTOCOL = "/swarmllm/1.0.0"
EXCHANGES_PER_PEER = 32
"""Under way at once, each way; more wait (outgoing) or are refused (incoming)."""

_LENGTH = Struct("<I")
_BODY_MAX = REQUEST_MAX + 1
_READ_BYTES = 64 * 1024
_RECEIVE_S = 10.0
_ROOM_S = 3.0
"""A sender gives up 10 s after it asked, and is to hear before that that there is no room."""
_RESPOND_S = 30.0
_GRACE_S = 5.0
_STUCK_S = 60.0
"""Past its deadline. Slow is not stuck: a connection taken from two nodes that are short of processor time
costs them a new one."""

_OK, _REFUSED, _BUSY = range(3)

Answer = Callable[[NodeId, int, bytes], Awaitable[bytes]]
"""(sender, kind, body) -> response body; raises RequestRefused."""


class _Exchange(Outcome[bytes]):
    def __init__(self) -> None:
        super().__init__()
        self.reading = trio.CancelScope()


@dataclass(eq=False, slots=True)
class PeerRequests:
    """The exchanges under way with one peer; kept while there are any."""

    waited_for: set[_Exchange] = field(default_factory=set)
    turns: trio.Semaphore = field(default_factory=lambda: trio.Semaphore(EXCHANGES_PER_PEER))
    outgoing: set[_Exchange] = field(default_factory=set)
    """Exchanges that have or await a turn."""
    n_incoming: int = 0

    @property
    def is_empty(self) -> bool:
        return not (self.waited_for or self.outgoing or self.n_incoming)


class RequestProtocol:
    """Both ends of the protocol. `nursery` outlives every exchange."""

    def __init__(
        self,
        host: Host,
        nursery: trio.Nursery,
        answer: Answer,
        *,
        budget: ByteBudget | None = None,
        note: Note = ignored_event,
        peers: Parts[PeerRequests] | None = None,
    ) -> None:
        self._budget = budget or ByteBudget()
        self._note = note
        self._host = host
        self._nursery = nursery
        self._answer = answer
        self._peers: Parts[PeerRequests] = Parts.alone() if peers is None else peers
        host.serve(PROTOCOL, self._serve)

    async def request(self, node_id: NodeId, kind: int, body: bytes, *, timeout_s: float) -> bytes:
        """Raises NodeUnreachable, DeadlineExceeded, RemoteError."""
        exchange = _Exchange()
        peer = self._peer(node_id)
        peer.waited_for.add(exchange)
        detach(
            self._nursery,
            "question",
            self._run,
            node_id,
            kind,
            body,
            timeout_s,
            exchange,
            closed=NodeUnreachable("this node is stopping"),
            outcome=exchange,
        )
        try:
            return await exchange.within(timeout_s, f"node {node_id} did not answer")
        finally:
            peer.waited_for.discard(exchange)
            self._settle(node_id)
            exchange.reading.cancel()

    def lose(self, node_id: NodeId) -> None:
        """The node is gone: a task that waits for it need not wait longer."""
        if (peer := self._peers.get(node_id)) is None:
            return
        waited_for, peer.waited_for = peer.waited_for, set()
        self._settle(node_id)
        for exchange in waited_for:
            exchange.fail(NodeUnreachable(f"node {node_id} was lost while it was asked"))

    def _peer(self, node_id: NodeId) -> PeerRequests:
        return self._peers.get(node_id) or self._peers.put(node_id, PeerRequests())

    def _settle(self, node_id: NodeId) -> None:
        """Nothing is kept of a peer with which nothing is under way."""
        peer = self._peers.get(node_id)
        if peer is not None and peer.is_empty:
            self._peers.drop(node_id)

    async def _run(
        self, node_id: NodeId, kind: int, body: bytes, timeout_s: float, exchange: _Exchange
    ) -> bytes:
        peer = self._peer(node_id)
        peer.outgoing.add(exchange)
        try:
            with trio.move_on_after(timeout_s + _STUCK_S):
                async with peer.turns:
                    return await self._converse(node_id, kind, body, exchange)
        except SwarmLLMError:
            raise
        except Exception as error:
            reason = f"node {node_id} was lost while it was asked: {type(error).__name__}"
            raise NodeUnreachable(reason) from error
        finally:
            peer.outgoing.discard(exchange)
            self._settle(node_id)
        provoked_by(log, node_id).warning("a request to node %s is stuck; closing the connection", node_id)
        with trio.CancelScope(shield=True):
            await self._host.close_hard(node_id)
        raise NodeUnreachable(f"a request to node {node_id} was stuck")

    async def _converse(self, node_id: NodeId, kind: int, body: bytes, exchange: _Exchange) -> bytes:
        """The response. The caller has it before the stream is closed."""
        if exchange.reading.cancel_called:
            raise _no_longer_wanted(node_id)
        message = _message(kind, body)
        is_short = len(message) <= FIRST_MAX_BYTES
        stream = await self._host.open_stream(node_id, PROTOCOL, message if is_short else b"")
        complete = False
        try:
            if not is_short:
                await stream.write(message)
            with exchange.reading:
                size = await _read_size(stream)
                grant = await reserve_within(self._budget, node_id, BudgetKind.ANSWERS, size, _RESPOND_S)
                if grant is None:
                    raise NodeBusy(f"there is no room here for {size} bytes of node {node_id}")
                with grant:
                    status, response = await _read_content(stream, size)
                complete = True
                if status == _OK:
                    exchange.succeed(response)
                    return response
                reason = response.decode("utf-8", "replace") if status == _REFUSED else "it is busy"
                error = RemoteError if status == _REFUSED else NodeBusy
                exchange.fail(failure := error(f"node {node_id}: {reason}"))
                raise failure
            raise _no_longer_wanted(node_id)
        finally:
            await _end(stream, complete)

    async def _serve(self, sender: NodeId, stream: Stream) -> None:
        peer = self._peer(sender)
        peer.n_incoming += 1
        complete = False
        try:
            if peer.n_incoming > EXCHANGES_PER_PEER:
                await _refuse_unread(stream)
            else:
                await self._answer_one(sender, stream)
            complete = True
        finally:
            peer.n_incoming -= 1
            self._settle(sender)
            await _end(stream, complete)

    async def _answer_one(self, sender: NodeId, stream: Stream) -> None:
        try:
            with trio.fail_after(_RECEIVE_S):
                size = await _read_size(stream)
        except OutOfBounds as error:
            self._note(sender, TrustEvent.BROKE_PROTOCOL, error.message)
            raise
        asked = await reserve_within(self._budget, sender, BudgetKind.REQUESTS, size, _ROOM_S)
        if asked is None:
            with trio.fail_after(_RECEIVE_S):
                await _discard(stream, size)
                await _write(stream, _BUSY, b"")
            return
        with asked:
            with trio.fail_after(_RECEIVE_S):
                kind, body = await _read_content(stream, size)
            try:
                status, response = _OK, await self._answer(sender, kind, body)
            except UnreadableRequest as refusal:
                self._note(sender, TrustEvent.BROKE_PROTOCOL, str(refusal))
                status, response = _REFUSED, str(refusal).encode()
            except RequestRefused as refusal:
                status, response = _REFUSED, str(refusal).encode()
        grant = self._budget.reserve(sender, BudgetKind.RESPONSES, len(response))
        if grant is None:
            await _write(stream, _BUSY, b"")
            return
        with grant, trio.move_on_after(_RESPOND_S) as stuck:
            await _write(stream, status, response)
        if stuck.cancelled_caught:
            provoked_by(log, sender).warning("node %s does not take its response; it is cut off", sender)
            await self._host.close_hard(sender)


def _no_longer_wanted(node_id: NodeId) -> DeadlineExceeded:
    return DeadlineExceeded(f"no task waits any more for what node {node_id} answers")


class OutOfBounds(RemoteError):
    """A message has a length outside its limits."""


async def _refuse_unread(stream: Stream) -> None:
    """Short requests are read, because an answer overtakes nothing; for others the stream is reset."""
    with trio.fail_after(_RECEIVE_S):
        size = await _read_size(stream)
        if size > _READ_BYTES:
            raise RemoteError("too many requests at once")
        await _read_content(stream, size)
        await _write(stream, _BUSY, b"")


async def _write(stream: Stream, tag: int, body: bytes) -> None:
    await stream.write(_message(tag, body))


def _message(tag: int, body: bytes) -> bytes:
    return b"".join((_LENGTH.pack(1 + len(body)), bytes((tag,)), body))


async def _read_size(stream: Stream) -> int:
    """Of kind or status and body together. Raises OutOfBounds, and whatever libp2p raises for an early
    end."""
    (length,) = _LENGTH.unpack(await _read_exactly(stream, _LENGTH.size))
    if not 1 <= length <= _BODY_MAX:
        raise OutOfBounds(f"a message of {length} bytes was announced; 1 to {_BODY_MAX} are allowed")
    return int(length)


async def _read_content(stream: Stream, size: int) -> tuple[int, bytes]:
    """(kind or status, body)."""
    content = await _read_exactly(stream, size)
    return content[0], content[1:]


async def _read_exactly(stream: Stream, n_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < n_bytes:
        piece = await stream.read(min(_READ_BYTES, n_bytes - len(received)))
        if not piece:
            raise RemoteError("the stream ended early")
        received += piece
    return bytes(received)


async def _discard(stream: Stream, n_bytes: int) -> None:
    left = n_bytes
    while left:
        left -= len(await _read_exactly(stream, min(_READ_BYTES, left)))


async def _end(stream: Stream, complete: bool) -> None:
    with trio.CancelScope(shield=True), trio.move_on_after(_GRACE_S):
        try:
            await (stream.close() if complete else stream.reset())
        except Exception as error:
            log.debug("ending a stream: %s", type(error).__name__)
