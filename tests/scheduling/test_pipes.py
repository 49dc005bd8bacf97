"""Phase 1 of the placement against every partition there is, and the water-filling against its definition."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.scheduling.pipeline_groups import best_groups, fewest_stages
from swarmllm.scheduling.placement import water_fill


def every_partition(n: int, k: int, n_used: int = 0) -> Iterator[list[int]]:
    """Of n nodes: the number of each one's pipeline, 0 for none; pipelines are numbered as they begin."""
    if n == 0:
        if n_used == k:
            yield []
        return
    for number in range(min(k, n_used + 1) + 1):
        for rest in every_partition(n - 1, k, max(n_used, number)):
            yield [number, *rest]


def fewest_by_force(capacities: Sequence[int], demand: int, k: int) -> int | None:
    fewest = None
    for numbers in every_partition(len(capacities), k):
        sums = [0] * (k + 1)
        for number, capacity in zip(numbers, capacities, strict=True):
            sums[number] += capacity
        if min(sums[1:]) >= demand:
            n_nodes = sum(number > 0 for number in numbers)
            fewest = n_nodes if fewest is None else min(fewest, n_nodes)
    return fewest


@pytest.mark.slow
def test_stages_are_as_few_as_in_the_best_of_all_partitions() -> None:
    rng = random.Random(20261121)
    n_possible = 0
    for _ in range(700):
        demand = rng.randint(1, 14)
        capacities = [rng.randint(1, demand + 2) for _ in range(rng.randint(1, 6))]
        best = 0.0
        for k in range(1, len(capacities) + 1):
            fewest = fewest_by_force(capacities, demand, k)
            sizes = sorted((min(each, demand) for each in capacities), reverse=True)
            groups = fewest_stages(sizes, demand, k)
            assert (None if groups is None else sum(map(len, groups))) == fewest
            if fewest is not None:
                n_possible += 1
                best = max(best, k * k / fewest)
        chosen = best_groups(capacities, demand)
        assert (len(chosen) ** 2 / sum(map(len, chosen)) if chosen else 0.0) == best
    assert n_possible >= 1000


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 25), st.none() | st.integers(0, 5))
def test_groups_are_apart_and_each_is_enough(capacities: list[int], demand: int, most: int | None) -> None:
    groups = best_groups(capacities, demand, most)
    members = [i for group in groups for i in group]
    assert len(members) == len(set(members))
    assert all(sum(capacities[i] for i in group) >= demand for group in groups)
    assert len(groups) <= (most if most is not None else len(capacities))
    if most != 0:
        assert bool(groups) == (sum(min(each, demand) for each in capacities) >= demand)


def test_large_nodes_are_paired_with_small_ones() -> None:
    pairs = best_groups([60] * 10 + [20] * 10, 80)
    assert len(pairs) == 10
    assert all(large < 10 <= small for large, small in pairs)


CASES = st.lists(st.tuples(st.integers(0, 20), st.floats(0.01, 100)), min_size=1, max_size=12)


@given(CASES, st.integers(1, 120))
def test_layers_are_shared_out_wholly_within_capacity_and_as_even_as_whole_layers_can_be(
    nodes: list[tuple[int, float]], n_units: int
) -> None:
    capacities, speeds = [capacity for capacity, _ in nodes], [speed for _, speed in nodes]
    units = water_fill(n_units, capacities, speeds)
    if sum(capacities) < n_units:
        assert units is None
        return
    assert units is not None
    assert sum(units) == n_units
    assert all(0 <= mine <= capacity for mine, capacity in zip(units, capacities, strict=True))
    for i, j in itertools.permutations(range(len(nodes)), 2):
        # Nobody who has room for two more works two layers less than somebody else, by time.
        if units[i] + 2 <= capacities[i] and units[j] >= 2:
            assert (units[j] - 2) / speeds[j] <= (units[i] + 2) / speeds[i] * (1 + 1e-6)


def test_twice_the_speed_is_twice_the_layers() -> None:
    assert water_fill(12, [12, 12, 12], [1.0, 2.0, 3.0]) == [2, 4, 6]
    assert water_fill(12, [12, 2, 12], [1.0, 2.0, 1.0]) == [5, 2, 5]
    assert water_fill(1, [1, 1], [1.0, 1.0]) == [1, 0]
