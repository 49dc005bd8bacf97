"""The tags with which models open and close the reasoning before an answer."""

from __future__ import annotations

from typing import Final

REASONING_TAGS: Final = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "[THINK]": "[/THINK]",
}
