"""Mirostat 1 and 2 (https://arxiv.org/abs/2007.14966), after libllama's.

libllama's own keep their state to themselves; here the state before every token is kept, so that a step can
be repeated.
"""

from __future__ import annotations

from typing import Final

import numpy as np

N_ESTIMATE: Final = 100
"""Likeliest tokens from which version 1 estimates how fast probabilities fall; libllama's default."""


class Mirostat:
    def __init__(self, version: int, tau: float, eta: float) -> None:
        self._version = version
        self._tau, self._eta = tau, eta
        self._limits = [2.0 * tau]
        """The greatest surprise allowed for each token, bits."""

    def resume(self, n_generated: int) -> None:
        """Let the next draw be that of token `n_generated`, at the first limit."""
        self._limits = [2.0 * self._tau] * (n_generated + 1)

    def draw(self, logits: np.ndarray, index: int, seed: int) -> int:
        """Token `index`, after tokens 0 to index - 1 have been drawn. `logits` f32 [n], in the order of
        token ids; minus infinity for those that cannot come."""
        del self._limits[index + 1 :]
        limit = self._limits[index]
        order = np.argsort(-logits, kind="stable")
        weights = np.exp(logits[order].astype(np.float64) - float(logits[order[0]]))
        likely = weights / weights.sum()
        kept = likely[: self._n_kept(likely, limit)]
        kept = kept / kept.sum()
        random = np.random.default_rng(seed).random()
        chosen = min(int(np.searchsorted(np.cumsum(kept), random, side="right")), len(kept) - 1)
        surprise = -float(np.log2(kept[chosen]))
        self._limits.append(limit - self._eta * (surprise - self._tau))
        return int(order[chosen])

    def _n_kept(self, likely: np.ndarray, limit: float) -> int:
        """How many of the tokens, likeliest first; at least one."""
        n_possible = int(np.count_nonzero(likely))
        if self._version == 2:
            return min(max(int(np.count_nonzero(likely >= 2.0**-limit)), 1), n_possible)
        head = likely[: min(N_ESTIMATE, n_possible)]
        if len(head) < 2:
            return 1
        ranks = np.arange(len(head) - 1)
        steps = np.log((ranks + 2) / (ranks + 1))
        slope = float((steps * np.log(head[:-1] / head[1:])).sum() / (steps**2).sum())
        excess = slope - 1.0
        if abs(excess) < 1e-6 or slope <= 0:  # the formula has no value there
            return n_possible
        with np.errstate(all="ignore"):
            count = (excess * 2.0**limit / (1 - float(len(likely)) ** -excess)) ** (1 / slope)
        return min(max(int(count), 1), n_possible) if np.isfinite(count) else n_possible
