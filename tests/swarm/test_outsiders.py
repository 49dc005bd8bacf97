"""What somebody without the key gets out of a node of a private swarm, byte by byte: its half of the
handshake, which says who it is, and the end."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import IOException
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.membership.connection_gater import PROOF_BYTES
from swarmllm.swarm.membership.network_key import KEYS_MAX, NetworkFile, new_secret, private_network
from swarmllm.swarm.settings import SwarmSettings

from .conftest import DEADLINE_S

pytestmark = pytest.mark.slow

NEGOTIATED = b"\x13/multistream/1.0.0\n\x07/noise\n"
YAMUX = b"\x13/multistream/1.0.0\n\x0d/yamux/1.0.0\n"
FIRST_WORDS = {
    "nothing": b"",
    "a multiplexer": YAMUX,
    "wrong proofs": bytes(KEYS_MAX * PROOF_BYTES),
    "one proof": bytes(PROOF_BYTES),
    "a lot": bytes(60_000),
}


class Recorder(TrioTCPStream):  # type: ignore[misc]
    """A socket and all that came out of it."""

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream)
        self.heard = bytearray()

    async def read(self, n: int | None = None) -> bytes:
        came: bytes = await super().read(n)
        self.heard += came
        return came

    def messages(self, skipped: bytes) -> list[bytes]:
        """The Noise messages after what was negotiated in the clear. Nothing else may be there."""
        assert self.heard.startswith(skipped)
        left, found = bytes(self.heard[len(skipped) :]), []
        while left:
            length = int.from_bytes(left[:2], "big")
            found.append(left[2 : 2 + length])
            left = left[2 + length :]
        return found


@asynccontextmanager
async def member(folder: Path, *bootstrap: str, is_private: bool = True) -> AsyncIterator[Libp2pRouter]:
    """A node of a private swarm that is also a relay, with something to tell."""
    if is_private:
        network = private_network(new_secret())
        NetworkFile(folder).change(lambda _: network)
    settings = SwarmSettings(
        folder, "127.0.0.1", 0, 0, bootstrap=bootstrap, mdns=False, relay=True, relay_service=True
    )
    async with open_libp2p_router(settings) as router:
        await router.publish(b"a secret model")
        yield router


def noise_of(host: Any) -> Any:
    return host.get_network().upgrader.security_multistream


async def everything(session: Any) -> list[bytes]:
    """All that is said after the handshake, until the end."""
    said = []
    with trio.fail_after(DEADLINE_S):
        while True:
            try:
                said.append(await session.conn.read_msg())
            except (IOException, trio.BrokenResourceError, trio.ClosedResourceError):
                return said


@pytest.mark.parametrize("words", list(FIRST_WORDS))
@pytest.mark.parametrize("plane", ["control", "data"])
async def test_who_knocks_hears_a_name_and_the_end(tmp_path: Path, plane: str, words: str) -> None:
    async with member(tmp_path) as router:
        host = new_host(key_pair=create_new_key_pair())
        port = router.host.port if plane == "control" else Address.parse(router.data_addresses[0]).port
        recorder = Recorder(await trio.open_tcp_stream("127.0.0.1", port))
        raw = RawConnection(recorder, True)
        with trio.fail_after(DEADLINE_S):
            multistream = noise_of(host)
            victim_id = ID.from_base58(router.node_id)
            if plane == "control":
                session = await multistream.secure_outbound(raw, victim_id)
            else:
                (noise,) = [t for name, t in multistream.transports.items() if "noise" in name]
                session = await noise.secure_outbound(raw, victim_id)
            if FIRST_WORDS[words]:
                await session.conn.write_msg(FIRST_WORDS[words])
            else:
                # Whoever waits is not told anything either.
                await recorder.stream.send_eof()
        assert await everything(session) == []
        (handshake,) = recorder.messages(NEGOTIATED if plane == "control" else b"")
        assert 100 < len(handshake) < 300
        await recorder.close()
        assert router.connected() == frozenset()
        assert not router.host.connected()


async def test_who_is_dialled_hears_a_name_random_numbers_and_the_end(tmp_path: Path) -> None:
    """By a member that was given a wrong address, or an old one."""
    host = new_host(key_pair=create_new_key_pair())
    host_id = host.get_id().to_base58()
    heard: list[tuple[list[bytes], int]] = []
    enough = trio.Event()

    async def listen(stream: trio.SocketStream) -> None:
        recorder = Recorder(stream)
        session = await noise_of(host).secure_inbound(RawConnection(recorder, False))
        said = [await session.conn.read_msg()]
        await session.conn.write_msg(bytes(PROOF_BYTES))
        said += await everything(session)
        # The first and third message of the handshake, and what was said.
        heard.append((said, len(recorder.messages(NEGOTIATED)) - 2))
        await recorder.close()
        if len(heard) == 2:
            enough.set()

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, listen, 0)
        port = listeners[0].socket.getsockname()[1]
        async with member(tmp_path, f"/ip4/127.0.0.1/tcp/{port}/p2p/{host_id}") as router:
            with trio.fail_after(DEADLINE_S):
                await enough.wait()
            assert not router.host.is_connected(host_id)
        nursery.cancel_scope.cancel()
    for said, n_messages in heard:
        assert [len(each) for each in said] == [KEYS_MAX * PROOF_BYTES]
        assert n_messages == 1
    first, second = (said[0] for said, _ in heard)
    pieces = [
        each[at : at + PROOF_BYTES] for each in (first, second) for at in range(0, len(each), PROOF_BYTES)
    ]
    assert all(a != b for a, b in itertools.combinations(pieces, 2))


@pytest.mark.parametrize("is_private", [True, False], ids=["private", "open"])
async def test_neither_dht_nor_relay_nor_identify_answers_it(tmp_path: Path, is_private: bool) -> None:
    async with member(tmp_path, is_private=is_private) as router:
        answered = []
        for protocol in ("/swarmllm/kad/1.0.0", "/libp2p/circuit/relay/0.2.0/hop", "/ipfs/id/1.0.0"):
            host = new_host(key_pair=create_new_key_pair())
            async with host.run(listen_addrs=[]):
                with trio.fail_after(DEADLINE_S):
                    try:
                        await host.connect(info_from_p2p_addr(Multiaddr(router.addresses[0])))
                        await host.new_stream(ID.from_base58(router.node_id), [TProtocol(protocol)])
                        answered.append(protocol)
                    except SwarmException:
                        assert not host.get_network().connections.get(ID.from_base58(router.node_id))
                await host.close()
        assert len(answered) == (0 if is_private else 3)
