"""Tries whether a model of an unknown architecture may be cut, and compares with the uncut model.

What a cut gets wrong is in how layers are wired (scales, windows, what a layer's number decides), not in the
weights' values, so a few tokens show it: they go through the original file, then through a chain of units of
equal size, and every logit must be the same bit for bit. A window is made shorter than the prompt for both,
or where libllama does not let it be, the prompt longer. Only units that were tried are run afterwards
(`Architecture.is_generic`), which is why passing says something about every later request.

One unit is in memory at a time, and one segment file on the disk. A unit that would make libllama abort is
found out in a child process, as models are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from swarmllm_proto.architectures import Architecture, generic, units_to_try
from swarmllm_proto.segment_names import TRIAL
from swarmllm_workers.cache.prefixes import PrefixSettings
from swarmllm_workers.engine import segment_file
from swarmllm_workers.engine.embedding import Embedding
from swarmllm_workers.engine.libllama import N_BATCH
from swarmllm_workers.engine.memory import available_bytes, predict, refuse_what_does_not_fit
from swarmllm_workers.engine.probe import refuse_what_aborts
from swarmllm_workers.engine.segment import EngineSettings, Segment, Span
from swarmllm_workers.engine.segment_file import n_layers_of
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import ARRAY, open_source

N_PROMPT: Final = 24
N_DECODE: Final = 6
FIRST_CHUNKS: Final = (1, 7)
"""Rows of the first forwards; the rest of the prompt is one."""
SHORT_WINDOW: Final = 8
Progress = Callable[[int, int], None]


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
    """`progress`: (bytes run through, bytes at most). `units`: to try, instead of `units_to_try`. Raises
    CallError where it cannot be found out now: out_of_memory."""
    return _Check(path, cache_dir, settings, progress).run(units)


class _CannotTell(Exception):
    """Why a few tokens would show nothing."""


class _Check:
    def __init__(self, path: Path, cache_dir: Path, settings: EngineSettings, progress: Progress) -> None:
        self._source = open_source(path)
        self._cache_dir = cache_dir
        self._n_layers = n_layers_of(self._source)
        self._architecture = generic(self._source.text("general.architecture"))
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

    def run(self, wanted: Sequence[int]) -> CutVerdict:
        units = [unit for unit in wanted or units_to_try(self._n_layers) if unit < self._n_layers]
        if not units:
            return CutVerdict(0, "it has one layer")
        size_bytes = self._source.size_bytes
        needed = predict(self._source, self._n_layers, [(0, self._n_layers)], self._settings)
        refuse_what_does_not_fit(needed, "checking where the model may be cut", available_bytes())
        self._total_bytes = size_bytes * (1 + len(units))
        try:
            tokens, bounds, expected = self._uncut()
        except _CannotTell as reason:
            return CutVerdict(0, str(reason))
        except CallError as error:
            if error.kind == "out_of_memory":
                raise
            return CutVerdict(0, f"libllama cannot run it: {error.message}")
        if not np.isfinite(expected).all() or not expected.std() > 0:
            return CutVerdict(0, "the uncut model gives nothing that a cut could be compared with")
        rows = Embedding(self._source).rows(tokens)
        failures: list[str] = []
        for unit in units:
            try:
                got = self._chain(unit, [rows[start:end] for start, end in bounds])
            except CallError as error:
                if error.kind == "out_of_memory":
                    raise
                failures.append(f"in units of {unit}: {error.message}")
                continue
            if np.array_equal(got, expected):
                return CutVerdict(unit)
            failures.append(f"in units of {unit} its layers give other numbers than in the whole model")
        return CutVerdict(0, f"a self-check failed: {failures[0]}")

    def _short_window(self) -> Mapping[str, int]:
        key = f"{self._architecture.name}.attention.sliding_window"
        value = self._source.values.get(key)
        has_window = value is not None and value.type != ARRAY and self._source.integer(key) > SHORT_WINDOW
        return {key: SHORT_WINDOW} if has_window else {}

    def _uncut(self) -> tuple[np.ndarray, list[tuple[int, int]], np.ndarray]:
        """The tokens, the (start, end) of each forward, and the logits that each ends with."""
        segment = self._open(self._source.path, 0, self._n_layers, None)
        try:
            n_prompt = N_PROMPT
            if segment.n_window >= n_prompt - SHORT_WINDOW:
                n_prompt = segment.n_window + SHORT_WINDOW
                if n_prompt > N_BATCH:
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

    def _chain(self, unit: int, data: Sequence[np.ndarray]) -> np.ndarray:
        for start, end in self._architecture.pieces(0, self._n_layers, unit):
            with tempfile.TemporaryDirectory(dir=self._cache_dir, prefix=TRIAL) as folder:
                path = Path(folder) / f"{start}-{end}.gguf"
                segment_file.cut(self._source, self._architecture, start, end, path)
                refuse_what_aborts(path)
                segment = self._open(path, start, end, self._architecture)
                try:
                    data = self._run(segment, data)
                finally:
                    segment.close()
        return np.stack(data)

    def _open(self, path: Path, start: int, end: int, architecture: Architecture | None) -> Segment:
        return Segment(
            path,
            start,
            end,
            n_layers=self._n_layers,
            architecture=architecture,
            settings=self._settings,
            numbers=self._numbers,
        )

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
