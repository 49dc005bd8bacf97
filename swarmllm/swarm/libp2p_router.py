"""The Router over a real network: libp2p for control, direct TCP for data.

This file composes: `RecordSpread` knows what everybody says about themselves, `Liveness` who is connected,
`Dialler` whom to look for, `RequestProtocol` and `DataPlane` carry the bytes.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import trio

from swarmllm.errors import DeadlineExceeded, RemoteError
from swarmllm.private_files import locked_data_dir
from swarmllm.shared_ticks import REST_TICK_S, sleep_until_tick
from swarmllm.supervision import spawn, supervise, supervise_started
from swarmllm.swarm.byte_budget import ByteBudget
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.data.bulk import NoBulkConnection
from swarmllm.swarm.data.data_plane import DataPlane
from swarmllm.swarm.data.neighbour import peer_info
from swarmllm.swarm.discovery.address_sources import AddressSources, usable
from swarmllm.swarm.discovery.addresses import Address, NodeAddress, is_loopback, own_addresses
from swarmllm.swarm.discovery.dialler import Dialler
from swarmllm.swarm.discovery.peer_exchange import PeerExchange
from swarmllm.swarm.discovery.port_mapping import PortMapping
from swarmllm.swarm.discovery.reachability import DialBacks, ReachabilityChecks
from swarmllm.swarm.discovery.wide_area import open_wide_area
from swarmllm.swarm.in_memory.link import LinkQuality, MemoryLink
from swarmllm.swarm.libp2p.exception_groups import unwrapped
from swarmllm.swarm.libp2p.gossip import Gossip, run_gossip
from swarmllm.swarm.libp2p.host import Host, open_listeners, run_libp2p
from swarmllm.swarm.libp2p.request_protocol import RequestProtocol
from swarmllm.swarm.libp2p.silent_connections import SilentConnections
from swarmllm.swarm.membership.connection_gater import ConnectionGater
from swarmllm.swarm.membership.identity import Identity, load_or_create_identity, verify
from swarmllm.swarm.membership.network_key import NetworkFile
from swarmllm.swarm.peers.connection_limits import Standing, Standings
from swarmllm.swarm.peers.directory import PeerDirectory
from swarmllm.swarm.peers.liveness import Liveness
from swarmllm.swarm.peers.reachable import ReachableNodes
from swarmllm.swarm.peers.reachable_index import Needed
from swarmllm.swarm.peers.spare_connections import SpareConnections
from swarmllm.swarm.peers.store import KnownPeers, open_peer_memory
from swarmllm.swarm.peers.trust import NO_TRUST, PeerTrust
from swarmllm.swarm.peers.unused_connections import UnusedConnections
from swarmllm.swarm.records.details_exchange import Interests
from swarmllm.swarm.records.exchange import (
    KIND_APPLICATION,
    KIND_DIAL_BACK,
    KIND_LET_GO,
    KIND_MAY_LET_GO,
    KIND_PEERS,
)
from swarmllm.swarm.records.spread import TOPIC_SIZES_BYTES, RecordSpread, next_incarnation
from swarmllm.swarm.router import (
    Change,
    LinkEnd,
    LinkHandler,
    MessageHandler,
    PeerInfo,
    PortMappingState,
    Reachability,
    RequestHandler,
    RequestRefused,
    check_load,
    check_message,
    check_record,
    check_request,
)
from swarmllm.swarm.router import answer as run_request_handler
from swarmllm.swarm.router import deliver as run_message_handler
from swarmllm.swarm.settings import SwarmSettings
from swarmllm_proto.envelope import Envelope
from swarmllm_proto.identifiers import Multiaddr, NodeId

log = logging.getLogger(__name__)

_GOODBYE_S = 1.0
_EXCHANGE_S = 30.0
"""For a question of the swarm's own. A connection whose other end is dead ends sooner, and a question that is
given up where everybody is short of processor time is asked again, which takes what is left of it."""
_MEMBERSHIP_CHECK_S = REST_TICK_S
_FORGET_S = 15.0
_REACH_S = 5.0


class Libp2pRouter:
    """Use `open_libp2p_router`."""

    def __init__(
        self,
        identity: Identity,
        gater: ConnectionGater,
        host: Host,
        nursery: trio.Nursery,
        started_at_ms: int,
        memory: KnownPeers,
        settings: SwarmSettings,
        directory: PeerDirectory,
        trust: PeerTrust,
    ) -> None:
        note = trust.note
        self.directory = directory
        self._connected = directory.liveness.connected_since_s
        self.budget = ByteBudget.of_mib(settings.strangers_mib, directory.held_bytes)
        self._identity = identity
        self._gater = gater
        self._nursery = nursery
        self._feed = ChangeFeed()
        self._gossip: Gossip | None = None
        self._on_request: RequestHandler | None = None
        self._on_message: MessageHandler | None = None
        self._dialler = dialler = Dialler(
            identity.node_id,
            random.Random(),
            settings.max_peers,
            gater,
            directory.candidates,
            heard_at_s=lambda node_id: self.spread.book.heard_at_s(node_id),
        )
        self.address_sources = AddressSources(host, nursery, dialler, gater)
        self._requests = RequestProtocol(
            host, nursery, self._answer, budget=self.budget, note=note, peers=directory.requests
        )
        self.host = host
        self.plane = DataPlane(
            identity,
            gater,
            host,
            nursery,
            self,
            note=note,
            budget=self.budget,
            neighbours=directory.neighbours,
            bulk_peers=directory.bulk_peers,
            connections_max=settings.max_connections,
            hole_turns=directory.hole_turns,
            hole_punching=settings.hole_punching,
        )
        self.spread = RecordSpread(
            identity,
            verify,
            started_at_ms,
            nursery,
            self._feed,
            ask=self._ask,
            connected=self._connected,
            listener=self,
            note=note,
            parts=directory.records,
            whole_records_max=settings.whole_records_max,
            dial=self._meet_for_details,
            direct_loads=self.plane,
        )
        self._reachable = ReachableNodes(
            self.spread.book, dialler, self._connected, self._feed, directory.uses
        )
        self._liveness = Liveness(
            host,
            nursery,
            self._feed,
            dialler,
            self._requests,
            self._exchange_records,
            gater,
            directory.liveness,
            settings.max_connections,
        )
        self._unused = UnusedConnections(
            nursery,
            self._liveness,
            self._reachable,
            SpareConnections(settings.max_peers, directory.uses, self._is_chosen, random.Random()),
            self._ask,
            self.plane.status,
            lambda: self.wide_area.relayed(),
            self._gossiping,
            settings.max_peers,
        )
        self._dial_backs = DialBacks(identity, gater, self.spread, host, directory.dial_back_turns)
        self._checks = ReachabilityChecks(
            partial(self._ask_kind, KIND_DIAL_BACK), self._connected, random.Random(), note
        )
        self._port_mapping = PortMapping(self.spread, self._checks, lambda: (host.port, self.plane.port))
        self._peer_exchange = PeerExchange(partial(self._ask_kind, KIND_PEERS), self, note)
        wide_area = directory.wide_area
        self.wide_area = open_wide_area(host, nursery, gater, settings, self.spread, self, wide_area)
        self._memory = memory
        self._to_self = MemoryLink(identity.node_id, self.deliver, LinkQuality())

    def __repr__(self) -> str:
        return f"<Libp2pRouter {self.node_id} connected={len(self._connected)}>"

    @property
    def node_id(self) -> NodeId:
        return self._identity.node_id

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(f"{address}/p2p/{self.node_id}" for address in self.spread.own.addresses)

    @property
    def data_addresses(self) -> tuple[str, ...]:
        return self.spread.own.data_addresses

    @property
    def reachability(self) -> Reachability | None:
        return self._checks.result

    @property
    def port_mapping(self) -> PortMappingState:
        return self._port_mapping.state

    def records(self) -> Mapping[NodeId, bytes]:
        return self.spread.records

    async def publish(self, record: bytes) -> None:
        check_record(record)
        await self.spread.publish(bytes(record))

    async def publish_details(self, record: bytes, *, soon: bool) -> bool:
        check_record(record)
        return await self.spread.publish_details(bytes(record), soon=soon)

    def loads(self) -> Mapping[NodeId, bytes]:
        return self.spread.loads()

    async def publish_load(self, load: bytes) -> None:
        check_load(load)
        await self.spread.publish_load(load)

    def connected(self) -> frozenset[NodeId]:
        return frozenset(self._connected)

    def reachable(self) -> frozenset[NodeId]:
        return self._reachable.at(trio.current_time())

    def untried(self) -> frozenset[NodeId]:
        return self._reachable.untried(trio.current_time())

    def prefer_untried(self, needed: Needed) -> None:
        """At most UNTRIED_MAX nodes that were never connected count as reachable. Where more are known, those
        in the sets of `needed` come first."""
        self._reachable.needed = needed

    def want_details(self, interests: Interests) -> None:
        """Of the nodes in these sets, the details of their records are asked for where they come apart."""
        self.spread.details.interests = interests

    def watch_while(self, is_working: Callable[[], bool]) -> None:
        """While that is so, a frozen node is noticed as soon as one that messages go to (see `keepalive`)."""
        self.plane.watch_while(is_working)

    async def reach(self, node_id: NodeId, *, timeout_s: float = _REACH_S) -> None:
        if node_id == self.node_id:
            await trio.lowlevel.checkpoint()
            return
        if node_id in self._connected:
            self._liveness.warm(node_id)
            await trio.lowlevel.checkpoint()
            return
        began_s = trio.current_time()
        if node_id not in self.reachable():
            # It has dialled this node, which has never heard of it.
            with trio.move_on_after(timeout_s):
                await self._liveness.exchanged(node_id)
        elif self.host.is_connected(node_id):
            self._liveness.warm(node_id)
            await trio.lowlevel.checkpoint()
            return
        self.plane.dial_beside(node_id)
        await self._reachable.reach(node_id, max(0.0, began_s + timeout_s - trio.current_time()))
        self._liveness.warm(node_id)

    def peers(self) -> tuple[PeerInfo, ...]:
        return tuple(
            peer_info(node_id, self.spread.envelope(node_id), self.plane.status(node_id), since_s)
            for node_id, since_s in sorted(self._connected.items())
        )

    def changes(self) -> AbstractAsyncContextManager[AsyncIterator[Change]]:
        return self._feed.subscribe()

    def serve(self, on_request: RequestHandler, on_message: MessageHandler) -> None:
        self._on_request, self._on_message = on_request, on_message

    async def connect(self, address: str, *, timeout_s: float = 10.0) -> NodeId:
        """Returns once the node counts as connected."""
        return await self.address_sources.connect(address, self._feed, self.connected, timeout_s)

    async def request(self, node_id: NodeId, body: bytes, *, timeout_s: float = 10.0) -> bytes:
        check_request(body)
        if node_id == self.node_id:
            return await self._request_to_self(body, timeout_s)
        left_s = await self._have_connected(node_id, timeout_s)
        return await self._requests.request(node_id, KIND_APPLICATION, bytes(body), timeout_s=left_s)

    async def fetch(self, node_id: NodeId, body: bytes, *, timeout_s: float = 10.0) -> bytes | memoryview:
        check_request(body)
        began_s = trio.current_time()
        if node_id == self.node_id:
            return await self._request_to_self(body, timeout_s)
        left_s = await self._have_connected(node_id, timeout_s)
        try:
            if node_id in self._connected:
                return await self.plane.bulk.fetch(node_id, bytes(body), left_s)
        except NoBulkConnection:
            pass
        left_s = max(0.0, began_s + timeout_s - trio.current_time())
        return await self.request(node_id, body, timeout_s=left_s)

    async def send(self, node_id: NodeId, header: bytes, payload: bytes | memoryview = b"") -> None:
        size_bytes = check_message(header, payload)
        if node_id == self.node_id:
            await self._to_self.send(bytes(header), bytes(payload), size_bytes)
            return
        if node_id not in self._connected and not self.plane.has_connection(node_id):
            await self.reach(node_id)
        await self.plane.send(node_id, header, payload)

    def send_now(self, node_id: NodeId, header: bytes, payload: bytes | memoryview = b"") -> bool:
        return self.plane.send_now(node_id, header, payload)

    async def open_link(self, node_id: NodeId, purpose: str) -> LinkEnd:
        await self.reach(node_id)
        return await self.plane.open_link(node_id, purpose)

    def serve_links(self, on_link: LinkHandler) -> None:
        self.plane.on_link = on_link

    def begin(
        self,
        gossip: Gossip,
        listeners: Sequence[trio.SocketListener],
        ips: Sequence[str],
        bootstrap: list[NodeAddress],
        *,
        maps_ports: bool,
    ) -> None:
        """Take connections, tell of this node, look for others."""
        self._gossip = gossip
        self.plane.serve(listeners)
        self._liveness.begin(self.plane)
        self.spread.begin(
            gossip,
            addresses=tuple(str(Address(ip, self.host.port)) for ip in ips),
            data_addresses=tuple(str(Address(ip, self.plane.port)) for ip in ips),
        )
        supervise(self._nursery, "messages to self", self._to_self.carry)
        self.address_sources.begin(bootstrap, self._liveness.dial)
        self.address_sources.remembered(self._memory.known)
        supervise(self._nursery, "peer memory", self._memory.run, self.connected_addresses)
        supervise(self._nursery, "reachability checks", self._checks.run)
        if maps_ports:
            supervise(self._nursery, "port mapping", self._port_mapping.run)
        silent = SilentConnections(self.host.all_muxers, self.plane.has_connection, self._nursery)
        supervise(self._nursery, "libp2p pings", silent.run)
        supervise(self._nursery, "peer expiry", self._forget_peers)
        supervise(self._nursery, "membership checks", self._keep_members_only)
        supervise(self._nursery, "DHT", self.wide_area.dht.run)
        supervise(self._nursery, "relay reservations", self.wide_area.relaying.run)

    async def stop(self) -> None:
        """Leave: tell the neighbours, and take nothing from peers any more."""
        self.host.ignore_peers()
        with trio.move_on_after(_GOODBYE_S):
            await self.plane.send_goodbye()

    # What the packages below ask of their router.

    def heard(self, envelope: Envelope) -> None:
        self.plane.forgive(envelope.node_id)
        self.address_sources.heard(envelope)

    def forgotten(self, node_id: NodeId) -> None:
        self._dialler.forget(node_id)

    def is_lost(self, node_id: NodeId, heard_at_s: float) -> bool:
        return self._dialler.is_lost(node_id, heard_at_s)

    def data_addresses_of(self, node_id: NodeId) -> list[Address]:
        envelope = self.spread.envelope(node_id)
        return usable(envelope.data_addresses) if envelope else []

    def own_data_addresses(self) -> list[Address]:
        found = self.reachability
        seen = [Address(found.observed_ip, self.plane.port)] if found and found.observed_ip else []
        return [*seen, *usable(self.data_addresses)]

    def observers(self) -> list[NodeId]:
        relays = self.wide_area.relaying.relays
        return sorted(filter(self.host.is_direct, self._connected), key=lambda node_id: node_id not in relays)

    def lost(self, node_id: NodeId, how: str) -> None:
        self._liveness.drop(node_id, how)

    def load_came(self, node_id: NodeId, load: bytes) -> None:
        self.spread.direct_load_came(node_id, load)

    def met_in_passing(self, node_id: NodeId) -> None:
        self._reachable.met_in_passing(node_id, trio.current_time())

    async def meet(self, node_id: NodeId, addresses: list[Address], timeout_s: float) -> NodeId:
        """See AddressSources.meet."""
        return await self.address_sources.meet(self._feed, self.connected, node_id, addresses, timeout_s)

    async def turned_direct(self, node_id: NodeId) -> None:
        await self.plane.turn_to_direct(node_id)

    def connected_addresses(self) -> list[tuple[NodeId, tuple[Multiaddr, ...]]]:
        envelopes = [self.spread.envelope(node_id) for node_id in self._connected]
        return [(envelope.node_id, envelope.addresses) for envelope in envelopes if envelope is not None]

    def n_heard_of(self) -> int:
        return len(self.spread.book)

    def remembered_addresses(self) -> list[tuple[NodeId, tuple[Multiaddr, ...]]]:
        return self._memory.known

    def hear(self, node_id: NodeId, addresses: list[Address]) -> None:
        self.address_sources.add_suggested(node_id, addresses)

    async def answer(self, sender: NodeId, body: bytes) -> bytes:
        return await run_request_handler(self._on_request, sender, body)

    async def deliver(self, sender: NodeId, header: bytes, payload: memoryview) -> None:
        await run_message_handler(self._on_message, sender, header, payload)

    # What it does itself.

    async def _meet_for_details(self, node_id: NodeId) -> None:
        await self._reachable.reach(node_id, _REACH_S, in_passing=True)

    async def _exchange_records(self, node_id: NodeId) -> None:
        await self.spread.synchronise(node_id)
        self.wide_area.dht.met(node_id)
        spawn(self._nursery, "peer", self._peer_exchange.learn_from, node_id)

    async def _ask_kind(self, kind: int, node_id: NodeId, body: bytes) -> bytes:
        return await self._ask(node_id, kind, body)

    async def _ask(self, node_id: NodeId, kind: int, body: bytes) -> bytes:
        return await self._requests.request(node_id, kind, body, timeout_s=_EXCHANGE_S)

    async def _answer(self, sender: NodeId, kind: int, body: bytes) -> bytes:
        if kind == KIND_DIAL_BACK:
            return await self._dial_backs.answer(sender, body)
        if kind == KIND_LET_GO:
            self._liveness.peer_lets_go(sender)
            return b""
        if kind == KIND_MAY_LET_GO:
            return self._unused.may_end(sender, trio.current_time())
        if kind == KIND_PEERS:
            return self._peer_exchange.answer(sender, body)
        if kind != KIND_APPLICATION:
            return self.spread.answer(sender, kind, body)
        self._reachable.used(sender, trio.current_time())
        return await self.answer(sender, body)

    async def _have_connected(self, node_id: NodeId, timeout_s: float) -> float:
        """What is left of the time when there is a connection. Raises NodeUnreachable, DeadlineExceeded."""
        now = trio.current_time()
        self._reachable.used(node_id, now)
        self.plane.used(node_id)
        self._liveness.warm(node_id)
        # A peer may have greeted this node before this node has greeted it: to answer it must be possible.
        if node_id in self._connected or self.host.is_connected(node_id):
            return timeout_s
        await self.reach(node_id, timeout_s=min(timeout_s, _REACH_S))
        return max(0.0, now + timeout_s - trio.current_time())

    async def _request_to_self(self, body: bytes, timeout_s: float) -> bytes:
        with trio.move_on_after(timeout_s):
            try:
                return await run_request_handler(self._on_request, self.node_id, bytes(body))
            except RequestRefused as refusal:
                raise RemoteError(f"node {self.node_id}: {refusal}") from None
        raise DeadlineExceeded(f"node {self.node_id} did not answer within {timeout_s:g} s")

    async def _forget_peers(self) -> None:
        while True:
            await sleep_until_tick(_FORGET_S)
            now = trio.current_time()
            self.directory.tidy(now)
            self._reachable.announce_changes(now)
            self._unused.end(now)

    def _is_chosen(self, node_id: NodeId) -> bool:
        return self.host.has_dialled(node_id) or self._gater.standing(node_id) > Standing.STRANGER

    def _gossiping(self) -> set[NodeId]:
        return set() if self._gossip is None else self._gossip.neighbours()

    async def _keep_members_only(self) -> None:
        """A proof is made once per connection, and keys are taken back while connections live on."""
        while True:
            await sleep_until_tick(_MEMBERSHIP_CHECK_S)
            await trio.to_thread.run_sync(self._gater.refresh)
            for node_id in self._gater.outdated({*self.host.connected(), *self.connected()}):
                self._liveness.drop(node_id, "no longer let in")


def open_libp2p_router(
    settings: SwarmSettings,
    trust: PeerTrust = NO_TRUST,
    directory: PeerDirectory | None = None,
) -> AbstractAsyncContextManager[Libp2pRouter]:
    """Join the swarm until the context is left; leaving says goodbye. `directory`: where the packages
    of this node keep what they hold of peers.

    Raises ConfigError (folder in use, unreadable identity, port taken) and InvalidRequest (an address in the
    settings). What is raised inside the context comes out as it is, unless something else fails at the same
    time.
    """
    directory = PeerDirectory() if directory is None else directory
    return unwrapped(_running_router(settings, trust, directory))


@asynccontextmanager
async def _running_router(
    settings: SwarmSettings,
    trust: PeerTrust,
    directory: PeerDirectory,
) -> AsyncIterator[Libp2pRouter]:
    bootstrap = [NodeAddress.parse(text, field="bootstrap") for text in settings.bootstrap]
    own = await trio.to_thread.run_sync(own_addresses, settings.listen_host, settings.announce)
    with locked_data_dir(settings.data_dir):
        identity = await trio.to_thread.run_sync(load_or_create_identity, settings.data_dir)
        started_at_ms = await trio.to_thread.run_sync(
            next_incarnation, settings.data_dir, time.time_ns() // 1_000_000
        )
        network_file = NetworkFile(settings.data_dir)
        network = await trio.to_thread.run_sync(network_file.read)
        bootstrap += [NodeAddress.parse(text, field="data_dir") for text in network.bootstrap]
        memory = await trio.to_thread.run_sync(
            open_peer_memory, settings.data_dir, network.network_id, directory.remembered
        )
        named = {*settings.lists.allow, *(where.node_id for where in bootstrap)}
        standings = Standings(named, directory.remembered, trust, settings.lists)
        gater = ConnectionGater(
            network,
            standings,
            file=network_file,
            peers=directory.membership_keys,
        )
        listeners = await open_listeners(own.listening, settings.data_port)
        async with AsyncExitStack() as stack:
            for listener in listeners:
                await stack.enter_async_context(listener)
            nursery = await stack.enter_async_context(trio.open_nursery())
            # On the way out, after what is entered below has been left: leaving that inside a cancelled scope
            # would put Cancelled in the place of the error that is on its way, and the nursery would swallow
            # it.
            stack.callback(nursery.cancel_scope.cancel)
            host = Host(identity, gater)
            router = Libp2pRouter(
                identity, gater, host, nursery, started_at_ms, memory, settings, directory, trust
            )
            gossip = Gossip(
                network.network_id,
                router.spread,
                TOPIC_SIZES_BYTES,
                trust.note,
                directory.gossip_allowances,
            )

            async def one_life(*, task_status: Any) -> None:
                port = host.port or settings.libp2p_port
                running = run_libp2p(host, own, port, settings.max_connections)
                async with running, run_gossip(gossip, host):
                    task_status.started()
                    await trio.sleep_forever()

            # A new host on the same port, with the same key, is up in well under a second. Peers wait ten
            # seconds for a neighbour that libp2p has lost (see liveness); data connections go on.
            await supervise_started(nursery, "libp2p", one_life)
            router.address_sources.named = named
            is_local = all(map(is_loopback, own.listening))
            maps_ports = settings.port_mapping and not is_local
            router.begin(gossip, listeners, own.announced, bootstrap, maps_ports=maps_ports)
            if settings.mdns and not is_local:
                # 5 MiB (zeroconf) that a node without mDNS does not need.
                from swarmllm.swarm.discovery.mdns import run_mdns

                found = router.address_sources.found_by_mdns
                where = (identity.node_id, network.network_id, own.reachable, host.port)
                supervise(nursery, "mDNS", run_mdns, *where, found)
            try:
                yield router
            finally:
                with trio.CancelScope(shield=True):
                    await router.stop()
