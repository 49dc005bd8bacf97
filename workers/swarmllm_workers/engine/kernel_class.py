"""Names the kernel class: workers of one class give equal bits for the same rows of exact requests.

The bits of such rows depend on the release of libllama, on the instructions that ggml was compiled for
(those of AVX-512 add up in another order than those of AVX2), on whether ggml rearranges the matrices, on the
type of keys and values, and on how many rows go through a batch. They also depend on what nobody names: a
compiler may join a product and a sum. So a few operations are computed here with numbers that are the same
everywhere, and what comes out is a part of the text as well.

Nothing is said of layers on a GPU: cards and drivers are too many to know which of them are alike.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import ExitStack
from functools import cache
from typing import Final

import numpy as np
from blake3 import blake3

from swarmllm_proto.limits import EXACT_ROWS
from swarmllm_workers.build_info import build_info
from swarmllm_workers.engine import runtime_check
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.gguf_file import GgufFile, files_of
from swarmllm_workers.kernels import repacking, small_batches
from swarmllm_workers.kernels.ggml_functions import F16, F32, no_memory

_FAMILIES: Final = (("AVX512", "avx512"), ("AVX2", "avx2"), ("AVX", "avx"), ("NEON", "neon"))
"""(what libllama says that it uses, name), the widest first."""
_WITHOUT_BITS: Final = frozenset({"OPENMP", "AVX512_BF16"})
"""What changes no sum of a model without bf16 (zen4 and icelake differ in the second)."""
_BF16: Final = 30
"""ggml's type."""
_DIGITS: Final = 8
_K: Final = 256
"""Numbers in a row of the sample."""


def kernel_class(source: GgufFile, settings: EngineSettings) -> str:
    """The kernel class of a model's layers here. Two workers have the same one only if exact rows have equal
    bits in both. "": unknown."""
    built = build_info()
    if built["gpu"] and settings.n_gpu_layers:
        return ""
    sample = _sample()
    if sample is None:
        return ""
    is_f16 = settings.kv_type == "f16"
    features = {str(each) for each in built["features"]}  # type: ignore[attr-defined]
    return name_of(
        str(built["version"]),
        features,
        kv_type=settings.kv_type,
        has_bf16=any(int(tensor.type) == _BF16 for tensor in source.tensors.values()),
        others=(
            _products(source),
            runtime_check.calls(),
            # What is stored as q8_0 is attended to in one piece for each thread, where ours is not asked.
            None if is_f16 or runtime_check.calls().attention else settings.n_threads,
            None if is_f16 else settings.flash_attention,
            EXACT_ROWS,
            sample,
        ),
    )


def _products(source: GgufFile) -> object:
    """Whether the matrices stay in their order, and whether experts are multiplied by our kernels; on ARM
    also how these were compiled."""
    found: object = repacking.keeps_rows(files_of(source.path))
    if any(len(tensor.shape) == 3 for tensor in source.tensors.values()):
        found = found, small_batches.multiplies_experts()
    joins = small_batches.joins_products()
    return found if joins is None else (found, joins)


def name_of(
    release: str, features: Iterable[str], *, kv_type: str, has_bf16: bool, others: tuple[object, ...]
) -> str:
    """The name of a class. `others`: what else decides it and has no name in the text. Pure."""
    used = set(features) - (_WITHOUT_BITS if not has_bf16 else {"OPENMP"})
    family = next((name for feature, name in _FAMILIES if feature in used), "plain")
    digest = blake3(repr((release, sorted(used), kv_type, others)).encode()).hexdigest()[:_DIGITS]
    return f"{release}-{family}-{kv_type}-{digest}"[:64]


@cache
def _sample() -> str | None:
    """A digest of what ggml computes from numbers that are the same everywhere; None: it computes nothing."""
    hasher = blake3()
    with ExitStack() as closing:
        try:
            graphs = runtime_check.Graphs(closing)
            ggml = graphs.ggml
            rows = graphs.filled(F32, _numbers(2, _K))
            matrix = graphs.filled(F16, _numbers(8, _K).astype(np.float16))
            for result, n_values in (
                (ggml["ggml_mul_mat"](graphs.context, matrix, rows), 2 * 8),
                (ggml["ggml_rms_norm"](graphs.context, rows, 1e-5), 2 * _K),
                (ggml["ggml_soft_max"](graphs.context, rows), 2 * _K),
                (ggml["ggml_silu"](graphs.context, rows), 2 * _K),
                (ggml["ggml_gelu"](graphs.context, rows), 2 * _K),
            ):
                graphs.compute(result or no_memory())
                hasher.update(ctypes.string_at(ggml["ggml_get_data"](result), 4 * n_values))
        except (LookupError, MemoryError):
            return None
    return hasher.hexdigest(length=16)


def _numbers(*shape: int) -> np.ndarray:
    """Between -4 and 4, without order; exact in f32."""
    n = int(np.prod(shape))
    mixed = (np.arange(1, n + 1, dtype=np.uint64) * np.uint64(2654435761)) >> np.uint64(8)
    return ((mixed & np.uint64(0xFFFF)).astype(np.float32) / 8192 - 4).reshape(shape)
