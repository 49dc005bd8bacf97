"""One matrix product in ggml's ways and in the worker's: processor time for each type and number of rows.

    python -m bench.products --types Q5_0 Q4_0 --rounds 7

"dots" are ggml's dot products, "tiles" its tiles, "rearranged" its products of matrices that it has
rearranged (of types for which it has such), "ours" the worker's kernels for this processor's widest vectors
with the bits of dot products, "panels" those with sums of their own for a few rows (with a matrix unit only).
The matrices are random. Ways take turns; a figure is the milliseconds that one thread computed for a product.
The rival is the faster of dots and tiles.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from gguf.constants import GGMLQuantizationType as Type

from bench.common.figures import Figure, publish, ratios
from swarmllm_workers.kernels import interposing, small_batches
from swarmllm_workers.kernels.ggml_functions import F32, InitParams, functions, no_memory
from swarmllm_workers.kernels.kernel_choice import MatrixType, Way, ways_of

import llama_cpp.llama_cpp  # noqa: F401  isort: skip  (after the worker's package, which stands before it)

ROWS: Final = (1, 2, 4, 8, 16, 64)
N_MATRICES: Final = 8
_TENSOR_BYTES: Final = 1024
_REARRANGED: Final = "_Z35ggml_backend_cpu_repack_buffer_typev"
_HAS_REARRANGED: Final = (Type.Q4_0, Type.Q4_K, Type.Q2_K, Type.IQ4_NL, Type.MXFP4)


def _base(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    function = getattr(interposing.mapped_libraries("libggml-base")[0], name)
    function.restype, function.argtypes = result, arguments
    return function  # type: ignore[no-any-return]


class Products:
    """Of random matrices [m, k] of one type with 1 to 64 rows."""

    def __init__(self, kind: Type, k: int, m: int, *, rearranged: bool) -> None:
        self._ggml = functions()
        self._k, self._m = k, m
        name, library = ("ggml_backend_cpu_buffer_type", "libggml-base")
        if rearranged:
            name, library = _REARRANGED, "libggml-cpu"
        buffer_type = getattr(interposing.mapped_libraries(library)[0], name)
        buffer_type.restype = ctypes.c_void_p
        context = self._context(N_MATRICES * _TENSOR_BYTES, no_alloc=True)
        self._matrices = [self._ggml["ggml_new_tensor_2d"](context, kind, k, m) for _ in range(N_MATRICES)]
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        _base("ggml_backend_alloc_ctx_tensors_from_buft", pointer, pointer, pointer)(context, buffer_type())
        values = np.random.default_rng(0).normal(0, 0.05, (m, k)).astype(np.float32)
        packed = np.zeros(_base("ggml_nbytes", size, pointer)(self._matrices[0]), np.uint8)
        weights = np.ones(k, np.float32)
        _base("ggml_quantize_chunk", size, ctypes.c_int, pointer, pointer, *[ctypes.c_int64] * 3, pointer)(
            kind, values.ctypes.data, packed.ctypes.data, 0, m, k, weights.ctypes.data
        )
        for matrix in self._matrices:
            _base("ggml_backend_tensor_set", None, pointer, pointer, size, size)(
                matrix, packed.ctypes.data, 0, packed.nbytes
            )
        self._graphs = {n: self._graph(n) for n in ROWS}
        self._backend = self._ggml["ggml_backend_cpu_init"]() or no_memory()
        self._ggml["ggml_backend_cpu_set_n_threads"](self._backend, 1)

    def _context(self, n_bytes: int, *, no_alloc: bool) -> int:
        return int(self._ggml["ggml_init"](InitParams(n_bytes + 2**20, None, no_alloc)) or no_memory())

    def _graph(self, n_rows: int) -> int:
        ggml = self._ggml
        n_bytes = 4 * n_rows * (self._k + N_MATRICES * self._m) + (N_MATRICES + 1) * _TENSOR_BYTES
        context = self._context(n_bytes, no_alloc=False)
        rows = ggml["ggml_new_tensor_2d"](context, F32, self._k, n_rows)
        values = np.random.default_rng(n_rows).normal(0, 1, (n_rows, self._k)).astype(np.float32)
        ctypes.memmove(ggml["ggml_get_data"](rows), values.ctypes.data, values.nbytes)
        graph = ggml["ggml_new_graph_custom"](context, 64, False)
        for matrix in self._matrices:
            ggml["ggml_build_forward_expand"](graph, ggml["ggml_mul_mat"](context, matrix, rows))
        return int(graph)

    def milliseconds(self, n_rows: int) -> float:
        started_ns = time.thread_time_ns()
        self._ggml["ggml_backend_graph_compute"](self._backend, self._graphs[n_rows])
        return (time.thread_time_ns() - started_ns) / N_MATRICES / 1e6


def measure(kind: Type, k: int, m: int, n_rounds: int) -> list[tuple[Figure, Figure | None]]:
    plain = Products(kind, k, m, rearranged=False)
    sides: dict[str, tuple[Products, Way | None]] = {
        "dots": (plain, Way.DOTS),
        "tiles": (plain, Way.TILES),
        "ours": (plain, small_batches.last_way()),
    }
    ways = ways_of(MatrixType(kind), 1, small_batches.ways_of_panels())
    if Way.PANELS_FEW in ways:
        sides["panels"] = (plain, Way.PANELS_FEW)
    if kind in _HAS_REARRANGED:
        sides["rearranged"] = (Products(kind, k, m, rearranged=True), None)
    found: list[tuple[Figure, Figure | None]] = []
    for n in ROWS:
        figures = {name: Figure(f"{kind.name}, {n} rows, {name}", "ms") for name in sides}
        for _ in range(n_rounds):
            for name, (products, way) in sides.items():
                small_batches.force(way)
                figures[name].values.append(products.milliseconds(n))
        small_batches.force(None)
        rival = min(figures["dots"], figures["tiles"], key=lambda figure: min(figure.values))
        others = [figure for figure in figures.values() if figure is not rival]
        found += [(rival, None), *((figure, ratios(figure, rival)) for figure in others)]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", nargs="+", default=["Q4_0", "Q5_0", "IQ4_NL", "MXFP4"], metavar="TYPE")
    parser.add_argument("--k", type=int, default=896, help="numbers of a row of the matrix")
    parser.add_argument("--m", type=int, default=2432, help="rows of the matrix")
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args(arguments)
    small_batches.connect()
    rows = [row for name in chosen.types for row in measure(Type[name], chosen.k, chosen.m, chosen.rounds)]
    types = " ".join(chosen.types)
    command = (
        f"python -m bench.products --types {types} --k {chosen.k} --m {chosen.m} --rounds {chosen.rounds}"
    )
    publish(f"products-{chosen.k}-{chosen.m}", command, rows)


if __name__ == "__main__":
    main()
