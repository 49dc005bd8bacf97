"""One model and the layer ranges of it that this worker holds.

What is *held* is a set of ranges, what runs is a set of segments that covers them. Usually they are the
same; they differ after a request asks for a part of a held range: libllama cannot run part of a loaded
model, so the segment is cut at the request's boundaries, into parts over the same pages of its file
(`shared_weights.py`). While other requests have rows in it the old one stays until the last of them has left
("retired"), so nobody's KV is lost. Only so many parts are made (`PARTS_MAX`): for another one, two that
nobody uses become one again.

What changes the segments takes long, and is an operation (`operation.py`): opening, cutting and closing are
its parts, which may run beside decode steps; the lists of segments change between two steps. Operations come
one after the other. Between two parts of one, requests come and go: it looks at the segments anew then.

The whole model as one range is the original file; everything else goes through segment files. Each segment
has its own KV, and a slot is the same sequence number in all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from swarmllm_proto.blocks import kept_root
from swarmllm_workers.cache.journal import Journals
from swarmllm_workers.cache.prefix_cache import PrefixCache
from swarmllm_workers.cache.prefixes import token_name
from swarmllm_workers.decode.template import ChatTemplate
from swarmllm_workers.decode.vocabulary import Vocabulary
from swarmllm_workers.engine.embedding import Embedding
from swarmllm_workers.engine.exact_segments import SegmentsApart
from swarmllm_workers.engine.gguf_file import open_source
from swarmllm_workers.engine.libllama import Model
from swarmllm_workers.engine.memory import Footprint, Memory, around, weighing
from swarmllm_workers.engine.operation import Operation, complete
from swarmllm_workers.engine.probe import refuse_impossible_rotation, refuse_what_aborts
from swarmllm_workers.engine.ranges import Cuts, Range, Route, find_path, join, merge, subtract
from swarmllm_workers.engine.segment import EngineSettings, Segment, Span
from swarmllm_workers.engine.segment_file import n_layers_of
from swarmllm_workers.engine.segment_maker import LoadProgress, SegmentMaker
from swarmllm_workers.engine.slots import HeldRequests, Slots
from swarmllm_workers.errors import CallError

log = logging.getLogger(__name__)

TEMPLATES_MAX: Final = 8
"""Compiled chat templates that are kept: the model's own, and those of presets."""

PARTS_MAX: Final = 8
"""Segments beyond those that held ranges need, made because requests asked for parts of them. Each has a work
space of its own, and a row that runs through several takes longer."""
RECEIVED_PART: Final = 4
"""What came in may take this part of what may be kept of what was sent."""


