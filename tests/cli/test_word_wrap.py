"""Text that arrives in pieces is broken between words, wherever the pieces were split."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from swarmllm.cli.display import WordWrap

texts = st.text(st.sampled_from("ab 漢\n.`"), max_size=80)


def wrapped(text: str, width: int, cuts: list[int]) -> str:
    wrap = WordWrap(width)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    return "".join(map(wrap.feed, pieces)) + wrap.finish()


@given(texts, st.integers(4, 30), st.lists(st.integers(0, 80), max_size=20))
def test_where_the_text_was_split_is_of_no_account(text: str, width: int, cuts: list[int]) -> None:
    assert wrapped(text, width, cuts) == wrapped(text, width, [])


@given(texts, st.integers(4, 30))
def test_only_spaces_become_line_ends_and_only_where_a_line_is_full(text: str, width: int) -> None:
    result = wrapped(text, width, [])
    assert result.split() == text.split()
    for line in result.split("\n"):
        assert cell_len(line) <= width or len(line.split()) <= 1


@given(texts)
def test_lines_that_fit_are_left_alone(text: str) -> None:
    assert wrapped(text, 200, []) == text


def test_a_word_is_shown_as_soon_as_it_is_complete() -> None:
    wrap = WordWrap(10)
    assert [wrap.feed(piece) for piece in ("one tw", "o thr", "ee\n", "  four")] == [
        "one",
        " two",
        "\nthree\n",
        "",
    ]
    assert wrap.finish() == "  four"
