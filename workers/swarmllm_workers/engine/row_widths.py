"""Rows of different widths: a picture's may have further parts behind the first one, which the layers after
the first take (deepstack); other rows have none there, which is the same as zeros."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def widened(rows: np.ndarray, width: int) -> np.ndarray:
    """f32 [n, width]: `rows` with zeros behind them, or without what is behind the width."""
    if rows.shape[1] >= width:
        return rows[:, :width]
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])))


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """One after the other: ids i32 [n], or rows f32 [n, the greatest width of all]."""
    if parts[0].ndim == 2 and len({part.shape[1] for part in parts}) > 1:
        width = max(part.shape[1] for part in parts)
        parts = [widened(part, width) for part in parts]
    return np.concatenate(parts)
