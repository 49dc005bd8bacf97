"""What a plan says besides its route: that it adds up, and what everything else would have cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from swarmllm.models.layers import LayerRange, covers, subtract
from swarmllm.scheduling.candidates import runnable
from swarmllm.scheduling.cheapest import cheapest_route
from swarmllm.scheduling.constraints import Refusal
from swarmllm.scheduling.cost import RouteInputs
from swarmllm.scheduling.plan import MAX_ALTERNATIVES, make_plan
from swarmllm.scheduling.route import RouteStage

from .test_cheapest import (
    CASES,
    ORIGIN,
    QUICK,
    SLOW,
    WHOLE,
    as_segments,
    changes_at_ends,
    felt_s,
    known,
    n_on_full_nodes,
)
from .test_route import N_LAYERS, Holders, every_route


@given(CASES)
def test_a_plan_adds_up_and_no_alternative_in_it_is_better(case: tuple[Holders, RouteInputs, int]) -> None:
    held, inputs, alignment = case
    plan = make_plan(N_LAYERS, alignment, held, inputs)
    route = cheapest_route(N_LAYERS, alignment, held, inputs)
    assert (plan is None) == (route is None)
    if plan is None or route is None:
        return
    parts_s = sum(stage.compute_s + stage.network_s for stage in plan.stages) + plan.ends_s
    assert parts_s == pytest.approx(plan.cost_s)
    for stage in plan.stages:
        assert stage.node_id not in [other.node_id for other in stage.alternatives]
        for other in stage.alternatives:
            assert other.is_full or other.extra_s >= -1e-7
            assert other.layers.overlaps(stage.layers)
            assert covers(held[other.node_id], other.layers)
    n_full = n_on_full_nodes(as_segments(route), inputs)
    for rival in plan.rivals:
        if rival.cost_s is not None and n_on_full_nodes(as_segments(rival.stages), inputs) <= n_full:
            assert rival.cost_s >= plan.cost_s - 1e-7


def test_the_standby_of_a_stage_is_the_best_other_holder_that_is_not_full() -> None:
    full = replace(QUICK, lacks="no free slot")
    speeds = {"a": QUICK, "b": full, "c": SLOW}
    plan = make_plan(
        6, 1, {node_id: [WHOLE] for node_id in "abc"}, known(speeds, dict.fromkeys("abc", 0.001))
    )
    assert plan is not None
    assert (plan.stages[0].node_id, plan.stages[0].standby) == ("a", "c")
    assert plan.rivals[0].cost_s is None


@given(CASES)
def test_what_else_there_is_has_the_cost_of_the_best_route_through_it(
    case: tuple[Holders, RouteInputs, int],
) -> None:
    held, inputs, alignment = case
    plan = make_plan(N_LAYERS, alignment, held, inputs)
    if plan is None:
        return
    allowed = {node_id: runnable(ranges, N_LAYERS, alignment) for node_id, ranges in held.items()}
    routes = [
        (n_on_full_nodes(segments, inputs), felt_s(segments, inputs), segments)
        for segments in every_route(held, alignment)
    ]
    for index, stage in enumerate(plan.stages):
        for other in stage.alternatives:
            if other.layers == stage.layers:
                instead = [(each.node_id, each.layers) for each in plan.stages]
                instead[index] = (other.node_id, stage.layers)
                cost_s = felt_s(instead, inputs)
                assert other.extra_s + plan.cost_s == pytest.approx(cost_s, rel=1e-9, abs=1e-7)
            else:
                assert not covers(allowed[other.node_id], stage.layers)
                left = {
                    node: subtract(ranges, [] if node == other.node_id else [other.layers])
                    for node, ranges in allowed.items()
                }
                through = [
                    way[:2]
                    for way in routes
                    if changes_at_ends(way[2], left, alignment)
                    and all(covers(left[node], layers) for node, layers in way[2])
                ]
                assert other.extra_s + plan.cost_s == pytest.approx(min(through)[1], rel=1e-9, abs=1e-7)
    away = [rival.cost_s for rival in plan.rivals if rival.name == "with other nodes"]
    free = {node_id for node_id, speed in inputs.speeds.items() if not speed.is_full} - {ORIGIN}
    if {stage.node_id for stage in plan.stages} == {ORIGIN}:
        if inputs.speeds[ORIGIN].is_full:
            return
        others = [
            (not changes_at_ends(segments, held, alignment), cost_s)
            for n_full, cost_s, segments in routes
            if not n_full and any(node_id != ORIGIN for node_id, _ in segments)
        ]
        if others:
            (away_s,) = away
            assert away_s is not None
            # What is taken from home ends there, and a route may change there, too.
            assert min(cost_s for _, cost_s in others) <= away_s * (1 + 1e-9) + 1e-7
            assert away_s <= min(others)[1] * (1 + 1e-9) + 1e-7
        else:
            assert away == [None] * any(allowed[node_id] for node_id in allowed.keys() & free)
    else:
        assert not away


def test_a_plan_that_stays_at_home_says_what_the_split_would_cost() -> None:
    halves = {"a": [LayerRange(0, 3)], "b": [LayerRange(3, 6)]}
    inputs = known({"o": SLOW, "a": QUICK, "b": QUICK}, {"a": 0.2, "b": 0.2})
    plan = make_plan(6, 1, {"o": [WHOLE], **halves}, inputs)
    assert plan is not None
    assert [stage.node_id for stage in plan.stages] == ["o"]
    split = plan.rivals[-1]
    assert split.name == "with other nodes"
    assert split.stages == (RouteStage("a", LayerRange(0, 3)), RouteStage("b", LayerRange(3, 6)))
    assert split.cost_s is not None
    assert split.cost_s > 2 * plan.cost_s
    for other, (node_id, (layers,)) in zip(plan.stages[0].alternatives, halves.items(), strict=True):
        assert (other.node_id, other.layers, other.is_full) == (node_id, layers, False)
        assert other.extra_s == pytest.approx(split.cost_s - plan.cost_s)
    assert plan.stages[0].standby is None
    full = replace(inputs, speeds={**inputs.speeds, "b": replace(QUICK, lacks="no free slot")})
    plan = make_plan(6, 1, {"o": [WHOLE], **halves}, full)
    assert plan is not None
    assert [other.is_full for other in plan.stages[0].alternatives] == [False, True]
    assert plan.rivals[-1].stages == (RouteStage("a", LayerRange(0, 3)), RouteStage("o", LayerRange(3, 6)))
    assert plan.refused == (Refusal("b", LayerRange(3, 6), "no free slot"),)


def test_who_has_no_room_but_is_needed_is_on_the_route_and_the_plan_says_so() -> None:
    lack = "no room for 9,000 tokens of context: 4,096 free"
    full = replace(QUICK, lacks=lack)
    held = {"a": [LayerRange(0, 3)], "b": [LayerRange(3, 6)], "c": [LayerRange(0, 3)]}
    plan = make_plan(6, 1, held, known({"a": full, "b": full, "c": SLOW}, dict.fromkeys("abc", 0.001)))
    assert plan is not None
    assert [(stage.node_id, stage.lacks) for stage in plan.stages] == [("c", ""), ("b", lack)]
    assert plan.refused == (Refusal("a", LayerRange(0, 3), lack),)


def test_of_many_nodes_with_other_cuts_a_plan_names_four_at_most() -> None:
    firsts = {f"n{i:02}": [LayerRange(0, 1 + i % 5)] for i in range(60)}
    held = {"o": [WHOLE], "p": [LayerRange(i, 6) for i in range(1, 6)], **firsts}
    plan = make_plan(6, 1, held, known({"o": QUICK, "p": SLOW} | dict.fromkeys(firsts, SLOW)))
    assert plan is not None
    assert len(plan.stages[0].alternatives) == MAX_ALTERNATIVES
