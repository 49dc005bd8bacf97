"""A layer range in memory, ready to run: libllama's model and context over the whole GGUF, a part of it, or
a segment file.

A segment runs *spans*: each is a run of rows of one slot from one position on. Spans of several slots go
through one `llama_decode`, and libllama keeps their sequences apart; that is the place where batching
happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np

from swarmllm_proto.architectures import Architecture
from swarmllm_proto.ipc import KvType
from swarmllm_proto.picture_runs import PictureRun
from swarmllm_workers.engine.engine_settings import (
    EngineSettings,
    context_settings,
    exact_settings,
    n_outputs_of,
    n_sequences_of,
    rows_of_exact_batch,
    unused_sequence_of,
)
from swarmllm_workers.engine.libllama import N_BATCH, Context, Model
from swarmllm_workers.engine.positions import SequencePositions, positions_of, sees_later
from swarmllm_workers.engine.row_widths import joined, widened
from swarmllm_workers.engine.shared_weights import Part
from swarmllm_workers.engine.slots import Cells
from swarmllm_workers.engine.tap import Rescaling, Tap
from swarmllm_workers.engine.unused_cells import UnusedCells
from swarmllm_workers.errors import CallError
from swarmllm_workers.kernels import small_batches

Want: TypeAlias = Literal["hidden", "none", "logits", "rows", "normed"]


class Span(NamedTuple):
    """Rows of one slot at positions [position, position + n)."""

    slot: int
    position: int
    data: np.ndarray
    """Hidden states f32 [n, n_embd], or, for a segment that begins at layer 0, token ids i32 [n] or rows of
    a picture with their further parts, f32 [n, n_embd_input]."""
    want: Want
    """Of the head segment: logits of the last row, or ("rows") of all, the states of all rows after the final
    norm, or nothing. Every other segment gives hidden states."""
    runs: tuple[PictureRun, ...] = ()
    """Of the slot's request: which of its rows stand on a grid, or see each other. All rows of a run that see
    each other are one span, which is alone."""


class Segment:
    """Layers [start, end). Closing it gives all of its memory back to the system."""

    def __init__(
        self,
        path: Path,
        start: int,
        end: int,
        *,
        n_layers: int,
        architecture: Architecture | None,
        settings: EngineSettings,
        on_progress: Callable[[float], None] | None = None,
        numbers: Mapping[str, int] | None = None,
        part: Part | None = None,
        file_layers: tuple[int, int] | None = None,
    ) -> None:
        """`numbers`: metadata that counts instead of the file's. `part`: what of the file this is, where it
        is not all of it; then `file_layers` is what the file has."""
        self.path = path
        self.file_layers = file_layers or (start, end)
        self.start, self.end = start, end
        self.is_whole = start == 0 and end == n_layers
        self.has_head = end == n_layers
        self.is_closed = False
        self.n_route = 0
        """The number of the latest request's route through it, as the engine counts them."""
        self._whole: Segment | None = None
        """Whose weights these are, where they are not its own."""
        self.apart_segments: list[Segment] = []
        self._n_layers = n_layers
        self._settings = settings
        assert settings.n_gpu_layers != "auto"  # whoever makes a segment has looked at the GPUs
        self.n_gpu_layers = settings.n_gpu_layers
        """Of its last layers, and of the output matrix as one more behind them."""
        self._architecture = architecture
        self._feeds_tokens = architecture is not None and architecture.feeds_tokens
        self._model = Model(
            path,
            use_mmap=settings.use_mmap,
            use_mlock=settings.use_mlock,
            n_gpu_layers=self.n_gpu_layers,
            on_progress=on_progress,
            numbers=numbers,
            part=part,
        )
        self.is_shared = settings.use_mmap and self._model.own_bytes == 0
        """All of its weights are pages of the file, or arranged once for all: other parts of it have the
        same."""
        self.weights_bytes = self._model.size_bytes
        is_cache = settings.use_mmap and not settings.use_mlock and not settings.n_gpu_layers
        private_bytes = self._model.private_bytes or 0
        self.mapped_bytes = max(0, self.weights_bytes - private_bytes) if is_cache else 0
        """Of the weights, what computing reads from mapped pages of the file that may be dropped. All,
        where nobody can say what libllama has copied."""
        self.is_recurrent = self._model.is_recurrent
        self.n_deepstack = 0
        """Further parts, as wide as a hidden state, that a picture's row has where it enters this segment."""
        if architecture is not None and architecture.deepstack_key:
            self.n_deepstack = self._model.n_embd_input // self._model.n_embd - 1
        n_sequences = n_sequences_of(settings, is_recurrent=self.is_recurrent)
        self.n_outputs_max = n_outputs_of(n_sequences, has_head=self.has_head)
        """Rows of one batch of which the head, or the tap, gives something."""
        self._cells = Cells(n_sequences)
        self.lengths = self._cells.lengths
        """Rows that each slot, and each sequence of kept rows, has in this segment's KV."""
        self._positions = SequencePositions(n_sequences)
        try:
            if self._model.n_layers != end - start:
                raise CallError(
                    "bad_model", f"{path.name} has {self._model.n_layers} layers, not {end - start}"
                )
            if self._model.has_encoder or not self._model.has_decoder:
                raise CallError("bad_model", f"{path.name} is an encoder: it generates nothing")
            self._tap = self._make_tap(architecture)
            self._context = self._make_context()
            self._unused = self._make_unused()
        except CallError:
            self._model.close()
            raise

    def _make_context(self, n_batch: int = N_BATCH) -> Context:
        made = context_settings(
            self._settings, is_recurrent=self.is_recurrent, has_head=self.has_head, n_batch=n_batch
        )
        made = replace(made, n_outputs_max=min(max(self.n_outputs_max, made.n_outputs_max), n_batch))
        if self._tap is not None:
            made = replace(made, eval_callback=self._tap.callback, eval_user_data=self._tap.user_data)
        return Context(self._model, made)

    def _make_unused(self) -> UnusedCells:
        return UnusedCells(self._context, unused_sequence_of(self._settings, is_recurrent=self.is_recurrent))

    def apart(self, n_ctx: int, *, gives_rows: bool = False, kv_type: KvType | None = None) -> Segment:
        """The same layers for one request, with cells and a work space of its own, so that its rows have the
        same bits whatever else runs there. `gives_rows`: the head has something to give of all rows of a
        batch. `kv_type`: as of `exact_settings`. Closed by itself, or with this segment. Raises CallError."""
        other = copy(self)
        other._settings = exact_settings(self._settings, n_ctx, kv_type)
        other._whole, other.apart_segments = self, []
        other.n_route = 0
        n_sequences = self._settings.n_slots
        other._cells = Cells(n_sequences)
        other.lengths = other._cells.lengths
        other._positions = SequencePositions(n_sequences)
        other._tap = other._make_tap(self._architecture)
        n_batch = rows_of_exact_batch(self._settings)
        other.n_outputs_max = n_batch if gives_rows else n_outputs_of(n_sequences, has_head=self.has_head)
        other._context = other._make_context(n_batch)
        other._unused = other._make_unused()
        other.fill_in()  # or the next one would be given the same memory
        self.apart_segments.append(other)
        return other

    def fill_in(self) -> None:
        """Have memory behind all cells, if that is not so yet: nobody else is to be promised it."""
        self._context.fill_in()

    def __repr__(self) -> str:
        return f"<Segment {self.start}:{self.end} rows={self.n_rows}>"

    def _make_tap(self, architecture: Architecture | None) -> Tap | None:
        if architecture is None:
            return None
        output = "" if self.has_head else f"{architecture.tap}-{self.end - self.start - 1}"
        overwritten = architecture.input_tensor if self.start > 0 or architecture.feeds_tokens else ""
        if self.n_deepstack:
            overwritten = ""  # It is a part of a wider tensor: rows are fed with all of their positions.
        rescaling = self._make_rescaling(architecture)
        if not output and not overwritten and rescaling is None:
            return None
        return Tap(
            output_name=output,
            input_name=overwritten,
            n_embd=self._model.n_embd,
            n_rows_max=N_BATCH,
            native=self._settings.native_tap,
            rescaling=rescaling,
        )

    def _make_rescaling(self, architecture: Architecture) -> Rescaling | None:
        if self.is_whole or self._n_layers not in architecture.scaled_by_width_n_layers:
            return None
        width = self._model.n_embd // self._model.n_heads
        head_size = self._model.number(f"{architecture.name}.attention.key_length") or width
        wrong, right = (float(np.float32(1) / np.sqrt(np.float32(size))) for size in (head_size, width))
        return Rescaling(wrong, right, self.end - self.start)

    @property
    def n_window(self) -> int:
        """Rows that the layers with a window see; 0: there are none."""
        return self._model.n_window

    @property
    def takes_rows(self) -> bool:
        """False for a whole model whose inputs are wider than its hidden states, where nobody knows what the
        rest is."""
        return self._model.n_embd_input == self._model.n_embd or self.n_deepstack > 0

    @property
    def has_grid_positions(self) -> bool:
        """Rows have several positions each, and their KV is not understood outside its cells."""
        return self._model.has_grid_positions

    @property
    def n_rows(self) -> int:
        """The number of cells in use. What several sequences share counts once."""
        return self._cells.n_used

    @property
    def n_free(self) -> int:
        """The number of free cells."""
        return self._settings.n_ctx - self._cells.n_used

    @property
    def n_taken(self) -> int:
        """The number of cells that libllama takes for used: see `UnusedCells`."""
        return self._cells.n_used + self._unused.n_cells

    @property
    def is_idle(self) -> bool:
        """Whether no request has rows here, or segments of its own over these weights."""
        return not self._cells.n_used and not self.apart_segments

    def n_alone(self, slot: int) -> int:
        """The number of cells that become free when the slot is emptied."""
        return self._cells.n_alone(slot)

    def check(self, spans: Sequence[Span]) -> None:
        """Raises CallError position_gap or context_full if these spans cannot run. Changes nothing."""
        n_after = self.n_rows
        for span in spans:
            self.check_position(span)
            n_after += span.position + len(span.data) - self.lengths[span.slot]
        if n_after > self._settings.n_ctx:
            raise CallError(
                "context_full",
                f"{n_after} rows in a context of {self._settings.n_ctx} (n_ctx), shared by all requests",
            )

    def check_position(self, span: Span) -> None:
        """Raises CallError position_gap, also where a recurrent state would have to be rolled back, or rows
        of a picture that stand on a grid be told apart."""
        length = self.lengths[span.slot]
        if span.position < length and self._positions.whole(span.slot, span.position) != span.position:
            raise CallError(
                "position_gap",
                f"row {span.position} is within a picture, of which no part can be forgotten: begin again at"
                " its first row",
                "position",
            )
        if self._model.is_recurrent and 0 < span.position < length:
            raise CallError(
                "position_gap",
                f"layers {self.start}:{self.end} have {length} rows and a state that cannot be rolled "
                f"back to {span.position}: begin again at position 0",
                "position",
            )
        if span.position > length:
            raise CallError(
                "position_gap",
                f"position {span.position} follows {length} known rows in layers {self.start}:{self.end}",
                "position",
            )

    def truncate(self, slot: int, length: int) -> None:
        """Forget the slot's rows from `length` on, and those before them of a picture that this would cut.
        Raises CallError position_gap where the model cannot."""
        if self.lengths[slot] > length:
            self._truncate(slot, self._positions.whole(slot, length))
        if not length:
            self._positions.tell(slot, ())

    def _truncate(self, slot: int, length: int) -> None:
        unused = self._cells.truncate(slot, length)
        if any(n_rows for each, n_rows in enumerate(self.lengths[: self._settings.n_slots]) if each != slot):
            for first, end in unused:
                first_at, end_at = self._positions.of(slot, first), self._positions.of(slot, end)
                self._unused.take(slot, first_at, end_at, end - first, self._cells.n_used)
        is_truncated = self._context.truncate(slot, self._positions.of(slot, length))
        if not is_truncated:
            self._context.truncate(slot, 0)
            self._cells.truncate(slot, 0)
        if not any(self.lengths[: self._settings.n_slots]):
            self._unused.free()
        if not is_truncated:
            raise CallError(
                "position_gap", "this model's state cannot be rolled back: start the request anew", "position"
            )

    def share(self, source: int, target: int, length: int) -> int:
        """Give the empty sequence `target` the first `length` rows of `source`; fewer where that would cut
        a picture. How many. Not for recurrent models."""
        length = self._positions.whole(source, length)
        self._context.share(source, target, self._positions.of(source, length))
        self._cells.share(source, target, length)
        self._positions.share(source, target, length)
        return length

    def state_size(self, sequence: int) -> int:
        """The number of bytes that `save` would return."""
        return self._context.state_size(sequence)

    def save(self, sequence: int) -> memoryview:
        return self._context.save(sequence)

    def save_rows(self, sequence: int, first: int, end: int) -> memoryview:
        """As `save`, of the rows at positions [first, end) only."""
        last = len(self.lengths) - 1
        of = self._positions.of
        self._context.share_rows(sequence, last, of(sequence, first), of(sequence, end))
        try:
            return self._context.save(last)
        finally:
            self._context.truncate(last, 0)

    def restore(self, sequence: int, state: bytes | memoryview, n_rows: int) -> bool:
        """Fill an empty sequence with the `n_rows` rows that `save` of this segment gave. False, and empty
        still, where libllama will not have them."""
        if not self._restore(sequence, state):
            return False
        self._cells.append(sequence, n_rows)
        self._positions.tell(sequence, ())
        return True

    def _restore(self, sequence: int, state: bytes | memoryview) -> bool:
        """False, and empty still, where libllama will not have it: it may want cells next to each other."""
        while not (is_restored := self._context.restore(sequence, state)):
            self._context.truncate(sequence, 0)
            if not self._unused.free():
                break
        return is_restored

    def append_rows(self, sequence: int, state: bytes | memoryview, n_rows: int) -> bool:
        """Give a sequence the `n_rows` rows that come next, which `save_rows` of this segment gave. False
        where libllama will not have them; it has those that it had then."""
        first = self.lengths[sequence]
        if not first:
            return self.restore(sequence, state, n_rows)
        last = len(self.lengths) - 1
        if not self._restore(last, state):
            return False
        self._context.share_rows(last, sequence, first, first + n_rows)
        self._context.truncate(last, 0)
        self._cells.append(sequence, n_rows)
        return True

    def run(self, spans: Sequence[Span]) -> list[np.ndarray]:
        """As `_run`, in as few graphs as the model's state allows."""
        if len(spans) == 1 or not self.is_recurrent:
            return self._run(spans)
        results: dict[int, np.ndarray] = {}
        for group in self._groups(spans):
            for i, result in zip(group, self._run([spans[i] for i in group]), strict=True):
                results[i] = result.copy()
        return [results[i] for i in range(len(spans))]

    def _groups(self, spans: Sequence[Span]) -> list[list[int]]:
        """Which spans may share a graph of a recurrent model: those of one length, and without attention
        only those of neighbouring slots. libllama would distribute others over several graphs in an order
        of its own, and the tap sees one."""
        groups: list[list[int]] = []
        for i in sorted(range(len(spans)), key=lambda i: (len(spans[i].data), spans[i].slot)):
            last = spans[groups[-1][-1]] if groups else None
            if (
                last is not None
                and len(last.data) == len(spans[i].data)
                and (self._model.is_hybrid or last.slot + 1 == spans[i].slot)
            ):
                groups[-1].append(i)
            else:
                groups.append([i])
        return groups

    def _run(self, spans: Sequence[Span]) -> list[np.ndarray]:
        """One result per span: hidden states f32 [n, n_embd] of every row, or from the head logits, f32
        [n_vocab] of the last row or [n, n_vocab] of all, f32 [n, n_embd] states after the final norm, or
        nothing. Views that the next run overwrites. A span that wants normed states is alone and has at most
        `n_outputs_max` rows.

        All spans together have at most N_BATCH rows and have passed `check`; slots are truncated to their
        position. Raises CallError position_gap, context_full, engine; Interrupted.
        """
        rows = _Rows.of(spans)
        normed = self.has_head and spans[0].want == "normed"
        outputs: bool | np.ndarray = normed or not self.has_head
        if self.has_head and not normed:
            outputs = _outputs(spans, rows)
        for span in spans:
            if self.lengths[span.slot] > span.position:
                self.truncate(span.slot, span.position)
            if span.runs or not span.position:
                self._positions.tell(span.slot, span.runs)
        fed, positions = rows.data, rows.positions
        is_fed = self.n_deepstack > 0 and fed.ndim == 2
        if is_fed:
            fed = widened(fed, self._model.n_embd_input)
        if self._model.has_grid_positions and (is_fed or not self._positions.are_plain):
            is_fed = is_fed or any(self._positions.has_grid(s.slot, s.position, len(s.data)) for s in spans)
            positions = self._several_positions(spans, is_fed=is_fed)
        if self._tap is not None:
            # Rows that are fed with all of their positions are what the first layer gets.
            self._tap.arm(fed, is_fed=is_fed)
            if self._feeds_tokens and fed.ndim == 2 and not is_fed:
                fed = np.zeros(rows.n, np.int32)
        is_causal = self._positions.are_plain or self._is_causal(spans)
        if self.n_taken + rows.n > self._settings.n_ctx:
            self._unused.free()
        try:
            if self._whole is None:
                self._context.decode(fed, positions, rows.slots, outputs, normed=normed, is_causal=is_causal)
            else:
                with small_batches.alike():
                    self._context.decode(
                        fed, positions, rows.slots, outputs, normed=normed, is_causal=is_causal
                    )
            hidden = self._tap.take(rows.n) if self._tap is not None else None
        except CallError:
            for span in spans:  # some of the rows may be in the KV: none of them counts
                self._forget(span)
            raise
        for span in spans:
            self._cells.append(span.slot, len(span.data))
        if normed:
            return [np.stack([self._context.normed(row) for row in range(rows.n)])]
        if self.has_head:
            return [self._logits(span, last) for span, last in zip(spans, rows.lasts, strict=True)]
        assert hidden is not None
        return [hidden] if len(spans) == 1 else np.split(hidden, [last + 1 for last in rows.lasts[:-1]])

    def _forget(self, span: Span) -> None:
        """Its rows, of which libllama may have some, and the sequence none that counts."""
        length = self._positions.whole(span.slot, span.position)
        if not self._context.truncate(span.slot, self._positions.of(span.slot, length)):
            self._context.truncate(span.slot, 0)
            length = 0
        self._cells.truncate(span.slot, length)

    def _is_causal(self, spans: Sequence[Span]) -> bool:
        """Whether no row sees those behind it. Raises CallError engine for a part of rows that see each
        other, and for such rows beside others: libllama computes another thing then."""
        for span in spans:
            run = sees_later(self._positions[span.slot], span.position, len(span.data))
            if run is not None:
                if len(spans) > 1 or (span.position, len(span.data)) != (run.first_row, run.n_rows):
                    raise CallError("engine", f"rows {run.first_row}:{run.end} do not run by themselves")
                return False
        return True

    def _several_positions(self, spans: Sequence[Span], *, is_fed: bool) -> np.ndarray:
        """Of a model whose rows have several each: i32 [SECTIONS, n], or, where tokens are fed, [n]: libllama
        repeats those itself."""
        found = [positions_of(self._positions[s.slot], s.position, len(s.data)) for s in spans]
        positions = found[0] if len(found) == 1 else np.concatenate(found, axis=1)
        return positions if is_fed else positions[0]

    def can_step(self, slot: int, position: int) -> bool:
        """Whether `step` is for such a row: one that nothing has to be checked or forgotten for."""
        return (
            self.lengths[slot] == position
            and self._cells.n_used < self._settings.n_ctx
            and not self._model.is_recurrent
        )

    def step(self, slot: int, position: int, row: np.ndarray, want: Want) -> np.ndarray:
        """`run` of one span of one row. Raises CallError engine, context_full."""
        return self._run((Span(slot, position, row, want),))[0]

    def _logits(self, span: Span, last: int) -> np.ndarray:
        if span.want == "rows":
            n = len(span.data)
            return self._context.logits_of_rows(last - n + 1, n)
        return self._context.logits(last) if span.want == "logits" else _NOTHING

    def close(self) -> None:
        for other in [*self.apart_segments]:
            other.close()
        self.is_closed = True
        self._context.close()
        if self._whole is None:
            self._model.close()
        elif self in self._whole.apart_segments:
            self._whole.apart_segments.remove(self)


