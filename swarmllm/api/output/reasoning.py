"""The thoughts of a model that thinks before it answers: `<think>...</think>`, told apart as text arrives.

Only the beginning of an answer can be a thought; a tag further down is part of what is said. Chat templates
of some models open the tag themselves, then the answer begins inside (see `opened_thought`).
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmllm_proto.reasoning_markers import THOUGHT_TAGS


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of reasoning."""

    text: str


def opened_thought(prompt: str) -> str:
    """The tag that a rendered prompt leaves open, "" where there is none."""
    end = prompt[-32:].rstrip()
    return next((tag for tag in THOUGHT_TAGS if end.endswith(tag)), "")


class ReasoningParser:
    """`feed` text, then `finish`; both return what is certain by now, in order."""

    def __init__(self, opened: str = "") -> None:
        """`opened`: the tag that the prompt has left open."""
        self._closing = THOUGHT_TAGS[opened] if opened else ""
        self._held = ""
        self._is_fresh = bool(opened)
        """No word of the thought, or of what follows it, has come yet."""
        self.is_over = False
        """What comes from here on is no thought, and is given back as it is."""

    def feed(self, text: str) -> list[str | Thought]:
        if self.is_over and not self._is_fresh:
            return [text] if text else []
        self._held += text
        if not self.is_over and not self._closing and not self._open():
            return []
        found: list[str | Thought] = []
        if self._closing:
            before, tag, after = self._held.partition(self._closing)
            if not tag:
                shown = self._held[: len(self._held) - _possible_end(self._held, self._closing)]
                return self._think(shown, len(shown))
            found += self._think(before.rstrip(), len(before))
            self._held, self._closing = after, ""
            self.is_over = self._is_fresh = True
        return found + self._say()

    def finish(self) -> list[str | Thought]:
        held, self._held = self._held, ""
        if self._closing:
            return [Thought(held)] if held else []
        return [held] if held and not (self.is_over and self._is_fresh) else []

    def _open(self) -> bool:
        """False while it is open whether the answer begins with a thought."""
        start = self._held.lstrip()
        tag = next((tag for tag in THOUGHT_TAGS if start.startswith(tag)), "")
        if tag:
            self._closing, self._held, self._is_fresh = THOUGHT_TAGS[tag], start[len(tag) :], True
        elif not any(tag.startswith(start) for tag in THOUGHT_TAGS):
            self.is_over = True
        return bool(tag) or self.is_over

    def _think(self, text: str, n_taken: int) -> list[str | Thought]:
        self._held = self._held[n_taken:]
        if self._is_fresh:
            text = text.lstrip()
            self._is_fresh = not text
        return [Thought(text)] if text else []

    def _say(self) -> list[str | Thought]:
        text, self._held = self._held, ""
        if self._is_fresh:
            # The line between thought and answer belongs to neither.
            text = text.lstrip()
            self._is_fresh = not text
        return [text] if text else []


def _possible_end(text: str, closing: str) -> int:
    """Length of the longest end of `text` that is white space and a beginning of `closing`."""
    for length in range(min(len(closing) - 1, len(text)), 0, -1):
        if closing.startswith(text[-length:]):
            return len(text) - len(text[:-length].rstrip())
    return len(text) - len(text.rstrip())
