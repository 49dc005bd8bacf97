"""Layer ranges [start, end): sums of them, paths through segments that cover them, and where a model may be
cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from swarmllm_proto.architectures import ARCHITECTURES, cut_rule, generic
from swarmllm_workers.engine import releases
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.segment import Segment
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import GgufFile

Range: TypeAlias = tuple[int, int]


def merge(ranges: Sequence[Range]) -> list[Range]:
    """The same layers in the fewest ranges, in order."""
    merged: list[Range] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def subtract(ranges: Sequence[Range], removed: Sequence[Range]) -> list[Range]:
    """The layers of `ranges` that are not in `removed`, in order."""
    remaining = merge(ranges)
    for cut_start, cut_end in removed:
        parts: list[Range] = []
        for start, end in remaining:
            parts += [(start, min(end, cut_start)), (max(start, cut_end), end)]
        remaining = [(start, end) for start, end in parts if start < end]
    return remaining


def join(ranges: Sequence[Range]) -> str:
    return ", ".join(f"{start}:{end}" for start, end in ranges)


@dataclass(frozen=True)
class Route:
    """Segments that run [start, end), one after the other."""

    start: int
    end: int
    segments: tuple[Segment, ...]

    @property
    def is_closed(self) -> bool:
        for segment in self.segments:  # noqa: SIM110 (between two decode steps, a generator is a detour)
            if segment.is_closed:
                return True
        return False


def find_path(segments: Sequence[Segment], start: int, end: int) -> list[Segment] | None:
    """Segments that cover [start, end) exactly, the longest first where there is a choice."""
    if start == end:
        return []
    candidates = [segment for segment in segments if segment.start == start and segment.end <= end]
    for segment in sorted(candidates, key=lambda s: -s.end):
        rest = find_path(segments, segment.end, end)
        if rest is not None:
            return [segment, *rest]
    return None


def periodic_windows(source: GgufFile, n_layers: int) -> list[bool]:
    """Which layers attend to a window, where this release of libllama has to be told by a period; else []."""
    name = source.text("general.architecture")
    row = ARCHITECTURES.get(name)
    if row is None or not row.sliding_window_period or releases.reads_window_lists(name):
        return []
    return row.windowed(n_layers, source.number, source.numbers)


def overlooks_windows(source: GgufFile, n_layers: int) -> bool:
    """Whether libllama takes other layers of this file for ones that attend to a window than the file says:
    it has a list of them, which this release does not read."""
    windowed = periodic_windows(source, n_layers)
    row = ARCHITECTURES.get(source.text("general.architecture"))
    return row is not None and windowed != [] and windowed != row.windowed(n_layers, source.number, _no_list)


def _no_list(_key: str) -> None:
    return None


class Cuts:
    """Where one model may be cut, which segments a range of its layers becomes, and which layers guesses
    leave out."""

    def __init__(self, source: GgufFile, name: str, n_layers: int, settings: EngineSettings) -> None:
        architecture = source.text("general.architecture")
        self._name = name
        self._n_layers = n_layers
        self.skip_ratio = 0.0
        lists_windows = releases.reads_window_lists(architecture)
        self.rule = cut_rule(
            architecture,
            n_layers,
            source.number,
            source.numbers,
            settings.checked_unit,
            lists_windows=lists_windows,
        )
        self.architecture = ARCHITECTURES.get(architecture)
        """None where nothing is known; then the model runs whole."""
        if self.architecture is None and self.rule.cut_alignment:
            self.architecture = generic(architecture)
        self._periodic = periodic_windows(source, n_layers)
        self._overlooks_list = overlooks_windows(source, n_layers)
        self.skipped: frozenset[Range] = frozenset()
        """Segments of the whole model that guesses leave out (`swift.py`)."""

    @property
    def is_fed_tokens(self) -> bool:
        return self.architecture is not None and self.architecture.feeds_tokens

    def leave_out(self, skip_ratio: float) -> None:
        """Split the whole model into pieces from now on, so that guesses can leave out this share of its
        layers. 0: one piece."""
        self.skip_ratio = skip_ratio
        self.skipped = frozenset()

    def check(self, start: int, end: int) -> None:
        """Raises CallError cannot_cut if the model may not be cut there."""
        if not 0 <= start < end <= self._n_layers:
            field = "start" if start >= min(end, self._n_layers) else "end"
            raise CallError(
                "cannot_cut", f"layers {start}:{end} of a model of {self._n_layers} layers", field
            )
        alignment = self.rule.cut_alignment
        if (start, end) == (0, self._n_layers):
            if alignment == 0 and self._overlooks_list:
                raise CallError(
                    "cannot_cut",
                    f"{self._name} cannot be run: this release of libllama overlooks which of its layers "
                    "attend to a window",
                    "start",
                )
            return
        if alignment == 0:
            raise CallError("cannot_cut", f"{self._name} runs whole only: {self.rule.whole_reason}", "start")
        for field, boundary in (("start", start), ("end", end)):
            if boundary % alignment and boundary != self._n_layers:
                raise CallError(
                    "cannot_cut", f"{self._name} can be cut at multiples of {alignment} only", field
                )

    def pieces(self, ranges: Iterable[Range]) -> list[Range]:
        """The ranges, those in several pieces that no single segment may hold."""
        if self.architecture is None or self.rule.cut_alignment == 0:
            return list(ranges)
        return [
            piece
            for start, end in ranges
            for piece in (
                self._whole_pieces() if (start, end) == (0, self._n_layers) else self._pieces(start, end)
            )
        ]

    def unused_neighbours(
        self, segments: Sequence[Segment], boundaries: Sequence[int]
    ) -> tuple[Segment, Segment] | None:
        """Two parts of one file that have no rows and may be one segment, because they do not meet at one of
        these boundaries: those that were asked for longest ago. None: there are none."""
        idle = sorted((each for each in segments if each.is_idle), key=lambda each: each.start)
        pairs = [
            (first, second)
            for first, second in pairwise(idle)
            if first.end == second.start not in boundaries
            and (first.path, first.file_layers) == (second.path, second.file_layers)
            and self.pieces([(first.start, second.end)]) == [(first.start, second.end)]
        ]
        return min(pairs, key=lambda pair: max(segment.n_route for segment in pair), default=None)

    def _pieces(self, start: int, end: int) -> tuple[Range, ...]:
        assert self.architecture is not None
        return self.architecture.pieces(start, end, self.rule.cut_alignment, self._periodic)

    def _whole_pieces(self) -> Sequence[Range]:
        alignment = self.rule.cut_alignment
        if self._overlooks_list:  # as one piece it would be the file, as libllama reads it
            return (*self._pieces(0, alignment), *self._pieces(alignment, self._n_layers))
        pieces, skipped = plan(self._n_layers, alignment, self.skip_ratio)
        if any(self._pieces(*piece) != (piece,) for piece in pieces):
            return ((0, self._n_layers),)
        self.skipped = skipped
        return pieces


def plan(n_layers: int, cut_alignment: int, skip_ratio: float) -> tuple[tuple[Range, ...], frozenset[Range]]:
    """The pieces in which to load a model, and those of them that guesses leave out. One piece if nothing can
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
