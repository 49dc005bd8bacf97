"""What yamux reads of a connection, however it comes."""

from __future__ import annotations

import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.io.exceptions import ConnectionClosedError, IncompleteReadError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.io import NoiseTransportReadWriter
from libp2p.security.secure_session import SecureSession
from libp2p.stream_muxer.yamux.yamux import Yamux

from swarmllm.swarm.libp2p import fast_paths
from swarmllm.swarm.libp2p.fast_paths import read_exactly, take_deciphered

from .conftest import DEADLINE_S

CIPHER: Any = SimpleNamespace(encrypt=lambda plain: plain + b"!", decrypt=lambda message: message[:-1])
"""A message is one byte longer than what it says, as Noise's are sixteen."""


def message(plain: bytes) -> bytes:
    sealed = CIPHER.encrypt(plain)
    return bytes((*len(sealed).to_bytes(2, "big"), *sealed))


@dataclass
class Connection:
    session: SecureSession
    peer: trio.SocketStream
    """What is written here comes at the session."""
    yamux: Yamux


@asynccontextmanager
async def connection(before: bytes = b"") -> AsyncIterator[Connection]:
    """`before`: deciphered while the muxer was negotiated, and not read."""
    fast_paths.take_shortcuts()
    ours, theirs = (trio.SocketStream(trio.socket.from_stdlib_socket(s)) for s in socket.socketpair())
    keys = create_new_key_pair(bytes(32))
    session = SecureSession(
        local_peer=ID(b"here"),
        local_private_key=keys.private_key,
        remote_peer=ID(b"peer"),
        remote_permanent_pubkey=keys.public_key,
        is_initiator=True,
        conn=NoiseTransportReadWriter(RawConnection(TrioTCPStream(ours), True), CIPHER),
    )
    if before:
        session._fill(before)
    async with ours, theirs:
        with trio.fail_after(DEADLINE_S):
            yield Connection(session, theirs, Yamux(session, ID(b"peer"), is_initiator=True))


@pytest.mark.parametrize("seed", range(5))
async def test_what_comes_in_any_pieces_is_read_in_any_pieces(seed: int) -> None:
    chance = random.Random(seed)
    said = chance.randbytes(40_000)
    wire, at = b"", 7
    while at < len(said):
        n_bytes = chance.choice((1, 12, 300, 9_000))
        wire, at = wire + message(said[at : at + n_bytes]), at + n_bytes
    async with connection(said[:7]) as c, trio.open_nursery() as nursery:

        async def send() -> None:
            left = wire
            while left:
                n_bytes = chance.choice((1, 2, 3, 500, 20_000))
                await c.peer.send_all(left[:n_bytes])
                left = left[n_bytes:]
                await trio.lowlevel.checkpoint()

        nursery.start_soon(send)
        read = b""
        while len(read) < len(said):
            n_bytes = min(chance.choice((1, 12, 400, 5_000)), len(said) - len(read))
            piece = take_deciphered(c.session, n_bytes)
            read += await read_exactly(c.session, n_bytes) if piece is None else piece
        assert read == said


async def test_who_is_cancelled_while_it_waits_for_the_rest_loses_nothing() -> None:
    async with connection() as c:
        wire = message(b"twelve bytes") + message(b"and a body")
        await c.peer.send_all(wire[:20])
        with trio.move_on_after(0.01) as scope:
            await read_exactly(c.session, 22)
        assert scope.cancelled_caught
        assert take_deciphered(c.session, 13) is None
        await c.peer.send_all(wire[20:])
        assert await read_exactly(c.session, 22) == b"twelve bytesand a body"


@pytest.mark.parametrize(
    ("wire", "n_received"),
    [(b"", 0), (message(b"half")[:1], 1), (message(b"half")[:4], 4), (message(b"half"), 4)],
)
async def test_an_end_between_two_frames_is_told_from_one_in_the_middle(wire: bytes, n_received: int) -> None:
    async with connection() as c:
        await c.peer.send_all(wire)
        await c.peer.send_eof()
        with pytest.raises(IncompleteReadError) as caught:
            await read_exactly(c.session, 12)
        assert (caught.value.is_clean_close, caught.value.received_bytes) == (n_received == 0, n_received)


async def test_a_message_without_content_ends_the_connection() -> None:
    """As the library has it: or a peer could have this node decipher nothing for ever."""
    async with connection() as c:
        await c.peer.send_all(message(b""))
        with pytest.raises(ConnectionClosedError):
            await read_exactly(c.session, 1)


async def test_the_answer_to_a_proposal_is_read_before_the_first_frame() -> None:
    async with connection() as c:
        read = c.session.read

        async def answer_first(n: int | None = None) -> bytes:
            del c.session.__dict__["read"]
            assert await read(6) == b"answer"
            return await read(n)

        c.session.__dict__["read"] = answer_first
        await c.peer.send_all(message(b"answerfra") + message(b"me, and more"))
        assert await read_exactly(c.session, 5) == b"frame"
        assert await read_exactly(c.session, 10) == b", and more"


@pytest.mark.parametrize("n_bytes", [1, 65_519, 65_520, 200_000])
async def test_what_is_written_fits_the_messages_of_noise(n_bytes: int) -> None:
    """A frame that fits one is one; what nobody here writes is cut by the library."""
    async with connection() as c, trio.open_nursery() as nursery:
        frame = bytes(12) + bytes(n_bytes - 1) + b"#"
        nursery.start_soon(c.yamux._write_frame, frame)
        received = b""
        while len(received) < len(frame):
            length = int.from_bytes(await exactly(c.peer, 2), "big")
            received += CIPHER.decrypt(await exactly(c.peer, length))
        assert received == frame


async def exactly(stream: trio.SocketStream, n_bytes: int) -> bytes:
    received = b""
    while len(received) < n_bytes:
        received += await stream.receive_some(n_bytes - len(received))
    return received
