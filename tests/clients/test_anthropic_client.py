"""The `anthropic` client against a real daemon with the whole guide model.

It is imported by the tests only: that takes seconds, and every process of a test run collects this file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from daemon_process import DaemonProcess
from deadlines import DEADLINE_S

if TYPE_CHECKING:
    import anthropic

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is a layer range?"}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
IN_OSLO = [{"role": "user", "content": "What is the weather in Oslo?"}]


@pytest.fixture
def client(node: DaemonProcess) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=node.url, api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
        yield client


def ask(client: anthropic.Anthropic, **options: Any) -> Any:
    options = {"model": "guide", "messages": QUESTION, "temperature": 0, "max_tokens": 30} | options
    if (temperature := options.pop("temperature")) is not None:
        options["extra_body"] = {"temperature": temperature} | options.get("extra_body", {})
    return client.messages.create(**options)


def streamed(client: anthropic.Anthropic, **options: Any) -> tuple[list[str], Any]:
    """The kinds of events, and the message they build up."""
    options = {"model": "guide", "messages": QUESTION, "max_tokens": 30} | options
    with client.messages.stream(**options, extra_body={"temperature": 0}) as stream:
        kinds = [event.type for event in stream]
        return kinds, stream.get_final_message()


def prompt_tokens(message: anthropic.types.Message) -> int:
    """Those that were kept of earlier prompts too."""
    return message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)


def test_a_stream_builds_up_the_same_message(client: anthropic.Anthropic) -> None:
    whole = ask(client)
    kinds, message = streamed(client)
    assert whole.content[0].text
    assert message.content[0].text == whole.content[0].text
    assert message.stop_reason == whole.stop_reason
    assert (prompt_tokens(message), message.usage.output_tokens) == (
        prompt_tokens(whole),
        whole.usage.output_tokens,
    )
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    counted = client.messages.count_tokens(model="guide", messages=QUESTION)  # type: ignore[arg-type]
    assert counted.input_tokens == prompt_tokens(whole)


def test_an_answer_follows_a_schema(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    said = ask(client, output_config={"format": {"type": "json_schema", "schema": schema}}, max_tokens=60)
    assert type(json.loads(said.content[0].text)["n"]) is int


def test_limits_and_stop_sequences_are_kept(client: anthropic.Anthropic) -> None:
    short = ask(client, max_tokens=3)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
    text = ask(client).content[0].text
    stop = text[len(text) // 2 :][:6]
    stopped = ask(client, stop_sequences=[stop])
    assert stopped.content[0].text == text[: text.index(stop)]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    _, message = streamed(client, stop_sequences=["never", stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    whole = ask(client, max_tokens=300, stop_sequences=["never"])
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)


def test_a_system_prompt_and_blocks_reach_the_model(client: anthropic.Anthropic) -> None:
    plain = ask(client, max_tokens=1)
    blocks = [{"type": "text", "text": QUESTION[0]["content"], "cache_control": {"type": "ephemeral"}}]
    as_blocks = ask(client, max_tokens=1, messages=[{"role": "user", "content": blocks}])
    assert prompt_tokens(as_blocks) == prompt_tokens(plain)
    for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        assert prompt_tokens(ask(client, max_tokens=1, system=system)) > prompt_tokens(plain)


def test_a_tool_is_called_and_its_result_understood(client: anthropic.Anthropic) -> None:
    said = ask(client, messages=IN_OSLO, tools=[WEATHER], max_tokens=100)
    assert said.stop_reason == "tool_use"
    (call,) = [block for block in said.content if block.type == "tool_use"]
    assert (call.name, type(call.input)) == ("get_weather", dict)
    _, message = streamed(client, messages=IN_OSLO, tools=[WEATHER], max_tokens=100)
    (same,) = [block for block in message.content if block.type == "tool_use"]
    assert (same.name, same.input, message.stop_reason) == (call.name, call.input, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    messages = [
        *IN_OSLO,
        {"role": "assistant", "content": [block.model_dump() for block in said.content]},
        {"role": "user", "content": [result]},
    ]
    answer = ask(client, messages=messages, tools=[WEATHER])
    assert prompt_tokens(answer) > prompt_tokens(said)
    without = ask(client, messages=IN_OSLO, tools=[WEATHER], tool_choice={"type": "none"}, max_tokens=1)
    assert prompt_tokens(without) < prompt_tokens(said)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_can_be_forced(client: anthropic.Anthropic, choice: dict[str, Any]) -> None:
    """The question needs none; the grammar leaves no other way."""
    said = ask(client, tools=[WEATHER], tool_choice=choice, max_tokens=200)
    assert said.stop_reason == "tool_use"
    assert {block.type for block in said.content} == {"tool_use"}
    assert {block.name for block in said.content} == {"get_weather"}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"model": "claude-9"}, "NotFoundError", "model"),
        ({"messages": []}, "BadRequestError", "messages"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "BadRequestError",
            "messages[0].content[0]",
        ),
        ({"tool_choice": {"type": "any"}}, "BadRequestError", "tool_choice"),
        ({"extra_body": {"temperature": 1.5}}, "BadRequestError", "temperature"),
    ],
)
def test_errors_are_of_the_clients_own_kinds(
    client: anthropic.Anthropic, options: dict[str, Any], kind: str, words: str
) -> None:
    import anthropic

    for stream in (False, True):
        with pytest.raises(anthropic.APIStatusError) as caught:
            ask(client, stream=stream, **options)
        assert type(caught.value).__name__ == kind
        assert words in caught.value.message
        assert caught.value.request_id is None or caught.value.request_id.startswith("req_")
