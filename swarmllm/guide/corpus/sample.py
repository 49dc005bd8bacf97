"""What the corpus is made of: conversations in the message format of the OpenAI API."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""`{"role", "content"}`; an assistant message that calls a tool has `tool_calls` in the OpenAI shape."""


@dataclass(frozen=True)
class Sample:
    """One conversation. All its answers are learned; in the evaluation only the last one is judged."""

    messages: tuple[Message, ...]
    category: str
    tools: tuple[dict[str, Any], ...] = field(default=())

    def key(self) -> str:
        """Everything the model would see and say, as one canonical string."""
        return json.dumps([self.messages, self.tools], sort_keys=True, ensure_ascii=False)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
