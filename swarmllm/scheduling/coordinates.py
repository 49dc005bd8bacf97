"""Network coordinates: predict the round trip between nodes that have not measured it, and which nodes are
near each other.

Vivaldi (Dabek, Cox, Kaashoek, Morris: "Vivaldi: a decentralized network coordinate system", SIGCOMM 2004):
every node floats at a point, and each measured round trip pulls it towards or pushes it from the other's
point like a spring. The distance of two points then predicts the round trip between their nodes. The height
is the latency of a node's own access link, which is part of every path. By the weights, a node that is sure
of its position moves little for one that is not.

A node with few neighbours (below ten, in the tests' three regions) may come to rest folded to the wrong side
of them, where every step out is uphill. Its error then stays high, so it is not believed: see `is_settled`.

The constants are the paper's; the bounds are those of HashiCorp's Serf, which runs this in production.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from swarmllm_proto.identifiers import NodeId

DIMENSIONS = 3
ERROR_GAIN = 0.25
MOVE_GAIN = 0.25
ERROR_MAX = 1.5
HEIGHT_MIN_S = 1e-5
RTT_MIN_S = 1e-6
REACH_S = 30.0
"""No coordinate lies farther out: round trips are shorter, and a liar must not drag others to infinity."""
TRUSTED_ERROR = 0.5
"""A node that is less sure of its place is not believed to be there."""
REGION_RTT_S = 0.03
"""Within this round trip two nodes complement each other; farther apart each side better has its own copy."""
NOWHERE = -1
WINDOW = 8


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A place in seconds of round trip; `error` is the node's own relative doubt about it."""

    position_s: tuple[float, ...] = (0.0,) * DIMENSIONS
    height_s: float = HEIGHT_MIN_S
    error: float = ERROR_MAX

    @property
    def is_settled(self) -> bool:
        return self.error <= TRUSTED_ERROR


def predicted_rtt_s(a: Coordinate, b: Coordinate) -> float:
    return math.dist(a.position_s, b.position_s) + (a.height_s + b.height_s)


def moved(own: Coordinate, other: Coordinate, rtt_s: float, pair: str) -> Coordinate:
    """Where `own` is after a round trip to `other`. Two nodes at one point part in a direction that `pair`
    (both names, the mover's first) decides, so that no randomness is needed. Nonsense (not finite, not
    positive) moves nothing."""
    if not 0 < rtt_s <= REACH_S:
        return own
    rtt_s = max(rtt_s, RTT_MIN_S)
    expected_s = predicted_rtt_s(own, other)
    wrongness = abs(expected_s - rtt_s) / rtt_s
    weight = own.error / max(own.error + other.error, 1e-6)
    share = ERROR_GAIN * weight
    error = min(ERROR_MAX, wrongness * share + own.error * (1 - share))
    force_s = MOVE_GAIN * weight * (rtt_s - expected_s)
    direction, apart_s = _direction(other.position_s, own.position_s, pair)
    position_s = tuple(
        max(-REACH_S, min(REACH_S, at + force_s * part))
        for at, part in zip(own.position_s, direction, strict=True)
    )
    height_s = own.height_s
    if apart_s > RTT_MIN_S:
        height_s += (own.height_s + other.height_s) * force_s / apart_s
    return Coordinate(position_s, min(REACH_S, max(HEIGHT_MIN_S, height_s)), error)


class SteadyCoordinate:
    """The position that a node announces: the mean of its positions over about the last `WINDOW` moves.

    Each measured round trip moves a node, the wrong ones too, so its position never settles completely. The
    position that it announces and plans with does (Ledlie, Gardner, Seltzer: "Network coordinates in the
    wild", NSDI 2007, announce the centroid of a window likewise).
    """

    def __init__(self) -> None:
        self.coordinate = Coordinate()
        self._n_moves = 0

    def __repr__(self) -> str:
        return f"<SteadyCoordinate {self.coordinate}>"

    def move(self, floating: Coordinate) -> None:
        """`floating`: where it is after another look at round trips."""
        self._n_moves = min(WINDOW, self._n_moves + 1)
        was, share = self.coordinate, 1 / self._n_moves

        def between(before: float, after: float) -> float:
            return before + (after - before) * share

        self.coordinate = Coordinate(
            tuple(map(between, was.position_s, floating.position_s)),
            between(was.height_s, floating.height_s),
            between(was.error, floating.error),
        )


def _direction(origin: tuple[float, ...], target: tuple[float, ...], pair: str) -> tuple[list[float], float]:
    """(unit vector, distance)"""
    apart_s = math.dist(origin, target)
    if apart_s > RTT_MIN_S:
        return [(b - a) / apart_s for a, b in zip(origin, target, strict=True)], apart_s
    digest = hashlib.sha256(pair.encode()).digest()
    parts = [byte - 127.5 for byte in digest[:DIMENSIONS]]
    length = math.hypot(*parts)
    return [part / length for part in parts], 0.0


def regions_of(places: Mapping[NodeId, Coordinate | None]) -> dict[NodeId, int]:
    """Region by node id: numbers from 0 in the order of their founders, `NOWHERE` for the unsure.

    A pipeline should not cross an ocean for every token. Every node computes the regions from the same
    coordinates, so the answer must not depend on who computes it: nodes are taken in the order of their ids,
    and each joins the first region whose first node is near enough, or founds one. Nodes that are not sure of
    their place share a region of their own, apart from all others.
    """
    centres: list[Coordinate] = []
    regions: dict[NodeId, int] = {}
    for node_id in sorted(places):
        place = places[node_id]
        if place is None or not place.is_settled:
            regions[node_id] = NOWHERE
            continue
        near = (
            number
            for number, founder in enumerate(centres)
            if predicted_rtt_s(founder, place) <= REGION_RTT_S
        )
        number = next(near, len(centres))
        if number == len(centres):
            centres.append(place)
        regions[node_id] = number
    return regions
