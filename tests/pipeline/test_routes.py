"""From measurements to routes: what is believed of nodes that ran, that did not, and that are busy."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio
from node_ids import A, B, C, D, O, X, Y, node_id_named

from bench.common.arithmetic import FakePool, fake_entry
from swarmllm.models.layers import LayerRange
from swarmllm.models.manifest import Manifest, Shard, TensorEntry
from swarmllm.pipeline.origin.generation import Prompt
from swarmllm.pipeline.route.inputs import (
    PAIRS_MAX,
    SLOWEST_LAYER_S,
    NetworkDistances,
    OwnLoad,
    route_inputs,
    workload,
)
from swarmllm.pipeline.route.measuring import ObservedCompute
from swarmllm.pipeline.route.request_routes import DOUBTED
from swarmllm.pipeline.route.route_planner import UNSIGNED, RequestSize
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.capacity import HeldCapacity, Room, room_left
from swarmllm.scheduling.cheapest import cheapest_route
from swarmllm.scheduling.cost import LINK_BYTES_PER_S, UNMEASURED_RTT_S, RouteInputs
from swarmllm.scheduling.speeds import MachineSpeed, Observations
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import NetworkCoordinate, NodeCapability, ObservedLatency, ObservedLink

from .fakes import computes, open_swarm


def manifest() -> Manifest:
    """Four layers of a million weights in as many bytes."""
    entry = TensorEntry(
        name="blk.0.w", ggml_type=0, shape=(1000, 1000), offset=0, size_bytes=10**6, blake3="0" * 64
    )
    shards = tuple(
        Shard(index=i, kind="layer", size_bytes=10**6, blake3="0" * 64, tensors=(entry,)) for i in range(4)
    )
    return msgspec.structs.replace(fake_entry().manifest, n_layers=4, shards=shards)


MODEL_ID = manifest().model_id


def ran(decode_s: float, **more: float) -> NodeCapability:
    latency = ObservedLatency(model_id=MODEL_ID, decode_s=decode_s, prefill_s=decode_s / 10)
    return msgspec.structs.replace(NodeCapability(observed_latencies=(latency,)), **more)


def believed(
    capabilities: dict[str, NodeCapability],
    observations: Observations | None = None,
    load: OwnLoad | None = None,
    origin: str = O,
) -> RouteInputs:
    model = manifest()
    return route_inputs(
        origin,
        model,
        workload(model, 10, 20),
        [origin, *capabilities],
        capabilities,
        NetworkDistances({A: 0.01}),
        observations or Observations(),
        load or OwnLoad(),
    )


@pytest.mark.parametrize("announced", [1e300, 1e-300, 5e-324])
def test_announced_times_at_the_limits_of_numbers_overflow_nothing(announced: float) -> None:
    """numpy's warning about an overflow is an error in tests."""
    link = ObservedLink(node_id=B, rtt_s=0.0, bytes_per_s=announced)
    said = msgspec.structs.replace(ran(announced), observed_links=(link,))
    known = believed({A: said, B: ran(1e300), C: NodeCapability(memory_bytes_per_s=5e-324)})
    for speed in known.speeds.values():
        assert 0 < speed.decode_s <= SLOWEST_LAYER_S
        assert 0 < speed.prefill_s <= SLOWEST_LAYER_S
    holders = {O: [LayerRange(0, 2)], A: [LayerRange(2, 4)], B: [LayerRange(2, 4)]}
    assert cheapest_route(4, 1, holders, known)


@pytest.mark.parametrize(
    ("measured_s", "believed_s"), [(0.0079, 0.004), (0.012, 0.012), (1e300, SLOWEST_LAYER_S)]
)
def test_what_this_node_measured_counts_where_it_is_much_slower(measured_s: float, believed_s: float) -> None:
    model = manifest()
    work, distances = workload(model, 10, 20), NetworkDistances()
    said = {"a": ran(0.004), "b": ran(0.005)}
    observations, measured = Observations(), {NodeId("a"): measured_s, NodeId("gone"): 1.0}
    known = route_inputs(
        "o", model, work, ["o", "a", "b"], said, distances, observations, OwnLoad(), measured
    )
    assert known.speeds[NodeId("a")].decode_s == pytest.approx(believed_s)
    expected_s = (
        min(0.0004 * max(measured_s, 0.004) / 0.004, SLOWEST_LAYER_S) if measured_s > 0.008 else 0.0004
    )
    assert known.speeds[NodeId("a")].prefill_s == pytest.approx(expected_s)
    assert known.speeds[NodeId("b")].decode_s == pytest.approx(0.005)


