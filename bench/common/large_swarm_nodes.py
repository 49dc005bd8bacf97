"""Models and nodes of `large_swarm`: what one node has, holds and tells."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import trio

from bench.common.simulated_network import Place
from bench.common.simulated_swarm import N_SLOTS, capability_of
from swarmllm.models import LayerRange, Manifest, merge
from swarmllm.models.manifest import EMBEDDING_INDEX, HEAD_INDEX, Shard
from swarmllm.node.announcing.record_changes import RecordChanges
from swarmllm.node.placing.plan import shape_of
from swarmllm.pipeline.route.untried import UntriedNodes
from swarmllm.scheduling.coordinates import Coordinate, SteadyCoordinate
from swarmllm.scheduling.placement import Hysteresis, ModelShape
from swarmllm.scheduling.speeds import Observations
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.dialler import PEERS_MAX, Dialler
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.reachable import ReachableNodes
from swarmllm.swarm.records.details_book import DetailsBook
from swarmllm.swarm.records.details_exchange import DetailsExchange
from swarmllm.swarm.records.envelope_book import EnvelopeBook
from swarmllm.swarm.records.sustained_load import SustainedLoad
from swarmllm_proto.codec import decode_record
from swarmllm_proto.envelope import Details, Envelope
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.node_load import NodeLoad
from swarmllm_proto.record_parts import RecordDetails, details_of
from swarmllm_proto.swarm import NodeCapability, NodeRecord, ShardAnnounce

MODELS = ((32, 130, 8), (48, 180, 6), (64, 300, 4), (80, 500, 4), (126, 1900, 1))
"""(layers, MB of one, how much of the swarm each one of this kind is asked for): 8B to 400B, quantised."""
N_MODELS = 20
HARDWARE = ((2, 0.004), (4, 0.002), (8, 0.001), (20, 0.0005), (45, 0.0003))
"""(GB that fit, seconds for a row of a layer of 500 MB)"""
SPEAK_S = 1.0
PLAN_EVERY_S = 15.0
PLACE_ROUNDS = 12
"""Of looks at four peers each, before anybody asks."""
DIAL_RTTS = 2
"""Of a new connection: TCP and Noise. What is asked goes with the last message of Noise, beside the
comparison of records."""
VANISHED_S = 5.0
ADDRESS = "/ip4/192.0.2.1/tcp/8810"
OBSERVER = node_id_named("observer")


@lru_cache(maxsize=N_MODELS)
def _shape(number: int) -> ModelShape:
    return shape_of(make_model(number))


def shape(model: Manifest) -> ModelShape:
    """Worked out once of each."""
    return _shape(int(model.name.removeprefix("model")))


@lru_cache(maxsize=N_MODELS)
def _id(number: int) -> ModelId:
    return make_model(number).model_id


def id_of(model: Manifest) -> ModelId:
    """Its hash is worked out once."""
    return _id(int(model.name.removeprefix("model")))


@lru_cache(maxsize=N_MODELS)
def make_model(number: int) -> Manifest:
    n_layers, layer_mb, _ = MODELS[number % len(MODELS)]
    sizes = {"layer": layer_mb * 10**6, "embedding": layer_mb * 10**6, "head": layer_mb * 10**6}
    kinds = [("embedding", EMBEDDING_INDEX), *(("layer", i) for i in range(n_layers)), ("head", HEAD_INDEX)]
    # Without a hash of its own a model would have the id of every other one with as many layers.
    blake3 = f"{number:064x}"
    shards = tuple(
        Shard(index=i, kind=kind, size_bytes=sizes[kind], blake3=blake3, tensors=())  # type: ignore[arg-type]
        for kind, i in kinds
    )
    return Manifest(
        name=f"model{number}",
        architecture="llama",
        n_layers=n_layers,
        n_embd=8192,
        n_vocab=128256,
        context_length=8192,
        cut_alignment=1,
        whole_reason="",
        tied_embedding=False,
        size_bytes=sum(shard.size_bytes for shard in shards),
        shards=shards,
    )


@dataclass(eq=False)
class Node:
    """What there is of a node that asks nobody."""

    node_id: NodeId
    place: Place
    model: Manifest
    budget_bytes: int
    layer_s: float
    """What a layer of its model really takes."""
    guess_bytes_per_s: float
    held: tuple[LayerRange, ...] = ()
    loading: tuple[LayerRange, ...] = ()
    n_active: int = 0
    alive: bool = True
    sequence: int = 0
    is_newcomer: bool = False
    coordinate: SteadyCoordinate = field(default_factory=SteadyCoordinate)
    floating: Coordinate = field(default_factory=Coordinate)
    observations: Observations = field(default_factory=Observations)
    rtts_s: dict[NodeId, float] = field(default_factory=dict)
    """Measured with its peers."""
    changes: RecordChanges = field(default_factory=RecordChanges)
    details: Details | None = None
    """The newest, where its record is a brief one."""
    sealed_details: bytes = b""
    hysteresis: Hysteresis = field(default_factory=Hysteresis)
    told: object = None
    sustained: SustainedLoad = field(default_factory=SustainedLoad)
    recorded: NodeLoad = field(default_factory=NodeLoad)
    """What the brief record says of its load."""
    direct_load: bytes = b""
    """What it tells on data connections."""
    said_at_s: float = -math.inf
    """When it last said something to everybody."""

    @property
    def lacks(self) -> str:
        return "no free slot" if self.n_active >= N_SLOTS else ""

    def capability(self) -> NodeCapability:
        taken_bytes = sum(map(shape(self.model).n_bytes, merge([*self.held, *self.loading])))
        return capability_of(
            self.observations,
            self.coordinate.coordinate,
            n_active=self.n_active,
            bytes_per_s=self.guess_bytes_per_s,
            model_id=id_of(self.model),
            free_bytes=max(0, self.budget_bytes - taken_bytes),
            rtts_s=self.rtts_s,
        )

    def record(self) -> NodeRecord:
        announced = ShardAnnounce(
            model_id=id_of(self.model),
            name=self.model.name,
            n_layers=self.model.n_layers,
            ranges=tuple((each.start, each.end) for each in self.held),
            loading=tuple((each.start, each.end) for each in self.loading),
        )
        return NodeRecord(
            node_id=self.node_id,
            software="simulated",
            sequence=self.sequence,
            models=(announced,) if self.held or self.loading else (),
            capability=self.capability(),
        )


class Origin:
    """A node with all that it has itself: connections, and what it thinks of others."""

    def __init__(
        self, node: Node, book: EnvelopeBook, peers: Sequence[NodeId], uses: Sequence[Manifest], seed: int
    ) -> None:
        self.node = node
        self.uses = uses
        """The models that its clients ask for."""
        self.connected: Parts[float] = Parts.alone()
        self.dialler = Dialler(node.node_id, random.Random(seed), PEERS_MAX, heard_at_s=book.heard_at_s)
        self.reachable = ReachableNodes(book, self.dialler, self.connected, ChangeFeed())
        self.untried = UntriedNodes()
        self.asked: dict[str, tuple[Manifest, int, int]] = {}
        self.worked_with: set[NodeId] = set()
        """Connected nodes with which there is a data connection."""
        self.n_dials = 0
        self.n_dials_in_vain = 0
        self.said: dict[NodeId, RecordDetails] = {}
        """The details of records that it has."""
        self.n_details_bytes = 0
        """That came with answers."""
        self.n_loads = 0
        """That came on data connections."""
        self.details = DetailsBook(node.node_id, self, lambda *_: True)
        self._book = book
        self.exchange: DetailsExchange
        for peer in peers:
            self.meets(peer)

    # What `DetailsBook` asks of the book of records: one is everybody's, and so has no details.

    def newest_details(self, node_id: NodeId) -> int:
        return self._book.newest_details(node_id)

    def envelope(self, node_id: NodeId) -> Envelope | None:
        return self._book.envelope(node_id)

    def complete(self, node_id: NodeId, whole: bytes) -> bool:
        if whole:
            self.said[node_id] = details_of(decode_record(whole))
        else:
            self.said.pop(node_id, None)
        return True

    def heard(self, node_ids: Collection[NodeId], now: float) -> None:
        for node_id in node_ids:
            self.dialler.suggest(node_id, [Address("192.0.2.1", 8810)], now)

    def meets(self, node_id: NodeId) -> None:
        self.heard([node_id], trio.current_time())
        self.connected.put_last(node_id, trio.current_time())
        self.dialler.dialled(node_id, trio.current_time(), succeeded=True)
        self.dialler.answered(node_id)

    def loses(self, node_id: NodeId) -> None:
        self.connected.drop(node_id)
        self.worked_with.discard(node_id)
        self.dialler.lost(node_id, trio.current_time(), on_purpose=False)
