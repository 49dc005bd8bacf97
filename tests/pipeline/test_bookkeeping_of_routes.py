"""What a choice of a route counts and tells, and what a stage's worker is told once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Unpack

import pytest
from msgspec.structs import replace
from node_ids import A, B, C

from bench.common.arithmetic import FakePool, fake_entry
from swarmllm.errors import NoPipeline
from swarmllm.models.layers import LayerRange
from swarmllm.models.manifest import Manifest, Shard
from swarmllm.pipeline.route.assembly import Assembly, _listed, may_be_reused
from swarmllm.pipeline.route.inputs import OwnLoad, _layer_size, prefill_here_s
from swarmllm.pipeline.route.local_load import LocalLoad
from swarmllm.pipeline.route.request_routes import UNTRIED
from swarmllm.pipeline.route.route_planner import DEFAULT_SIZE, RequestSize
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.compute import ForwardCall
from swarmllm.scheduling.route import RouteStage
from swarmllm.scheduling.speeds import MachineSpeed, Observations, roofline
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import NodeCapability, ObservedLatency

from .fakes import open_swarm
from .test_assembly import ask, held, stages
from .test_survival import N_TOKENS, SETTINGS, kills, pools_of, read


async def test_a_broken_pipeline_is_mended_where_a_stage_of_it_stays_and_else_replace() -> None:
    async with open_swarm(pools_of(a="0:6", b="6:12 0:12", c="6:12"), settings=SETTINGS) as swarm:
        routes = swarm[A].pipelines._routes.planner
        whole = Assembly(stages("b 0:12"), (None,))
        cut = Assembly(stages("a 0:6", "b 6:12"), (None, C))
        for broken in (cut, whole):
            chosen = await routes.choose(swarm.entry, DEFAULT_SIZE, OwnLoad(), {B}, broken=broken)
            assert chosen.stages == stages("a 0:6", "c 6:12")


@pytest.mark.parametrize(
    "change",
    [{"full": (B,)}, {"holders": held(a="0:6", b="6:9", c="6:12")}],
    ids=["full", "without its layers"],
)
def test_a_conversation_does_not_go_back_to_a_node_that_has_no_room_or_has_dropped_its_layers(
    change: dict[str, Any],
) -> None:
    holders = held(a="0:6", b="6:12", c="6:12")
    previous = [RouteStage(A, LayerRange(0, 6)), RouteStage(B, LayerRange(6, 12))]
    best = [RouteStage(A, LayerRange(0, 6)), RouteStage(C, LayerRange(6, 12))]
    question = ask(**({"holders": holders} | change))
    assert not may_be_reused(previous, best, question, question.holders)
    assert may_be_reused(previous, best, ask(holders), holders)


def test_a_refusal_lists_sixteen_ranges_and_says_how_many_more_there_are() -> None:
    ranges = [LayerRange(i, i + 2) for i in range(20)]
    assert _listed(ranges[:16]).count(":") == 16
    assert "more" not in _listed(ranges[:16])
    for n in (17, 20):
        assert _listed(ranges[:n]) == f"{_listed(ranges[:16])} and {n - 16} more"


async def test_ranges_that_meet_where_no_cut_is_allowed_are_no_range() -> None:
    """Layers 0:3 and 3:6 of a model that may be cut at 4 and 8 run nowhere as 0:4."""
    async with open_swarm(
        {A: FakePool("4:12"), B: FakePool("0:3", "3:6")}, entry=fake_entry(cut_alignment=4)
    ) as swarm:
        with pytest.raises(NoPipeline, match="do not respect its cuts"):
            await swarm[A].pipelines.stages_for(swarm.entry)


DIGEST = "0" * 64


@pytest.mark.parametrize("n_layers", [0, 1, 3])
def test_the_size_of_a_layer_is_their_mean(n_layers: int) -> None:
    layers = [
        Shard(kind="layer", index=i, size_bytes=100 * (i + 1), blake3=DIGEST, tensors=())
        for i in range(n_layers)
    ]
    head = Shard(kind="head", index=0, size_bytes=999, blake3=DIGEST, tensors=())
    manifest: Manifest = replace(fake_entry().manifest, shards=(*layers, head))
    expected = sum(100 * (i + 1) for i in range(n_layers)) / n_layers if n_layers else 0.0
    assert _layer_size(manifest) == (expected, 0.0)


@pytest.mark.parametrize(
    ("factors", "factor"),
    [((), 1.0), ((4.0,), 4.0), ((2.0, 3.0, 9.0), 3.0), ((0.25, 0.5), 1.0), ((2.0, 0.0, 4.0), 3.0)],
)
def test_a_prompt_takes_as_much_longer_than_it_could_as_it_does_elsewhere(
    factors: tuple[float, ...], factor: float
) -> None:
    """0: a node that says nothing of the model. No node is believed to be quicker than it could be."""
    layer = Shard(kind="layer", index=0, size_bytes=1000, blake3=DIGEST, tensors=())
    manifest: Manifest = replace(fake_entry().manifest, shards=(layer,))
    model_id, observations = manifest.model_id, Observations()
    assert prefill_here_s(model_id, manifest, observations) is None
    least_s = roofline(MachineSpeed(1e6, 1e9), *_layer_size(manifest)).prefill_s
    assert least_s is not None
    others = [
        NodeCapability(
            memory_bytes_per_s=1e6,
            flops=1e9,
            observed_latencies=(ObservedLatency(model_id=model_id, decode_s=1.0, prefill_s=least_s * each),)
            if each
            else (),
        )
        for each in factors
    ]
    observations.machine = MachineSpeed(2e6, 2e9)
    expected_s = factor * least_s / 2 * manifest.n_layers
    assert prefill_here_s(model_id, manifest, observations, others) == pytest.approx(expected_s)
    observations.observe(model_id, "prefill", 6.0, 2, 3)
    assert prefill_here_s(model_id, manifest, observations, others) == pytest.approx(manifest.n_layers)


class Recording(FakePool):
    """Remembers how each token was to be sampled."""

    def __init__(self, *ranges: str) -> None:
        super().__init__(*ranges)
        self.samplings: list[Sampling | None] = []

    async def forward(self, model: ModelFile, **call: Unpack[ForwardCall]) -> Any:
        if call["want"] == "token":
            self.samplings.append(call.get("sampling"))
        return await super().forward(model, **call)


async def test_a_worker_is_told_once_how_to_sample() -> None:
    """It would begin a sampler anew with every token: its penalties and its random numbers."""
    last = Recording("6:12")
    pools = {**pools_of(a="0:6"), B: last}
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        await read(swarm, A, kills(swarm))
    reported = last.samplings
    assert len(reported) == N_TOKENS
    assert reported[0] is not None
    assert reported[1:] == [None] * (N_TOKENS - 1)


@pytest.mark.parametrize(("n_own", "n_for_others"), [(0, 0), (1, 0), (0, 1)])
def test_a_node_is_busy_with_requests_of_anybody(n_own: int, n_for_others: int) -> None:
    requests: Any = [object()] * n_own
    sessions: Any = SimpleNamespace(n_for_others=lambda: n_for_others)
    load = LocalLoad(FakePool("0:1"), requests, sessions, PipelineSettings())
    assert load.is_busy() is bool(n_own or n_for_others)


async def test_a_token_is_planned_without_the_prompt() -> None:
    pools = pools_of(a="0:6", b="6:12")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        planner = swarm[A].pipelines._routes.planner
        load = OwnLoad()
        chosen = [
            await planner.choose(swarm.entry, RequestSize(n_prompt, 10), load, ()) for n_prompt in (1, 4000)
        ]
    assert chosen[0].token_s == chosen[1].token_s
    assert chosen[0].first_s < chosen[1].first_s
    assert chosen[0].first_s > chosen[0].token_s


async def test_an_untried_node_is_spared_until_the_others_have_much_more_to_do() -> None:
    async with open_swarm(pools_of(a="0:6", b="6:12", c="6:12"), settings=SETTINGS) as swarm:
        planner = swarm[A].pipelines._routes.planner
        size, quiet, busy = RequestSize(), OwnLoad(), OwnLoad(reported={C: 50})
        for load, chosen in ((quiet, C), (busy, B)):
            found = await planner.choose(swarm.entry, size, load, (), untried={B})
            assert found.node_ids == {A, chosen}
            plan = await planner.plan(swarm.entry, size, load, {}, {B: UNTRIED})
            assert {stage.node_id for stage in plan.stages} == {A, chosen}
        found = await planner.choose(swarm.entry, size, busy, (), suspects=[B])
        assert found.node_ids == {A, C}, "a suspect is spared at any price"
