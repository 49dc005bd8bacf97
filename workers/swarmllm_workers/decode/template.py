"""Render a conversation with the model's chat template, which is Jinja from a file that we do not trust.

The sandbox forbids attributes and calls that reach the interpreter; beyond it a template is bounded in
output, in time (an interval timer interrupts endless loops) and in memory (a limit on the address space
while it runs), and operators that build huge values from small ones are checked. What gets past all that
costs this worker only.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from swarmllm_proto.ipc import Effort
from swarmllm_proto.reasoning_markers import REASONING_TAGS
from swarmllm_workers.decode.bounded_call import bounded
from swarmllm_workers.errors import CallError

OUTPUT_MAX: Final = 16 * 2**20
"""Characters of a rendered conversation: several times what the longest contexts hold."""
RENDER_S: Final = 5.0
SEQUENCE_MAX: Final = 2**20

CHATML: Final = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
"""For models without a template."""
_TAG_MAX: Final = 32
"""Characters at the end of a prompt that may be a tag which opens reasoning, and lines behind it."""
NEEDLE: Final = "needle"
"""A content that shows what a template does with it."""
_PARTS: Final = re.compile(r"""['"]text['"]|\.text\b""")
"""In templates that know of parts."""


class _Refused(Exception):
    """The template called raise_exception, or went past a bound."""


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sequence, factor in ((left, right), (right, left)):
                is_repeated = isinstance(sequence, (str, list, tuple)) and isinstance(factor, int)
                if is_repeated and len(sequence) * factor > SEQUENCE_MAX:
                    raise _Refused("a sequence is repeated too often")
        elif operator == "**" and not (abs(left) < 2**32 and abs(right) < 64):
            raise _Refused("a power is too large")
        elif operator == "%" and isinstance(left, str):
            raise _Refused("the % operator on text is not supported")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks what the assistant said, for training. Transformers
    renders what it encloses as it is."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **_ignored: object) -> str:
    """Jinja's own filter escapes for HTML, which models have not seen in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


class ChatTemplate:
    """A chat template, compiled once. Raises CallError bad_template if the source does not compile."""

    def __init__(self, source: str, *, bos_text: str, eos_text: str) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self._tokens = {"bos_token": bos_text, "eos_token": eos_text}
        try:
            with bounded(RENDER_S):
                tree = environment.parse(source or CHATML)
                self._names = {each.name for each in tree.find_all(jinja2.nodes.Name)}
                self._thinks = any(end in source for end in REASONING_TAGS.values())
                self._template = environment.from_string(tree)
            # Some templates (SmolVLM's) take lists of parts alone: of a text they show nothing.
            self._wants_parts = (
                _PARTS.search(source) is not None
                and not self._shows(NEEDLE, otherwise=True)
                and self._shows(_as_parts(NEEDLE), otherwise=False)
            )
        except (
            jinja2.TemplateError,
            _Refused,
            RecursionError,
            MemoryError,
            SyntaxError,
            ValueError,
        ) as error:
            raise CallError(
                "bad_template", f"the chat template does not compile: {_reason(error)}"
            ) from error

    def render(
        self,
        messages: list[dict[str, object]],
        tools: list[dict[str, object]] | None,
        effort: Effort | None = None,
        *,
        is_to_answer: bool = True,
    ) -> str:
        """The prompt; `is_to_answer`: up to where the assistant is to speak. Raises CallError bad_template,
        also for an `effort` that the template has no word for."""
        asked = [_with_parsed_arguments(message) for message in messages]
        if self._wants_parts:
            asked = [_with_parts(message) for message in asked]
        context: dict[str, object] = {
            "messages": asked,
            "tools": tools or None,
            "add_generation_prompt": is_to_answer,
            **self._thinking(effort),
            **self._tokens,
        }
        try:
            with bounded(RENDER_S):
                try:
                    prompt = self._rendered(context)
                except (jinja2.UndefinedError, TypeError):
                    # What renders without these names is left as transformers renders it.
                    prompt = self._rendered(context | _further_names(tools or []))
                return prompt + _left_open(prompt) if is_to_answer and effort == "none" else prompt
        except CallError:
            raise
        except Exception as error:  # a template can raise whatever Python can
            raise CallError(
                "bad_template", f"the chat template failed: {_reason(error)}", "messages"
            ) from error

    def _shows(self, content: object, *, otherwise: bool) -> bool:
        """Whether what a user says comes out; `otherwise` where the template fails."""
        context = {"messages": [{"role": "user", "content": content}], "add_generation_prompt": True}
        try:
            with bounded(RENDER_S):
                return NEEDLE in self._rendered(context | {"tools": None} | self._tokens)
        except Exception:  # a template can raise whatever Python can
            return otherwise

    def _rendered(self, context: dict[str, object]) -> str:
        parts: list[str] = []
        n_characters = 0
        for part in self._template.generate(context):
            n_characters += len(part)
            if n_characters > OUTPUT_MAX:
                raise _Refused(f"the result is longer than {OUTPUT_MAX} characters")
            parts.append(part)
        return "".join(parts)

    def _thinking(self, effort: Effort | None) -> dict[str, object]:
        """Names by which templates know it: a level (gpt-oss), or only whether (Qwen, DeepSeek, Granite).
        Of models that always think (DeepSeek R1) they only know where reasoning ends, and may have opened it
        (see `_left_open`)."""
        if effort is None:
            return {}
        known: dict[str, object] = {
            "reasoning_effort": effort,
            "enable_thinking": effort != "none",
            "thinking": effort != "none",
        }
        read = {name: value for name, value in known.items() if name in self._names}
        if not read and effort != "none" and not self._thinks:
            raise CallError(
                "bad_template",
                "this model's chat template cannot say how much to think; leave it out",
                "reasoning_effort",
            )
        return read


def _left_open(prompt: str) -> str:
    """What closes the reasoning that the prompt has opened, so that the model has thought its thoughts; ""
    where it has opened none."""
    end = prompt[-_TAG_MAX:].rstrip()
    return next((closing for tag, closing in REASONING_TAGS.items() if end.endswith(tag)), "")


def _further_names(tools: list[dict[str, object]]) -> dict[str, object]:
    """What some templates need and transformers does not pass: descriptions of all tools and parameters, a
    list of tools where there are none, the date, and FireFunction's names of tools and date."""
    described = [_described(tool) for tool in tools]
    return {
        "tools": described,
        "functions": _tojson(described, indent=2) if described else "",
        "datetime": _strftime_now("%b %d %Y %H:%M:%S %Z"),
        "date_string": _strftime_now("%d %b %Y"),
    }


def _described(tool: dict[str, object]) -> dict[str, object]:
    function = tool.get("function")
    if not isinstance(function, dict):
        return {"description": "", **tool}
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if isinstance(parameters, dict) and isinstance(properties, dict):
        known = {
            name: {"description": "", **each} if isinstance(each, dict) else each
            for name, each in properties.items()
        }
        parameters = {**parameters, "properties": known}
    return {**tool, "function": {"description": "", **function, "parameters": parameters or {}}}


def _with_parsed_arguments(message: dict[str, object]) -> dict[str, object]:
    """OpenAI sends a tool call's arguments as JSON text; templates expect the object and print it as JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    parsed = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"])
            except ValueError:
                arguments = function["arguments"]
            call = {**call, "function": {**function, "arguments": arguments}}
        parsed.append(call)
    return {**message, "tool_calls": parsed}


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _with_parts(message: dict[str, object]) -> dict[str, object]:
    content = message.get("content")
    return {**message, "content": _as_parts(content)} if isinstance(content, str) else message


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:300]
