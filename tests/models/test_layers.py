from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.errors import InvalidRequest
from swarmllm.models.layers import LayerRange, covers, merge, subtract


def layer_ranges() -> st.SearchStrategy[LayerRange]:
    bounds = st.tuples(st.integers(0, 20), st.integers(1, 12))
    return bounds.map(lambda bound: LayerRange(bound[0], bound[0] + bound[1]))


def layers_of(ranges: tuple[LayerRange, ...] | list[LayerRange]) -> set[int]:
    return {layer for each in ranges for layer in range(each.start, each.end)}


@given(layer_ranges())
def test_a_range_is_read_as_it_is_written(layers: LayerRange) -> None:
    assert LayerRange.parse(str(layers)) == layers


@pytest.mark.parametrize(
    "text", ["", "4", "4:", ":4", "4:4", "5:4", "-1:4", "0:99999", "0:4:8", "0x1:4", "a:b", "٠:٤", "0:4\n9"]
)
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        LayerRange.parse(text)
    assert caught.value.field == "layers"


@given(st.lists(layer_ranges(), max_size=6))
def test_merging_keeps_the_layers_in_the_fewest_ranges(ranges: list[LayerRange]) -> None:
    merged = merge(ranges)
    assert layers_of(merged) == layers_of(ranges)
    assert all(before.end < after.start for before, after in pairwise(merged))


@given(st.lists(layer_ranges(), max_size=6), st.lists(layer_ranges(), max_size=6))
def test_subtracting_removes_exactly_those_layers(
    ranges: list[LayerRange], removed: list[LayerRange]
) -> None:
    left = subtract(ranges, removed)
    assert layers_of(left) == layers_of(ranges) - layers_of(removed)
    assert merge(left) == left


@given(st.lists(layer_ranges(), max_size=6), layer_ranges())
def test_ranges_cover_what_is_a_subset_of_their_layers(ranges: list[LayerRange], wanted: LayerRange) -> None:
    assert covers(ranges, wanted) == (layers_of([wanted]) <= layers_of(ranges))


def test_containment_and_overlap() -> None:
    assert LayerRange(2, 4) in LayerRange(2, 5)
    assert LayerRange(2, 6) not in LayerRange(2, 5)
    assert 4 in LayerRange(2, 5)
    assert 5 not in LayerRange(2, 5)
    assert not LayerRange(0, 4).overlaps(LayerRange(4, 8))
    assert len(LayerRange(2, 5)) == 3
