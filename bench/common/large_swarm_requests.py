"""Requests of `large_swarm`: how an origin chooses and connects a route, what the stages answer, and how
long the request really takes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise

import trio

from bench.common.large_swarm import LargeSwarm
from bench.common.large_swarm_causes import Taken, plan_ratios
from bench.common.large_swarm_nodes import DIAL_RTTS, VANISHED_S, Node, Origin, id_of
from swarmllm.errors import NoPipeline
from swarmllm.models import LayerRange, Manifest
from swarmllm.pipeline.route.assembly import Assembly, RouteQuery, assemble
from swarmllm.pipeline.route.request_routes import CHANGES_MAX, GAIN
from swarmllm.pipeline.route.suspects import sparing
from swarmllm.pipeline.route.untried import unless_much_longer
from swarmllm.pipeline.route.warming import DIALS_MAX, ROUTES
from swarmllm.scheduling.cheapest import cheapest_route, route_cost_s
from swarmllm.scheduling.route import RouteStage
from swarmllm_proto.identifiers import NodeId

DEADLINE_S = 60.0


def stages_of(chosen: Assembly) -> tuple[RouteStage, ...]:
    return tuple(RouteStage(stage.node_id, LayerRange(stage.start, stage.end)) for stage in chosen.stages)


def choose(question: RouteQuery, avoid: set[NodeId], origin: Origin, *, may_risk: bool) -> Assembly:
    """As `RequestRoutes.choose` does. Raises NoPipeline."""
    now = trio.current_time()
    untried = sorted(origin.reachable.untried(now) & question.holders.keys())

    def without(avoided: set[NodeId]) -> Assembly:
        return assemble(replace(question, avoid=avoided))

    def timed(suspects: Sequence[NodeId]) -> Assembly:
        found = sparing(without, avoid, suspects)
        return replace(found, cost_s=route_cost_s(stages_of(found), question.inputs))

    if may_risk and origin.untried.may_be_taken(now):
        return unless_much_longer(timed, (), untried)
    return timed(untried)


async def ask(swarm: LargeSwarm, nursery: trio.Nursery) -> None:
    """One request of a random origin, to its end."""
    rng, figures = swarm.rng, swarm.figures
    origin = rng.choice(swarm.origins)
    model = rng.choice(origin.uses)
    size = rng.choice([64, 256, 1024]), rng.choice([32, 128, 256])
    is_first = model.name not in origin.asked
    origin.asked[model.name] = (model, *size)
    if is_first:
        nursery.start_soon(warm, swarm, origin)
    held, truth = swarm.truth(origin.node, model, size)
    best = cheapest_route(model.n_layers, 1, held, truth)
    began_s, left, avoid, n_tries = trio.current_time(), 1.0, set[NodeId](), 0
    while left > 0:
        if trio.current_time() > began_s + DEADLINE_S:
            figures.n_asked += 1
            figures.n_unserved += 1
            return
        told: dict[NodeId, int] = {}
        try:
            question = swarm.known(origin, model, size, told)
            chosen = choose(question, avoid, origin, may_risk=not n_tries)
        except NoPipeline:
            avoid.clear()
            await trio.sleep(1.0)
            continue
        n_tries += 1
        risked = chosen.node_ids & origin.reachable.untried(trio.current_time())
        refused = await assign(swarm, origin, model, stages_of(chosen), told)
        if refused:
            if risked & refused - set(origin.connected):
                origin.untried.failed(trio.current_time())
            avoid |= refused
            continue
        if risked:
            origin.untried.accepted()
        route = await lighter(swarm, origin, model, size, stages_of(chosen), avoid, told)
        if best is not None and all(stage.node_id in truth.speeds for stage in route):
            best_s = route_cost_s(best, truth)
            swarm.plan_ratios.append(route_cost_s(route, truth) / best_s)
            if swarm.causes is not None:
                chooses = partial(choose, avoid=avoid, origin=origin, may_risk=True)
                taken = Taken(route, told, best_s, is_first)
                with suppress(NoPipeline):
                    swarm.causes.append(plan_ratios(swarm, origin, model, size, taken, chooses, truth))
        left = await walk(swarm, origin, model, size, route, left)
        figures.n_rerouted += left > 0
    figures.n_asked += 1
    took_s = trio.current_time() - began_s
    figures.costs_s.append(took_s)
    figures.served_at_s.append(trio.current_time())
    if best is not None:
        ratio = took_s / route_cost_s(best, truth)
        figures.ratios.append(ratio)
        (swarm.first_ratios if is_first else swarm.later_ratios).append(ratio)


async def reach(swarm: LargeSwarm, origin: Origin, node_id: NodeId) -> bool:
    if node_id == origin.node.node_id or node_id in origin.connected:
        origin.worked_with.add(node_id)
        return True
    origin.n_dials += 1
    node = swarm.nodes.get(node_id)
    if node is not None:
        await trio.sleep(DIAL_RTTS * origin.node.place.rtt_s(node.place))
        if node.alive:
            origin.meets(node_id)
            origin.worked_with.add(node_id)
            return True
    else:
        await trio.sleep(VANISHED_S if node_id in swarm.vanished else 0.1)
    origin.n_dials_in_vain += 1
    origin.dialler.dialled(node_id, trio.current_time(), succeeded=False)
    return False


async def assign(
    swarm: LargeSwarm, origin: Origin, model: Manifest, route: tuple[RouteStage, ...], told: dict[NodeId, int]
) -> set[NodeId]:
    """All stages at once: who does not accept; in `told`, what runs on those that do."""
    refused: set[NodeId] = set()
    following = {each.node_id: after.node_id for each, after in pairwise(route)}

    async def one(stage: RouteStage) -> None:
        if not await reach(swarm, origin, stage.node_id):
            refused.add(stage.node_id)
            return
        node = swarm.nodes.get(stage.node_id)
        if node is not None:
            await trio.sleep(origin.node.place.rtt_s(node.place))
            await swarm.meet(node, following.get(stage.node_id))
        if node is None or not node.alive or node.lacks or not holds(node, stage):
            refused.add(stage.node_id)
        else:
            told[stage.node_id] = node.n_active

    async with trio.open_nursery() as nursery:
        for stage in route:
            nursery.start_soon(one, stage)
    return refused


def holds(node: Node, stage: RouteStage) -> bool:
    return any(each.start <= stage.layers.start and stage.layers.end <= each.end for each in node.held)


async def lighter(
    swarm: LargeSwarm,
    origin: Origin,
    model: Manifest,
    size: tuple[int, int],
    route: tuple[RouteStage, ...],
    avoid: set[NodeId],
    told: dict[NodeId, int],
) -> tuple[RouteStage, ...]:
    """The route, or one that takes clearly less time by what stages tell (see `request_routes.lighter`)."""
    for _ in range(CHANGES_MAX):
        question = swarm.known(origin, model, size, told)
        try:
            other = stages_of(choose(question, avoid, origin, may_risk=False))
        except NoPipeline:
            return route
        known = question.inputs
        if any(stage.node_id not in known.speeds for stage in route):
            return route
        if route_cost_s(route, known) <= GAIN * route_cost_s(other, known):
            return route
        swarm.figures.n_reassigned += 1
        refused = await assign(swarm, origin, model, other, told)
        avoid |= refused
        if not refused:
            route = other
    return route


async def walk(
    swarm: LargeSwarm,
    origin: Origin,
    model: Manifest,
    size: tuple[int, int],
    route: tuple[RouteStage, ...],
    left: float,
) -> float:
    """Takes as long as the route really takes; the part of the request that is still to be done when a stage
    is lost on the way."""
    nodes = [swarm.nodes[stage.node_id] for stage in route if stage.node_id in swarm.nodes]
    if len(nodes) < len(route):
        return left
    _, truth = swarm.truth(origin.node, model, size, also=nodes)
    took_s = route_cost_s(route, truth) * left
    began_s = trio.current_time()
    busy(swarm, nodes, 1)
    try:
        while trio.current_time() < began_s + took_s:
            with trio.move_on_at(began_s + took_s):
                await swarm.died.wait()
            if not all(node.alive for node in nodes):
                return max(1e-3, left * (1 - (trio.current_time() - began_s) / took_s))
    finally:
        busy(swarm, nodes, -1)
    for node in nodes:
        seen_s = node.layer_s * swarm.rng.uniform(0.95, 1.1)
        node.observations.observe(id_of(model), "decode", seen_s, 1, 1)
        node.observations.observe(id_of(model), "prefill", seen_s / 8 * 64, 1, 64)
        swarm.heard.dirty[node.node_id] = None
    return 0.0


def busy(swarm: LargeSwarm, nodes: list[Node], change: int) -> None:
    for node in nodes:
        node.n_active += change
        if node.alive:
            swarm.heard.dirty[node.node_id] = None


async def warm(swarm: LargeSwarm, origin: Origin) -> None:
    """Connects with nodes of probable routes, as `pipeline.route.warming` does."""
    for model, *size in list(origin.asked.values()):
        question = swarm.known(origin, model, (size[0], size[1]), {})
        needed = dict[NodeId, None]()
        for _ in range(ROUTES):
            try:
                route = stages_of(assemble(replace(question, avoid=tuple(needed))))
            except NoPipeline:
                break
            found = sorted({stage.node_id for stage in route} - {origin.node.node_id})
            if not found:
                break
            needed |= dict.fromkeys(found)
        missing = [node_id for node_id in needed if node_id not in origin.connected]
        origin.worked_with |= {node_id for node_id in needed if node_id in origin.connected}
        async with trio.open_nursery() as nursery:
            for node_id in missing[:DIALS_MAX]:
                nursery.start_soon(reach, swarm, origin, node_id)
