"""The route: covers every layer once with parts of held ranges, and is as good as any."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.models.layers import LayerRange, covers
from swarmllm.scheduling.candidates import runnable
from swarmllm.scheduling.route import RouteStage, choose_route, is_complete, missing_layers

Holders = Mapping[str, Sequence[LayerRange]]


def holders(**ranges: str) -> Holders:
    return {node_id: [LayerRange.parse(text) for text in texts.split()] for node_id, texts in ranges.items()}


def shown(route: tuple[RouteStage, ...] | None) -> str | None:
    return None if route is None else " ".join(f"{stage.layers}@{stage.node_id}" for stage in route)


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        (holders(o="0:12"), "0:12@o"),
        (holders(o="0:12", a="0:12"), "0:12@o"),
        (holders(o="0:4 4:12", a="0:12"), "0:12@o"),
        (holders(a="0:12", b="0:12"), "0:12@a"),
        # One stage elsewhere beats two of which one is here.
        (holders(o="0:4", a="4:12", b="0:12"), "0:12@b"),
        # Among equally many stages, more layers here.
        (holders(o="0:8", a="0:4", b="4:12", c="8:12"), "0:8@o 8:12@b"),
        (holders(o="4:8", a="0:4", b="8:12"), "0:4@a 4:8@o 8:12@b"),
        (holders(o="0:4 8:12", a="4:8"), "0:4@o 4:8@a 8:12@o"),
        # Ranges of one node that meet are one stage.
        (holders(a="0:4 4:8", b="8:12"), "0:8@a 8:12@b"),
        # Of a held range a part may be used.
        (holders(a="0:8", b="4:12"), "0:4@a 4:12@b"),
        (holders(o="0:8", b="4:12"), "0:8@o 8:12@b"),
        (holders(o="2:10", a="0:4", b="8:12"), "0:2@a 2:10@o 10:12@b"),
        (holders(a="0:8", b="4:11"), None),
        (holders(a="0:4"), None),
        (holders(), None),
    ],
)
def test_routes_of_small_swarms(held: Holders, expected: str | None) -> None:
    assert shown(choose_route(12, 1, held, "o")) == expected


def test_cuts_stay_on_the_alignment() -> None:
    held = holders(a="0:3", b="3:12", c="0:4", d="4:12")
    assert shown(choose_route(12, 4, held, "o")) == "0:4@c 4:12@b"
    assert shown(choose_route(12, 3, held, "o")) == "0:3@a 3:12@b"
    assert choose_route(12, 5, held, "o") is None
    assert choose_route(12, 4, holders(a="0:6", b="6:12"), "o") is None
    # The end of the model is no cut.
    assert shown(choose_route(11, 4, holders(a="0:8", b="8:11"), "o")) == "0:8@a 8:11@b"


def test_a_model_that_cannot_be_cut_runs_whole_or_not() -> None:
    assert choose_route(12, 0, holders(a="0:6", b="6:12"), "o") is None
    assert shown(choose_route(12, 0, holders(a="0:6", b="6:12", c="0:12"), "o")) == "0:12@c"


def test_a_route_of_more_stages_than_fit_is_none() -> None:
    held = {f"n{i:03}": [LayerRange(i, i + 1)] for i in range(10)}
    assert choose_route(10, 1, held, "o", max_stages=9) is None
    assert choose_route(10, 1, held, "o", max_stages=10) is not None


N_LAYERS = 6
RANGES = st.sampled_from([LayerRange(a, b) for a in range(N_LAYERS) for b in range(a + 1, N_LAYERS + 1)])
SWARMS = st.dictionaries(
    st.sampled_from("oabc"), st.lists(RANGES, max_size=4, unique=True).map(tuple), max_size=4
)


def every_route(held: Holders, alignment: int) -> Iterator[list[tuple[str, LayerRange]]]:
    """By trying everything: each node that holds a layer may run it, and nodes change at allowed cuts."""
    cuts = [0, *range(alignment, N_LAYERS, alignment)] if alignment else [0]
    units = [LayerRange(a, b) for a, b in itertools.pairwise([*cuts, N_LAYERS])]
    nodes = [[node for node in sorted(held) if _runs(held[node], unit, alignment)] for unit in units]
    for way in itertools.product(*nodes):
        stages: list[tuple[str, LayerRange]] = []
        for node_id, unit in zip(way, units, strict=True):
            if stages and stages[-1][0] == node_id:
                stages[-1] = node_id, LayerRange(stages[-1][1].start, unit.end)
            else:
                stages.append((node_id, unit))
        yield stages


def _runs(ranges: Sequence[LayerRange], unit: LayerRange, alignment: int) -> bool:
    return unit in ranges if alignment == 0 else any(unit in layers for layers in ranges)


def cost(route: Sequence[tuple[str, LayerRange]]) -> tuple[int, int]:
    node_ids = [node_id for node_id, _ in route]
    n_stages = sum(before != here for before, here in zip(["", *node_ids], node_ids, strict=False))
    return n_stages, sum(len(layers) for node_id, layers in route if node_id != "o")


@given(SWARMS, st.sampled_from([0, 1, 2, 3]))
def test_no_route_is_better_and_every_route_keeps_the_rules(held: Holders, alignment: int) -> None:
    route = choose_route(N_LAYERS, alignment, held, "o")
    best = min((cost(known) for known in every_route(held, alignment)), default=None)
    assert is_complete(N_LAYERS, alignment, held) == (route is not None)
    if route is None:
        assert best is None
        return
    assert route[0].layers.start == 0
    assert route[-1].layers.end == N_LAYERS
    for before, after in itertools.pairwise(route):
        assert before.layers.end == after.layers.start
        assert before.node_id != after.node_id
        assert alignment
        assert after.layers.start % alignment == 0
    for stage in route:
        assert covers(runnable(held[stage.node_id], N_LAYERS, alignment), stage.layers)
    assert cost([(stage.node_id, stage.layers) for stage in route]) == best


@given(SWARMS, st.permutations("oabc"))
def test_the_order_of_the_holders_does_not_matter(held: Holders, order: Sequence[str]) -> None:
    reordered = {node_id: tuple(reversed(held[node_id])) for node_id in order if node_id in held}
    assert choose_route(N_LAYERS, 1, held, "o") == choose_route(N_LAYERS, 1, reordered, "o")


@given(st.lists(RANGES))
def test_missing_layers_are_those_that_nobody_holds(ranges: list[LayerRange]) -> None:
    missing = missing_layers(N_LAYERS, ranges)
    listed = [layer for layers in missing for layer in range(layers.start, layers.end)]
    assert listed == [i for i in range(N_LAYERS) if not covers(ranges, LayerRange(i, i + 1))]


def test_large_swarms_are_routed_to_the_end() -> None:
    held = {f"n{i:04}": [LayerRange(4 * (i % 20), 4 * (i % 20) + 4)] for i in range(1000)}
    route = choose_route(80, 1, held, "n0013")
    assert route is not None
    assert len(route) == 20
    assert RouteStage("n0013", LayerRange(52, 56)) in route
