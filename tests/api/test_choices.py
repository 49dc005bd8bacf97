"""`n` and log-probabilities over HTTP, on a node that plays a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from api_fakes import Script, Stand, serve_node
from deadlines import DEADLINE_S

from swarmllm.errors import RemoteError
from swarmllm_proto.ipc import TokenLogprob

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
CHAT = ("/v1/chat/completions", {"model": "guide"} | HELLO)
TEXT = ("/v1/completions", {"model": "guide", "prompt": "Once"})
BOTH = pytest.mark.parametrize("endpoint", [CHAT, TEXT], ids=["chat", "text"])
HALF = "é".encode()[:1]
LOGPROBS = [
    (TokenLogprob(100, -0.5, b"He"), TokenLogprob(100, -0.5, b"He"), TokenLogprob(9, -1.5, b"A")),
    (TokenLogprob(101, -2.0, HALF), TokenLogprob(7, -0.25, b" "), TokenLogprob(101, -2.0, HALF)),
]


async def streamed(stand: Stand, url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await stand.http.post(url, json=body | {"stream": True})
    assert answer.status_code == 200
    lines = answer.text.removesuffix("\n\n").split("\n\n")
    assert lines.pop() == "data: [DONE]"
    return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines]


def text_of(choice: dict[str, Any]) -> str:
    return str(choice.get("text") or choice.get("delta", choice.get("message", {})).get("content") or "")


@BOTH
async def test_choices_share_the_prompt_and_have_a_seed_each(
    tmp_path: Path, endpoint: tuple[str, dict[str, Any]]
) -> None:
    url, body = endpoint
    async with serve_node(tmp_path) as stand:
        answer = (await stand.http.post(url, json=body | {"n": 3, "seed": 2**32 - 1})).json()
    assert [(c["index"], text_of(c), c["finish_reason"]) for c in answer["choices"]] == [
        (index, "Hello there.", "stop") for index in range(3)
    ]
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["usage"]["total_tokens"] == 16
    first, *others = [call.sampling.seed for call in stand.pipelines.calls]
    assert (first, sorted(others)) == (2**32 - 1, [0, 1])


@BOTH
async def test_streamed_choices_carry_their_index_and_one_end(
    tmp_path: Path, endpoint: tuple[str, dict[str, Any]]
) -> None:
    url, body = endpoint
    async with serve_node(tmp_path) as stand:
        chunks = await streamed(stand, url, body | {"n": 2, "stream_options": {"include_usage": True}})
    texts = ["", ""]
    ends: list[int] = []
    for choice in (chunk["choices"][0] for chunk in chunks[:-1]):
        texts[choice["index"]] += text_of(choice)
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert texts == ["Hello there."] * 2
    assert sorted(ends) == [0, 1]
    assert chunks[-1]["usage"]["total_tokens"] == 13
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_other_choices_begin_with_the_first_ones_first_token(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        seen: list[int] = []
        gate = trio.Event()

        async def look() -> None:
            seen.append(len(stand.pipelines.calls))
            if len(seen) == 1:
                gate.set()

        stand.pipelines.script = Script(texts=["a"], between=look)
        with trio.fail_after(DEADLINE_S):
            await stand.http.post(CHAT[0], json=CHAT[1] | {"n": 3})
    assert gate.is_set()
    assert seen[0] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_choice_that_fails_fails_the_request_and_ends_the_others(
    tmp_path: Path, stream: bool
) -> None:
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(fail_after=1, failure=RemoteError("node-b left"))
        answer = await stand.http.post(CHAT[0], json=CHAT[1] | {"n": 3, "stream": stream})
        with trio.fail_after(DEADLINE_S):
            for call in stand.pipelines.calls:
                await call.ended.wait()
    assert "node-b left" in answer.text
    assert "[DONE]" not in answer.text
    assert stream or answer.status_code == RemoteError.http_status


async def test_log_probabilities_have_openais_shape(tmp_path: Path) -> None:
    asked = {"logprobs": True, "top_logprobs": 2}
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(texts=["He", ""], logprobs=LOGPROBS)
        answer = (await stand.http.post(CHAT[0], json=CHAT[1] | asked)).json()
        chunks = await streamed(stand, CHAT[0], CHAT[1] | asked)
        sampling = stand.pipelines.calls[0].sampling
    assert (sampling.logprobs, sampling.top_logprobs) == (True, 2)
    content = answer["choices"][0]["logprobs"]["content"]
    he, other = {"token": "He", "logprob": -0.5, "bytes": [72, 101]}, {"logprob": -1.5, "bytes": [65]}
    assert content[0] == he | {"top_logprobs": [he, other | {"token": "A"}]}
    assert content[1]["bytes"] == list(HALF)
    assert content[1]["token"] == "\ufffd"
    told = [c["choices"][0]["logprobs"] for c in chunks]
    assert [each for logprobs in told if logprobs for each in logprobs["content"]] == content


async def test_log_probabilities_of_completions_have_openais_old_shape(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(texts=["He", ""], logprobs=LOGPROBS)
        answer = (await stand.http.post(TEXT[0], json=TEXT[1] | {"logprobs": 2})).json()
        chunks = await streamed(stand, TEXT[0], TEXT[1] | {"logprobs": 2})
    told = answer["choices"][0]["logprobs"]
    assert told == {
        "tokens": ["He", "bytes:\\xc3"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"He": -0.5, "A": -1.5}, {" ": -0.25, "bytes:\\xc3": -2.0}],
        "text_offset": [0, 2],
    }
    pieces = [c["choices"][0]["logprobs"] for c in chunks]
    assert [o for piece in pieces if piece for o in piece["text_offset"]] == [0, 2]


async def test_log_probabilities_survive_text_that_is_held_back(tmp_path: Path) -> None:
    """A tool call in the making: its tokens are told with what is shown next."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    texts = ["<tool_call>", '{"name": "f", "arguments": {}}</tool_call>']
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(texts=texts, logprobs=LOGPROBS)
        chunks = await streamed(stand, CHAT[0], CHAT[1] | {"tools": tools, "logprobs": True})
    told = [c["choices"][0]["logprobs"] for c in chunks]
    assert [e["logprob"] for logprobs in told if logprobs for e in logprobs["content"]] == [-0.5, -2.0]


@pytest.mark.parametrize(
    ("sent", "header", "session"),
    [
        ({}, "", ""),
        ({"session_id": "a", "prompt_cache_key": "b"}, "c", "a"),
        ({"prompt_cache_key": "b"}, "c", "c"),
        ({"prompt_cache_key": "b"}, "", "b"),
    ],
)
@BOTH
async def test_a_session_is_named_in_three_ways(
    tmp_path: Path, endpoint: tuple[str, dict[str, Any]], sent: dict[str, str], header: str, session: str
) -> None:
    url, body = endpoint
    headers = {"x-session-id": header} if header else {}
    async with serve_node(tmp_path) as stand:
        assert (await stand.http.post(url, json=body | sent, headers=headers)).status_code == 200
        (call,) = stand.pipelines.calls
        too_long = await stand.http.post(url, json=body, headers={"x-session-id": "x" * 257})
    assert call.prompt.session == session
    assert too_long.json()["error"]["param"] == "session_id"
