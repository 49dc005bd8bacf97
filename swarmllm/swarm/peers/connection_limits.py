"""Decides which connection is closed when a node has more than its limit: pure.

A new identity costs nothing, so anyone who wants to be in the way can come under hundreds of names. If those
who came first kept their places, a swarm's own members would be left outside; with a limit for each address,
so would the nodes behind one router. So nobody is refused while there is room. After that the connection is
closed

1. of the node that this node knows least of (see Standing),
2. of those, one of the network that has most connections here: an attacker has many names and few networks,
3. of those, the one that came last, so that nobody who stays can be pushed out by waves of newcomers.

The newcomer is one of them. After Bitcoin's way with inbound connections (`src/node/eviction.cpp`).
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

from swarmllm.swarm.membership.peer_lists import NO_LISTS, PeerLists
from swarmllm.swarm.peers.trust import NO_TRUST, PeerTrust
from swarmllm_proto.identifiers import NodeId

CONNECTIONS_MAX: Final = 300
"""Of libp2p, unless the settings say otherwise. A node looks for fewer (`network.max_peers`); the rest is for
those who look for it."""
GAVE_WAY: Final = "its place was needed"
"""How the connections of who gave way ended."""
LET_GO: Final = "nobody uses it"
"""How a connection ends whose ends both live."""
NETWORK_BITS: Final = {4: 24, 6: 48}
"""By version of the protocol: what one customer of a provider often has."""


class Standing(IntEnum):
    """How well this node knows another one, from least to most."""

    PASSING = 0
    """It has no connection on the control plane, where it would count as a peer."""
    STRANGER = 1
    REMEMBERED = 2
    """This node was connected with it in an earlier run."""
    PROVEN = 3
    """It is trusted more than a stranger, so it has done something for this node."""
    NAMED = 4
    """A person wrote it down: as allowed, or as an address to find the swarm by."""


class ConnectionAdmission(Protocol):
    """Says whether another node is admitted, before the two talk."""

    def lets_in(self, node_id: NodeId) -> bool:
        """Whether a connection to that node is wanted at all."""
        ...

    def standing(self, node_id: NodeId) -> Standing: ...


class AdmitAll:
    """Admits everybody, and knows nobody."""

    def lets_in(self, node_id: NodeId) -> bool:
        return True

    def standing(self, node_id: NodeId) -> Standing:
        return Standing.STRANGER


ADMIT_ALL: Final = AdmitAll()


@dataclass(frozen=True, slots=True)
class Standings:
    """The standings of other nodes."""

    named: Collection[NodeId] = ()
    remembered: Collection[NodeId] = ()
    trust: PeerTrust = NO_TRUST
    lists: PeerLists = NO_LISTS

    def lets_in(self, node_id: NodeId) -> bool:
        return self.lists.lets_in(node_id) and self.trust.may_connect(node_id)

    def standing(self, node_id: NodeId) -> Standing:
        if node_id in self.named:
            return Standing.NAMED
        if self.trust.has_merit(node_id):
            return Standing.PROVEN
        return Standing.REMEMBERED if node_id in self.remembered else Standing.STRANGER


@dataclass(frozen=True, slots=True)
class Candidate:
    node_id: NodeId
    standing: Standing
    network: str
    n_connections: int = 1


def who_gives_way(guests: Iterable[Candidate]) -> NodeId:
    """Of those who have places, in the order in which they came."""
    in_order = list(guests)
    of_network = Counter[str]()
    for guest in in_order:
        of_network[guest.network] += guest.n_connections
    ranked = enumerate(in_order)
    return min(ranked, key=lambda each: (each[1].standing, -of_network[each[1].network], -each[0]))[1].node_id


def who_makes_room(
    n_of_each: Mapping[NodeId, int], newcomer: NodeId, n_places: int, standing: Callable[[NodeId], Standing]
) -> NodeId | None:
    """Who gives way to one more connection of `newcomer`: itself where it is refused, None where there is
    room. For connections of which only the node is known: it stands for its network."""
    if sum(n_of_each.values()) < n_places:
        return None
    n_of_each = {**n_of_each, newcomer: n_of_each.get(newcomer, 0) + 1}
    return who_gives_way(Candidate(n, standing(n), n, n_its) for n, n_its in n_of_each.items() if n_its)


def network_of(ip: str) -> str:
    """Where somebody with this address is at home. Addresses that are not the Internet's stand for
    themselves: neighbours in a house are not one attacker, and nobody from elsewhere can have them."""
    try:
        address = ipaddress.ip_address(ip.partition("%")[0])
    except ValueError:
        return ip
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if not address.is_global:
        return str(address)
    bits = NETWORK_BITS[address.version]
    return str(ipaddress.ip_network((address, bits), strict=False))
