"""Reaches nodes that this node is not connected to, or cannot dial, by the DHT and relays.

The DHT names candidates; only those that can be connected with count, and what they have they say themselves.
A search that failed a moment ago is not repeated: a mistyped name would query the whole swarm each time.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import trio

from swarmllm.errors import SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.swarm.discovery.address_sources import usable
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.dht.dht import Dht, DhtParts
from swarmllm.swarm.discovery.dht.messages import RELAY_KEY, Contact, keys_of, model_key, name_key
from swarmllm.swarm.discovery.dht.serving import DhtNode
from swarmllm.swarm.discovery.dht.table import KEYS_PER_NODE
from swarmllm.swarm.discovery.relay.client import Circuits, Relaying, RelayUse
from swarmllm.swarm.discovery.relay.hole_punching import Punching
from swarmllm.swarm.discovery.relay.service import RelayService, Reservation
from swarmllm.swarm.libp2p.host import Host
from swarmllm.swarm.membership.connection_gater import ConnectionGater
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.records.spread import RecordSpread
from swarmllm.swarm.router import DhtStatistics, Reachability
from swarmllm.swarm.settings import SwarmSettings
from swarmllm_proto.identifiers import ModelId, NodeId

log = logging.getLogger(__name__)

SEEK_S = 20.0
SEEK_AGAIN_S = 20.0
_SEEKING_MAX = 4
_REMEMBERED_MAX = 256
_MEET_S = 8.0
RELAYS_MET: Final = 4
"""Of those that the DHT names, at a time."""
PUNCHED_MAX = 6
"""Addresses of one node that are dialled at the agreed moment."""


class WideAreaUser(Protocol):
    """The part of the router that this module uses."""

    @property
    def reachability(self) -> Reachability | None: ...

    def connected(self) -> frozenset[NodeId]:
        """The peers that count."""
        ...

    async def meet(self, node_id: NodeId, addresses: list[Address], timeout_s: float) -> NodeId:
        """Connect with a node, if it is not connected. Raises an error of our tree."""
        ...

    def met_in_passing(self, node_id: NodeId) -> None:
        """A connection with it was made for one question: it ends on good terms if nothing else comes."""
        ...

    async def turned_direct(self, node_id: NodeId) -> None:
        """There is a direct connection to a peer that was reached through a relay."""
        ...


@dataclass(frozen=True, slots=True)
class WideAreaParts:
    dht: DhtParts
    reservations: Parts[Reservation]
    n_circuits: Parts[int]
    """Circuits over this node that a peer is an end of."""
    relays: Parts[RelayUse]
    punching: Parts[bool]
    """Peers with which a moment is being agreed on."""


class WideArea:
    """A ModelDiscovery."""

    def __init__(
        self,
        dht: Dht,
        user: WideAreaUser,
        relaying: Relaying,
        relay_service: RelayService | None,
    ) -> None:
        self.dht = dht
        self.relaying = relaying
        self.relay_service = relay_service
        self._user = user
        self._random = random.Random()
        self._services = () if relay_service is None else (RELAY_KEY,)
        self.dht.provide(self._services)
        self._turns = trio.Semaphore(_SEEKING_MAX)
        self._in_vain_at_s: dict[str, float] = {}

    def announce(self, models: Iterable[tuple[ModelId, str]]) -> None:
        """See ModelDiscovery."""
        keys = dict.fromkeys(
            key for model_id, name in models for key in (model_key(model_id), name_key(name))
        )
        self.dht.provide([*self._services, *keys][:KEYS_PER_NODE])

    async def seek(self, name_or_id: str) -> bool:
        """See ModelDiscovery."""
        now = trio.current_time()
        if now - self._in_vain_at_s.get(name_or_id, -math.inf) < SEEK_AGAIN_S:
            return False
        async with self._turns:
            with trio.move_on_after(SEEK_S):
                for key in keys_of(name_or_id):
                    if await self._meet_all(await self.dht.find_providers(key)):
                        return True
        if len(self._in_vain_at_s) >= _REMEMBERED_MAX:
            del self._in_vain_at_s[next(iter(self._in_vain_at_s))]
        self._in_vain_at_s[name_or_id] = trio.current_time()
        return False

    async def meet_relays(self) -> None:
        """Connect with some of the nodes that volunteer as relays."""
        with trio.move_on_after(SEEK_S):
            found = await self.dht.find_providers(RELAY_KEY, n_enough=RELAYS_MET)
            chosen = self._random.sample(found, min(RELAYS_MET, len(found)))
            strangers = [contact for contact in chosen if contact.node_id not in self._user.connected()]
            await self._meet_all(strangers)
            for contact in strangers:
                self._user.met_in_passing(contact.node_id)

    def relayed(self) -> set[NodeId]:
        """Those through which this node can be reached, and those that use it as a relay: their connections
        carry what nobody here sees."""
        using = () if self.relay_service is None else self.relay_service.book.users()
        return {*self.relaying.relays, *self.relaying.circuits.carriers(), *using}

    def statistics(self) -> DhtStatistics:
        return self.dht.statistics()

    async def _meet_all(self, contacts: Iterable[Contact]) -> bool:
        strangers = [contact for contact in contacts if contact.node_id not in self._user.connected()]
        n_met = 0

        async def meet(contact: Contact) -> None:
            nonlocal n_met
            try:
                await self._user.meet(contact.node_id, list(contact.addresses), _MEET_S)
            except SwarmLLMError as error:
                provoked_by(log, contact.node_id).info(
                    "node %s, named by the DHT: %s", contact.node_id, error.message
                )
            else:
                n_met += 1

        async with trio.open_nursery() as nursery:
            for contact in strangers:
                nursery.start_soon(meet, contact)
        return n_met > 0


class _Node(DhtNode):
    """What the DHT and the relays ask about this node."""

    def __init__(
        self,
        host: Host,
        gater: ConnectionGater,
        spread: RecordSpread,
        user: WideAreaUser,
        *,
        uses_relays: bool,
    ) -> None:
        self._host = host
        self._gater = gater
        self._spread = spread
        self._user = user
        self._uses_relays = uses_relays
        self.search_relays: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint

    def addresses_of(self, node_id: NodeId) -> tuple[Address, ...]:
        return tuple(usable(self.addresses(node_id)))

    def connected(self) -> Collection[NodeId]:
        return self._host.connected()

    def lets_in(self, node_id: NodeId) -> bool:
        return self._gater.lets_in(node_id)

    def serves(self) -> bool:
        """True until a peer has failed to dial this node."""
        found = self._user.reachability
        return found is None or any(reached for _, reached in found.control)

    def knows_the_swarm(self) -> bool:
        """By gossip, until records no longer all fit."""
        return self._spread.book.has_room

    def met_in_passing(self, node_id: NodeId) -> None:
        self._user.met_in_passing(node_id)

    def addresses(self, node_id: NodeId) -> tuple[str, ...]:
        envelope = self._spread.own if node_id == self._host.node_id else self._spread.envelope(node_id)
        return envelope.addresses if envelope else ()

    def is_hidden(self) -> bool:
        return self._uses_relays and not self.serves()

    def counted(self) -> Collection[NodeId]:
        return self._user.connected()

    async def meet_relays(self) -> None:
        await self.search_relays()

    async def tell(self, addresses: tuple[str, ...]) -> None:
        await self._spread.reach_through(addresses)

    def own_addresses(self) -> tuple[Address, ...]:
        """Where another saw this node's connections come from, and what it knows of itself."""
        own, found = self.addresses_of(self._host.node_id), self._user.reachability
        seen = [Address(found.observed_ip, self._host.port)] if found and found.observed_ip else []
        return tuple(dict.fromkeys((*seen, *own)))[:PUNCHED_MAX]

    def known_addresses(self, node_id: NodeId) -> tuple[Address, ...]:
        return self.addresses_of(node_id)[:PUNCHED_MAX]

    async def turned_direct(self, node_id: NodeId) -> None:
        await self._user.turned_direct(node_id)


def open_wide_area(
    host: Host,
    nursery: trio.Nursery,
    gater: ConnectionGater,
    settings: SwarmSettings,
    spread: RecordSpread,
    user: WideAreaUser,
    parts: WideAreaParts,
) -> WideArea:
    node = _Node(host, gater, spread, user, uses_relays=settings.relay)
    dht = Dht(
        host,
        nursery,
        node,
        network_id=gater.network_id,
        mode=settings.dht,
        parts=parts.dht,
    )
    punching = Punching(host, node, parts.punching)
    circuits = Circuits(host, punching.punch if settings.hole_punching else None, parts.relays)
    relaying = Relaying(host, circuits, node, random.Random())
    if settings.relay:
        host.detour = relaying.detour
    relay_service = (
        RelayService(host, parts.reservations, settings.relay_limits, parts.n_circuits)
        if settings.relay_service
        else None
    )
    wide_area = WideArea(dht, user, relaying, relay_service)
    node.search_relays = wide_area.meet_relays
    return wide_area
