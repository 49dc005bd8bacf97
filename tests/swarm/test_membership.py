"""Private swarms among real hosts: members meet, outsiders see a closed connection, keys change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.data.wire import HandshakeFailed, noise_handshake
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.libp2p.request_protocol import PeerRequests
from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.membership.connection_gater import PROOF_BYTES, ConnectionGated, ConnectionGater, proof
from swarmllm.swarm.membership.identity import Identity
from swarmllm.swarm.membership.network_key import (
    OPEN_SWARM,
    Network,
    NetworkFile,
    NetworkKey,
    new_secret,
    private_network,
)
from swarmllm.swarm.membership.peer_lists import NO_LISTS, PeerLists
from swarmllm.swarm.peers.connection_limits import AdmitAll
from swarmllm.swarm.peers.directory import PeerDirectory
from swarmllm.swarm.settings import SwarmSettings
from swarmllm_proto.identifiers import NodeId

from .conftest import DEADLINE_S, meet, until

if TYPE_CHECKING:
    from trio_typing import TaskStatus


pytestmark = pytest.mark.slow


class Swarms:
    """Nodes of any network, in one process."""

    def __init__(self, nursery: trio.Nursery, folder: Path) -> None:
        self._nursery = nursery
        self._folder = folder

    async def start(
        self, name: str, network: Network, *bootstrap: str, lists: PeerLists = NO_LISTS
    ) -> Libp2pRouter:
        if network.is_private:
            self.file(name).change(lambda _: network)
        settings = SwarmSettings(
            self._folder / name, "127.0.0.1", 0, 0, bootstrap=bootstrap, mdns=False, lists=lists
        )
        router: Libp2pRouter = await self._nursery.start(self._run, settings)
        await router.publish(name.encode())
        return router

    async def _run(self, settings: SwarmSettings, *, task_status: TaskStatus[Libp2pRouter]) -> None:
        async with open_libp2p_router(settings) as router:
            task_status.started(router)
            await trio.sleep_forever()

    def file(self, name: str) -> NetworkFile:
        return NetworkFile(self._folder / name)


@pytest.fixture
async def swarms(tmp_path: Path) -> Any:
    async with trio.open_nursery() as nursery:
        yield Swarms(nursery, tmp_path)
        nursery.cancel_scope.cancel()


def somebody() -> Identity:
    key_pair = create_new_key_pair()
    return Identity(str(ID.from_pubkey(key_pair.public_key)), key_pair)


def data_port(router: Libp2pRouter) -> int:
    return Address.parse(router.data_addresses[0]).port


async def knock(router: Libp2pRouter, gater: ConnectionGater | None) -> None:
    """A connection to the data port; raises HandshakeFailed where it is refused during the handshake."""
    stream = await trio.open_tcp_stream("127.0.0.1", data_port(router))
    _, wire = await noise_handshake(stream, somebody(), router.node_id, gater)
    wire.abort()


def test_a_gater_keeps_its_proofs_in_the_directory_that_it_is_given() -> None:
    part = PeerDirectory().membership_keys
    assert ConnectionGater(peers=part)._proved_with is part
    assert ConnectionGater()._proved_with is not None


def test_a_file_of_keys_is_read_again_only_when_it_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The gater looks every few seconds: it would fill the log, and read the disk, for nothing."""
    caplog.set_level("INFO", "swarmllm")
    file = NetworkFile(tmp_path)
    network = file.change(lambda _: private_network(new_secret()))
    gater = ConnectionGater(network, file=file)
    for _ in range(3):
        gater.refresh()
    assert caplog.messages == []
    file.change(lambda known: known.rotated(new_secret(), 0.0, 0.0))
    for _ in range(3):
        gater.refresh()
    assert caplog.messages == ["the network's keys were read again"]


def test_a_gater_forgets_what_those_proved_who_have_left() -> None:
    """Else it would keep a key of everybody who was ever connected."""
    part = PeerDirectory().membership_keys
    secret = new_secret()
    gater = ConnectionGater(private_network(secret), peers=part)
    here, gone = node_id_named("here"), node_id_named("gone")
    for each in (here, gone):
        part.put(each, secret)
    assert gater.outdated([here]) == []
    assert list(part) == [here]
    part.put(here, new_secret())
    assert gater.outdated([here]) == [here], "the key that it proved to know is accepted no more"


