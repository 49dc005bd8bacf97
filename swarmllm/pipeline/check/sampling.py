"""Draws which requests are checked, at which stage, and at which rows.

Pure: chance comes in as numbers.

Nobody is told what was drawn before the last token has come: until then a checked request is like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from swarmllm.swarm.peers.trust import NEUTRAL
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import Stage

STRETCH_ROWS: Final = 32
"""Rows that are compared. All rows before them are computed again, too, because later ones depend on them."""
EVIDENCE_BYTES_MAX: Final = 8 * 2**20
"""Of the rows that came in; what lies behind so many is not checked."""
CHECKED_TOKENS: Final = 4
"""Tokens of a last stage that are sampled again, where it takes the likeliest."""
DRAWN_TOKENS: Final = 16
"""And where it draws them: one alone says little."""
ENDS: Final = 0.5
"""This part of the checks of answers that the model ended looks at the end."""
STRANGERS: Final = 4.0
"""So many times as often as nodes of full trust are strangers checked."""
DISTRUSTED: Final = 8.0
"""And nodes that are trusted less than strangers."""

Chance = Callable[[], float]
"""A number in [0, 1)."""


class Stretch(NamedTuple):
    """Rows [position, position + n_rows) of a request."""

    position: int
    n_rows: int

    @property
    def end(self) -> int:
        return self.position + self.n_rows


def rate(score: float, base: float) -> float:
    """The part of a node's requests that is checked, by its trust."""
    if score < NEUTRAL:
        return min(1.0, base * DISTRUSTED)
    return min(1.0, base * (STRANGERS - (STRANGERS - 1) * (score - NEUTRAL) / (1 - NEUTRAL)))


def draw_stage(
    stages: Sequence[Stage], here: NodeId, rate_of: Callable[[NodeId], float], chance: Chance
) -> int | None:
    """A stage on another node; None: the request is not checked."""
    drawn = [
        index
        for index, stage in enumerate(stages)
        if stage.node_id != here and chance() < rate_of(stage.node_id)
    ]
    return drawn[int(chance() * len(drawn))] if drawn else None


def draw_tokens(
    first: int,
    n_tokens: int,
    n_prompt: int,
    row_bytes: int,
    chance: Chance,
    *,
    n_wanted: int = CHECKED_TOKENS,
    is_ended: bool = False,
) -> Stretch | None:
    """Of the generated tokens `first` to `n_tokens`, by index, some that follow each other. `is_ended`: the
    model ended its text with the last of them."""
    n_reached = min(n_tokens, EVIDENCE_BYTES_MAX // row_bytes - n_prompt + 1)
    if n_reached <= first:
        return None
    if is_ended and n_reached == n_tokens and chance() < ENDS:
        index = max(first, n_tokens - n_wanted)
    else:
        index = first + int(chance() * (n_reached - first))
    return Stretch(index, min(n_wanted, n_reached - index))


def draw_stretch(n_rows: int, row_bytes: int, chance: Chance, first: int = 0) -> Stretch | None:
    """Of rows `first` to `n_rows`, which a stage computed; None: not even the first ones are few enough."""
    n_reached = min(n_rows, EVIDENCE_BYTES_MAX // row_bytes)
    n_stretches = -(-(n_reached - first) // STRETCH_ROWS)
    if n_stretches < 1:
        return None
    position = first + int(chance() * n_stretches) * STRETCH_ROWS
    return Stretch(position, min(STRETCH_ROWS, n_reached - position))
