"""One model as this node sees it: from its catalogue, its workers, and what the swarm says."""

from __future__ import annotations

from collections.abc import Callable

from swarmllm.downloads import WaitingView
from swarmllm.models import CatalogueEntry, LayerRange, merge
from swarmllm.node.views import HolderView, ModelView
from swarmllm.scheduling.route import choose_route, missing_layers
from swarmllm.swarm.registry import SwarmModel
from swarmllm.travel.travel import announcement
from swarmllm.workerpool.settings import LoadOptions, ModelMemory


def view_model(
    entry: CatalogueEntry | None,
    model: SwarmModel | None,
    node_id: str,
    *,
    loaded: tuple[LayerRange, ...],
    memory: ModelMemory,
    settings: LoadOptions | None,
    sources: tuple[str, ...],
    nickname_of: Callable[[str], str],
) -> ModelView:
    """`loaded`: this node's own ranges, as its pool has them; its record may still be on its way to the
    registry."""
    n_layers = entry.manifest.n_layers if entry else model.n_layers if model else 0
    held: dict[str, tuple[LayerRange, ...]] = {node_id: loaded} if loaded else {}
    for holder in model.holders if model else ():
        if holder.node_id != node_id:
            held[holder.node_id] = (*held.get(holder.node_id, ()), holder.layers)
    ranges = [layers for node_ranges in held.values() for layers in node_ranges]
    alignment = entry.manifest.cut_alignment if entry else 1
    return ModelView(
        model_id=entry.model_id if entry else model.model_id if model else "",
        name=entry.name if entry else model.name if model else "",
        n_layers=n_layers,
        entry=entry,
        files=announcement(entry) if entry else None,
        sources=sources,
        loaded=loaded,
        memory=memory,
        settings=settings,
        holders=tuple(
            HolderView(holder, nickname_of(holder), merge(layers), holder == node_id)
            for holder, layers in held.items()
        ),
        missing=tuple(missing_layers(n_layers, ranges)),
        complete=choose_route(n_layers, alignment, held, node_id) is not None,
    )


def view_waiting(waiting: WaitingView) -> ModelView:
    return ModelView(
        model_id="",
        name=waiting.name,
        n_layers=waiting.n_layers,
        entry=None,
        files=None,
        sources=(),
        loaded=(),
        memory=ModelMemory(),
        settings=None,
        holders=(),
        missing=(LayerRange(0, waiting.n_layers),),
        complete=False,
        waiting=waiting,
    )
