"""What a node tells the swarm about its load and its speed, and when that is news.

Latencies wander with every forward and round trips with every ping; a record for each of them would be
noise on every node of the swarm. So a change counts when a route could feel it.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarmllm.node.admission import Admission
from swarmllm.node.memory import memory_bytes
from swarmllm.scheduling.observation import MAX_MODELS, Observations
from swarmllm.swarm.router import PeerInfo
from swarmllm_proto.swarm import NodeCapability, ObservedLatency, ObservedRtt

MAX_RTTS = 32
NEWS = 0.25
"""A relative change of this much."""
NEGLIGIBLE_S = 0.001
"""Round trips that differ by less are alike."""


def describe(
    observations: Observations,
    peers: Iterable[PeerInfo],
    admission: Admission,
    stage_requests: int,
) -> NodeCapability:
    total_bytes, free_bytes = memory_bytes()
    measured = sorted((peer.rtt_s, peer.node_id) for peer in peers if peer.rtt_s is not None)
    return NodeCapability(
        memory_total_bytes=total_bytes,
        memory_free_bytes=free_bytes,
        active_requests=admission.n_active,
        max_requests=admission.max_running,
        stage_requests=stage_requests,
        queued_requests=admission.n_queued,
        memory_bytes_per_s=observations.machine.memory_bytes_per_s,
        flops=observations.machine.flops,
        observed_latencies=tuple(
            ObservedLatency(
                model_id=model_id, decode_s=latency.decode_s or 0.0, prefill_s=latency.prefill_s or 0.0
            )
            for model_id, latency in observations.latest()[:MAX_MODELS]
        ),
        observed_rtts=tuple(
            ObservedRtt(node_id=node_id, rtt_s=rtt_s) for rtt_s, node_id in measured[:MAX_RTTS]
        ),
    )


def is_news(old: NodeCapability, new: NodeCapability) -> bool:
    """Whether a route could turn out differently. Free memory alone never does."""
    if _counts(old) != _counts(new):
        return True
    before, after = _seconds(old), _seconds(new)
    return before.keys() != after.keys() or any(
        abs(after[key] - seconds) > max(NEWS * seconds, NEGLIGIBLE_S if key[0] == "rtt" else 0.0)
        for key, seconds in before.items()
    )


def _counts(capability: NodeCapability) -> tuple[float, ...]:
    return (
        capability.active_requests,
        capability.stage_requests,
        capability.queued_requests,
        capability.max_requests,
        capability.memory_bytes_per_s,
        capability.flops,
    )


def _seconds(capability: NodeCapability) -> dict[tuple[str, str], float]:
    seconds = {("rtt", rtt.node_id): rtt.rtt_s for rtt in capability.observed_rtts}
    for latency in capability.observed_latencies:
        seconds["decode", latency.model_id] = latency.decode_s
        seconds["prefill", latency.model_id] = latency.prefill_s
    return seconds
