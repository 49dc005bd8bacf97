"""Tries where a file may be cut, and compares with the uncut model.

What a cut gets wrong is in how layers are wired (scales, windows, what a layer's number decides), not in the
weights' values, so a few tokens show it: they go through the original file, then through a chain of parts of
equal size, and every logit must be the same bit for bit. A window is made shorter than the prompt for both,
or where libllama does not let it be, the prompt longer.

Of an architecture in the table, parts as small as the table allows are tried first, which is every cut at
once, then parts of twice the size and so on up to half of the model. Where one of them fails, only coarser
cuts are allowed, and where all fail, none. What the table alone can know is taken from it where a few tokens
would show nothing.

Of an architecture that the table does not have, only units that were tried are run afterwards
(`Architecture.is_generic`), which is why passing says something about every later request.

One part is in memory at a time. A part that would make libllama abort is found out in a child process, as
models are.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from swarmllm_proto.architectures import ARCHITECTURES, Architecture, cut_rule, generic, units_to_try
from swarmllm_proto.segment_names import TRIAL
from swarmllm_workers.cache.prefixes import PrefixSettings
from swarmllm_workers.engine import releases, segment_file, shared_weights
from swarmllm_workers.engine.embedding import Embedding
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.libllama import N_BATCH
from swarmllm_workers.engine.memory import available_bytes, predict, refuse_what_does_not_fit
from swarmllm_workers.engine.probe import refuse_what_aborts
from swarmllm_workers.engine.ranges import overlooks_windows, periodic_windows
from swarmllm_workers.engine.segment import Segment, Span
from swarmllm_workers.engine.segment_file import n_layers_of
from swarmllm_workers.engine.shared_weights import Part
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import ARRAY, open_source

N_PROMPT: Final = 24
N_DECODE: Final = 6
FIRST_CHUNKS: Final = (1, 7)
"""Rows of the first forwards; the rest of the prompt is one."""
SHORT_WINDOW: Final = 8
RUN_BYTES_MAX: Final = 2**35
"""Weights that are run through at most to try parts of twice the smallest size and more."""
Progress = Callable[[int, int], None]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CutVerdict:
    unit: int
    """Layers may be cut at multiples of this; 0: the model runs whole only."""
    reason: str = ""
    """Why, where unit is 0."""


def check_cuts(
    path: Path,
    cache_dir: Path,
    settings: EngineSettings,
    progress: Progress,
    units: Sequence[int] = (),
) -> CutVerdict:
    """Find out where the file may be cut. `progress`: (bytes run through, bytes at most). `units`: the sizes
    to try instead of `units_to_try`. Raises CallError out_of_memory if there is no room to try it now."""
    return _Check(path, cache_dir, settings, progress).run(units)


class _CannotTell(Exception):
    """Why a few tokens would show nothing."""


class _Check:
    def __init__(self, path: Path, cache_dir: Path, settings: EngineSettings, progress: Progress) -> None:
        self._source = open_source(path)
        self._cache_dir = cache_dir
        self._n_layers = n_layers_of(self._source)
        name = self._source.text("general.architecture")
        self._is_listed = name in ARCHITECTURES
        self._architecture = ARCHITECTURES.get(name) or generic(name)
        lists_windows = releases.reads_window_lists(name)
        self._rule = cut_rule(
            name, self._n_layers, self._source.number, self._source.numbers, lists_windows=lists_windows
        )
        self._periodic = periodic_windows(self._source, self._n_layers)
        self._settings = replace(
            settings,
            n_ctx=N_BATCH + N_DECODE,
            n_slots=1,
            # On a GPU sums are made in another order than in one graph.
            n_gpu_layers=0,
            prefixes=PrefixSettings(n_cells_entries=0, n_entries=0),
        )
        self._numbers = self._short_window()
        self._progress = progress
        self._done_bytes = 0
        self._failures: dict[int, str] = {}
        """Why parts of so many layers are not exact; "" where they are."""

    def run(self, wanted: Sequence[int]) -> CutVerdict:
        finest = self._rule.cut_alignment if self._is_listed else 1
        if not finest:
            return CutVerdict(0, self._rule.whole_reason)
        tried = wanted or units_to_try(self._n_layers, self._rule.cut_alignment if self._is_listed else 0)
        units = [unit for unit in tried if unit < self._n_layers and unit % finest == 0]
        if not units:
            return CutVerdict(0, "it has one layer")
        size_bytes = self._source.size_bytes
        needed = predict(self._source, self._n_layers, [(0, self._n_layers)], self._settings)
        refuse_what_does_not_fit(needed, "checking where the model may be cut", available_bytes())
        self._total_bytes = size_bytes * (1 + len(units))
        try:
            tokens, bounds, expected = self._uncut()
            if not np.isfinite(expected).all() or not expected.std() > 0:
                raise _CannotTell("the uncut model gives nothing that a cut could be compared with")
        except _CannotTell as reason:
            return self._undecided(str(reason))
        except CallError as error:
            if error.kind == "out_of_memory":
                raise
            return self._undecided(f"libllama cannot run it: {error.message}")
        rows = Embedding(self._source).rows(tokens)
        if self._architecture.scales_tokens_only:
            rows = rows * np.sqrt(np.float32(rows.shape[1]))
        data = [rows[start:end] for start, end in bounds]
        for unit in units:
            if all(not self._failure(size, data, expected) for size in self._sizes(unit)):
                return CutVerdict(unit)
        reasons = [reason for reason in self._failures.values() if reason]
        return CutVerdict(0, f"a self-check failed: {reasons[0]}")

    def _undecided(self, reason: str) -> CutVerdict:
        """What holds where nothing can be found out: of an architecture in the table, the table."""
        if self._is_listed:
            log.info("%s: the cuts of the table hold untried: %s", self._source.path.name, reason)
            return CutVerdict(self._rule.cut_alignment)
        return CutVerdict(0, reason)

    def _sizes(self, unit: int) -> list[int]:
        """Layers of the parts that have to be exact where the model may be cut at multiples of `unit`: of an
        architecture in the table, neighbours run as one part, too."""
        sizes = [unit]
        n_more = RUN_BYTES_MAX // max(1, self._source.size_bytes) if self._is_listed else 0
        while 2 * sizes[-1] < self._n_layers and len(sizes) <= n_more:
            sizes.append(2 * sizes[-1])
        return sizes

    def _failure(self, size: int, data: Sequence[np.ndarray], expected: np.ndarray) -> str:
        """Why parts of so many layers are not exact, found out once; "": they are. Raises CallError
        out_of_memory."""
        if size not in self._failures:
            try:
                is_exact = np.array_equal(self._chain(size, data), expected)
                failure = "" if is_exact else "its layers give other numbers than in the whole model"
                self._failures[size] = failure and f"in units of {size} {failure}"
            except CallError as error:
                if error.kind == "out_of_memory":
                    raise
                self._failures[size] = f"in units of {size}: {error.message}"
        return self._failures[size]

    def _short_window(self) -> Mapping[str, int]:
        key = f"{self._architecture.name}.attention.sliding_window"
        value = self._source.values.get(key)
        has_window = value is not None and value.type != ARRAY and self._source.integer(key) > SHORT_WINDOW
        return {key: SHORT_WINDOW} if has_window else {}

    def _uncut(self) -> tuple[np.ndarray, list[tuple[int, int]], np.ndarray]:
        """The tokens, the (start, end) of each forward, and the logits that each ends with."""
        if overlooks_windows(self._source, self._n_layers):
            raise _CannotTell("this release of libllama overlooks which of its layers attend to a window")
        segment = self._open(self._source.path, 0, self._n_layers, None)
        try:
            n_prompt = N_PROMPT
            if segment.n_window >= n_prompt - SHORT_WINDOW:
                n_prompt = segment.n_window + SHORT_WINDOW
                if n_prompt > N_BATCH and self._is_listed:
                    n_prompt = N_PROMPT  # what lies beyond the window only the table can know
                elif n_prompt > N_BATCH:
                    raise _CannotTell(
                        f"a self-check would take more than its window of {segment.n_window} tokens"
                    )
            chunks = [*FIRST_CHUNKS, n_prompt - sum(FIRST_CHUNKS), *[1] * N_DECODE]
            bounds = list(pairwise([0, *np.cumsum(chunks).tolist()]))
            n_vocab = self._source.tensors["token_embd.weight"].shape[-1]
            tokens = np.random.default_rng(0).integers(0, n_vocab, bounds[-1][1]).astype(np.int32)
            logits = self._run(segment, [tokens[start:end] for start, end in bounds])
        finally:
            segment.close()
        return tokens, bounds, np.stack(logits)

    def _chain(self, size: int, data: Sequence[np.ndarray]) -> np.ndarray:
        alignment = self._rule.cut_alignment if self._is_listed else size
        for at in range(0, self._n_layers, size):
            stop = min(at + size, self._n_layers)
            for start, end in self._architecture.pieces(at, stop, alignment, self._periodic):
                data = self._through(start, end, data)
        return np.stack(data)

    def _through(self, start: int, end: int, data: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The part's results; from the pages of the file where that can be, as it will be run."""
        part = segment_file.plan_part(self._source, self._architecture, start, end)
        with tempfile.TemporaryDirectory(dir=self._cache_dir, prefix=TRIAL) as folder:
            path = Path(folder) / f"{start}-{end}.gguf"
            if self._settings.use_mmap and not self._settings.use_mlock and shared_weights.is_supported():
                path.write_bytes(part.header)
                os.truncate(path, part.size_bytes)
                refuse_what_aborts(path)
                try:
                    segment = self._open(self._source.path, start, end, self._architecture, part)
                except CallError as error:
                    if error.kind != "bad_model":
                        raise
                    path.unlink()
                else:
                    return self._run_and_close(segment, data)
            segment_file.cut(self._source, self._architecture, start, end, path)
            refuse_what_aborts(path)
            return self._run_and_close(self._open(path, start, end, self._architecture), data)

    def _run_and_close(self, segment: Segment, data: Sequence[np.ndarray]) -> list[np.ndarray]:
        try:
            return self._run(segment, data)
        finally:
            segment.close()

    def _open(
        self, path: Path, start: int, end: int, architecture: Architecture | None, part: Part | None = None
    ) -> Segment:
        return Segment(
            path,
            start,
            end,
            n_layers=self._n_layers,
            architecture=architecture,
            settings=self._settings,
            numbers=self._numbers_of(start, end, architecture),
            part=part,
            file_layers=(0, self._n_layers) if part is not None else None,
        )

    def _numbers_of(self, start: int, end: int, architecture: Architecture | None) -> Mapping[str, int]:
        """A short window, unless the part has no window, or one that is wide on purpose."""
        if architecture is None or architecture.is_generic or not self._numbers:
            return self._numbers
        values = segment_file.plan_values(
            self._source, architecture, start, end, segment_file.DUMMY_VOCABULARY
        )
        return {
            key: number
            for key, number in self._numbers.items()
            if key in values and bytes(values[key].raw) == bytes(self._source.values[key].raw)
        }

    def _run(self, segment: Segment, data: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Each forward's hidden states, or from the head the logits of its last row."""
        results: list[np.ndarray] = []
        position = 0
        for rows in data:
            results.append(segment.run([Span(0, position, rows, "logits")])[0].copy())
            position += len(rows)
        self._done_bytes += segment.weights_bytes
        self._progress(min(self._done_bytes, self._total_bytes), self._total_bytes)
        return results
