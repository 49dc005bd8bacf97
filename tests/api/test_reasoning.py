"""Telling a model's thoughts from its answer while both arrive in pieces."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from api_fakes import Script, serve_node
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.api.output.output_parser import OutputParser, ReasoningText, opened_reasoning
from swarmllm.api.output.tool_calls import FoundCall, ToolCallParser

BUDGET: dict[str, Any] = {"type": "enabled"}
HELLO: dict[str, Any] = {"model": "guide", "messages": [{"role": "user", "content": "hello"}]}
THINKING = ["<th", "ink>\nA greeting", ". I greet.\n</", "think>\n\nHello", " there."]


def told(*pieces: str, opened: str = "") -> tuple[str, str]:
    heard = OutputParser(opened_reasoning=opened)
    items = [item for piece in pieces for item in heard.feed(piece)] + heard.finish()
    reasoning = "".join(item.text for item in items if isinstance(item, ReasoningText))
    return reasoning, "".join(item for item in items if isinstance(item, str))


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("Hello.", "", "Hello."),
        ("<think>\nhm\n</think>\n\nHello.", "hm", "Hello."),
        ("\n<think></think>Hello.", "", "Hello."),
        ("[THINK]hm[/THINK]Hello.", "hm", "Hello."),
        ("<thinking>a < b </thinking>\nx", "a < b", "x"),
        ("<think>never ends", "never ends", ""),
        ("<think", "", "<think"),
        ("Say <think>no</think>.", "", "Say <think>no</think>."),
        ("<b>bold</b>", "", "<b>bold</b>"),
        ("   ", "", "   "),
    ],
)
def test_thoughts_are_what_stands_between_the_tags_at_the_beginning(
    text: str, reasoning: str, answer: str
) -> None:
    assert told(text) == (reasoning, answer)
    assert told(*text) == (reasoning, answer)


def test_a_thought_that_the_prompt_has_opened_needs_no_tag() -> None:
    assert opened_reasoning("<|im_start|>assistant\n<think>\n") == "<think>"
    assert opened_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n") == ""
    assert told("hm\n</think>\n\nHello.", opened="<think>") == ("hm", "Hello.")
    assert told("only thoughts", opened="<think>") == ("only thoughts", "")


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "hm", " ", "\n", "<", "[THINK]", "</th", "x"]), max_size=8
    ).map("".join),
    st.lists(st.integers(0, 60), max_size=10),
    st.sampled_from(["", "<think>"]),
)
def test_how_the_text_is_split_makes_no_difference_to_thoughts(
    text: str, cuts: list[int], opened: str
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    assert told(*pieces, opened=opened) == told(text, opened=opened)


def test_a_call_in_a_thought_is_not_meant() -> None:
    supported = OutputParser(ToolCallParser(None, ["add"]))
    call = '<tool_call>{"name": "add"}</tool_call>'
    heard = supported.whole(f"<think>{call}</think>{call}")
    assert (heard.reasoning, heard.text, heard.calls) == (call, "", [FoundCall("add", "{}")])


@pytest.mark.slow
async def test_every_dialect_tells_thought_and_answer_apart(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        stand.pipelines.script = Script(texts=THINKING)
        chat = (await stand.http.post("/v1/chat/completions", json=HELLO)).json()
        message = chat["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("A greeting. I greet.", "Hello there.")
        stream = (await stand.http.post("/v1/chat/completions", json=HELLO | {"stream": True})).text
        chunks = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "A greeting. I greet."
        assert "".join(delta.get("content", "") for delta in deltas) == "Hello there."
        claude = (await stand.http.post("/v1/messages", json=HELLO | {"max_tokens": 50})).json()
        assert [block["type"] for block in claude["content"]] == ["thinking", "text"]
        hidden = {"max_tokens": 50, "thinking": {"type": "adaptive", "display": "omitted"}}
        claude = (await stand.http.post("/v1/messages", json=HELLO | hidden)).json()
        assert [block.get("thinking") for block in claude["content"]] == ["", None]
        stream = (await stand.http.post("/v1/messages", json=HELLO | hidden | {"stream": True})).text
        assert '"type":"thinking"' in stream
        assert "greeting" not in stream
        ollama = (await stand.http.post("/api/chat", json=HELLO | {"stream": False})).json()["message"]
        assert (ollama["thinking"], ollama["content"]) == ("A greeting. I greet.", "Hello there.")


@pytest.mark.parametrize(
    ("path", "fields", "effort"),
    [
        ("/v1/chat/completions", {}, None),
        ("/v1/chat/completions", {"reasoning_effort": "high"}, "high"),
        ("/v1/responses", {"reasoning": {"effort": "low"}}, "low"),
        ("/v1/messages", {"max_tokens": 5, "thinking": {"type": "disabled"}}, "none"),
        ("/v1/messages", {"max_tokens": 5, "thinking": {"type": "adaptive"}}, None),
        ("/v1/messages", {"max_tokens": 5000, "thinking": BUDGET | {"budget_tokens": 1024}}, "low"),
        ("/v1/messages", {"max_tokens": 5000, "thinking": BUDGET | {"budget_tokens": 2048}}, "medium"),
        ("/v1/messages", {"max_tokens": 5000, "thinking": BUDGET | {"budget_tokens": 4096}}, "high"),
        ("/v1/messages", {"max_tokens": 5, "output_config": {"effort": "max"}}, "xhigh"),
        ("/api/chat", {"think": True}, "medium"),
        ("/api/chat", {"think": False}, "none"),
        ("/api/chat", {"think": "high"}, "high"),
    ],
)
async def test_how_much_to_think_reaches_the_template(
    tmp_path: Path, path: str, fields: dict[str, object], effort: str | None
) -> None:
    body = HELLO if path != "/v1/responses" else {"model": HELLO["model"], "input": "Hello"}
    async with serve_node(tmp_path) as stand:
        assert (await stand.http.post(path, json=body | fields)).status_code == 200
        (call,) = stand.pipelines.calls
        assert call.prompt.effort == effort


async def test_a_preset_says_how_much_to_think_and_requests_otherwise(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        preset = {"reasoning_effort": "none"}
        await stand.http.post("/api/admin/models/guide/preset", json=preset)
        for fields in ({}, {"reasoning_effort": "high"}):
            await stand.http.post("/v1/chat/completions", json=HELLO | fields)
        assert [call.prompt.effort for call in stand.pipelines.calls] == ["none", "high"]


@pytest.mark.parametrize(
    ("thinking", "field"),
    [
        ({"type": "enabled"}, "thinking.budget_tokens"),
        ({"type": "enabled", "budget_tokens": 1000}, "thinking.budget_tokens"),
        ({"type": "enabled", "budget_tokens": 2000}, "thinking.budget_tokens"),
        ({"type": "between_tools"}, "thinking.type"),
        ({"type": "adaptive", "budget_tokens": 2000}, "thinking.budget_tokens"),
    ],
)
async def test_anthropics_thinking_is_examined(
    tmp_path: Path, thinking: dict[str, object], field: str
) -> None:
    async with serve_node(tmp_path) as stand:
        body = HELLO | {"max_tokens": 2000, "thinking": thinking}
        refused = await stand.http.post("/v1/messages", json=body)
    assert refused.status_code == 400
    assert field in refused.json()["error"]["message"]
