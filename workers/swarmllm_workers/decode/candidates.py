"""Finds the tokens that can be drawn, in few vectorised passes over the logits.

libllama's samplers take a list of every token, and to write it takes longer than all of this together. They
are given a list of few tokens: all that the first truncating sampler would keep and perhaps some more, or for
`top_p`, which needs the sum over all tokens, exactly those that it keeps. Where nothing is truncated no list
is needed: `draw` finds the token at which the sum of probabilities reaches the random number.

What is needed of every logit is computed by `weights.c`, or in numpy where that was not built. Where it was,
`native_draw.py` draws most tokens by itself.
"""

from __future__ import annotations

import ctypes
from typing import Final

import numpy as np

from swarmllm_workers.kernels.interposing import find_library

BLOCK: Final = 128
"""As in weights.h."""
_NEAR: Final = 1e-7
"""Of the sum of all probabilities: nearer to the border between two tokens than this, exponentials in f64
decide."""
_NEAR_EXACT: Final = 1e-9
"""Nearer than this libllama is asked which token it would draw: it rounds exponentials in its own way."""


class _Native:
    def __init__(self) -> None:
        path = find_library("weights")
        self.library = ctypes.CDLL(str(path)) if path is not None else None
        if self.library is not None and not hasattr(self.library, "swarmllm_draw"):
            self.library = None  # built from an earlier state of the source
        if self.library is not None:
            pointer, size, f32 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_float
            self.library.swarmllm_weigh.argtypes = [pointer, size, f32, f32, pointer, pointer]
            self.library.swarmllm_weigh.restype = None
            self.library.swarmllm_block_maxima.argtypes = [pointer, size, pointer]
            self.library.swarmllm_block_maxima.restype = None
            self.library.swarmllm_draw.argtypes = [pointer]
            self.library.swarmllm_draw.restype = ctypes.c_int64

    def weigh(
        self, logits: np.ndarray, largest: float, temperature: float, weights: np.ndarray | None = None
    ) -> np.ndarray | None:
        """f64, the sum of the weights exp(logit / temperature - largest / temperature) of each block. None
        where it was not built. `weights`: f32, gets those of `logits`."""
        if self.library is None or not logits.flags.c_contiguous or logits.dtype != np.float32:
            return None
        sums = np.empty(-(-len(logits) // BLOCK))
        self.library.swarmllm_weigh(
            logits.ctypes.data,
            len(logits),
            largest,
            temperature,
            sums.ctypes.data,
            None if weights is None else weights.ctypes.data,
        )
        return sums

    def block_maxima(self, logits: np.ndarray) -> np.ndarray | None:
        if self.library is None or not logits.flags.c_contiguous or logits.dtype != np.float32:
            return None
        maxima = np.empty(-(-len(logits) // BLOCK), np.float32)
        self.library.swarmllm_block_maxima(logits.ctypes.data, len(logits), maxima.ctypes.data)
        return maxima


native = _Native()


def block_maxima(logits: np.ndarray) -> np.ndarray:
    """The largest logit of each block, NaN where one of the block is; f32. `logits` f32 [n], as below, where
    `maxima` are these."""
    maxima = native.block_maxima(logits)
    return maxima if maxima is not None else np.maximum.reduceat(logits, np.arange(0, len(logits), BLOCK))


def best(logits: np.ndarray, maxima: np.ndarray) -> int:
    """The id of the largest, the first of equals; of the first NaN, if there is one."""
    first = int(maxima.argmax()) * BLOCK
    return first + int(logits[first : first + BLOCK].argmax())


def above(logits: np.ndarray, threshold: float, maxima: np.ndarray) -> np.ndarray:
    """The ids, ascending, of all logits that are not below `threshold`."""
    blocks = np.flatnonzero(maxima >= threshold)
    ids = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()
    if len(ids) and ids[-1] >= len(logits):
        ids = ids[ids < len(logits)]
    return np.asarray(ids[logits[ids] >= threshold])


def largest(logits: np.ndarray, k: int, maxima: np.ndarray) -> np.ndarray:
    """The ids, ascending, of the `k` largest and of all that equal the smallest of those."""
    if k >= len(logits):
        return np.arange(len(logits))
    if k > len(maxima):
        return np.flatnonzero(logits >= _kth(logits, k))
    ids = above(logits, _kth(maxima, k), maxima)  # so many blocks have one that is not below this
    found = logits[ids]
    return np.asarray(ids[found >= _kth(found, k)])


def descending(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """`ids`, which ascend, with the largest logit first, and of equals the first first."""
    return np.asarray(ids[np.argsort(-logits[ids], kind="stable")])


def nucleus(logits: np.ndarray, top_p: float, maxima: np.ndarray) -> np.ndarray:
    """The ids of the fewest likeliest tokens, at least one, whose probabilities reach `top_p`; likeliest
    first."""
    best = float(maxima.max())
    wanted = top_p * float(_weigh(logits, best, 1.0).sum())
    n_tried = 64
    while True:
        ids = descending(logits, largest(logits, n_tried, maxima))
        sums = np.cumsum(np.exp(logits[ids].astype(np.float64) - best))
        if sums[-1] >= wanted or len(ids) == len(logits):
            return np.asarray(ids[: int(np.searchsorted(sums, wanted)) + 1])
        n_tried *= 8


def draw(logits: np.ndarray, best: float, temperature: float, random: float) -> int | None:
    """The first token at which the sum of the probabilities, in the order of ids, reaches `random`, which is
    in [0, 1). None where only libllama's own rounding could tell. `best`: the largest logit."""
    ends = np.cumsum(_weigh(logits, best, temperature))
    block = min(int(np.searchsorted(ends, random * ends[-1])), len(ends) - 1)
    first = block * BLOCK
    weights = _weights(logits[first : first + BLOCK], best, temperature)
    token = _find(weights, float(ends[block - 1]) if block else 0.0, float(ends[-1]), random, _NEAR)
    if token is not None:
        return first + token
    scaled = logits / np.float32(temperature)
    exact = np.exp((scaled - scaled.max()).astype(np.float64)).astype(np.float32)
    return _find(exact, 0.0, float(exact.sum(dtype=np.float64)), random, _NEAR_EXACT)


def apart(logits: np.ndarray, temperature: float, random: float, token: int) -> float:
    """The probability between `random` and the part of [0, 1) in which `draw` gives `token`."""
    weights = np.exp((logits.astype(np.float64) - float(logits.max())) / temperature)
    ends = np.cumsum(weights)
    upper = float(ends[token] / ends[-1])
    lower = upper - float(weights[token] / ends[-1])
    return min(max(lower - random, random - upper, 0.0), 1.0)


def _find(weights: np.ndarray, before: float, total: float, random: float, near: float) -> int | None:
    """The first index at which `before` and the weights up to it reach `random` of `total`. None where it
    comes nearer to an end of that weight than `near` of `total`."""
    target = random * total
    sums = before + np.cumsum(weights, dtype=np.float64)
    at = int(np.searchsorted(sums, target))
    if at == len(sums):
        return None
    lower = float(sums[at - 1]) if at else before
    is_near = sums[at] - target < near * total or (lower > 0 and target - lower < near * total)
    return None if is_near else at


def _kth(values: np.ndarray, k: int) -> float:
    """The k-th largest."""
    return float(np.partition(values, len(values) - k)[len(values) - k])


def _weigh(logits: np.ndarray, best: float, temperature: float) -> np.ndarray:
    sums = native.weigh(logits, best, temperature)
    if sums is not None:
        return sums
    weights = _weights_in_numpy(logits, best, temperature)
    n_blocks = len(weights) // BLOCK
    sums = weights[: n_blocks * BLOCK].reshape(n_blocks, BLOCK).sum(axis=1).astype(np.float64)
    rest = weights[n_blocks * BLOCK :]
    return np.append(sums, rest.sum(dtype=np.float64)) if len(rest) else sums


def _weights(logits: np.ndarray, best: float, temperature: float) -> np.ndarray:
    weights = np.empty(len(logits), np.float32)
    if native.weigh(logits, best, temperature, weights) is None:
        return _weights_in_numpy(logits, best, temperature)
    return weights


def _weights_in_numpy(logits: np.ndarray, best: float, temperature: float) -> np.ndarray:
    scale = np.float32(temperature)
    return np.asarray(np.exp(logits / scale - np.float32(best) / scale))


class SeededUniform:
    """The number in [0, 1) that libllama draws with for a seed: 64 bits of a Mersenne Twister."""

    def __init__(self) -> None:
        self._twister = np.random.RandomState(0)

    def __call__(self, seed: int) -> float:
        self._twister.seed(seed)
        low, high = np.frombuffer(self._twister.bytes(8), "<u4").tolist()
        return min(float(low + high * 2.0**32) / 2.0**64, 1.0 - 2.0**-53)
