"""Strangers at a node's ports, and the proof that nobody else noticed them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from swarmllm.swarm.libp2p_router import Libp2pRouter

from .conftest import DEADLINE_S, Libp2pSwarm, meet


@asynccontextmanager
async def works_before_and_after(swarm: Libp2pSwarm) -> AsyncIterator[Libp2pRouter]:
    """Two nodes that talk to each other, before and after what is done to the first."""
    victim, friend = await swarm.start("victim"), await swarm.start("friend")
    await meet(victim, friend)
    arrived = trio.Event()

    async def answer(sender: str, body: bytes) -> bytes:
        return body + b"!"

    async def note(sender: str, header: bytes, payload: memoryview) -> None:
        arrived.set()

    victim.serve(answer, note)
    yield victim  # type: ignore[misc]
    assert victim.connected() == {friend.node_id}
    with trio.fail_after(DEADLINE_S):
        assert await friend.request(victim.node_id, b"alive") == b"alive!"
        await friend.send(victim.node_id, b"alive")
        await arrived.wait()


@asynccontextmanager
async def stranger(victim: Libp2pRouter) -> AsyncIterator[Any]:
    """A stock libp2p host that is connected to the victim."""
    host, where = new_host(key_pair=create_new_key_pair()), Multiaddr(victim.addresses[0])
    transport: Any = host.get_network().transport_manager.transport_for_dialing(where)
    dial, made = transport.dial, list[Any]()

    async def dial_and_remember(address: Multiaddr) -> Any:
        made.append(await dial(address))
        return made[-1]

    transport.dial = dial_and_remember
    async with host.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        try:
            with trio.fail_after(DEADLINE_S):
                await host.connect(info_from_p2p_addr(where))
            yield host
        finally:
            with trio.CancelScope(shield=True):
                await host.close()
                # After a handshake in vain the library leaves the socket to the garbage collector, which
                # would fail whatever test runs then.
                for each in made:
                    await each.close()


def connection_with(host: Any, victim: Libp2pRouter) -> Any:
    return host.get_network().connections[ID.from_base58(victim.node_id)][0]
