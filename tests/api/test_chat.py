"""The chat endpoint and its neighbours, over HTTP, on a node that plays a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from api_fakes import Script, Stand, serve_node
from node_ids import NODE_A

from swarmllm.api.output import response as answering
from swarmllm.errors import ContextFull, NoPipeline, RemoteError
from swarmllm.node.provisioning import ModelProvisioner, Provisioning

pytestmark = pytest.mark.slow

HELLO: dict[str, Any] = {"model": "guide", "messages": [{"role": "user", "content": "hello"}]}
TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]
CHAT = "/v1/chat/completions"


async def events(stand: Stand, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await stand.http.post(CHAT, json=HELLO | {"stream": True} | body)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [msgspec.json.decode(line[6:]) for line in lines if line != "data: [DONE]"] + (
        [{"done": True}] if lines[-1] == "data: [DONE]" else []
    )


def deltas(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in chunks for choice in chunk.get("choices", [])]


async def test_an_answer_has_openais_shape_and_says_how_it_was_made(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        answer = await stand.http.post(CHAT, json=HELLO)
    body = answer.json()
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello there.", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 1},
    }
    assert body["swarm"]["route"][0] | {"compute_ms_per_token": 2.0} == {
        "node": NODE_A,
        "nickname": "küche",
        "layers": "0:12",
        "compute_ms_per_token": 2.0,
        "overhead_ms_per_token": 0.0,
        "network_ms_per_token": 0.0,
        "prefill_ms": 10.0,
        "bytes_per_token": None,
    }
    assert body["swarm"]["guesses"] == {"checked": 6, "right": 5}
    assert body["swarm"]["decode_tokens_per_s"] == 4.0
    assert answer.headers["x-swarm-route"] == f"local 0:12@{NODE_A}"
    assert answer.headers["x-swarm-nodes"] == "1"
    assert answer.headers["x-request-id"].startswith("req_")


async def test_an_answer_over_rounded_rows_says_that_it_is_not_exact(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(texts=["Hi"], is_exact=False)
        answer = await stand.http.post(CHAT, json=HELLO)
    assert answer.json()["swarm"]["exact"] is False


async def test_a_stream_has_role_text_finish_usage_and_done(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        chunks = await events(stand, {"stream_options": {"include_usage": True}})
    first, *_, finish, usage, done = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "refusal": None}
    assert "".join(delta.get("content", "") for delta in deltas(chunks)) == "Hello there."
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert (finish["swarm"]["shape"], finish["swarm"]["exact"]) == ("local", True)
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 10
    assert usage["timings"] == finish["timings"] != {}
    assert done == {"done": True}
    assert len({chunk["id"] for chunk in chunks[:-1]}) == 1


async def test_tokens_that_wait_share_a_chunk(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(texts=[f"{i} " for i in range(500)])
        chunks = await events(stand, {})
    texts = [delta["content"] for delta in deltas(chunks) if delta.get("content")]
    assert "".join(texts) == "".join(f"{i} " for i in range(500))
    assert len(texts) < 250


async def test_a_token_that_comes_alone_is_sent_alone(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        gates = [trio.Event() for _ in range(3)]
        pending = iter(gates)

        async def next_gate() -> None:
            await next(pending).wait()

        stand.pipelines.script = Script(texts=["a", "b", "c"], between=next_gate)
        gates[0].set()
        async with stand.http.stream("POST", CHAT, json=HELLO | {"stream": True}) as answer:
            seen = ""
            async for chunk in answer.aiter_text():
                seen += chunk
                for i, text in enumerate("ab"):
                    if f'"content":"{text}"' in seen:
                        gates[i + 1].set()
        assert '"content":"c"' in seen


async def test_a_slow_first_token_is_waited_for_with_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "HEADERS_AFTER_S", 0.01)
    monkeypatch.setattr(answering, "WAITING_EVERY_S", 0.01)
    gate = trio.Event()
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(texts=["late"], between=gate.wait)
        async with stand.http.stream("POST", CHAT, json=HELLO | {"stream": True}) as answer:
            seen = ""
            async for text in answer.aiter_text():
                seen += text
                if seen.count(": waiting\n\n") == 2:
                    gate.set()
    assert '"content":"late"' in seen
    assert seen.endswith("data: [DONE]\n\n")


async def test_a_stream_says_how_far_the_model_is_that_is_loaded_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "PROGRESS_EVERY_S", 0.01)
    monkeypatch.setattr(ModelProvisioner, "of", lambda self, model: Provisioning(model, "fetching", 31, 100))
    gate = trio.Event()
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(texts=["late"], between=gate.wait)
        async with stand.http.stream("POST", CHAT, json=HELLO | {"stream": True}) as answer:
            seen = ""
            async for text in answer.aiter_text():
                seen += text
                if seen.count(f": fetching {HELLO['model']} 31 %\n\n") >= 2:
                    gate.set()
    assert '"content":"late"' in seen


async def test_characters_of_every_kind_arrive_unharmed(tmp_path: Path) -> None:
    text = '"quoted" \\ \n\n data: é 漢字 🐝 \u2028 \x00 end'
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(texts=[text])
        whole = (await stand.http.post(CHAT, json=HELLO)).json()
        chunks = await events(stand, {})
    assert whole["choices"][0]["message"]["content"] == text
    assert "".join(delta.get("content", "") for delta in deltas(chunks)) == text


async def test_tool_calls_are_parsed_out_of_the_text(tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(texts=["Let me see. ", *call])
        whole = (await stand.http.post(CHAT, json=HELLO | {"tools": TOOLS})).json()
        chunks = await events(stand, {"tools": TOOLS})
        plain = (await stand.http.post(CHAT, json=HELLO)).json()
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    assert [item["function"] for item in choice["message"]["tool_calls"]] == [function]
    streamed = [item for delta in deltas(chunks) for item in delta.get("tool_calls", [])]
    assert [(item["index"], item["type"], item["function"]) for item in streamed] == [
        (0, "function", function)
    ]
    assert "<tool" not in "".join(delta.get("content") or "" for delta in deltas(chunks))
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert plain["choices"][0]["message"]["content"] == "Let me see. " + call


async def test_a_stream_begins_without_content_whether_calls_are_forced_or_not(tmp_path: Path) -> None:
    called = '{"name": "get_weather", "arguments": {}}'
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(texts=[f"[{called}]"])
        forced, free = [
            deltas(await events(stand, {"tools": TOOLS, "tool_choice": choice}))
            for choice in ("required", "auto")
        ]
    assert forced[0] == free[0] == {"role": "assistant", "refusal": None}


async def test_a_forced_call_without_an_object_of_parameters_is_refused_by_name(tmp_path: Path) -> None:
    function = {"name": "get_weather", "parameters": {"type": "string"}}
    body = HELLO | {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    async with serve_node(tmp_path) as stand:
        answer = await stand.http.post(CHAT, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[0].function.parameters")
        assert not stand.pipelines.calls


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (NoPipeline("no node holds layers 4:8"), 503, "no_pipeline"),
        (ContextFull("too long", field="messages"), 400, "context_length_exceeded"),
    ],
)
async def test_a_failure_before_the_first_token_has_its_status(
    tmp_path: Path, failure: Any, status: int, code: str, stream: bool
) -> None:
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(fail_before=failure)
        answer = await stand.http.post(CHAT, json=HELLO | {"stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["message"]) == (status, code, failure.message)
    assert error["param"] == failure.field
    assert stand.node.counts.failed == 1


async def test_a_failure_in_the_middle_of_a_stream_ends_it_with_an_error_event(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:

        async def sometimes() -> None:
            await trio.sleep(0.03)

        stand.pipelines.script = Script(
            texts=["a", "b", "c"], fail_after=2, failure=RemoteError("node B is gone"), between=sometimes
        )
        chunks = await events(stand, {})
    assert "".join(delta.get("content", "") for delta in deltas(chunks)) == "ab"
    assert chunks[-1] == {
        "error": {
            "message": "node B is gone",
            "type": "upstream_error",
            "param": None,
            "code": "remote_error",
        }
    }


async def test_an_unexpected_error_says_nothing_of_its_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(fail_after=0, failure=ValueError("the secret prompt"))
        answer = await stand.http.post(CHAT, json=HELLO)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert "unexpected error in a request: ValueError" in caplog.text
    assert "api_fakes.py" in caplog.text
    assert "secret" not in caplog.text


async def test_errors_of_groups_are_reported_as_what_they_hold(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        group = ExceptionGroup("nursery", [RemoteError("node B refused")])
        stand.pipelines.script = Script(fail_after=0, failure=group)
        answer = await stand.http.post(CHAT, json=HELLO)
    assert (answer.status_code, answer.json()["error"]["message"]) == (502, "node B refused")


async def test_models_are_listed_as_openai_lists_them(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        listed = (await stand.http.get("/v1/models")).json()
        one = (await stand.http.get("/v1/models/guide")).json()
        none = await stand.http.get("/v1/models/gide")
    assert listed == {"object": "list", "data": [one]}
    assert (one["id"], one["object"], one["owned_by"]) == ("guide", "model", "swarmllm")
    assert none.status_code == 404
    assert "guide" in none.json()["error"]["message"]


async def test_an_unknown_model_is_a_404_that_names_the_field(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        answer = await stand.http.post(CHAT, json=HELLO | {"model": "gpt-9"})
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "model"
    assert answer.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/api/chat"])
async def test_a_full_node_answers_429_with_retry_after(tmp_path: Path, path: str) -> None:
    async with serve_node(tmp_path, max_concurrent_requests=1, max_queued_requests=0) as stand:
        stand.pipelines.script = Script(hold_after=0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: stand.http.post(CHAT, json=HELLO))
            await stand.pipelines.started.wait()
            answer = await stand.http.post(
                path, json=HELLO | ({"max_tokens": 5} if path.startswith("/v1") else {})
            )
            nursery.cancel_scope.cancel()
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert path == "/api/chat" or answer.json()["error"]["type"] == "rate_limit_error"
