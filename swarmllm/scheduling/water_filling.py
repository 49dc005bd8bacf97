"""How many layers each node of a pipeline takes: as its speed says, as far as its memory lets it.

Parallax (arXiv 2509.26182), phase 1: the level lambda for which sum(min(c_i, lambda F_i)) is the number of
layers is where water stands in vessels of different width and height; all nodes below their cap then take
the same time. Vessels fill up in the order of c_i / F_i, so one pass finds it, where the paper bisects. Whole
layers come from rounding down and giving what is left to the largest
remainders.
"""

from __future__ import annotations

from collections.abc import Sequence


def water_fill(n_units: int, capacities: Sequence[int], speeds: Sequence[float]) -> list[int] | None:
    """Units for each node, n_units together, none above its capacity; None where they have no room.

    `speeds`: units per second, positive. Ties go to the earlier node.
    """
    if sum(capacities) < n_units:
        return None
    level = _level(n_units, capacities, speeds)
    shares = [min(capacity, level * speed) for capacity, speed in zip(capacities, speeds, strict=True)]
    units = [min(capacity, int(share + 1e-9)) for capacity, share in zip(capacities, shares, strict=True)]
    while sum(units) > n_units:
        # Rounding of the level, not of the shares.
        units[max(range(len(units)), key=lambda i: (units[i] - shares[i], -i))] -= 1
    while sum(units) < n_units:
        open_ = [i for i, capacity in enumerate(capacities) if units[i] < capacity]
        units[max(open_, key=lambda i: (shares[i] - units[i], -i))] += 1
    return units


def _level(n_units: int, capacities: Sequence[int], speeds: Sequence[float]) -> float:
    order = sorted(range(len(speeds)), key=lambda i: capacities[i] / speeds[i])
    left, width = float(n_units), sum(speeds)
    level = 0.0
    for i in order:
        level = left / width
        if level * speeds[i] <= capacities[i]:
            break
        left -= capacities[i]
        width = max(width - speeds[i], speeds[i] * 1e-12)
    return level
