"""Records what this node computes for other nodes: which model, which layers, how fast, and for whom.

It is the one owner of these facts. Sessions report what they compute; status, metrics and the dashboard ask
it. It is pure: the clock comes in as `now_s`. A token counts when the first stage that this node has of its
request has computed its row: once per token, however many stages are here, and not for rows of the prompt.
Guesses that the model did not confirm count as well, because they cost the same.

What was computed of a model for one origin is forgotten FORGET_S after its last token, and there are at most
SERVED_MAX such entries. The totals by model stay; only models of this node's catalogue have one.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from swarmllm.models.layers import LayerRange, merge
from swarmllm_proto.identifiers import ModelId, NodeId

WINDOW_S: Final = 5.0
"""What tokens per second are a mean of; up to a second more, because tokens are kept by the second."""
FORGET_S: Final = 600.0
SERVED_MAX: Final = 64


Key = tuple[ModelId, NodeId]


@dataclass(frozen=True, slots=True)
class Served:
    """What this node has computed of one model for one other node."""

    model_id: ModelId
    origin: NodeId
    layers: tuple[LayerRange, ...]
    """That its latest request uses here."""
    n_active: int
    """Requests that run now."""
    n_requests: int
    n_tokens: int
    tokens_per_s: float


@dataclass(slots=True)
class _Entry:
    layers: tuple[LayerRange, ...] = ()
    n_requests: int = 0
    n_tokens: int = 0
    latest_s: float = 0.0
    """When something of it happened last."""
    recent: deque[tuple[float, int]] = field(default_factory=deque)
    """(second, tokens in it), the oldest first."""

    def add(self, n_tokens: int, now_s: float) -> None:
        self.n_tokens += n_tokens
        second = now_s // 1
        if self.recent and self.recent[-1][0] == second:
            n_tokens += self.recent.pop()[1]
        self.recent.append((second, n_tokens))
        self._drop_old(now_s)

    def rate(self, now_s: float) -> float:
        self._drop_old(now_s)
        if not self.recent:
            return 0.0
        return sum(n_tokens for _, n_tokens in self.recent) / max(1.0, now_s - self.recent[0][0])

    def _drop_old(self, now_s: float) -> None:
        while self.recent and self.recent[0][0] <= now_s - WINDOW_S - 1:
            self.recent.popleft()


class ServedBook:
    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        self._totals: Counter[ModelId] = Counter()

    @property
    def totals(self) -> Mapping[ModelId, int]:
        """Tokens for all other nodes together, since the start."""
        return self._totals

    def began(self, model_id: ModelId, origin: NodeId, layers: Iterable[LayerRange], now_s: float) -> None:
        """A request of `origin` uses these layers here."""
        entry = self._entry((model_id, origin), now_s)
        entry.layers = merge(layers)
        entry.n_requests += 1

    def computed(self, model_id: ModelId, origin: NodeId, n_tokens: int, now_s: float) -> None:
        self._totals[model_id] += n_tokens
        self._entry((model_id, origin), now_s).add(n_tokens, now_s)

    def view(self, active: Mapping[Key, int], now_s: float) -> tuple[Served, ...]:
        """`active`: requests that run, by model and origin. Those who have most of them come first, then who
        had one last."""
        old = [key for key, each in self._entries.items() if each.latest_s <= now_s - FORGET_S]
        for key in old:
            if not active.get(key):
                del self._entries[key]
        entries = sorted(
            self._entries.items(), key=lambda each: (-active.get(each[0], 0), -each[1].latest_s, each[0])
        )
        return tuple(
            Served(
                model_id,
                origin,
                entry.layers,
                active.get((model_id, origin), 0),
                entry.n_requests,
                entry.n_tokens,
                entry.rate(now_s),
            )
            for (model_id, origin), entry in entries
        )

    def latest_s(self, model_id: ModelId) -> float:
        """When something of this model happened last; minus infinity where nothing has."""
        times_s = (entry.latest_s for (of, _), entry in self._entries.items() if of == model_id)
        return max(times_s, default=-math.inf)

    def _entry(self, key: Key, now_s: float) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= SERVED_MAX:
                del self._entries[min(self._entries, key=lambda each: self._entries[each].latest_s)]
            entry = self._entries[key] = _Entry()
        entry.latest_s = now_s
        return entry
