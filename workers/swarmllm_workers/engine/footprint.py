"""What the segments of a model take, and whether more fit beside them. Pages of a file that several segments
have count once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from swarmllm_workers.engine.gguf_file import GgufFile
from swarmllm_workers.engine.memory import Memory, predict, refuse_beside
from swarmllm_workers.engine.ranges import Range, join, merge
from swarmllm_workers.engine.segment import EngineSettings, Segment, exact_settings, rows_of_exact_batch


class Footprint:
    def __init__(self, source: GgufFile, name: str, n_layers: int, settings: EngineSettings) -> None:
        self._source = source
        self._name = name
        self._n_layers = n_layers
        self._settings = settings

    def predicted(self, pieces: Iterable[Range]) -> Memory:
        """Of segments of these ranges that share nothing."""
        return predict(self._source, self._n_layers, pieces, self._settings)

    def of(self, segments: Sequence[Segment]) -> Memory:
        """As predicted."""
        alone = self.predicted(_ranges(segments))
        return replace(alone, weights_bytes=self.predicted(_ranges(weighing(segments))).weights_bytes)

    def apart(self, pieces: Iterable[Range], n_rows: int) -> Memory:
        """Of segments of these ranges for one exact request of so many rows, over weights that are there."""
        settings = exact_settings(self._settings, n_rows)
        memory = predict(
            self._source, self._n_layers, pieces, settings, n_batch=rows_of_exact_batch(settings)
        )
        return replace(memory, weights_bytes=0)

    def refuse_apart(self, pieces: Sequence[Range], n_rows: int, held: Memory) -> None:
        """Raises CallError out_of_memory where there is no room for those."""
        what = f"cells for an exact request of {n_rows} rows of {self._name}"
        refuse_beside(self.apart(pieces, n_rows), what, held, Memory(), self._settings)

    def refuse(
        self,
        pieces: Sequence[Range],
        held: Sequence[Segment],
        leaving: Sequence[Segment] = (),
        sharing: Sequence[Segment] = (),
    ) -> None:
        """Raises CallError out_of_memory where pieces do not fit beside the segments that are `held`.
        `leaving`: those of them that are closed before. `sharing`: those that stay, and of which pieces have
        the pages."""
        new = [piece for piece in pieces if not any(_holds(segment, piece) for segment in sharing)]
        needed = replace(self.predicted(pieces), weights_bytes=self.predicted(new).weights_bytes)
        what = f"layers {join(merge(pieces))} of {self._name}"
        refuse_beside(needed, what, self.of(held), self.of(leaving), self._settings)


def weighing(segments: Sequence[Segment]) -> list[Segment]:
    """Those whose weights are not pages of another one's, too."""
    found: list[Segment] = []
    for each in sorted(segments, key=lambda segment: segment.start - segment.end):
        others = [other for other in found if other.is_shared and other.path == each.path]
        if not each.is_shared or not any(_holds(other, (each.start, each.end)) for other in others):
            found.append(each)
    return found


def around(piece: Range, segments: Sequence[Segment]) -> Segment:
    """The one that has these layers."""
    return next(segment for segment in segments if _holds(segment, piece))


def _holds(segment: Segment, piece: Range) -> bool:
    return segment.start <= piece[0] and piece[1] <= segment.end


def _ranges(segments: Iterable[Segment]) -> list[Range]:
    return [(segment.start, segment.end) for segment in segments]
