"""Decides whether two encoders of one projector have encoded the same picture. Pure.

Equal kernels make equal bits. How far others may be apart was measured with random projectors of the five
families (`tests/pipeline/test_picture_similarity.py`): rounding all weights to f16, which changes more than
the order of sums does, moves rows by up to 0.004, rounding them to eight bits by up to 0.08. Rows of another
picture are 0.4 away or more, also where only the colours of a part differ; zeros, noise and grey 0.9.
The same picture in half its resolution may be as near as 0.04, and is not told apart.

Of sounds those rows count that are farthest apart: encoders take half a minute at once, and what is behind a
short sound is silence, of which the rows hardly differ (`tests/pipeline/test_sound_similarity.py`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from swarmllm.pictures import MediumName
from swarmllm.pipeline.check.verdict import Match
from swarmllm.workerpool.encoders import EncodedPicture

Rows = npt.NDArray[np.float64]
LIMIT: Final = 0.2
"""Of the distance."""
FLAT: Final = 0.1
"""Rows of a picture that is the same everywhere hardly differ; they count as so far apart, in lengths of a
row, at least."""
WORST_ROW: Final = 2.0
SOUND_PART: Final = 20
"""One of so many rows of a sound counts: of half a minute 1.5 s."""


def picture_distance(one: EncodedPicture, other: EncodedPicture) -> float:
    """Of as many rows: mean over them of length of the difference / length of what is special about the row
    of `one` among its rows. 0: alike."""
    return float(np.mean(_row_distances(one, other)))


def sound_distance(one: EncodedPicture, other: EncodedPicture) -> float:
    """The same mean over the rows that are farthest apart."""
    parts = np.sort(_row_distances(one, other))
    return float(np.mean(parts[-max(1, len(parts) // SOUND_PART) :]))


def _row_distances(one: EncodedPicture, other: EncodedPicture) -> Rows:
    rows = one.rows.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        off = np.linalg.norm(other.rows - rows, axis=1)
        special = np.linalg.norm(rows - rows.mean(axis=0), axis=1)
        parts = off / np.maximum(special, FLAT * np.linalg.norm(rows, axis=1))
    parts = np.where(off == 0, 0.0, parts)
    return np.minimum(parts, WORST_ROW)


def similarity(one: EncodedPicture, other: EncodedPicture, medium: MediumName = "picture") -> Match:
    """In either order the same."""
    if (one.ends, one.runs) != (other.ends, other.runs) or not np.array_equal(one.tokens, other.tokens):
        return Match.WRONG
    if one.rows.tobytes() == other.rows.tobytes():
        return Match.EQUAL
    distance = picture_distance if medium == "picture" else sound_distance
    far = max(distance(one, other), distance(other, one))
    return Match.CLOSE if far <= LIMIT else Match.WRONG
