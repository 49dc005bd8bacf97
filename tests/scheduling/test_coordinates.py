"""Coordinates learn a network from few of its pairs, and nobody can throw them out of it."""

from __future__ import annotations

import math
import random
import statistics

from hypothesis import given
from hypothesis import strategies as st

from swarmllm.scheduling.coordinates import (
    ERROR_MAX,
    HEIGHT_MIN_S,
    REACH_S,
    WINDOW,
    Coordinate,
    SteadyCoordinate,
    moved,
    predicted_rtt_s,
)

N_NODES = 60
N_MEASURED = 10


def make_network(seed: int) -> dict[tuple[int, int], float]:
    """Round trips in a plane of 150 ms, three regions, each node behind an access link of its own."""
    rng = random.Random(seed)
    centres = [(0.0, 0.0), (0.08, 0.0), (0.03, 0.14)]
    points = [
        (x + rng.gauss(0, 0.004), y + rng.gauss(0, 0.004))
        for x, y in (centres[i % len(centres)] for i in range(N_NODES))
    ]
    access = [rng.uniform(0.0005, 0.01) for _ in range(N_NODES)]
    return {
        (a, b): math.dist(points[a], points[b]) + access[a] + access[b]
        for a in range(N_NODES)
        for b in range(N_NODES)
        if a != b
    }


def test_pairs_that_nobody_measured_are_predicted_from_ten_measured_ones_each() -> None:
    rtt = make_network(7)
    rng = random.Random(8)
    friends = {a: rng.sample([b for b in range(N_NODES) if b != a], N_MEASURED) for a in range(N_NODES)}
    places = dict.fromkeys(range(N_NODES), Coordinate())
    for _ in range(30):
        for a in range(N_NODES):
            for b in friends[a]:
                noisy = rtt[a, b] * rng.uniform(0.95, 1.1)
                places[a] = moved(places[a], places[b], noisy, f"{a} {b}")
    assert all(place.is_settled for place in places.values())
    unmeasured = [pair for pair in rtt if pair[1] not in friends[pair[0]] and pair[0] not in friends[pair[1]]]
    wrong = [abs(predicted_rtt_s(places[a], places[b]) - rtt[a, b]) / rtt[a, b] for a, b in unmeasured]
    guess = statistics.median(rtt.values())
    wrong_guess = [abs(guess - rtt[pair]) / rtt[pair] for pair in unmeasured]
    assert statistics.median(wrong) < 0.1
    assert statistics.median(wrong) < statistics.median(wrong_guess) / 2


PLACES = st.builds(
    Coordinate,
    st.tuples(*[st.floats(-REACH_S, REACH_S)] * 3),
    st.floats(HEIGHT_MIN_S, REACH_S),
    st.floats(0, ERROR_MAX),
)


@given(PLACES, PLACES, st.floats(allow_nan=True, allow_infinity=True))
def test_whatever_a_peer_says_a_coordinate_stays_within_its_bounds(
    own: Coordinate, other: Coordinate, rtt_s: float
) -> None:
    after = moved(own, other, rtt_s, "a b")
    assert all(abs(part) <= REACH_S for part in after.position_s)
    assert HEIGHT_MIN_S <= after.height_s <= REACH_S
    assert 0 <= after.error <= ERROR_MAX
    if not rtt_s > 0 or not math.isfinite(rtt_s):
        assert after == own


@given(PLACES, PLACES)
def test_distance_is_the_same_from_both_sides(a: Coordinate, b: Coordinate) -> None:
    assert predicted_rtt_s(a, b) == predicted_rtt_s(b, a)


def test_two_nodes_at_one_point_part_in_a_direction_of_their_own() -> None:
    start = Coordinate()
    first, second = moved(start, start, 0.1, "a b"), moved(start, start, 0.1, "b a")
    assert first.position_s != second.position_s
    assert first == moved(start, start, 0.1, "a b")


def test_a_sure_node_moves_little_for_an_unsure_one() -> None:
    sure, unsure = Coordinate((0.0, 0.0, 0.1), 0.001, 0.05), Coordinate((0.0, 0.1, 0.0), 0.001, 1.0)
    by_sure = math.dist(moved(sure, unsure, 0.5, "a b").position_s, sure.position_s)
    by_unsure = math.dist(moved(unsure, sure, 0.5, "b a").position_s, unsure.position_s)
    assert by_sure < by_unsure / 10


MOVES = st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 1), st.floats(0, 1.5)), min_size=1, max_size=100)


@given(MOVES)
def test_a_steady_place_is_among_the_places_of_all_moves(moves: list[tuple[float, float, float]]) -> None:
    steady, rng = SteadyCoordinate(), random.Random(3)

    def move(x_s: float, n: int) -> list[float]:
        said = []
        for _ in range(n):
            steady.move(Coordinate((x_s + rng.gauss(0, 0.004), 0.0, 0.0), 0.001, 0.1))
            said.append(steady.coordinate.position_s[0])
        return said

    move(0.1, 50)
    assert statistics.pstdev(move(0.1, 200)) < 0.004 / 2
    assert abs(move(0.2, 5 * WINDOW)[-1] - 0.2) < 0.005
