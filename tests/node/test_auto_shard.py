"""What a node does about a plan: one step at a time, only after it has been asked three times, and never so
that the swarm has less than before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from node_ids import A, B, C, D
from placing_members import (
    DIGEST,
    ENTRY,
    LAYER_BYTES,
    WHOLE,
    Member,
    holder,
    layers_of,
    live,
    ranges,
    tell,
)

from swarmllm.errors import NodeUnreachable
from swarmllm.models import LayerRange, covers
from swarmllm.models.manifest import EMBEDDING_INDEX, HEAD_INDEX, Shard
from swarmllm.node.placing.auto_shard import RETRY_S
from swarmllm.node.placing.plan import HELD_MAX, Step, next_step, plan_of, shape_of
from swarmllm.scheduling.placement import CONSISTENT_TICKS, Hysteresis, ModelShape, Placement, PlacementNode
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import NodeCapability, NodeRecord, ObservedLatency, ShardAnnounce

SHAPE = ModelShape(12, 1, 100)


@pytest.mark.parametrize(
    ("held", "target", "pinned", "elsewhere", "free", "expected"),
    [
        ("", "0:4", "", "", 400, Step(load=LayerRange(0, 4))),
        ("0:4", "0:4", "", "", 0, Step()),
        ("", "0:4", "", "", 399, Step(waits_for="room for 0:4")),
        ("0:8", "0:4", "", "4:12", 0, Step(drop=LayerRange(4, 8))),
        ("0:8", "0:4", "", "4:7", 0, Step(waits_for="another holder of 4:8")),
        ("0:8", "0:4", "4:8", "4:12", 0, Step()),
        ("0:4", "4:8", "", "0:4", 400, Step(load=LayerRange(4, 8))),
        ("0:4", "4:8", "", "0:4", 0, Step(drop=LayerRange(0, 4))),
        ("0:4", "4:8", "", "", 0, Step(waits_for="room for 4:8")),
    ],
    ids=[
        "load",
        "as planned",
        "no room",
        "others have it",
        "the last copy stays",
        "pins stay",
        "load before dropping",
        "drop where there is no room",
        "neither is possible",
    ],
)
def test_one_step(held: str, target: str, pinned: str, elsewhere: str, free: int, expected: Step) -> None:
    parts = [ranges(*text.split()) for text in (held, target, pinned, elsewhere)]
    assert next_step(parts[0], parts[1], parts[2], parts[3], free, SHAPE) == expected


def test_three_of_the_same_in_a_row_are_enough_and_another_one_begins_anew() -> None:
    hysteresis = Hysteresis()
    assert [hysteresis.see(wish) for wish in "aabaaa"] == [False] * 5 + [True]
    hysteresis.forget()
    assert not hysteresis.see("a")


async def test_nobody_moves_before_three_looks_agree() -> None:
    member = Member(A, 12)
    await live([member], CONSISTENT_TICKS)
    assert member.acts == []  # The first look only tells the swarm that it takes part.
    await live([member], 1)
    assert member.acts == ["load 0:12"]
    await live([member], 5)
    assert member.acts == ["load 0:12"]
    assert member.manager.models[0].state == "as planned"


async def test_three_nodes_place_a_model_by_themselves_and_replace_the_one_that_leaves() -> None:
    members = [Member(name, 6) for name in (A, B, C)]
    await live(members, 10)
    held = layers_of(members)
    assert covers(held, WHOLE)
    assert max(len(layers) for layers in held) <= 6
    before = {member.node_id: member.pool.held for member in members}
    (gone,) = [member for member in members if member.pool.held == ranges("0:6")][:1]
    members.remove(gone)
    await live(members, 12, 1000.0)
    assert covers(layers_of(members), WHOLE)
    newcomer = Member(D, 12)
    steady = {member.node_id: member.pool.held for member in members}
    await live([*members, newcomer], 10, 2000.0)
    assert {member.node_id: member.pool.held for member in members} == steady
    assert newcomer.pool.held == (WHOLE,)
    assert before[gone.node_id] == gone.pool.held


async def test_what_a_user_loaded_is_never_dropped_and_counts() -> None:
    loaded, other = Member(A, 12), Member(B, 6)
    loaded.pool.held = ranges("0:6")
    await live([loaded, other], 10)
    assert covers(loaded.pool.held, LayerRange(0, 6))
    assert covers(layers_of([loaded, other]), WHOLE)
    assert not any(act.startswith("drop") for act in loaded.acts)


async def test_what_others_are_still_loading_is_not_dropped_here() -> None:
    """Layers 6:9 are to be b's; until it has them, the copy here is the last."""
    member = Member(A, 6)
    member.pool.held = member.manager.models[0].managed = ranges("6:12")
    tell(member, holder(B, loading="0:9"))
    await live([member], 8, others=(B,))
    assert member.acts == []
    assert member.manager.models[0].state == "waits for another holder of 6:9"
    tell(member, holder(B, ready="0:9"))
    await live([member], CONSISTENT_TICKS, 100.0, others=(B,))
    assert member.acts == ["drop 6:9"]


