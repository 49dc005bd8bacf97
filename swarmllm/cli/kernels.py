"""What workers measured of their matrix products, as lines for people (`swarmllm doctor` and `bench`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

NO_END = 2**31 - 1
"""What workers say for any larger number of rows."""


def kernel_lines(choices: Sequence[dict[str, Any]]) -> Iterator[str]:
    """For each type and row length one line: rows, the way that was chosen, and its time next to that of the
    other side, per product with a slice of a matrix."""
    for (type_, k, n_threads), each in groupby(
        choices, key=lambda choice: (choice["type"], choice["k"], choice["n_threads"])
    ):
        threads = "1 thread" if n_threads == 1 else f"{n_threads} threads"
        yield f"{type_}, rows of {k}, {threads}: {'; '.join(map(_class, each))}"


def _class(choice: dict[str, Any]) -> str:
    first, last = choice["first_rows"], choice["last_rows"]
    rows = f"{first}" if first == last else f"{first}+" if last == NO_END else f"{first}-{last}"
    ours = f"{choice['ours_ns'] / 1000:.0f}" if choice["ours_ns"] else "not usable"
    return f"{rows} {choice['chosen']} (us: ggml {choice['ggml_ns'] / 1000:.0f}, ours {ours})"
