"""Draws which requests are checked, at which stage, and at which rows.

Pure: chance comes in as numbers.

Nobody learns what was drawn before the last token has come: until then a checked request is like any other.
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
CHECKED_TOKENS: Final = 8
"""Tokens of a last stage that are sampled again, where it takes the likeliest."""
DRAWN_TOKENS: Final = 16
"""And where it draws them: one alone says little."""
BATCHED_TOKENS: Final = 64
"""Tokens that this node samples again by itself, many rows at a time."""
ENDS: Final = 0.5
"""This part of the checks of answers that the model ended looks at the end."""
STRANGERS: Final = 5.0
"""So many times as often as nodes of full trust are strangers checked."""
STRANGER_BELOW: Final = 0.85
"""Below this trust a node is checked as often as a stranger: about 100 requests bring it there."""
DISTRUSTED: Final = 8.0
"""And nodes that are trusted less than strangers, or do not sign for their rows."""

Chance = Callable[[], float]
"""A number in [0, 1)."""


class Stretch(NamedTuple):
    """Rows [position, position + n_rows) of a request."""

    position: int
    n_rows: int

    @property
    def end(self) -> int:
        return self.position + self.n_rows


def rate(score: float, base: float, *, tells: bool = True) -> float:
    """The part of a node's requests that is checked, by its trust. `tells`: it signs for its rows, and tells
    fingerprints of logits."""
    if score < NEUTRAL or not tells:
        return min(1.0, base * DISTRUSTED)
    trusted = max(0.0, (score - STRANGER_BELOW) / (1 - STRANGER_BELOW))
    return min(1.0, base * (STRANGERS - (STRANGERS - 1) * trusted))


SINGLE_ROW: Final = 4.5
"""What a row that is computed alone costs, in rows of a prompt (docs/security.md)."""
HEAD_ROW: Final = 1.5
"""And one of few that are computed together, with the logits of each."""
PART_OF_WORK: Final = 0.48
"""Of what this node's requests cost, checks may cost this, times the rate at full trust: 3 % by default."""
DEPTH: Final = 2.0
"""Requests' worth of work that may be spent ahead."""


class Budget:
    """What checks may cost, in rows of a prompt times layers. As it runs short, all rates fall smoothly,
    those of trusted nodes first: a node that was just checked must not know that it is safe now."""

    def __init__(self, base: float) -> None:
        """`base`: the rate at full trust; 1 checks everything, whatever it costs."""
        self._base = base
        self._mean = 0.0
        """Work of a request."""
        self._credit = 0.0

    def served(self, work: float) -> None:
        """A request was completed."""
        if not self._mean:
            self._mean, self._credit = work, DEPTH * work
        self._mean += (work - self._mean) / 20
        earned = self._credit + PART_OF_WORK * self._base * work
        self._credit = min(DEPTH * self._mean, earned)

    def spend(self, work: float) -> None:
        """Rows are computed again."""
        self._credit -= work

    def scaled(self, wanted: float) -> float:
        """The part of a node's requests that is checked, of which `wanted` is to be."""
        if self._base >= 1 or not self._mean or not wanted:
            return wanted
        fullness = min(1.0, max(0.0, 2 * self._credit / (DEPTH * self._mean)))
        return float(wanted * fullness ** (STRANGERS * self._base / wanted))


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
        # Each of the tokens is as likely to be among them, the first ones and the last ones too.
        drawn = first - n_wanted + 1 + int(chance() * (n_reached - first + n_wanted - 1))
        index = max(first, min(drawn, n_reached - n_wanted))
    return Stretch(index, min(n_wanted, n_reached - index))


def draw_stretch(n_rows: int, row_bytes: int, chance: Chance, first: int = 0) -> Stretch | None:
    """Of rows `first` to `n_rows`, which a stage computed; None: not even the first ones are few enough."""
    n_reached = min(n_rows, EVIDENCE_BYTES_MAX // row_bytes)
    n_stretches = -(-(n_reached - first) // STRETCH_ROWS)
    if n_stretches < 1:
        return None
    position = first + int(chance() * n_stretches) * STRETCH_ROWS
    return Stretch(position, min(STRETCH_ROWS, n_reached - position))
