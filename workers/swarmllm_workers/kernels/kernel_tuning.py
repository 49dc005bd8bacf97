"""Has each matrix product of a loaded model computed in the way that is the fastest here.

Measured when layers are loaded, for each type and row length of the model's matrices that is not known yet:
first whether all ways give the same bits, then how long they take (`product_timing.py`), which is some tenths
of a second for a model, once per machine and number of threads. What was chosen stands in a table of
`small_batches.c`; a step looks nothing up here.

The times are kept in a file, so that a machine measures once. They hold for one processor, one build of
libllama and one build of our kernels; with another of these the file is ignored. What it contains is checked
like any other input: what is not a whole and possible measurement is measured anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final, Protocol, cast

import msgspec
import numpy as np
from msgspec import Meta

from swarmllm_proto.ipc.base import KernelChoice, KernelMode, KernelType, KernelWay, Nanoseconds
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import GgufFile, files_of
from swarmllm_workers.kernels import interposing, small_batches
from swarmllm_workers.kernels.attention_tuning import AttentionTuning
from swarmllm_workers.kernels.kernel_choice import (
    NEVER_LARGE,
    PANEL_ROWS_MIN,
    ROW_CLASSES,
    MatrixType,
    RowChoice,
    RowClass,
    Way,
    choose_all,
    large_batch_from,
    may_differ,
    race,
    reference,
    ways_of,
)
from swarmllm_workers.kernels.product_timing import ProductBench, matrices

log = logging.getLogger(__name__)

FILE_BYTES_MAX: Final = 2**18
SHAPES_MAX: Final = 128
_CPUINFO_BYTES_MAX: Final = 2**16
BUDGET_S: Final = 0.06
"""For a row length, beside what the first round takes."""
LENGTHS_MAX: Final = 8
"""Types and row lengths of one file that are measured: those with the most bytes. Models have two to six."""
NEAR: Final = 1e-4
"""How far sums in another order may be from each other, of the mean size of all."""
NAMES: Final[dict[Way, KernelWay]] = {
    Way.DOTS: "ggml-dots",
    Way.TILES: "ggml-tiles",
    Way.AVX2: "avx2",
    Way.AVX2_STREAMED: "avx2-streamed",
    Way.AVX512: "avx512",
    Way.IN_ORDER: "avx512-in-order",
    Way.PAIRS: "avx512-pairs",
    Way.NEON: "neon",
    Way.PANELS_AVX2: "panels-avx2",
    Way.PANELS_VNNI: "panels-vnni",
    Way.PANELS_AMX: "panels-amx",
    Way.PANELS_FEW: "panels-few",
}


class ProductShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What products take the same time for."""

    k: Annotated[int, Meta(ge=32, le=2**31 - 1)]
    """Numbers of a matrix row."""
    n_threads: Annotated[int, Meta(ge=1, le=1024)]
    is_cached: bool
    """All matrices of the model fit in the processor's last cache."""
    type: KernelType = "Q8_0"
    """Of the matrices."""


