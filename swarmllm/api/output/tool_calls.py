"""Tool calls in a model's text, in the formats that models are trained on.

| who | how a call looks |
|---|---|
| Hermes, Qwen | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` |
| Llama 3 | `<|python_tag|>{"name": ..., "parameters": {...}}`, several with `;` between them |
| Llama 3, functions of one's own | `<function=NAME>{...}</function>` |
| Mistral | `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, newer `[TOOL_CALLS]NAME[ARGS]{...}` |
| any | an answer that is nothing but such JSON, one call or a list, in a code fence or not |

A sans-IO parser that is fed text as it comes and gives back text to show and calls that are complete. It
looks for all formats at once: which one a model speaks stands nowhere but in its weights. Text is held back
only while it, or the white space before it, may turn out to belong to a call. What looks like a call and is
not valid stays text, marks included: better a visible oddity than words that vanish. Bare JSON counts only
where it names a tool that was offered: it may just as well be the answer. Arguments are passed on as the
exact JSON text of the model, re-encoding would reorder and reformat them.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field

import msgspec

CLOSINGS = {
    "<tool_call>": "</tool_call>",
    "<function=": "</function>",
    "<|python_tag|>": "",
    "[TOOL_CALLS]": "",
}
"""What ends a call that begins like this; "": the end of the answer."""
_OPENING = re.compile("|".join(map(re.escape, CLOSINGS)))
_MISTRAL_CALL = re.compile(
    r"\s*(?:\[TOOL_CALLS\])?\s*(?P<name>[\w.-]{1,256})(?:\[CALL_ID\][\w-]*)?\s*(?:\[ARGS\])?\s*(?=\{)"
)
_BARE = "{"
"""The key of bare JSON among openings: it has no mark of its own."""
_BARE_START = re.compile(r'\s*(?:`{1,3}|```\w{0,16}\s*)?(?:\[\s*)?(?:\{\s*(?:"[^"]{0,16})?)?')
_BARE_KEY = re.compile(r'\s*(?:```\w*\s*)?\[?\s*\{\s*"(?:name|type|function|id|arguments|parameters)"')
_FENCE = re.compile(r"\s*```\w*\s*(?P<inside>.*?)\s*```\s*", re.DOTALL)
_EMPTY = msgspec.Raw(b"{}")
_BETWEEN = re.compile(r"[\s;,]*")


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class _Call(msgspec.Struct, frozen=True):
    name: str = ""
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()
    function: _Function | None = None


@dataclass(frozen=True, slots=True)
class FoundCall:
    name: str
    arguments: str
    """A JSON object, as text."""
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}", compare=False)


class ToolCallParser:
    """`feed` text, then `finish`; both return what is certain by now, in order."""

    def __init__(self, max_calls: int | None = None, tools: Collection[str] = ()) -> None:
        """`tools`: the names that bare JSON may call."""
        self.n_calls = 0
        self._max_calls = max_calls
        self._tools = frozenset(tools)
        self._held = ""
        self._gap = ""
        """White space before the call that is open: no part of the answer, unless the call is none."""
        self._opening: str | None = None
        self._may_be_bare = bool(tools)
        """Nothing but the beginning of JSON has come so far."""

    def feed(self, text: str) -> list[str | FoundCall]:
        self._held += text
        if self._may_be_bare and self._waits_for_key():
            return []
        found: list[str | FoundCall] = []
        while self._opening is None or (closing := CLOSINGS.get(self._opening, "")):
            if self._opening is None:
                match = _OPENING.search(self._held)
                if match is None:
                    break
                shown = self._held[: match.start()].rstrip()
                found += [shown] if shown else []
                self._gap = self._held[len(shown) : match.start()]
                self._opening, self._held = match[0], self._held[match.end() :]
            else:
                inside, tag, after = self._held.partition(closing)
                if not tag:
                    break
                found += self._closed(inside, tag)
                self._opening, self._held = None, after
        if self._opening is None:
            shown = self._held[: len(self._held) - _possible_tag(self._held)].rstrip()
            found += [shown] if shown else []
            self._held = self._held[len(shown) :]
        return found

    def finish(self) -> list[str | FoundCall]:
        """The model is done. An unclosed call counts if it is complete JSON (a stop token may eat the
        tag).
        """
        held, self._held = self._held, ""
        if self._opening is None and self._may_be_bare and held.lstrip()[:1] in ("{", "[", "`"):
            self._opening, self._gap = _BARE, ""
        if self._opening is not None:
            found = self._closed(held, "")
            self._opening = None
            return found
        return [held] if held.strip() or (held and not self.n_calls) else []

    def _waits_for_key(self) -> bool:
        """Whether the answer is, or may become, bare JSON of a call."""
        if _BARE_KEY.match(self._held):
            self._opening, self._gap, self._may_be_bare = _BARE, "", False
            return True
        self._may_be_bare = len(self._held) < 200 and bool(_BARE_START.fullmatch(self._held))
        return self._may_be_bare

    def _closed(self, text: str, tag: str) -> list[str | FoundCall]:
        assert self._opening is not None
        mark = "" if self._opening == _BARE else self._opening
        calls = _parse(mark, text)
        if not calls or (not mark and not all(call.name in self._tools for call in calls)):
            return [self._gap + mark + text + tag]
        room = len(calls) if self._max_calls is None else max(0, self._max_calls - self.n_calls)
        self.n_calls += len(calls[:room])
        return list(calls[:room])


def _parse(mark: str, text: str) -> list[FoundCall]:
    """The calls that `text` consists of; none where any part of it is something else."""
    try:
        if mark == "<function=":
            name, angle, arguments = text.partition(">")
            return [_call(name, msgspec.Raw(arguments.strip().encode()))] if angle and name else []
        if mark == "[TOOL_CALLS]" and text.lstrip()[:1] not in ("[", "{"):
            return _named_calls(text)
        fence = _FENCE.fullmatch(text)
        text = fence["inside"] if fence else text
        return [call for value in _values(text) for call in _calls(value)]
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return []


def _named_calls(text: str) -> list[FoundCall]:
    """Mistral's newer way: the name outside of the JSON."""
    calls: list[FoundCall] = []
    while text.strip():
        match = _MISTRAL_CALL.match(text)
        if match is None:
            raise ValueError("neither a name nor the end")
        end = _end_of_value(text, match.end())
        calls.append(_call(match["name"], msgspec.Raw(text[match.end() : end].encode())))
        text = text[end:]
    return calls


