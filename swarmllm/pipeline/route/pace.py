"""How fast a pipeline was planned to be, and when it is so much slower that another one is worth its price.

Pure. Being slow is not guilt: a node may have got other work. So it costs nobody trust, only the request goes
on elsewhere, and only where others can do it: once the client has waited for as long as a change would cost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from swarmllm_proto.identifiers import NodeId

SLOW = 10.0
"""So many times as long as planned."""
SLOW_TOKEN_S = 1.0
"""A token within this time is never slow."""
SLOW_TOKENS = 3
"""A mean over fewer says little."""
SILENT_S = 10.0
"""Nor is a silence up to this."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Of one pipeline, as planned."""

    first_s: float
    """To the first token."""
    token_s: float
    """From one token to the next."""
    elsewhere_s: Callable[[Collection[NodeId]], float | None] = lambda suspected: None
    """What the request would cost without these nodes, or as many of them as can be spared; None: it cannot
    do without any of them."""

    def is_slow(self, n_tokens: int, elapsed_s: float) -> bool:
        """`n_tokens` after the first took `elapsed_s`."""
        return n_tokens >= SLOW_TOKENS and elapsed_s / n_tokens > max(SLOW_TOKEN_S, SLOW * self.token_s)

    def is_late(self, silent_s: float, has_begun: bool) -> bool:
        """Nothing has come for `silent_s`."""
        return silent_s > max(SILENT_S, SLOW * (self.token_s if has_begun else self.first_s))

    def is_worth_changing(self, waited_s: float, suspected: Collection[NodeId]) -> bool:
        if waited_s <= 0:
            return False
        cost_s = self.elsewhere_s(suspected)
        return cost_s is not None and cost_s <= waited_s