class Engine:
    """Everything a worker can do with its model, without messages. Raises CallError and nothing else."""

    def __init__(
        self, path: Path, cache_dir: Path, settings: EngineSettings, *, owns_path: bool = False
    ) -> None:
        """`owns_path`: the file is nobody else's, its layers may move to segment files."""
        self.source = open_source(path)
        self.settings = settings
        self.architecture_name = self.source.text("general.architecture")
        self.name = self.source.text("general.name", path.stem)
        self.n_layers = n_layers_of(self.source)
        self.cuts = Cuts(self.source, self.name, self.n_layers, settings)
        self.rule, self.architecture = self.cuts.rule, self.cuts.architecture
        refuse_impossible_rotation(self.source)
        refuse_what_aborts(path)
        self._vocabulary_model = Model(path, vocab_only=True)
        self.context_length = self.source.integer(f"{self.architecture_name}.context_length", 0)
        self.vocabulary = Vocabulary(self._vocabulary_model, self.source)
        self.embedding = Embedding(self.source)
        self.n_embd, self.n_vocab = self.embedding.n_embd, self.embedding.n_vocab
        self.template_source = self.source.text("tokenizer.chat_template")
        self._templates: dict[str, ChatTemplate] = {}
        self.cache_dir = cache_dir
        self._maker = SegmentMaker(
            self.source, self.n_layers, self.cuts, settings, cache_dir, owns_path=owns_path
        )
        self.footprint = Footprint(self.source, self.name, self.n_layers, settings)
        self.slots = Slots(settings.n_slots)
        self.prefixes = PrefixCache(settings, self.slots)
        self.journals = Journals(settings.journal_max_bytes)
        self.received = Journals(settings.journal_max_bytes // RECEIVED_PART)
        """What came in, by the layer boundary that it came to: for the origin to compare with what its
        sender says."""
        self.held = HeldRequests(self.release)
        self.root = kept_root(settings.prefix_key, settings.model_id, self.n_layers)
        self._held: list[Range] = []
        self._segments: list[Segment] = []
        self._retired: list[Segment] = []
        self._n_routes = 0
        self._routes: dict[str, dict[Range, Route]] = {}
        """Where each request's rows are: a request keeps to its segments, retired or not."""
        self.apart = SegmentsApart(self.footprint)
        self.begin: Callable[[Operation[None]], None] = complete
        """Begins an operation that a request leaves behind when it ends. It comes after all others."""

    @property
    def ranges(self) -> tuple[Range, ...]:
        return tuple(self._held)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._segments)

    @property
    def weights_bytes(self) -> int:
        """Pages that several segments have count once."""
        return sum(segment.weights_bytes for segment in weighing(self._open))

    def template(self, source: str = "") -> ChatTemplate:
        """The model's own chat template, or `source`. Raises CallError bad_template."""
        source = source or self.template_source
        template = self._templates.get(source)
        if template is None:
            texts = {"bos_text": self.vocabulary.bos_text, "eos_text": self.vocabulary.eos_text}
            template = ChatTemplate(source, **texts)
            # Several threads may be here at once.
            self._templates = dict([*self._templates.items(), (source, template)][-TEMPLATES_MAX:])
        return template

    def load(self, start: int, end: int, progress: LoadProgress | None = None) -> None:
        """`loading`, at once."""
        complete(self.loading(start, end, progress))

    def loading(self, start: int, end: int, progress: LoadProgress | None = None) -> Operation[None]:
        """Hold [start, end) too. Raises CallError cannot_cut, bad_model, out_of_memory; holds what it held
        then."""
        self.cuts.check(start, end)
        missing = subtract([(start, end)], self._held)
        self.footprint.refuse(self.cuts.pieces(missing), self._open)
        opened = yield partial(self._maker.open_all, self.cuts.pieces(missing), progress)
        self._segments += opened
        self._held = merge([*self._held, *missing])
        yield from self._settling()

    def rearranging(self, skip_ratio: float, progress: LoadProgress | None = None) -> Operation[None]:
        """Have the whole model, which is held, in one piece (0) or so that guesses can leave out this share
        of its layers. Rows of running requests stay where they are until those are over. Raises CallError
        where there is no room for that; then all is as before, loaded again at its next use."""
        self.prefixes.clear()
        whole, before, old = [(0, self.n_layers)], self.cuts.skip_ratio, self._segments
        is_idle = all(segment.is_idle for segment in old)
        if is_idle:
            yield from self._closing(old)
        self.cuts.leave_out(skip_ratio)
        try:
            if not is_idle:
                self.footprint.refuse(self.cuts.pieces(whole), self._open)
            opened = yield partial(self._maker.open_all, self.cuts.pieces(whole), progress)
        except CallError:
            self.cuts.leave_out(before)
            raise
        yield from self._retiring(old)
        self._segments += opened
        yield from self._settling()

    @property
    def memory(self) -> Memory:
        """What the segments take, as predicted."""
        return self.footprint.of(self._open) + self.apart.memory

    @property
    def _open(self) -> list[Segment]:
        return [*self._segments, *self._retired]

    def unload(self, start: int, end: int, progress: LoadProgress | None = None) -> None:
        """`unloading`, at once."""
        complete(self.unloading(start, end, progress))

    def unloading(self, start: int, end: int, progress: LoadProgress | None = None) -> Operation[None]:
        """Hold [start, end) no longer. Rows of running requests in affected segments are lost. What remains
        of a segment is cut anew; the rest of it stays held when that fails and is loaded at its next
        use. `progress`: bytes given back and read anew."""
        if not any(s < end and start < e for s, e in self._held):
            raise CallError("not_loaded", f"layers {start}:{end} are not held", "start")
        self.prefixes.clear()
        remaining = subtract(self._held, [(start, end)])
        for piece in remaining:
            self.cuts.check(*piece)
        affected = [s for s in self._open if s.start < end and start < s.end]
        pieces = subtract([(s.start, s.end) for s in affected if s in self._segments], [(start, end)])
        done_bytes = sum(segment.weights_bytes for segment in affected)
        again = self.cuts.pieces(pieces)
        total_bytes = done_bytes + self.footprint.predicted(again).weights_bytes
        tell = progress or (lambda done, total: None)
        self._held = remaining
        yield from self._closing(affected)
        tell(done_bytes, total_bytes)
        for piece in again:
            segment = yield partial(self._maker.open, *piece)
            self._segments.append(segment)
            done_bytes += segment.weights_bytes
            tell(min(done_bytes, total_bytes), total_bytes)
        yield from self._settling()

    def whole_file(self) -> Path:
        """The GGUF with everything in it. Nothing may be loaded."""
        return self._maker.whole_file()

    def route(self, request_id: str, start: int, end: int) -> Route:
        """`known_route`, after what has to be cut was cut at once."""
        route = self.known_route(request_id, start, end)
        if route is None:
            complete(self.cutting(start, end))
            route = self.known_route(request_id, start, end)
        if route is None:
            raise CallError("engine", f"no segments cover {start}:{end}")
        return route

    def known_route(self, request_id: str, start: int, end: int) -> Route | None:
        """The request's segments for exactly [start, end). None where those have to be made first
        (`cutting`). Raises CallError not_loaded, cannot_cut."""
        known = self._routes.get(request_id, {}).get((start, end))
        if known is not None and not known.is_closed:
            return known
        path = self.find_segments(start, end)
        if path is None:
            return None
        self._n_routes += 1
        for segment in path:
            segment.n_route = self._n_routes
        if request_id in self.apart:
            path = self.apart.open(request_id, path, self.memory)
        route = Route(start, end, path)
        self._routes.setdefault(request_id, {})[start, end] = route
        return route

    def find_segments(self, start: int, end: int) -> tuple[Segment, ...] | None:
        """Those that a request which begins now runs [start, end) in; otherwise as `known_route`."""
        self.cuts.check(start, end)
        missing = subtract([(start, end)], self._held)
        if missing:
            held = ", ".join(f"{s}:{e}" for s, e in self._held) or "nothing"
            raise CallError("not_loaded", f"layers {join(missing)} are not loaded (held: {held})", "start")
        path = find_path(self._segments, start, end)
        return tuple(path) if path is not None else None

    def cutting(self, start: int, end: int) -> Operation[None]:
        """Have segments that run exactly [start, end), which is held. Raises as `known_route` and `loading`
        do."""
        if self.find_segments(start, end) is not None:
            return
        yield from self._filling()
        if self.find_segments(start, end) is None:
            yield from self._cutting_at(start, end)

    def take_slot(self, request_id: str) -> int:
        return self.slots.take(request_id)

    def make_room(self, route: Route, n_rows: int) -> int:
        """Let kept and held rows go until `n_rows` are free or there are none; what is free then."""
        while (n_free := self.prefixes.make_room(route.segments, n_rows)) < n_rows and self.held.let_go():
            pass
        return n_free

    def reuse(
        self, request_id: str, route: Route, tokens: np.ndarray, session: str = "", own_kv: bool = False
    ) -> int:
        """Rows that the request, which has none yet, gets from others with the same beginning. At least one
        token is left to be run: its logits are wanted. `own_kv`: none that another node computed and that
        were not checked."""
        n_max = len(tokens) - 1
        name = token_name(self.root, tokens[:n_max], session)
        return self.prefixes.reuse(request_id, route.segments, name, n_max, own_kv=own_kv)

    def keep(self, request_id: str, tokens: np.ndarray, session: str = "") -> None:
        """The request is over: keep the rows of `tokens`, which are all that it has, for others. Not in
        segments that are about to go."""
        route = self._routes.get(request_id, {}).get((0, self.n_layers))
        if route is not None and all(segment in self._segments for segment in route.segments):
            self.prefixes.keep(request_id, route.segments, token_name(self.root, tokens, session))

    def full(self, route: Route, n_more: int) -> CallError:
        """What a request is told for which there are not enough KV rows now. (One that could never have
        enough is refused before it begins.)"""
        n_rows = max(segment.n_rows for segment in route.segments) + n_more
        return CallError(
            "no_room",
            f"{n_rows} rows in a context of {self.settings.n_ctx} (n_ctx), most of them other requests'",
        )

    def rewind(self, route: Route, span: Span) -> None:
        """Forget the slot's rows from the span's position on. Raises CallError position_gap, also where
        the model's state cannot be rolled back, or not_loaded."""
        self._check_open(route)
        for segment in route.segments:
            segment.check_position(span)
        for segment in route.segments:
            segment.truncate(span.slot, span.position)

    def expire(self) -> float | None:
        """Free what has been kept long enough; seconds until more of it has, None where nothing is kept."""
        self.prefixes.expire()
        self.held.expire()
        times_s = (self.prefixes.next_expiry_s(), self.held.next_expiry_s())
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def rename(self, request_id: str, new_id: str, n_rows: int) -> None:
        """What is held of a request is another one's, which has nothing yet: `n_rows` rows at most."""
        self.held.discard(request_id)
        self.slots.rename(request_id, new_id)
        self.prefixes.rename(request_id, new_id)
        self.journals.rename(request_id, new_id)
        self.received.rename(request_id, new_id)
        self._routes[new_id] = self._routes.pop(request_id, {})
        try:
            self.empty(new_id, n_rows)
        except CallError:
            self.empty(new_id)

    def n_rows(self, request_id: str, start: int, end: int) -> int:
        """Rows that the request has in [start, end), where it has run there."""
        slot, route = self.slots.get(request_id), self._routes.get(request_id, {}).get((start, end))
        if slot is None or route is None or route.is_closed:
            return 0
        return min(segment.lengths[slot] for segment in route.segments)

    def release(self, request_id: str) -> None:
        """Free the request's slot and its rows in every segment."""
        if (slot := self.slots.get(request_id)) is not None:
            n_rows = max((segment.lengths[slot] for segment in self._segments), default=0)
            log.debug("request %s ended with %d rows", request_id, n_rows)
        self.held.discard(request_id)
        self.journals.forget(request_id)
        self.received.forget(request_id)
        self.prefixes.end(request_id, self._segments)
        self.empty(request_id)
        self._routes.pop(request_id, None)
        self.slots.release(request_id)
        self.apart.close(request_id)
        if idle := [segment for segment in self._retired if segment.is_idle]:
            self._set_aside(idle)
            self.begin(self._closing(idle))

    def empty(self, request_id: str, length: int = 0) -> None:
        """Free the request's rows from `length` on in every segment; it keeps its slot and its segments."""
        slot = self.slots.get(request_id)
        if slot is not None:
            for segment in self.apart.of(request_id, self._open):
                segment.truncate(slot, length)

    def release_if_empty(self, request_id: str) -> None:
        """Free the slot of a request that has no rows anywhere: one whose first forward was refused."""
        slot = self.slots.get(request_id)
        if slot is None or not any(
            segment.lengths[slot] for segment in self.apart.of(request_id, self._open)
        ):
            self.release(request_id)

    def check(self, route: Route, spans: Sequence[Span]) -> None:
        """Raises CallError position_gap, context_full, or not_loaded where the route has been unloaded."""
        self._check_open(route)
        for segment in route.segments:
            segment.check(spans)

    def _check_open(self, route: Route) -> None:
        if route.is_closed:
            raise CallError(
                "not_loaded", f"layers {route.start}:{route.end} were unloaded while the request ran", "start"
            )

    def is_next_row(self, route: Route, span: Span) -> bool:
        """Whether it is one row behind those that the slot has, of a route that is open, so that nothing has
        to be checked or forgotten."""
        if len(span.data) != 1:
            return False
        for segment in route.segments:  # noqa: SIM110 (as in Route)
            if not segment.can_step(span.slot, span.position):
                return False
        return True

    def run_next_row(self, route: Route, span: Span) -> list[np.ndarray]:
        """`run` of a span that `is_next_row` is true of."""
        row = self.prepare(route.segments[0], span.data)
        for segment in route.segments:
            row = segment.step(span.slot, span.position, row, span.want)
        return [row]

    def run(self, route: Route, spans: Sequence[Span]) -> list[np.ndarray]:
        """Run spans through a route: `Segment.run` of its segments one after the other, after `check` of
        all."""
        self.check(route, spans)
        first, *others = route.segments
        results = first.run([_with(span, self.prepare(first, span.data)) for span in spans])
        for segment in others:
            results = segment.run([_with(*each) for each in zip(spans, results, strict=True)])
        return results

    def prepare(self, first: Segment, data: np.ndarray) -> np.ndarray:
        """Token ids stay token ids for the original file and become rows for a segment file."""
        if data.ndim == 1:
            if first.is_whole:
                return data
            data = self.embedding.rows(data)
        elif first.start == 0 and (self.rule.cut_alignment == 0 or not first.takes_rows):
            # Some of these would read several positions per row, some abort.
            reason = self.rule.whole_reason or "whole, its inputs are wider than a row"
            raise CallError("bad_tensor", f"{self.name} takes token ids only: {reason}", "payload")
        if first.start == 0 and self.architecture is not None and self.architecture.scales_tokens_only:
            data = data * np.sqrt(np.float32(self.n_embd))
        return data

    def _filling(self) -> Operation[None]:
        """Load what is held and has lost its segment, for want of room at the time."""
        gaps = subtract(self._held, [(segment.start, segment.end) for segment in self._segments])
        if gaps:
            self.footprint.refuse(self.cuts.pieces(gaps), self._open)
            opened = yield partial(self._maker.open_all, self.cuts.pieces(gaps))
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
            for piece in self.cuts.pieces(pairwise([segment.start, *inside, segment.end])):
                if find_path(staying, *piece) is None and piece not in missing:
                    missing.append(piece)
        idle = [segment for segment in cut if segment.is_idle]
        sharing = [segment for segment in cut if segment not in idle and self._maker.shares(segment)]
        self.footprint.refuse(missing, self._open, idle, sharing)
        self.prefixes.clear()
        self._retired += [segment for segment in cut if segment not in idle]
        self._segments = staying
        yield from self._closing(idle)
        for piece in missing:
            segment = yield partial(self._maker.open, *piece, within=around(piece, cut))
            self._segments.append(segment)
        yield from self._settling()

    def _joining(self, start: int, end: int) -> Operation[None]:
        """Join neighbours that nobody uses, those first that were asked for longest ago, until cuts at
        `start` and `end` make no more parts than there may be. Raises CallError no_room where requests run
        in all."""
        n_max = len(self.cuts.pieces(self._held)) + PARTS_MAX
        while True:
            n_more = sum(s.start < at < s.end for s in self._segments for at in {start, end})
            if len(self._segments) + n_more <= n_max:
                return
            self.prefixes.clear()
            pair = self.cuts.unused_neighbours(self._segments, (start, end))
            if pair is None:
                raise CallError(
                    "no_room",
                    f"requests run in {len(self._segments)} parts of {self.name}; there may be {n_max}",
                )
            first, second = pair
            within = first if (first.start, second.end) != first.file_layers else None
            yield from self._closing([first, second])
            joined = yield partial(self._maker.open, first.start, second.end, within=within)
            self._segments.append(joined)

    def _settling(self) -> Operation[None]:
        running = [*self._segments, *(each for each in self._retired if self._maker.maps_source(each))]
        yield partial(self._maker.settle, running)

    def _retiring(self, segments: list[Segment]) -> Operation[None]:
        """Nobody begins in these any more."""
        segments = [segment for segment in segments if not segment.is_closed]
        self._segments = [segment for segment in self._segments if segment not in segments]
        self._retired += [segment for segment in segments if not segment.is_idle]
        yield from self._closing([segment for segment in segments if segment.is_idle])

    def _closing(self, segments: list[Segment]) -> Operation[None]:
        """Nobody finds these any more, and their memory is given back."""
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

    def close(self) -> None:
        complete(self._closing(self._open))
        self.vocabulary.grammars.close()
        self._vocabulary_model.close()


def _with(span: Span, data: np.ndarray) -> Span:
    return Span(span.slot, span.position, data, span.want)