def _values(text: str) -> list[str]:
    """JSON values with nothing but separators between them, as they are written."""
    values: list[str] = []
    at = _after_separators(text, 0)
    while at < len(text):
        end = _end_of_value(text, at)
        values.append(text[at:end])
        at = _after_separators(text, end)
    return values


def _after_separators(text: str, at: int) -> int:
    match = _BETWEEN.match(text, at)
    assert match is not None
    return match.end()


def _end_of_value(text: str, at: int) -> int:
    return int(json.JSONDecoder().raw_decode(text, at)[1])


def _calls(value: str) -> list[FoundCall]:
    listed = (
        msgspec.json.decode(value, type=list[_Call])
        if value.startswith("[")
        else [msgspec.json.decode(value, type=_Call)]
    )
    calls: list[FoundCall] = []
    for call in listed:
        function = call.function or call
        if not function.name:
            raise ValueError("no name")
        raw = next((raw for raw in (function.arguments, function.parameters) if bytes(raw)), _EMPTY)
        calls.append(_call(function.name, raw))
    return calls


def _call(name: str, raw: msgspec.Raw) -> FoundCall:
    arguments = bytes(raw).decode()
    # Some models write the object as a JSON string.
    if arguments.startswith('"'):
        arguments = msgspec.json.decode(arguments, type=str)
    msgspec.json.decode(arguments, type=dict)
    return FoundCall(name, arguments)


def _possible_tag(text: str) -> int:
    """Length of the longest end of `text` that is a beginning of an opening tag."""
    longest = max(map(len, CLOSINGS))
    for length in range(min(longest - 1, len(text)), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in CLOSINGS):
            return length
    return 0
