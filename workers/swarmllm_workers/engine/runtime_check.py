"""Checks the libraries under this worker when it starts: which of our compiled parts are here, whether ggml
calls those that stand before its own functions, and whether its structs are laid out as we read them.

A libllama that was linked statically or with -Bsymbolic never looks for its symbols among the global ones:
our functions are loaded and nobody calls them. That shows only when ggml computes something. So two graphs
of one operation each are computed here, without a model, in about a millisecond.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np

from swarmllm_workers.engine import releases, shared_weights
from swarmllm_workers.engine.tap import TensorHead
from swarmllm_workers.kernels import amx, interposing, row_attention, small_batches
from swarmllm_workers.kernels.ggml_functions import F16, F32, Q8_0, InitParams, functions, no_memory

COMPILED: Final = {
    "tap": "hidden states are read by Python code, which costs time for every operation of a step",
    "small_batches": "products are ggml's own, slower, and a row may get other bits in a batch than alone",
    "row_attention": "attention is not fused unless the configuration asks for it, which is slower",
    "memory_calls": "the memory that layers will take is estimated, with more than they need",
    "lone_row": "rows of a lone request are taken over by numpy, which is slower",
    "weights": "sampling is done by numpy, which is slower",
    "row_codec": "rows for other nodes are packed by numpy, which is slower",
}
"""Part -> what is so without it."""
_MEMORY_BYTES: Final = 2**20
_SHAPE: Final = (3, 5, 7, 2)
_FACTOR: Final = 0.25


@dataclass(frozen=True)
class Calls:
    """Whether ggml calls our functions in place of its own."""

    products: bool
    attention: bool


class Graphs:
    """A ggml context and a processor to compute with. Raises LookupError or MemoryError."""

    def __init__(self, closing: ExitStack, *, memory_bytes: int = _MEMORY_BYTES, n_threads: int = 1) -> None:
        self.ggml = functions()
        self.context = self.ggml["ggml_init"](InitParams(memory_bytes, None, False)) or no_memory()
        closing.callback(self.ggml["ggml_free"], self.context)
        self._backend = self.ggml["ggml_backend_cpu_init"]() or no_memory()
        closing.callback(self.ggml["ggml_backend_free"], self._backend)
        self.ggml["ggml_backend_cpu_set_n_threads"](self._backend, n_threads)

    def tensor(self, kind: int, *shape: int) -> int:
        padded = (*shape, 1, 1, 1, 1)[:4]
        made = self.ggml["ggml_new_tensor_4d"](self.context, kind, *padded) or no_memory()
        n_bytes = math.prod(shape) * {F32: 4, F16: 2}.get(kind, 0) or math.prod(shape) // 32 * 34
        ctypes.memset(self.ggml["ggml_get_data"](made), 0, n_bytes)
        return int(made)

    def filled(self, kind: int, numbers: np.ndarray) -> int:
        """A tensor with these rows, F32 or F16 as `numbers` are."""
        made = self.tensor(kind, *reversed(numbers.shape))
        ctypes.memmove(self.ggml["ggml_get_data"](made), numbers.ctypes.data, numbers.nbytes)
        return made

    def compute(self, result: Any) -> None:
        graph = self.ggml["ggml_new_graph_custom"](self.context, 16, False) or no_memory()
        self.ggml["ggml_build_forward_expand"](graph, result or no_memory())
        if self.ggml["ggml_backend_graph_compute"](self._backend, graph) != 0:
            raise LookupError("ggml computes nothing")


@cache
def calls() -> Calls:
    """False as well where a graph cannot be computed here."""
    with ExitStack() as closing:
        try:
            graphs = Graphs(closing)
            ggml = graphs.ggml
            # Two rows: the fewest for which ggml has tiles, and so the fewest for which it calls.
            product = ggml["ggml_mul_mat"](
                graphs.context, graphs.tensor(Q8_0, 64, 16), graphs.tensor(F32, 64, 2)
            )
            graphs.compute(product)
            query, key, value = (
                graphs.tensor(F32, 64, 1, 1),
                graphs.tensor(F16, 64, 32, 1),
                graphs.tensor(F16, 64, 32, 1),
            )
            attention = ggml["ggml_flash_attn_ext"](graphs.context, query, key, value, None, 1.0, 0.0, 0.0)
            graphs.compute(attention)
        except (LookupError, MemoryError):
            pass
    return Calls(small_batches.is_asked(), row_attention.is_asked())


@cache
def reads_structs() -> bool:
    """Whether a tensor's fields lie where the tap reads them. False where ggml cannot be asked."""
    with ExitStack() as closing:
        try:
            graphs = Graphs(closing)
            operand = graphs.tensor(F32, *_SHAPE)
            scaled = graphs.ggml["ggml_scale"](graphs.context, operand, _FACTOR) or no_memory()
        except (LookupError, MemoryError):
            return False
        head, result = TensorHead.from_address(operand), TensorHead.from_address(scaled)
        strides = [4 * math.prod(_SHAPE[:n]) for n in range(4)]
        return (
            (head.type, list(head.shape), list(head.strides)) == (F32, list(_SHAPE), strides)
            and result.factor == _FACTOR
            and result.operand == operand
        )


def shortcomings() -> tuple[str, ...]:
    """What this worker does without, or what has not been tried, as one sentence each; () is as it should
    be. To be called before a model is loaded: attention that nobody calls is not relied on afterwards."""
    found = [
        f"the compiled part {name} is missing: {consequence}"
        for name, consequence in COMPILED.items()
        if interposing.find_library(name) is None
    ]
    called = calls()
    if not called.attention:
        row_attention.leave_out()
    for name, is_called in (
        ("small_batches", called.products),
        ("row_attention", called.attention),
    ):
        if interposing.find_library(name) is not None and not is_called:
            found.append(f"this build of libllama never calls {name}: {COMPILED[name]}")
    if amx.is_used():
        found.append("ggml cannot be kept from AMX: matrices stay as their file has them, more slowly")
    if not shared_weights.is_supported():
        found.append("layers cannot be run from the file where they lie: each range is copied on the disk")
    if not reads_structs():
        found.append("ggml's tensors are laid out in another way than is read here: models may not be cut")
    if not releases.is_tried():
        found.append(
            f"llama-cpp-python {releases.release()} has not been tried here (tried: "
            f"{', '.join(releases.TRIED)}): cut "
            "models may compute something else, and KV of another format is not converted; install one that "
            "was tried"
        )
    return tuple(found)
