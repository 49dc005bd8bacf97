"""A swarm that is not there: a thousand nodes on the in-memory router under trio's mock clock.

What is real: the records and their wire format, the registry's view of them, network coordinates, latency
averages, the choice of routes, placement, the three looks before a move. What is made up: how long layers
take on a node (`layer_s`, which nodes learn only by serving), how long loading takes, and the network between
three regions. Two things are simpler than in life: gossip arrives at once (but every node speaks at most once
a second, so what others know is as old as that), and all nodes look at the same moments, so that a plan which
is the same for all need be worked out once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

import trio

from bench.common.simulated_network import Place, SimulatedNetwork, random_place
from swarmllm.models import LayerRange, Manifest, merge, subtract
from swarmllm.models.manifest import EMBEDDING_INDEX, HEAD_INDEX, Shard
from swarmllm.node.announcing.record_changes import RecordChanges
from swarmllm.node.placing.plan import next_step, plan_of, shape_of
from swarmllm.pipeline.route.inputs import NetworkDistances, OwnLoad, route_inputs, workload
from swarmllm.scheduling.coordinates import Coordinate, moved
from swarmllm.scheduling.cost import NodeSpeed, RouteInputs
from swarmllm.scheduling.placement import Hysteresis, Placement
from swarmllm.scheduling.speeds import Observations
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm_proto.codec import decode_record, encode_record
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.node_load import decode_load, encode_load, load_of, with_load
from swarmllm_proto.swarm import (
    NetworkCoordinate,
    NodeCapability,
    NodeRecord,
    ObservedLatency,
    ObservedLink,
    ShardAnnounce,
)

NOTHING_TOLD: Mapping[str, int] = MappingProxyType({})
TICK_S = 5.0
HEARTBEAT_BYTES = 185
"""Of one that tells a load, signed, without that."""
SPEAK_S = 1.0
"""How often nodes tell what is news, as the announcer does."""
N_MEASURED = 12
"""Peers whose round trip a node looks at in each tick."""
LOAD_BYTES_PER_S = 400e6
N_SLOTS = 8
HARDWARE = ((4, 0.004), (8, 0.002), (16, 0.001), (40, 0.0005), (90, 0.0003))
"""(layers that fit, seconds per layer and row)"""


def make_manifest(n_layers: int) -> Manifest:
    sizes = {"layer": 500_000_000, "embedding": 700_000_000, "head": 700_000_000}
    kinds = [("embedding", EMBEDDING_INDEX), *(("layer", i) for i in range(n_layers)), ("head", HEAD_INDEX)]
    shards = tuple(
        Shard(index=i, kind=kind, size_bytes=sizes[kind], blake3="0" * 64, tensors=())  # type: ignore[arg-type]
        for kind, i in kinds
    )
    return Manifest(
        name="simulated",
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


@dataclass
class Figures:
    """What the simulation is about."""

    costs_s: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    """Of what a request took to what it would have taken on the best route an oracle could choose."""
    served_at_s: list[float] = field(default_factory=list)
    n_asked: int = 0
    n_unserved: int = 0
    n_rerouted: int = 0
    n_reassigned: int = 0
    n_record_bytes: int = 0
    """Of the heartbeats that tell a load too, those with what surrounds it."""
    n_sealed_bytes: int = 0
    """Of envelopes and heartbeats, all of them, with what surrounds the records."""
    n_envelope_bytes: int = 0
    """Of them, those of envelopes; `n_load_bytes`: of heartbeats that tell news of load."""
    n_load_bytes: int = 0
    n_records: int = 0
    n_loads: int = 0
    n_lost_layers: int = 0
    """Held by nodes that left or died."""
    n_moved_layers: int = 0
    """Loaded by nodes that were there before, after the swarm had settled."""
    n_newcomer_layers: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    """Changes, by kind."""
    samples: list[tuple[float, int, int, int]] = field(default_factory=list)
    """(seconds, nodes alive, complete pipelines, layers moved so far)"""
    events: list[tuple[float, str]] = field(default_factory=list)


NO_LINKS: Mapping[NodeId, float] = MappingProxyType({})


def capability_of(
    observations: Observations,
    place: Coordinate,
    *,
    n_active: int,
    bytes_per_s: float,
    model_id: ModelId,
    free_bytes: int,
    rtts_s: Mapping[NodeId, float] = NO_LINKS,
) -> NodeCapability:
    """What a simulated node says of itself. `bytes_per_s`: as its probe measured, of weights from memory.
    `rtts_s`: of its links."""
    x_s, y_s, z_s = place.position_s
    latencies = tuple(
        ObservedLatency(model_id=observed, decode_s=seen.decode_s or 0.0, prefill_s=seen.prefill_s or 0.0)
        for observed, seen in observations.latest()
    )
    return NodeCapability(
        stage_requests=n_active,
        max_requests=N_SLOTS,
        slots=N_SLOTS,
        free_slots=max(0, N_SLOTS - n_active),
        free_kv_tokens=8192,
        memory_bytes_per_s=bytes_per_s,
        flops=bytes_per_s * 100,
        observed_latencies=latencies,
        observed_links=tuple(ObservedLink(node_id=peer, rtt_s=rtt_s) for peer, rtt_s in rtts_s.items()),
        coordinate=NetworkCoordinate(position_s=(x_s, y_s, z_s), height_s=place.height_s, error=place.error),
        placed_models=(model_id,),
        placing_free_bytes=free_bytes,
    )


class SimulatedNode:
    def __init__(self, world: World, node_id: str, place: Place, budget_layers: int, layer_s: float) -> None:
        self.node_id = node_id
        self.place = place
        self.layer_s = layer_s
        """What it really takes now."""
        self.layer_bytes = world.shape.layer_bytes
        self.budget_bytes = budget_layers * self.layer_bytes
        self.held: tuple[LayerRange, ...] = ()
        self.loading: tuple[LayerRange, ...] = ()
        self.n_active = 0
        self.alive = True
        self.is_newcomer = world.settled
        self.observations = Observations()
        self.hysteresis = Hysteresis()
        self.router = world.network.add(node_id)
        self.router.serve(self._answer, _ignore)
        self._world = world
        self._sequence = 0
        self._changes = RecordChanges()
        self._published: tuple[object, ...] = ()
        # The probe at the first start: right about the kind of machine, wrong about the details.
        self._guess_bytes_per_s = self.layer_bytes / (layer_s * world.rng.uniform(0.6, 1.6))

    @property
    def told_place(self) -> NetworkCoordinate | None:
        """As in its record."""
        return self._changes.told.coordinate

    @property
    def free_bytes(self) -> int:
        ranges = merge([*self.held, *self.loading])
        return max(0, self.budget_bytes - sum(map(self._world.shape.n_bytes, ranges)))

    @property
    def lacks(self) -> str:
        return "no free slot" if self.n_active >= N_SLOTS else ""

    def capability(self) -> NodeCapability:
        return capability_of(
            self.observations,
            self.observations.place.coordinate,
            n_active=self.n_active,
            bytes_per_s=self._guess_bytes_per_s,
            model_id=self._world.model_id,
            free_bytes=self.free_bytes,
        )

    async def publish(self) -> None:
        """What is news, as `node.announcer` does."""
        capability, told = self.capability(), (self.held, self.loading)
        means = self._changes.of_all(capability, trio.current_time())
        if means in ("load", "nothing") and told == self._published and self._sequence:
            if means == "load":
                await self._publish_load(capability)
            return
        self._published = told
        self._changes.record_published(capability)
        self._sequence += 1
        announced = ShardAnnounce(
            model_id=self._world.model_id,
            name="simulated",
            n_layers=self._world.manifest.n_layers,
            ranges=tuple((each.start, each.end) for each in self.held),
            loading=tuple((each.start, each.end) for each in self.loading),
        )
        record = encode_record(
            NodeRecord(
                node_id=self.node_id,
                software="simulated",
                sequence=self._sequence,
                models=(announced,) if self.held or self.loading else (),
                capability=capability,
            )
        )
        self._world.figures.n_record_bytes += len(record)
        self._world.figures.n_records += 1
        await self.router.publish(record)

    async def _publish_load(self, capability: NodeCapability) -> None:
        content = encode_load(load_of(capability))
        self._changes.load_published(capability, trio.current_time())
        self._world.figures.n_record_bytes += HEARTBEAT_BYTES + len(content)
        self._world.figures.n_loads += 1
        await self.router.publish_load(content)

    def look_at_peers(self) -> None:
        peers = sorted(self.router.connected())
        rng, at = self._world.rng, self.observations.floating
        for node_id in rng.sample(peers, min(N_MEASURED, len(peers))):
            other = self._world.nodes[node_id]
            rtt_s = self.place.rtt_s(other.place) * rng.uniform(0.97, 1.1)
            if (said := other.told_place) is not None:
                there = Coordinate(said.position_s, said.height_s, said.error)
                at = moved(at, there, rtt_s, f"{self.node_id} {node_id}")
        self.observations.floating = at
        self.observations.place.move(at)

    def known(self) -> dict[str, NodeRecord]:
        """Records of this node and of those it is connected to."""
        connected, loads = self.router.connected(), self.router.loads()
        return {
            node_id: self._world.decoded(record, loads.get(node_id, b""))
            for node_id, record in self.router.records().items()
            if node_id == self.node_id or node_id in connected
        }

    def act(self, plan: Placement, records: dict[str, NodeRecord]) -> None:
        """One look at the plan, as `node.auto_shard` does."""
        target = plan.targets.get(self.node_id, self.held)
        if self.loading or subtract(target, self.held) == subtract(self.held, target) == ():
            self.hysteresis.forget()
            return
        elsewhere = [
            LayerRange(*pair)
            for node_id, record in records.items()
            if node_id != self.node_id
            for announced in record.models
            for pair in announced.ranges
        ]
        step = next_step(self.held, target, (), elsewhere, self.free_bytes, self._world.shape)
        if step.load is None and step.drop is None:
            self.hysteresis.forget()
        elif self.hysteresis.see((target, step)):
            self.hysteresis.forget()
            if step.drop is not None:
                self.held = subtract(self.held, [step.drop])
            elif step.load is not None:
                self.loading = (step.load,)
                self.router.start(self._load, step.load)

    async def _load(self, layers: LayerRange) -> None:
        await trio.sleep(self._world.shape.n_bytes(layers) / LOAD_BYTES_PER_S)
        self.held, self.loading = merge([*self.held, layers]), ()
        self._world.moved(self, len(layers))

    async def _answer(self, sender: str, body: bytes) -> bytes:
        """An assignment is accepted while there is a slot, and told how many requests run here."""
        return b"busy" if self.lacks else b"yes%d" % self.n_active


async def _ignore(sender: str, header: bytes, payload: memoryview) -> None:
    """No activations travel here."""


class World:
    """Everything there really is; nodes do not look at it."""

    def __init__(self, network: SimulatedNetwork, seed: int, n_layers: int) -> None:
        self.network = network
        self.rng = random.Random(seed)
        self.manifest = make_manifest(n_layers)
        self.model_id = self.manifest.model_id
        self.shape = shape_of(self.manifest)
        self.nodes: dict[str, SimulatedNode] = {}
        self.figures = Figures()
        self.changed = trio.Event()
        """Set, and replaced, when a node dies or is cut off."""
        self.n_moved = 0
        self.settled = False
        self._decoded: dict[tuple[bytes, bytes], NodeRecord] = {}
        self._n_born = 0

    def born(self) -> SimulatedNode:
        node_id = node_id_named(f"node{self._n_born:05}")
        self._n_born += 1
        fits, layer_s = self.rng.choice(HARDWARE)
        place = random_place(self.rng)
        self.network.places[node_id] = place
        node = SimulatedNode(self, node_id, place, fits, layer_s * self.rng.uniform(0.8, 1.25))
        self.nodes[node_id] = node
        return node

    def dies(self, node: SimulatedNode) -> None:
        node.alive = False
        del self.nodes[node.node_id]
        self.network.kill(node.node_id)
        self.alarm()

    def alarm(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    def moved(self, node: SimulatedNode, n_layers: int) -> None:
        self.n_moved += n_layers
        if self.settled and node.is_newcomer:
            self.figures.n_newcomer_layers += n_layers
        elif self.settled:
            self.figures.n_moved_layers += n_layers

    def decoded(self, record: bytes, load: bytes) -> NodeRecord:
        key = record, load
        if key not in self._decoded:
            if len(self._decoded) > 20_000:
                self._decoded.clear()
            said = decode_record(record)
            self._decoded[key] = with_load(said, decode_load(load)) if load else said
        return self._decoded[key]

    async def speak(self) -> None:
        for node in list(self.nodes.values()):
            await node.publish()

    async def look(self) -> None:
        """All nodes, once: coordinates, news, plan, step."""
        for node in list(self.nodes.values()):
            node.look_at_peers()
        await self.speak()
        plans: dict[frozenset[str], tuple[Placement, dict[str, NodeRecord]]] = {}
        for node in list(self.nodes.values()):
            sees = node.router.connected() | {node.node_id}
            if sees not in plans:
                records = node.known()
                plans[sees] = (plan_of(self.manifest, records, None), records)
            node.act(*plans[sees])
        n_complete = max((len(plan.pipelines) for plan, _ in plans.values()), default=0)
        self.figures.samples.append((trio.current_time(), len(self.nodes), n_complete, self.n_moved))

    def believed(
        self, origin: SimulatedNode, n_prompt: int, n_output: int, told: Mapping[str, int] = NOTHING_TOLD
    ) -> tuple[dict[str, list[LayerRange]], RouteInputs]:
        """What `pipeline.route` would hand on: from records, as the origin has them, and from what nodes told
        when they accepted."""
        records = origin.known()
        held: dict[str, list[LayerRange]] = {
            node_id: [LayerRange(*pair) for announced in record.models for pair in announced.ranges]
            for node_id, record in records.items()
        }
        held[origin.node_id] = list(origin.held)
        held = {node_id: ranges for node_id, ranges in held.items() if ranges}
        capabilities = {
            node_id: record.capability for node_id, record in records.items() if node_id != origin.node_id
        }
        connected = origin.router.connected()
        distances = NetworkDistances(
            {
                node_id: origin.place.rtt_s(self.network.places[node_id])
                for node_id in held
                if node_id in connected
            },
            coordinate=origin.observations.place.coordinate,
        )
        work = workload(self.manifest, n_prompt, n_output)
        load = OwnLoad(origin.n_active, origin.lacks, reported=told)
        known = route_inputs(
            origin.node_id,
            self.manifest,
            work,
            held,
            {node_id: said for node_id, said in capabilities.items() if node_id in held},
            distances,
            origin.observations,
            load,
        )
        return held, known

    def true(
        self, origin: SimulatedNode, n_prompt: int, n_output: int
    ) -> tuple[dict[str, list[LayerRange]], RouteInputs]:
        """What an oracle knows: who holds what at this moment, real speeds, real load, real distances."""
        reachable = [self.nodes[node_id] for node_id in origin.router.connected() if node_id in self.nodes]
        holders = [node for node in (origin, *reachable) if node.held]
        speeds = {
            node.node_id: NodeSpeed(node.layer_s, node.layer_s / 8, node.n_active, node.lacks)
            for node in holders
        }
        places = {
            node.node_id: Coordinate((*node.place.point_s, 0.0), node.place.access_s, 0.0)
            for node in (origin, *holders)
        }
        known = RouteInputs(
            origin.node_id, workload(self.manifest, n_prompt, n_output), speeds, coordinates=places
        )
        return {node.node_id: list(node.held) for node in holders}, known


@contextmanager
def busy(nodes: list[SimulatedNode]) -> Iterator[None]:
    for node in nodes:
        node.n_active += 1
    try:
        yield
    finally:
        for node in nodes:
            node.n_active -= 1
