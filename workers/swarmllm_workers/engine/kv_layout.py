"""In which layout a worker's contexts keep KV, and what it takes to bring KV to another one.

libllama turns keys and values before it rounds them to q8_0, where heads are of whole 64s: each run of so
many numbers is multiplied by a Walsh-Hadamard matrix, which spreads outliers. f16 is kept as it is computed.
The matrix is its own inverse. After `llama_kv_cache` of llama.cpp.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np
from blake3 import blake3

from swarmllm_workers.engine import releases
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.gguf_file import ARRAY, GgufFile
from swarmllm_workers.kernels import row_attention

_TURNED_BY: Final = 64
_TURNS_NOT: Final = "LLAMA_ATTN_ROT_DISABLE"


@dataclass(frozen=True)
class KvLayout:
    is_q8_0: bool = False
    """Else f16."""
    is_transposed: bool = False
    """V, where attention is not fused."""
    k_turned: int = 0
    """In runs of so many numbers, where the type is q8_0; 0: not."""
    v_turned: int = 0

    @property
    def rounded(self) -> KvLayout:
        """The same model's KV as q8_0."""
        return replace(self, is_q8_0=True, is_transposed=False)


def kv_layout(source: GgufFile, settings: EngineSettings) -> KvLayout | None:
    """Of the contexts of a model with these settings. None: it is not known, or KV of the model cannot be
    brought from one layout to another."""
    fused, widths = is_fused(source, settings), _head_widths(source)
    if fused is None or widths is None or not releases.is_tried():
        return None
    k_width, v_width = widths
    turns = not _turns_not()
    return KvLayout(
        is_q8_0=settings.kv_type == "q8_0",
        is_transposed=not fused,
        # The largest power of two that divides the width.
        k_turned=k_width & -k_width if turns and k_width % _TURNED_BY == 0 else 0,
        v_turned=_TURNED_BY if turns and v_width % _TURNED_BY == 0 else 0,
    )


def is_fused(source: GgufFile, settings: EngineSettings) -> bool | None:
    """Whether attention is; None: "auto", which libllama decides by what the GPU can do."""
    attention = row_attention.chosen(settings.flash_attention, settings.kv_type)
    # libllama has no fused attention for Grok, and switches it off.
    if attention == "off" or source.text("general.architecture") == "grok":
        return False
    return None if attention == "auto" and settings.n_gpu_layers else True


def _head_widths(source: GgufFile) -> tuple[int, int] | None:
    """Of K and V; None: the model keeps something else, or the widths are not the same in all layers."""
    name = source.text("general.architecture")
    widths = [
        source.values.get(f"{name}.attention.{key}") for key in ("key_length", "value_length", "head_count")
    ]
    keeps_latents = f"{name}.attention.kv_lora_rank" in source.values
    if keeps_latents or any(value is not None and value.type == ARRAY for value in widths):
        return None
    n_heads = source.integer(f"{name}.attention.head_count", 0)
    plain = source.integer(f"{name}.embedding_length", 0) // n_heads if n_heads else 0
    k = source.integer(f"{name}.attention.key_length", plain)
    v = source.integer(f"{name}.attention.value_length", plain)
    return (k, v) if k > 0 and v > 0 else None


def _turns_not() -> bool:
    """As libllama reads its variable, with `atoi`."""
    number = re.match(r"\s*[+-]?(\d+)", os.environ.get(_TURNS_NOT, ""))
    return number is not None and int(number[1]) != 0


@cache
def kv_encoding() -> str:
    """Equal where the same bytes of KV are the same numbers to two workers."""
    return blake3(json.dumps([releases.release(), _turns_not()]).encode()).hexdigest(length=16)


def turned(numbers: np.ndarray, width: int) -> np.ndarray:
    """f32 [n, m], each run of `width` numbers (a power of two that divides m) multiplied by the orthonormal
    Walsh-Hadamard matrix; the fast transform."""
    # A run is a column, so that what numpy adds in one go lies side by side.
    columns = np.ascontiguousarray(numbers.reshape(-1, width).T) * np.float32(width**-0.5)
    other = np.empty_like(columns)
    half = 1
    while half < width:
        pairs, sums = (each.reshape(width // (2 * half), 2, -1) for each in (columns, other))
        np.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
        columns, other = other, columns
        half *= 2
    return np.ascontiguousarray(columns.T).reshape(numbers.shape)
