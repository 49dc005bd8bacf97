"""Finds out whether a projector names another model as its own, by the names in the headers of its file and
the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from swarmllm.errors import BadModel
from swarmllm.models.gguf_header import GgufHeader, read_header

_KEYS: Final = ("general.base_model.0.repo_url", "general.base_model.0.name", "general.name")
"""The first that both files have counts. Converters write them from the folder and the model card."""
_SHOWN_MAX: Final = 100


def other_model_named(model: Path, projector: Path) -> str:
    """What to warn of where the headers name different models: rows of an equal width fit, and answers are
    nonsense. Empty where they agree or do not say. Blocking."""
    try:
        with model.open("rb") as one, projector.open("rb") as other:
            return difference(read_header(one), read_header(other))
    except (OSError, BadModel):
        return ""


def difference(model: GgufHeader, projector: GgufHeader) -> str:
    for key in _KEYS:
        ours, theirs = _text(model, key), _text(projector, key)
        if ours and theirs:
            if _same(ours) == _same(theirs):
                return ""
            return f"{key} of the projector is {theirs[:_SHOWN_MAX]!r}, of the model {ours[:_SHOWN_MAX]!r}"
    return ""


def _text(header: GgufHeader, key: str) -> str:
    value = header.keys[key].value if key in header.keys else None
    return value if isinstance(value, str) else ""


def _same(name: str) -> str:
    """Letters and digits, in lower case."""
    return "".join(letter for letter in name.lower() if letter.isalnum())
