"""Decides in which order the nodes with an encoder are asked. Pure.

The node that runs the first layers comes first: it sees the picture's rows in any case. The nodes that are
expected to answer soonest follow; half the trust doubles a node's expected time. Nodes that may fail come
last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from swarmllm.pipeline.prefix.choice import LANES, HolderPath
from swarmllm.pipeline.vision.race import USUAL_S
from swarmllm_proto.identifiers import Digest
from swarmllm_proto.limits import IMAGE_MAX, IMAGE_ROWS_MAX

TRIED_MAX: Final = 8
"""Holders of one projector that are asked for one picture."""
PROJECTORS_MAX: Final = 4
"""Of one model, whose holders are asked one after the other."""
REQUEST_S: Final = 0.5
"""What each request that a holder is busy with is expected to take from an encoding."""
USUAL_ROWS: Final = 576
LEAST_TRUST: Final = 0.01


@dataclass(frozen=True, slots=True)
class Encoder:
    """One node that encodes pictures for the model."""

    path: HolderPath
    projector: Digest
    """BLAKE3 of its file."""
    trust: float
    """0 to 1."""
    n_active: int = 0
    """Requests that it is busy with."""
    is_first_stage: bool = False
    """Of the model's layers it would run the first."""
    is_doubtful: bool = False
    """It may fail, or is but a name so far."""
    encoding_s: float = USUAL_S
    """What one picture takes there, without travelling."""

    def travel_s(self, picture_bytes: int, n_embd: int) -> float:
        rows_bytes = 4 * n_embd * USUAL_ROWS
        n_slices = -(-picture_bytes // IMAGE_MAX) + -(-rows_bytes // IMAGE_ROWS_MAX)
        # One slice after the other.
        return self.path.takes_s(picture_bytes + rows_bytes, n_slices * LANES)

    def slice_s(self, picture_bytes: int, n_embd: int) -> float:
        """The largest slice that travels: of the picture, or of its rows."""
        rows_bytes = min(4 * n_embd * USUAL_ROWS, IMAGE_ROWS_MAX)
        return self.path.takes_s(max(min(picture_bytes, IMAGE_MAX), rows_bytes), 1)

    @property
    def work_s(self) -> float:
        """What is done there, and what comes before it."""
        return self.n_active * REQUEST_S + self.encoding_s

    def takes_s(self, picture_bytes: int, n_embd: int) -> float:
        """By which it is chosen."""
        expected_s = self.travel_s(picture_bytes, n_embd) + self.work_s
        return expected_s / max(self.trust, LEAST_TRUST)


def in_order(encoders: Iterable[Encoder], picture_bytes: int, n_embd: int) -> list[Encoder]:
    """The one to ask first comes first."""
    return sorted(
        encoders,
        key=lambda each: (
            each.is_doubtful,
            not each.is_first_stage,
            each.takes_s(picture_bytes, n_embd),
            each.path.node_id,
        ),
    )


def by_projector(ordered: Sequence[Encoder], known: Iterable[Digest] = ()) -> Mapping[Digest, list[Encoder]]:
    """Who has which projector, `PROJECTORS_MAX` of them. Projectors with which pictures of the prompt are
    `known` already come first, then that of the first of `ordered`."""
    holders: dict[Digest, list[Encoder]] = {}
    for projector in dict.fromkeys((*known, *(each.projector for each in ordered))):
        found = [each for each in ordered if each.projector == projector]
        if found and len(holders) < PROJECTORS_MAX:
            holders[projector] = found
    return holders