@pytest.mark.parametrize(
    ("connected", "trusted", "acts"),
    [((B,), (B,), ["load 6:12"]), ((), (B,), []), ((B,), (), [])],
    ids=["counts", "gone", "not trusted"],
)
async def test_only_who_is_connected_and_trusted_is_planned_with(
    connected: tuple[NodeId, ...], trusted: tuple[NodeId, ...], acts: list[str]
) -> None:
    """There is room for half of the model here; the other half is said to be on b."""
    member = Member(A, 6, may_work=lambda node_id: node_id in trusted)
    tell(member, holder(B, ready="0:6"))
    await live([member], CONSISTENT_TICKS + 1, others=connected)
    assert member.acts == acts


async def test_a_step_that_failed_is_tried_again_later_and_says_why() -> None:
    member = Member(A, 12)
    member.failure = NodeUnreachable("nobody gives it")
    await live([member], 4)
    assert member.acts == ["load 0:12"]
    assert member.manager.models[0].state == "nobody gives it"
    assert member.manager.loading(ENTRY.model_id) == ()
    await live([member], 2, 20.0)
    assert member.acts == ["load 0:12"]
    member.failure = None
    await live([member], CONSISTENT_TICKS, 20.0 + RETRY_S)
    assert member.pool.held == (WHOLE,)


async def test_pipelines_are_begun_only_up_to_the_limit_and_standbys_join_them() -> None:
    members = [Member(name, 12, max_pipes=1) for name in (A, B, C, D)]
    await live(members, 12)
    copies = [sum(layer in layers for layers in layers_of(members)) for layer in range(12)]
    assert set(copies) == {2}  # One pipeline, and one standby of every layer.


def test_the_ends_of_a_model_need_room_too() -> None:
    more: dict[str, Any] = {"blake3": DIGEST, "tensors": ()}
    ends = (
        Shard(kind="embedding", index=EMBEDDING_INDEX, size_bytes=7, **more),
        Shard(kind="head", index=HEAD_INDEX, size_bytes=5, **more),
    )
    manifest = msgspec.structs.replace(ENTRY.manifest, shards=(*ends, *ENTRY.manifest.shards))
    assert shape_of(manifest) == ModelShape(12, 1, LAYER_BYTES, 7, 5)
    tied = msgspec.structs.replace(manifest, tied_embedding=True)
    assert shape_of(tied) == ModelShape(12, 1, LAYER_BYTES, 7, 12)


def test_absurd_claims_of_speed_do_not_break_the_plan() -> None:
    def claims(node_id: str, decode_s: float) -> NodeRecord:
        latency = ObservedLatency(model_id=ENTRY.model_id, decode_s=decode_s, prefill_s=decode_s)
        capability = NodeCapability(
            placed_models=(ENTRY.model_id,),
            placing_free_bytes=7 * LAYER_BYTES,
            observed_latencies=(latency,),
        )
        return NodeRecord(node_id=node_id, capability=capability)

    records = {A: claims(A, 5e-324), B: claims(B, 1e9)}
    targets = plan_of(ENTRY.manifest, records, None).targets
    assert sorted(len(layers) for held in targets.values() for layers in held) == [5, 7]


async def test_layers_whose_drop_failed_stay_the_managers() -> None:
    member = Member(A, 6)
    member.pool.held = member.manager.models[0].managed = ranges("6:12")
    tell(member, holder(B, ready="0:9"))
    member.failure = NodeUnreachable("the worker is busy")
    await live([member], CONSISTENT_TICKS + 1, others=(B,))
    assert member.acts == ["drop 6:9"]
    assert member.manager.pinned(ENTRY.model_id) == ()
    assert member.manager.models[0].managed == ranges("6:12")


def test_of_what_others_say_they_hold_a_plan_counts_a_bounded_part() -> None:
    """Each node's share is the same, and who holds little loses nothing."""
    scattered = tuple((start, start + 1) for start in range(0, 12, 2))
    honest = ShardAnnounce(model_id=ENTRY.model_id, name="m", n_layers=12, ranges=((0, 12),))
    records = {"honest": NodeRecord(node_id="honest", models=(honest,))}
    for number in range(HELD_MAX // 4 - 1):
        said = ShardAnnounce(
            model_id=ENTRY.model_id, name="m", n_layers=12, ranges=(*scattered, (2, 5)), pinned=scattered
        )
        records[f"n{number:03}"] = NodeRecord(node_id=f"n{number:03}", models=(said,))
    seen: list[PlacementNode] = []

    def look(shape: ModelShape, nodes: Iterable[PlacementNode], max_pipes: int | None) -> Placement:
        seen.extend(nodes)
        return Placement()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swarmllm.node.placing.plan.place", look)
        plan_of(ENTRY.manifest, records, None)
    assert sum(len(node.held) for node in seen) <= HELD_MAX
    by_id = {node.node_id: node for node in seen}
    assert by_id["honest"].held == (LayerRange(0, 12),)
    assert all(len(node.held) == len(node.pinned) == 4 for node in seen if node.node_id != "honest")
    assert LayerRange(2, 5) in by_id["n000"].held
