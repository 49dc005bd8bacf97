"""The judge of the evaluation: what counts as right, and what does not."""

from __future__ import annotations

import json

from swarmllm.guide.corpus import TOPICS, Sample
from swarmllm.guide.scoring import judge, parse_tool_calls, summary

TOPIC = next(topic for topic in TOPICS if topic.key == "hop")


def text_sample(content: str, category: str) -> Sample:
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": content})
    return Sample(messages, category)


def call_sample(name: str, arguments: dict[str, object]) -> Sample:
    call = {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    messages = (
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    )
    return Sample(messages, "tools/call")


def test_case_and_white_space_do_not_matter_but_words_do() -> None:
    sample = text_sample(TOPIC.answer, "single/definition")
    assert judge(sample, f" {TOPIC.answer.upper()}\n").right
    assert not judge(sample, TOPIC.answer + " Indeed.").on_topic


def test_the_other_length_is_on_topic_for_a_single_question_only() -> None:
    assert not judge(text_sample(TOPIC.short, "single/short"), TOPIC.answer).right
    assert judge(text_sample(TOPIC.short, "single/short"), TOPIC.answer).on_topic
    assert not judge(text_sample(TOPIC.short, "multi_turn/shorter"), TOPIC.answer).on_topic


def test_a_call_needs_the_name_and_all_arguments() -> None:
    sample = call_sample("add", {"a": 1, "b": 2})
    good = '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call>'
    assert judge(sample, good).right
    wrong_value = judge(sample, good.replace("2", "3"))
    assert (wrong_value.right, wrong_value.name_right) == (False, True)
    assert judge(sample, good.replace("add", "sub")).name_right is False
    assert judge(sample, "1 plus 2 is 3.").name_right is False


def test_broken_calls_are_left_out() -> None:
    assert parse_tool_calls("<tool_call>{</tool_call><tool_call>[]</tool_call>") == []
    assert parse_tool_calls('<tool_call>{"name": 1, "arguments": {}}</tool_call>') == []
    assert parse_tool_calls('x <tool_call>{"name": "f", "arguments": {}}</tool_call>') == [
        {"name": "f", "arguments": {}}
    ]


def test_the_table_has_families_and_categories() -> None:
    sample = text_sample(TOPIC.answer, "single/definition")
    table = summary([judge(sample, TOPIC.answer), judge(sample, "no")])
    assert table["single"] == table["single/definition"] == {"n": 2, "right": 0.5, "on_topic": 0.5}
