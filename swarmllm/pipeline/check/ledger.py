"""Keeps the statements of one request's stages about their rows, and finds where two neighbours contradict
each other.

Pure. Both sides of a boundary report to the origin before anybody knows what is checked: a stage states what
it sent, and the next stage what it received. Neither can claim something else later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from swarmllm_proto.row_commitments import STRETCH_ROWS, RowsCommitment, stretch_digests

Side = Literal["sent", "received"]
SIDES: Final[tuple[Side, Side]] = ("sent", "received")


class InvalidCommitment(Exception):
    """A statement that no honest stage makes about the request."""


class Disagreement(NamedTuple):
    """A contradiction about rows [position, position + n_rows) between `stage` and the next stage."""

    stage: int
    position: int
    n_rows: int


class SignedStretch(NamedTuple):
    """Of one stretch."""

    n_rows: int
    digest: bytes


class Ledger:
    def __init__(self, n_stages: int, n_rows_max: int) -> None:
        """`n_rows_max`: rows that the request can have."""
        self._last = n_stages - 1
        self._n_rows_max = n_rows_max
        self._said: dict[tuple[int, Side, int], SignedStretch] = {}
        """By stage, side and position of the stretch."""
        self._repeated: list[tuple[int, int]] = []

    def __repr__(self) -> str:
        return f"<Ledger {len(self._said)} stretches>"

    def repeated(self, first: int, end: int) -> None:
        """A job that was damaged on its way comes again, with the rows behind it: what had been said of these
        rows may be so no longer."""
        self._repeated.append((first, end))

    def add(self, commitment: RowsCommitment) -> list[Disagreement]:
        """Stretches of which two neighbours say different things since now. Raises InvalidCommitment."""
        if commitment.stage > self._last:
            raise InvalidCommitment(f"there is no stage {commitment.stage}")
        if commitment.position + commitment.n_rows > self._n_rows_max:
            raise InvalidCommitment(
                f"rows up to {commitment.position + commitment.n_rows} of {self._n_rows_max}"
            )
        if bool(commitment.sent) is (commitment.stage == self._last) or (
            commitment.received and not commitment.stage
        ):
            raise InvalidCommitment(f"rows that stage {commitment.stage} does not have")
        new_ones = [
            (side, *each) for side in SIDES for each in _stretches(commitment, getattr(commitment, side))
        ]
        for side, position, new in new_ones:
            known = self._said.get((commitment.stage, side, position), new)
            if known != new and not self.is_doubtful(position):
                raise InvalidCommitment(f"another digest of rows {position} to {position + new.n_rows}")
        found: list[Disagreement] = []
        for side, position, new in new_ones:
            key = commitment.stage, side, position
            if key in self._said:
                continue
            self._said[key] = new
            stage = commitment.stage if side == "sent" else commitment.stage - 1
            if self._is_contradicted(stage, position):
                found.append(Disagreement(stage, position, new.n_rows))
        return found

    def is_doubtful(self, position: int) -> bool:
        """Whether rows of this stretch were computed more than once."""
        return any(first < position + STRETCH_ROWS and position < end for first, end in self._repeated)

    def said(self, stage: int, side: Side, position: int, n_rows: int) -> bytes | None:
        """The digest of just these rows of one stretch; None: nothing was said of them."""
        if self.is_doubtful(position):
            return None
        found = self._said.get((stage, side, position))
        return found.digest if found is not None and found.n_rows == n_rows else None

    def stretch_with(self, stage: int, position: int) -> tuple[int, SignedStretch] | None:
        """Of what a stage says to have sent, the stretch that has this row: (its position, ...)."""
        start = position - position % STRETCH_ROWS
        found = self._said.get((stage, "sent", start))
        return None if found is None or position >= start + found.n_rows else (start, found)

    def has_of(self, stage: int) -> bool:
        """Whether a stage has said anything."""
        return any(key[0] == stage for key in self._said)

    def is_agreed(self, stage: int, position: int, n_rows: int) -> bool:
        """Whether a stage and the next one say the same of all these rows, which begin with a stretch."""
        return all(
            self.said(stage, "sent", start, n) is not None
            and self.said(stage, "sent", start, n) == self.said(stage + 1, "received", start, n)
            for start, n in spans(position, n_rows)
        )

    def _is_contradicted(self, stage: int, position: int) -> bool:
        sent = self._said.get((stage, "sent", position))
        received = self._said.get((stage + 1, "received", position))
        if sent is None or received is None or self.is_doubtful(position):
            return False
        # The last stretch may end at another row with each of them.
        return sent.n_rows == received.n_rows and sent.digest != received.digest


def spans(position: int, n_rows: int) -> Iterator[tuple[int, int]]:
    """(position, rows) of the stretches of which rows that begin at one consist."""
    for start in range(position, position + n_rows, STRETCH_ROWS):
        yield start, min(STRETCH_ROWS, position + n_rows - start)


def _stretches(commitment: RowsCommitment, digests: bytes) -> Iterator[tuple[int, SignedStretch]]:
    for (position, n_rows), digest in zip(
        spans(commitment.position, commitment.n_rows), stretch_digests(digests), strict=False
    ):
        yield position, SignedStretch(n_rows, digest)
