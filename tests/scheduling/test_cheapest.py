"""The cheapest route is the cheapest: against every route there is, and against greedy where there are too
many."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from long_runs import part_or_whole

from swarmllm.models.layers import LayerRange, covers
from swarmllm.scheduling.candidates import runnable
from swarmllm.scheduling.cheapest import cheapest_route, route_cost_s
from swarmllm.scheduling.coordinates import Coordinate
from swarmllm.scheduling.cost import (
    HOP_HANDLING_S,
    NodeSpeed,
    RouteInputs,
    Workload,
)
from swarmllm.scheduling.route import RouteStage, choose_route

from .test_route import N_LAYERS, Holders, every_route

ORIGIN = "o"
Segments = Sequence[tuple[str, LayerRange]]


def random_case(rng: random.Random) -> tuple[Holders, RouteInputs, int]:
    node_ids = rng.sample("oabcde", rng.randint(1, 5))
    bounds = list(itertools.combinations(range(N_LAYERS + 1), 2))
    held = {
        node_id: [LayerRange(*pair) for pair in rng.sample(bounds, rng.randint(1, 5))] for node_id in node_ids
    }
    others = [node_id for node_id in node_ids if node_id != ORIGIN]
    pairs = [pair for pair in itertools.combinations(others, 2) if rng.random() < 0.5]
    inputs = RouteInputs(
        ORIGIN,
        Workload(rng.choice([1, 50, 1000]), rng.choice([1, 20, 300]), rng.choice([0, 256, 32768])),
        {
            node_id: NodeSpeed(
                rng.uniform(1e-5, 5e-3),
                rng.uniform(1e-6, 1e-3),
                rng.choice([0, 0, 1, 4]),
                rng.choice(["", "", "", "no free slot"]),
            )
            for node_id in node_ids
        },
        {node_id: rng.choice([0.0, 0.001, 0.02, 0.2]) for node_id in others if rng.random() < 0.9},
        {pair: rng.choice([0.0, 0.001, 0.02, 0.2]) for pair in pairs},
        {node_id: random_place(rng) for node_id in node_ids if rng.random() < 0.5},
        {node_id: rng.choice([1e6, 1e9]) for node_id in others if rng.random() < 0.3},
        {pair: rng.choice([1e6, 1e9]) for pair in pairs if rng.random() < 0.3},
        rng.choice([0.0, HOP_HANDLING_S, 0.02]),
    )
    return held, inputs, rng.choice([0, 1, 1, 1, 2, 3])


def random_place(rng: random.Random) -> Coordinate:
    return Coordinate((rng.uniform(0, 0.1), 0.0, rng.uniform(0, 0.1)), 0.001, rng.choice([0.1, 1.0]))


def felt_s(segments: Segments, known: RouteInputs) -> float:
    """The cost as the specification has it, written down a second time."""
    work = known.workload
    total_s = 0.0
    for node_id, layers in segments:
        speed = known.speeds[node_id]
        per_layer = work.n_prompt_tokens * speed.prefill_s + work.n_output_tokens * speed.decode_s
        total_s += len(layers) * per_layer * (1 + speed.n_active)
    nodes = [node_id for node_id, _ in itertools.groupby(node_id for node_id, _ in segments)]
    rows, handling_s = work.n_prompt_tokens + work.n_output_tokens, known.hop_handling_s
    for a, b in itertools.pairwise(nodes):
        total_s += work.n_output_tokens * (known.rtt_s(a, b) / 2 + handling_s)
        total_s += rows * work.row_bytes / known.bytes_per_s(a, b)
    if nodes[0] != nodes[-1]:
        total_s += work.n_output_tokens * (known.rtt_s(nodes[-1], nodes[0]) / 2 + handling_s)
    if nodes[0] != known.origin:
        total_s += known.rtt_s(known.origin, nodes[0]) / 2 + handling_s
        total_s += work.n_prompt_tokens * work.row_bytes / known.bytes_per_s(known.origin, nodes[0])
    if nodes[-1] != known.origin:
        total_s += known.rtt_s(nodes[-1], known.origin) / 2 + handling_s
    return total_s


def n_on_full_nodes(segments: Segments, known: RouteInputs) -> int:
    """Layers."""
    return sum(len(layers) for node_id, layers in segments if known.speeds[node_id].is_full)


def changes_at_ends(segments: Segments, held: Holders, alignment: int) -> bool:
    """Whether nodes change only where the range of the first ends or that of the second begins."""
    for (before, _), (after, layers) in itertools.pairwise(segments):
        ends = {each.end for each in runnable(held[before], N_LAYERS, alignment)}
        starts = {each.start for each in runnable(held[after], N_LAYERS, alignment)}
        if layers.start not in ends | starts:
            return False
    return True


def as_segments(route: Sequence[RouteStage]) -> Segments:
    return [(stage.node_id, stage.layers) for stage in route]


@pytest.mark.slow
def test_equal_to_brute_force_on_random_small_swarms() -> None:
    rng = random.Random(20260729)
    n_routed = n_crowded = 0
    n_swarms = part_or_whole(500, 2000)
    for _ in range(n_swarms):
        held, known, alignment = random_case(rng)
        route = cheapest_route(N_LAYERS, alignment, held, known)
        ways = (
            (n_on_full_nodes(way, known), felt_s(way, known))
            for way in every_route(held, alignment)
            if changes_at_ends(way, held, alignment)
        )
        n_full, best_s = min(ways, default=(0, None))
        assert (route is None) == (best_s is None)
        if route is not None and best_s is not None:
            n_routed += 1
            n_crowded += n_full > 0
            assert n_on_full_nodes(as_segments(route), known) == n_full
            assert felt_s(as_segments(route), known) == pytest.approx(best_s, rel=1e-9, abs=1e-7)
            assert route_cost_s(route, known) == pytest.approx(best_s, rel=1e-9, abs=1e-7)
    assert n_routed >= n_swarms / 4
    assert n_crowded >= n_swarms / 20


def test_no_other_cuts_are_better_where_no_way_is_shorter_by_a_detour() -> None:
    """Nodes on a line. Only what enters and leaves a ring, once for a request, is not a hop of it."""
    rng = random.Random(20261122)
    n_overlapping = 0
    for _ in range(400):
        held, known, alignment = random_case(rng)
        at = {node_id: rng.uniform(0, 0.1) for node_id in held} | {ORIGIN: 0.0}
        rtt_s = {node_id: place for node_id, place in at.items() if node_id != ORIGIN}
        pairs = {(a, b): abs(at[a] - at[b]) for a in rtt_s for b in rtt_s}
        known = RouteInputs(ORIGIN, known.workload, known.speeds, rtt_s, pairs)
        ways = [(n_on_full_nodes(way, known), felt_s(way, known)) for way in every_route(held, alignment)]
        route = cheapest_route(N_LAYERS, alignment, held, known)
        assert (route is None) == (not ways)
        if route is not None:
            n_full, best_s = min(ways)
            assert n_on_full_nodes(as_segments(route), known) == n_full
            assert felt_s(as_segments(route), known) <= best_s + max(at.values()) + 2 * HOP_HANDLING_S
            n_overlapping += any(
                stage.layers not in runnable(held[stage.node_id], N_LAYERS, alignment) for stage in route
            )
    assert n_overlapping >= 50


CASES = st.integers(0, 2**32).map(lambda seed: random_case(random.Random(seed)))


@given(CASES)
def test_every_layer_once_in_order_on_holders_at_allowed_cuts(
    case: tuple[Holders, RouteInputs, int],
) -> None:
    held, known, alignment = case
    route = cheapest_route(N_LAYERS, alignment, held, known)
    assert (route is None) == (choose_route(N_LAYERS, alignment, held, ORIGIN) is None)
    if route is None:
        return
    assert (route[0].layers.start, route[-1].layers.end) == (0, N_LAYERS)
    for before, after in itertools.pairwise(route):
        assert before.layers.end == after.layers.start
        assert before.node_id != after.node_id
        assert after.layers.start % alignment == 0
    for stage in route:
        assert covers(runnable(held[stage.node_id], N_LAYERS, alignment), stage.layers)


@given(CASES, st.randoms(use_true_random=False))
def test_the_order_in_which_things_are_known_does_not_matter(
    case: tuple[Holders, RouteInputs, int], rng: random.Random
) -> None:
    held, known, alignment = case
    order = rng.sample(list(held), len(held))
    shuffled = {node_id: list(reversed(held[node_id])) for node_id in order}
    other = replace(known, speeds={node_id: known.speeds[node_id] for node_id in reversed(order)})
    assert cheapest_route(N_LAYERS, alignment, shuffled, other) == cheapest_route(
        N_LAYERS, alignment, held, known
    )


@given(CASES, st.floats(0.1, 0.99))
def test_a_faster_node_never_makes_the_best_route_slower(
    case: tuple[Holders, RouteInputs, int], factor: float
) -> None:
    held, known, alignment = case
    route = cheapest_route(N_LAYERS, alignment, held, known)
    if route is None:
        return
    for node_id, speed in known.speeds.items():
        faster = replace(speed, decode_s=speed.decode_s * factor, prefill_s=speed.prefill_s * factor)
        better = replace(known, speeds={**known.speeds, node_id: faster})
        again = cheapest_route(N_LAYERS, alignment, held, better)
        assert again is not None
        assert route_cost_s(again, better) <= route_cost_s(route, known) * (1 + 1e-9) + 1e-7


@given(CASES)
def test_home_is_never_left_for_a_slower_route(case: tuple[Holders, RouteInputs, int]) -> None:
    held, known, alignment = case
    home = choose_route(N_LAYERS, alignment, {ORIGIN: held.get(ORIGIN, [])}, ORIGIN)
    route = cheapest_route(N_LAYERS, alignment, held, known)
    if home is not None and not known.speeds[ORIGIN].is_full:
        assert route is not None
        assert route_cost_s(route, known) <= route_cost_s(home, known) * (1 + 1e-9)


def greedy(held: Holders, known: RouteInputs, n_layers: int) -> list[RouteStage] | None:
    """At each boundary the segment that costs least per layer, its hop included."""
    route: list[RouteStage] = []
    at = 0
    while at < n_layers:
        options = []
        for node_id, ranges in held.items():
            for layers in ranges:
                if layers.start == at:
                    hop_s = known.hop_s(route[-1].node_id, node_id) if route else known.entry_s(node_id)
                    options.append((hop_s / len(layers) + known.layer_s(node_id), node_id, layers))
        if not options:
            return None
        _, node_id, layers = min(options)
        route.append(RouteStage(node_id, layers))
        at = layers.end
    return route


@pytest.mark.parametrize("seed", range(5))
def test_never_worse_than_greedy_on_large_swarms(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"n{i:03}" for i in range(200)]
    starts = {name: 4 * rng.randrange(20) for name in names}
    held = {name: [LayerRange(start, start + 4)] for name, start in starts.items()}
    known = RouteInputs(
        names[0],
        Workload(200, 100, 16384),
        {name: NodeSpeed(rng.uniform(1e-4, 5e-3), rng.uniform(1e-5, 1e-3)) for name in names},
        {name: rng.choice([0.001, 0.03, 0.15]) for name in names[1:]},
    )
    ours, rival = cheapest_route(80, 1, held, known), greedy(held, known, 80)
    assert ours is not None
    assert rival is not None
    assert route_cost_s(ours, known) <= route_cost_s(rival, known)


def known(speeds: Mapping[str, NodeSpeed], rtt_s: Mapping[str, float] | None = None) -> RouteInputs:
    return RouteInputs("o", Workload(10, 100, 256), speeds, rtt_s or dict.fromkeys("ab", 0.001))


WHOLE = LayerRange(0, 6)
SLOW, QUICK = NodeSpeed(0.01, 0.001), NodeSpeed(0.001, 0.0001)


def test_a_fast_neighbour_beats_a_slow_home_and_a_far_one_in_two_halves_does_not() -> None:
    held = {"o": [WHOLE], "a": [WHOLE]}
    near = cheapest_route(6, 1, held, known({"o": SLOW, "a": QUICK}))
    assert near == (RouteStage("a", WHOLE),)
    split = {"o": [WHOLE], "a": [LayerRange(0, 3)], "b": [LayerRange(3, 6)]}
    far = known({"o": SLOW, "a": QUICK, "b": QUICK}, {"a": 0.2, "b": 0.2})
    assert cheapest_route(6, 1, split, far) == (RouteStage("o", WHOLE),)


def test_layers_that_two_nodes_hold_run_on_the_quicker_one() -> None:
    held = {"a": [LayerRange(0, 4)], "b": [LayerRange(2, 6)]}
    for a, b, at in ((SLOW, QUICK, 2), (QUICK, SLOW, 4)):
        route = cheapest_route(6, 1, held, known({"a": a, "b": b}))
        assert route == (RouteStage("a", LayerRange(0, at)), RouteStage("b", LayerRange(at, 6)))


def test_load_moves_requests_elsewhere() -> None:
    held = {"a": [WHOLE], "b": [WHOLE]}
    assert cheapest_route(6, 1, held, known({"a": QUICK, "b": QUICK})) == (RouteStage("a", WHOLE),)
    busy = replace(QUICK, n_active=1)
    assert cheapest_route(6, 1, held, known({"a": busy, "b": QUICK})) == (RouteStage("b", WHOLE),)


def test_a_full_node_is_used_only_where_nobody_else_is() -> None:
    full = replace(QUICK, lacks="no free slot")
    held = {"a": [WHOLE], "b": [WHOLE]}
    assert cheapest_route(6, 1, held, known({"a": full, "b": SLOW})) == (RouteStage("b", WHOLE),)
    assert cheapest_route(6, 1, {"a": [WHOLE]}, known({"a": full})) == (RouteStage("a", WHOLE),)


def test_a_full_node_is_left_out_where_another_has_room_though_others_are_full_too() -> None:
    """Nobody but c has the second half, so there is no route without full nodes; still b is better than a."""
    full = replace(QUICK, lacks="no free slot")
    held = {"a": [LayerRange(0, 3)], "b": [LayerRange(0, 3)], "c": [LayerRange(3, 6)]}
    route = cheapest_route(6, 1, held, known({"a": full, "b": SLOW, "c": full}))
    assert route == (RouteStage("b", LayerRange(0, 3)), RouteStage("c", LayerRange(3, 6)))


def test_the_hop_back_to_the_first_stage_decides_between_equals() -> None:
    """b ends the ring next to a; c is as quick and as near to the origin, but far from a."""
    held = {"a": [LayerRange(0, 3)], "b": [LayerRange(3, 6)], "c": [LayerRange(3, 6)]}
    speeds = dict.fromkeys("abc", QUICK)
    ring = RouteInputs(
        "o",
        Workload(10, 100, 256),
        speeds,
        dict.fromkeys("abc", 0.05),
        {("a", "b"): 0.1, ("c", "a"): 0.001},
    )
    route = cheapest_route(6, 1, held, ring)
    assert route is not None
    assert [stage.node_id for stage in route] == ["a", "c"]


def test_more_stages_than_a_request_carries_give_way_to_fewer() -> None:
    held = {"o": [WHOLE], "a": [LayerRange(0, 3)], "b": [LayerRange(3, 6)]}
    swift = known({"o": SLOW, "a": QUICK, "b": QUICK})
    both = cheapest_route(6, 1, held, swift)
    assert both is not None
    assert len(both) == 2
    assert cheapest_route(6, 1, held, swift, max_stages=1) == (RouteStage("o", WHOLE),)


def test_of_equal_routes_the_one_with_fewer_stages_then_with_more_layers_at_home() -> None:
    near = RouteInputs("o", Workload(10, 0, 0), dict.fromkeys("oabc", QUICK), dict.fromkeys("abc", 0.0))
    held = {"a": [LayerRange(0, 3)], "b": [LayerRange(3, 6)], "c": [WHOLE]}
    assert cheapest_route(6, 1, held, near) == (RouteStage("c", WHOLE),)
    cuts = {"o": [LayerRange(0, 4)], "b": [LayerRange(2, 6)]}
    at_home, elsewhere = RouteStage("o", LayerRange(0, 4)), RouteStage("b", LayerRange(4, 6))
    assert cheapest_route(6, 1, cuts, near) == (at_home, elsewhere)
