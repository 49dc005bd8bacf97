"""Breaks lines between words while the text is still coming.

A terminal breaks them in the middle of words. Waiting for whole lines would hide that the text streams, so
only the word at the end is held back, until what follows it shows that it is complete.
"""

from __future__ import annotations

import re

from rich.cells import cell_len


class WordWrap:
    """`feed` returns what can be shown now, `finish` the rest. Lines get no longer than `width` cells,
    unless a single word is; leading spaces (of code, of lists) and line ends are kept."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._held = ""

    def feed(self, text: str) -> str:
        *complete, self._held = re.split(r"(?<=\n)|(?<=\S)(?=[^\S\n])", self._held + text)
        return "".join(map(self._place, complete))

    def finish(self) -> str:
        held, self._held = self._held, ""
        return self._place(held)

    def _place(self, piece: str) -> str:
        """`piece`: spaces and one word, or with a line end as its last character."""
        word, newline = piece.removesuffix("\n"), piece.endswith("\n")
        if self._column and self._column + cell_len(word) > self._width:
            word = "\n" + word.lstrip(" ")
            self._column = 0
        self._column = 0 if newline else self._column + cell_len(word.lstrip("\n"))
        return word + "\n" * newline