def test_what_a_node_observed_is_believed() -> None:
    known = believed({A: ran(0.004)})
    speed = known.speeds[A]
    assert (speed.decode_s, speed.prefill_s, speed.is_measured) == (0.004, 0.0004, True)
    assert known.workload.row_bytes == 4 * manifest().n_embd


def test_a_node_that_never_ran_is_estimated_as_far_off_as_the_others_were() -> None:
    """a reads 1 GB/s and takes four times its roofline; b reads twice as fast."""
    capabilities = {
        A: ran(0.004, memory_bytes_per_s=1e9, flops=1e15),
        B: NodeCapability(memory_bytes_per_s=2e9, flops=1e15),
    }
    speeds = believed(capabilities).speeds
    assert speeds[B].decode_s == pytest.approx(0.002)
    assert not speeds[B].is_measured


def test_a_node_of_which_nothing_is_known_is_typical_and_without_any_all_are_equal() -> None:
    speeds = believed({A: ran(0.004), B: NodeCapability()}).speeds
    assert speeds[B].decode_s == 0.004
    unknown = believed({A: NodeCapability(), B: NodeCapability()}).speeds
    assert len({(speed.decode_s, speed.prefill_s) for speed in unknown.values()}) == 1


def test_this_node_knows_itself_from_its_own_observations() -> None:
    observations = Observations()
    observations.machine = MachineSpeed(1e9, 1e12)
    observations.observe(MODEL_ID, "decode", 0.008, 4, 1)
    speed = believed({O: ran(0.5), A: ran(0.004)}, observations, OwnLoad(3)).speeds[O]
    assert (speed.decode_s, speed.n_active, speed.is_measured) == (pytest.approx(0.002), 3, True)


def test_load_and_full_nodes_are_seen() -> None:
    speeds = believed(
        {
            A: NodeCapability(active_requests=1, stage_requests=2, max_requests=4),
            B: NodeCapability(active_requests=1, stage_requests=3, max_requests=4),
        }
    ).speeds
    assert (speeds[A].n_active, speeds[A].is_full) == (3, False)
    assert speeds[B].lacks == "4 requests run there, and it takes 4"


def test_round_trips_between_others_are_theirs_to_tell_and_ours_are_not() -> None:
    reported = NodeCapability(
        observed_links=(
            ObservedLink(node_id=B, rtt_s=0.02),
            ObservedLink(node_id=O, rtt_s=9.0),
            ObservedLink(node_id="stranger", rtt_s=0.01),
        )
    )
    known = believed({A: reported, B: NodeCapability()})
    assert known.pair_rtt_s == {(A, B): 0.02}
    assert known.rtt_s(B, A) == 0.02
    assert known.rtt_s(O, A) == 0.01


def test_of_many_links_between_others_the_nearest_of_each_count() -> None:
    nodes = [node_id_named(f"n{number}") for number in range(257)]
    distances = {
        node: tuple(ObservedLink(node_id=nodes[(at + n) % 257], rtt_s=0.001 * n) for n in range(1, 33))
        for at, node in enumerate(nodes)
    }
    known = believed({node: NodeCapability(observed_links=distances[node]) for node in nodes})
    n_each = PAIRS_MAX // 257
    assert len(known.pair_rtt_s) == 257 * n_each
    assert max(known.pair_rtt_s.values()) == pytest.approx(0.001 * n_each)


async def test_forwards_and_generations_are_observed() -> None:
    entry, observations = fake_entry(), Observations()
    model = ModelFile(entry.model_id, Path("/nowhere"))
    compute = ObservedCompute(SlowPool("0:12"), observations)
    for n_rows in (1, 8):
        await compute.forward(
            model,
            request_id="r",
            layers=LayerRange(0, 12),
            position=0 if n_rows == 1 else 1,
            tensor=np.zeros((n_rows, entry.manifest.n_embd), np.float32),
            want="hidden",
        )
    latency = observations.latency(entry.model_id)
    assert latency.decode_s == pytest.approx(0.012 / 12)
    assert latency.prefill_s == pytest.approx(0.012 / 12 / 8)