def test_connected_nodes_that_are_no_longer_let_in_are_outdated() -> None:
    bad, good = node_id_named("bad"), node_id_named("good")

    class Lists(AdmitAll):
        def lets_in(self, node_id: NodeId) -> bool:
            return node_id != bad

    assert ConnectionGater(admission=Lists()).outdated([good, bad]) == [bad]


def test_requests_of_a_peer_are_kept_while_any_is_under_way() -> None:
    requests = PeerRequests()
    assert requests.is_empty
    for each in (requests.waited_for, requests.outgoing):
        each.add(object())  # type: ignore[arg-type]
        assert not requests.is_empty
        each.clear()
    requests.n_incoming = 1
    assert not requests.is_empty


async def test_members_meet_and_exchange_everything(swarms: Swarms) -> None:
    network = private_network(new_secret())
    a = await swarms.start("a", network)
    b = await swarms.start("b", network, *a.addresses)
    await meet(a, b)
    await until(a, lambda: a.records().get(b.node_id) == b"b")
    arrived = trio.Event()

    async def answer(sender: str, body: bytes) -> bytes:
        return body

    async def note(sender: str, header: bytes, payload: memoryview) -> None:
        arrived.set()

    a.serve(answer, note)
    with trio.fail_after(DEADLINE_S):
        assert await b.request(a.node_id, b"hello") == b"hello"
        await b.send(a.node_id, b"hello")
        await arrived.wait()
    assert [peer.data_plane for peer in b.peers()] == ["direct"]
    # Gossip too has its way, on topics of the network's own.
    await b.publish(b"news")
    await until(a, lambda: a.records()[b.node_id] == b"news")


class LostSession:
    """A libp2p session whose other end is gone."""

    def __init__(self) -> None:
        self.n_closed = 0
        self.conn = self

    def get_remote_peer(self) -> NodeId:
        return node_id_named("a")

    def __getattr__(self, name: str) -> Any:
        raise OSError("gone")

    async def close(self) -> None:
        self.n_closed += 1


@pytest.mark.parametrize("dialled", [True, False])
async def test_a_session_that_is_lost_in_the_proof_is_closed_and_refused(dialled: bool) -> None:
    session = LostSession()
    with pytest.raises(ConnectionGated, match="no proof of membership: OSError"):
        await ConnectionGater(private_network(new_secret())).check(session, dialled=dialled)
    assert session.n_closed == 1


@pytest.mark.parametrize("outside", [OPEN_SWARM, private_network(bytes(32))], ids=["open", "other key"])
async def test_an_outsider_gets_a_closed_connection_on_both_planes(swarms: Swarms, outside: Network) -> None:
    network = private_network(new_secret())
    a = await swarms.start("a", network)
    b = await swarms.start("b", network, *a.addresses)
    outsider = await swarms.start("outsider", outside)
    await meet(a, b)
    with pytest.raises(NodeUnreachable):
        await outsider.connect(a.addresses[0], timeout_s=DEADLINE_S)
    with pytest.raises(NodeUnreachable):
        await a.connect(outsider.addresses[0], timeout_s=DEADLINE_S)
    with pytest.raises(HandshakeFailed):
        await knock(a, ConnectionGater(private_network(new_secret())))
    assert outsider.records().keys() == {outsider.node_id}
    assert a.connected() == {b.node_id}
    assert outsider.node_id not in a.records()


async def test_a_stock_libp2p_host_is_not_even_told_the_protocols(swarms: Swarms) -> None:
    a = await swarms.start("a", private_network(new_secret()))
    host = new_host(key_pair=create_new_key_pair())
    async with host.run(listen_addrs=[]):
        with pytest.raises(SwarmException), trio.fail_after(DEADLINE_S):
            await host.connect(info_from_p2p_addr(Multiaddr(a.addresses[0])))
        assert not host.get_peerstore().get_protocols(ID.from_base58(a.node_id))
        await host.close()


