"""Negotiates the protocol of a stream (multistream-select) in one round trip instead of two.

    both:      [varint length]/multistream/1.0.0\\n
    dialler:   [varint length]PROTOCOL\\n
    listener:  [varint length]PROTOCOL\\n, or na\\n and another proposal may follow

py-libp2p sends each line on its own, waits for the other's first line before it proposes, and reads lengths
byte by byte. Here the dialler proposes at once, may send the beginning of what it has to say along with it,
and the listener answers both lines together. Other implementations do the same.

A new connection is negotiated twice in the same way, for its security and for its multiplexer, and this node
offers one of each. So the dialler takes the answer for granted: it goes on at once, and looks at the answer
when it reads for the first time. That saves three of the five round trips of a connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import trio
from libp2p.custom_types import TProtocol
from libp2p.host.exceptions import StreamFailure
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectError

from swarmllm.swarm.libp2p.fast_paths import unread_bytes

ANSWER_S = 30.0
"""For each line. What is written is not under a deadline: half a write, cancelled, makes everything after it
undecipherable."""
FIRST_MAX_BYTES = 128 * 1024
"""That go with a proposal: half of what a stream carries before the other end has read anything."""
LINE_MAX_BYTES = 256
PROPOSALS_MAX = 16

_GREETING = b"\x13/multistream/1.0.0\n"
_SHORTEST_BYTES = 4
_REFUSAL = b"na"


def propose_at_once(host: Any) -> None:
    """Have a libp2p host open streams by this negotiation, the library's own gossip included, and answer by
    it."""
    swarm = host.get_network()

    async def new_stream(peer_id: ID, protocols: Sequence[TProtocol], first: bytes = b"") -> Any:
        stream = await swarm.new_stream(peer_id)
        chosen = None
        try:
            chosen = await propose(stream, protocols, first)
        finally:
            if chosen is None:
                await _reset(stream)
        stream.set_protocol(chosen)
        return stream

    async def negotiate(communicator: Any, _timeout_s: float = ANSWER_S) -> tuple[TProtocol, Any]:
        handlers = host.multiselect.handlers
        protocol = await agree(communicator.read_writer, lambda name: name in handlers)
        return protocol, handlers[protocol]

    host.new_stream = new_stream
    host.multiselect.negotiate = negotiate
    for multistream in (swarm.upgrader.security_multistream, swarm.upgrader.muxer_multistream):
        _take_the_answer_for_granted(multistream._selector)


def _take_the_answer_for_granted(selector: Any) -> None:
    """For one of what a connection is negotiated with, of which this node offers one."""
    stock = selector.select

    async def select(conn: Any, is_initiator: bool, *timeout_s: int) -> tuple[TProtocol, Any]:
        if not is_initiator or len(selector.handlers) != 1:
            chosen: tuple[TProtocol, Any] = await stock(conn, is_initiator, *timeout_s)
            return chosen
        (protocol,) = selector.handlers
        await propose_without_waiting(conn, protocol)
        return protocol, selector.handlers[protocol]

    selector.select = select


async def propose_without_waiting(conn: Any, protocol: TProtocol) -> None:
    """The only one that is offered. The first read of `conn` raises MultiselectError where the other end does
    not take it."""
    proposal = _GREETING + _line(protocol.encode())

    async def read(n: int | None = None) -> bytes:
        del conn.read
        # Who takes it says the same two lines.
        if await _read_exactly(conn, len(proposal)) != proposal:
            raise MultiselectError(f"the other end does not take {protocol}")
        received: bytes = await conn.read(n)
        return received

    conn.read = read
    await conn.write(proposal)


async def propose(stream: Any, protocols: Sequence[TProtocol], first: bytes = b"") -> TProtocol:
    """The one that the other end takes. `first` goes with the first proposal: with it there may be only that
    one. Raises StreamFailure, MultiselectError, and what libp2p raises for a stream that ended."""
    if first and (len(protocols) != 1 or len(first) > FIRST_MAX_BYTES):
        raise ValueError("what goes with a proposal is short, and for one protocol")
    owed = _GREETING
    for protocol in protocols:
        await stream.write(owed + _line(protocol.encode()) + first)
        if owed and await _read_line(stream) != _GREETING[1:-1]:
            raise StreamFailure("the other end does not negotiate as expected")
        owed = b""
        answer = await _read_line(stream)
        if answer == protocol.encode():
            return protocol
        if answer != _REFUSAL:
            break
    raise StreamFailure(f"the other end takes none of {list(protocols)}")


async def agree(stream: Any, is_supported: Callable[[TProtocol], bool]) -> TProtocol:
    """The first protocol proposed that is spoken here. Raises MultiselectError, and what libp2p raises for a
    stream that ended."""
    if await _read_exactly(stream, len(_GREETING)) != _GREETING:
        raise MultiselectError("this is no multistream-select")
    owed = _GREETING
    for _ in range(PROPOSALS_MAX):
        if owed and not _has_come(stream):
            # A dialler that proposes only when it has been greeted.
            await stream.write(owed)
            owed = b""
        try:
            proposed = TProtocol((await _read_line(stream)).decode())
        except UnicodeDecodeError:
            raise MultiselectError("a protocol's name is no text") from None
        is_taken = is_supported(proposed)
        await stream.write(owed + _line(proposed.encode() if is_taken else _REFUSAL))
        owed = b""
        if is_taken:
            return proposed
    raise MultiselectError(f"{PROPOSALS_MAX} protocols were proposed, none of which is spoken here")


def _has_come(stream: Any, n_bytes: int = 1) -> bool:
    """Whether so much more has already been received."""
    muxed = getattr(stream, "muxed_stream", None)
    return muxed is not None and len(unread_bytes(stream) or b"") >= n_bytes


def _line(content: bytes) -> bytes:
    length = len(content) + 1
    if length > LINE_MAX_BYTES:
        raise ValueError(f"a protocol's name of {len(content)} bytes")
    prefix = bytes((length,)) if length < 0x80 else bytes((length & 0x7F | 0x80, length >> 7))
    return prefix + content + b"\n"


async def _read_line(stream: Any) -> bytes:
    """Not one byte more. Raises MultiselectError."""
    begun = await _read_exactly(stream, _SHORTEST_BYTES)
    length, at = begun[0], 1
    if length >= 0x80:
        length, at = length & 0x7F | begun[1] << 7, 2
    n_left = length - (len(begun) - at)
    if length > LINE_MAX_BYTES or n_left < 0:
        raise MultiselectError(f"a line of {length} bytes was announced")
    line = begun[at:] + await _read_exactly(stream, n_left)
    if line[-1:] != b"\n":
        raise MultiselectError("a line does not end")
    return line[:-1]


async def _read_exactly(stream: Any, n_bytes: int) -> bytes:
    received = b""
    if n_bytes and _has_come(stream, n_bytes):
        received = bytes(await stream.read(n_bytes))
        if len(received) == n_bytes:
            return received
    with trio.move_on_after(ANSWER_S):
        while len(received) < n_bytes:
            piece: bytes = await stream.read(n_bytes - len(received))
            if not piece:
                raise MultiselectError("the stream ended")
            received += piece
        return received
    raise MultiselectError("nothing came in time")


async def _reset(stream: Any) -> None:
    with trio.CancelScope(shield=True):
        try:
            await stream.reset()
        except Exception:
            return
