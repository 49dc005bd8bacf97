"""The Jinja template in the GGUF and the Python renderer of the corpus say the same."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from swarmllm.guide import corpus
from swarmllm.guide.template import TEMPLATE, answer_text, render


def environment(*, trim: bool) -> jinja2.Environment:
    return ImmutableSandboxedEnvironment(trim_blocks=trim, lstrip_blocks=trim)


@pytest.mark.parametrize("trim", [True, False])
def test_jinja_and_python_render_the_corpus_alike(trim: bool) -> None:
    template = environment(trim=trim).from_string(TEMPLATE)
    samples = [*corpus.build(300, seed=2), *corpus.heldout()[::10]]
    assert any(sample.tools for sample in samples)
    for sample in samples:
        rendered = template.render(
            messages=sample.messages, tools=sample.tools or None, add_generation_prompt=True
        )
        assert rendered == render(sample.messages, sample.tools, add_generation_prompt=True)


def test_tool_definitions_may_keep_the_order_of_their_keys() -> None:
    tools: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    env = environment(trim=True)
    env.filters["tojson"] = json.dumps
    rendered = env.from_string(TEMPLATE).render(messages=[], tools=tools, add_generation_prompt=False)
    assert rendered == render([], tools, sort_keys=False)


def test_a_call_with_arguments_as_an_object_is_rendered_as_json() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    rendered = environment(trim=True).from_string(TEMPLATE).render(messages=messages)
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    assert rendered == f"<|im_start|>assistant\n{text}<|im_end|>\n"


def test_an_answer_is_what_the_template_puts_behind_the_generation_prompt() -> None:
    for sample in corpus.build(200, seed=4):
        before = render(sample.messages[:-1], sample.tools, add_generation_prompt=True)
        whole = render(sample.messages, sample.tools)
        assert whole == f"{before}{answer_text(sample.messages[-1])}<|im_end|>\n"
