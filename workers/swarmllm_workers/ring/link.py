"""Links: one-way connections between the workers of neighbouring stages.

The daemons dial, shake hands and prove who is who; what arrives here is a connected socket and the one key
that this end needs, so a worker can speak as its node on this connection and nowhere else. The bytes are
those of the data plane: Noise messages (`[u16 length][ciphertext]`, big-endian, ChaCha20-Poly1305 under a
counter) that carry frames of job messages.

A link has no keepalive of its own. Its ends notice an end of the stream, the kernel gives up on bytes that
nobody acknowledges, and everything else is noticed by the daemons, who talk to each other all the time.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from struct import Struct
from typing import Final

from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.frames import Frame, FrameDecoder
from swarmllm_proto.limits import SWARM_HEADER_MAX
from swarmllm_workers.errors import CallError

KEY_SIZE: Final = 32
LINK_PAYLOAD_MAX: Final = 16 * 2**20
"""Bytes of one job: 512 rows of f32 x 8192. Links carry decode jobs, which have a few rows."""
UNSENT_MAX: Final = 32 * 2**20
"""Bytes that may wait for a neighbour that does not read."""
PLAINTEXT_MAX: Final = 65535 - 16
"""Bytes in one Noise message: 65535 less the authentication tag."""

_RECEIVE_BYTES: Final = 256 * 1024
_READS_MAX: Final = 4
"""Per turn, so that one link cannot hold up everybody else's step."""
_LENGTH: Final = Struct(">H")
_NONCE: Final = Struct("<4xQ")
_KEY_AND_NONCE: Final = Struct(f"<{KEY_SIZE}sQ")


class LinkClosed(Exception):
    """The link is closed; the text says why."""


class _Cipher:
    """One direction's half of what a Noise handshake leaves behind."""

    def __init__(self, secret: bytes | memoryview) -> None:
        """Raises CallError where this is no key and nonce."""
        if len(secret) != _KEY_AND_NONCE.size:
            raise CallError("bad_message", f"a key and a nonce have {_KEY_AND_NONCE.size} bytes", "payload")
        # Only workers that have a link pay for the import.
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        key, self._nonce = _KEY_AND_NONCE.unpack(secret)
        self._cipher = ChaCha20Poly1305(key)

    def seal(self, plaintext: bytes | memoryview) -> bytes:
        nonce = _NONCE.pack(self._nonce)
        self._nonce += 1
        return self._cipher.encrypt(nonce, plaintext, None)

    def open(self, ciphertext: bytes | memoryview) -> bytes:
        """Raises LinkClosed."""
        nonce = _NONCE.pack(self._nonce)
        self._nonce += 1
        try:
            return self._cipher.decrypt(nonce, ciphertext, None)
        except Exception as error:
            raise LinkClosed(f"the bytes do not decrypt ({type(error).__name__})") from None


class SendingLink:
    def __init__(self, connection: socket.socket, secret: bytes | memoryview) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._cipher = _Cipher(secret)
        self._unsent: deque[memoryview] = deque()
        self._n_unsent = 0
        self.is_waiting = False
        """Somebody will call `flush` when the kernel takes more."""

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, pieces: Sequence[bytes | memoryview]) -> None:
        """Send frames, or keep what the kernel does not take now for `flush`. Raises LinkClosed."""
        self.send_bytes(b"".join(pieces))

    def send_bytes(self, plaintext: bytes) -> bool:
        """As `send`, of frames in one piece. Returns whether the kernel has taken all."""
        if len(plaintext) <= PLAINTEXT_MAX:
            ciphertext = self._cipher.seal(plaintext)
            data = _LENGTH.pack(len(ciphertext)) + ciphertext
        else:
            data = self._seal_in_parts(memoryview(plaintext))
        n_sent = 0 if self._unsent else self._write(data)
        if n_sent < len(data):
            self._unsent.append(memoryview(data)[n_sent:])
            self._n_unsent += len(data) - n_sent
            if self._n_unsent > UNSENT_MAX:
                raise LinkClosed("the neighbour does not read")
            return False
        return True

    def _seal_in_parts(self, plaintext: memoryview) -> bytes:
        sealed: list[bytes] = []
        for start in range(0, len(plaintext), PLAINTEXT_MAX):
            ciphertext = self._cipher.seal(plaintext[start : start + PLAINTEXT_MAX])
            sealed += (_LENGTH.pack(len(ciphertext)), ciphertext)
        return b"".join(sealed)

    def flush(self) -> None:
        """Raises LinkClosed."""
        while self._unsent:
            n_sent = self._write(self._unsent[0])
            if n_sent == 0:
                return
            self._n_unsent -= n_sent
            if n_sent == len(self._unsent[0]):
                self._unsent.popleft()
            else:
                self._unsent[0] = self._unsent[0][n_sent:]

    def _write(self, data: bytes | memoryview) -> int:
        """How many bytes the kernel takes now. Raises LinkClosed."""
        try:
            return self.connection.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise LinkClosed(f"lost ({error.strerror})") from None

    def read_end(self) -> None:
        """Handle a readable socket of a link on which the neighbour never sends: read its end. Raises
        LinkClosed."""
        try:
            data = self.connection.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkClosed(f"lost ({error.strerror})") from None
        raise LinkClosed("the neighbour sent something" if data else "ended by the neighbour")


class ReceivingLink:
    def __init__(self, connection: socket.socket, secret: bytes | memoryview) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._cipher = _Cipher(secret)
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._n_received = 0
        self._decoder = FrameDecoder(SWARM_HEADER_MAX, LINK_PAYLOAD_MAX)
        self._ending = ""

    def receive(self) -> list[Frame]:
        """The messages that have arrived. Raises LinkClosed at the end of the stream, once there are none
        left."""
        frames: list[Frame] = []
        try:
            for _ in range(_READS_MAX):
                if self._ending or not self._fill():
                    break
                is_full = self._n_received == _RECEIVE_BYTES
                frames += self._open()
                if not is_full:
                    break  # the socket is empty, or `poll` says that it no longer is
        except LinkClosed as closed:
            self._ending = str(closed)
        if self._ending and not frames:
            raise LinkClosed(self._ending)
        return frames

    def _fill(self) -> bool:
        """False when nothing is there now. Raises LinkClosed."""
        try:
            n_bytes = self.connection.recv_into(
                self._view[self._n_received :] if self._n_received else self._view
            )
        except BlockingIOError:
            return False
        except OSError as error:
            raise LinkClosed(f"lost ({error.strerror})") from None
        if n_bytes == 0:
            raise LinkClosed("ended by the neighbour")
        self._n_received += n_bytes
        return True

    def _open(self) -> list[Frame]:
        frames: list[Frame] = []
        start = 0
        while self._n_received - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._view, start)
            end = start + _LENGTH.size + length
            if end > self._n_received:
                break
            plaintext = self._cipher.open(self._view[start + _LENGTH.size : end])
            try:
                frames += self._decoder.feed_owned(plaintext)
            except ProtocolError as error:
                raise LinkClosed(f"broke the protocol ({error})") from None
            start = end
        rest = self._n_received - start
        if rest:
            self._view[:rest] = bytes(self._view[start : self._n_received])
        self._n_received = rest
        return frames
