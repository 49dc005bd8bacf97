"""The `openai` client against a real daemon: tools, and responses."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai_asking import QUESTION, ask, text_of

pytestmark = pytest.mark.slow


def test_a_conversation_with_tools_goes_through_the_template(ai: openai.OpenAI) -> None:
    tool = {
        "type": "function",
        "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
    }
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "You are the guide."},
        {"role": "user", "content": [{"type": "text", "text": "What is the weather in Oslo?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    with_tools = ask(ai, messages=messages, tools=[tool])
    without = ask(ai, messages=messages, tools=[tool], tool_choice="none")
    assert with_tools.usage.prompt_tokens > without.usage.prompt_tokens


def test_the_guide_calls_a_tool_that_it_is_given(ai: openai.OpenAI) -> None:
    """Whether it is the right call is measured elsewhere; here: that it arrives as one, streamed or not."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
    choice = ask(ai, messages=messages, tools=[tool]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert isinstance(json.loads(call.function.arguments), dict)
    chunks = [chunk.choices[0] for chunk in ask(ai, messages=messages, tools=[tool], stream=True)]
    (streamed,) = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert streamed.function == type(streamed.function)(
        name=call.function.name, arguments=call.function.arguments
    )
    assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
    assert chunks[-1].finish_reason == "tool_calls"


NAMES = ("get_weather", "get_time")


def offered(name: str) -> dict[str, Any]:
    """The same reference in every tool: each means its own."""
    city = {"type": "string", "enum": [f"{name}-oslo", f"{name}-rome"]}
    parameters = {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"City": city},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_time"}}], ids=["any", "named"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_follows_the_tools_schema(ai: openai.OpenAI, choice: Any, stream: bool) -> None:
    """The question needs no tool: the grammar leaves no other way."""
    options = {"tools": [offered(name) for name in NAMES], "tool_choice": choice, "max_tokens": 300}
    answer = ask(ai, stream=stream, parallel_tool_calls=False, **options)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        reason = chunks[-1].finish_reason
        assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
    else:
        calls, reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
        assert answer.choices[0].message.content is None
    assert reason == "tool_calls"
    (call,) = calls
    assert call.function.name in (NAMES if choice == "required" else ("get_time",))
    assert json.loads(call.function.arguments)["city"] in (
        f"{call.function.name}-oslo",
        f"{call.function.name}-rome",
    )


RESPOND: dict[str, Any] = {"model": "guide", "input": QUESTION[0]["content"], "temperature": 0}


def test_a_response_says_the_same_streamed_or_not_and_as_a_chat(ai: openai.OpenAI) -> None:
    whole = ai.responses.create(**RESPOND)
    assert whole.output_text == text_of(ask(ai, max_tokens=None))
    assert whole.status == "completed"
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with ai.responses.stream(**RESPOND) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == whole.output_text
    short = ai.responses.create(**RESPOND, max_output_tokens=3)
    assert (short.status, short.usage and short.usage.output_tokens) == ("incomplete", 3)


def test_a_response_is_gone_on_from(ai: openai.OpenAI) -> None:
    first = ai.responses.create(**RESPOND)
    second = ai.responses.create(
        model="guide", input="Why is that useful?", previous_response_id=first.id, temperature=0
    )
    turns = [
        *QUESTION,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Why is that useful?"},
    ]
    assert second.output_text == text_of(ask(ai, messages=turns, max_tokens=None))
    assert ai.responses.retrieve(first.id).output_text == first.output_text
    ai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        ai.responses.retrieve(first.id)


def test_a_response_calls_tools_and_keeps_to_a_schema(ai: openai.OpenAI) -> None:
    tool = {"type": "function", **offered("get_time")["function"], "strict": True}
    called = ai.responses.create(**RESPOND, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    (call,) = [item for item in called.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    items = [{"role": "user", "content": "What time is it?"}, call.model_dump(), result]
    answer = ai.responses.create(model="guide", input=items, tools=[tool], max_output_tokens=5)
    assert answer.usage is not None
    wanted = {"type": "json_schema", "name": "where", "schema": {"enum": ["here", "there"]}}
    formed = ai.responses.create(**RESPOND, text={"format": wanted})
    assert json.loads(formed.output_text) in ("here", "there")
