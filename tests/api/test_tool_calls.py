"""Finding Hermes tool calls in text that arrives in pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.api.output.tool_calls import FoundCall, ToolCallParser

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


OTHER = FoundCall("add", '{"a": 1}')
FORMATS = {
    "hermes": (CALL, [FOUND]),
    "llama 3": ('<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}', [FOUND]),
    "llama 3, two": (
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Oslo"}}; '
        '{"name": "add", "parameters": {"a": 1}}',
        [FOUND, OTHER],
    ),
    "llama 3, own functions": ('<function=get_weather>{"city": "Oslo"}</function>', [FOUND]),
    "llama 3, bare": ('{"name": "get_weather", "parameters": {"city": "Oslo"}}', [FOUND]),
    "llama 3, typed": (
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Oslo"}}',
        [FOUND],
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}, '
        '{"name": "add", "arguments": {"a": 1}, "id": "123456789"}]',
        [FOUND, OTHER],
    ),
    "mistral, tekken": (
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]add[CALL_ID]123[ARGS]{"a": 1}',
        [FOUND, OTHER],
    ),
    "mistral, without its mark": (
        ' [{"name": "get_weather", "arguments": {"city": "Oslo"}}]',
        [FOUND],
    ),
    "fenced": ('```json\n{"name": "add", "arguments": {"a": 1}}\n```', [OTHER]),
    "openai's own": (
        '[{"id": "1", "type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}]',
        [OTHER],
    ),
}


def parse_offered(text: str, size: int) -> list[str | FoundCall]:
    parser = ToolCallParser(None, ["get_weather", "add"])
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return [item for piece in pieces for item in parser.feed(piece)] + parser.finish()


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_found_in_every_format(name: str, size: int) -> None:
    text, calls = FORMATS[name]
    assert parse_offered(text, size) == calls


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Oslo", "arguments": {}}',
        '{"name": "add", "arguments": {}} is how to call it',
        '{"colour": "red"}',
        "[1, 2, 3]",
        "```python\nprint(1)\n```",
        '{"name"',
        "`add` adds",
        "[TOOL_CALLS]none of your business",
        "<|python_tag|>print(1)",
        "<function=add>no JSON</function>",
        '{ "name" : "add" ' + "[" * 3000,
    ],
)
@pytest.mark.parametrize("size", [1, 5, 10_000])
def test_what_only_looks_like_a_call_is_the_answer(text: str, size: int) -> None:
    assert "".join(map(str, parse_offered(text, size))) == text


def test_json_that_cannot_become_a_call_is_shown_as_it_comes() -> None:
    parser = ToolCallParser(None, ["add"])
    assert parser.feed('{"colour": ') == ['{"colour":']
    assert parser.feed('"red"') == [' "red"']


def test_bare_json_is_no_call_where_no_tool_is_known() -> None:
    text = '{"name": "add", "arguments": {}}'
    assert parse(text) == [text]
