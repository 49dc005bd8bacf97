"""What a hop takes besides travelling and computing: framing, queues, wake-ups, a worker's turn.

An origin learns it from its own requests: from one token to the next, less what the stages computed, less
half a round trip per hop, is what handling took at all hops together. Only from requests that had their nodes
to themselves, because waiting for others is load, which routes count already; and only where every round trip
was measured, because a guess would pass for handling.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from swarmllm.pipeline.origin.generation import Source
from swarmllm.scheduling.cost import RouteInputs
from swarmllm.scheduling.observation import Observations
from swarmllm_proto.swarm import Stage

LEAST_TOKENS = 16
"""A mean over fewer says little."""


def undisturbed_ways_s(stages: Sequence[Stage], known: RouteInputs) -> float | None:
    """How long one token travels along the ring of these stages; None where nothing can be learned."""
    node_ids = [stage.node_id for stage in stages]
    if any(known.speeds[node_id].n_active for node_id in node_ids):
        return None
    rtts_s = [known.measured_rtt_s(a, b) for a, b in pairwise([*node_ids, node_ids[0]])]
    known_s = [rtt_s for rtt_s in rtts_s if rtt_s is not None]
    return sum(known_s) / 2 if len(known_s) == len(rtts_s) else None


def learn(observations: Observations, source: Source, ways_s: float | None) -> None:
    """From a pipeline that has answered; `ways_s` as above, of when it was chosen."""
    if ways_s is None or source.shape != "chain" or source.n_generated < LEAST_TOKENS:
        return
    route = source.route
    node_ids = [stage.node_id for stage in route]
    n_hops = sum(a != b for a, b in pairwise([*node_ids, node_ids[0]]))
    if n_hops:
        spent_s = sum(stage.overhead_s + stage.network_s for stage in route)
        observations.observe_hop(max(0.0, spent_s - ways_s) / n_hops)