class _Measured(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    way: Annotated[int, Meta(ge=0, le=int(max(Way)))]
    ggml_ns: Nanoseconds
    ours_ns: Nanoseconds | None


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    shape: ProductShape
    classes: Annotated[tuple[_Measured, ...], Meta(min_length=len(ROW_CLASSES), max_length=len(ROW_CLASSES))]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    machine: Annotated[str, Meta(max_length=512)]
    entries: Annotated[tuple[_Entry, ...], Meta(max_length=SHAPES_MAX)]


Timings = dict[ProductShape, tuple[RowChoice, ...]]


def read_timings(path: Path, machine: str, ways: Iterable[Way]) -> Timings:
    """Empty where there is no such file, or it is another machine's, or not a whole one."""
    possible = set(ways)
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ValueError("too large")
        found = msgspec.json.decode(data, type=_File)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning(
            "kernel timings in %s cannot be used and are measured anew: %s",
            path.name,
            getattr(error, "strerror", None) or error,
        )
        return {}
    if found.machine != machine:
        return {}
    return {
        entry.shape: tuple(
            RowChoice(rows, Way(each.way), each.ggml_ns, each.ours_ns)
            for rows, each in zip(ROW_CLASSES, entry.classes, strict=True)
        )
        for entry in found.entries
        if all(Way(each.way) in possible for each in entry.classes)
    }


def write_timings(path: Path, machine: str, timings: Timings) -> None:
    """Whole or not at all. What goes wrong costs the next load its measurement, and nothing else."""
    entries = tuple(
        _Entry(shape, tuple(_Measured(each.way, each.ggml_ns, each.ours_ns) for each in choices))
        for shape, choices in list(timings.items())[-SHAPES_MAX:]
    )
    data = msgspec.json.encode(_File(machine, entries))
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        log.info("kernel timings cannot be kept in %s: %s", path.name, error.strerror)


def machine_key(libraries: Iterable[Path]) -> str:
    """The processor's name, and a digest of its features and of these libraries."""
    name, features = processor()
    digest = hashlib.sha256(features.encode())
    for path in libraries:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{name}; {digest.hexdigest()[:32]}"


def processor() -> tuple[str, str]:
    """Its name with family and model, and its features."""
    try:
        with Path("/proc/cpuinfo").open("rb") as file:
            text = file.read(_CPUINFO_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return platform.processor() or platform.machine(), ""
    return read_processor(text)


def read_processor(text: str) -> tuple[str, str]:
    """`processor` as /proc/cpuinfo tells it."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name") or platform.machine()
    if "CPU implementer" in fields:  # an ARM has no family
        numbers = f"implementer {fields['CPU implementer']}, part {fields.get('CPU part', '?')}"
    else:
        numbers = f"family {fields.get('cpu family', '?')}, model {fields.get('model', '?')}"
    return f"{name[:200]} ({numbers[:80]})", fields.get("flags") or fields.get("Features") or ""


def cache_bytes() -> int:
    """Of the processor's last cache; 0 where the system does not say."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text()[:32].strip()
        except OSError:
            continue
        if text[:-1].isdecimal() and text[-1:] in "KM":
            sizes.append(int(text[:-1]) * (2**20 if text[-1] == "M" else 2**10))
    return max(sizes)


class Bench(Protocol):
    def run(self, n_rows: int) -> int: ...

    def result(self, n_rows: int) -> bytes: ...

    def alone(self, n_rows: int) -> bytes: ...


class KernelTuning:
    """Of one worker."""

    def __init__(
        self, mode: KernelMode = "auto", kept_in: Path | None = None, *, rows_max: int = PANEL_ROWS_MIN
    ) -> None:
        """`rows_max`: of a prompt in one batch."""
        self._mode = mode
        self._rows_max = rows_max
        self._kept_in = kept_in
        self._machine: str | None = None
        self._chosen: Timings = {}
        """All that is known of this machine."""
        self._in_use: dict[tuple[MatrixType, int], ProductShape] = {}
        """By type and row length."""
        self._bytes_of: dict[tuple[MatrixType, int], int] = {}
        """The matrices of the file that was looked at last and has some."""
        small_batches.use(mode)
        self._attention = AttentionTuning()

    @property
    def choices(self) -> tuple[KernelChoice, ...]:
        """Of the types and row lengths of what was loaded."""
        return tuple(_told(shape, each) for shape in self._in_use.values() for each in self._chosen[shape])

    @property
    def attention_choices(self) -> tuple[KernelChoice, ...]:
        return self._attention.choices

    @property
    def large_batch_from(self) -> int:
        """See `kernel_choice.large_batch_from`; of the matrices of what was loaded."""
        if self._rows_max < PANEL_ROWS_MIN:
            return NEVER_LARGE
        return large_batch_from(
            (self._bytes_of[key], self._chosen[shape]) for key, shape in self._in_use.items()
        )

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
        sources = list(sources)
        n_unknown = sum(not self._tune(source, n_threads, measures) for source in sources)
        n_unknown += not self._attention.tune(sources, n_threads, measures=measures)
        if self._in_use:
            small_batches.fill_table(
                {key: [each.way for each in self._chosen[shape]] for key, shape in self._in_use.items()}
            )
        return not n_unknown

    def _tune(self, source: GgufFile, n_threads: int, measures: bool) -> bool:
        sizes: dict[tuple[MatrixType, int], int] = {}
        for tensor in matrices(source):
            key = MatrixType(tensor.type), tensor.shape[0]
            sizes[key] = sizes.get(key, 0) + tensor.size_bytes
        cached_bytes = cache_bytes()
        is_cached = sum(sizes.values()) <= cached_bytes
        has_new, is_known = False, True
        for kind, k in sorted(sizes, key=lambda key: -sizes[key])[:LENGTHS_MAX]:
            shape = ProductShape(k, n_threads, is_cached, _type_of(kind))
            if shape not in self._chosen:
                self._read()
            if shape not in self._chosen and not measures:
                is_known = False
                continue
            if shape not in self._chosen:
                try:
                    with ProductBench(source, kind, k, n_threads, cached_bytes=cached_bytes) as bench:
                        force = small_batches.force
                        self._chosen[shape] = measure(bench, kind, ways(), force, _stopwatch(), k)
                except (LookupError, MemoryError) as error:
                    log.info("kernels for rows of %d of %s are not measured: %s", k, kind.name, error)
                    continue
                finally:
                    small_batches.force(None)
                has_new = True
            self._in_use[kind, k], self._bytes_of[kind, k] = shape, sizes[kind, k]
        if has_new and self._kept_in is not None and self._machine is not None:
            write_timings(self._kept_in, self._machine, self._chosen)
        return is_known

    def _read(self) -> None:
        """What earlier processes measured, once."""
        if self._kept_in is None or self._machine is not None:
            return
        libraries = [small_batches.find_library(), *interposing.mapped_paths("libggml-cpu")]
        try:
            self._machine = machine_key(path for path in libraries if path is not None)
        except OSError as error:
            log.info("kernel timings are not kept: %s", error.strerror)
            self._kept_in = None
            return
        self._chosen = read_timings(self._kept_in, self._machine, ways()) | self._chosen


def _stopwatch() -> Callable[[], float]:
    """Seconds that this thread has computed since now, or a fifth of those that have passed if that is
    more: a measurement beside other programs takes longer, but not for ever."""
    thread_s, clock_s = time.thread_time(), time.perf_counter()
    return lambda: max(time.thread_time() - thread_s, (time.perf_counter() - clock_s) / 5)


def ways() -> tuple[Way, ...]:
    """Those of this processor."""
    last = small_batches.last_way()
    ours = (last,) if last == Way.NEON else tuple(way for way in Way if Way.TILES < way <= last)
    return Way.DOTS, Way.TILES, *ours, *small_batches.ways_of_panels()


def measure(
    bench: Bench,
    kind: MatrixType,
    ways: Sequence[Way],
    force: Callable[[Way], None],
    now_s: Callable[[], float],
    k: int,
    budget_s: float = BUDGET_S,
) -> tuple[RowChoice, ...]:
    """What is chosen for each of ROW_CLASSES. A way whose bits are wrong is left out, and the log says so."""
    unequal = {rows: _unequal(bench, kind, rows, ways, force) for rows in ROW_CLASSES}
    wrong = sorted({way for found in unequal.values() for way in found if not way.is_ggmls})
    if wrong:
        log.warning(
            "kernels %s have other bits than ggml's here for rows of %d of %s, and are not used "
            "where they have",
            ", ".join(NAMES[way] for way in wrong),
            k,
            kind.name,
        )

    def run(n_rows: int, way: Way) -> int:
        force(way)
        return bench.run(n_rows)

    return choose_all(kind, race(kind, ways, run, now_s, budget_s), unequal)


def _unequal(
    bench: Bench, kind: MatrixType, rows: RowClass, ways: Sequence[Way], force: Callable[[Way], None]
) -> Collection[Way]:
    """On ARM what counts are the bits of each row alone: ggml's dot products have others in even batches
    where it multiplies two rows at a time (i8mm)."""
    is_arm = Way.NEON in ways
    force(reference(kind, rows.first))
    expected = bench.alone(rows.first) if is_arm else bench.result(rows.first)
    found = set()
    for way in ways_of(kind, rows.first, ways):
        is_known = way == reference(kind, rows.first) and not is_arm
        if is_known or (way.is_ggmls and may_differ(kind, way, rows.first)):
            continue
        force(way)
        result = bench.result(rows.first)
        if not (are_near(result, expected) if way.has_own_sums else result == expected):
            found.add(way)
    return found


def are_near(found: bytes, expected: bytes) -> bool:
    """Of f32: whether they differ by no more than another order of sums explains."""
    ours, theirs = (np.frombuffer(each, np.float32) for each in (found, expected))
    return bool(np.abs(ours - theirs).max() <= NEAR * np.abs(theirs).mean())


def _type_of(kind: MatrixType) -> KernelType:
    return cast(KernelType, kind.name)


def _told(shape: ProductShape, choice: RowChoice) -> KernelChoice:
    return KernelChoice(
        type=shape.type,
        k=shape.k,
        n_threads=shape.n_threads,
        first_rows=choice.rows.first,
        last_rows=choice.rows.last,
        chosen=NAMES[choice.way],
        ggml_ns=choice.ggml_ns,
        ours_ns=choice.ours_ns or 0,
    )
