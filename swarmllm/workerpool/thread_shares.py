"""Divides threads among workers, where several are at work at once.

Two workers with a thread for every core each take turns on the cores, and a step of one waits at every
product for a thread that the other has displaced. So the threads are shared out among the workers that
compute, in whole numbers, one at least. A worker that rests is told nothing; it gets its
share when it begins.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Who = TypeVar("Who", bound=Hashable)


class ThreadShares(Generic[Who]):
    def __init__(self) -> None:
        self._at_work: dict[Who, int] = {}
        """How many each is configured to use; the one that began first is the first."""
        self._sent: dict[Who, int] = {}

    def __repr__(self) -> str:
        return f"<ThreadShares {list(self._at_work.values())}>"

    def note(self, who: Who, n_threads: int, *, is_at_work: bool) -> list[Who]:
        """A worker that may use `n_threads` has begun to compute, or rests. Whose `share` has changed."""
        if is_at_work:
            self._at_work[who] = n_threads
            self._sent.setdefault(who, n_threads)
        else:
            self._at_work.pop(who, None)
        shares = self._shares()
        changed = [each for each, n in shares.items() if self._sent[each] != n]
        self._sent.update(shares)
        return changed

    def forget(self, who: Who) -> list[Who]:
        """It has ended. Whose share has changed."""
        changed = self.note(who, 0, is_at_work=False)
        self._sent.pop(who, None)
        return changed

    def share(self, who: Who) -> int | None:
        """What this worker was told last, or is to be told; None of one that was never at work."""
        return self._sent.get(who)

    def _shares(self) -> dict[Who, int]:
        n_all = max(self._at_work.values(), default=0)
        each, n_more = divmod(n_all, max(1, len(self._at_work)))
        return {
            who: max(1, min(n_threads, each + (index < n_more)))
            for index, (who, n_threads) in enumerate(self._at_work.items())
        }
