"""Turns reachable nodes and their layers into the stages of one request's pipeline, or into the reason why
there is none. `assemble` is the ten steps, in their order.

Pure: the caller (see `route_planner`) says who is alive and how fast. `scheduling.cheapest` compares routes.
This module words the message for the client when there is no route, because "no pipeline" alone sends people
to the logs.

`Affinity` remembers which pipeline answered a conversation last: its KV is still there, so the next turn goes
there too, where that is not much slower than the best.
"""

from __future__ import annotations

import shlex
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from swarmllm.errors import NoPipeline
from swarmllm.models.layers import LayerRange, covers
from swarmllm.scheduling.candidates import runnable
from swarmllm.scheduling.cheapest import cheapest_route, route_cost_s
from swarmllm.scheduling.constraints import Constraints, Refusal, permitted
from swarmllm.scheduling.cost import RouteInputs
from swarmllm.scheduling.kernel_groups import KernelGroup
from swarmllm.scheduling.plan import Plan, make_plan, standbys_of
from swarmllm.scheduling.route import MAX_STAGES, RouteStage, missing_layers, usable
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.ipc.base import RowFormat
from swarmllm_proto.swarm import Stage

CONVERSATIONS_MAX = 1024
"""The conversation that was silent longest is forgotten first."""
AFFINITY = 1.5
"""So much slower than the best route may a conversation's last one be and still be taken again: what it saves
is the prefill of everything said so far."""
Holders = Mapping[NodeId, Sequence[LayerRange]]


class Affinity:
    def __init__(self) -> None:
        self._stages: OrderedDict[tuple[str, str], tuple[Stage, ...]] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Affinity conversations={len(self._stages)}>"

    def remember(self, model_id: ModelId, conversation: str, stages: tuple[Stage, ...]) -> None:
        """`conversation` "": the client names none, and nothing is kept."""
        if not conversation:
            return
        self._stages[model_id, conversation] = stages
        self._stages.move_to_end((model_id, conversation))
        while len(self._stages) > CONVERSATIONS_MAX:
            self._stages.popitem(last=False)

    def previous(self, model_id: ModelId, conversation: str) -> tuple[Stage, ...]:
        return self._stages.get((model_id, conversation), ())


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """Everything that the pipeline of one request depends on."""

    n_layers: int
    cut_alignment: int
    holders: Holders
    """What every node says it holds, alive or not, this one included."""
    reachable: Collection[NodeId]
    """Node ids that can be reached now."""
    inputs: RouteInputs
    """Names every holder."""
    model_name: str = "the model"
    avoid: Collection[NodeId] = ()
    """Nodes that have just failed this request."""
    constraints: Constraints = field(default_factory=Constraints)
    previous: Sequence[Stage] = ()
    """The pipeline of this conversation's last turn."""
    whole_reason: str = ""
    """Why the model cannot be cut, where cut_alignment is 0."""


@dataclass(frozen=True, slots=True)
class Assembly:
    stages: tuple[Stage, ...]
    standbys: tuple[NodeId | None, ...]
    """For each stage, the node that would do its work best if it failed."""
    is_reused: bool = False
    """It is the pipeline of this conversation's last turn."""
    network_s: float | None = field(default=None, compare=False)
    """See `measuring.idle_network_s`."""
    cost_s: float = field(default=0.0, compare=False)
    """What the request is expected to take."""
    accepted_cost_s: float = field(default=0.0, compare=False)
    """What the request would take on the route that its stages have accepted already, where there is one."""
    first_s: float = field(default=0.0, compare=False)
    """Part of `cost_s`: until the first token."""
    token_s: float = field(default=0.0, compare=False)
    """Part of `cost_s`: from one token to the next."""
    travel_s: float = field(default=0.0, compare=False)
    """Part of `token_s`: on the network between the stages."""
    n_active: Mapping[NodeId, int] = field(default_factory=dict, compare=False)
    """Requests that ran on its nodes already, as they say."""
    row_formats: tuple[RowFormat, ...] = field(default=(), compare=False)
    """How rows come to each stage; empty: all as f32."""
    kernel_group: KernelGroup | None = field(default=None, compare=False)
    """Of an exact request: what all its nodes have in common."""
    untried: frozenset[NodeId] = field(default=frozenset(), compare=False)
    """Of its nodes, those with which there had been no connection when it was chosen."""

    @property
    def node_ids(self) -> frozenset[NodeId]:
        return frozenset(stage.node_id for stage in self.stages)


def assemble(query: RouteQuery) -> Assembly:
    """Raises NoPipeline with the layers that are missing, or with what was not allowed."""
    # 1. Manifest: how many layers, and where they may be cut.
    n_layers, cut_alignment = query.n_layers, query.cut_alignment
    # 2. Affinity: the pipeline of the last turn, weighed below against what is possible now.
    previous = tuple(
        RouteStage(stage.node_id, LayerRange(stage.start, stage.end)) for stage in query.previous
    )
    # 3. Holders, without those that have just failed.
    holders = {node: ranges for node, ranges in query.holders.items() if node not in query.avoid}
    # 4. Liveness: reachable now. A record outlives its writer, and so does what a DHT returns.
    holders = alive(holders, query.reachable, query.inputs.origin)
    # 7. The encrypted pipeline and pins take ranges away, so they come before the choice.
    allowed, refused = permitted(
        holders,
        query.constraints,
        model=query.model_name,
        n_layers=n_layers,
        origin=query.inputs.origin,
    )
    # 5., 6. and 8. Load and latency are in the inputs; Parallax chooses which part of what each node
    # holds is a stage.
    route = cheapest_route(n_layers, cut_alignment, allowed, query.inputs)
    if route is None:
        raise _no_pipeline(query, holders, allowed, refused)
    is_reused = may_be_reused(previous, route, query, allowed)
    if is_reused:
        route = previous
    # 9. Standbys, per stage.
    standbys = standbys_of(route, allowed, query.inputs)
    # 10. The caller assigns the stages, waits for every ACK, and only then forwards.
    stages = tuple(
        Stage(node_id=stage.node_id, start=stage.layers.start, end=stage.layers.end) for stage in route
    )
    return Assembly(stages, standbys, is_reused)