_NOTHING: Final = np.empty(0, np.float32)


def _outputs(spans: Sequence[Span], rows: _Rows) -> np.ndarray | bool:
    """Of which rows the head gives logits."""
    if rows.n == 1:
        return spans[0].want in ("logits", "rows")
    outputs = np.zeros(rows.n, np.int8)
    for span, last in zip(spans, rows.lasts, strict=True):
        first = last - len(span.data) + 1 if span.want == "rows" else last
        outputs[first : last + 1] = span.want in ("logits", "rows")
    return outputs


@dataclass(slots=True)
class _Rows:
    """The rows of all spans, one after the other."""

    data: np.ndarray
    positions: np.ndarray | int
    slots: np.ndarray | int
    lasts: list[int]
    """Index of each span's last row."""
    n: int

    @staticmethod
    def of(spans: Sequence[Span]) -> _Rows:
        if len(spans) == 1:
            (span,) = spans
            n = len(span.data)
            # A lone decode step: a call of numpy takes a microsecond, and ten when it comes from memory.
            if n == 1:
                return _Rows(span.data, span.position, span.slot, [0], 1)
            return _Rows(span.data, np.arange(span.position, span.position + n), span.slot, [n - 1], n)
        counts = [len(span.data) for span in spans]
        ranges = [np.arange(s.position, s.position + n) for s, n in zip(spans, counts, strict=True)]
        return _Rows(
            joined([span.data for span in spans]),
            np.concatenate(ranges),
            np.repeat([span.slot for span in spans], counts),
            (np.cumsum(counts) - 1).tolist(),
            sum(counts),
        )
