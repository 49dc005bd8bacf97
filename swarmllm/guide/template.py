"""How a conversation becomes text: ChatML with tools in the Hermes format.

`TEMPLATE` is the Jinja source that goes into the GGUF, and `render` is the same function in plain Python,
because the corpus is rendered a hundred thousand times. A test holds the two together. Every tag of the
template trims its white space itself, so the `trim_blocks` settings of the various Jinja environments
make no difference.

Wart: Jinja's own `tojson` sorts keys and writes some characters as `\\u0027`; the filters of other
programs do neither. The guide is trained on sorted and unsorted definitions, so both work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TOOL_TAGS = ("<tool_call>", "</tool_call>", "<tools>", "</tools>", "<tool_response>", "</tool_response>")
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, *TOOL_TAGS)
ANSWER_PREFIX = f"{IM_START}assistant\n"

_TOOLS_BEFORE = "You may call these functions:\n<tools>"
_TOOLS_AFTER = '\n</tools>\nTo call one, answer\n<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>'

TEMPLATE = (
    "{%- set ns = namespace(system='', first=0) -%}"
    "{%- if messages and messages[0]['role'] == 'system' -%}"
    "{%- set ns.system = messages[0]['content'] or '' -%}{%- set ns.first = 1 -%}"
    "{%- endif -%}"
    "{%- if ns.system or tools -%}"
    "{{- '<|im_start|>system\\n' + ns.system -}}"
    "{%- if tools -%}"
    "{%- if ns.system -%}{{- '\\n\\n' -}}{%- endif -%}"
    "{{- " + json.dumps(_TOOLS_BEFORE) + " -}}"
    "{%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}"
    "{{- '" + _TOOLS_AFTER.replace("\n", "\\n") + "' -}}"
    "{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- for message in messages[ns.first:] -%}"
    "{%- if message['role'] == 'tool' -%}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + (message['content'] or '') -}}"
    "{{- '\\n</tool_response><|im_end|>\\n' -}}"
    "{%- elif message['role'] == 'assistant' and message['tool_calls'] -%}"
    "{{- '<|im_start|>assistant\\n' + (message['content'] or '') -}}"
    "{%- for call in message['tool_calls'] -%}"
    "{%- if message['content'] or not loop.first -%}{{- '\\n' -}}{%- endif -%}"
    "{{- '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' -}}"
    "{%- if call['function']['arguments'] is string -%}{{- call['function']['arguments'] -}}"
    "{%- else -%}{{- call['function']['arguments'] | tojson -}}{%- endif -%}"
    "{{- '}\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- else -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def answer_text(message: Mapping[str, Any]) -> str:
    """What the model writes for this assistant message, without the end token."""
    parts = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        parts.append(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(parts)


def render(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    add_generation_prompt: bool = False,
    sort_keys: bool = True,
) -> str:
    """The text of a conversation, exactly as `TEMPLATE` renders it.

    Tool-call arguments must be JSON strings, as in the OpenAI API. `sort_keys` says how tool definitions
    are written.
    """
    system, turns = "", messages
    if messages and messages[0]["role"] == "system":
        system, turns = messages[0]["content"], messages[1:]
    parts = []
    if system or tools:
        parts.append(f"{IM_START}system\n{system}")
        if tools:
            parts.append("\n\n" if system else "")
            parts.append(_TOOLS_BEFORE)
            parts += ["\n" + json.dumps(tool, sort_keys=sort_keys, ensure_ascii=True) for tool in tools]
            parts.append(_TOOLS_AFTER)
        parts.append(f"{IM_END}\n")
    for message in turns:
        if message["role"] == "tool":
            text = f"user\n<tool_response>\n{message['content']}\n</tool_response>"
        elif message["role"] == "assistant":
            text = f"assistant\n{answer_text(message)}"
        else:
            text = f"{message['role']}\n{message['content']}"
        parts.append(f"{IM_START}{text}{IM_END}\n")
    if add_generation_prompt:
        parts.append(ANSWER_PREFIX)
    return "".join(parts)
