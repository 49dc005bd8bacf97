"""Drafts the next tokens from the text so far (prompt lookup) and from earlier answers: pure.

A prompt that was answered before may be answered alike (`Continuations`). And text repeats itself: names,
quotations, code, tables, the question in the answer. Where the last tokens have been written before, what
followed them then is a guess that costs nothing (prompt lookup decoding: Saxena 2023; LLMA: Yang et al.
2023). The longest match wins, and of equally long ones the latest.

The same prompt again (a retry, a test, a page that is loaded twice) is often answered with the same tokens:
at temperature 0 always, but for rounding. What followed the last time is a guess that costs nothing; like any
other it counts only where it is right.

A prompt is known by its hash, the whole of it: who asks for something else, be it longer by one token, learns
nothing. Entries live as long as those of the prefix cache, and there are none where that is off.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
from blake3 import blake3

from swarmllm_workers.cache.prefixes import PrefixSettings, n_common_tokens

Worth: TypeAlias = Callable[[str, float], int]
"""How many guesses of a kind to make now; asked once per draft, before anything is spent on it, and told how
many seconds go into what the drafts after it need not do again."""


@dataclass(frozen=True)
class Draft:
    tokens: tuple[int, ...]
    kind: str
    """Drafts of one kind are judged together."""
    once_s: float = 0.0
    """Seconds that went into what later drafts need not do again."""


AGAIN: Final = "ngram-again"
"""Costs what other guesses cost that are looked up."""


class Drafter(Protocol):
    """Drafts for one request."""

    is_free: bool
    """A draft takes no time that counts."""

    def draft(self, history: np.ndarray, worth: Worth) -> Draft | None:
        """Tokens that may follow `history` (i32 [n], which only ever grows), or nothing."""

    def close(self) -> None:
        """End the request."""


class Remembered:
    """Drafts what followed the same prompt the last time, as long as the answer agrees with it."""

    is_free = True

    def __init__(self, n_prompt: int, continuation: np.ndarray) -> None:
        """`continuation`: i32, may be empty."""
        self._n_prompt = n_prompt
        self._tokens: list[int] = continuation.tolist()
        self._n_true = 0

    def draft(self, history: np.ndarray, worth: Worth) -> Draft | None:
        if not self._tokens:
            return None
        at = len(history) - self._n_prompt
        if history[self._n_prompt + self._n_true :].tolist() != self._tokens[self._n_true : at]:
            self._tokens = []
            return None
        self._n_true = at
        n = worth(AGAIN, 0.0) if at < len(self._tokens) else 0
        return Draft(tuple(self._tokens[at : at + n]), AGAIN) if n else None

    def close(self) -> None:
        pass


class NgramLookup:
    """Remembers where every run of `size_min` to `size_max` tokens ended last. A token costs one entry per
    size."""

    is_free = True

    def __init__(self, size_max: int, n_tokens_max: int, size_min: int = 2) -> None:
        self._sizes = range(size_max, min(size_min, size_max) - 1, -1)
        self._n_tokens_max = n_tokens_max
        self._ends: dict[tuple[int, ...], int] = {}
        self._tokens: list[int] = []

    def draft(self, history: np.ndarray, worth: Worth) -> Draft | None:
        self._learn(history[len(self._tokens) :].tolist())
        for size in self._sizes:
            end = self._ends.get(tuple(self._tokens[-size:]))
            if end is not None:
                kind = f"ngram-{size}"
                tokens = _continued(self._tokens, end, min(worth(kind, 0.0), self._n_tokens_max))
                return Draft(tuple(tokens), kind) if tokens else None
        return None

    def _learn(self, tokens: Sequence[int]) -> None:
        """Ends of runs are entered a token late: the last run of all is what is looked up."""
        start = len(self._tokens)
        self._tokens += tokens
        if len(tokens) == 1:
            for size in self._sizes:
                if start >= size:
                    self._ends[tuple(self._tokens[start - size : start])] = start
            return
        for size in self._sizes:
            first = max(start, size)  # the first end to be entered
            runs = self._tokens[first - size : -1]
            windows = zip(*(runs[i:] for i in range(size)), strict=False)
            self._ends.update(zip(windows, range(first, len(self._tokens)), strict=True))

    def close(self) -> None:
        pass


def _continued(tokens: Sequence[int], end: int, n: int) -> list[int]:
    """What follows `tokens[:end]`; beyond the last token, what a repetition of that would be."""
    period = len(tokens) - end
    return [tokens[end + i % period] for i in range(n)]


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
        """What followed `prompt` (i32 [n]) the last time, i32. Empty if the prompt is not known."""
        key = _key(prompt)
        self._expire(now)
        if key not in self._kept:
            return _NOTHING
        _, tokens = self._kept.pop(key)
        self._kept[key] = now, tokens
        return tokens

    def remember(self, prompt: np.ndarray, answer: np.ndarray, now: float) -> None:
        """Store `answer` (i32), which followed the prompt. An answer that is only a shorter beginning of the
        stored one changes nothing."""
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
