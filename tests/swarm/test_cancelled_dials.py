"""A dial that is cancelled, as at the end of a node, while the other end says nothing."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from swarmllm.swarm.discovery.addresses import Address, own_addresses
from swarmllm.swarm.libp2p.host import Host, run_libp2p
from swarmllm.swarm.membership.connection_gater import ConnectionGater
from swarmllm.swarm.membership.identity import load_or_create_identity
from swarmllm_proto.identifiers import NodeId

from .conftest import DEADLINE_S


@pytest.mark.parametrize("n_addresses", [1, 2])
async def test_its_socket_is_closed_and_not_left_to_the_garbage_collector(
    tmp_path: Path, n_addresses: int
) -> None:
    """Of several addresses the first that answers is taken (`first_to_answer`); one is the library's."""
    mute, *_ = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = mute.socket.getsockname()[1]
    addresses = [Address("127.0.0.1", port), Address("127.0.0.2", 1)][:n_addresses]
    stranger = NodeId(str(ID.from_pubkey(create_new_key_pair().public_key)))
    host = Host(load_or_create_identity(tmp_path), ConnectionGater())
    with trio.fail_after(DEADLINE_S):
        async with mute, run_libp2p(host, own_addresses("127.0.0.1"), 0):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(host.dial, stranger, addresses)
                accepted = await mute.accept()
                # The first words of the handshake: the dial waits for an answer.
                await accepted.receive_some(1)
                (ours,) = host.sockets
                nursery.cancel_scope.cancel()
            assert ours.socket.fileno() == -1
            del ours
            gc.collect()
            await accepted.aclose()