async def test_what_an_outsider_says_first_is_answered_with_the_end(swarms: Swarms) -> None:
    a = await swarms.start("a", private_network(new_secret()))
    for said in (b"", b"\x13/multistream/1.0.0\n", bytes(2 * PROOF_BYTES), bytes(60_000)):
        stream = await trio.open_tcp_stream("127.0.0.1", data_port(a))
        _, wire = await noise_handshake(stream, somebody(), a.node_id)
        with trio.fail_after(DEADLINE_S):
            await wire.write([said])
            with pytest.raises(Exception, match=r"ended|lost"):
                await wire.receive()
        wire.abort()


async def test_a_proof_is_worth_nothing_elsewhere() -> None:
    secret = new_secret()
    made = proof(secret, b"\0", b"one handshake")
    assert made == proof(secret, b"\0", b"one handshake")
    others = (
        proof(secret, b"\0", b"another handshake"),
        proof(secret, b"\1", b"one handshake"),
        proof(new_secret(), b"\0", b"one handshake"),
    )
    assert made not in others


async def test_a_key_changes_without_a_restart_and_the_old_one_runs_out(
    swarms: Swarms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmllm.swarm.libp2p_router._MEMBERSHIP_CHECK_S", 0.5)
    network = private_network(new_secret())
    a = await swarms.start("a", network)
    b = await swarms.start("b", network, *a.addresses)
    await meet(a, b)
    new = new_secret()
    # What `network rotate --overlap-days 0` writes: whoever has only the old key is out.
    swarms.file("a").change(lambda known: known.rotated(new, 0.0, 0.0))
    await until(a, lambda: not a.connected())
    with pytest.raises(HandshakeFailed):
        await knock(a, ConnectionGater(network))
    swarms.file("b").change(lambda known: known.rotated(new, 0.0, 0.0))
    await until(a, lambda: a.connected() == {b.node_id})


async def test_during_the_overlap_either_key_opens_the_door(swarms: Swarms) -> None:
    old, new = new_secret(), new_secret()
    network = private_network(old)
    # Beyond any clock of this test.
    both = network.rotated(new, 1e10, 1e9)
    only_new = Network(network_id=network.network_id, keys=(NetworkKey(secret=new),))
    a = await swarms.start("a", both)
    b = await swarms.start("b", network, *a.addresses)
    c = await swarms.start("c", only_new, *a.addresses)
    await meet(a, b)
    await meet(a, c)
    assert b.node_id not in c.connected()


async def test_a_denied_node_is_let_in_by_neither_plane(swarms: Swarms) -> None:
    denied = await swarms.start("denied", OPEN_SWARM)
    a = await swarms.start("a", OPEN_SWARM, lists=PeerLists(deny=frozenset({denied.node_id})))
    with pytest.raises(NodeUnreachable):
        await a.connect(denied.addresses[0], timeout_s=DEADLINE_S)
    with pytest.raises(NodeUnreachable):
        await denied.connect(a.addresses[0], timeout_s=DEADLINE_S)
    assert a.connected() == denied.connected() == frozenset()


async def test_where_only_the_allowed_come_in_others_stay_outside(swarms: Swarms) -> None:
    friend = await swarms.start("friend", OPEN_SWARM)
    stranger = await swarms.start("stranger", OPEN_SWARM)
    lists = PeerLists(allow=frozenset({friend.node_id}), only_allowed=True)
    a = await swarms.start("a", OPEN_SWARM, lists=lists)
    await a.connect(friend.addresses[0], timeout_s=DEADLINE_S)
    with pytest.raises(NodeUnreachable):
        await stranger.connect(a.addresses[0], timeout_s=DEADLINE_S)
    assert a.connected() == {friend.node_id}


def test_names_of_prefixes_have_the_key_of_a_private_swarm_and_none_in_the_open_one() -> None:
    assert Network().prefix_key == ""
    one, other = (private_network(new_secret()).prefix_key for _ in range(2))
    assert len(one) == len(other) == 64
    assert one != other
