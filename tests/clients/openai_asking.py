"""What the tests of the `openai` client ask, and how they read the answer."""

from __future__ import annotations

from typing import Any

import openai

QUESTION = [{"role": "user", "content": "What is a layer range?"}]


def ask(ai: openai.OpenAI, **options: Any) -> Any:
    options = {"model": "guide", "messages": QUESTION, "temperature": 0, "max_tokens": 40} | options
    return ai.chat.completions.create(**options)


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)
