"""KV of finished generations, kept so that a later prompt with the same beginning need not compute it again.

A pure index: which of the spare sequences holds which tokens, named by the chained hashes of their complete
64-token blocks. The engine copies and drops the rows. Whole blocks only: then equal hashes are equal
prefixes, and the rows that a prompt gets are the same however many others share them.

Rows that come from an earlier request may lie in other cells and may have been computed in other batches
than a fresh prefill's would: logits are equal to the bit where neither is the case, to rounding otherwise.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from swarmllm_proto.blocks import BLOCK_TOKENS, block_hashes

TTL_S: Final = 600.0
"""How long a prefix that nobody asks for is kept."""
_ROOT: Final = "0" * 64
"""The index lives and dies with one worker, thus one model: its id says nothing here."""


@dataclass
class Kept:
    sequence: int
    where: Hashable
    """The segments that hold the rows."""
    hashes: tuple[bytes, ...]
    used_at: float

    @property
    def n_rows(self) -> int:
        return len(self.hashes) * BLOCK_TOKENS


class Prefixes:
    """Sequences `first` to `first + n - 1`. Times are of any steady clock, in seconds."""

    def __init__(self, first: int, n: int) -> None:
        self._free = list(range(first, first + n))
        self._kept: list[Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, where: Hashable, tokens: Sequence[int] | np.ndarray[Any, Any], now: float) -> Kept | None:
        """What shares the most blocks with `tokens`, shortened to those. At least one token is left to be
        run: its logits are wanted."""
        hashes = block_hashes(_ROOT, 0, 1, tokens[: len(tokens) - 1])
        best, n_best = None, 0
        for kept in self._kept:
            n = _n_common(kept.hashes, hashes) if kept.where == where else 0
            if n > n_best:
                best, n_best = kept, n
        if best is None:
            return None
        best.used_at = now
        return Kept(best.sequence, where, best.hashes[:n_best], now)

    def keep(
        self, where: Hashable, tokens: Sequence[int] | np.ndarray[Any, Any], now: float
    ) -> tuple[Kept | None, list[Kept]]:
        """A place for the blocks of `tokens`, and what has to be dropped for it: what is a beginning of the
        new one, or else the one that was not used for longest. No place for less than a block, or for what
        is kept already."""
        hashes = block_hashes(_ROOT, 0, 1, tokens)
        for kept in self._kept:
            if hashes and kept.where == where and kept.hashes[: len(hashes)] == hashes:
                kept.used_at = now
                return None, []
        if not hashes or not (self._free or self._kept):
            return None, []
        dropped = [k for k in self._kept if k.where == where and k.hashes == hashes[: len(k.hashes)]]
        for kept in dropped:
            self._drop(kept)
        if not self._free:
            oldest = self.oldest()
            assert oldest is not None
            self._drop(oldest)
            dropped.append(oldest)
        new = Kept(self._free.pop(0), where, hashes, now)
        self._kept.append(new)
        return new, dropped

    def expired(self, now: float) -> list[Kept]:
        """Dropped here: unused for TTL_S."""
        old = [kept for kept in self._kept if now - kept.used_at > TTL_S]
        for kept in old:
            self._drop(kept)
        return old

    def oldest(self) -> Kept | None:
        return min(self._kept, key=lambda kept: kept.used_at, default=None)

    def drop_oldest(self) -> Kept | None:
        oldest = self.oldest()
        if oldest is not None:
            self._drop(oldest)
        return oldest

    def _drop(self, kept: Kept) -> None:
        self._kept.remove(kept)
        self._free.append(kept.sequence)
        self._free.sort()


def _n_common(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    n = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        n += 1
    return n
