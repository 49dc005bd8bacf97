"""Texts of native code for people who did not build it: `/build/llama.cpp/ggml.c:12` becomes `ggml.c:12`."""

from __future__ import annotations

import re
from typing import Final

_SOURCE: Final = re.compile(r"[^\s:'\"(]*/([\w.+-]+\.(?:c|cc|cpp|cu|cuh|m|h|hpp|inl|py))(?=[:'\",)\s]|$)")


def without_folders(text: str) -> str:
    """The text with every source file named without the folders that it was built in."""
    return _SOURCE.sub(r"\1", text)
