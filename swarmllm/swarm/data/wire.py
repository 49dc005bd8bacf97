"""Carries the data plane's bytes to one peer: the interface, the hello, and TCP under Noise XX.

Two wires exist: `NoiseWire` (direct TCP) and `StreamWire` (a libp2p stream, where TCP cannot be had). The
peer's hello is validated before it is used.

The handshake is libp2p's (same key, same payload, same checks), so both ends are proven to be the node ids
they claim. After it there is no multiplexer: `[u16 length][ciphertext]`, big-endian, at most 65535 bytes, as
the Noise specification has it. That halves the latency of a libp2p stream and trebles its throughput, and
nothing else shares its fate.

The socket is used without trio's stream around it: a call that would not block is then a call and no trip
through the scheduler, which is a third of the round trip of a small message.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import msgspec
import trio
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID

from swarmllm.operating_system import limit_silence
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.membership.connection_gater import ConnectionGater, GuardedNoise
from swarmllm.swarm.membership.identity import Identity
from swarmllm.swarm.router import LinkEnd
from swarmllm_proto.frames import VERSION as VERSION
from swarmllm_proto.frames import Frame, FrameDecoder
from swarmllm_proto.frames import FrameKind as FrameKind
from swarmllm_proto.frames import Hello as Hello
from swarmllm_proto.identifiers import NodeId, parse_node_id


class WireClosed(Exception):
    """The peer is gone, or this end was closed. The text says how it ended."""


class Wire(Protocol):
    @property
    def kind(self) -> Literal["direct", "libp2p", "relay"]: ...

    @property
    def seen_at(self) -> str:
        """Where its other end is seen from here, as a multiaddr; empty where that is not known."""
        ...

    @property
    def port(self) -> int:
        """This end's; 0 where it is not TCP itself."""
        ...

    def write_now(self, pieces: Sequence[bytes | memoryview]) -> bool:
        """Take all of these bytes without waiting, or none: False where that cannot be. What the kernel did
        not take at once is kept and goes out with the next `write`; `has_leftover` says so. Raises
        WireClosed."""
        ...

    @property
    def has_leftover(self) -> bool: ...

    async def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        """All of these bytes, after any leftover. One caller at a time; cancelled in the middle, the wire is
        of no more use. Raises WireClosed."""
        ...

    async def receive_frames(self, decoder: FrameDecoder) -> tuple[int, list[Frame]]:
        """Give the next bytes to the decoder: how many they were, at least one, and the frames they
        completed. Raises WireClosed, and what the decoder raises. Cancelling it is safe."""
        ...

    def abort(self) -> None:
        """Close at once, whatever is under way. Idempotent."""
        ...


def checked_hello(content: bytes) -> Hello:
    try:
        hello = msgspec.msgpack.decode(content, type=Hello)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise WireClosed("the peer's hello is unreadable") from None
    if hello.v != VERSION:
        raise WireClosed(f"the peer speaks version {hello.v}, this node {VERSION}")
    return hello


class Outgoing:
    """One queued message and its sender's wait for it."""

    def __init__(self, pieces: list[bytes | memoryview], *, is_message: bool = False) -> None:
        self.pieces = pieces
        self.is_message = is_message
        self.begun = False
        self.done = trio.Event()
        self.failed = False


_TAG_BYTES = 16
PLAINTEXT_MAX = 65535 - _TAG_BYTES
"""Bytes in one Noise message: 65535 less the authentication tag."""
NOW_MAX_BYTES = 256 * 1024
"""More than this is not encrypted in one go on the caller's time."""
HANDSHAKE_S = 5.0

_RECEIVE_BYTES = 256 * 1024
_BATCH_MESSAGES = 4
_USER_TIMEOUT_MS = 8000


class HandshakeFailed(Exception):
    """Something failed before the peer was known; the text is a type name, never the peer's words."""


