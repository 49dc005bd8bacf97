"""Tool calls in a model's text, the Hermes way: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

A sans-IO parser that is fed text as it comes and gives back text to show and calls that are complete. Text is
held back only while it, or the white space before it, may turn out to belong to an opening tag; inside a call
nothing is shown until it closes. What looks like a call and is not valid stays text, tags included: better a
visible oddity than words that vanish. Arguments are passed on as the exact JSON text of the model,
re-encoding would reorder and reformat them.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import msgspec

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class _Call(msgspec.Struct, frozen=True):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


@dataclass(frozen=True, slots=True)
class FoundCall:
    name: str
    arguments: str
    """A JSON object, as text."""
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}", compare=False)


class ToolCallParser:
    """`feed` text, then `finish`; both return what is certain by now, in order."""

    def __init__(self, max_calls: int | None = None) -> None:
        self.n_calls = 0
        self._max_calls = max_calls
        self._held = ""
        self._gap = ""
        """White space before the call that is open: no part of the answer, unless the call is none."""
        self._inside = False

    def feed(self, text: str) -> list[str | FoundCall]:
        self._held += text
        found: list[str | FoundCall] = []
        while True:
            before, tag, after = self._held.partition(CLOSE if self._inside else OPEN)
            if not tag:
                break
            self._held = after
            if self._inside:
                found += self._closed(before, CLOSE)
            else:
                shown = before.rstrip()
                found += [shown] if shown else []
                self._gap = before[len(shown) :]
            self._inside = not self._inside
        if not self._inside:
            shown = self._held[: len(self._held) - _possible_tag(self._held)].rstrip()
            found += [shown] if shown else []
            self._held = self._held[len(shown) :]
        return found

    def finish(self) -> list[str | FoundCall]:
        """The model is done. An unclosed call counts if it is complete JSON (a stop token may eat the
        tag).
        """
        held, self._held = self._held, ""
        if self._inside:
            self._inside = False
            return self._closed(held, "")
        return [held] if held.strip() or (held and not self.n_calls) else []

    def _closed(self, text: str, tag: str) -> list[str | FoundCall]:
        call = _parse(text)
        if call is None:
            return [self._gap + OPEN + text + tag]
        if self._max_calls is not None and self.n_calls >= self._max_calls:
            return []
        self.n_calls += 1
        return [call]


def _parse(text: str) -> FoundCall | None:
    try:
        call = msgspec.json.decode(text, type=_Call)
        arguments = bytes(call.arguments).decode()
        # Some models write the object as a JSON string.
        if arguments.startswith('"'):
            arguments = msgspec.json.decode(arguments, type=str)
        msgspec.json.decode(arguments, type=dict)
    except (msgspec.MsgspecError, RecursionError):
        return None
    return FoundCall(call.name, arguments)


def _possible_tag(text: str) -> int:
    """Length of the longest end of `text` that is a beginning of the opening tag."""
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-length:]):
            return length
    return 0
