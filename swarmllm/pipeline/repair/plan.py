"""Plans the repair of a broken pipeline: which stages stay, who replaces the others, who sends them rows.

A stage that is still there has the KV of every row that gave a token, and a journal of what it sent on. So
a node that takes a dead stage's place need not wait for the whole pipeline to compute everything again: the
rows that the dead one was given come from the journal of the stage before it. Several dead stages in a row
are built together, each from the results of the one before. Where a journal is missing, the stage that should
have kept it computes again, too, and so on upstream; at the very top there are always the tokens.

Pure: what the stages say comes in as values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from swarmllm.models.layers import LayerRange, covers
from swarmllm.pipeline.route.assembly import AFFINITY, Assembly, RouteQuery, alive
from swarmllm.scheduling.candidates import runnable
from swarmllm.scheduling.cheapest import cheapest_route, route_cost_s
from swarmllm.scheduling.constraints import permitted
from swarmllm.scheduling.cost import RouteInputs
from swarmllm.scheduling.plan import standbys_of
from swarmllm.scheduling.route import RouteStage
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import Stage


class StageRemainder(NamedTuple):
    """What is left of a request at one stage."""

    n_rows: int = 0
    """Whose KV is there, from position 0 on."""
    n_journal: int = 0
    """That it can send on once more, from position 0 on."""


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Stages `source` + 1 to `until` compute all rows but the newest, one after the other."""

    source: int | None
    """The stage whose journal the rows come from; None: the origin embeds them."""
    until: int
    begin: int = 0
    """Rows before this one are there already, in each of these stages, of an earlier request."""

    @property
    def first(self) -> int:
        return 0 if self.source is None else self.source + 1


def rebuilds(
    left: Sequence[StageRemainder], n_due: int, known: Mapping[int, int] = MappingProxyType({})
) -> tuple[Rebuild, ...]:
    """What has to happen before a pipeline goes on whose stages have this left, until each has `n_due` rows;
    top down. `known`: by stage, how many first rows a new one has of an earlier request."""
    found: list[Rebuild] = []
    stage = len(left) - 1
    while stage >= 0:
        if left[stage].n_rows >= n_due:
            stage -= 1
            continue
        source = stage - 1
        while source >= 0 and min(left[source]) < n_due:
            source -= 1
        begin = min(known.get(each, 0) for each in range(source + 1, stage + 1))
        found.append(Rebuild(source if source >= 0 else None, stage, min(begin, n_due - 1)))
        stage = source
    return tuple(reversed(found))


def recomputed(planned: Sequence[Rebuild]) -> frozenset[int]:
    """The stages that compute all rows again, those among them that would have them."""
    return frozenset(stage for each in planned for stage in range(each.first, each.until + 1))


def is_anew(planned: Sequence[Rebuild], n_stages: int) -> bool:
    """Whether nothing is left that would be of use, of this request."""
    return [(each.source, each.until) for each in planned] == [(None, n_stages - 1)]


def repair_route(query: RouteQuery, broken: Assembly) -> Assembly | None:
    """The broken pipeline with others in place of the nodes that are gone or to be avoided: the stages'
    standbys where they can, else the best there is. None where that cannot be, where no node of it would
    stay, or where the best of all pipelines is so much faster that it is worth computing everything
    again."""
    inputs = query.inputs
    holders = {node: ranges for node, ranges in query.holders.items() if node not in query.avoid}
    allowed, _ = permitted(
        alive(holders, query.reachable, inputs.origin),
        query.constraints,
        model=query.model_name,
        n_layers=query.n_layers,
        origin=inputs.origin,
    )
    broken_route = [RouteStage(stage.node_id, LayerRange(stage.start, stage.end)) for stage in broken.stages]
    best = cheapest_route(query.n_layers, query.cut_alignment, allowed, inputs)
    runners = {
        node: runnable(ranges, query.n_layers, query.cut_alignment) for node, ranges in allowed.items()
    }
    stays = [covers(runners.get(stage.node_id, ()), stage.layers) for stage in broken_route]
    if best is None or not any(stays):
        return None
    route: list[RouteStage] = []
    for index, (stage, standby) in enumerate(zip(broken_route, broken.standbys, strict=True)):
        if stays[index]:
            route.append(stage)
            continue
        able = {node for node, ranges in runners.items() if covers(ranges, stage.layers)}
        able = {node for node in able if not inputs.speeds[node].is_full}
        if not able:
            return None
        neighbours = {each.node_id for each in route[-1:]}
        neighbours |= {each.node_id for each in broken_route[index + 1 : index + 2] if stays[index + 1]}
        if standby not in able:
            standby = min(able, key=lambda node: (_extra_s(inputs, node, stage, neighbours), node))
        route.append(replace(stage, node_id=standby))
    if route_cost_s(route, inputs) > AFFINITY * route_cost_s(best, inputs):
        return None
    stages = tuple(
        Stage(node_id=stage.node_id, start=stage.layers.start, end=stage.layers.end) for stage in route
    )
    return Assembly(stages, standbys_of(route, allowed, inputs))


def _extra_s(
    inputs: RouteInputs, node_id: NodeId, stage: RouteStage, neighbours: Collection[NodeId]
) -> float:
    """What a stage costs on a node, with its hops from and to those neighbours."""
    hops_s = sum(inputs.hop_s(neighbour, node_id) for neighbour in neighbours)
    return inputs.layer_s(node_id) * len(stage.layers) + hops_s
