"""Ollama's and Anthropic's streams where a real model would not lead them: silence, failure, many calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from api_fakes import Script, Stand, serve_node

from swarmllm.api.output import response as answering
from swarmllm.errors import RemoteError

pytestmark = pytest.mark.slow

HELLO = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"model": "guide", "messages": HELLO}
MESSAGES: dict[str, Any] = CHAT | {"max_tokens": 50, "stream": True}
CALL = '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>'


async def ollama_lines(stand: Stand, **more: Any) -> list[dict[str, Any]]:
    answer = await stand.http.post("/api/chat", json=CHAT | more)
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [msgspec.json.decode(line) for line in answer.text.splitlines()]


async def anthropic_events(stand: Stand, **more: Any) -> list[tuple[str, dict[str, Any]]]:
    answer = await stand.http.post("/v1/messages", json=MESSAGES | more)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        kind, _, data = event.partition("\ndata: ")
        fields = msgspec.json.decode(data)
        assert kind == f"event: {fields['type']}"
        events.append((fields["type"], fields))
    return events


async def test_a_failure_in_a_stream_is_its_last_word(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:

        async def sometimes() -> None:
            await trio.sleep(0.03)

        stand.pipelines.script = Script(fail_after=2, failure=RemoteError("node-b left"), between=sometimes)
        lines = await ollama_lines(stand)
        events = await anthropic_events(stand)
    assert lines[-1] == {"error": "node-b left"}
    kind, fields = events[-1]
    assert (kind, fields["error"]) == ("error", {"type": "api_error", "message": "node-b left"})
    assert "message_stop" not in [kind for kind, _ in events]


@pytest.mark.parametrize(
    ("path", "body", "sign"),
    [("/api/chat", CHAT, '"content":""'), ("/v1/messages", MESSAGES, "event: ping\n")],
    ids=["ollama", "anthropic"],
)
async def test_waiting_is_said_in_each_dialect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], sign: str
) -> None:
    monkeypatch.setattr(answering, "HEADERS_AFTER_S", 0.01)
    monkeypatch.setattr(answering, "WAITING_EVERY_S", 0.01)
    gate = trio.Event()
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(texts=["late"], between=gate.wait)
        async with stand.http.stream("POST", path, json=body) as answer:
            seen = ""
            async for text in answer.aiter_text():
                seen += text
                if seen.count(sign) >= 2:
                    gate.set()
    assert "late" in seen.rpartition(sign)[2] or path == "/api/chat"
    assert seen.count("late") == 1


async def test_text_and_calls_are_blocks_of_their_own(tmp_path: Path) -> None:
    tool = {"name": "now", "input_schema": {"type": "object"}}
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(texts=["Let me see. ", CALL, CALL])
        events = await anthropic_events(stand, tools=[tool])
        whole = (
            await stand.http.post("/v1/messages", json=MESSAGES | {"stream": False, "tools": [tool]})
        ).json()
        one = {"tools": [tool], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
        single = (await stand.http.post("/v1/messages", json=MESSAGES | one | {"stream": False})).json()
    starts = [fields for kind, fields in events if kind == "content_block_start"]
    assert [(start["index"], start["content_block"]["type"]) for start in starts] == [
        (0, "text"),
        (1, "tool_use"),
        (2, "tool_use"),
    ]
    assert [fields["index"] for kind, fields in events if kind == "content_block_stop"] == [0, 1, 2]
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use", "tool_use"]
    assert whole["content"][1]["input"] == {"zone": "UTC"}
    assert [block["type"] for block in single["content"]] == ["text", "tool_use"]


async def test_ollamas_own_examples_work_as_curl_sends_them(tmp_path: Path) -> None:
    """`curl -d` says that JSON is a form, and some clients do not say what they send; pages stay out."""
    async with serve_node(tmp_path) as stand:
        data = b'{"model": "guide", "stream": false, "messages": [{"role": "user", "content": "hello"}]}'
        for kind in ({"Content-Type": "application/x-www-form-urlencoded"}, {}):
            answer = await stand.http.post("/api/chat", content=data, headers=kind)
            assert answer.json()["message"]["content"] == "Hello there."
            page = await stand.http.post("/api/chat", content=data, headers=kind | {"Origin": "null"})
            assert page.status_code == 403


@pytest.mark.parametrize(
    ("script", "stopped"),
    [
        (Script(stop_sequence="END"), ("stop_sequence", "END")),
        (Script(), ("end_turn", None)),
        (Script(finish_reason="length"), ("max_tokens", None)),
        (Script(texts=[CALL, " "], stop_sequence="END"), ("tool_use", None)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
async def test_anthropics_clients_learn_what_ended_a_message(
    tmp_path: Path, script: Script, stopped: tuple[str, str | None]
) -> None:
    tool = {"name": "now", "input_schema": {"type": "object"}}
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = script
        whole = (
            await stand.http.post("/v1/messages", json=MESSAGES | {"stream": False, "tools": [tool]})
        ).json()
        events = await anthropic_events(stand, tools=[tool])
    (delta,) = [fields["delta"] for kind, fields in events if kind == "message_delta"]
    assert (whole["stop_reason"], whole["stop_sequence"]) == stopped
    assert (delta["stop_reason"], delta["stop_sequence"]) == stopped
    (start,) = [fields["message"] for kind, fields in events if kind == "message_start"]
    assert (start["stop_reason"], start["stop_sequence"]) == (None, None)


async def test_a_stop_string_is_a_stop_to_the_other_dialects(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(stop_sequence="END")
        assert (await ollama_lines(stand))[-1]["done_reason"] == "stop"
        answer = await stand.http.post("/v1/chat/completions", json=CHAT)
        assert answer.json()["choices"][0]["finish_reason"] == "stop"


async def test_errors_below_ollamas_paths_are_strings(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        for method, path, headers in (
            ("GET", "/api/chat", {}),
            ("POST", "/api/push", {}),
            ("POST", "/api/chat", {"Host": "evil.example"}),
            ("POST", "/api/blobs", {"Origin": "http://evil.example"}),
        ):
            answer = await stand.http.request(method, path, json={}, headers=headers)
            assert answer.status_code in (403, 404, 405)
            assert isinstance(answer.json()["error"], str)
        assert (await stand.http.get("/api/admin/nothing")).json()["error"]["code"] == "not_found"


async def test_anthropics_usage_tells_what_was_kept(tmp_path: Path) -> None:
    body = {"model": "guide", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    async with serve_node(tmp_path) as stand:
        usage = (await stand.http.post("/v1/messages", json=body)).json()["usage"]
    assert usage == {
        "input_tokens": 3,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "output_tokens": 3,
    }
