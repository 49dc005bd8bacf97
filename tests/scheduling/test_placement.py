"""Placement: what must hold for any swarm, and what a join, a leave and a user's own layers do to it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.models.layers import LayerRange, covers, merge, subtract
from swarmllm.scheduling.coordinates import Coordinate
from swarmllm.scheduling.holdings import NodeRange, rows_of, turning_point
from swarmllm.scheduling.placement import ModelShape, Placement, PlacementNode, place
from swarmllm.scheduling.route import choose_route

SHAPE = ModelShape(12, 1, 100)
WHOLE = LayerRange(0, 12)


def node(node_id: str, n_layers: int, **more: object) -> PlacementNode:
    """With room for so many."""
    return replace(PlacementNode(node_id, n_layers * 100, 0.001), **more)  # type: ignore[arg-type]


def settled(nodes: list[PlacementNode], shape: ModelShape, max_pipes: int | None) -> list[PlacementNode]:
    """Everybody does what the plan says until nobody has anything left to do."""
    for _ in range(6):
        plan = place(shape, nodes, max_pipes)
        after = [acted(each, plan, shape) for each in nodes]
        if after == nodes:
            return nodes
        nodes = after
    raise AssertionError("the plan never comes to rest")


def acted(each: PlacementNode, plan: Placement, shape: ModelShape) -> PlacementNode:
    target = plan.targets.get(each.node_id, each.held)
    used = sum(map(shape.n_bytes, each.held))
    return replace(each, held=target, free_bytes=each.free_bytes + used - sum(map(shape.n_bytes, target)))


def random_swarm(rng: random.Random) -> tuple[ModelShape, list[PlacementNode], int | None]:
    alignment = rng.choice([0, 1, 1, 1, 2, 3])
    shape = ModelShape(rng.randint(1, 24), alignment, 100, rng.choice([0, 150]), rng.choice([0, 220]))
    nodes = []
    for i in range(rng.randint(0, 12)):
        held = []
        if rng.random() < 0.3:
            start = rng.randrange(shape.n_layers)
            held.append(LayerRange(start, rng.randint(start + 1, shape.n_layers)))
        place_s = Coordinate((rng.choice([0.0, 0.1]), 0.0, 0.0), 0.001, rng.choice([0.1, 0.1, 1.0]))
        nodes.append(
            PlacementNode(
                f"n{i:02}",
                rng.randint(0, 30) * 100,
                rng.choice([0.001, 0.002, 0.01]),
                tuple(held),
                tuple(held) if rng.random() < 0.5 else (),
                rng.choice([None, place_s, place_s]),
                rng.random() < 0.9,
                rng.random() < 0.95,
            )
        )
    return shape, nodes, rng.choice([None, None, 1, 2])


SWARMS = st.integers(0, 2**32).map(lambda seed: random_swarm(random.Random(seed)))


@given(SWARMS)
def test_pipelines_are_contiguous_aligned_within_memory_and_pins_stay(
    case: tuple[ModelShape, list[PlacementNode], int | None],
) -> None:
    shape, nodes, max_pipes = case
    by_id = {each.node_id: each for each in nodes}
    plan = place(shape, nodes, max_pipes)
    for pipeline in plan.pipelines:
        at = 0
        for stage in pipeline:
            assert stage.layers.start == at
            assert at == 0 or (shape.cut_alignment and at % shape.cut_alignment == 0)
            assert covers(plan.targets[stage.node_id], stage.layers)
            at = stage.layers.end
        assert at == shape.n_layers
    assert set(plan.targets) == {each.node_id for each in nodes if each.is_trusted}
    for node_id, target in plan.targets.items():
        each = by_id[node_id]
        assert all(covers(target, layers) for layers in each.pinned)
        if not each.takes_part:
            assert target == merge(each.held)
        had = sum(map(shape.n_bytes, each.held))
        assert sum(map(shape.n_bytes, target)) <= had + each.free_bytes


@given(SWARMS, st.randoms(use_true_random=False))
def test_every_node_comes_to_the_same_plan(
    case: tuple[ModelShape, list[PlacementNode], int | None], rng: random.Random
) -> None:
    shape, nodes, max_pipes = case
    assert place(shape, rng.sample(nodes, len(nodes)), max_pipes) == place(shape, nodes, max_pipes)


@given(SWARMS)
def test_a_plan_that_was_carried_out_comes_to_rest_and_covers_no_layer_less(
    case: tuple[ModelShape, list[PlacementNode], int | None],
) -> None:
    shape, nodes, max_pipes = case
    before = [layers for each in nodes if each.is_trusted for layers in each.held]
    after = settled(nodes, shape, max_pipes)
    held = [layers for each in after if each.is_trusted for layers in each.held]
    assert all(covers(held, layers) for layers in before)


@given(SWARMS)
def test_enough_memory_anywhere_is_a_complete_pipeline(
    case: tuple[ModelShape, list[PlacementNode], int | None],
) -> None:
    """Where nothing is held yet and everybody takes part, nothing but memory can stand in the way."""
    shape, nodes, _ = case
    fresh = [replace(each, held=(), pinned=(), takes_part=True, is_trusted=True) for each in nodes]
    whole_bytes = shape.n_bytes(LayerRange(0, shape.n_layers))
    plan = place(shape, fresh, None)
    if any(each.free_bytes >= whole_bytes for each in fresh):
        assert plan.pipelines
    if sum(each.free_bytes for each in fresh) < whole_bytes:
        assert not plan.pipelines


@pytest.mark.parametrize("seed", range(8))
def test_a_join_moves_nobody_else_and_a_leave_costs_what_left(seed: int) -> None:
    rng = random.Random(seed)
    shape = ModelShape(24, 1, 100, 150, 150)
    nodes = [
        PlacementNode(f"n{i:02}", rng.randint(3, 30) * 100, rng.choice([0.001, 0.003])) for i in range(20)
    ]
    nodes = settled(nodes, shape, None)
    for n_round in range(12):
        held = {each.node_id: each.held for each in nodes}
        if rng.random() < 0.5:
            gone = nodes.pop(rng.randrange(len(nodes)))
            n_lost = sum(map(len, gone.held))
            after = settled(nodes, shape, None)
            # Its own layers and, at worst, a fragment that others of its pipeline leave behind.
            assert moves(held, after) <= n_lost + 2 * shape.n_layers
        else:
            newcomer = PlacementNode(f"x{n_round:02}", rng.randint(3, 30) * 100, 0.002)
            after = settled([*nodes, newcomer], shape, None)
            assert moves(held, [each for each in after if each.node_id in held]) <= 2 * shape.n_layers
        nodes = after


def moves(before: dict[str, tuple[LayerRange, ...]], after: list[PlacementNode]) -> int:
    """Layers that somebody had to load."""
    return sum(len(new) for each in after for new in subtract(each.held, before.get(each.node_id, ())))


@pytest.mark.parametrize(
    ("alignment", "layers", "n_bytes"),
    [(1, "0:4", 557), (1, "4:8", 400), (1, "8:12", 620), (1, "0:12", 1577), (5, "10:12", 420)],
)
def test_the_ends_of_a_model_take_their_embedding_and_head_along(
    alignment: int, layers: str, n_bytes: int
) -> None:
    shape = ModelShape(12, alignment, 100, embedding_bytes=157, head_bytes=220)
    assert shape.n_bytes(LayerRange.parse(layers)) == n_bytes
    assert [shape.layers(i, i + 1) for i in range(shape.n_units)][-1].end == 12


def test_a_node_without_room_for_an_end_gets_the_middle() -> None:
    shape = ModelShape(12, 1, 100, embedding_bytes=157, head_bytes=220)
    roomy = [PlacementNode(node_id, 700, 0.001) for node_id in "ac"]
    plan = place(shape, [*roomy, PlacementNode("b", 400, 0.001)])
    assert len(plan.pipelines) == 1
    ends = (plan.pipelines[0][0].node_id, plan.pipelines[0][-1].node_id)
    assert sorted(ends) == ["a", "c"]
    for target in plan.targets.values():
        assert sum(map(shape.n_bytes, target)) <= 700


def test_a_gap_is_filled_before_a_new_pipeline_is_begun() -> None:
    nodes = [node("a", 0, held=(LayerRange(0, 6),)), node("b", 12), node("c", 12)]
    plan = place(SHAPE, nodes)
    assert plan.targets["a"] == (LayerRange(0, 6),)
    assert sorted([plan.targets["b"], plan.targets["c"]]) == [(WHOLE,), (LayerRange(6, 12),)]
    assert len(plan.pipelines) == 2
    one = place(SHAPE, nodes, 1)
    assert len(one.pipelines) == 1


def test_where_there_are_pipelines_enough_no_gap_is_filled_either() -> None:
    nodes = [node("a", 0, held=(WHOLE,)), node("b", 0, held=(LayerRange(0, 6),)), node("c", 6)]
    assert place(SHAPE, nodes, 1).targets["c"] == ()
    assert place(SHAPE, nodes, 2).targets["c"] == (LayerRange(6, 12),)


def test_a_node_next_to_a_gap_grows_into_it_before_others_are_asked() -> None:
    plan = place(SHAPE, [node("a", 6, held=(LayerRange(0, 6),)), node("b", 12)], 1)
    assert plan.targets["a"] == (WHOLE,)


def test_who_is_beside_a_gap_fills_it_from_its_own_end() -> None:
    ends = [node("a", 2, held=(LayerRange(0, 4),)), node("b", 2, held=(LayerRange(8, 12),))]
    assert place(SHAPE, ends).targets == {"a": (LayerRange(0, 6),), "b": (LayerRange(6, 12),)}
    ends[1] = node("b", 2, held=(LayerRange(10, 12),))
    plan = place(SHAPE, [*ends, node("z", 2)])
    targets = {"a": (LayerRange(0, 6),), "z": (LayerRange(6, 8),), "b": (LayerRange(8, 12),)}
    assert plan.targets == targets


@pytest.mark.parametrize(
    ("held", "expected"), [("6:12", ["0:5", "5:12"]), ("0:6", ["7:12", "0:7"])], ids=["start", "end"]
)
def test_who_is_beside_a_gap_at_an_end_of_the_model_gets_what_is_next_to_its_own(
    held: str, expected: list[str]
) -> None:
    """The other one has no room for all of the gap."""
    nodes = [node("a", 5), node("b", 1, held=(LayerRange.parse(held),))]
    assert [str(*place(SHAPE, nodes).targets[node_id]) for node_id in "ab"] == expected


def test_two_gaps_are_filled_by_two_nodes_where_there_are_two() -> None:
    held = [node("a", 0, held=(LayerRange(2, 6),)), node("b", 0, held=(LayerRange(8, 12),))]
    targets = place(SHAPE, [*held, node("c", 12), node("d", 8)], 1).targets
    assert {targets["c"], targets["d"]} == {(LayerRange(0, 2),), (LayerRange(6, 8),)}
    alone = place(SHAPE, [*held, node("c", 4)]).targets
    assert alone["c"] == (LayerRange(0, 2), LayerRange(6, 8))


def test_who_is_beside_a_gap_keeps_its_side_though_another_has_no_room_for_the_head() -> None:
    """The roomiest two would be at the ends, were nobody there already."""
    shape = ModelShape(12, 1, 100, head_bytes=250)
    nodes = [node("b", 3, held=(LayerRange(0, 4),)), node("c", 7), node("d", 2)]
    plan = place(shape, nodes)
    assert plan.pipelines
    assert [len(plan.targets[node_id]) for node_id in "bcd"] == [1, 1, 1]


def test_nodes_in_one_region_complement_each_other_and_an_ocean_is_crossed_only_at_need() -> None:
    def at(x_s: float) -> Coordinate:
        return Coordinate((x_s, 0.0, 0.0), 0.001, 0.1)

    near = [node("a", 6, place=at(0.0)), node("c", 6, place=at(0.016))]
    far = [node("b", 6, place=at(0.2)), node("d", 6, place=at(0.215))]
    plan = place(SHAPE, [*near, *far])
    assert [{stage.node_id for stage in pipeline} for pipeline in plan.pipelines] == [{"a", "c"}, {"b", "d"}]
    lonely = place(SHAPE, [near[0], far[0]])
    assert [{stage.node_id for stage in pipeline} for pipeline in lonely.pipelines] == [{"a", "b"}]


def test_who_is_not_trusted_is_neither_asked_nor_counted() -> None:
    shady = node("b", 12, held=(LayerRange(0, 6),), is_trusted=False)
    plan = place(SHAPE, [node("a", 12), shady])
    assert plan.targets == {"a": (WHOLE,)}


def test_two_halves_of_the_same_kind_become_a_pipeline() -> None:
    """Both lost their partner; one of them leaves what both hold."""
    nodes = [node("a", 0, held=(LayerRange(0, 6),)), node("b", 0, held=(LayerRange(0, 6),))]
    plan = place(SHAPE, nodes)
    assert sorted(plan.targets.values()) == [(LayerRange(0, 6),), (LayerRange(6, 12),)]
    pinned = [replace(each, pinned=each.held) for each in nodes]
    assert not place(SHAPE, pinned).pipelines


def test_boundaries_move_to_where_a_route_turns() -> None:
    slow, quick = NodeRange(LayerRange(0, 8), "slow"), NodeRange(LayerRange(4, 12), "quick")
    speeds = {"slow": 0.01, "quick": 0.001}
    assert turning_point(slow, quick, speeds) == 4
    assert turning_point(slow, quick, {"slow": 0.001, "quick": 0.01}) == 8
    assert turning_point(replace(slow, is_pinned=True), quick, speeds) == 8
    assert turning_point(replace(slow, is_pinned=True), replace(quick, is_pinned=True), speeds) is None
    (row,) = rows_of(12, 1, [slow, quick], speeds)
    assert row.is_complete
    held = {stage.node_id: [stage.layers] for stage in row.stages}
    assert choose_route(12, 1, held, "slow") is not None


def test_who_is_left_over_doubles_what_has_fewest_holders() -> None:
    nodes = [node("a", 0, held=(LayerRange(0, 6),)), node("b", 0, held=(LayerRange(6, 12),)), node("c", 7)]
    first = place(SHAPE, nodes).targets["c"]
    again = place(SHAPE, [*nodes, node("d", 7)]).targets
    assert {first, again["d"]} == {(LayerRange(0, 6),), (LayerRange(6, 12),)}


def test_a_model_that_runs_whole_only_is_placed_whole() -> None:
    whole = ModelShape(12, 0, 100)
    plan = place(whole, [node("a", 11), node("b", 12), node("c", 11)])
    assert plan.targets == {"a": (), "b": (WHOLE,), "c": ()}
