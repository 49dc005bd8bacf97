"""js-libp2p as a foreign peer of our hardened host: what the two implementations agree on."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from deadlines import DEADLINE_S
from gossip_reader import ValidGossip

from swarmllm.swarm.discovery.addresses import Address, own_addresses
from swarmllm.swarm.discovery.dht.dht import Dht
from swarmllm.swarm.discovery.dht.messages import model_key, name_key
from swarmllm.swarm.discovery.dht.serving import DhtNode
from swarmllm.swarm.libp2p.gossip import HEALTH, MODELS, Gossip, run_gossip
from swarmllm.swarm.libp2p.host import Host, run_libp2p
from swarmllm.swarm.membership.connection_gater import ConnectionGater
from swarmllm.swarm.membership.identity import load_or_create_identity
from swarmllm.swarm.membership.network_key import new_secret, private_network
from swarmllm_proto.identifiers import NodeId

FOLDER = Path(__file__).parent / "js_libp2p"
NOISE_AND_YAMUX = {"encryption": "/noise", "muxer": "/yamux/1.0.0"}


class ForeignPeer:
    """A Node.js process that runs js-libp2p and does one command after the other."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._unread = b""
        self.id = ""
        self.address = ""

    async def do(self, command: str, **what: str) -> Any:
        answer = await self._ask(command, what)
        assert "ok" in answer, answer
        return answer["ok"]

    async def fail(self, command: str, **what: str) -> str:
        answer = await self._ask(command, what)
        assert "error" in answer, answer
        return str(answer["error"])

    async def _ask(self, command: str, what: dict[str, str]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with trio.fail_after(DEADLINE_S):
            await self._process.stdin.send_all(json.dumps({"command": command} | what).encode() + b"\n")
            while b"\n" not in self._unread:
                data = await self._process.stdout.receive_some()
                assert data, "the foreign peer ended"
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(json.loads(line))


@pytest.fixture
async def foreign(nursery: trio.Nursery) -> AsyncIterator[ForeignPeer]:
    node = shutil.which("node")
    assert node is not None, "Node.js is not installed"
    assert (FOLDER / "node_modules").is_dir(), f"run: npm install --prefix {FOLDER.name}"
    process = await trio.lowlevel.open_process(
        [node, "peer.mjs"],
        cwd=FOLDER,
        stdin=-1,
        stdout=-1,  # PIPE
    )
    try:
        peer = ForeignPeer(process)
        here = await peer.do("where")
        peer.id, peer.address = here["id"], here["addresses"][0]
        yield peer
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            assert process.stdin is not None
            assert process.stdout is not None
            await process.stdin.aclose()
            await process.stdout.aclose()


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    identity = load_or_create_identity(tmp_path)
    host = Host(identity, ConnectionGater())
    async with run_libp2p(host, own_addresses("127.0.0.1"), 0):
        yield host


def address(host: Host) -> str:
    return f"/ip4/127.0.0.1/tcp/{host.port}/p2p/{host.node_id}"


async def test_it_dials_identifies_and_pings_our_host(host: Host, foreign: ForeignPeer) -> None:
    met = await foreign.do("dial", address=address(host))
    assert met == {"peer": host.node_id} | NOISE_AND_YAMUX
    told = await foreign.do("identify", peer=host.node_id)
    assert "/ipfs/ping/1.0.0" in told["protocols"]
    assert [shown.removesuffix(f"/p2p/{host.node_id}") for shown in told["addresses"]] == [
        address(host).removesuffix(f"/p2p/{host.node_id}")
    ]
    assert 0 < (await foreign.do("ping", address=address(host)))["ms"] < 1000 * DEADLINE_S
    assert host.is_connected(foreign.id)


async def test_our_host_dials_it(host: Host, foreign: ForeignPeer) -> None:
    with trio.fail_after(DEADLINE_S):
        await host.dial(foreign.id, [Address("127.0.0.1", int(foreign.address.split("/")[4]))])
    assert host.is_connected(foreign.id)
    assert (await foreign.do("identify", peer=host.node_id))["protocols"]


@pytest.mark.parametrize("topic", [MODELS, HEALTH])
async def test_gossip_travels_both_ways(host: Host, foreign: ForeignPeer, topic: str) -> None:
    send, receive = trio.open_memory_channel[tuple[str, bytes]](16)
    gossip = Gossip(
        "",
        ValidGossip(lambda name, content: send.send_nowait((name, content))),
        size_max_bytes={topic: 1000},
    )
    async with trio.open_nursery() as nursery, run_gossip(gossip, host):
        await foreign.do("subscribe", topic=topic)
        await foreign.do("dial", address=address(host))
        await _meshed(foreign, host, gossip, topic)
        await foreign.do("publish", topic=topic, text="not what we take")
        await foreign.do("publish", topic=topic, text="valid, from there")
        with trio.fail_after(DEADLINE_S):
            # A node hears itself.
            foreign_ones = [each async for each in _others(receive)]
        assert foreign_ones == [(topic, b"valid, from there")]
        nursery.cancel_scope.cancel()


async def _others(
    heard: trio.MemoryReceiveChannel[tuple[str, bytes]],
) -> AsyncIterator[tuple[str, bytes]]:
    async for topic, content in heard:
        if not content.startswith(b"valid, from here"):
            yield topic, content
            return


async def _meshed(foreign: ForeignPeer, host: Host, gossip: Gossip, topic: str) -> None:
    """Ours is heard there: publish until it is, because a mesh takes a heartbeat to form."""
    with trio.fail_after(DEADLINE_S):
        # It is another process's state.
        while host.node_id not in (await foreign.do("subscribers", topic=topic))["peers"]:  # noqa: ASYNC110
            await trio.sleep(0.05)
        n = 0
        while True:
            await gossip.publish(topic, f"valid, from here {n}".encode())
            heard = await foreign.do("hear")
            if heard is not None:
                assert heard["topic"] == topic
                assert heard["text"].startswith("valid, from here")
                return
            n += 1


@asynccontextmanager
async def our_node(folder: Path, known: dict[str, Address]) -> AsyncIterator[tuple[Host, Dht]]:
    """A host with its DHT, as a node has it; `known`: where nodes of a swarm know each other to be."""
    folder.mkdir()  # noqa: ASYNC240 (a moment)
    host = Host(load_or_create_identity(folder), ConnectionGater())

    class Node(DhtNode):
        def addresses_of(self, node_id: NodeId) -> tuple[Address, ...]:
            return (known[node_id],) if node_id in known else ()

        def connected(self) -> set[NodeId]:
            return host.connected()

    async with run_libp2p(host, own_addresses("127.0.0.1"), 0), trio.open_nursery() as nursery:
        known[host.node_id] = Address("127.0.0.1", host.port)
        dht = Dht(host, nursery, Node())
        nursery.start_soon(dht.run)
        yield host, dht
        nursery.cancel_scope.cancel()


async def _until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(DEADLINE_S):
        # The state of several tasks, without an event.
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.05)


