"""One thing the guide can be asked about, and how it answers.

A topic keeps one full and one short wording of its answer. More wordings per question were rejected: a
model this small then mixes their halves, and a held-out answer could not be judged by comparing text.
Variety belongs to the questions: every `ask` is a pattern with alternatives in brackets, and terms run
through the shared frames.
"""

from __future__ import annotations

from dataclasses import dataclass

N_ASKS_TO_HOLD_OUT = 4
"""A topic with at least this many asks keeps its last one for the evaluation."""


@dataclass(frozen=True)
class Topic:
    """A topic of the corpus.

    `label` completes "You asked about ...". `terms` carry their article ("a node") and go through the
    definition frames. `asks` are question patterns: "[a|b]" is a choice, "[|a]" an option. `why`, `more`,
    `command` and `port` answer the follow-up questions of those kinds; an empty one is never asked for.
    """

    key: str
    label: str
    answer: str
    short: str
    terms: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()
    why: str = ""
    more: str = ""
    command: str = ""
    port: str = ""

    @property
    def train_asks(self) -> tuple[str, ...]:
        return self.asks[:-1] if len(self.asks) >= N_ASKS_TO_HOLD_OUT else self.asks

    @property
    def heldout_asks(self) -> tuple[str, ...]:
        return self.asks[-1:] if len(self.asks) >= N_ASKS_TO_HOLD_OUT else ()
