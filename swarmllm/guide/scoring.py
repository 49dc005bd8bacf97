"""Judging answers to the held-out conversations, and the table of the shares that are right.

A text answer is right when it is the expected text but for case and white space, and on topic when it is
the full or the short answer of the topic that a single question is about. A tool call is right when its JSON
names the right function and gives the right arguments. Running the model is the caller's part, because
libllama is imported by the workers and nowhere else in the packages: `tests/guide/measure.py` does it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .corpus import TOPICS, Sample
from .corpus.frames import UNKNOWN
from .corpus.talk import NAME_UNKNOWN, REFUSAL

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Verdict:
    """`on_topic` is `right` where length matters; `name_right` is None where no tool call is expected."""

    sample: Sample
    answer: str
    right: bool
    on_topic: bool
    name_right: bool | None = None


def parse_tool_calls(text: str) -> list[dict[str, Any]]:
    """The calls in an answer; one that is not a JSON object with name and arguments is left out."""
    calls = []
    for body in _TOOL_CALL.findall(text):
        try:
            call = json.loads(body)
        except ValueError:
            continue
        if (
            isinstance(call, dict)
            and isinstance(call.get("name"), str)
            and isinstance(call.get("arguments"), dict)
        ):
            calls.append(call)
    return calls


def normalised(text: str) -> str:
    return " ".join(text.casefold().split())


_WORDINGS: dict[str, set[str]] = defaultdict(set)
for _topic in TOPICS:
    for _text in (_topic.answer, _topic.short):
        _WORDINGS[normalised(_text)] |= {normalised(_topic.answer), normalised(_topic.short)}


_TEXTS = {
    *(normalised(text) for topic in TOPICS for text in (topic.answer, topic.short, topic.why, topic.more)),
    *(normalised(text) for topic in TOPICS for text in (topic.command, topic.port)),
    *(normalised(text) for text in (*UNKNOWN.values(), REFUSAL, NAME_UNKNOWN)),
}


def is_learned(answer: str) -> bool:
    """Whether it is an answer of the corpus, to this question or another: no mixture of several."""
    return normalised(answer) in _TEXTS


def judge(sample: Sample, answer: str) -> Verdict:
    expected = sample.messages[-1]
    if "tool_calls" not in expected:
        said, wanted = normalised(answer), normalised(expected["content"])
        any_length = sample.category.startswith("single/") or sample.category == "tools/no_call"
        return Verdict(
            sample, answer, said == wanted, said == wanted or (any_length and said in _WORDINGS[wanted])
        )
    function = expected["tool_calls"][0]["function"]
    calls = parse_tool_calls(answer)
    name_right = len(calls) == 1 and calls[0]["name"] == function["name"]
    right = name_right and calls[0]["arguments"] == json.loads(function["arguments"])
    return Verdict(sample, answer, right, right, name_right)


def summary(verdicts: Sequence[Verdict]) -> dict[str, dict[str, float]]:
    """Per category, and per family (the part before the slash): how many, and the share that is right."""
    groups: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        category = verdict.sample.category
        for group in dict.fromkeys((category.split("/")[0], category)):
            groups[group].append(verdict)
    table = {}
    for group, members in sorted(groups.items()):
        n = len(members)
        row = {
            "n": n,
            "right": round(sum(verdict.right for verdict in members) / n, 4),
            "on_topic": round(sum(verdict.on_topic for verdict in members) / n, 4),
        }
        named = [verdict.name_right for verdict in members if verdict.name_right is not None]
        if named and len(named) == len(members):
            row["name_right"] = round(sum(named) / len(named), 4)
        table[group] = row
    return table
