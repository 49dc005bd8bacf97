"""Remembers the latest prompts whose KV stages of this node's requests keep. Pure.

Of them this node can have KV fetched before a request needs it, when a node is about to give up its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from swarmllm.models.entry import CatalogueEntry
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.swarm import Stage
from swarmllm_proto.tensors import Tensor

PROMPTS_MAX: Final = 16
PROMPTS_S: Final = 600.0
"""As long as stages keep KV by default that nobody asks for."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptPrompt:
    entry: CatalogueEntry
    tokens: Tensor
    """i32 [n], the answer included."""
    stages: tuple[Stage, ...]
    """That keep it."""
    computed_s: float


class KeptPrompts:
    def __init__(self) -> None:
        self._kept: list[KeptPrompt] = []
        """The one that was computed last at the end."""

    def __len__(self) -> int:
        return len(self._kept)

    def completed(self, kept: KeptPrompt) -> None:
        if len(kept.tokens) <= BLOCK_TOKENS:
            return  # No block of it can be used.
        others = [each for each in self._kept if not _goes_on(kept, each)]
        self._kept = [*others, kept][-PROMPTS_MAX:]

    def of(self, is_meant: Callable[[KeptPrompt], bool], now_s: float) -> Sequence[KeptPrompt]:
        """The one that was computed last first."""
        self._kept = [each for each in self._kept if each.computed_s + PROMPTS_S > now_s]
        return [each for each in reversed(self._kept) if is_meant(each)]

    def drop(self, kept: KeptPrompt) -> None:
        self._kept = [each for each in self._kept if each is not kept]


def _goes_on(newer: KeptPrompt, older: KeptPrompt) -> bool:
    """Whether it begins with all of the older one."""
    is_longer = newer.entry.model_id == older.entry.model_id and len(newer.tokens) >= len(older.tokens)
    return is_longer and np.array_equal(newer.tokens[: len(older.tokens)], older.tokens)
