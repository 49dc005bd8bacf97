"""How models mark the thoughts before an answer: what opens one, and what ends it."""

from __future__ import annotations

from typing import Final

THOUGHT_TAGS: Final = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "[THINK]": "[/THINK]",
}
