"""Formats terminal output: numbers with units, plain tables, wrapped text, escaped foreign text.

Names of models and nodes come from other machines, so everything goes through `safe`: control characters
(which could move the cursor or rename the window) are shown as what they are, and nothing is read as rich's
markup.

A terminal breaks them in the middle of words. Waiting for whole lines would hide that the text streams, so
only the word at the end is held back, until what follows it shows that it is complete.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import groupby
from typing import Any

import click
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from swarmllm.cli.chat.stream import Finished

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


def departed(left: Sequence[dict[str, Any]], now: float) -> Table:
    """The nodes that have gone lately, as the node's `left` has them. `now`: seconds since the epoch."""
    rows = (
        (
            node["nickname"] or "-",
            short_id(node["node_id"]),
            f"{duration(max(0, int(now - node['left_at'])))} ago",
            "; ".join(f"{model['name']} {', '.join(model['layers'])}" for model in node["models"]) or "-",
        )
        for node in left
    )
    return table(("left", "id", "when", "held"), rows)


def route_table(finished: Finished) -> Table:
    """The route of an answer, with the guesses of a pipeline under it where there were any."""
    numbers = ("compute ms/token", "node ms/token", "network ms/token", "bytes/token", "prefill ms")
    rows = (
        (
            stage.nickname or "-",
            short_id(stage.node_id),
            stage.layers,
            milliseconds(stage.compute_ms_per_token),
            milliseconds(stage.overhead_ms_per_token),
            milliseconds(stage.network_ms_per_token),
            "-" if stage.bytes_per_token is None else f"{stage.bytes_per_token:,}",
            milliseconds(stage.prefill_ms),
        )
        for stage in finished.route
    )
    shown = table(("node", "id", "layers", *numbers), rows, right=numbers)
    if guesses := _guesses(finished):
        shown.caption, shown.caption_justify = guesses, "left"
    return shown


def _guesses(finished: Finished) -> str:
    """ "": there were none."""
    guesses = finished.swarm.get("guesses") or {}
    return f"{guesses['right']} of {guesses['checked']} guesses right" if guesses.get("checked") else ""


def looked(finished: Finished) -> list[str]:
    """A line for each picture and sound of the conversation: who encoded it."""
    return [
        f"{name} {number}: {each['rows']} rows, "
        + (
            "encoded for an earlier question"
            if each["kept"]
            else f"encoded by {each['nickname'] or short_id(each['node'])} in {each['encode_ms']:.0f} ms"
        )
        for name in ("picture", "sound")
        for number, each in enumerate(finished.swarm.get(f"{name}s", ()), start=1)
    ]


def summary(finished: Finished) -> str:
    """One line under an answer: how long, how fast, over how many nodes."""
    parts = [f"{finished.n_generated} tokens"]
    if finished.decode_tokens_per_s:
        parts.append(f"{finished.decode_tokens_per_s:.0f} tokens/s")
    if finished.prefill_ms is not None:
        parts.append(f"prefill of {finished.n_prompt_tokens} tokens {finished.prefill_ms:.0f} ms")
    if guesses := _guesses(finished):
        parts.append(guesses)
    n_nodes = len({stage.node_id for stage in finished.route})
    if n_nodes:
        parts.append(f"{n_nodes} node{'s' if n_nodes > 1 else ''}")
    if finished.finish_reason == "length":
        parts.append("cut off at max_tokens")
    return " · ".join(parts)


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


NO_END = 2**31 - 1
"""What workers say for any larger number of rows."""


def kernel_lines(choices: Sequence[dict[str, Any]]) -> Iterator[str]:
    """For each type and row length one line: rows, the way that was chosen, and its time next to that of the
    other side, per product with a slice of a matrix. Attention has a line by itself."""
    for (type_, k, n_threads), each in groupby(
        choices, key=lambda choice: (choice["type"], choice["k"], choice["n_threads"])
    ):
        threads = "1 thread" if n_threads == 1 else f"{n_threads} threads"
        what = "keys" if type_ == "attention" else "rows"
        yield f"{type_}, {what} of {k}, {threads}: {'; '.join(map(_class, each))}"


def _class(choice: dict[str, Any]) -> str:
    first, last = choice["first_rows"], choice["last_rows"]
    rows = f"{first}" if first == last else f"{first}+" if last == NO_END else f"{first}-{last}"
    ours = f"{choice['ours_ns'] / 1000:.0f}" if choice["ours_ns"] else "not usable"
    if not choice["ggml_ns"]:
        return f"{rows} {choice['chosen']} (ours has other bits here)"
    return f"{rows} {choice['chosen']} (us: ggml {choice['ggml_ns'] / 1000:.0f}, ours {ours})"
