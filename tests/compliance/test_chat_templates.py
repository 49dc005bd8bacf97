"""llama.cpp's collection of chat templates, rendered here and by transformers: the same text.

They are in the source distribution of `llama-cpp-python`, from where `make compliance` takes them."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarmllm_workers.decode.template import ChatTemplate
from swarmllm_workers.errors import CallError

ROOT = Path(__file__).parents[2]
FOREIGN = Path(os.environ.get("SWARMLLM_COMPLIANCE_VENV", ROOT / ".venv-compliance"))
SCRIPT = Path(__file__).parent / "llamacpp" / "render_with_transformers.py"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES_MIN = 65
EQUAL_MIN = 260
"""Of four conversations with each template; transformers refuses the others."""
CALL = {
    "id": "call_0123456",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name."},
                "days": {"type": "integer", "description": "How many."},
            },
            "required": ["city"],
        },
    },
}
USER = {"role": "user", "content": "What is the weather in Oslo?"}
CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [USER], "tools": None},
    {
        "messages": [
            {"role": "system", "content": "Be brief: <b>5 > 3</b>."},
            {"role": "user", "content": "Grüße, 世界"},
            {"role": "assistant", "content": "Hello."},
            USER,
        ],
        "tools": None,
    },
    {"messages": [USER], "tools": [TOOL]},
    {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": CALL["id"], "name": "get_weather", "content": "sunny"},
        ],
        "tools": [TOOL],
    },
]


def folder() -> Path:
    found = sorted(FOREIGN.glob("suite/llama_cpp_python-*/vendor/llama.cpp/models/templates"))
    if not found:
        pytest.skip("the templates are not here: make compliance fetches them")
    return found[-1]


def rendered_here(template: str, conversation: dict[str, Any]) -> str | None:
    try:
        compiled = ChatTemplate(template, bos_text=TOKENS["bos_token"], eos_text=TOKENS["eos_token"])
        return compiled.render(conversation["messages"], conversation["tools"])
    except CallError:
        return None


def test_templates_of_the_collection_render_as_transformers_renders_them(
    record_property: Callable[[str, object], None],
) -> None:
    asked = json.dumps({"tokens": TOKENS, "conversations": CONVERSATIONS})
    done = subprocess.run(
        [FOREIGN / "bin" / "python", SCRIPT, folder()],
        input=asked,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    theirs: dict[str, list[str | None]] = json.loads(done.stdout)
    assert len(theirs) >= TEMPLATES_MIN
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for path in sorted(folder().glob("*.jinja")):
        for i, (conversation, expected) in enumerate(zip(CONVERSATIONS, theirs[path.stem], strict=True)):
            found = rendered_here(path.read_text(), conversation)
            if expected is None:
                counts["refused there"] += 1
            elif found == expected:
                counts["equal"] += 1
            else:
                wrong.append(
                    f"{path.stem}, conversation {i}: {'refused' if found is None else 'another text'}"
                )
    record_property(f"chat templates of llama.cpp, at least {TEMPLATES_MIN}", len(theirs))
    record_property(
        f"renderings as transformers renders, of {sum(counts.values()) + len(wrong)}, at least {EQUAL_MIN}",
        counts["equal"],
    )
    record_property("renderings that transformers refuses", counts["refused there"])
    assert not wrong
    assert counts["equal"] >= EQUAL_MIN, counts
