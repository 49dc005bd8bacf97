"""From who is connected and holds what to the stages of one request's pipeline, or to the reason why there
is none.

Pure: the caller (see `routes`) says who is alive and how fast. What makes a route good is
`scheduling.cheapest`'s business; here are the words for the client when there is no route, because "no
pipeline" alone sends people to the logs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from swarmllm.errors import NoPipeline
from swarmllm.models.layers import LayerRange
from swarmllm.scheduling.cheapest import cheapest_route
from swarmllm.scheduling.cost import Circumstances
from swarmllm.scheduling.plan import Plan, make_plan
from swarmllm.scheduling.route import choose_route, missing_layers, usable
from swarmllm_proto.swarm import Stage


def assemble(
    n_layers: int,
    cut_alignment: int,
    holders: Mapping[str, Sequence[LayerRange]],
    origin: str,
    *,
    model_name: str = "the model",
    avoid: Collection[str] = (),
    circumstances: Circumstances | None = None,
) -> tuple[Stage, ...]:
    """Stages that cover [0, n_layers) exactly once, in order, each on a holder that is not in `avoid`.

    `holders`: the ranges of every node that is reachable, this one included, by node id.
    `circumstances` names at least those; without, the route with the fewest stages is taken. Raises
    NoPipeline with the layers that are missing.
    """
    candidates = {node_id: ranges for node_id, ranges in holders.items() if node_id not in avoid}
    if circumstances is None:
        route = choose_route(n_layers, cut_alignment, candidates, origin)
    else:
        route = cheapest_route(n_layers, cut_alignment, candidates, circumstances)
    if route is None:
        raise _no_pipeline(n_layers, cut_alignment, candidates, model_name)
    return tuple(
        Stage(node_id=stage.node_id, start=stage.layers.start, end=stage.layers.end) for stage in route
    )


def plan_route(
    n_layers: int,
    cut_alignment: int,
    holders: Mapping[str, Sequence[LayerRange]],
    circumstances: Circumstances,
    *,
    model_name: str = "the model",
) -> Plan:
    """The same choice with its reasons. Raises NoPipeline."""
    plan = make_plan(n_layers, cut_alignment, holders, circumstances)
    if plan is None:
        raise _no_pipeline(n_layers, cut_alignment, holders, model_name)
    return plan


def _no_pipeline(
    n_layers: int, cut_alignment: int, holders: Mapping[str, Sequence[LayerRange]], model_name: str
) -> NoPipeline:
    return NoPipeline(f"{model_name} cannot run now: {_why_not(n_layers, cut_alignment, holders)}")


def _why_not(n_layers: int, cut_alignment: int, holders: Mapping[str, Sequence[LayerRange]]) -> str:
    held = [layers for ranges in holders.values() for layers in ranges]
    missing = missing_layers(n_layers, usable(held, n_layers, cut_alignment))
    if not missing:
        return f"the held ranges {_listed(held)} share no boundaries that lead from 0 to {n_layers}"
    if cut_alignment == 0:
        return f"no connected node holds all its layers (0:{n_layers}), and it cannot be cut"
    if not missing_layers(n_layers, held):
        return f"the held ranges {_listed(held)} do not respect its cuts (every {cut_alignment} layers)"
    return f"no connected node holds layers {_listed(missing)} of 0:{n_layers}"


def _listed(ranges: Sequence[LayerRange]) -> str:
    pairs = sorted({(layers.start, layers.end) for layers in ranges})
    shown = ", ".join(f"{start}:{end}" for start, end in pairs[:16])
    return f"{shown} and {len(pairs) - 16} more" if len(pairs) > 16 else shown
