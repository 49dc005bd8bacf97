"""Finding Hermes tool calls in text that arrives in pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.api.tool_calls import FoundCall, ToolCallParser

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
FOUND = FoundCall("get_weather", '{"city": "Oslo"}')


def parse(*pieces: str, max_calls: int | None = None) -> list[str | FoundCall]:
    """Neighbouring texts joined: where they were split is of no account."""
    parser = ToolCallParser(max_calls)
    items = [item for piece in pieces for item in parser.feed(piece)] + parser.finish()
    joined: list[str | FoundCall] = []
    for item in items:
        if isinstance(item, str) and joined and isinstance(joined[-1], str):
            joined[-1] += item
        else:
            joined.append(item)
    return joined


def test_text_without_a_call_is_untouched() -> None:
    assert parse("a < b, <tool", "_box> and <tool_call", "s>") == ["a < b, <tool_box> and <tool_calls>"]


def test_a_call_is_found_and_its_arguments_kept_as_written() -> None:
    assert parse('<tool_call>{"name":"add","arguments":{"b":  1,"a":2}}</tool_call>') == [
        FoundCall("add", '{"b":  1,"a":2}')
    ]


def test_text_before_a_call_is_shown() -> None:
    assert parse("Let me look.\n" + CALL) == ["Let me look.", FOUND]


def test_several_calls_and_the_white_space_between_them() -> None:
    assert parse(CALL + "\n" + CALL + "\n") == [FOUND, FOUND]


def test_calls_have_different_ids() -> None:
    first, second = parse(CALL, CALL)
    assert isinstance(first, FoundCall)
    assert isinstance(second, FoundCall)
    assert first.id != second.id


def test_a_call_without_closing_tag_counts_when_it_is_complete() -> None:
    assert parse(CALL.removesuffix("</tool_call>")) == [FOUND]


@pytest.mark.parametrize(
    "inside",
    [
        '{"name": "f", "arguments": {',
        '{"arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        "no JSON",
        "[" * 5000,
    ],
)
def test_what_is_no_call_stays_text(inside: str) -> None:
    assert parse(f"<tool_call>{inside}</tool_call>") == [f"<tool_call>{inside}</tool_call>"]
    assert parse(f"<tool_call>{inside}") == [f"<tool_call>{inside}"]


def test_arguments_written_as_a_string_are_the_object_in_it() -> None:
    text = r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}</tool_call>'
    assert parse(text) == [FoundCall("f", '{"a": 1}')]


def test_arguments_may_be_missing() -> None:
    assert parse('<tool_call>{"name": "now"}</tool_call>') == [FoundCall("now", "{}")]


def test_only_as_many_calls_as_allowed() -> None:
    assert parse(CALL, CALL, max_calls=1) == [FOUND]


def test_nothing_is_shown_that_may_become_a_tag() -> None:
    parser = ToolCallParser()
    assert parser.feed("yes <tool_") == ["yes"]
    assert parser.feed("x") == [" <tool_x"]


@given(
    st.lists(st.sampled_from([CALL, "text", " ", "<tool_call>", "</tool_call>", "<", "\n"]), max_size=6).map(
        "".join
    ),
    st.lists(st.integers(0, 400), max_size=12),
)
def test_how_the_text_is_split_makes_no_difference(text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    whole = parse(text)
    split = parse(*pieces)
    assert split == whole
