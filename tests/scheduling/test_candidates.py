"""How many ranges a route is chosen from, and what the search does with them: bounded, whatever is held."""

from __future__ import annotations

import random

import pytest

from swarmllm.models.layers import LayerRange
from swarmllm.scheduling.candidates import PAIRS_MAX, CandidatePiece, candidates, n_pairs, pieces_of, runnable
from swarmllm.scheduling.cheapest import SEARCHED_MAX, _Search, cheapest_route, part_cost_s, route_cost_s
from swarmllm.scheduling.cost import NodeSpeed, RouteInputs, Workload
from swarmllm.scheduling.route import RouteStage, choose_route, is_complete

N_LAYERS = 100


def liars(n_nodes: int, n_ranges: int) -> dict[str, list[LayerRange]]:
    rng = random.Random(1)
    return {f"liar{number:03}": apart(rng, n_ranges) for number in range(n_nodes)}


def apart(rng: random.Random, n_ranges: int) -> list[LayerRange]:
    """Ranges that do not meet."""
    bounds = sorted(rng.sample(range(N_LAYERS + 1), 2 * n_ranges))
    return [LayerRange(*pair) for pair in zip(bounds[::2], bounds[1::2], strict=True)]


def alike(node_ids: list[str]) -> RouteInputs:
    """Nobody's bound is better than another's, because the way back to the first stage is what costs."""
    rng = random.Random(2)
    speeds = {node_id: NodeSpeed(1e-9, 1e-9) for node_id in node_ids}
    pairs = {(a, b): rng.uniform(0.1, 1.0) for a in node_ids for b in rng.sample(node_ids, 8)}
    return RouteInputs("me", Workload(128, 128), speeds | {"me": NodeSpeed(1, 1)}, {}, pairs)


def test_what_an_honest_swarm_holds_stays() -> None:
    held = {f"n{i:03}": [LayerRange(i % 20 * 5, i % 20 * 5 + 5)] for i in range(1000)}
    assert candidates(N_LAYERS, 1, held, ()) == held
    # What no pipeline may contain is for the explanation why there is none.
    odd = {"a": [LayerRange(1, 3)]}
    assert candidates(4, 2, odd, ()) == odd


def test_of_many_ranges_the_widest_of_each_node_stay() -> None:
    held = liars(256, 16) | {
        "me": [LayerRange(2 * i, 2 * i + 1) for i in range(30)],
        "honest": [LayerRange(3, 4)],
    }
    assert n_pairs(held.values()) > PAIRS_MAX
    left = candidates(N_LAYERS, 1, held, {"me"})
    assert n_pairs(left.values()) <= PAIRS_MAX
    assert left.keys() == held.keys()
    assert set(left["me"]) == set(held["me"])
    assert left["honest"] == held["honest"]
    for node_id, ranges in left.items():
        widest = sorted(map(len, held[node_id]), reverse=True)
        assert ranges
        assert sorted(map(len, ranges), reverse=True) == widest[: len(ranges)]


def test_two_ranges_of_each_of_256_nodes_are_never_too_many() -> None:
    """At most each pair of ranges lets a route change twice from the one to the other, and as often back."""
    held = {f"n{i}": apart(random.Random(i), 2) for i in range(256)}
    assert PAIRS_MAX / 4 < n_pairs(held.values()) <= PAIRS_MAX
    assert candidates(N_LAYERS, 1, held, ()) == held


def test_a_search_looks_at_a_bounded_number_of_pairs() -> None:
    held = candidates(N_LAYERS, 1, liars(256, 16), ())
    known = alike(sorted(held))
    pieces = pieces_of({node: runnable(ranges, N_LAYERS, 1) for node, ranges in held.items()})
    search = _Search(N_LAYERS, pieces, known)
    found = search.cheapest()
    assert found is not None
    assert 1 <= search.n_searched <= 1 + SEARCHED_MAX // n_pairs(held.values())
    assert len(set(search._node[search._first])) > search.n_searched
    assert cheapest_route(N_LAYERS, 1, held, known) is not None


@pytest.mark.parametrize("n_stages", [1, 2, 4])
def test_another_node_in_a_stage_changes_the_cost_by_its_part(n_stages: int) -> None:
    names = ["me", *(f"n{i}" for i in range(6))]
    rng = random.Random(3)
    speeds = {name: NodeSpeed(rng.random(), rng.random(), rng.randrange(3)) for name in names}
    rtts = {name: rng.random() for name in names[1:]}
    pairs = {(a, b): rng.random() for a in names[1:] for b in names[1:] if a < b}
    known = RouteInputs("me", Workload(7, 9, 4096), speeds, rtts, pairs)
    route = [RouteStage(names[i], LayerRange(i * 3, i * 3 + 3)) for i in range(n_stages)]
    for index in range(n_stages):
        for name in names[4:]:
            other = [*route[:index], RouteStage(name, route[index].layers), *route[index + 1 :]]
            part_s = part_cost_s(route, index, name, known)
            part_s -= part_cost_s(route, index, route[index].node_id, known)
            assert part_s == pytest.approx(route_cost_s(other, known) - route_cost_s(route, known))


def test_a_search_ends_with_the_best_ring_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes bounds useless: the node that closes a ring well is another one for each first node."""
    firsts, lasts = ([f"{end}{i}" for i in range(8)] for end in "fl")
    far = {(a, b): 1.0 for a in firsts for b in lasts if a[1:] != b[1:]}
    near = {(a, b): 0.9 for a in firsts for b in lasts if a[1:] == b[1:]}
    speeds = {name: NodeSpeed(1e-3, 1e-3) for name in ["me", *firsts, *lasts]}
    known = RouteInputs("me", Workload(8, 8), speeds, {}, far | near)
    pieces = [CandidatePiece(0, 1, name, True, True) for name in firsts]
    pieces += [CandidatePiece(1, 2, name, True, True) for name in lasts]
    search = _Search(2, pieces, known)
    assert search.cheapest() is not None
    unbounded = search.n_searched
    monkeypatch.setattr("swarmllm.scheduling.cheapest.SEARCHED_MAX", 0)
    search = _Search(2, pieces, known)
    assert search.cheapest() is not None
    assert search.n_searched == 1 <= unbounded


@pytest.mark.parametrize(("names", "expected"), [("aaa", True), ("aab", True), ("abc", False)])
def test_a_model_is_complete_only_where_a_route_has_few_enough_stages(
    names: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmllm.scheduling.route.MAX_STAGES", 2)
    held: dict[str, list[LayerRange]] = {}
    for start, name in enumerate(names):
        held.setdefault(name, []).append(LayerRange(start, start + 1))
    found = choose_route(3, 1, held, "me", max_stages=2) is not None
    assert (is_complete(3, 1, held), found) == (expected, expected)
    assert not is_complete(4, 1, held)
