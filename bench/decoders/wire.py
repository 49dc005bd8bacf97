"""What comes over connections between nodes: what is encrypted, and the frames inside. The part of
`decoders.py` that needs a wire.

Each wire has all its bytes and then ends, and the clock jumps: nothing waits but for trio's own turns.
"""

from __future__ import annotations

import contextlib
import socket
from struct import pack
from types import SimpleNamespace
from typing import Any

import msgspec
import trio
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectError
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from libp2p.stream_muxer.yamux.yamux import (
    FLAG_FIN,
    FLAG_SYN,
    TYPE_DATA,
    TYPE_PING,
    TYPE_WINDOW_UPDATE,
    YAMUX_HEADER_FORMAT,
)
from noise.backends.default.ciphers import ChaCha20Cipher
from noise.state import CipherState
from trio.testing import MockClock

from bench.decoders.target import NODE_ID, Target
from swarmllm.errors import RemoteError
from swarmllm.swarm.byte_budget import PayloadRoom
from swarmllm.swarm.data.bulk import Bulk, BulkKind
from swarmllm.swarm.data.connection import Connection
from swarmllm.swarm.data.connection_timer import ConnectionTimer
from swarmllm.swarm.data.wire import VERSION, FrameKind, Hello, NoiseWire, WireClosed
from swarmllm.swarm.libp2p.bounded_yamux import BoundedYamux
from swarmllm.swarm.libp2p.guards import silence_expected_failures
from swarmllm.swarm.libp2p.negotiation import agree
from swarmllm.swarm.libp2p.request_protocol import RequestProtocol
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.frames import Frame, FrameDecoder, encode_frame
from swarmllm_proto.identifiers import NodeId
from swarmllm_workers.ring.link import LinkClosed, ReceivingLink

KEY = bytes(range(32))
"""Of one direction, on both of its ends."""


class Ended(Exception):
    """The connection is over, as it should be when what came makes no sense."""


def wire_targets() -> dict[str, Target]:
    silence_expected_failures()
    hello = _frame(FrameKind.HELLO, msgspec.msgpack.encode(Hello(v=VERSION, acks=True)))
    bulk_hello = _frame(FrameKind.HELLO, msgspec.msgpack.encode(Hello(v=VERSION, bulk=True)))
    ping, ack = _frame(FrameKind.PING, bytes(8)), _frame(FrameKind.ACK, (2).to_bytes(8, "little"))
    message = _frame(FrameKind.MESSAGE, b"header", b"payload")
    ends = _frame(FrameKind.PONG, bytes(8)) + _frame(FrameKind.LAST) + _frame(FrameKind.GOODBYE)
    asks = [_frame(FrameKind.MESSAGE, bytes((kind,)) + bytes(8), b"body") for kind in BulkKind]
    supported = hello + message
    opened = _yamux(TYPE_WINDOW_UPDATE, FLAG_SYN, 1, 0) + _yamux(TYPE_DATA, 0, 1, 3) + b"abc"
    closed = _yamux(TYPE_DATA, FLAG_FIN, 1, 0) + _yamux(TYPE_PING, FLAG_SYN, 0, 7)
    return {
        "data connection": Target(
            _connection,
            (Ended,),
            {"talk": supported + ping + ack + message + ends, "link asked": _link_asked(), "hello": hello},
        ),
        "bulk connection": Target(_bulk_connection, (Ended,), {"asks": bulk_hello + b"".join(asks)}),
        "Noise messages": Target(
            _noise_messages, (WireClosed, ProtocolError), {"sealed": _sealed(supported, message)}
        ),
        "a worker's link": Target(_link, (LinkClosed,), {"sealed": _sealed(message, message)}),
        "request stream": Target(_request, (RemoteError,), {"asked": b"\x05\x00\x00\x00\x00body"}),
        "multistream-select": Target(
            _negotiation,
            (MultiselectError,),
            {"proposed": b"\x13/multistream/1.0.0\n\x07/other\n\x10/swarmllm/1.0.0\n"},
        ),
        "yamux": Target(_yamux_connection, (Ended,), {"a stream": opened + closed}),
    }


def _frame(kind: FrameKind, header: bytes = b"", payload: bytes = b"") -> bytes:
    return b"".join(encode_frame(bytes((kind,)) + header, payload))


def _link_asked() -> bytes:
    return _frame(FrameKind.HELLO, msgspec.msgpack.encode(Hello(v=VERSION, link="job")))


def _yamux(kind: int, flags: int, stream: int, length: int) -> bytes:
    return pack(YAMUX_HEADER_FORMAT, 0, kind, flags, stream, length)


class _Wire:
    """All of its bytes are there, in pieces of a size that cuts frames apart."""

    kind = "direct"
    has_leftover = False
    seen_at = ""
    port = 0

    def __init__(self, data: bytes) -> None:
        self._data = data

    def write_now(self, pieces: object) -> bool:
        return True

    async def write(self, pieces: object) -> None:
        return

    async def receive_frames(self, decoder: FrameDecoder) -> tuple[int, list[Frame]]:
        await trio.lowlevel.checkpoint()
        if not self._data:
            raise WireClosed("ended by the peer")
        piece, self._data = self._data[:61], self._data[61:]
        return len(piece), decoder.feed(piece)

    def abort(self) -> None:
        self._data = b""


