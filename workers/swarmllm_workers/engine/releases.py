"""Which releases of llama-cpp-python were tried here, and what one of them does otherwise than the newest."""

from __future__ import annotations

import re
from typing import Final

import llama_cpp

TRIED: Final = ("0.3.36", "0.3.35")
"""With which the tests of workers are run. The first is the one that `pyproject.toml` pins."""
_LISTS_WINDOWS: Final = (0, 3, 36)
_LISTED_BEFORE: Final = frozenset({"mellum"})


def release() -> str:
    """Of the llama-cpp-python that is installed here."""
    return str(llama_cpp.__version__)


def is_tried() -> bool:
    return release() in TRIED


def reads_window_lists(architecture: str) -> bool:
    """Whether libllama reads a list of the layers that attend to a window, of an architecture that the table
    has a period of. Before 0.3.36 it reads a number alone there, and overlooks a list."""
    number = tuple(int(part) for part in re.findall(r"\d+", release())[:3])
    return number >= _LISTS_WINDOWS or architecture in _LISTED_BEFORE
