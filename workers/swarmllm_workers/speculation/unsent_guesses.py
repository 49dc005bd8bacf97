"""Guesses that are drafted for nothing and not sent to be checked: pure.

Where nothing is guessed, whether guesses would be right is not seen either. What was looked up costs nothing,
so the token that comes next is compared with what would have been guessed. That shows when guesses pay again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from swarmllm_workers.speculation.drafting import Draft, Drafter, Worth


class UnsentGuesses:
    def __init__(self, saw: Callable[[str, bool], None]) -> None:
        """`saw` is told of each guess its kind and whether it was right."""
        self._saw = saw
        self._guesses: list[tuple[int, Draft]] = []
        """How many tokens there were, and what would have been guessed behind them."""

    def draft(self, drafters: Iterable[Drafter], history: np.ndarray, worth: Worth) -> Draft | None:
        """The first draft that is worth being checked. What drafters would have guessed before it that cost
        nothing is kept."""
        for drafter in drafters:
            is_unsent = False

            def asked(kind: str, once_s: float, *, is_free: bool = drafter.is_free) -> int:
                nonlocal is_unsent
                n_guesses = worth(kind, once_s)
                is_unsent = not n_guesses and is_free
                return 1 if is_unsent else n_guesses

            draft = drafter.draft(history, asked)
            if draft is None:
                continue
            if not is_unsent:
                return draft
            self._guesses.append((len(history), draft))
        return None

    def compare(self, history: np.ndarray) -> None:
        """Compare what is kept with the tokens that came."""
        known = [each for each in self._guesses if each[0] < len(history)]
        self._guesses = [each for each in self._guesses if each[0] >= len(history)]
        for n_tokens, draft in known:
            self._saw(draft.kind, bool(history[n_tokens] == draft.tokens[0]))
