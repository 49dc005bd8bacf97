"""What an origin learns of its peers' speed from one pipeline: the time that is theirs, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.origin.generation import StageReport, TokenSource
from swarmllm.pipeline.route.assembly import Assembly
from swarmllm.pipeline.route.measuring import measure, travel_s
from swarmllm.scheduling.speeds import LEAST_TOKENS, PeerSpeeds
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers.trust import TrustEvent
from swarmllm_proto.identifiers import NodeId

A, B, C = (node_id_named(name) for name in "abc")
N_DECODED = 10


def stage(node_id: NodeId, layers: str, compute_s: float = 0.0, overhead_s: float = 0.0) -> StageReport:
    return StageReport(node_id, "", LayerRange.parse(layers), compute_s, overhead_s)


def learnt(route: tuple[StageReport, ...], token_s: float, **known: Any) -> dict[NodeId, float | None]:
    speeds, noted = PeerSpeeds(), []
    n_decoded = known.get("n_decoded", N_DECODED)
    source = SimpleNamespace(
        shape=known.get("shape", "chain"),
        route=route,
        decode_s=token_s * n_decoded,
        n_generated=n_decoded + 1,
    )
    assembly = Assembly((), (), travel_s=known.get("travel_s", 0.0), n_active=known.get("n_active", {}))
    for _ in range(known.get("times", 1)):
        measure(
            speeds,
            cast(TokenSource, source),
            assembly,
            "m",
            A,
            lambda node_id: 0.001,
            lambda node_id, event, detail="": noted.append((node_id, event)),
            0.0,
        )
    assert noted == known.get("noted", [])
    return {node_id: speeds.layer_s("m", node_id, 1.0) for node_id in (A, B, C)}


def test_what_ran_here_and_what_travelled_is_nobody_elses_time() -> None:
    route = (stage(A, "0:4", 0.2, 0.1), stage(B, "4:8", 0.0))
    assert learnt(route, 0.5, travel_s=0.08) == pytest.approx({A: None, B: 0.025, C: None})


def test_requests_that_run_there_are_counted_by_the_route_already() -> None:
    route = (stage(A, "0:4"), stage(B, "4:8"))
    assert learnt(route, 0.4, n_active={B: 3})[B] == pytest.approx(0.38 / 4 / 4)


def test_too_few_tokens_and_pipelines_at_home_teach_nothing() -> None:
    route = (stage(A, "0:4"), stage(B, "4:8"))
    assert learnt(route, 0.4, n_decoded=LEAST_TOKENS - 1)[B] is None
    assert learnt(route, 0.4, n_decoded=LEAST_TOKENS)[B] is not None
    assert learnt((stage(A, "0:8"),), 0.4, shape="local") == {A: None, B: None, C: None}


def test_only_who_was_alone_is_held_to_what_it_announced() -> None:
    alone, beside = (stage(B, "4:12"),), (stage(B, "4:8"), stage(C, "8:12"))
    learnt(alone, 0.4, times=3, noted=[(B, TrustEvent.OVERSTATED)])
    learnt(beside, 0.4, times=30)


def test_a_token_travels_between_other_nodes_only() -> None:
    assert travel_s([A, B, B, C], lambda a, b: 0.02, 0.001) == pytest.approx(3 * 0.011)
    assert travel_s([A], lambda a, b: 0.02, 0.001) == 0
