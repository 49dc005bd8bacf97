"""The table of architectures, and the rule it gives for a model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm_proto.architectures import ARCHITECTURES, Architecture, cut_rule, window_period


def numbers(**values: int) -> Callable[[str], int | None]:
    return {key.replace("__", "."): value for key, value in values.items()}.get


def no_lists(key: str) -> None:
    return None


def test_plain_architecture_is_cut_anywhere() -> None:
    assert cut_rule("llama", 32, numbers(), no_lists).cut_alignment == 1


def test_alignment_comes_from_the_table_or_from_the_metadata() -> None:
    assert cut_rule("smollm3", 36, numbers(), no_lists).cut_alignment == 4
    assert cut_rule("ernie4_5-moe", 28, numbers(), no_lists).cut_alignment == 1
    step = {"ernie4_5-moe.interleave_moe_layer_step": 2}
    assert cut_rule("ernie4_5-moe", 28, step.get, no_lists).cut_alignment == 2


@pytest.mark.parametrize(
    ("architecture", "n_layers", "said"),
    [
        ("unheard-of", 4, "unheard-of"),
        ("exaone4", 64, "64 layers"),
        ("smollm3", 4, "multiples of 4"),
        ("llama", 1, "multiples of 1"),
        ("baichuan", 12, "32 and 40"),
        ("lfm2", 16, "does not say"),
        ("qwen3next", 4, "both kinds"),
    ],
)
def test_model_that_cannot_be_cut_says_why(architecture: str, n_layers: int, said: str) -> None:
    rule = cut_rule(architecture, n_layers, numbers(), no_lists)
    assert rule.cut_alignment == 0
    assert said in rule.whole_reason


def test_a_window_of_zero_makes_llama4_run_whole() -> None:
    window = {"llama4.attention.sliding_window": 0}
    assert cut_rule("llama4", 48, window.get, no_lists).cut_alignment == 0
    step = {"llama4.interleave_moe_layer_step": 6}
    assert cut_rule("llama4", 48, step.get, no_lists).cut_alignment == 12


@pytest.mark.parametrize(
    ("kv_heads", "alignment"),
    [
        ([0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0], 4),  # LFM2 1.2B
        ([*([0, 0, 0, 1] * 7)[:26], 1], 4),  # Kimi Linear 48B
        ([0, 4] * 3, 2),
        ([0, 0, 0, 0, 0, 4], 0),
        ([4] * 6, 0),
    ],
)
def test_parts_of_a_hybrid_have_layers_of_both_kinds(kv_heads: list[int], alignment: int) -> None:
    lists = {"lfm2.attention.head_count_kv": kv_heads}
    rule = cut_rule("lfm2", len(kv_heads), numbers(), lists.get)
    assert rule.cut_alignment == alignment
    assert bool(rule.whole_reason) == (alignment == 0)
    if alignment:
        for at in range(0, len(kv_heads), alignment):
            part = kv_heads[at : at + alignment]
            assert any(part)
            assert 0 in part


@pytest.mark.parametrize(
    ("pattern", "n_layers", "alignment"),
    [
        (None, 8, 2),  # every fourth layer attends to everything
        (None, 9, 2),
        (3, 9, 3),  # layer 8 alone has no window
        (2, 9, 2),
        (3, 10, 2),
        ([True, True, False] * 3, 9, 3),
        ([True, False, False, True, True, False, False, True], 8, 2),
        ([True, True, True, True, True, False, False, False], 8, 4),
        ([True, False, False, False, False, False, False, False], 8, 0),
        ([True] * 8, 8, 1),
        ([False] * 8, 8, 0),
        (0, 8, 1),
        (1, 8, 0),
    ],
)
def test_parts_of_cohere2_have_a_layer_with_a_window(
    pattern: int | list[bool] | None, n_layers: int, alignment: int
) -> None:
    key = "cohere2.attention.sliding_window_pattern"
    number = {key: pattern}.get if isinstance(pattern, int) else no_lists
    listed = {key: [int(item) for item in pattern]}.get if isinstance(pattern, list) else no_lists
    rule = cut_rule("cohere2", n_layers, number, listed)
    assert rule.cut_alignment == alignment, rule.whole_reason
    assert alignment or "window" in rule.whole_reason


def test_no_part_begins_with_a_layer_whose_heads_are_of_another_size() -> None:
    def alignment(heads: list[int], **sizes: int) -> int:
        lists = {"deci.attention.head_count": heads}
        numbers_ = {f"deci.attention.{key}": size for key, size in sizes.items()}
        return cut_rule("deci", len(heads), numbers_.get, lists.get).cut_alignment

    assert alignment([4] * 6) == 1
    assert alignment([4, 0, 4, 0, 4, 0]) == 2
    assert alignment([4, 8, 4, 8, 4, 8]) == 2
    assert alignment([4, 8, 4, 8, 4, 8], key_length=16, value_length=16) == 1
    assert alignment([4, 8, 4, 8, 4, 8], key_length=16) == 2
    assert alignment([4, 0, 0, 4, 0, 0], key_length=16, value_length=16) == 3
    assert alignment([0, 4, 4, 4], key_length=16, value_length=16) == 0
    hybrid = {"lfm2.attention.head_count": [4, 0, 4, 0, 0, 4, 0, 0, 4]}
    hybrid["lfm2.attention.head_count_kv"] = [0, 0, 2, 0, 0, 2, 0, 0, 2]
    assert cut_rule("lfm2", 9, numbers(), hybrid.get).cut_alignment == 5
    hybrid["lfm2.attention.head_count"] = [4, 0, 4, 0, 0, 0, 0, 0, 0]
    assert "size of heads" in cut_rule("lfm2", 9, numbers(), hybrid.get).whole_reason


def test_interval_or_list_says_which_layers_attend() -> None:
    interval = {"qwen35.full_attention_interval": 6}
    assert cut_rule("qwen35", 24, interval.get, no_lists).cut_alignment == 6
    assert cut_rule("qwen35", 24, numbers(), no_lists).cut_alignment == 4
    lists = {"qwen35.attention.recurrent_layers": [1, 0] * 12}
    assert cut_rule("qwen35", 24, interval.get, lists.get).cut_alignment == 2


@given(st.integers(0, 60), st.integers(1, 60), st.sampled_from([1, 2, 4]))
def test_pieces_cover_a_range_without_forbidden_sizes(start: int, size: int, alignment: int) -> None:
    row = ARCHITECTURES["deepseek2"]
    end = start + size * alignment
    pieces = row.pieces(start, end, alignment)
    assert pieces[0][0] == start
    assert pieces[-1][1] == end
    assert all(a[1] == b[0] for a, b in pairwise(pieces))
    assert not {b - a for a, b in pieces} & row.avoided_n_layers
    assert all((a - start) % alignment == 0 for a, _ in pieces)


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_a_period_says_exactly_these_layers_or_none_does(windowed: list[bool]) -> None:
    row = Architecture("a", sliding_window_period=2)
    said = [
        period
        for period in range(len(windowed) + 1)
        if [row.attends_in_window(layer, period) for layer in range(len(windowed))] == windowed
    ]
    assert ([window_period(windowed)] == said) if said else window_period(windowed) is None


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.data())
def test_pieces_have_layers_of_which_a_period_says_it(windowed: list[bool], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(windowed) - 1))
    end = data.draw(st.integers(start + 1, len(windowed)))
    pieces = Architecture("a", avoided_n_layers=frozenset({5})).pieces(start, end, 1, windowed)
    assert [at for piece in pieces for at in range(*piece)] == list(range(start, end))
    assert all(window_period(windowed[a:b]) is not None for a, b in pieces)
    assert not {b - a for a, b in pieces} & {5}
    assert ARCHITECTURES["gemma2"].pieces(start, end, 1) == ((start, end),)


@given(st.integers(1, 8), st.integers(0, 60), st.integers(1, 60))
def test_layers_that_repeat_are_two_pieces_at_most(period: int, start: int, size: int) -> None:
    row = Architecture("a", sliding_window_period=period)
    windowed = row.windowed(start + size, numbers(), no_lists)
    assert len(row.pieces(start, start + size, 1, windowed)) <= 2


@pytest.mark.parametrize(
    ("pattern", "n_layers", "alignment"),
    [
        (None, 32, 2),
        (3, 9, 3),
        (3, 10, 3),  # in twos a part would begin with layer 2, which alone has no window
        (2, 8, 2),
        ([True, False, False, True, True, False, False, True], 8, 0),
        ([True, True, False, True, True, True, False, True], 8, 4),
        ([False, True] * 4, 8, 0),
    ],
)
def test_parts_of_cohere2_begin_with_a_window_where_libllama_takes_no_list(
    pattern: int | list[bool] | None, n_layers: int, alignment: int
) -> None:
    key = "cohere2.attention.sliding_window_pattern"
    number = {key: pattern}.get if isinstance(pattern, int) else no_lists
    listed = {key: [int(item) for item in pattern]}.get if isinstance(pattern, list) else no_lists
    rule = cut_rule("cohere2", n_layers, number, listed, lists_windows=False)
    assert rule.cut_alignment == alignment, rule.whole_reason
    windowed = ARCHITECTURES["cohere2"].windowed(n_layers, number, listed)
    for start in range(0, n_layers, alignment or n_layers):
        for a, b in ARCHITECTURES["cohere2"].pieces(start, n_layers, alignment, windowed):
            assert any(windowed[a:b]) or not alignment
    assert cut_rule("gemma2", n_layers, number, no_lists, lists_windows=False).cut_alignment == 1


def test_windows_follow_their_period() -> None:
    last = Architecture("a", sliding_window_period=3)
    first = Architecture("b", sliding_window_period=3, sliding_window_dense_first=True)
    assert [last.attends_in_window(layer, 3) for layer in range(6)] == [True, True, False] * 2
    assert [first.attends_in_window(layer, 3) for layer in range(6)] == [False, True, True] * 2
    assert all(last.attends_in_window(layer, 0) for layer in range(6))


def test_rows_are_consistent() -> None:
    for name, row in ARCHITECTURES.items():
        assert row.name == name
        assert row.cut_alignment >= 1
        assert not (row.sliding_window_period and row.cut_alignment > 1), (
            "a list of windows makes any cut exact"
        )
