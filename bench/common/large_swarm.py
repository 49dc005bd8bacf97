"""A swarm of ten thousand nodes that is not there, some of which have all their state.

What is real, of the product's own code: records and loads, their wire format and when nodes tell them; the
book of what is heard, with its limits; who counts as reachable, dials in vain and what follows from them;
network coordinates; the plan of who holds what; the choice of a route and what changes it when stages tell
their load; connections that are kept for probable routes. What is made up: how long layers take, the
network between regions, and how long it takes to load layers.

The details of records are asked for as in life, with each origin's own book of them. Any node that is asked
has those of all nodes of its own model, as one that uses it has after a while.

Simpler than in life: gossip arrives at once, so that all nodes have heard the same, and one book is
everybody's. Only `origins` have connections, doubts and trust of their own, and all requests come from
them. Of the others what is simulated is what others see of them: record, load, coordinate, death. A node
plans with all that hold its model, not only with those that it reaches.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import msgspec
import trio

from bench.common.large_swarm_causes import PlanRatios
from bench.common.large_swarm_nodes import (
    DIAL_RTTS,
    HARDWARE,
    MODELS,
    N_MODELS,
    PLACE_ROUNDS,
    Node,
    Origin,
    id_of,
    make_model,
    shape,
)
from bench.common.large_swarm_records import HeardRecords
from bench.common.simulated_network import random_place
from bench.common.simulated_swarm import LOAD_BYTES_PER_S, Figures
from swarmllm.errors import NodeUnreachable
from swarmllm.models import LayerRange, Manifest, merge, subtract
from swarmllm.node.placing.plan import next_step, plan_of
from swarmllm.pipeline.route.assembly import RouteQuery
from swarmllm.pipeline.route.inputs import NetworkDistances, OwnLoad, route_inputs, workload
from swarmllm.scheduling.candidates import candidates
from swarmllm.scheduling.coordinates import Coordinate, moved
from swarmllm.scheduling.cost import NodeSpeed, RouteInputs
from swarmllm.scheduling.speeds import MachineSpeed
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.discovery.dialler import PEERS_MAX
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.records.details_book import AskedDetails
from swarmllm.swarm.records.details_exchange import DetailsExchange
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.node_load import carrying, decode_load
from swarmllm_proto.record_parts import with_details
from swarmllm_proto.swarm import NodeCapability


class Blameless:
    """Nobody lies here."""

    def blame(self, sender: NodeId, error: BadMessage) -> None:
        raise AssertionError(f"{sender}: {error}")


class LargeSwarm:
    """Everything there really is."""

    def __init__(self, n_nodes: int, n_origins: int, seed: int, *, is_brief: bool = True) -> None:
        """`is_brief`: envelopes have brief records."""
        self.rng = random.Random(seed)
        self._is_brief = is_brief
        self.origins: list[Origin] = []
        self.models = [make_model(number) for number in range(N_MODELS)]
        self.weights = [MODELS[number % len(MODELS)][2] / (1 + number) for number in range(N_MODELS)]
        """How often each model is asked for."""
        self._sizes = [
            weight * shape(model).n_bytes(LayerRange(0, model.n_layers))
            for weight, model in zip(self.weights, self.models, strict=True)
        ]
        self.nodes: dict[NodeId, Node] = {}
        self.holders: dict[ModelId, dict[NodeId, Node]] = {id_of(model): {} for model in self.models}
        """By model: those that are alive and let it be placed there."""
        self.figures = Figures()
        self.first_ratios: list[float] = []
        """Of each origin's first request for each model it uses; `later_ratios`: of those that follow."""
        self.later_ratios: list[float] = []
        self.plan_ratios: list[float] = []
        """Of each route that a request took: what it takes with the real speeds and distances, by what the
        oracle's takes. What it took to connect is left out."""
        self.causes: list[PlanRatios] | None = None
        """Of each request's plan, where they are looked for."""
        self.heard = HeardRecords(self.nodes, self.rng, is_brief=is_brief)
        self.heard.figures = self.figures
        self.n_moved = 0
        self.settled = False
        self.died = trio.Event()
        self.vanished: set[NodeId] = set()
        """Of the dead: nothing answers in their place."""
        self._met: set[frozenset[NodeId]] = set()
        """Pairs of stages that have been connected."""
        self._n_born = 0
        self._changes = ("join", "join", "leave", "kill", "vanish", "slow")
        for _ in range(n_nodes):
            self.born()
        self._find_places()
        self._place_all()
        for node in self.nodes.values():
            self.heard.publish(node)
            node.said_at_s = -math.inf
        ids = sorted(self.nodes)
        self.origins = [
            Origin(
                self.nodes[node_id],
                self.heard.book,
                self.rng.sample(ids, min(PEERS_MAX, n_nodes // 2)),
                self.rng.choices(self.models, self.weights, k=2),
                number,
            )
            for number, node_id in enumerate(self.rng.sample(ids, n_origins))
        ]
        self.heard.origins = self.origins
        for origin in self.origins:
            origin.reachable.needed = partial(self._needed, origin)
            origin.exchange = DetailsExchange(
                origin.details,
                partial(self._ask_for_details, origin),
                origin.connected,
                Blameless(),
                ChangeFeed(),
                partial(self._dial, origin),
                random.Random(self.rng.random()),
            )
            origin.exchange.interests = partial(self._used, origin)

    def _used(self, origin: Origin) -> list[Collection[NodeId]]:
        """As `used_nodes` has it."""
        return [*self._needed(origin), self.holders[id_of(origin.node.model)].keys()]

    async def _dial(self, origin: Origin, node_id: NodeId) -> None:
        node = self.nodes.get(node_id)
        if node is None:
            raise NodeUnreachable("it is gone")
        await trio.sleep(DIAL_RTTS * origin.node.place.rtt_s(node.place))
        origin.n_dials += 1
        origin.meets(node_id)

    async def _ask_for_details(self, origin: Origin, source: NodeId, kind: int, body: bytes) -> bytes:
        there = self.nodes.get(source)
        if there is None:
            raise NodeUnreachable("it is gone")
        await trio.sleep(origin.node.place.rtt_s(there.place))
        asked = msgspec.msgpack.decode(body, type=tuple[AskedDetails, ...])
        answer = []
        for each in asked:
            node = self.nodes.get(each.node_id)
            if node is None or node.details is None or node.model is not there.model:
                continue
            if (1, node.details.number) > (each.started_at_ms, each.number):
                answer.append(node.sealed_details)
        answered = msgspec.msgpack.encode(answer)
        origin.n_details_bytes += len(answered)
        return answered

    def _needed(self, origin: Origin) -> list[Collection[NodeId]]:
        """As `Pipelines.needed` has it."""
        return [self.holders[id_of(model)].keys() for model, _, _ in origin.asked.values()]

    def born(self) -> Node:
        rng = self.rng
        node_id = node_id_named(f"node{self._n_born:06}")
        self._n_born += 1
        # Large models are placed by as many nodes as they need, and popular ones by more.
        model = rng.choices(self.models, self._sizes)[0]
        fits_gb, layer_s = rng.choice(HARDWARE)
        layer_bytes = shape(model).layer_bytes
        layer_s *= layer_bytes / 500e6 * rng.uniform(0.8, 1.25)
        node = Node(
            node_id,
            random_place(rng),
            model,
            max(fits_gb * 10**9, 3 * layer_bytes),
            layer_s,
            layer_bytes / (layer_s * rng.uniform(0.6, 1.6)),
            is_newcomer=self.settled,
        )
        node.observations.machine = MachineSpeed(node.guess_bytes_per_s, node.guess_bytes_per_s * 100)
        self.nodes[node_id] = node
        self.holders[id_of(model)][node_id] = node
        return node

    def joins(self) -> None:
        """A newcomer, with a place and a record."""
        node = self.born()
        peers = self.rng.sample(list(self.nodes), min(PEERS_MAX, len(self.nodes)))
        for _ in range(4):
            self._look(node, [peer for peer in peers if peer != node.node_id])
        self.heard.publish(node)

    async def meet(self, node: Node, following: NodeId | None) -> None:
        """A stage dials the one behind it before it accepts, unless they have worked together."""
        other = self.nodes.get(following or node.node_id, node)
        pair = frozenset((node.node_id, other.node_id))
        if len(pair) == 2 and pair not in self._met:
            await trio.sleep(DIAL_RTTS * node.place.rtt_s(other.place))
            self._met.add(pair)

    def dies(self, node: Node, *, vanishes: bool) -> None:
        node.alive = False
        if vanishes:
            self.vanished.add(node.node_id)
        del self.nodes[node.node_id]
        del self.holders[id_of(node.model)][node.node_id]
        self.figures.n_lost_layers += sum(map(len, node.held))
        for origin in self.origins:
            if node.node_id in origin.connected:
                origin.loses(node.node_id)
        self.died.set()
        self.died = trio.Event()

    def change(self) -> None:
        """Something happens to a random node that is nobody's client."""
        kind = self.rng.choice(self._changes)
        self.figures.counts[kind] = self.figures.counts.get(kind, 0) + 1
        if kind == "join":
            self.joins()
            return
        asking = {origin.node.node_id for origin in self.origins}
        node = next(
            n
            for n in iter(lambda: self.nodes[self.rng.choice(list(self.nodes))], None)
            if n.node_id not in asking
        )
        if kind == "slow":
            node.layer_s *= 4
        else:
            self.dies(node, vanishes=kind == "vanish")

    def _look(self, node: Node, peers: Sequence[NodeId]) -> None:
        at = node.floating
        for peer in peers:
            other = self.nodes[peer]
            rtt_s = node.place.rtt_s(other.place) * self.rng.uniform(0.97, 1.1)
            node.rtts_s[peer] = rtt_s
            at = moved(at, other.coordinate.coordinate, rtt_s, f"{node.node_id} {peer}")
        node.floating = at
        node.coordinate.move(at)

    def _find_places(self) -> None:
        ids = sorted(self.nodes)
        peers = {node_id: self.rng.sample(ids, min(PEERS_MAX, len(ids) - 1)) for node_id in ids}
        for _ in range(PLACE_ROUNDS):
            for node_id in ids:
                looked_at = self.rng.sample(peers[node_id], min(4, len(peers[node_id])))
                self._look(self.nodes[node_id], [peer for peer in looked_at if peer != node_id])

    def _place_all(self) -> None:
        """As after all have followed the plan for as long as it changes."""
        for model in self.models:
            nodes = self.holders[id_of(model)]
            for _ in range(6):
                plan = plan_of(model, {node_id: node.record() for node_id, node in nodes.items()}, None)
                changed = False
                for node_id, node in nodes.items():
                    target = plan.targets.get(node_id, node.held)
                    if target != node.held:
                        node.held, changed = target, True
                if not changed:
                    break

    def plan(self, model: Manifest, nursery: trio.Nursery) -> int:
        """One look of every node that places this model; how many complete pipelines there are."""
        nodes = self.holders[id_of(model)]
        records = {
            node_id: self.heard.decoded[node_id][2] for node_id in nodes if node_id in self.heard.decoded
        }
        plan = plan_of(model, records, None)
        for node_id in [each for each in nodes if each in records]:
            node = nodes[node_id]
            target = plan.targets.get(node_id, node.held)
            if node.loading or subtract(target, node.held) == subtract(node.held, target) == ():
                node.hysteresis.forget()
                continue
            elsewhere = [layers for other in nodes.values() if other is not node for layers in other.held]
            free = node.capability().placing_free_bytes
            step = next_step(node.held, target, (), elsewhere, free, shape(model))
            if step.load is None and step.drop is None:
                node.hysteresis.forget()
            elif node.hysteresis.see((target, step)):
                node.hysteresis.forget()
                if step.drop is not None:
                    node.held = subtract(node.held, [step.drop])
                elif step.load is not None:
                    node.loading = (step.load,)
                    nursery.start_soon(self._load, node, step.load)
                self.heard.dirty[node_id] = None
        return len(plan.pipelines)

    async def _load(self, node: Node, layers: LayerRange) -> None:
        await trio.sleep(shape(node.model).n_bytes(layers) / LOAD_BYTES_PER_S)
        node.held, node.loading = merge([*node.held, layers]), ()
        self.heard.dirty[node.node_id] = None
        if node.is_newcomer:
            self.figures.n_newcomer_layers += len(layers)
        else:
            self.figures.n_moved_layers += len(layers)

    def begin_counting(self) -> None:
        self.figures = self.heard.figures = Figures()
        self.heard.n_fetched, self.settled = 0, True
        self.plan_ratios, self.first_ratios, self.later_ratios = [], [], []
        for origin in self.origins:
            origin.n_dials = origin.n_dials_in_vain = origin.n_details_bytes = origin.n_loads = 0

    def known(
        self, origin: Origin, model: Manifest, size: tuple[int, int], told: Mapping[NodeId, int]
    ) -> RouteQuery:
        """What the planner of this origin would ask about."""
        now = trio.current_time()
        reachable = origin.reachable.at(now)
        held: dict[NodeId, tuple[LayerRange, ...]] = {}
        said: dict[NodeId, NodeCapability] = {}
        model_id = id_of(model)
        for node_id in reachable:
            record = self.heard.decoded[node_id][2] if node_id in self.heard.decoded else None
            if record is None or node_id == origin.node.node_id:
                continue
            ranges = tuple(LayerRange(*p) for a in record.models if a.model_id == model_id for p in a.ranges)
            if ranges:
                if (details := origin.said.get(node_id)) is not None:
                    record = with_details(record, details)
                capability = record.capability
                if self._is_brief and node_id in origin.worked_with and node_id in self.nodes:
                    capability = carrying(capability, decode_load(self.nodes[node_id].direct_load))
                held[node_id], said[node_id] = ranges, capability
        held[origin.node.node_id] = origin.node.held if origin.node.model is model else ()
        rtt_s = {
            node_id: origin.node.place.rtt_s(self.nodes[node_id].place)
            for node_id in held
            if node_id in origin.connected and node_id in self.nodes
        }
        holders = candidates(model.n_layers, model.cut_alignment, held, {origin.node.node_id})
        inputs = route_inputs(
            origin.node.node_id,
            model,
            workload(model, *size),
            holders,
            said,
            NetworkDistances(rtt_s, coordinate=origin.node.coordinate.coordinate),
            origin.node.observations,
            OwnLoad(origin.node.n_active, origin.node.lacks, reported=told),
        )
        return RouteQuery(
            model.n_layers, model.cut_alignment, holders, reachable, inputs, model_name=model.name
        )

    def truth(
        self, origin: Node, model: Manifest, size: tuple[int, int], also: Collection[Node] = ()
    ) -> tuple[dict[NodeId, list[LayerRange]], RouteInputs]:
        """What an oracle knows: who holds what at this moment, real speeds, real load, real distances."""
        nodes = {n.node_id: n for n in self.holders[id_of(model)].values() if n.held} | {
            n.node_id: n for n in also
        }
        scale = 1.0
        speeds = {
            node_id: NodeSpeed(n.layer_s * scale, n.layer_s * scale / 8, n.n_active, n.lacks)
            for node_id, n in nodes.items()
        }
        speeds.setdefault(origin.node_id, NodeSpeed(1.0, 1.0))
        places = {
            n.node_id: Coordinate((*n.place.point_s, 0.0), n.place.access_s, 0.0)
            for n in (origin, *nodes.values())
        }
        known = RouteInputs(origin.node_id, workload(model, *size), speeds, coordinates=places)
        return {node_id: list(n.held) for node_id, n in nodes.items()}, known
