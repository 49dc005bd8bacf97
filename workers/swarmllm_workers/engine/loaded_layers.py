"""The layer ranges of a model that this worker holds, and the segments that run them.

What is *held* is a set of ranges, what runs is a set of segments that covers them. Usually they are the
same; they differ after a request asks for a part of a held range: libllama cannot run part of a loaded
model, so the segment is cut at the request's boundaries, into parts over the same pages of its file
(`shared_weights.py`). While other requests have rows in it the old one stays until the last of them has left
("retired"), so nobody's KV is lost. Only so many parts are made (`PARTS_MAX`): for another one, two that
nobody uses become one again.

What changes the segments takes long, and is an operation (`operation.py`): opening, cutting and closing are
its parts, which may run beside decode steps; the lists of segments change between two steps. Operations come
one after the other. Between two parts of one, requests come and go: it looks at the segments anew then.

The whole model as one range is the original file, and other ranges run straight from its pages
(`segment_maker.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

from swarmllm_workers.cache.prefix_cache import PrefixCache
from swarmllm_workers.engine.arranged_weights import arranged
from swarmllm_workers.engine.memory import Footprint, Memory, around, weighing
from swarmllm_workers.engine.operation import Operation, complete
from swarmllm_workers.engine.ranges import Cuts, Range, find_path, join, merge, subtract
from swarmllm_workers.engine.segment import Segment
from swarmllm_workers.engine.segment_file import layer_of
from swarmllm_workers.engine.segment_maker import LoadProgress, SegmentMaker
from swarmllm_workers.errors import CallError

PARTS_MAX: Final = 8
"""Segments beyond those that held ranges need, made because requests asked for parts of them. Each has a work
space of its own, and a row that runs through several takes longer."""


class LoadedLayers:
    """The layers that this worker holds of its model. Raises CallError and nothing else."""

    def __init__(
        self,
        name: str,
        n_layers: int,
        cuts: Cuts,
        footprint: Footprint,
        maker: SegmentMaker,
        kept: PrefixCache,
    ) -> None:
        """`kept`: rows in the segments that no request has. They are dropped before segments change."""
        self._name, self._n_layers = name, n_layers
        self._cuts, self._footprint, self._maker = cuts, footprint, maker
        self._kept = kept
        self._held: list[Range] = []
        self._segments: list[Segment] = []
        self._retired: list[Segment] = []

    @property
    def ranges(self) -> tuple[Range, ...]:
        return tuple(self._held)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._segments)

    @property
    def weights_bytes(self) -> int:
        """The bytes of the weights. Pages that several segments share count once."""
        return sum(segment.weights_bytes for segment in weighing(self.open))

    def uses(self, tensor: str) -> bool:
        """Whether this matrix of the model is multiplied with here; of the embedding, whether it would be if
        it were the output matrix."""
        layer = layer_of(tensor)
        return any(
            segment.has_head if layer is None else segment.start <= layer < segment.end
            for segment in self._segments
        )

    def load(self, start: int, end: int, progress: LoadProgress | None = None) -> None:
        """Run `loading` at once."""
        complete(self.loading(start, end, progress))

    def loading(self, start: int, end: int, progress: LoadProgress | None = None) -> Operation[None]:
        """Hold [start, end) too. Raises CallError cannot_cut, bad_model, out_of_memory; holds what it held
        then."""
        self._cuts.check(start, end)
        missing = subtract([(start, end)], self._held)
        yield from self._predicting(self._cuts.pieces(missing))
        self._footprint.refuse(self._cuts.pieces(missing), self.open)
        opened = yield partial(self._maker.open_all, self._cuts.pieces(missing), progress)
        self._segments += opened
        self._held = merge([*self._held, *missing])
        yield from self._settling()

    def rearranging(self, skip_ratio: float, progress: LoadProgress | None = None) -> Operation[None]:
        """Have the whole model, which is held, in one piece (0) or so that guesses can leave out this share
        of its layers. Rows of running requests stay where they are until those are over. Raises CallError
        where there is no room for that; then all is as before, loaded again at its next use."""
        self._kept.clear()
        whole, before, old = [(0, self._n_layers)], self._cuts.skip_ratio, self._segments
        is_idle = all(segment.is_idle for segment in old)
        if is_idle:
            yield from self.closing(old)
        self._cuts.leave_out(skip_ratio)
        try:
            yield from self._predicting(self._cuts.pieces(whole))
            if not is_idle:
                self._footprint.refuse(self._cuts.pieces(whole), self.open)
            opened = yield partial(self._maker.open_all, self._cuts.pieces(whole), progress)
        except CallError:
            self._cuts.leave_out(before)
            raise
        yield from self._retiring(old)
        self._segments += opened
        yield from self._settling()

    @property
    def retired(self) -> tuple[Segment, ...]:
        return tuple(self._retired)

    @property
    def open(self) -> list[Segment]:
        return [*self._segments, *self._retired]

    @property
    def memory(self) -> Memory:
        """The predicted memory of the segments."""
        return self._footprint.of(self.open)

    def unload(self, start: int, end: int, progress: LoadProgress | None = None) -> None:
        """Run `unloading` at once."""
        complete(self.unloading(start, end, progress))

    def unloading(self, start: int, end: int, progress: LoadProgress | None = None) -> Operation[None]:
        """Hold [start, end) no longer. Rows of running requests in affected segments are lost. What remains
        of a segment is cut anew; the rest of it stays held when that fails and is loaded at its next
        use. `progress`: bytes given back and read anew."""
        if not any(s < end and start < e for s, e in self._held):
            raise CallError("not_loaded", f"layers {start}:{end} are not held", "start")
        self._kept.clear()
        remaining = subtract(self._held, [(start, end)])
        for piece in remaining:
            self._cuts.check(*piece)
        affected = [s for s in self.open if s.start < end and start < s.end]
        pieces = subtract([(s.start, s.end) for s in affected if s in self._segments], [(start, end)])
        done_bytes = sum(segment.weights_bytes for segment in affected)
        again = self._cuts.pieces(pieces)
        total_bytes = done_bytes + self._footprint.weights_bytes(again)
        tell = progress or (lambda done, total: None)
        self._held = remaining
        yield from self.closing(affected)
        tell(done_bytes, total_bytes)
        for piece in again:
            segment = yield partial(self._maker.open, *piece)
            self._segments.append(segment)
            done_bytes += segment.weights_bytes
            tell(min(done_bytes, total_bytes), total_bytes)
        yield from self._settling()

    def filling(self) -> Operation[None]:
        """Have memory behind the cells of all segments: after a load or a cut that somebody waits for."""
        for segment in self.segments:
            yield segment.fill_in

    def whole_file(self) -> Path:
        """The GGUF with everything in it. Nothing may be loaded."""
        return self._maker.whole_file()

    def find_segments(self, start: int, end: int) -> tuple[Segment, ...] | None:
        """Those that a request which begins now runs [start, end) in; None where those have to be made first
        (`cutting`). Raises CallError not_loaded, cannot_cut."""
        self._cuts.check(start, end)
        missing = subtract([(start, end)], self._held)
        if missing:
            held = ", ".join(f"{s}:{e}" for s, e in self._held) or "nothing"
            raise CallError("not_loaded", f"layers {join(missing)} are not loaded (held: {held})", "start")
        path = find_path(self._segments, start, end)
        return tuple(path) if path is not None else None

    def cutting(self, start: int, end: int, *, if_idle: bool = False) -> Operation[None]:
        """Have segments that run exactly [start, end), which is held. `if_idle`: not where that moves rows,
        of requests or kept ones, or would make too many parts. Raises as `find_segments` and `loading` do."""
        if self.find_segments(start, end) is not None:
            return
        if if_idle and not self._is_simple(start, end):
            return
        yield from self._filling()
        if self.find_segments(start, end) is None:
            yield from self._cutting_at(start, end)

    def _predicting(self, pieces: Sequence[Range]) -> Operation[None]:
        """Find out what they will take, beside steps: asked again, it is known."""
        yield partial(self._footprint.predicted, pieces)

    def _is_simple(self, start: int, end: int) -> bool:
        reaching = [s for s in self._segments if s.start < start < s.end or s.start < end < s.end]
        n_more = sum(s.start < at < s.end for s in reaching for at in {start, end})
        return len(self._segments) + n_more <= self._n_max and all(each.is_idle for each in reaching)

    @property
    def _n_max(self) -> int:
        return len(self._cuts.pieces(self._held)) + PARTS_MAX

    def _filling(self) -> Operation[None]:
        """Load what is held and has lost its segment, for want of room at the time."""
        gaps = subtract(self._held, [(segment.start, segment.end) for segment in self._segments])
        if gaps:
            yield from self._predicting(self._cuts.pieces(gaps))
            self._footprint.refuse(self._cuts.pieces(gaps), self.open)
            opened = yield partial(self._maker.open_all, self._cuts.pieces(gaps))
            self._segments += opened

    def _cutting_at(self, start: int, end: int) -> Operation[None]:
        """Replace segments that reach over `start` or `end` by their parts. Raises CallError out_of_memory,
        having changed nothing, where the parts do not fit beside what stays."""
        yield from self._joining(start, end)
        cut = [s for s in self._segments if s.start < start < s.end or s.start < end < s.end]
        staying = [segment for segment in self._segments if segment not in cut]
        missing: list[Range] = []
        for segment in cut:
            inside = [boundary for boundary in (start, end) if segment.start < boundary < segment.end]
            for piece in self._cuts.pieces(pairwise([segment.start, *inside, segment.end])):
                if find_path(staying, *piece) is None and piece not in missing:
                    missing.append(piece)
        yield from self._predicting(missing)
        idle = [segment for segment in cut if segment.is_idle]
        sharing = [segment for segment in cut if segment not in idle and self._maker.shares(segment)]
        self._footprint.refuse(missing, self.open, idle, sharing)
        self._kept.clear()
        self._retired += [segment for segment in cut if segment not in idle]
        self._segments = staying
        with arranged.keeping():
            yield from self.closing(idle)
            for piece in missing:
                segment = yield partial(self._maker.open, *piece, within=around(piece, cut))
                self._segments.append(segment)
        yield from self._settling()

    def _joining(self, start: int, end: int) -> Operation[None]:
        """Join neighbours that nobody uses, those first that were asked for longest ago, until cuts at
        `start` and `end` make no more parts than there may be. Raises CallError no_room where requests run
        in all."""
        while True:
            n_more = sum(s.start < at < s.end for s in self._segments for at in {start, end})
            if len(self._segments) + n_more <= self._n_max:
                return
            self._kept.clear()
            pair = self._cuts.unused_neighbours(self._segments, (start, end))
            if pair is None:
                raise CallError(
                    "no_room",
                    f"requests run in {len(self._segments)} parts of {self._name}; "
                    f"there may be {self._n_max}",
                )
            first, second = pair
            with arranged.keeping():
                yield from self.closing([first, second])
                joined = yield partial(self._maker.open, first.start, second.end, within=first)
                self._segments.append(joined)

    def _settling(self) -> Operation[None]:
        running = [*self._segments, *(each for each in self._retired if self._maker.maps_source(each))]
        yield partial(self._maker.settle, running)

    def _retiring(self, segments: list[Segment]) -> Operation[None]:
        """Nobody begins in these any more."""
        segments = [segment for segment in segments if not segment.is_closed]
        self._segments = [segment for segment in self._segments if segment not in segments]
        self._retired += [segment for segment in segments if not segment.is_idle]
        yield from self.closing([segment for segment in segments if segment.is_idle])

    def closing(self, segments: list[Segment]) -> Operation[None]:
        """Close these segments and give their memory back. Nobody finds them any more."""
        self._set_aside(segments)
        for segment in segments:
            yield segment.close
        if any(self._maker.maps_source(segment) for segment in segments) and self._segments:
            yield from self._settling()

    def _set_aside(self, segments: list[Segment]) -> None:
        for segment in segments:
            for each in (segment, *segment.apart_segments):
                each.is_closed = True
        self._segments = [segment for segment in self._segments if not segment.is_closed]
        self._retired = [segment for segment in self._retired if not segment.is_closed]

    def dismiss_idle(self) -> list[Segment]:
        """The retired segments that no request uses any more, for `closing`."""
        idle = [segment for segment in self._retired if segment.is_idle]
        self._set_aside(idle)
        return idle
