"""The corpus of the guide, made by a script from topics, frames and slots.

`build(n, seed)` gives training conversations and `heldout(seed)` those of the evaluation. The split is by
frame, by question pattern and by slot value, not by random line: no held-out wording is ever a training
wording.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from itertools import accumulate

from .echo import echo
from .practice import asked_differently, follow_up, odd_name, odd_tools
from .reworded import renamed_tools, reworded
from .sample import Message, Sample
from .talk import TOPICS, heldout_multi_turn, heldout_off_topic, heldout_single, multi_turn, off_topic, single
from .tools import heldout_tools, with_tools, without_needed_tool

__all__ = [
    "FINISH_MIX",
    "HARD_MIX",
    "PRACTICE_MIX",
    "TOPICS",
    "WIDE_MIX",
    "Message",
    "Mix",
    "Sample",
    "build",
    "digest",
    "heldout",
]

_MAKERS = (
    *(single, multi_turn, with_tools, off_topic, without_needed_tool, reworded, renamed_tools),
    *(follow_up, asked_differently, odd_tools, odd_name),
)

Mix = tuple[float, ...]
"""The share of each maker; they add up to 1."""

WIDE_MIX: Mix = (0.6, 0.23, 0.1, 0.055, 0.015, *(0.0,) * 6)
HARD_MIX: Mix = (0.26, 0.3, 0.04, 0.05, 0.02, 0.2, 0.13, *(0.0,) * 4)
"""More of what is learned late, and rarer wordings."""
PRACTICE_MIX: Mix = (0.22, 0.1, 0.02, 0.06, 0.02, 0.1, 0.04, 0.22, 0.08, 0.11, 0.03)
"""Mostly what the mixes before did not bring."""
FINISH_MIX: Mix = (0.25, 0.07, 0.03, 0.12, 0.04, 0.1, 0.04, 0.13, 0.06, 0.14, 0.02)
"""More refusals and more arguments to copy."""


def build(n: int, seed: int, echo_share: float = 0.0, mix: Mix = WIDE_MIX) -> Iterator[Sample]:
    """Yield `n` training conversations; the same seed gives the same ones.

    `echo_share` of them only ask to repeat random words. They teach copying, on which names and the arguments
    of tool calls depend.
    """
    rng = random.Random(seed)
    for _ in range(n):
        if echo_share and rng.random() < echo_share:
            yield echo(rng)
            continue
        yield _choose(mix, rng.random())(rng)


def _choose(mix: Mix, roll: float) -> Callable[[random.Random], Sample]:
    """The maker whose part of [0, 1) holds `roll`."""
    for maker, bound in zip(_MAKERS, accumulate(mix), strict=True):
        if roll < bound:
            return maker
    return _MAKERS[-1]


def heldout(seed: int = 1) -> list[Sample]:
    """All conversations of the evaluation; the last assistant message of each is the one to be judged."""
    rng = random.Random(seed)
    return heldout_single(rng) + heldout_multi_turn(rng) + heldout_tools(rng) + heldout_off_topic(rng)


def digest(n: int, seed: int) -> str:
    """SHA-256 over the first `n` training conversations, in hex."""
    hasher = hashlib.sha256()
    for sample in build(n, seed):
        hasher.update(sample.key().encode())
    return hasher.hexdigest()
