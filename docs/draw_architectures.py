"""Draws the generated part of docs/architectures.md from the table of architectures:
`python docs/draw_architectures.py`.

What a row means is said once per column, here; which rows there are is read from
`swarmllm_proto.architectures`, so the page cannot promise a cut that the code refuses; tests/test_docs.py
compares.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "proto"))

from swarmllm_proto.architectures import ARCHITECTURES, Architecture  # noqa: E402

PAGE = ROOT / "docs" / "architectures.md"
MARKER = "<!-- From here on drawn from the table by docs/draw_architectures.py. -->"


def boundaries(row: Architecture) -> str:
    """Where the layers may be cut, before a model's metadata is known."""
    if row.whole_reason:
        return "nowhere"
    if row.recurrent_period:
        return f"at multiples of `full_attention_interval`, else {row.recurrent_period}"
    if row.recurrent_where_zero:
        return "where both parts have both kinds of layers"
    if row.needs_window:
        return "where every part has a layer with a sliding window"
    steps = [str(row.cut_alignment)] if row.cut_alignment > 1 else []
    steps += [f"`{row.alignment_key}`"] if row.alignment_key else []
    steps += [f"`{row.deepstack_key}` + 1"] if row.deepstack_key else []
    return f"at multiples of {' and '.join(steps)}" if steps else "anywhere"


def needs(row: Architecture) -> Iterator[str]:
    if row.sliding_window_period:
        yield f"which layers have a sliding window is written out (period {row.sliding_window_period})"
    if row.recurrent_period:
        yield "the recurrent layers are listed"
    if row.feeds_tokens:
        yield f"fed by token, with the hidden state written over `{row.input_tensor}`"
    elif row.input_tensor:
        yield f"the hidden state is written over `{row.input_tensor}`"
    if row.scales_tokens_only:
        yield "embeddings are scaled outside of libllama"
    if row.tap != "l_out":
        yield f"read at `{row.tap}`"
    for key, number in row.reset_keys:
        yield f"`{key}` is {number:g} after the first part"
    for key in dict.fromkeys(entry.key for entry in row.written_out):
        yield f"`{key}` is written out"
    for n_layers, name in row.stand_ins:
        yield f"with {n_layers} layers its parts are of the architecture {name}"
    for key in row.whole_if_zero:
        yield f"whole where `{key}` is 0"
    if row.whole_n_layers:
        yield f"whole with {_numbers(row.whole_n_layers)} layers"
    if row.scaled_by_width_n_layers:
        yield f"with {_numbers(row.scaled_by_width_n_layers)} layers the scale of queries is put right"
    if row.avoided_n_layers:
        yield f"parts of {_numbers(row.avoided_n_layers)} layers are loaded as two"


def _numbers(numbers: frozenset[int]) -> str:
    return " or ".join(str(number) for number in sorted(numbers))


def table() -> str:
    plain = [name for name, row in sorted(ARCHITECTURES.items()) if row == Architecture(name)]
    lines = [
        f"Cut anywhere, with nothing to mind ({len(plain)}): {', '.join(plain)}.",
        "",
        "| architecture | cut | what its parts need |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | {boundaries(row)} | {'; '.join(needs(row)) or '-'} |"
        for name, row in sorted(ARCHITECTURES.items())
        if name not in plain
    ]
    return "\n".join(lines) + "\n"


def page_with_table() -> str:
    head, _, _ = PAGE.read_text().partition(MARKER)
    return f"{head}{MARKER}\n\n{table()}"


if __name__ == "__main__":
    PAGE.write_text(page_with_table())
