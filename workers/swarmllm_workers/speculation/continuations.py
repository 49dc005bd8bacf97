"""How prompts went on when they were answered before: a pure index.

The same prompt again (a retry, a test, a page that is loaded twice) is often answered with the same tokens:
at temperature 0 always, but for rounding. What followed the last time is a guess that costs nothing
(`drafting.py`); like any other it counts only where it is right.

A prompt is known by its hash, the whole of it: who asks for something else, be it longer by one token, learns
nothing. Entries live as long as those of the prefix cache, and there are none where that is off.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
from blake3 import blake3

from swarmllm_workers.cache.prefixes import PrefixSettings, n_common_tokens

N_TOKENS_MAX: Final = 1024
"""Kept of one answer."""
ENTRIES_PER_PREFIX: Final = 8
"""As many as the prefix cache has entries, so many times: they are small, compared with KV."""

_NOTHING: Final = np.empty(0, np.int32)


class Continuations:
    """Times are of any steady clock, in seconds."""

    def __init__(self, settings: PrefixSettings) -> None:
        self._n_max = settings.n_entries * ENTRIES_PER_PREFIX
        self._ttl_s = settings.ttl_s
        self._kept: OrderedDict[bytes, tuple[float, np.ndarray]] = OrderedDict()
        """By prompt, the least recently used first."""

    def __len__(self) -> int:
        return len(self._kept)

    def recall(self, prompt: np.ndarray, now: float) -> np.ndarray:
        """i32, what followed `prompt` (i32 [n]) last; empty where that is not known."""
        key = _key(prompt)
        self._expire(now)
        if key not in self._kept:
            return _NOTHING
        _, tokens = self._kept.pop(key)
        self._kept[key] = now, tokens
        return tokens

    def remember(self, prompt: np.ndarray, answer: np.ndarray, now: float) -> None:
        """`answer` (i32) followed; one that only breaks off earlier than the one before adds nothing."""
        if not self._n_max or not len(answer):
            return
        known = self.recall(prompt, now)
        kept = known if n_common_tokens(known, answer) == len(answer) else answer[:N_TOKENS_MAX].copy()
        self._kept[_key(prompt)] = now, kept
        while len(self._kept) > self._n_max:
            self._kept.popitem(last=False)

    def _expire(self, now: float) -> None:
        while self._kept and now - next(iter(self._kept.values()))[0] > self._ttl_s:
            self._kept.popitem(last=False)


def _key(prompt: np.ndarray) -> bytes:
    return blake3(np.ascontiguousarray(prompt, np.int32).tobytes()).digest()
