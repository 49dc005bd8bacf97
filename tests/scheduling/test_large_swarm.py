"""A small version of bench.large_swarm: three hundred nodes, of which twenty ask."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from bench.common.large_swarm_causes import CAUSES, table
from bench.common.large_swarm_nodes import N_MODELS, id_of, make_model
from bench.large_swarm import simulate


def test_each_model_of_the_simulation_is_another_one() -> None:
    assert len({id_of(make_model(number)) for number in range(N_MODELS)}) == N_MODELS


@pytest.mark.slow
async def test_origins_of_a_swarm_that_is_no_full_mesh_are_served_over_nodes_that_they_dial(
    autojump_clock: Any,
) -> None:
    swarm = await simulate(300, 60.0, seed=2, n_origins=20, ask_every_s=150.0, settle_s=5.0)
    figures = swarm.figures
    assert figures.n_asked >= 60
    assert figures.n_unserved == 0
    assert statistics.median(figures.ratios) < 2
    assert sum(origin.n_dials for origin in swarm.origins) > 0
    # Far fewer connections than nodes: only those of the start, and those that work needed.
    assert max(len(origin.connected) for origin in swarm.origins) < len(swarm.nodes) / 2
    assert sum(figures.counts.values()) > 0


async def test_plans_of_origins_that_know_more_are_named_beside_the_real_ones(autojump_clock: Any) -> None:
    swarm = await simulate(80, 20.0, seed=2, n_origins=6, ask_every_s=60.0, settle_s=5.0, causes=True)
    found = swarm.causes
    assert found
    assert len(found) == len(swarm.plan_ratios)
    assert all(set(each.known) == set(CAUSES) for each in found)
    # Who knows speeds, loads and distances chooses as the oracle does, among the nodes that it may take.
    by_all = [each.known["all of these"] for each in found]
    assert min(by_all) >= 1 - 1e-9
    assert statistics.mean(by_all) < statistics.mean(each.plan for each in found)
    assert table(found, 10.0).count("\n") >= 5
