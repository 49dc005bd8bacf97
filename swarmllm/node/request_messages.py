"""What a node says about a request: why it cannot be meant, and afterwards one line for the log."""

from __future__ import annotations

from swarmllm.errors import BadModel, InvalidRequest
from swarmllm.models import CatalogueEntry, LayerRange
from swarmllm.pipeline.origin.generation import Generation


def account(generation: Generation) -> str:
    """One line for the log; nothing of what was said."""
    timings, n_generated = generation.timings, generation.n_generated
    nodes = " ".join(f"{stage.layers}@{stage.nickname or stage.node_id}" for stage in generation.route)
    return (
        f"{generation.n_prompt_tokens} + {n_generated} tokens, {generation.finish_reason or 'left early'}, "
        f"queue {timings.queue_s:.3f} s, prefill {timings.prefill_s:.3f} s, decode {timings.decode_s:.3f} s, "
        f"{generation.shape} {nodes}"
    )


def check_layers(entry: CatalogueEntry, layers: LayerRange, *, may_cut: bool = False) -> None:
    """Raises InvalidRequest, BadModel. `may_cut`: whether it may be cut so is found out later."""
    manifest = entry.manifest
    if layers not in manifest.whole:
        raise InvalidRequest(f"{entry.name} has layers {manifest.whole}, not {layers}.", field="layers")
    if not may_cut and not (manifest.can_cut_at(layers.start) and manifest.can_cut_at(layers.end)):
        why = manifest.whole_reason or f"cuts are possible at multiples of {manifest.cut_alignment}"
        raise BadModel(f"{entry.name} cannot be cut at {layers}: {why}.", field="layers")
