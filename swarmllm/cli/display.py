"""How things look in a terminal: numbers with units, plain tables, and text of foreign origin made
harmless.

Names of models and nodes come from other machines, so everything goes through `safe`: control characters
(which could move the cursor or rename the window) are shown as what they are, and nothing is read as rich's
markup.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarmllm.cli.chat_stream import Finished, RouteStage

UNBOUNDED_WIDTH = 10_000


def make_console(*, stderr: bool = False) -> Console:
    """Never wraps what does not go to a terminal: a file or a pipe has no width."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else UNBOUNDED_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def safe(text: object, *, newlines: bool = False) -> str:
    """Text in which nothing steers the terminal; `newlines` keeps line ends and tabs."""
    kept = "\n\t" if newlines else ""
    return "".join(
        char if char in kept or (char.isprintable() and not _is_bidi(char)) else repr(char)[1:-1]
        for char in str(text)
    )


def _is_bidi(char: str) -> bool:
    return "\u202a" <= char <= "\u202e" or "\u2066" <= char <= "\u2069"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> Table:
    """A table without boxes; the columns named in `right` are aligned to the right, as numbers should be."""
    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        grid.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(cell if isinstance(cell, Text) else Text(safe(cell)) for cell in row))
    return grid


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def size(n_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=int(seconds)))


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def short_id(identifier: str) -> str:
    """The end of a peer id or the start of a model id: enough to tell a handful apart."""
    return identifier if len(identifier) <= 12 else f"…{identifier[-8:]}"


def route_table(route: Sequence[RouteStage]) -> Table:
    numbers = ("compute ms/token", "node ms/token", "network ms/token", "prefill ms")
    rows = (
        (
            stage.nickname or "-",
            short_id(stage.node_id),
            stage.layers,
            milliseconds(stage.compute_ms_per_token),
            milliseconds(stage.overhead_ms_per_token),
            milliseconds(stage.network_ms_per_token),
            milliseconds(stage.prefill_ms),
        )
        for stage in route
    )
    return table(("node", "id", "layers", *numbers), rows, right=numbers)


def summary(finished: Finished) -> str:
    """One line under an answer: how long, how fast, over how many nodes."""
    parts = [f"{finished.n_generated} tokens"]
    if finished.decode_tokens_per_s:
        parts.append(f"{finished.decode_tokens_per_s:.0f} tokens/s")
    if finished.prefill_ms is not None:
        parts.append(f"prefill of {finished.n_prompt_tokens} tokens {finished.prefill_ms:.0f} ms")
    n_nodes = len({stage.node_id for stage in finished.route})
    if n_nodes:
        parts.append(f"{n_nodes} node{'s' if n_nodes > 1 else ''}")
    if finished.finish_reason == "length":
        parts.append("cut off at max_tokens")
    return " · ".join(parts)
