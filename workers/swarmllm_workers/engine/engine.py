"""Runs a worker's model: requests' slots, rows and routes through the layers that it holds.

Each segment (`loaded_layers.py`) has its own KV, and a slot is the same sequence number in all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from swarmllm_proto.architectures import n_deepstack_layers
from swarmllm_proto.blocks import kept_root
from swarmllm_proto.ipc import KvType
from swarmllm_workers.cache.journal import Journals
from swarmllm_workers.cache.kept_rows import BlockKey
from swarmllm_workers.cache.prefix_cache import PrefixCache
from swarmllm_workers.cache.prefixes import token_name
from swarmllm_workers.decode.template import ChatTemplate
from swarmllm_workers.decode.vocabulary import Vocabulary
from swarmllm_workers.engine.embedding import Embedding
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.exact_segments import ExactSegments
from swarmllm_workers.engine.kv_layout import kv_layout
from swarmllm_workers.engine.libllama import Model
from swarmllm_workers.engine.loaded_layers import LoadedLayers
from swarmllm_workers.engine.memory import Footprint, Memory
from swarmllm_workers.engine.operation import Operation, complete
from swarmllm_workers.engine.positions import sees_later
from swarmllm_workers.engine.probe import refuse_impossible_rotation, refuse_what_aborts
from swarmllm_workers.engine.ranges import Cuts, Range, Route
from swarmllm_workers.engine.segment import Segment, Span, Want
from swarmllm_workers.engine.segment_file import n_layers_of
from swarmllm_workers.engine.segment_maker import SegmentMaker
from swarmllm_workers.engine.slots import HeldRequests, Slots
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import open_source
from swarmllm_workers.kernels.kernel_choice import NEVER_LARGE, PANEL_ROWS_MIN

log = logging.getLogger(__name__)

TEMPLATES_MAX: Final = 8
"""Compiled chat templates that are kept: the model's own, and those of presets."""

RECEIVED_PART: Final = 4
"""What came in may take this part of what may be kept of what was sent."""


