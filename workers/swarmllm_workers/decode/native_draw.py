"""Chooses a token with `draw.c`: one call instead of some thirty, where nothing but temperature, top_k,
top_p, min_p and the seed decides."""

from __future__ import annotations

import ctypes
import math
from typing import Final, NamedTuple

import numpy as np

from swarmllm_proto.ipc import Sampling
from swarmllm_workers.decode import candidates

_NOT_SURE: Final = -1


class _Draw(ctypes.Structure):
    """As in draw.c."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("temperature", ctypes.c_float),
        ("top_p", ctypes.c_float),
        ("least", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("maxima", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("changed", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("n_changed", ctypes.c_int64),
        ("largest", ctypes.c_float),
        ("largest_unchanged", ctypes.c_float),
    )


class Changed(NamedTuple):
    """Logits that are changed before a token is drawn, by biases and penalties."""

    tokens: np.ndarray
    """Ids, i32 [m], ascending."""
    values: np.ndarray
    """f32 [m]."""


class NativeDraw:
    def __init__(self, sampling: Sampling) -> None:
        self._library = candidates.native.library if _decides(sampling) else None
        least = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
        self._draw = _Draw(
            temperature=sampling.temperature, top_p=sampling.top_p, least=least, top_k=sampling.top_k
        )
        self._pointer = ctypes.byref(self._draw)
        self._room: np.ndarray | None = None

    def __call__(self, logits: np.ndarray, seed: int, changed: Changed | None = None) -> int | None:
        """The token that libllama's samplers draw from f32 [n] with this 32-bit seed, where the logits of
        `changed` are others. None where they have to be asked: they round in their own way, or more decides
        than `draw.c` knows, or the largest logit is not finite, or there is no `draw.c`."""
        is_array = logits.flags.c_contiguous and logits.flags.writeable and logits.dtype == np.float32
        if self._library is None or not is_array:
            return None
        draw = self._draw
        draw.n_changed = 0
        if changed is not None:
            tokens, values = changed  # `draw.c` writes to the values, and leaves them as they were
            draw.changed, draw.values, draw.n_changed = tokens.ctypes.data, values.ctypes.data, len(tokens)
        if self._room is None or draw.n != len(logits):
            n_blocks = -(-len(logits) // candidates.BLOCK)
            self._room = np.empty((2, n_blocks))
            draw.n, draw.sums, draw.maxima = len(logits), self._room[0].ctypes.data, self._room[1].ctypes.data
        draw.logits, draw.seed = logits.ctypes.data, seed
        token = self._library.swarmllm_draw(self._pointer)
        return None if token == _NOT_SURE else token

    @property
    def largest(self) -> float:
        """Of the logits of the last call that gave a token, before any was changed."""
        return float(self._draw.largest_unchanged)


def _decides(sampling: Sampling) -> bool:
    """Whether nothing but what `draw.c` knows chooses among logits."""
    return sampling.temperature == 0.0 or not (
        sampling.mirostat or sampling.typical_p < 1.0 or sampling.xtc_probability
    )
