"""Conversations in which the model may call functions.

Function and parameter names vary, so that the model learns to copy them from the definitions in the
system turn instead of knowing them by keepalive. Arguments are copied from the question, in the order of
their sorted names.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from .patterns import WRAPPERS, expand, wrap
from .sample import Message, Sample, assistant, user
from .talk import REFUSAL, SUBJECT_TOPICS, ask, off_topic_question, system_turn
from .tool_shapes import SHAPES, Shape, Values


@dataclass(frozen=True)
class Tool:
    """A shape with its names chosen."""

    shape: Shape
    name: str
    parameter_names: tuple[str, ...]
    description: str
    described: bool

    def definition(self) -> dict[str, Any]:
        """The function in the OpenAI `tools` format."""
        properties: dict[str, Any] = {}
        for (role, kind, _), name in zip(self.shape.parameters, self.parameter_names, strict=True):
            properties[name] = (
                {"type": kind, "description": f"The {role}"} if self.described else {"type": kind}
            )
        parameters = {"type": "object", "properties": properties, "required": list(self.parameter_names)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def call(self, values: Values) -> Message:
        pairs = zip(self.shape.parameters, self.parameter_names, strict=True)
        arguments = {name: values[role] for (role, _, _), name in pairs}
        text = json.dumps(dict(sorted(arguments.items())), ensure_ascii=False)
        function = {"name": self.name, "arguments": text}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        }


def make_tool(shape: Shape, rng: random.Random) -> Tool:
    names = tuple(rng.choice(names) for _, _, names in shape.parameters)
    return Tool(shape, rng.choice(shape.names), names, rng.choice(shape.descriptions), rng.random() < 0.25)


def _question(shape: Shape, values: Values, rng: random.Random, heldout: bool) -> str:
    pattern = expand(rng.choice(shape.heldout_asks if heldout else shape.asks), rng)
    if not heldout and rng.random() < 0.15:
        pattern = wrap(pattern, WRAPPERS, rng)
    if rng.random() < 0.5 and not pattern.startswith("{"):
        pattern = pattern[:1].upper() + pattern[1:]
    if rng.random() < 0.15:
        pattern = pattern.removesuffix("?")
    return pattern.format(**values)


def _result_text(result: Values, rng: random.Random) -> str:
    shown = {key: value for key, value in result.items() if key != "told"}
    if len(shown) == 1 and rng.random() < 0.25:
        (value,) = shown.values()
        return value if isinstance(value, str) else json.dumps(value)
    return json.dumps(shown)


def _choose_tools(rng: random.Random, n: int) -> list[Tool]:
    return [make_tool(shape, rng) for shape in rng.sample(SHAPES, n)]


def with_tools(rng: random.Random) -> Sample:
    """One to three tools and one to three questions, most of which need one of the tools."""
    tools = _choose_tools(rng, rng.choice((1, 1, 2, 2, 3)))
    messages = system_turn(rng, 0.2)
    for _ in range(rng.choice((1, 2, 2, 3))):
        roll = rng.random()
        if roll < 0.78:
            tool = rng.choice(tools)
            values = tool.shape.values(rng, False)
            result = tool.shape.result(rng, values)
            messages += [user(_question(tool.shape, values, rng, False)), tool.call(values)]
            messages.append({"role": "tool", "content": _result_text(result, rng)})
            messages.append(assistant(tool.shape.report.format(**values, **result)))
        elif roll < 0.93:
            question, answer = ask(rng.choice(SUBJECT_TOPICS), rng)
            messages += [user(question), assistant(answer)]
        else:
            absent = [shape for shape in SHAPES if shape not in [tool.shape for tool in tools]]
            shape = rng.choice(
                [
                    shape
                    for shape in absent
                    if shape.names[0] in ("get_weather", "get_time", "get_price", "add", "find_user")
                ]
                or absent
            )
            if shape.names[0] in ("get_weather", "get_time", "get_price", "add", "find_user"):
                messages += [user(_question(shape, shape.values(rng, False), rng, False)), assistant(REFUSAL)]
            else:
                messages += [user(off_topic_question(rng)), assistant(REFUSAL)]
    return Sample(tuple(messages), "tools", tuple(tool.definition() for tool in tools))


def without_needed_tool(rng: random.Random) -> Sample:
    """A question for a tool that is not there is refused."""
    shape = rng.choice(
        [
            shape
            for shape in SHAPES
            if shape.names[0] in ("get_weather", "get_time", "get_price", "add", "find_user")
        ]
    )
    return Sample(
        (user(_question(shape, shape.values(rng, False), rng, False)), assistant(REFUSAL)), "off_topic"
    )


def heldout_tools(rng: random.Random, n_per_shape: int = 12) -> list[Sample]:
    """Held-out questions and values: calls, reports of a result, and questions that need no tool."""
    samples = []
    for shape in SHAPES:
        for i in range(n_per_shape):
            others = rng.sample([other for other in SHAPES if other is not shape], i % 3)
            tools = [make_tool(each, rng) for each in (shape, *others)]
            definitions = tuple(tool.definition() for tool in rng.sample(tools, len(tools)))
            values = shape.values(rng, True)
            start = (user(_question(shape, values, rng, True)), tools[0].call(values))
            samples.append(Sample(start, "tools/call", definitions))
            if i % 3 == 0:
                result = shape.result(rng, values)
                tail = (
                    {"role": "tool", "content": _result_text(result, rng)},
                    assistant(shape.report.format(**values, **result)),
                )
                samples.append(Sample((*start, *tail), "tools/report", definitions))
            if i % 4 == 0:
                question, answer = ask(rng.choice(SUBJECT_TOPICS), rng)
                samples.append(Sample((user(question), assistant(answer)), "tools/no_call", definitions))
    return samples