class Engine:
    """The operations of a worker on its model, without messages. Raises CallError and nothing else."""

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
        n_deepstack = n_deepstack_layers(self.architecture_name, self.source.number)
        self.n_embd_input = self.n_embd * (1 + n_deepstack)
        """Width of a picture's rows at layer 0."""
        self.template_source = self.source.text("tokenizer.chat_template")
        self._templates: dict[str, ChatTemplate] = {}
        self.cache_dir = cache_dir
        maker = SegmentMaker(self.source, self.n_layers, self.cuts, settings, cache_dir, owns_path=owns_path)
        self.kv_layout = kv_layout(self.source, settings)
        """None: KV of this model cannot be brought from one layout to another here."""
        self.footprint = Footprint(self.source, self.name, self.n_layers, settings)
        self.slots = Slots(settings.n_slots)
        self.prefixes = PrefixCache(settings, self.slots)
        ttl_s = settings.prefixes.ttl_s
        self.journals = Journals(settings.journal_max_bytes, ttl_s)
        self.received = Journals(settings.journal_max_bytes // RECEIVED_PART, ttl_s)
        """What came in, by the layer boundary that it came to: for the origin to compare with what its
        sender says."""
        self.held = HeldRequests(self.release)
        self.root = kept_root(settings.prefix_key, settings.model_id, self.n_layers)
        self.layers = LoadedLayers(self.name, self.n_layers, self.cuts, self.footprint, maker, self.prefixes)
        self._n_routes = 0
        self._routes: dict[str, dict[Range, Route]] = {}
        """Where each request's rows are: a request keeps to its segments, retired or not."""
        self.apart = ExactSegments(self.footprint)
        self.begin: Callable[[Operation[None]], None] = complete
        """Begins an operation that a request leaves behind when it ends. It comes after all others."""
        self.large_batch_from = NEVER_LARGE
        """Batches of so many rows, and fewer than PANEL_ROWS_MIN, take longer than one of that many."""

    @property
    def is_recurrent(self) -> bool:
        """Whether any layer has a state that cannot be rolled back."""
        return self._vocabulary_model.is_recurrent

    @property
    def has_grid_positions(self) -> bool:
        """Whether rows have several positions each (M-RoPE)."""
        return self._vocabulary_model.has_grid_positions

    @property
    def memory(self) -> Memory:
        """The predicted memory of the segments."""
        return self.layers.memory + self.apart.memory

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

    def route(self, request_id: str, start: int, end: int) -> Route:
        """As `known_route`, but cuts what has to be cut first."""
        route = self.known_route(request_id, start, end)
        if route is None:
            complete(self.layers.cutting(start, end))
            route = self.known_route(request_id, start, end)
        if route is None:
            raise CallError("engine", f"no segments cover {start}:{end}")
        return route

    def known_route(self, request_id: str, start: int, end: int) -> Route | None:
        """The request's segments for exactly [start, end). None where those have to be made first
        (`LoadedLayers.cutting`). Raises CallError not_loaded, cannot_cut."""
        known = self._routes.get(request_id, {}).get((start, end))
        if known is not None and not known.is_closed:
            return known
        path = self.layers.find_segments(start, end)
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

    def set_apart(
        self, request_id: str, n_rows: int, *, gives_rows: bool = False, kv_type: KvType | None = None
    ) -> None:
        """Make the request exact: its rows, at most so many, are computed apart from all others.
        `gives_rows`: the head computes all rows of a piece. `kv_type`: of its keys and values, where that is
        another one than the settings'. Raises CallError bad_message if the request has already begun
        otherwise, or there is no attention for that type."""
        if request_id in self.apart:
            if gives_rows:
                self.apart.give_rows(request_id)
            return
        if request_id in self._routes:
            raise CallError("bad_message", "the request has begun, and was not exact then", "exact_rows")
        if kv_type is not None and kv_type != "f16" and self.settings.flash_attention == "off":
            raise CallError("bad_message", f"stored as {kv_type}, values need flash attention", "kv_type")
        n_rows = min(n_rows, self.settings.n_ctx)
        self.apart.add(request_id, n_rows, gives_rows=gives_rows, kv_type=kv_type)

    def take_slot(self, request_id: str) -> int:
        return self.slots.take(request_id)

    def make_slot(self, request_id: str) -> None:
        """Free a slot if none is free: the request that has been held longest is released."""
        if self.slots.is_full and self.slots.get(request_id) is None:
            self.held.let_go()

    def make_room(self, route: Route, n_rows: int) -> int:
        """Drop kept and held rows until `n_rows` are free or there are none. Returns how many are free
        then."""
        while (n_free := self.prefixes.make_room(route.segments, n_rows)) < n_rows and self.held.let_go():
            pass
        return n_free

    def reuse(
        self,
        request_id: str,
        route: Route,
        tokens: np.ndarray,
        session: str = "",
        own_kv: bool = False,
        clients_of: str | None = "",
    ) -> int:
        """Give the request, which has no rows yet, rows of other requests with the same prefix. At least one
        token is left to run, because its logits are needed. `own_kv`: no rows that another node computed and
        nobody checked. `clients_of`: as of `Name`."""
        n_max = len(tokens) - 1
        name = token_name(self.root, tokens[:n_max], session, clients_of=clients_of)
        return self.prefixes.reuse(request_id, route.segments, name, n_max, own_kv=own_kv)

    def begin_large_batch(self, request_id: str, route: Route, position: int, n_tokens: int) -> int:
        """Where the rest of a prompt begins that is to be computed at once: at `position`, up to which the
        request has rows of others, or so much earlier that the batch is a large one, where that takes less
        time. The rows behind are freed then. Only a lone request's rows are all in one batch."""
        begin, n_left = n_tokens - PANEL_ROWS_MIN, n_tokens - position
        if not 0 <= begin < position or n_left < self.large_batch_from:
            return position
        is_alone = len(self.slots) == 1
        has_window = any(segment.n_window for segment in route.segments)
        if not is_alone or has_window:
            return position
        if self.prefixes.make_room(route.segments, PANEL_ROWS_MIN) < PANEL_ROWS_MIN:
            return position
        self.empty(request_id, begin)
        return begin

    def keep(
        self, request_id: str, tokens: np.ndarray, session: str = "", clients_of: str | None = ""
    ) -> None:
        """End the request, and keep the rows of `tokens`, which are all its rows, for other requests.
        Segments that are about to be closed keep none. `clients_of`: as at its start."""
        route = self._routes.get(request_id, {}).get((0, self.n_layers))
        if route is not None and all(segment in self.layers.segments for segment in route.segments):
            # Bytes of windowed layers go on where they end or not at all, and prompts part anywhere.
            if any(segment.n_window for segment in route.segments):
                clients_of = None
            name = token_name(self.root, tokens, session, clients_of=clients_of)
            self.prefixes.keep(request_id, route.segments, name)

    def full(self, route: Route, n_more: int) -> CallError:
        """The error for a request that finds too few free KV rows now. (A request that could never have
        enough is refused before it begins.)"""
        n_rows = max(segment.n_rows for segment in route.segments) + n_more
        return CallError(
            "no_room",
            f"{n_rows} rows in a context of {self.settings.n_ctx} (n_ctx), most of them other requests'",
        )

    def rewind(self, route: Route, span: Span) -> None:
        """Drop the slot's rows from the span's position on. Raises CallError position_gap, also if the
        model's state cannot be rolled back, or not_loaded."""
        self._check_open(route)
        for segment in route.segments:
            segment.check_position(span)
        for segment in route.segments:
            segment.truncate(span.slot, span.position)

    def expire(self) -> float | None:
        """Drop what was kept for its time. Returns the seconds until more expires, None if nothing is
        kept."""
        kept = (self.prefixes, self.held, self.journals.kept, self.received.kept)
        for each in kept:
            each.expire()
        times_s = tuple(each.next_expiry_s() for each in kept)
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def rename(self, request_id: str, new_id: str, n_rows: int) -> None:
        """Give what is held of a request to another one, which has nothing yet: `n_rows` rows at most."""
        self.held.discard(request_id)
        self.slots.rename(request_id, new_id)
        self.prefixes.rename(request_id, new_id)
        self.journals.rename(request_id, new_id)
        self.received.rename(request_id, new_id)
        self.apart.rename(request_id, new_id)
        self._routes[new_id] = self._routes.pop(request_id, {})
        try:
            self.empty(new_id, n_rows)
        except CallError:
            self.empty(new_id)

    def n_rows(self, request_id: str, start: int, end: int) -> int:
        """The number of rows that the request has in [start, end), if it has run there."""
        slot, route = self.slots.get(request_id), self._routes.get(request_id, {}).get((start, end))
        if slot is None or route is None or route.is_closed:
            return 0
        return min(segment.lengths[slot] for segment in route.segments)

    def rows_at(self, request_id: str, boundary: int, position: int, n_rows: int) -> np.ndarray:
        """The rows that left or reached layers here, f32 [n_rows, n_embd]. At a boundary between two stages
        that are both here, both have the same rows. Raises CallError position_gap."""
        is_sent = self.journals.has(request_id, boundary)
        journals = self.journals if is_sent else self.received
        keys = [
            self._block_keys(request_id, *each)
            for each in self._routes.get(request_id, {})
            if each[is_sent] == boundary
        ]
        return journals.read(request_id, boundary, position, n_rows, keys[0] if keys else ())

    def n_sent_rows(self, request_id: str, start: int, end: int) -> int:
        """The number of rows of [start, end) that `rows_at` can give, from position 0 on."""
        has_route = (start, end) in self._routes.get(request_id, {})
        keys = self._block_keys(request_id, start, end) if has_route else []
        return self.journals.n_rows(request_id, end, keys)

    def _block_keys(self, request_id: str, start: int, end: int) -> list[BlockKey]:
        """Of the blocks that the request has in [start, end)."""
        route, n_rows = self._routes[request_id][start, end], self.n_rows(request_id, start, end)
        return self.prefixes.block_keys(request_id, route.segments, n_rows)

    def release(self, request_id: str) -> None:
        """Free the request's slot and its rows in every segment."""
        if (slot := self.slots.get(request_id)) is not None:
            n_rows = max((segment.lengths[slot] for segment in self.layers.segments), default=0)
            log.debug("request %s ended with %d rows", request_id, n_rows)
        self.held.discard(request_id)
        for start, end in self._routes.get(request_id, {}):
            if keys := self._block_keys(request_id, start, end):
                self.journals.keep(request_id, end, keys)
                self.received.keep(request_id, start, keys)
        self.journals.forget(request_id)
        self.received.forget(request_id)
        self.prefixes.end(request_id, self.layers.segments)
        self.empty(request_id)
        self._routes.pop(request_id, None)
        self.slots.release(request_id)
        self.apart.close(request_id)
        if idle := self.layers.dismiss_idle():
            self.begin(self.layers.closing(idle))

    def empty(self, request_id: str, length: int = 0) -> None:
        """Free the request's rows from `length` on in every segment; it keeps its slot and its segments."""
        slot = self.slots.get(request_id)
        if slot is not None:
            for segment in self.apart.of(request_id, self.layers.open):
                segment.truncate(slot, length)

    def release_if_empty(self, request_id: str) -> None:
        """Free the slot of a request that has no rows anywhere: one whose first forward was refused."""
        slot = self.slots.get(request_id)
        if slot is None or not any(
            segment.lengths[slot] for segment in self.apart.of(request_id, self.layers.open)
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

    def can_step(self, route: Route, slot: int, position: int) -> bool:
        """Whether a row at `position` directly follows the rows of the slot in a route that is open, so that
        there is nothing to check or to drop."""
        for segment in route.segments:  # noqa: SIM110 (as in Route)
            if not segment.can_step(slot, position):
                return False
        return True

    def step(self, route: Route, slot: int, position: int, data: np.ndarray, want: Want) -> np.ndarray:
        """Run one row through a route where it `can_step`. The result is that of `run`, sooner."""
        row = self.prepare(route.segments[0], data)
        for segment in route.segments:
            row = segment.step(slot, position, row, want)
        return row

    def run(self, route: Route, spans: Sequence[Span]) -> list[np.ndarray]:
        """Run spans through a route: `Segment.run` of its segments one after the other, after `check` of
        all."""
        self.check(route, spans)
        first, *others = route.segments
        results = first.run([_with(span, self._prepared(first, span)) for span in spans])
        for segment in others:
            results = segment.run([_with(*each) for each in zip(spans, results, strict=True)])
        return results

    def _prepared(self, first: Segment, span: Span) -> np.ndarray:
        run = sees_later(span.runs, span.position, len(span.data))
        return self.prepare(first, span.data, is_picture=run is not None)

    def prepare(self, first: Segment, data: np.ndarray, *, is_picture: bool = False) -> np.ndarray:
        """Convert token ids to rows for a part of the file; for the original file they stay token ids.
        `is_picture`: the rows are not embedded tokens."""
        if data.ndim == 1:
            if first.is_whole:
                return data
            data = self.embedding.rows(data)
        elif first.start == 0 and (self.rule.cut_alignment == 0 or not first.takes_rows):
            # Some of these would read several positions per row, some abort.
            reason = self.rule.whole_reason or "whole, its inputs are wider than a row"
            raise CallError("bad_tensor", f"{self.name} takes token ids only: {reason}", "payload")
        scales = self.architecture is not None and self.architecture.scales_tokens_only
        if first.start == 0 and scales and not is_picture:
            data = data * np.sqrt(np.float32(self.n_embd))
        return data

    def close(self) -> None:
        complete(self.layers.closing(self.layers.open))
        self.vocabulary.grammars.close()
        self._vocabulary_model.close()


def _with(span: Span, data: np.ndarray) -> Span:
    return span._replace(data=data)