async def _joined(foreign: ForeignPeer, host: Host, dht: Dht) -> None:
    """Each has the other in its routing table."""
    await foreign.do("dial", address=address(host))
    dht.met(foreign.id)
    await _until(lambda: foreign.id in dht.core.table)
    with trio.fail_after(DEADLINE_S):
        # It is another process's state.
        while not (await foreign.do("neighbours"))["n"]:  # noqa: ASYNC110
            await trio.sleep(0.05)


async def test_what_it_provides_our_dht_finds(tmp_path: Path, foreign: ForeignPeer) -> None:
    """By way of a node of ours that it told, at one that it never met."""
    known: dict[str, Address] = {}
    key = model_key("5e" * 32)
    async with our_node(tmp_path / "a", known) as (a, dht_a), our_node(tmp_path / "b", known) as (b, dht_b):
        await _joined(foreign, a, dht_a)
        await foreign.do("provide", key=key.hex())
        await _until(lambda: len(dht_a.core.providers) == 1)
        await b.dial(a.node_id, [known[a.node_id]])
        dht_b.met(a.node_id)
        await _until(lambda: a.node_id in dht_b.core.table)
        with trio.fail_after(DEADLINE_S):
            (found,) = await dht_b.find_providers(key)
        assert found.node_id == foreign.id
        assert found.addresses == (Address("127.0.0.1", int(foreign.address.split("/")[4])),)


async def test_what_our_dht_provides_it_finds(tmp_path: Path, foreign: ForeignPeer) -> None:
    """At a node that it never met, by way of one that it did."""
    known: dict[str, Address] = {}
    key = name_key("a model")
    async with our_node(tmp_path / "a", known) as (a, dht_a), our_node(tmp_path / "b", known) as (b, dht_b):
        await b.dial(a.node_id, [known[a.node_id]])
        dht_b.met(a.node_id)
        dht_b.provide([key])
        await _until(lambda: len(dht_a.core.providers) == 1)
        await _joined(foreign, a, dht_a)
        found = await foreign.do("providers", key=key.hex())
        assert [each["peer"] for each in found] == [b.node_id]
        assert str(known[b.node_id]) in found[0]["addresses"]


async def test_a_private_swarm_shows_it_a_closed_connection(tmp_path: Path, foreign: ForeignPeer) -> None:
    identity = load_or_create_identity(tmp_path)
    host = Host(identity, ConnectionGater(private_network(new_secret())))
    async with run_libp2p(host, own_addresses("127.0.0.1"), 0):
        await foreign.fail("dial", address=address(host))
        assert not host.is_connected(foreign.id)
