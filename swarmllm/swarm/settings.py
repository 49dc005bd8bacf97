"""Settings of a node's part in the swarm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swarmllm.swarm.byte_budget import TOTAL_MIB
from swarmllm.swarm.discovery.addresses import EVERYWHERE
from swarmllm.swarm.discovery.dialler import PEERS_MAX
from swarmllm.swarm.membership.peer_lists import NO_LISTS, PeerLists
from swarmllm.swarm.peers.connection_limits import CONNECTIONS_MAX
from swarmllm.swarm.records.spread import WHOLE_RECORDS_MAX
from swarmllm.swarm.router import DhtMode


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What a relay promises at the same time."""

    reservations: int = 128
    circuits: int = 64


RELAY_LIMITS: Final = RelayLimits()


@dataclass(frozen=True, slots=True)
class SwarmSettings:
    data_dir: Path
    """Where the identity lives. One daemon per folder; the folder is locked while the router runs."""
    listen_host: str = EVERYWHERE
    """IP address to listen on with both ports. On a loopback address only this machine is reached."""
    libp2p_port: int = 8810
    """Control plane; 0 takes any free port."""
    data_port: int = 8811
    """Data plane; 0 takes any free port."""
    bootstrap: tuple[str, ...] = ()
    """Multiaddrs with /p2p/ID of nodes to find the swarm through; tried until connected."""
    max_peers: int = PEERS_MAX
    """Connections looked for. Others may connect beyond that, and holders of a model that is asked for."""
    max_connections: int = CONNECTIONS_MAX
    """Of libp2p, made by either side."""
    mdns: bool = True
    """Find and be found on the local network. Never on a loopback address."""
    announce: tuple[str, ...] = ()
    """IP addresses to tell other nodes instead of this machine's own, for example behind a port
    forwarding."""
    dht: DhtMode = "on"
    """Whether to look for models beyond the connected nodes, and to answer others that do."""
    relay: bool = True
    """Be reached through a relay where nobody can dial this node, and reach such nodes."""
    relay_service: bool = False
    """Be a relay for others."""
    relay_limits: RelayLimits = RELAY_LIMITS
    port_mapping: bool = True
    """Have the router of this network forward both ports (UPnP), where peers outside dial in vain."""
    hole_punching: bool = True
    """Replace connections through a relay by direct ones where that can be done."""
    strangers_mib: int = TOTAL_MIB
    """What other nodes may make this one keep, see byte_budget."""
    whole_records_max: int = WHOLE_RECORDS_MAX
    """Nodes known; where there are more, the details of this node's record are for those that ask."""
    lists: PeerLists = NO_LISTS
    """Who is let in, whatever they have earned."""