def alive(
    holders: Holders, reachable: Collection[NodeId], origin: NodeId
) -> dict[NodeId, Sequence[LayerRange]]:
    return {node: ranges for node, ranges in holders.items() if node == origin or node in reachable}


def may_be_reused(
    previous: Sequence[RouteStage], best: Sequence[RouteStage], query: RouteQuery, allowed: Holders
) -> bool:
    """Whether every node of the conversation's last pipeline is still there with its layers and has room,
    and it is expected to cost at most `AFFINITY` times what the best costs."""
    if not previous or tuple(previous) == tuple(best):
        return bool(previous)
    inputs = query.inputs
    for stage in previous:
        ranges = runnable(allowed.get(stage.node_id, ()), query.n_layers, query.cut_alignment)
        if not covers(ranges, stage.layers) or inputs.speeds[stage.node_id].is_full:
            return False
    return route_cost_s(previous, inputs) <= AFFINITY * route_cost_s(best, inputs)


def plan_route(query: RouteQuery, spared: Mapping[NodeId, str] | None = None) -> Plan:
    """The same choice with its reasons. `spared`: nodes that the route does without, by id, and why. Raises
    NoPipeline."""
    inputs, spared = query.inputs, spared or {}
    holders = alive(query.holders, query.reachable, inputs.origin)
    left_out = tuple(
        Refusal(node_id, layers, why)
        for node_id, why in spared.items()
        for layers in holders.get(node_id, ())
    )
    holders = {node_id: ranges for node_id, ranges in holders.items() if node_id not in spared}
    allowed, refused = permitted(
        holders,
        query.constraints,
        model=query.model_name,
        n_layers=query.n_layers,
        origin=inputs.origin,
    )
    plan = make_plan(query.n_layers, query.cut_alignment, allowed, inputs, refused)
    if plan is None:
        raise _no_pipeline(query, holders, allowed, refused)
    return replace(plan, refused=(*left_out, *plan.refused))


def _no_pipeline(
    query: RouteQuery, holders: Holders, allowed: Holders, refused: Sequence[Refusal]
) -> NoPipeline:
    n_layers, cut_alignment = query.n_layers, query.cut_alignment
    why = _why_not(query, allowed)
    inputs = query.inputs
    if refused and cheapest_route(n_layers, cut_alignment, holders, inputs) is not None:
        reasons = ", ".join(sorted({refusal.reason for refusal in refused}))
        why = f"{len(refused)} held ranges may not be used ({reasons}); of the others, {why}"
    return NoPipeline(f"{query.model_name} cannot run now: {why}. {_what_to_do(query, allowed)}")


def _what_to_do(query: RouteQuery, holders: Holders) -> str:
    n_layers, cut_alignment = query.n_layers, query.cut_alignment
    name = shlex.quote(query.model_name)
    held = usable([each for ranges in holders.values() for each in ranges], n_layers, cut_alignment)
    missing = missing_layers(n_layers, held) if cut_alignment else ()
    first = missing[0] if missing else LayerRange(0, n_layers)
    layers = "" if first == LayerRange(0, n_layers) else f" --layers {first.start}:{first.end}"
    which = "these layers" if len(missing) <= 1 else "the first of these layers"
    load = f"`swarmllm models load {name}{layers}` loads {which if layers else 'all of it'} on this node"
    return f"{load}; `swarmllm share {name}` distributes the model over the nodes of the swarm."


def _why_not(query: RouteQuery, holders: Holders) -> str:
    n_layers, cut_alignment = query.n_layers, query.cut_alignment
    held = [layers for ranges in holders.values() for layers in ranges]
    missing = missing_layers(n_layers, usable(held, n_layers, cut_alignment))
    if not missing:
        return f"the held ranges {_listed(held)} make no route of {MAX_STAGES} stages or fewer"
    if cut_alignment == 0:
        reason = f": {query.whole_reason}" if query.whole_reason else ""
        return f"no reachable node holds all its layers (0:{n_layers}), and it cannot be cut{reason}"
    if not missing_layers(n_layers, held):
        return f"the held ranges {_listed(held)} do not respect its cuts (every {cut_alignment} layers)"
    return f"no reachable node holds layers {_listed(missing)} of 0:{n_layers}"


def _listed(ranges: Sequence[LayerRange]) -> str:
    pairs = sorted({(layers.start, layers.end) for layers in ranges})
    shown = ", ".join(f"{start}:{end}" for start, end in pairs[:16])
    return f"{shown} and {len(pairs) - 16} more" if len(pairs) > 16 else shown