class _User:
    """Of connections: has room for every payload."""

    def __init__(self, bulk: Bulk | None = None) -> None:
        """`bulk` takes what arrives; without it that is dropped."""
        self._bulk = bulk

    async def receive(self, connection: Connection, header: bytes, payload: memoryview) -> None:
        if self._bulk is not None:
            await self._bulk.take(connection, header, payload)

    async def yield_to_messages(self) -> None:
        await trio.lowlevel.checkpoint()

    def payload_room(self, node_id: NodeId) -> PayloadRoom:
        return PayloadRoom(None)


def _connection(data: bytes) -> None:
    async def run() -> Connection:
        timer = ConnectionTimer()
        connection = Connection(NODE_ID, _Wire(data), _User(), timer, dialled=False)  # type: ignore[arg-type]
        # What an acknowledgement may be of.
        connection.deliveries.sent(trio.current_time())
        connection.deliveries.sent(trio.current_time())
        await connection.run()
        return connection

    _say_how(trio.run(run, clock=MockClock(autojump_threshold=0)))


class _NoWays:
    def all_connections(self, node_id: NodeId) -> list[Connection]:
        return []

    async def dial_bulk(self, node_id: NodeId) -> None:
        return None

    async def open_bulk_stream(self, node_id: NodeId, old: Connection | None) -> None:
        return None

    async def answer(self, sender: NodeId, body: bytes) -> bytes:
        return body


def _bulk_connection(data: bytes) -> None:
    async def run() -> Connection:
        async with trio.open_nursery() as nursery:
            bulk = Bulk(NODE_ID, nursery, _NoWays())
            timer = ConnectionTimer()
            connection = Connection(NODE_ID, _Wire(data), _User(bulk), timer, dialled=False)  # type: ignore[arg-type]
            await connection.run()
            bulk.lost(connection)
        return connection

    _say_how(trio.run(run, clock=MockClock(autojump_threshold=0)))


def _say_how(connection: Connection) -> None:
    is_fine = connection.ending in ("ended by the peer", "goodbye", "became a link", "no longer needed")
    if connection.trust_event is not None or not is_fine:
        raise Ended(connection.ending)


class _Nothing:
    cipher_class = ChaCha20Cipher


def _cipher() -> CipherState:
    state = CipherState(_Nothing)
    state.initialize_key(KEY)
    return state


def _sealed(*plaintexts: bytes) -> bytes:
    state = _cipher()
    sealed = [state.encrypt_with_ad(b"", plaintext) for plaintext in plaintexts]
    return b"".join(len(each).to_bytes(2, "big") + each for each in sealed)


def _arrived(data: bytes) -> socket.socket:
    """A connection on which these bytes have come, and the end after them."""
    here, there = socket.socketpair()
    here.setblocking(False)
    there.sendall(data)
    there.close()
    return here


def _noise_messages(data: bytes) -> None:
    decoder = FrameDecoder(1 << 16, 1 << 16)
    with _arrived(data) as connection:
        wire = NoiseWire(connection, _cipher(), _cipher())

        async def read() -> None:
            while (await wire.receive_frames(decoder))[1]:
                pass

        with contextlib.suppress(StopIteration):
            read().send(None)


def _link(data: bytes) -> None:
    with _arrived(data) as connection:
        link = ReceivingLink(connection, KEY + bytes(8))
        while link.receive():
            pass


class Stream:
    """A libp2p stream that has all its bytes and takes whatever is written."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.muxed_stream = SimpleNamespace(conn=SimpleNamespace(stream_buffers={1: data}), stream_id=1)

    async def read(self, n: int | None = None) -> bytes:
        taken, self._data = self._data[:n], self._data[n:] if n is not None else b""
        return taken

    async def write(self, _data: bytes) -> None:
        return

    async def close(self) -> None:
        return

    reset = close


def _request(data: bytes) -> None:
    handlers: list[Any] = []
    host = SimpleNamespace(serve=lambda _protocol, handler: handlers.append(handler))

    async def answer(_sender: str, _kind: int, body: bytes) -> bytes:
        return body

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            RequestProtocol(host, nursery, answer)  # type: ignore[arg-type]
        await handlers[0](NODE_ID, Stream(data))

    trio.run(run, clock=MockClock(autojump_threshold=0))


def _negotiation(data: bytes) -> None:
    async def run() -> None:
        await agree(Stream(data), lambda name: name == "/swarmllm/1.0.0")

    trio.run(run, clock=MockClock(autojump_threshold=0))


class _Secured(Stream):
    is_initiator = True

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.conn = None


def _yamux_connection(data: bytes) -> None:
    opened: list[object] = []

    async def run() -> None:
        muxed = BoundedYamux(_Secured(data), ID.from_base58(NODE_ID), is_initiator=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_accept_all, muxed, opened)
            await muxed.start()
            nursery.cancel_scope.cancel()

    trio.run(run, clock=MockClock(autojump_threshold=0))
    if not opened:
        raise Ended


async def _accept_all(muxed: BoundedYamux, opened: list[object]) -> None:
    with contextlib.suppress(MuxedConnUnavailable):
        while True:
            opened.append(await muxed.accept_stream())
