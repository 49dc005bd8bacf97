"""Times matrix products on this machine: ggml's graphs, computed in each way that `small_batches.c` knows.

A graph is what a model's layer is to ggml: some products of a few rows with matrices that are in no cache,
on as many threads as the model computes with, so conversion of the rows, barriers and waiting for memory
count. Ways take turns, round after round, and the best round of each counts, because whatever else the
machine does can only make a product slower.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import Final

import numpy as np

from swarmllm_workers.gguf_file import GgufFile, TensorInfo
from swarmllm_workers.kernels import repacking
from swarmllm_workers.kernels.ggml_functions import F32, InitParams, functions, no_memory
from swarmllm_workers.kernels.kernel_choice import MatrixType

_KINDS: Final = frozenset(MatrixType)
_TENSOR_BYTES: Final = 1024
"""More than ggml needs to describe a tensor."""
_GRAPH_BYTES: Final = 2**16
_MATRIX_BYTES: Final = 2**19
_N_PRODUCTS: Final = 2
"""Of a graph."""
_ALIGNMENT: Final = 32
"""In bytes; ggml wants it of a tensor."""
_PAGE: Final = 4096
_CACHE_BYTES_MIN: Final = 16 * 2**20
_CACHE_BYTES_MAX: Final = 64 * 2**20

Clock = Callable[[], int]
"""Nanoseconds."""


@dataclass(frozen=True)
class _Graph:
    handle: int
    outputs: tuple[int, ...]
    """Addresses of f32 [n_rows, matrix_rows]."""
    n_bytes: int
    """Of one output."""

    def wipe(self) -> None:
        for address in self.outputs:
            ctypes.memset(address, 0xFF, self.n_bytes)

    def read(self) -> list[bytes]:
        return [ctypes.string_at(address, self.n_bytes) for address in self.outputs]


class ProductBench:
    """Matrices of one type and row length: equal slices of a model's own, in the pages in which they are
    mapped."""

    def __init__(
        self,
        source: GgufFile,
        kind: MatrixType,
        k: int,
        n_threads: int,
        *,
        cached_bytes: int,
        clock: Clock | None = None,
    ) -> None:
        """`k`: numbers of a row. `cached_bytes`: size of the last cache. Raises LookupError where ggml or
        the file has not got what is needed, MemoryError."""
        self._ggml = functions()
        self._kind, self._k = kind, k
        tensors = [each for each in matrices(source) if (each.type, each.shape[0]) == (kind, k)]
        if not tensors:
            raise LookupError(f"no matrix of {kind.name} has rows of {k}")
        row_bytes = tensors[0].size_bytes // prod(tensors[0].shape[1:])
        self.matrix_rows = min(_height(tensors), max(16, _MATRIX_BYTES // row_bytes // 16 * 16))
        slice_bytes = self.matrix_rows * row_bytes
        offsets = [
            each.offset + at
            for each in tensors
            for at in range(0, each.size_bytes - slice_bytes + 1, slice_bytes)
            if (each.offset + at) % _ALIGNMENT == 0
        ]
        n_wanted = max(1, 2 * min(max(cached_bytes, _CACHE_BYTES_MIN), _CACHE_BYTES_MAX) // slice_bytes)
        offsets = offsets[:: max(1, len(offsets) // n_wanted)]
        if not offsets:
            raise LookupError(f"the matrices of {kind.name} with rows of {k} are not aligned")
        self._clock = clock or (time.thread_time_ns if n_threads == 1 else time.perf_counter_ns)
        self._closing = ExitStack()
        try:
            self._build(source, offsets, slice_bytes, n_threads)
        except BaseException:
            self._closing.close()
            raise

    def _build(self, source: GgufFile, offsets: Sequence[int], slice_bytes: int, n_threads: int) -> None:
        ggml = self._ggml
        self._backend = ggml["ggml_backend_cpu_init"]() or no_memory()
        self._closing.callback(ggml["ggml_backend_free"], self._backend)
        ggml["ggml_backend_cpu_set_n_threads"](self._backend, n_threads)
        mapped = np.frombuffer(source.map, np.uint8)
        address = mapped.ctypes.data
        for offset in offsets:
            mapped[offset : offset + slice_bytes : _PAGE].max()  # no page is met for the first time later
        buffer = ggml["ggml_backend_cpu_buffer_from_ptr"](address, len(mapped)) or no_memory()
        self._closing.callback(ggml["ggml_backend_buffer_free"], buffer)
        context = self._context(len(offsets) * _TENSOR_BYTES, no_alloc=True)
        self._matrices = []
        for offset in offsets:
            tensor = self._tensor(context, self._kind, self.matrix_rows)
            if ggml["ggml_backend_tensor_alloc"](buffer, tensor, address + offset) != 0:
                raise LookupError("ggml takes no tensor of a mapped file")
            self._matrices.append(tensor)
        self._graphs: dict[int, list[_Graph]] = {}
        self._at = 0

    def __enter__(self) -> ProductBench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    def _context(self, n_bytes: int, *, no_alloc: bool) -> int:
        context = self._ggml["ggml_init"](InitParams(n_bytes, None, no_alloc)) or no_memory()
        self._closing.callback(self._ggml["ggml_free"], context)
        return int(context)

    def _tensor(self, context: int, type_: int, n_rows: int) -> int:
        return int(self._ggml["ggml_new_tensor_2d"](context, type_, self._k, n_rows) or no_memory())

    def _graphs_of(self, n_rows: int) -> list[_Graph]:
        if n_rows not in self._graphs:
            self._graphs[n_rows] = self._make_graphs(self._values(n_rows), self._matrices)
        return self._graphs[n_rows]

    def _values(self, n_rows: int) -> np.ndarray:
        """f32 [n_rows, k], always the same."""
        return np.random.default_rng(n_rows).normal(0, 1, (n_rows, self._k)).astype(np.float32)

    def _make_graphs(self, values: np.ndarray, matrices: Sequence[int]) -> list[_Graph]:
        ggml, n_rows = self._ggml, len(values)
        output_bytes = n_rows * self.matrix_rows * 4
        groups = [matrices[at : at + _N_PRODUCTS] for at in range(0, len(matrices), _N_PRODUCTS)]
        n_bytes = n_rows * self._k * 4 + len(matrices) * (output_bytes + _TENSOR_BYTES)
        context = self._context(n_bytes + len(groups) * _GRAPH_BYTES + _TENSOR_BYTES, no_alloc=False)
        rows = self._tensor(context, F32, n_rows)
        ctypes.memmove(ggml["ggml_get_data"](rows), values.ctypes.data, values.nbytes)
        graphs = []
        for group in groups:
            handle = ggml["ggml_new_graph_custom"](context, 2 * _N_PRODUCTS + 8, False) or no_memory()
            outputs = []
            for matrix in group:
                product = ggml["ggml_mul_mat"](context, matrix, rows) or no_memory()
                ggml["ggml_build_forward_expand"](handle, product)
                outputs.append(ggml["ggml_get_data"](product))
            graphs.append(_Graph(handle, tuple(outputs), output_bytes))
        return graphs

    def run(self, n_rows: int) -> int:
        """Nanoseconds per product of `n_rows` rows, with the matrices that were read longest ago."""
        graphs = self._graphs_of(n_rows)
        self._at = (self._at + 1) % len(graphs)
        return self._compute(graphs[self._at])

    def result(self, n_rows: int) -> bytes:
        """What the first matrices and some rows make, always the same."""
        return b"".join(self._result(self._graphs_of(n_rows)[0]))

    def alone(self, n_rows: int) -> bytes:
        """As `result`, with each row in a batch of its own."""
        values = self._values(n_rows)
        first = self._matrices[:_N_PRODUCTS]
        found = [self._result(self._make_graphs(values[at : at + 1], first)[0]) for at in range(n_rows)]
        return b"".join(row for rows in zip(*found, strict=True) for row in rows)

    def _result(self, graph: _Graph) -> list[bytes]:
        """Of each product."""
        graph.wipe()
        self._compute(graph)
        return graph.read()

    def _compute(self, graph: _Graph) -> int:
        started = self._clock()
        status = self._ggml["ggml_backend_graph_compute"](self._backend, graph.handle)
        taken = self._clock() - started
        if status != 0:
            raise LookupError(f"ggml computes no product: status {status}")
        return max(1, taken // len(graph.outputs))


def _height(tensors: Sequence[TensorInfo]) -> int:
    """Rows of which most matrices have as many, by their bytes: the embedding of a small model is taller than
    all others, and half of the bytes."""
    left_bytes = sum(each.size_bytes for each in tensors) / 2
    for each in sorted(tensors, key=lambda tensor: tensor.shape[1]):
        left_bytes -= each.size_bytes
        if left_bytes <= 0:
            break
    return each.shape[1]


def matrices(source: GgufFile) -> list[TensorInfo]:
    """Those that `small_batches.c` multiplies with. Experts, which have three dimensions, are where they are
    K-quants, and the embedding is only where it is the output matrix, too."""
    repacked = () if repacking.keeps_rows([source.path]) else repacking.rearranged_types()
    return [
        tensor
        for tensor in source.tensors.values()
        if tensor.type in _KINDS
        and tensor.type not in repacked
        and (len(tensor.shape) == 2 or (len(tensor.shape) == 3 and MatrixType(tensor.type).is_k_quant))
        and (tensor.name != "token_embd.weight" or "output.weight" not in source.tensors)
    ]
