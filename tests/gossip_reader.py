"""Reads gossip in tests: `valid...` is passed on, and `take` gets what was."""

from __future__ import annotations

from collections.abc import Callable


class ValidGossip:
    def __init__(self, take: Callable[[str, bytes], None] = lambda topic, content: None) -> None:
        self._take = take

    def validate(self, topic: str, content: bytes) -> bool | None:
        return content.startswith(b"valid")

    def receive(self, topic: str, content: bytes) -> None:
        self._take(topic, content)