class NoiseWire:
    kind: Literal["direct"] = "direct"

    def __init__(
        self, sock: socket.socket, encrypting: Any, decrypting: Any, seen_at: str = "", port: int = 0
    ) -> None:
        self.seen_at = seen_at
        self.port = port
        self._socket = sock
        self._descriptor = sock.fileno()
        self._encrypting = encrypting
        self._decrypting = decrypting
        self._closed = False
        self._leftover: deque[memoryview] = deque()
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0

    @property
    def has_leftover(self) -> bool:
        return bool(self._leftover)

    def write_now(self, pieces: Sequence[bytes | memoryview]) -> bool:
        if self._leftover or sum(len(p) for p in pieces) > NOW_MAX_BYTES:
            return False
        for plaintext in _plaintexts(pieces):
            self._seal(plaintext)
        self._send_leftover()
        return True

    async def write(self, pieces: Sequence[bytes | memoryview]) -> None:
        await self._flush()
        for index, plaintext in enumerate(_plaintexts(pieces)):
            self._seal(plaintext)
            if index % _BATCH_MESSAGES == _BATCH_MESSAGES - 1:
                await self._flush()
        await self._flush()

    async def receive(self) -> bytes:
        """The content of one Noise message. Raises WireClosed."""
        ciphertext = await self._next_ciphertext()
        try:
            plaintext: bytes = self._decrypting.decrypt_with_ad(b"", ciphertext)
        except Exception as error:
            raise _undecryptable(error) from None
        return plaintext

    async def receive_frames(self, decoder: FrameDecoder) -> tuple[int, list[Frame]]:
        ciphertext = await self._next_ciphertext()
        n_bytes = len(ciphertext) - _TAG_BYTES
        state = self._decrypting
        room = decoder.room(n_bytes)
        try:
            if room is None:
                plaintext = state.decrypt_with_ad(b"", ciphertext)
            else:
                # As the line above, but to where the bytes will stay.
                cipher = state.cipher
                cipher.cipher.decrypt_into(cipher.format_nonce(state.n), ciphertext, b"", room)
                state.set_nonce(state.n + 1)
        except Exception as error:
            raise _undecryptable(error) from None
        return n_bytes, decoder.feed(plaintext) if room is None else decoder.filled(n_bytes)

    def abort(self) -> None:
        if self._closed:
            return
        self._closed = True
        trio.lowlevel.notify_closing(self._descriptor)
        self._socket.close()

    def sending_end(self) -> LinkEnd:
        """A copy for somebody else to send on. Nothing may be written here from now on."""
        assert not self._leftover
        return LinkEnd(self._socket.dup(), self._encrypting.k, self._encrypting.n)

    def receiving_end(self) -> LinkEnd:
        """A copy for somebody else to receive on; `receive` must not be called any more. Raises WireClosed
        where bytes have been read that are not decrypted yet: they would be missing there."""
        if self._start != self._end:
            raise WireClosed("the peer did not wait")
        return LinkEnd(self._socket.dup(), self._decrypting.k, self._decrypting.n)

    def _seal(self, plaintext: bytes | memoryview) -> None:
        ciphertext = self._encrypting.encrypt_with_ad(b"", plaintext)
        self._leftover.append(memoryview(len(ciphertext).to_bytes(2, "big")))
        self._leftover.append(memoryview(ciphertext))

    async def _next_ciphertext(self) -> memoryview:
        """Valid until the next call."""
        while True:
            n_received = self._end - self._start
            if n_received >= 2:
                length = int.from_bytes(self._view[self._start : self._start + 2], "big")
                if n_received >= 2 + length:
                    start = self._start + 2
                    self._start = start + length
                    return self._view[start : start + length]
            self._make_room()
            await self._fill()

    def _make_room(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif len(self._buffer) - self._start < 2 + 65535:
            n_received = self._end - self._start
            self._view[:n_received] = self._view[self._start : self._end]
            self._start, self._end = 0, n_received

    async def _fill(self) -> None:
        while True:
            if self._closed:
                raise WireClosed("closed here")
            try:
                n_bytes = self._socket.recv_into(self._view[self._end :])
                break
            except BlockingIOError:
                pass
            except OSError as error:
                raise WireClosed(f"lost ({error.strerror})") from None
            try:
                await trio.lowlevel.wait_readable(self._descriptor)
            except (trio.ClosedResourceError, OSError, ValueError):
                raise WireClosed("closed here") from None
        if n_bytes == 0:
            raise WireClosed("ended by the peer")
        self._end += n_bytes

    def _send_leftover(self) -> None:
        """As much as the kernel takes now. Raises WireClosed."""
        while self._leftover:
            if self._closed:
                raise WireClosed("closed here")
            try:
                n_sent = self._socket.sendmsg(self._leftover)
            except BlockingIOError:
                return
            except OSError as error:
                raise WireClosed(f"lost ({error.strerror})") from None
            while self._leftover and n_sent >= len(self._leftover[0]):
                n_sent -= len(self._leftover.popleft())
            if n_sent:
                self._leftover[0] = self._leftover[0][n_sent:]

    async def _flush(self) -> None:
        self._send_leftover()
        while self._leftover:
            if self._closed:
                raise WireClosed("closed here")
            try:
                await trio.lowlevel.wait_writable(self._descriptor)
            except (trio.ClosedResourceError, OSError, ValueError):
                raise WireClosed("closed here") from None
            self._send_leftover()


def _undecryptable(error: Exception) -> WireClosed:
    return WireClosed(f"the bytes do not decrypt ({type(error).__name__})")


def _plaintexts(pieces: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes in as few Noise messages as need no large copy."""
    if sum(len(p) for p in pieces) <= PLAINTEXT_MAX:
        yield pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), PLAINTEXT_MAX):
            yield view[start : start + PLAINTEXT_MAX]


async def noise_handshake(
    stream: trio.SocketStream,
    identity: Identity,
    expected: NodeId | None,
    gater: ConnectionGater | None = None,
) -> tuple[NodeId, NoiseWire]:
    """Turn a fresh TCP connection into a wire to a proven node id. Takes over the stream: on failure it is
    closed.

    Args:
        expected: the node id that was dialled; None on an accepted connection, where any id may come.
        gater: whom to accept; None: any node that proves an id.

    Raises HandshakeFailed, also when it takes longer than HANDSHAKE_S.
    """
    transport = GuardedNoise(identity, gater or ConnectionGater())
    try:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seen_at, port = _address_of(stream.socket.getpeername()), stream.socket.getsockname()[1]
        # The kernel's own limit for bytes that nobody acknowledges is a quarter of an hour.
        limit_silence(stream.socket, _USER_TIMEOUT_MS)
        raw = RawConnection(TrioTCPStream(stream), expected is not None)
        with trio.fail_after(HANDSHAKE_S):
            if expected is None:
                session = await transport.secure_inbound(raw)
            else:
                session = await transport.secure_outbound(raw, ID.from_base58(expected))
        noise = session.conn.noise_state.noise_protocol
        node_id = parse_node_id(str(session.get_remote_peer()))
        sock = socket.socket(fileno=stream.socket.detach())
    except Exception as error:
        await trio.aclose_forcefully(stream)
        raise HandshakeFailed(type(error).__name__) from error
    except BaseException:
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(stream)
        raise
    sock.setblocking(False)
    return node_id, NoiseWire(sock, noise.cipher_state_encrypt, noise.cipher_state_decrypt, seen_at, port)


def _address_of(socket_name: Sequence[Any]) -> str:
    ip, port = socket_name[:2]
    # The zone of a link-local address means something on this machine only.
    return "" if "%" in ip else str(Address(ip, port))