class SlowPool(FakePool):
    """Says that every forward took 12 ms."""

    async def forward(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        result = await super().forward(*args, **kwargs)  # type: ignore[arg-type]
        return SlowResult(result.tensor, result.token, result.piece, 0.012)


class SlowResult(msgspec.Struct):
    tensor: object
    token: object
    piece: bytes
    compute_s: float


async def test_a_request_goes_where_the_gossip_says_it_is_quicker() -> None:
    async with open_swarm({A: FakePool(), B: FakePool("0:12"), C: FakePool("0:12")}) as swarm:
        pipelines, entry = swarm[A].pipelines, swarm.entry
        (before,) = [stage.node_id for stage in (await pipelines.stages_for(entry))]
        (other,) = {B, C} - {before}
        said = {before: computes(entry.model_id, 0.004), other: computes(entry.model_id, 0.001)}
        await swarm.tell(A, said)
        assert [stage.node_id for stage in (await pipelines.stages_for(entry))] == [other]
        plan = await pipelines.plan(entry, RequestSize(100, 200))
        assert (plan.stages[0].node_id, plan.stages[0].standby, plan.stages[0].is_measured) == (
            other,
            before,
            True,
        )
        async with pipelines.generate(Prompt(text="hi"), entry, Sampling(max_tokens=3)) as generation:
            assert [stage.node_id for stage in generation.route] == [other]
            async for _ in generation:
                pass


@pytest.mark.parametrize("committing", [None, {A, B}])
async def test_a_plan_names_those_that_a_request_does_without_and_why(committing: set[str] | None) -> None:
    """C is the quicker one, and does not sign for its rows or is in doubt."""
    pools = {A: FakePool(), B: FakePool("0:12"), C: FakePool("0:12")}
    async with open_swarm(pools, committing=committing) as swarm:
        pipelines, entry = swarm[A].pipelines, swarm.entry
        await swarm.tell(A, {B: computes(entry.model_id, 0.004), C: computes(entry.model_id, 0.001)})
        why = UNSIGNED
        if committing is None:
            why = DOUBTED
            pipelines._suspects.doubt([C], trio.current_time())
        plan = await pipelines.plan(entry, RequestSize(100, 200))
        assert [(each.node_id, each.reason) for each in plan.refused] == [(C, why)]
        async with pipelines.generate(Prompt(text="hi"), entry, Sampling(max_tokens=3)) as generation:
            assert (
                [each.node_id for each in plan.stages] == [each.node_id for each in generation.route] == [B]
            )
            async for _ in generation:
                pass


async def test_a_plan_has_a_node_in_doubt_whose_layers_nobody_else_has() -> None:
    async with open_swarm({A: FakePool(), B: FakePool("0:12")}, committing={A}) as swarm:
        pipelines = swarm[A].pipelines
        pipelines._suspects.doubt([B], trio.current_time())
        plan = await pipelines.plan(swarm.entry, RequestSize(100, 200))
        assert ([each.node_id for each in plan.stages], plan.refused) == ([B], ())


def test_origins_lean_to_different_ones_of_like_nodes_and_to_none_that_is_clearly_slower() -> None:
    alike = {f"n{i}": ran(0.004) for i in range(8)} | {"slow": ran(0.0044)}
    chosen = set()
    for i in range(40):
        known = believed(alike, origin=f"o{i}")
        assert all(known.speeds[node_id].decode_s == 0.004 for node_id in alike if node_id != "slow")
        chosen.add(min(alike, key=lambda node_id, known=known: known.layer_s(node_id)))
    assert chosen == set(alike) - {"slow"}


def test_what_was_just_sent_elsewhere_counts_before_its_record_says_so() -> None:
    speeds = believed(
        {A: NodeCapability(active_requests=1), B: NodeCapability()}, load=OwnLoad(sent={A: 2})
    ).speeds
    assert (speeds[A].n_active, speeds[B].n_active) == (3, 0)


async def test_a_second_request_of_the_same_moment_goes_to_the_other_node() -> None:
    pools = {A: FakePool(), B: FakePool("0:12"), C: FakePool("0:12")}
    async with open_swarm(pools) as swarm:
        pipelines, prompt = swarm[A].pipelines, Prompt(text="hi")
        async with (
            pipelines.generate(prompt, swarm.entry, Sampling(max_tokens=30)) as first,
            pipelines.generate(prompt, swarm.entry, Sampling(max_tokens=30)) as second,
        ):
            nodes = {generation.route[0].node_id for generation in (first, second)}
        assert nodes == {B, C}
        await swarm.quiet()


async def test_a_stage_here_needs_a_slot_as_everywhere_else() -> None:
    """b is the slower one. What others run does not fill this one, and what runs here as a whole waits for
    its turn."""
    pools = {A: FakePool("0:6"), B: FakePool("0:6"), C: FakePool("6:12")}
    settings = dict.fromkeys(pools, PipelineSettings()) | {A: PipelineSettings(max_requests_per_model=1)}
    async with open_swarm(pools, settings=settings) as swarm:
        speeds = {B: 0.01, C: 0.001}
        await swarm.tell(A, {name: computes(swarm.entry.model_id, speeds[name]) for name in speeds})
        pipelines, prompt = swarm[A].pipelines, Prompt(text="hi")

        async def nodes() -> list[str]:
            return [stage.node_id for stage in (await pipelines.stages_for(swarm.entry))]

        assert pipelines.room().free_slots == 1
        assert await nodes() == [A, C]
        async with pipelines.generate(prompt, swarm.entry, Sampling(max_tokens=30)):
            assert pipelines.room().free_slots == 0
            assert await nodes() == [B, C]
            plan = await pipelines.plan(swarm.entry, RequestSize(10, 20))
            assert [(each.node_id, each.reason) for each in plan.refused] == [(A, "no free slot")]
            async with pipelines.generate(prompt, swarm.entry, Sampling(max_tokens=30)) as second:
                assert [stage.node_id for stage in second.route] == [B, C]
                assert pipelines.room().free_slots == 0
            swarm[A].pool.ranges = (LayerRange(0, 12),)
            assert await nodes() == [A]
        await swarm.quiet()


def test_a_node_without_a_slot_or_without_kv_for_this_request_is_full() -> None:
    """The request has 10 + 20 tokens."""
    room = {"slots": 8, "free_slots": 1, "free_kv_tokens": 30}
    speeds = believed(
        {
            A: NodeCapability(**room),
            B: NodeCapability(**room | {"free_slots": 0}),
            C: NodeCapability(**room | {"free_kv_tokens": 29}),
            D: NodeCapability(),
        }
    ).speeds
    assert [speeds[name].lacks for name in (A, B, C, D)] == [
        "",
        "no free slot",
        "no room for 30 tokens of context: 29 free",
        "",
    ]


def test_what_runs_here_takes_slots_and_the_kv_it_may_need() -> None:
    settings = PipelineSettings(n_ctx=4096, max_requests_per_model=4)
    held = [HeldCapacity(X, 1000, 10**6), HeldCapacity(X, 100, 20), HeldCapacity(Y, 2000, 20)]
    assert room_left(held, settings) == Room(4, 2, 4096 - 2020)
    assert room_left([], settings) == Room(4, 4, 4096)
    assert room_left([HeldCapacity(X, 4000, 200)] * 5, settings) == Room(4, 0, 0)
    assert room_left([HeldCapacity(X, 100, 20)], settings, {X: 512, Y: 8192}) == Room(4, 3, 512 - 120)
    assert room_left([], settings, {Y: 256}) == Room(4, 4, 256)


def test_coordinates_and_bandwidth_reach_the_route() -> None:
    def at(x_s: float, error: float = 0.1) -> NodeCapability:
        place = NetworkCoordinate(position_s=(x_s, 0.0, 0.0), height_s=0.001, error=error)
        link = ObservedLink(node_id=B, rtt_s=0.03, bytes_per_s=2e6)
        return NodeCapability(coordinate=place, observed_links=(link,) if x_s == 0.5 else ())

    known = believed({A: at(0.0), B: at(0.1), C: at(0.2, error=1.0), D: at(0.5)})
    assert known.rtt_s(A, B) == pytest.approx(0.102)
    assert known.rtt_s(C, A) == UNMEASURED_RTT_S  # c is not sure of its place
    assert known.rtt_s(B, D) == 0.03
    assert known.bytes_per_s(B, D) == 2e6
    assert known.bytes_per_s(A, B) == LINK_BYTES_PER_S


@pytest.mark.parametrize(("n_others", "goes_on"), [(4, False), (9, True)])
async def test_the_loop_goes_on_while_a_route_is_chosen_among_many_ranges(
    n_others: int, goes_on: bool
) -> None:
    others = [node_id_named(f"many{number}") for number in range(n_others)]
    pools = {A: FakePool("0:2"), B: FakePool("2:12")}
    pools |= {node_id: FakePool("0:1", "2:3", "4:5", "6:7", "8:9", "10:11") for node_id in others}
    async with open_swarm(pools) as swarm, trio.open_nursery() as nursery:
        steps: list[float] = []

        async def step() -> None:
            steps.append(trio.current_time())

        nursery.start_soon(step)
        chosen = await swarm[A].pipelines.stages_for(swarm.entry)
        assert bool(steps) == goes_on
        assert {stage.node_id for stage in chosen} >= {A, B}
