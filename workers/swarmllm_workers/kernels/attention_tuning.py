"""Has the attention of small batches computed by `row_attention_avx2.c` where it is the faster way here.

When layers are loaded, ggml's graph of one layer's attention is computed in both ways, with the model's
numbers of heads and invented keys and values: first whether all bits are equal, with one row and several,
with holes in the mask, and with sums that f16 cannot hold, then how long it takes. That takes some hundredths
of a second for a model, in each worker anew.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple, Protocol

import numpy as np

from swarmllm_proto.ipc import KernelChoice
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import GgufFile
from swarmllm_workers.kernels import row_attention
from swarmllm_workers.kernels.ggml_functions import F16, F32, InitParams, functions, no_memory
from swarmllm_workers.kernels.kernel_choice import GAIN_MIN
from swarmllm_workers.kernels.row_attention import HeadShape, RowChoices

log = logging.getLogger(__name__)

HEADS_MAX: Final = 256
"""Models with more are left to ggml."""
N_CELLS: Final = 300
"""Not whole tiles."""
BITS_ROWS: Final = (1, 3, 9)
TIMED_ROWS: Final = (1, 4)
"""Of the batch sizes in SIZES."""
SIZES: Final = ((1, 1), (2, 63))
ROUNDS: Final = 5
_LARGE: Final = 20000.0
"""Values of the first head: sums of them leave what f16 can hold."""
_TENSOR_BYTES: Final = 1024
"""More than ggml needs to describe a tensor."""
_GRAPH_BYTES: Final = 2**16


class Heads(NamedTuple):
    """Of a model's layers."""

    key: int
    """Numbers of a key."""
    value: int
    """Of a value."""
    queries: int
    """Heads of queries,"""
    keys: int
    """and of keys."""

    @property
    def shape(self) -> HeadShape:
        return HeadShape(self.key, self.value, self.queries // self.keys)


def heads_of(source: GgufFile) -> Heads | None:
    """None where the file says nothing that ours could compute, or another number for each layer."""
    name = source.text("general.architecture")
    try:
        queries = source.number(f"{name}.attention.head_count") or 0
        keys = source.number(f"{name}.attention.head_count_kv")
        keys = queries if keys is None else keys
        if not 0 < keys <= queries <= HEADS_MAX or queries % keys != 0:
            return None
        plain = (source.number(f"{name}.embedding_length") or 0) // queries
        key = source.number(f"{name}.attention.key_length") or plain
        value = source.number(f"{name}.attention.value_length") or plain
    except CallError:
        return None
    heads = Heads(key, value, queries, keys)
    return heads if row_attention.computes_rows(heads.shape) else None


class TimedAttention(Protocol):
    def run(self, n_rows: int) -> int: ...

    def result(self, n_rows: int) -> bytes: ...


class AttentionBench:
    """Graphs of one layer's attention: the last rows of a context."""

    def __init__(self, heads: Heads, n_threads: int) -> None:
        """Raises LookupError, MemoryError where ggml cannot compute it here."""
        self._ggml, self._heads = functions(), heads
        self._clock = time.thread_time_ns if n_threads == 1 else time.perf_counter_ns
        self._graphs: dict[int, tuple[int, int, int]] = {}
        self._random = np.random.default_rng(1)
        self._closing = ExitStack()
        try:
            self._backend = self._ggml["ggml_backend_cpu_init"]() or no_memory()
            self._closing.callback(self._ggml["ggml_backend_free"], self._backend)
            self._ggml["ggml_backend_cpu_set_n_threads"](self._backend, n_threads)
            for n_rows in {*BITS_ROWS, *TIMED_ROWS}:
                self._graphs[n_rows] = self._graph(n_rows)
        except BaseException:
            self._closing.close()
            raise

    def __enter__(self) -> AttentionBench:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def run(self, n_rows: int) -> int:
        """Nanoseconds."""
        started = self._clock()
        if self._ggml["ggml_backend_graph_compute"](self._backend, self._graphs[n_rows][0]) != 0:
            raise LookupError("ggml computes no attention")
        return max(1, self._clock() - started)

    def result(self, n_rows: int) -> bytes:
        """f32 [rows, heads, value]"""
        _, output, n_bytes = self._graphs[n_rows]
        ctypes.memset(output, 0xFF, n_bytes)
        self.run(n_rows)
        return ctypes.string_at(output, n_bytes)

    def _graph(self, n_rows: int) -> tuple[int, int, int]:
        """Itself, the address of what it computes, and the bytes of that."""
        ggml, heads, normal = self._ggml, self._heads, self._random.standard_normal
        queries = normal((n_rows, heads.queries, heads.key)).astype(np.float32)
        keys = normal((N_CELLS, heads.keys, heads.key)).astype(np.float16)
        values = normal((N_CELLS, heads.keys, heads.value))
        values[:, 0] = np.clip(_LARGE * values[:, 0], -6e4, 6e4)
        arrays = queries, keys, values.astype(np.float16), self._mask(n_rows)
        n_bytes = n_rows * heads.queries * heads.value * 4
        memory_bytes = sum(array.nbytes for array in arrays) + n_bytes + 16 * _TENSOR_BYTES + _GRAPH_BYTES
        context = ggml["ggml_init"](InitParams(memory_bytes, None, False))
        self._closing.callback(ggml["ggml_free"], context or no_memory())
        tensors = [self._tensor(context, array) for array in arrays]
        tensors[:3] = (ggml["ggml_permute"](context, each, 0, 2, 1, 3) for each in tensors[:3])
        result = ggml["ggml_flash_attn_ext"](context, *tensors, heads.key**-0.5, 0.0, 0.0) or no_memory()
        graph = ggml["ggml_new_graph_custom"](context, 16, False) or no_memory()
        ggml["ggml_build_forward_expand"](graph, result)
        return graph, ggml["ggml_get_data"](result), n_bytes

    def _tensor(self, context: int, numbers: np.ndarray) -> int:
        kind = F32 if numbers.dtype == np.float32 else F16
        shape = (*reversed(numbers.shape), 1, 1)[:4]
        made = self._ggml["ggml_new_tensor_4d"](context, kind, *shape) or no_memory()
        ctypes.memmove(
            self._ggml["ggml_get_data"](made), np.ascontiguousarray(numbers).ctypes.data, numbers.nbytes
        )
        return int(made)

    def _mask(self, n_rows: int) -> np.ndarray:
        """f16 [n_rows, N_CELLS]: causal, without every seventh cell or so, and with some numbers."""
        cells = np.arange(N_CELLS)
        is_there = cells <= N_CELLS - n_rows + np.arange(n_rows)[:, None]
        draws = self._random.random((n_rows, N_CELLS))
        mask = np.where(draws < 0.02, -1.5, 0.0)
        return np.where(is_there & (draws < 0.85), mask, -np.inf).astype(np.float16)


class Force(Protocol):
    def __call__(self, is_ours: bool | None, order: int | None = None) -> None: ...


class MeasuredAttention(NamedTuple):
    chosen: RowChoices
    ggml_ns: tuple[int, int] = (0, 0)
    """Of a single row, and of several."""
    ours_ns: tuple[int, int] = (0, 0)
    """0: ours has other bits."""


def measure(
    bench: TimedAttention, shape: HeadShape, force: Force, orders: Sequence[int] = (0,)
) -> MeasuredAttention:
    """What is chosen. `orders`: of sums; the last one is taken that has ggml's bits. Where none has, nothing
    is, and the log says so."""
    order = next((order for order in reversed(orders) if _has_ggmls_bits(bench, force, order)), None)
    if order is None:
        log.warning("attention has other bits than ggml's here for %s, and is ggml's", shape)
        return MeasuredAttention(RowChoices(False, False))
    best = {n_rows: {False: 2**62, True: 2**62} for n_rows in TIMED_ROWS}
    for _ in range(ROUNDS):
        for n_rows, times in best.items():
            for is_ours in times:
                force(is_ours, order)
                times[is_ours] = min(times[is_ours], bench.run(n_rows))
    log.info("attention of %s, nanoseconds of ggml (False) and ours (True) by rows: %s", shape, best)
    single, several = (best[n_rows] for n_rows in TIMED_ROWS)
    chosen = RowChoices(_is_faster(single), _is_faster(several), order)
    return MeasuredAttention(chosen, (single[False], several[False]), (single[True], several[True]))


def _is_faster(times: Mapping[bool, int]) -> bool:
    return times[True] < GAIN_MIN * times[False]


def _has_ggmls_bits(bench: TimedAttention, force: Force, order: int) -> bool:
    for n_rows in BITS_ROWS:
        force(False)
        expected = bench.result(n_rows)
        force(True, order)
        if bench.result(n_rows) != expected:
            return False
    return True


class AttentionTuning:
    """Of one worker."""

    def __init__(self) -> None:
        self._measured: dict[HeadShape, MeasuredAttention] = {}
        self._n_threads: dict[HeadShape, int] = {}
        row_attention.fill_table({})

    @property
    def choices(self) -> tuple[KernelChoice, ...]:
        """For the heads of what was loaded."""
        return tuple(
            KernelChoice(
                type="attention",
                k=shape.key,
                n_threads=self._n_threads[shape],
                first_rows=first,
                last_rows=last,
                chosen="ours" if is_ours else "ggml",
                ggml_ns=ggml_ns,
                ours_ns=ours_ns,
            )
            for shape, each in self._measured.items()
            for (first, last), is_ours, ggml_ns, ours_ns in zip(
                SIZES, each.chosen[:2], each.ggml_ns, each.ours_ns, strict=True
            )
        )

    def tune(self, sources: Iterable[GgufFile], n_threads: int, *, measures: bool = True) -> bool:
        """For the attention of these files, between two batches: the table changes. False where something is
        not known that could be measured, and `measures` is False. Never raises for want of a measurement:
        ggml computes it then."""
        is_known = True
        for source in sources:
            heads = heads_of(source)
            if heads is None or heads.shape in self._measured:
                continue
            if not measures:
                is_known = False
                continue
            try:
                with AttentionBench(heads, n_threads) as bench:
                    orders = row_attention.orders()
                    self._measured[heads.shape] = measure(bench, heads.shape, row_attention.force, orders)
                    self._n_threads[heads.shape] = n_threads
            except (LookupError, MemoryError) as error:
                log.info("attention of %s is not measured: %s", heads.shape, error)
            finally:
                row_attention.force(None)
        row_attention.fill_table({shape: each.chosen for shape, each in self._measured.items()})
        return is_known
