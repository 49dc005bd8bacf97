"""Finds the field that msgspec refused in the text of its error.

msgspec reports faults as text with a JSON path, and quotes the pattern that a text does not match; people get
the name of the field and what it should have been.
"""

from __future__ import annotations

import re
from typing import Final

from swarmllm_proto.identifiers import MEANINGS

_PATH: Final = re.compile(r" - at (?:`([^`]*)` in )?`\$?\.?([^`]*)`$")
_NAMED: Final = re.compile(r"(?:Object missing required )?field `([^`]+)`")
_MEANINGS: Final = {f"matching regex {pattern!r}": meaning for pattern, meaning in MEANINGS.items()}
REASON_MAX: Final = 200


def field_and_reason(error: Exception, whole: str) -> tuple[str, str]:
    """The field from the path and from the field that the text names; `whole` where all of it is
    unreadable."""
    if isinstance(error, RecursionError):
        return whole, "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return whole, "contains text that is not UTF-8"
    text = str(error)
    path = _PATH.search(text)
    reason = text[: path.start()] if path else text
    reason = next((meaning for quoted, meaning in _MEANINGS.items() if quoted in reason), reason)
    named = _NAMED.match(reason)
    parts = [path.group(2) if path else "", named.group(1) if named else ""]
    return ".".join(part for part in parts if part) or whole, reason[:REASON_MAX]
