"""What a client wants answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swarmllm.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Prompt:
    """Either `messages` (and `tools`), which go through the model's chat template, or `text` as it is.

    Never shown in a repr: prompts stay out of logs. Raises InvalidRequest for both or neither.
    """

    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    tools: list[dict[str, Any]] | None = None
    session: str = ""
    """The conversation of which this is a turn, where the client says so."""

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.text is None):
            raise InvalidRequest("a prompt is either messages or text", field="messages")

    def __repr__(self) -> str:
        return "<Prompt text>" if self.messages is None else f"<Prompt messages={len(self.messages)}>"
