"""The Noise handshake before strangers: what they send in its place, whom they say they are inside it, and
what they send for a proof of membership. The part of `decoders.py` that needs TCP, as the data plane does."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.patterns import PatternXX

from bench.decoders.target import Target
from swarmllm.swarm.data.wire import HandshakeFailed, noise_handshake
from swarmllm.swarm.membership.connection_gater import PROOF_BYTES, ConnectionGater
from swarmllm.swarm.membership.identity import Identity
from swarmllm.swarm.membership.network_key import KEYS_MAX, private_network

_keys = create_new_key_pair()
_stranger = create_new_key_pair()
_static = create_x25519_key_pair().private_key
IDENTITY = Identity(str(ID.from_pubkey(_keys.public_key)), _keys)
EPHEMERAL = bytes(range(1, 33))

Act = Callable[[trio.SocketStream], Awaitable[None]]


def handshake_targets() -> dict[str, Target]:
    first = len(EPHEMERAL).to_bytes(2, "big") + EPHEMERAL
    third = (64).to_bytes(2, "big") + bytes(64)
    payload: bytes = _pattern().make_handshake_payload().serialize()
    proofs = bytes(KEYS_MAX * PROOF_BYTES)
    return {
        "Noise handshake": Target(_handshake, (HandshakeFailed,), {"messages": first + third}),
        "Noise identity": Target(_identity, (HandshakeFailed,), {"payload": payload}),
        "proof of membership": Target(_membership, (HandshakeFailed,), {"proofs": proofs}),
    }


def _pattern() -> PatternXX:
    return PatternXX(ID.from_pubkey(_stranger.public_key), _stranger.private_key, _static)


def _handshake(data: bytes) -> None:
    async def send(stream: trio.SocketStream) -> None:
        await stream.send_all(data)
        await stream.send_eof()

    _shake_hands_with(send, ConnectionGater())


def _identity(data: bytes) -> None:
    pattern: Any = _pattern()
    pattern.make_handshake_payload = lambda: SimpleNamespace(serialize=lambda: data)

    async def lie(stream: trio.SocketStream) -> None:
        await pattern.handshake_outbound(RawConnection(TrioTCPStream(stream), True), None)

    _shake_hands_with(lie, ConnectionGater())


def _membership(data: bytes) -> None:
    async def send(stream: trio.SocketStream) -> None:
        session = await _pattern().handshake_outbound(RawConnection(TrioTCPStream(stream), True), None)
        await session.conn.write_msg(data)
        await stream.send_eof()

    _shake_hands_with(send, ConnectionGater(private_network(bytes(32))))


_listener = socket.create_server(("127.0.0.1", 0))


def _shake_hands_with(act: Act, gater: ConnectionGater) -> None:
    async def run() -> None:
        there = socket.create_connection(_listener.getsockname())
        here, _ = _listener.accept()
        for each in (there, here):
            each.setblocking(False)
        accepted = trio.SocketStream(trio.socket.from_stdlib_socket(here))
        dialled = trio.SocketStream(trio.socket.from_stdlib_socket(there))

        async def act_and_fail() -> None:
            # How it goes for the stranger is not what is looked at.
            with contextlib.suppress(Exception):
                await act(dialled)

        async with dialled, trio.open_nursery() as nursery:
            nursery.start_soon(act_and_fail)
            _, wire = await noise_handshake(accepted, IDENTITY, None, gater)
            wire.abort()

    try:
        trio.run(run)
    except* HandshakeFailed as failed:
        raise failed.exceptions[0] from None
