"""GET /api/admin/plan, and what a node tells the swarm of its load and speed."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
import trio
from api_fakes import serve_node
from deadlines import DEADLINE_S
from node_ids import NODE_A, A, B, C, D, O

from swarmllm.errors import NoPipeline
from swarmllm.models import CatalogueEntry
from swarmllm.node.admission import Admission
from swarmllm.node.announcing.capability import (
    MAX_LINKS,
    _best_s,
    describe,
    float_among,
    links_have_changed,
    load_has_changed,
    machine_speed,
    place_has_changed,
    speeds_have_changed,
    work_has_changed,
)
from swarmllm.pipeline.route.route_planner import RequestSize
from swarmllm.pipeline.stage.capacity import Room
from swarmllm.scheduling.coordinates import Coordinate, predicted_rtt_s
from swarmllm.scheduling.plan import Plan
from swarmllm.scheduling.speeds import MAX_MODELS, MachineSpeed, Observations
from swarmllm.scheduling.tiers import tier_caps
from swarmllm.swarm.records.registry import Registry
from swarmllm.swarm.router import PeerInfo
from swarmllm_proto.codec import decode_record, encode_record
from swarmllm_proto.swarm import (
    NetworkCoordinate,
    NodeCapability,
    NodeRecord,
    ObservedLatency,
    ObservedLink,
)

MODEL_ID = "ab" * 32


async def test_a_plan_adds_up_and_names_the_standby(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        answer = await stand.http.get(
            "/api/admin/plan", params={"model": "guide", "prompt_tokens": 10, "output_tokens": 50}
        )
        assert answer.status_code == 200
        plan = answer.json()
    assert (plan["model"], plan["prompt_tokens"], plan["output_tokens"]) == ("guide", 10, 50)
    first, last = plan["stages"]
    assert (first["nickname"], first["layers"], first["standby"]) == (stand.node.nickname, "0:4", None)
    assert (last["node_id"], last["layers"], last["standby"], last["measured"]) == (B, "4:12", C, True)
    (other,) = last["alternatives"]
    assert (other["node_id"], other["full"]) == (C, False)
    assert other["extra_s"] == pytest.approx(8 * (10 * 0.0001 + 50 * 0.001))
    assert [stage["lacks"] for stage in plan["stages"]] == ["", ""]
    assert plan["exact"]
    assert [stage["rows_come_as"] for stage in plan["stages"]] == ["f32", "f32"]
    parts_s = sum(stage["compute_s"] + stage["network_s"] for stage in plan["stages"]) + plan["ends_s"]
    assert parts_s == pytest.approx(plan["cost_s"])
    home, fewest = plan["rivals"]
    assert (home["name"], home["cost_s"], home["stages"]) == ("all at home", None, [])
    assert fewest["cost_s"] == pytest.approx(plan["cost_s"])


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("", "model"),
        ("model=guide&prompt_tokens=0", "prompt_tokens"),
        ("model=guide&output_tokens=1048577", "output_tokens"),
        ("model=guide&output_tokens=99999999999999999999", "output_tokens"),
        ("model=guide&output_tokens=-1", "output_tokens"),
        ("model=guide&tokens=5", "tokens"),
    ],
)
async def test_a_question_that_makes_no_sense_is_refused_by_field(
    tmp_path: Path, query: str, field: str
) -> None:
    async with serve_node(tmp_path) as stand:
        answer = await stand.http.get(f"/api/admin/plan?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


async def test_no_model_and_no_route_have_their_own_status(tmp_path: Path) -> None:
    async def no_route(entry: CatalogueEntry, size: RequestSize) -> Plan:
        raise NoPipeline("layers are missing")

    async with serve_node(tmp_path) as stand:
        stand.pipelines.plan = no_route  # type: ignore[attr-defined]
        assert (await stand.http.get("/api/admin/plan?model=nobody")).status_code == 404
        assert (await stand.http.get("/api/admin/plan?model=guide")).status_code == 503


def capability(decode_s: float = 0.001, rtt_s: float = 0.02, **counts: int) -> NodeCapability:
    return NodeCapability(
        observed_latencies=(ObservedLatency(model_id=MODEL_ID, decode_s=decode_s),),
        observed_links=(ObservedLink(node_id="b", rtt_s=rtt_s),),
        **counts,
    )


def changed(old: NodeCapability, new: NodeCapability) -> tuple[bool, bool]:
    """Of work, which load is too, and of ways."""
    is_of_work = work_has_changed(old, new) or speeds_have_changed(old, new) or load_has_changed(old, new)
    return is_of_work, links_have_changed(old, new)


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (capability(), False),
        (capability(memory_free_bytes=12345), False),
        (capability(decode_s=0.0012, rtt_s=0.024), False),
        (capability(decode_s=0.0013), True),
        (capability(decode_s=0.0007), True),
        (capability(rtt_s=0.026), True),
        (capability(active_requests=1), True),
        (capability(stage_requests=1), True),
        (capability(queued_requests=1), True),
        (NodeCapability(), True),
    ],
)
def test_what_a_route_could_feel_is_news(new: NodeCapability, expected: bool) -> None:
    assert any(changed(capability(), new)) is expected


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        (capability(active_requests=1), (True, False)),
        (capability(decode_s=0.0013), (True, False)),
        (capability(rtt_s=0.026), (False, True)),
        (capability(), (False, False)),
    ],
    ids=["load", "speed", "a round trip", "nothing"],
)
def test_load_and_speed_are_told_sooner_than_where_a_node_is(
    new: NodeCapability, expected: tuple[bool, bool]
) -> None:
    assert changed(capability(), new) == expected


def at(x_s: float, error: float) -> NodeCapability:
    return NodeCapability(
        coordinate=NetworkCoordinate(position_s=(x_s, 0.0, 0.0), height_s=0.001, error=error)
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (at(0.1, 0.2), at(0.103, 0.3), False),
        (at(0.1, 0.2), at(0.105, 0.2), True),
        (at(0.1, 0.9), at(0.2, 0.8), False),
        (at(0.1, 0.9), at(0.1, 0.4), True),
        (at(0.1, 0.4), at(0.1, 0.9), True),
        (NodeCapability(), at(0.1, 0.9), True),
    ],
    ids=["a little", "far", "where nobody believes it", "is sure now", "is sure no more", "the first"],
)
def test_a_coordinate_is_news_where_it_is_believed_and_has_moved(
    old: NodeCapability, new: NodeCapability, *, expected: bool
) -> None:
    assert place_has_changed(old, new) is expected


def test_the_round_trip_of_a_neighbour_may_jitter() -> None:
    assert not any(changed(capability(rtt_s=0.0002), capability(rtt_s=0.0009)))


def test_the_swarm_is_told_of_the_models_that_ran_last_and_of_the_nearest_peers() -> None:
    observations = Observations()
    for i in range(MAX_MODELS + 8):
        observations.observe(f"{i:064x}", "decode", 0.001 * (i + 1), 1, 1)
    peers = [PeerInfo(node_id=f"p{i}", rtt_s=0.001 * (MAX_LINKS + 8 - i)) for i in range(MAX_LINKS + 8)]
    said = describe(observations, peers, Admission(tier_caps(1, 1), 0, 0.0), 0, Room(), (), 0)
    assert said.picture_runs is True, "routes of prompts whose pictures need it go over no others"
    told = [latency.model_id for latency in said.observed_latencies]
    assert told == [f"{i:064x}" for i in range(MAX_MODELS + 7, 7, -1)]
    assert said.observed_latencies[0].decode_s == pytest.approx(0.001 * (MAX_MODELS + 8))
    assert [link.node_id for link in said.observed_links] == [f"p{i}" for i in range(MAX_LINKS + 7, 7, -1)]


def test_a_node_floats_to_where_its_round_trips_say_it_is() -> None:
    """Three peers around it, 40 ms away, which know where they are; a fourth is silent about itself."""
    registry = Registry(O)
    corners = {A: (0.0, 0.0, 0.0), B: (0.08, 0.0, 0.0), C: (0.04, 0.04, 0.0)}
    for node_id, position_s in corners.items():
        place = NetworkCoordinate(position_s=position_s, height_s=1e-5, error=0.1)
        record = NodeRecord(node_id=node_id, capability=NodeCapability(coordinate=place))
        registry.apply(node_id, encode_record(record))
    peers = [PeerInfo(node_id, rtt_s=0.04) for node_id in (*corners, D)]
    here = Coordinate()
    for _ in range(100):
        here = float_among(O, here, peers, registry)
    assert here.is_settled
    for position_s in corners.values():
        assert predicted_rtt_s(here, Coordinate(position_s)) == pytest.approx(0.04, abs=0.004)


@pytest.mark.slow
async def test_the_machine_is_measured_once_and_the_swarm_is_told(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    async with serve_node(tmp_path) as stand:
        await stand.node.measure(file)
        kept = file.read_bytes()
        with trio.fail_after(DEADLINE_S):
            while not decode_record(stand.router.records()[NODE_A]).capability.flops:
                await trio.lowlevel.checkpoint()
        told = decode_record(stand.router.records()[NODE_A]).capability
    assert machine_speed(file) == MachineSpeed(told.memory_bytes_per_s, told.flops)
    assert file.read_bytes() == kept


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "{}", '{"memory_bytes_per_s": -1, "flops": 1}', "[" * 5000])
def test_a_spoiled_measurement_is_made_again(tmp_path: Path, text: str) -> None:
    file = tmp_path / "machine.json"
    file.write_text(text)
    speed = machine_speed(file)
    assert min(speed.memory_bytes_per_s, speed.flops) > 0
    assert msgspec.json.decode(file.read_bytes())["flops"] == speed.flops


def test_what_else_runs_does_not_make_a_machine_look_slower() -> None:
    """Time in which this thread gets no processor is not counted."""
    assert _best_s(lambda: time.sleep(0.01), 0.0) < 0.01
