"""Has each product of Q8_0 of a loaded model computed in the way that is the fastest here.

Measured when layers are loaded, for each row length of the model's matrices that is not known yet: first
whether all ways give the same bits, then how long they take (`product_timing.py`), which is some tenths of a
second for a model, once per machine and number of threads. What was chosen stands in a table of
`small_batches.c`; a step looks nothing up here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

from swarmllm_proto.ipc_base import KernelChoice, KernelMode, KernelWay
from swarmllm_workers.engine import interposing, kernel_timings, small_batches
from swarmllm_workers.engine.gguf_file import GgufFile
from swarmllm_workers.engine.kernel_choice import (
    ROW_CLASSES,
    RowChoice,
    RowClass,
    Way,
    choose,
    race,
    reference,
)
from swarmllm_workers.engine.kernel_timings import Shape, Timings
from swarmllm_workers.engine.product_timing import ProductBench, matrices
from swarmllm_workers.engine.split_source import files_of
from swarmllm_workers.errors import CallError

log = logging.getLogger(__name__)

BUDGET_S: Final = 0.06
"""For a row length, beside what the first round takes."""
LENGTHS_MAX: Final = 8
"""Row lengths of one file that are measured: those with the most bytes. Models have two to four."""

NAMES: Final[dict[Way, KernelWay]] = {
    Way.DOTS: "ggml-dots",
    Way.TILES: "ggml-tiles",
    Way.AVX2: "avx2",
    Way.AVX512: "avx512",
    Way.IN_ORDER: "avx512-in-order",
}


class Bench(Protocol):
    def run(self, n_rows: int) -> int: ...

    def result(self, n_rows: int) -> bytes: ...


class KernelTuning:
    """Of one worker."""

    def __init__(self, mode: KernelMode = "auto", kept_in: Path | None = None) -> None:
        self._mode = mode
        self._kept_in = kept_in
        self._machine: str | None = None
        self._chosen: Timings = {}
        """All that is known of this machine."""
        self._in_use: dict[int, Shape] = {}
        """By row length."""
        small_batches.use(mode)

    @property
    def choices(self) -> tuple[KernelChoice, ...]:
        """Of the row lengths of what was loaded."""
        return tuple(_told(shape, each) for shape in self._in_use.values() for each in self._chosen[shape])

    @property
    def is_on(self) -> bool:
        """Whether there is a choice."""
        return self._mode == "auto" and small_batches.last_way() > Way.TILES

    def read(self, paths: Iterable[Path]) -> list[GgufFile]:
        """For `tune`, in any thread: headers with large vocabularies take a while. The caller closes them."""
        sources = []
        for path in (file for each in paths for file in files_of(each)):
            try:
                sources.append(GgufFile(path))
            except CallError as error:
                log.warning("kernels are not measured with %s: %s", path.name, error.message)
        return sources

    def tune(self, sources: Iterable[GgufFile], n_threads: int, *, measures: bool = True) -> bool:
        """For the matrices of these files, between two batches: the table changes. False where something is
        not known that could be measured, and `measures` is False. Never raises for want of a measurement:
        then ggml computes single rows, and our kernels the rest."""
        if not self.is_on:
            return True
        n_unknown = sum(not self._tune(source, n_threads, measures) for source in sources)
        if self._in_use:
            small_batches.fill_table(
                {k: [each.way for each in self._chosen[shape]] for k, shape in self._in_use.items()}
            )
        return not n_unknown

    def _tune(self, source: GgufFile, n_threads: int, measures: bool) -> bool:
        sizes: dict[int, int] = {}
        for tensor in matrices(source):
            sizes[tensor.shape[0]] = sizes.get(tensor.shape[0], 0) + tensor.size_bytes
        cached_bytes = kernel_timings.cache_bytes()
        is_cached = sum(sizes.values()) <= cached_bytes
        has_new, is_known = False, True
        for k in sorted(sizes, key=lambda k: -sizes[k])[:LENGTHS_MAX]:
            shape = Shape(k, n_threads, is_cached)
            if shape not in self._chosen:
                self._read()
            if shape not in self._chosen and not measures:
                is_known = False
                continue
            if shape not in self._chosen:
                try:
                    with ProductBench(source, k, n_threads, cached_bytes=cached_bytes) as bench:
                        self._chosen[shape] = measure(bench, ways(), small_batches.force, _stopwatch(), k)
                except (LookupError, MemoryError) as error:
                    log.info("kernels for rows of %d are not measured: %s", k, error)
                    continue
                finally:
                    small_batches.force(None)
                has_new = True
            self._in_use[k] = shape
        if has_new and self._kept_in is not None and self._machine is not None:
            kernel_timings.write(self._kept_in, self._machine, self._chosen)
        return is_known

    def _read(self) -> None:
        """What earlier processes measured, once."""
        if self._kept_in is None or self._machine is not None:
            return
        libraries = [small_batches.find_library(), *interposing.mapped_paths("libggml-cpu")]
        try:
            self._machine = kernel_timings.machine_key(path for path in libraries if path is not None)
        except OSError as error:
            log.info("kernel timings are not kept: %s", error)
            self._kept_in = None
            return
        self._chosen = kernel_timings.read(self._kept_in, self._machine, ways()) | self._chosen


def _stopwatch() -> Callable[[], float]:
    """Seconds that this thread has computed since now, or a fifth of those that have passed if that is
    more: a measurement beside other programs takes longer, but not for ever."""
    thread_s, clock_s = time.thread_time(), time.perf_counter()
    return lambda: max(time.thread_time() - thread_s, (time.perf_counter() - clock_s) / 5)


def ways() -> tuple[Way, ...]:
    """Those of this processor."""
    return tuple(way for way in Way if way <= small_batches.last_way())


def measure(
    bench: Bench,
    ways: Sequence[Way],
    force: Callable[[Way], None],
    now_s: Callable[[], float],
    k: int,
    budget_s: float = BUDGET_S,
) -> tuple[RowChoice, ...]:
    """What is chosen for each of ROW_CLASSES. A way whose bits are wrong is left out, and the log says so."""
    unequal = {rows: _unequal(bench, rows, ways, force) for rows in ROW_CLASSES}
    wrong = sorted({way for found in unequal.values() for way in found if not way.is_ggmls})
    if wrong:
        log.warning(
            "kernels %s have other bits than ggml's for rows of %d here, and are not used where they have",
            ", ".join(NAMES[way] for way in wrong),
            k,
        )

    def run(n_rows: int, way: Way) -> int:
        force(way)
        return bench.run(n_rows)

    return tuple(
        choose(rows, times, unequal[rows]) for rows, times in race(ways, run, now_s, budget_s).items()
    )


def _unequal(
    bench: Bench, rows: RowClass, ways: Sequence[Way], force: Callable[[Way], None]
) -> Collection[Way]:
    force(reference(rows.first))
    expected = bench.result(rows.first)
    found = set()
    for way in ways:
        force(way)
        if way != reference(rows.first) and bench.result(rows.first) != expected:
            found.add(way)
    return found


def _told(shape: Shape, choice: RowChoice) -> KernelChoice:
    return KernelChoice(
        type="Q8_0",
        k=shape.k,
        n_threads=shape.n_threads,
        first_rows=choice.rows.first,
        last_rows=choice.rows.last,
        chosen=NAMES[choice.way],
        ggml_ns=choice.ggml_ns,
        ours_ns=choice.ours_ns or 0,
    )
