"""What an origin learns of its peers' speed from a pipeline that has given tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from swarmllm.pipeline.origin.generation import Source
from swarmllm.pipeline.route.assembly import Assembly
from swarmllm.scheduling.peer_speeds import HANDLING_S, LEAST_TOKENS, PeerSpeeds, StageTime, layer_times
from swarmllm.swarm.peers.trust import Deed, Note
from swarmllm_proto.identifiers import ModelId, NodeId


def measure(
    speeds: PeerSpeeds,
    source: Source,
    assembly: Assembly,
    model_id: ModelId,
    here: NodeId,
    announced_s: Callable[[NodeId], float | None],
    note: Note,
    now_s: float,
) -> None:
    """From the first pipeline of a stream. `announced_s`: what a node says now that a layer takes for a row,
    because an honest one that has become slow has said so meanwhile."""
    n_decoded = source.n_generated - 1
    if source.shape == "local" or n_decoded < LEAST_TOKENS:
        return
    route = source.route
    stages = [
        StageTime(stage.node_id, len(stage.layers), stage.compute_s)
        for stage in route
        if stage.node_id != here
    ]
    here_s = sum(stage.compute_s + stage.overhead_s for stage in route if stage.node_id == here)
    token_s = source.decode_s / n_decoded
    spent_s = token_s - here_s - assembly.travel_s
    for node_id, layer_s in layer_times(stages, spent_s, HANDLING_S * len(stages)).items():
        was_alone = all(stage.node_id == node_id for stage in stages)
        # Others that run there slow it down, as it has announced and as routes count already.
        alone_s = layer_s / (1 + assembly.n_active.get(node_id, 0))
        said_s = announced_s(node_id)
        if speeds.observe(model_id, node_id, alone_s, now_s, announced_s=said_s, was_alone=was_alone):
            note(node_id, Deed.OVERSTATED, f"a layer takes {alone_s:.2g} s, it announces {said_s or 0:.2g} s")


def travel_s(
    node_ids: Sequence[NodeId], rtt_s: Callable[[NodeId, NodeId], float], handling_s: float
) -> float:
    """What one token is expected to take along the ring of these stages besides being computed."""
    hops = [(a, b) for a, b in pairwise([*node_ids, *node_ids[:1]]) if a != b]
    return sum(rtt_s(a, b) / 2 + handling_s for a, b in hops)
