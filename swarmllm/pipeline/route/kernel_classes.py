"""Chooses routes for exact requests: all stages on nodes whose kernels give equal bits.

A node announces the class of its kernels for each model that it has loaded. Rows that pass nodes of unlike
classes have other bits than those of a route within one, so an exact request gets a route within one class,
or none. A node that announces no class is like no other: it can only run the whole model.

Pure: announcements come in as values, and are hearsay. A node that announces a wrong class computes rows that
a check finds unequal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from swarmllm.errors import NoPipeline
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.route.assembly import Assembly, RouteQuery
from swarmllm.scheduling.cheapest import route_cost_s
from swarmllm.scheduling.kernel_groups import KernelGroup, alike
from swarmllm.scheduling.route import RouteStage
from swarmllm_proto.identifiers import NodeId

SHOWN_MAX: Final = 4
"""Classes that a refusal names."""


def in_one_class(
    query: RouteQuery,
    classes: Mapping[NodeId, str],
    choose: Callable[[RouteQuery], Assembly],
    *,
    within: KernelGroup | None = None,
) -> Assembly:
    """The best of the routes that `choose` finds within one class each. `within`: the only class that counts,
    as what the request was told so far has its bits. Raises NoPipeline, which names the classes where nothing
    else is in the way."""
    best: Assembly | None = None
    best_s = 0.0
    whole = alike(query.holders, classes, query.n_layers, query.inputs.origin)
    for kernel_group, holders in whole.items():
        if within is not None and kernel_group != within:
            continue
        try:
            found = choose(replace(query, holders=holders))
        except NoPipeline:
            continue
        route = [RouteStage(stage.node_id, LayerRange(stage.start, stage.end)) for stage in found.stages]
        cost_s = route_cost_s(route, query.inputs)
        if best is None or cost_s < best_s:
            best, best_s = replace(found, kernel_group=kernel_group), cost_s
    if best is not None:
        return best
    choose(query)  # Where there is no route of any kind, that is the reason.
    raise NoPipeline(f"{query.model_name} cannot run exactly now: {_why_not(query, classes, within)}")


def _why_not(query: RouteQuery, classes: Mapping[NodeId, str], within: KernelGroup | None) -> str:
    if within is not None:
        return f"it was begun by nodes whose kernels are {within}, and no others of them have all layers"
    groups = (KernelGroup.of(node_id, classes.get(node_id, "")) for node_id in query.holders)
    names = sorted({str(each) for each in groups})
    shown = ", ".join(names[:SHOWN_MAX])
    more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
    return f"no nodes whose kernels give equal bits hold all its layers (classes: {shown}{more})"
