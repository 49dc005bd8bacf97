"""The table of architectures, and the rule it gives for a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarmllm_proto.architectures import ARCHITECTURES, Architecture, cut_rule


def numbers(**values: int) -> Callable[[str], int | None]:
    return {key.replace("__", "."): value for key, value in values.items()}.get


def test_plain_architecture_is_cut_anywhere() -> None:
    assert cut_rule("llama", 32, numbers()).cut_alignment == 1


def test_alignment_comes_from_the_table_or_from_the_metadata() -> None:
    assert cut_rule("smollm3", 36, numbers()).cut_alignment == 4
    assert cut_rule("ernie4_5-moe", 28, numbers()).cut_alignment == 1
    step = {"ernie4_5-moe.interleave_moe_layer_step": 2}
    assert cut_rule("ernie4_5-moe", 28, step.get).cut_alignment == 2


@pytest.mark.parametrize(
    ("architecture", "n_layers", "said"),
    [
        ("unheard-of", 4, "unheard-of"),
        ("gemma2", 46, "46 layers"),
        ("gemma3", 62, "62 layers"),
        ("smollm3", 4, "multiples of 4"),
        ("llama", 1, "multiples of 1"),
    ],
)
def test_model_that_cannot_be_cut_says_why(architecture: str, n_layers: int, said: str) -> None:
    rule = cut_rule(architecture, n_layers, numbers())
    assert rule.cut_alignment == 0
    assert said in rule.whole_reason


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
