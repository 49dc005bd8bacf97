"""From who is connected and holds what to the stages of one request's pipeline, or to the reason why there
is none.

Pure: the caller (see `pipelines`) says who is alive. What makes a route good is `scheduling.route`'s
business; here are the words for the client when there is no route, because "no pipeline" alone sends people
to the logs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from swarmllm.errors import NoPipeline
from swarmllm.models.layers import LayerRange
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
) -> tuple[Stage, ...]:
    """Stages that cover [0, n_layers) exactly once, in order, each on a holder that is not in `avoid`.

    `holders`: the ranges of every node that is reachable, this one included, by node id. Raises NoPipeline
    with the layers that are missing.
    """
    candidates = {node_id: ranges for node_id, ranges in holders.items() if node_id not in avoid}
    route = choose_route(n_layers, cut_alignment, candidates, origin)
    if route is None:
        raise NoPipeline(f"{model_name} cannot run now: {_why_not(n_layers, cut_alignment, candidates)}")
    return tuple(
        Stage(node_id=stage.node_id, start=stage.layers.start, end=stage.layers.end) for stage in route
    )


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
