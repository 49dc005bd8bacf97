"""The directory of peers: one object per peer with all that this node holds of it.

Each package defines its part and keeps it by its own limits (see `peer_table`); this module puts the parts
together. This node's own envelope and announcements are among them, because records of all nodes are treated
alike.

Pipelines keep what they note of nodes while they choose routes and check work (suspects, reported loads,
shares of places, tallies of checks): the swarm needs none of it, and imports point down.

State of other things than peers stays with them: the DHT's providers of a key, indexes from a model or prefix
to the nodes that hold it, verdicts on signatures, one lookup, one message, and the settings' lists.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmllm.swarm.byte_budget import HeldBytes
from swarmllm.swarm.data.bulk import BulkPeer
from swarmllm.swarm.data.holes import HoleTurn
from swarmllm.swarm.data.neighbour import Neighbour
from swarmllm.swarm.discovery.dht.dht import DhtParts
from swarmllm.swarm.discovery.dht.serving import DhtAsker
from swarmllm.swarm.discovery.dht.table import RoutingEntry
from swarmllm.swarm.discovery.dialler import DialCandidate
from swarmllm.swarm.discovery.reachability import DialBackTurn
from swarmllm.swarm.discovery.relay.client import RelayUse
from swarmllm.swarm.discovery.relay.service import Reservation
from swarmllm.swarm.discovery.wide_area import WideAreaParts
from swarmllm.swarm.libp2p.gossip import GossipAllowance
from swarmllm.swarm.libp2p.request_protocol import PeerRequests
from swarmllm.swarm.peers.liveness import LivenessParts, PeerLiveness
from swarmllm.swarm.peers.peer_table import Parts, PassingParts, PeerTable
from swarmllm.swarm.peers.reachable import Use
from swarmllm.swarm.peers.store import Addresses
from swarmllm.swarm.peers.trust import Reputation
from swarmllm.swarm.records.departures import Departed, GaveUp
from swarmllm.swarm.records.details_book import HeldDetails
from swarmllm.swarm.records.envelope_book import HeldEnvelope
from swarmllm.swarm.records.model_index import IndexedRecord
from swarmllm.swarm.records.prefix_index import Beginning
from swarmllm.swarm.records.projector_index import Projectors
from swarmllm.swarm.records.registry import Announced, RegistryParts
from swarmllm.swarm.records.spread import RecordParts
from swarmllm.swarm.records.update_pace import CountedUpdate
from swarmllm_proto.identifiers import NodeId


@dataclass(eq=False, slots=True)
class Peer:
    node_id: NodeId
    n_parts: int = 0
    connected_since_s: float | None = None
    """By trio's clock; None: it does not count as connected."""
    liveness: PeerLiveness | None = None
    trust: Reputation | None = None
    remembered: Addresses | None = None
    """Where it was in an earlier run."""
    membership_key: bytes | None = None
    """The key of the network with which it has proved its membership."""

    envelope: HeldEnvelope | None = None
    fetching_record: bool | None = None
    details: HeldDetails | None = None
    counted_update: CountedUpdate | None = None
    announced: Announced | None = None
    present: Announced | None = None
    """The same, while the registry has been told that it is reachable."""
    is_distrusted: bool | None = None
    indexed_record: IndexedRecord | None = None
    prefixes: tuple[Beginning, ...] | None = None
    projectors: Projectors | None = None
    departed: Departed | None = None
    gave_up: GaveUp | None = None

    use: Use | None = None
    requests: PeerRequests | None = None
    neighbour: Neighbour | None = None
    bulk: BulkPeer | None = None
    hole_turn: HoleTurn | None = None
    gossip_allowance: GossipAllowance | None = None
    held_bytes: HeldBytes | None = None

    candidate: DialCandidate | None = None
    dial_back_turn: DialBackTurn | None = None
    reservation: Reservation | None = None
    n_circuits: int | None = None
    relay: RelayUse | None = None
    is_punching: bool | None = None
    is_met: bool | None = None
    dht_asker: DhtAsker | None = None
    n_dht_entries: int | None = None
    routing_entry: RoutingEntry | None = None

    def __repr__(self) -> str:
        return f"<Peer {self.node_id} with {self.n_parts} parts>"


class PeerDirectory(PeerTable):
    def __init__(self) -> None:
        super().__init__(Peer)
        self.liveness = LivenessParts(Parts(self, "connected_since_s"), Parts(self, "liveness"))
        self.trust: Parts[Reputation] = Parts(self, "trust")
        self.remembered: Parts[Addresses] = Parts(self, "remembered")
        self.membership_keys: Parts[bytes] = Parts(self, "membership_key")
        self.records = RecordParts(
            Parts(self, "envelope"),
            Parts(self, "fetching_record"),
            Parts(self, "details"),
            PassingParts(self, "counted_update"),
        )
        self.uses: Parts[Use] = Parts(self, "use")
        self.requests: Parts[PeerRequests] = Parts(self, "requests")
        self.neighbours: PassingParts[Neighbour] = PassingParts(self, "neighbour")
        self.bulk_peers: PassingParts[BulkPeer] = PassingParts(self, "bulk")
        self.hole_turns: PassingParts[HoleTurn] = PassingParts(self, "hole_turn")
        self.gossip_allowances: PassingParts[GossipAllowance] = PassingParts(self, "gossip_allowance")
        self.held_bytes: Parts[HeldBytes] = Parts(self, "held_bytes")
        self.candidates: Parts[DialCandidate] = Parts(self, "candidate")
        self.dial_back_turns: PassingParts[DialBackTurn] = PassingParts(self, "dial_back_turn")
        self.wide_area = WideAreaParts(
            DhtParts(
                met=Parts(self, "is_met"),
                askers=PassingParts(self, "dht_asker"),
                n_entries=Parts(self, "n_dht_entries"),
                contacts=Parts(self, "routing_entry"),
            ),
            reservations=PassingParts(self, "reservation"),
            n_circuits=Parts(self, "n_circuits"),
            relays=PassingParts(self, "relay"),
            punching=Parts(self, "is_punching"),
        )
        self.registry = RegistryParts(
            announced=Parts(self, "announced"),
            present=Parts(self, "present"),
            distrusted=Parts(self, "is_distrusted"),
            indexed=Parts(self, "indexed_record"),
            prefixes=Parts(self, "prefixes"),
            projectors=Parts(self, "projectors"),
            departed=PassingParts(self, "departed"),
            gave_up=PassingParts(self, "gave_up"),
        )
