"""Which layers a model leaves out when it guesses for itself (`swift.py`): a pure function."""

from __future__ import annotations

from collections.abc import Sequence

from swarmllm_workers.engine.ranges import Range


def plan(n_layers: int, cut_alignment: int, skip_ratio: float) -> tuple[tuple[Range, ...], frozenset[Range]]:
    """The pieces to load a model in, and those of them that guesses leave out; one piece where nothing can
    be left out."""
    units = [(at, min(at + cut_alignment, n_layers)) for at in range(0, n_layers, cut_alignment)]
    inner = units[1 : -2 if cut_alignment == 1 else -1]
    n_skipped = min(round(skip_ratio * n_layers / cut_alignment), len(inner))
    if n_skipped < 1:
        return ((0, n_layers),), frozenset()
    chosen = {inner[(2 * i + 1) * len(inner) // (2 * n_skipped)] for i in range(n_skipped)}
    pieces = _joined(units, chosen)
    return tuple(pieces), frozenset(p for p in pieces if any(p[0] <= unit[0] < p[1] for unit in chosen))


def _joined(units: Sequence[Range], chosen: set[Range]) -> list[Range]:
    """Neighbours that share a fate as one piece."""
    pieces: list[Range] = []
    previous: bool | None = None
    for unit in units:
        if (unit in chosen) == previous:
            pieces[-1] = (pieces[-1][0], unit[1])
        else:
            pieces.append(unit)
        previous = unit in chosen
    return pieces
