"""Decides how many pipelines a set of nodes forms, and which nodes go together.

Parallax (arXiv 2509.26182), phase 1: of all ways to form k pipelines, s*(k) is the fewest stages in total,
and the k with the largest k^2 / s*(k) is chosen: k pipelines serve k requests at a time, and the fewer stages
each has, the sooner each token is through.

Two facts make s*(k) cheap. Only the m largest nodes need be looked at for m stages: a smaller node can always
be exchanged for a larger one. And m nodes with sum S can only cover k pipelines of demand d if not more than
S - k d is wasted, so a search from the smallest m that is possible at all drops nearly every way at once. It
goes over the nodes from the largest to the smallest, and a state is how much each pipeline still lacks.

The problem (bin covering) is NP-hard, so that search is for small swarms: up to `SEARCHED` nodes x pipelines,
and with at most `BEAM` states per node. There the tests compare it with every partition. Beyond, each node
goes to the pipeline that lacks most, unless it completes another one exactly; with hundreds of nodes there
are so many ways to complete the last pipelines that little is lost.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

BEAM = 24
SEARCHED = 120
COUNTS = 48
"""Numbers of pipelines tried for a large swarm: one in a few hundred more or less is not felt."""


@dataclass(frozen=True, slots=True)
class _Way:
    """One way to distribute the nodes so far."""

    lacking: tuple[int, ...]
    """What each pipeline still needs, the largest first."""
    groups: tuple[tuple[int, ...], ...]
    """Indices of the nodes in each, in the order of `lacking`."""
    wasted: int

    @property
    def rank(self) -> tuple[int, int, tuple[int, ...]]:
        return self.wasted, sum(each * each for each in self.lacking), self.lacking


def best_groups(
    capacities: Sequence[int], demand: int, max_groups: int | None = None
) -> list[tuple[int, ...]]:
    """Indices into `capacities` of each pipeline's nodes; every group's capacities add up to `demand` at
    least. Empty where there is not enough for one. Equal inputs give equal answers."""
    if demand < 1:
        raise ValueError("a pipeline without demand")
    useful = [i for i, capacity in enumerate(capacities) if capacity > 0]
    order = sorted(useful, key=lambda i: (-min(capacities[i], demand), i))
    sizes = [min(capacities[i], demand) for i in order]
    most = sum(sizes) // demand
    best: list[tuple[int, ...]] = []
    best_score = 0.0
    for k in _counts(min(most, max_groups if max_groups is not None else most)):
        least = _least_nodes(sizes, demand, k)
        if k * k / least <= best_score:
            continue
        groups = fewest_stages(sizes, demand, k)
        if groups is not None and k * k / sum(map(len, groups)) > best_score:
            best_score = k * k / sum(map(len, groups))
            best = [tuple(order[i] for i in group) for group in groups]
    return sorted(best)


def _counts(most: int) -> list[int]:
    """The numbers of pipelines to try, the largest first: all of few, of many `COUNTS` evenly spread."""
    step = -(-most // COUNTS) if most > COUNTS else 1
    return list(range(most, 0, -step))


def fewest_stages(sizes: Sequence[int], demand: int, k: int) -> list[tuple[int, ...]] | None:
    """k groups of the fewest nodes; `sizes` descending, none above `demand`. None: not possible."""
    if sum(sizes) < k * demand:
        return None
    least = _least_nodes(sizes, demand, k)
    if least * k <= SEARCHED:
        counts = range(least, len(sizes) + 1)
        return next((groups for m in counts if (groups := _cover(sizes[:m], demand, k)) is not None), None)
    found, most = _spread(sizes, demand, k), len(sizes)
    while found is not None and least < most:
        middle = (least + most) // 2
        groups = _spread(sizes[:middle], demand, k)
        if groups is None:
            least = middle + 1
        else:
            found, most = groups, middle
    return found


def _least_nodes(sizes: Sequence[int], demand: int, k: int) -> int:
    """No fewer can do, by their sum and because each pipeline needs one."""
    total = itertools.accumulate(sizes)
    return max(k, next(i + 1 for i, reached in enumerate(total) if reached >= k * demand))


def _cover(sizes: Sequence[int], demand: int, k: int) -> list[tuple[int, ...]] | None:
    slack = sum(sizes) - k * demand
    ways = [_Way((demand,) * k, ((),) * k, 0)]
    for node, size in enumerate(sizes):
        found: dict[tuple[int, ...], _Way] = {}
        for way in ways:
            for at, lacks in enumerate(way.lacking):
                if lacks == 0 or (at and way.lacking[at - 1] == lacks):
                    continue
                wasted = way.wasted + max(0, size - lacks)
                if wasted > slack:
                    continue
                longer = _put(way, at, node, max(0, lacks - size), wasted)
                known = found.get(longer.lacking)
                if known is None or longer.wasted < known.wasted:
                    found[longer.lacking] = longer
        ways = sorted(found.values(), key=lambda way: way.rank)[:BEAM]
    return next((list(way.groups) for way in ways if not any(way.lacking)), None)


def _put(way: _Way, at: int, node: int, lacks: int, wasted: int) -> _Way:
    """`node` joins group `at`; the order of `lacking` is kept without sorting all of it."""
    to = at
    while to + 1 < len(way.lacking) and way.lacking[to + 1] > lacks:
        to += 1
    lacking = (*way.lacking[:at], *way.lacking[at + 1 : to + 1], lacks, *way.lacking[to + 1 :])
    group = (*way.groups[at], node)
    groups = (*way.groups[:at], *way.groups[at + 1 : to + 1], group, *way.groups[to + 1 :])
    return _Way(lacking, groups, wasted)


def _spread(sizes: Sequence[int], demand: int, k: int) -> list[tuple[int, ...]] | None:
    """Each node to the pipeline that lacks most, or to one that it completes exactly."""
    groups: list[list[int]] = [[] for _ in range(k)]
    lacking = [demand] * k
    heap = [(-demand, number) for number in range(k)]
    exactly: dict[int, list[int]] = {demand: list(range(k))}
    for node, size in enumerate(sizes):
        fitting = exactly.get(size, [])
        while fitting and lacking[fitting[-1]] != size:
            fitting.pop()
        if fitting:
            number = fitting.pop()
        else:
            while heap and lacking[heap[0][1]] != -heap[0][0]:
                heapq.heappop(heap)
            if not heap:
                break
            number = heapq.heappop(heap)[1]
        groups[number].append(node)
        lacking[number] = max(0, lacking[number] - size)
        if lacking[number]:
            heapq.heappush(heap, (-lacking[number], number))
            exactly.setdefault(lacking[number], []).append(number)
    return [tuple(group) for group in groups] if not any(lacking) else None
