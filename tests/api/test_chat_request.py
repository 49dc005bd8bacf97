"""What a chat request's body may say, and how a refusal names what is wrong."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.api.http.errors import decode_body
from swarmllm.api.openai.chat_request import ChatCall, chat_call
from swarmllm.api.openai.forced_call import forced
from swarmllm.api.openai.schema import ChatRequest
from swarmllm.errors import InvalidRequest

HELLO: dict[str, Any] = {"model": "guide", "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


def read(body: dict[str, Any]) -> ChatCall:
    return chat_call(decode_body(msgspec.json.encode(body), ChatRequest))


def refused_field(body: dict[str, Any]) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        read(body)
    assert caught.value.message
    return caught.value.field


def message(**fields: Any) -> dict[str, Any]:
    return {"model": "guide", "messages": [fields]}


def named(tool: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"model": "guide"}, "messages"),
        (HELLO | {"messages": []}, "messages"),
        (HELLO | {"messages": "hello"}, "messages"),
        (HELLO | {"model": 5}, "model"),
        (HELLO | {"temprature": 1}, "temprature"),
        (HELLO | {"temperature": "hot"}, "temperature"),
        (HELLO | {"temperature": 3}, "temperature"),
        (HELLO | {"max_tokens": 0}, "max_tokens"),
        (HELLO | {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        (HELLO | {"stop": ["a", ""]}, "stop[1]"),
        (HELLO | {"stream": "yes"}, "stream"),
        (HELLO | {"stream_options": {"include_usage": True}}, "stream_options"),
        (HELLO | {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        (message(role="robot", content="x"), "messages[0].role"),
        (message(content="x"), "messages[0].role"),
        (message(role="user"), "messages[0].content"),
        (message(role="user", content=7), "messages[0].content"),
        (message(role="user", content="x", colour="red"), "messages[0].colour"),
        (message(role="user", content=[{"type": "text"}]), "messages[0].content[0].text"),
        (message(role="user", content=[{"type": "image_url"}]), "messages[0].content[0].image_url"),
        (message(role="user", content=[{"type": "smell"}]), "messages[0].content[0].type"),
        (message(role="assistant"), "messages[0].content"),
        (message(role="assistant", content="x", audio={"id": "a"}), "messages[0].audio"),
        (message(role="tool", content="x"), "messages[0].tool_call_id"),
        (HELLO | {"tools": [{"type": "function"}]}, "tools[0].function"),
        (HELLO | {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (HELLO | {"tool_choice": "required"}, "tool_choice"),
        (HELLO | {"tools": [TOOL], "tool_choice": "required", "grammar": "root ::= x"}, "grammar"),
        (HELLO | {"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (HELLO | {"tools": [TOOL], "tool_choice": named("then")}, "tool_choice"),
        (HELLO | {"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        (HELLO | {"n": 0}, "n"),
        (HELLO | {"n": 33}, "n"),
        (HELLO | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (HELLO | {"top_logprobs": 2}, "top_logprobs"),
        (HELLO | {"logit_bias": {"5": 101}}, "logit_bias[...]"),
        (HELLO | {"logit_bias": {"five": 1}}, "logit_bias"),
        (HELLO | {"response_format": {"type": "yaml"}}, "response_format.type"),
        (HELLO | {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (HELLO | {"response_format": {"type": "json_object"}, "grammar": "root ::= x"}, "grammar"),
        (HELLO | {"mirostat": 3}, "mirostat"),
        (HELLO | {"modalities": ["audio"]}, "modalities"),
        (HELLO | {"store": True}, "store"),
        (HELLO | {"functions": [{}]}, "functions"),
        (HELLO | {"reasoning_effort": "loud"}, "reasoning_effort"),
    ],
)
def test_a_refusal_names_the_field(body: dict[str, Any], field: str) -> None:
    assert refused_field(body) == field


def test_a_forced_call_leaves_the_model_no_choice_but_calls_in_its_own_format() -> None:
    city = {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "$defs": {"City": {"type": "string"}},
    }
    tools = [TOOL, {"type": "function", "function": {"name": "weather", "parameters": city}}]
    call = read(HELLO | {"tools": tools, "tool_choice": "required"})
    assert call.must_call
    assert call.tools == tools
    hermes = forced(call.sampling, tools, None, "... <tool_call>\n{...")
    schema = json.loads(hermes.json_schema)
    assert [option["properties"]["name"]["const"] for option in schema["anyOf"]] == ["now", "weather"]
    assert schema["$defs"]["tool1"]["properties"]["city"]["$ref"] == "#/$defs/tool1/$defs/City"
    assert (hermes.json_before, hermes.json_max) == ("<tool_call>\n", 16)
    mistral = forced(call.sampling, tools, 1, "[TOOL_CALLS] [...")
    schema = json.loads(mistral.json_schema)
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    assert (mistral.json_before, mistral.json_max) == ("[TOOL_CALLS]", 1)
    assert forced(call.sampling, tools, 1, "").json_before == ""


def test_only_references_move_with_a_forced_call() -> None:
    """An enum may hold what looks like a reference, and a property may have its name."""
    parameters = {
        "type": "object",
        "properties": {"a": {"enum": [{"$ref": "#/x"}]}, "$ref": {"$ref": "#"}, "b": {"$ref": "#anchor"}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    call = read(HELLO | {"tools": [tool], "tool_choice": "required"})
    moved = json.loads(forced(call.sampling, [tool], 1, "").json_schema)["$defs"]["tool0"]["properties"]
    assert moved == {
        "a": {"enum": [{"$ref": "#/x"}]},
        "$ref": {"$ref": "#/$defs/tool0"},
        "b": {"$ref": "#anchor"},
    }


@pytest.mark.parametrize("kind", ["string", ["object", "null"], "array"])
def test_a_call_whose_parameters_are_no_object_cannot_be_forced(kind: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}
    call = read(HELLO | {"tools": [TOOL, tool], "tool_choice": "required"})
    with pytest.raises(InvalidRequest) as caught:
        forced(call.sampling, call.tools, 1, "")
    assert caught.value.field == "tools[1].function.parameters"


def test_a_named_tool_is_the_only_one_that_is_offered() -> None:
    other = {"type": "function", "function": {"name": "then"}}
    one = read(HELLO | {"tools": [TOOL, other], "tool_choice": named("then")})
    assert (one.tools, one.must_call, one.max_tool_calls) == ([other], True, 1)


def test_allowed_tools_are_those_that_are_offered() -> None:
    other = {"type": "function", "function": {"name": "then"}}
    allowed = {"mode": "auto", "tools": [named("then")]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body = HELLO | {"tools": [TOOL, other], "tool_choice": choice}
    assert (read(body).tools, read(body).must_call) == ([other], False)
    allowed["mode"] = "required"
    assert read(body).must_call


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[]", b'"x"', b"[" * 100_000, b'{"model": 1e400}'])
def test_what_is_no_object_of_json_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_body(data, ChatRequest)


@given(st.binary(max_size=200))
def test_no_bytes_get_through_as_anything_but_a_request_or_a_refusal(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_body(data, ChatRequest)


def test_neutral_values_and_nulls_are_accepted() -> None:
    neutral = {
        "n": 1,
        "logprobs": False,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "store": False,
        "service_tier": "auto",
        "user": "me",
        "metadata": {"a": "b"},
        "temperature": None,
        "stop": None,
        "tools": None,
        "tool_choice": "auto",
        "audio": None,
    }
    assert read(HELLO | neutral) == read(HELLO)


def test_every_field_that_is_offered_reaches_the_sampler() -> None:
    chosen = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repeat_penalty": 1.1,
        "presence_penalty": -1.0,
        "frequency_penalty": 2.0,
        "seed": 7,
        "ignore_eos": True,
        "typical_p": 0.9,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "dry_multiplier": 0.8,
        "dry_base": 2.0,
        "dry_allowed_length": 3,
        "mirostat": 2,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.2,
        "grammar": 'root ::= "a"',
    }
    sampling = read(HELLO | chosen | {"stop": "END"}).sampling
    assert {name: getattr(sampling, name) for name in chosen} == chosen
    assert sampling.stop == ("END",)


def test_biases_and_schemas_reach_the_sampler() -> None:
    assert read(HELLO | {"logit_bias": {"5": -100, "7": 1.5}}).sampling.logit_bias == ((5, -100.0), (7, 1.5))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    assert json.loads(read(HELLO | {"response_format": wanted}).sampling.json_schema) == schema
    free = read(HELLO | {"response_format": {"type": "json_object"}}).sampling
    assert json.loads(free.json_schema) == {"type": "object"}
    assert read(HELLO | {"response_format": {"type": "text"}}).sampling.json_schema == ""
    wanted["json_schema"] = {"name": "a", "schema": {"description": "x" * 65536}}
    assert refused_field(HELLO | {"response_format": wanted}) == "response_format.json_schema.schema"


def test_openais_defaults_hold_where_nothing_is_said() -> None:
    call = read(HELLO)
    assert (call.sampling.temperature, call.sampling.top_p, call.sampling.stop) == (1.0, 1.0, ())
    assert call.max_tokens is None
    assert not call.stream


@pytest.mark.parametrize(("seed", "reduced"), [(-1, 2**32 - 1), (2**32, 0), (2**63 - 1, 2**32 - 1)])
def test_a_64_bit_seed_is_reduced_to_32_bits(seed: int, reduced: int) -> None:
    assert read(HELLO | {"seed": seed}).sampling.seed == reduced


def test_text_parts_become_lines_and_developer_becomes_system() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert read(message(role="developer", content=parts)).messages == [
        {"role": "system", "content": "one\ntwo"}
    ]


def test_tool_calls_of_an_earlier_turn_reach_the_template_as_objects() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
    messages = [
        {"role": "user", "content": "time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    read_messages = read({"model": "guide", "messages": messages, "tools": [TOOL]}).messages
    assert read_messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [call | {"function": {"name": "now", "arguments": {"zone": "UTC"}}}],
    }
    assert read_messages[2] == {"role": "tool", "content": "12:00", "tool_call_id": "call_1"}


def test_tools_are_left_out_where_no_call_is_wanted() -> None:
    assert read(HELLO | {"tools": [TOOL], "tool_choice": "none"}).tools is None
    assert read(HELLO | {"tools": [TOOL]}).tools == [TOOL]


def test_without_parallel_tool_calls_one_is_the_most() -> None:
    assert read(HELLO | {"tools": [TOOL], "parallel_tool_calls": False}).max_tool_calls == 1


SAID = {"role": "assistant", "content": "Hel"}


@pytest.mark.parametrize(
    ("fields", "begun"),
    [
        ({}, "Hel"),
        ({"continue_final_message": True}, "Hel"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "Hel"),
        ({"add_generation_prompt": True}, ""),
        ({"continue_final_message": False}, ""),
        ({"tools": [TOOL], "tool_choice": "required"}, ""),
        ({"messages": [*HELLO["messages"], SAID | {"prefix": True}]}, "Hel"),
        ({"messages": [*HELLO["messages"], SAID | {"reasoning_content": "so"}]}, ""),
        ({"messages": [SAID]}, ""),
    ],
)
def test_an_answer_goes_on_from_a_last_message_of_the_assistant(fields: dict[str, Any], begun: str) -> None:
    body = HELLO | {"messages": [*HELLO["messages"], SAID]} | fields
    call = read(body)
    assert call.begun == begun
    assert len(call.messages) == len(body["messages"]) - bool(begun)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        ({"messages": HELLO["messages"], "continue_final_message": True}, "continue_final_message"),
        ({"messages": HELLO["messages"], "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": [SAID | {"prefix": True}, *HELLO["messages"]]}, "messages[0].prefix"),
        (
            {"tools": [TOOL], "tool_choice": "required", "continue_final_message": True},
            "continue_final_message",
        ),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    assert refused_field(HELLO | {"messages": [*HELLO["messages"], SAID]} | fields) == field
