"""What the committed files say through libllama: held-out questions, follow-ups and tool calls, greedily.

The floors lie a little under the measured shares (docs/guide-model.md); a file that is worse is a mistake.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmllm.guide import DRAFT_PATH, GUIDE_PATH, GUIDE_TEMPERATURE, GUIDE_TYPICAL_P
from swarmllm.guide.corpus import heldout
from swarmllm.guide.scoring import Verdict, is_learned, parse_tool_calls, summary
from swarmllm.guide.template import render

from .measure import Answerer

VECTORS_PATH = Path(__file__).with_name("token_vectors.json")
FLOORS = {"single": 0.88, "multi_turn": 0.85, "off_topic": 0.6, "tools": 0.68}
TOOL_NAME_FLOOR = 0.9

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def guide() -> Iterator[Answerer]:
    answerer = Answerer(GUIDE_PATH)
    yield answerer
    answerer.close()


@pytest.fixture(scope="module")
def verdicts(guide: Answerer) -> list[Verdict]:
    return guide.judge_all(heldout()[::6])


@pytest.mark.parametrize("family", sorted(FLOORS))
def test_heldout_conversations_are_answered_well(verdicts: list[Verdict], family: str) -> None:
    row = summary(verdicts)[family]
    assert row["n"] >= 10
    assert row["on_topic"] >= FLOORS[family]


def test_answers_drawn_as_the_guide_is_set_up_are_no_mixtures(guide: Answerer) -> None:
    drawn = guide.drawn(50, 2, GUIDE_TEMPERATURE, GUIDE_TYPICAL_P)
    assert sum(verdict.on_topic for verdict in drawn) >= 0.86 * len(drawn)
    assert [verdict.answer for verdict in drawn if not (verdict.on_topic or is_learned(verdict.answer))] == []


def test_a_heldout_question_that_needs_a_tool_gets_a_call_of_the_right_function(
    verdicts: list[Verdict],
) -> None:
    row = summary(verdicts)["tools/call"]
    assert row["n"] >= 10
    assert row["name_right"] >= TOOL_NAME_FLOOR


def test_a_tool_call_of_the_openai_shape_comes_back_parsed(guide: Answerer) -> None:
    weather = {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
    prompt = render(
        [{"role": "user", "content": "What is the weather in Zurich?"}],
        [{"type": "function", "function": weather}],
        add_generation_prompt=True,
    )
    ids = guide.llama.tokenize(prompt.encode(), add_bos=False, special=True)
    completion: Any = guide.llama.create_completion(ids, max_tokens=64, temperature=0.0)
    calls = parse_tool_calls(completion["choices"][0]["text"])
    assert calls == [{"name": "get_weather", "arguments": {"city": "Zurich"}}]
    assert completion["choices"][0]["finish_reason"] == "stop"


def test_the_template_of_the_file_drives_a_chat_of_llama_cpp_python(guide: Answerer) -> None:
    chat: Any = guide.llama.create_chat_completion(
        [{"role": "user", "content": "What is a pipeline?"}], temperature=0.0, max_tokens=64
    )
    assert chat["choices"][0]["finish_reason"] == "stop"
    assert chat["choices"][0]["message"]["content"].startswith("A pipeline is an ordered list of stages")


@pytest.mark.parametrize("path", [GUIDE_PATH, DRAFT_PATH], ids=["guide", "draft"])
def test_libllama_gives_the_tokens_of_the_tokenizer_that_was_trained(path: Path) -> None:
    vectors = json.loads(VECTORS_PATH.read_text())
    assert len(vectors) > 10
    answerer = Answerer(path)
    for vector in vectors:
        ids = answerer.llama.tokenize(vector["text"].encode(), add_bos=False, special=True)
        assert ids == vector["ids"], vector["text"]
        assert answerer.llama.detokenize(ids, special=True).decode() == vector["text"]
    answerer.close()
