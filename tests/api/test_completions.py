"""POST /v1/completions over HTTP, on a node that plays a script."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from api_fakes import Script, serve_node
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.api.openai.completions import offsets_in
from swarmllm.errors import RemoteError
from swarmllm.pipeline.origin.generation import PromptScores
from swarmllm_proto.ipc import TokenLogprob

URL = "/v1/completions"
ONCE: dict[str, Any] = {"model": "guide", "prompt": "Once"}


async def test_a_completion_has_openais_shape(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        answer = await stand.http.post(URL, json=ONCE | {"seed": -1, "stop": "x", "top_k": 5})
    body = answer.json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "Hello there.", "logprobs": None, "finish_reason": "stop"}
    ]
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 1},
    }
    assert body["swarm"]["shape"] == "local"
    (call,) = stand.pipelines.calls
    assert (call.prompt.text, call.prompt.messages) == ("Once", None)
    assert (call.sampling.max_tokens, call.sampling.seed, call.sampling.stop, call.sampling.top_k) == (
        16,
        2**32 - 1,
        ("x",),
        5,
    )


async def test_a_stream_says_the_same(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        body = ONCE | {"stream": True, "echo": True, "stream_options": {"include_usage": True}}
        answer = await stand.http.post(URL, json=body)
    lines = answer.text.removesuffix("\n\n").split("\n\n")
    assert lines.pop() == "data: [DONE]"
    chunks = [msgspec.json.decode(line.removeprefix("data: ")) for line in lines]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "OnceHello there."
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["total_tokens"]) == ([], 10)


@pytest.mark.slow
async def test_a_failure_in_a_stream_is_its_last_event(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:

        async def sometimes() -> None:
            await trio.sleep(0.03)

        stand.pipelines.script = Script(fail_after=2, failure=RemoteError("node-b left"), between=sometimes)
        answer = await stand.http.post(URL, json=ONCE | {"stream": True})
    assert answer.status_code == 200
    assert "node-b left" in answer.text.removesuffix("\n\n").split("\n\n")[-1]
    assert "[DONE]" not in answer.text


async def test_several_prompts_are_answered_in_their_order_and_counted_once_each(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        both = ONCE | {"prompt": ["Once", [72, 105]], "n": 2, "echo": True}
        whole = (await stand.http.post(URL, json=both)).json()
        streamed = await stand.http.post(URL, json=both | {"stream": True})
    said = ["OnceHello there."] * 2 + ["HiHello there."] * 2
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == list(enumerate(said))
    assert whole["usage"]["prompt_tokens"] == 2 * 7
    assert whole["usage"]["completion_tokens"] == 4 * 3
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2 * 4}
    texts = [""] * 4
    for line in streamed.text.removesuffix("\n\n").split("\n\n")[:-1]:
        for choice in msgspec.json.decode(line.removeprefix("data: "))["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == said
    asked = [(call.prompt.text, call.prompt.tokens) for call in stand.pipelines.calls]
    assert sorted(asked, key=str) == sorted([("Once", None), (None, [72, 105])] * 4, key=str)


async def test_a_text_is_sampled_with_the_same_words_as_a_chat(tmp_path: Path) -> None:
    words = {
        "typical_p": 0.9,
        "xtc_probability": 0.5,
        "dry_multiplier": 0.8,
        "mirostat": 2,
        "grammar": "root ::= x",
    }
    async with serve_node(tmp_path) as stand:
        assert (await stand.http.post(URL, json=ONCE | words)).status_code == 200
    (call,) = stand.pipelines.calls
    assert {name: getattr(call.sampling, name) for name in words} == words


@pytest.mark.slow
async def test_what_is_not_offered_is_refused_by_name(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"n": 33}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"logit_bias": {"one": 5}}, "logit_bias"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": ["a", 1.5]}, "prompt[1]"),
        ({"prompt": ["a"] * 17, "n": 2}, "prompt"),
        ({"mirostat": 3}, "mirostat"),
        ({"stream_options": {}}, "stream_options"),
        ({"max_tokens": 0}, "max_tokens"),
    ]
    async with serve_node(tmp_path) as stand:
        for change, field in refused:
            answer = await stand.http.post(URL, json=ONCE | change)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        neutral = {"n": 1, "best_of": 1, "logit_bias": {}, "suffix": "", "prompt": ["Once"]}
        assert (await stand.http.post(URL, json=ONCE | neutral)).status_code == 200


def likely(token: int, piece: str | bytes, logprob: float) -> TokenLogprob:
    return TokenLogprob(token, logprob, piece.encode() if isinstance(piece, str) else piece)


SCORES = PromptScores(
    "<s>",
    (
        (likely(5, "On", -1.5), likely(9, "Of", -0.5)),
        (likely(6, "ce", -0.25), likely(6, "ce", -0.25)),
    ),
)
OF_ANSWER = [(likely(100 + i, text, -0.1 * (i + 1)),) * 2 for i, text in enumerate(("Hello", " there", "."))]


async def test_a_prompt_is_scored_with_echo_and_logprobs(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(prompt=SCORES, logprobs=OF_ANSWER)
        asked = ONCE | {"echo": True, "logprobs": 1}
        whole = (await stand.http.post(URL, json=asked)).json()
        streamed = await stand.http.post(URL, json=asked | {"stream": True})
    expected = {
        "tokens": ["<s>", "On", "ce", "Hello", " there", "."],
        "token_logprobs": [None, -1.5, -0.25, -0.1, -0.2, pytest.approx(-0.3)],
        "top_logprobs": [
            None,
            {"Of": -0.5},
            {"ce": -0.25},
            {"Hello": -0.1},
            {" there": -0.2},
            {".": pytest.approx(-0.3)},
        ],
        "text_offset": [0, 0, 2, 4, 9, 15],
    }
    (choice,) = whole["choices"]
    assert (choice["text"], choice["logprobs"]) == ("OnceHello there.", expected)
    lines = streamed.text.removesuffix("\n\n").split("\n\n")[:-1]
    choices = [msgspec.json.decode(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert "".join(each["text"] for each in choices) == "OnceHello there."
    assert choices[0]["text"].startswith("Once")
    told = [each["logprobs"] for each in choices if each["logprobs"] is not None]
    assert {name: [item for each in told for item in each[name]] for name in expected} == expected
    prompts = [call.prompt for call in stand.pipelines.calls]
    assert [(prompt.top_logprobs, prompt.is_answered) for prompt in prompts] == [(1, True)] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_alone_is_scored_with_no_tokens_at_all(tmp_path: Path, stream: bool) -> None:
    """As lm-eval asks for it: token ids, several prompts at once."""
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(texts=[], prompt=SCORES, finish_reason="length")
        asked = {"model": "guide", "prompt": [[79, 110], [99, 101]], "max_tokens": 0, "echo": True}
        answer = await stand.http.post(URL, json=asked | {"logprobs": 1, "stream": stream})
        plain = (await stand.http.post(URL, json=asked)).json()
    assert [choice["text"] for choice in plain["choices"]] == ["On", "ce"]
    assert [choice["logprobs"] for choice in plain["choices"]] == [None, None]
    assert [call.prompt.is_answered for call in stand.pipelines.calls] == [False] * 4
    if not stream:
        body = answer.json()
        assert body["usage"]["completion_tokens"] == 0
        choices = body["choices"]
    else:
        lines = answer.text.removesuffix("\n\n").split("\n\n")[:-1]
        events = [msgspec.json.decode(line.removeprefix("data: "))["choices"][0] for line in lines]
        choices = [each for each in events if each["logprobs"]]
        assert {each["finish_reason"] for each in events} == {None, "length"}
    assert [(each["index"], each["text"]) for each in choices] == [(0, "On"), (1, "ce")]
    for each in choices:
        assert each["logprobs"]["tokens"] == ["<s>", "On", "ce"]
        assert each["logprobs"]["token_logprobs"] == [None, -1.5, -0.25]


@given(st.lists(st.text(max_size=4), max_size=12), st.data())
def test_offsets_are_those_of_the_characters_however_bytes_are_cut(
    words: list[str], data: st.DataObject
) -> None:
    text = "".join(words)
    whole = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=8))) if len(whole) > 1 else []
    bounds = [0, *cuts, len(whole)]
    pieces = [whole[a:b] for a, b in pairwise(bounds)]
    expected = [len(whole[:start].decode(errors="ignore")) for start in bounds[:-1]]
    assert offsets_in(text, pieces) == expected


def test_what_a_tokenizer_adds_takes_no_room() -> None:
    assert offsets_in("Once more", [b"<s>", b" Once", b" more"]) == [0, 0, 4]
