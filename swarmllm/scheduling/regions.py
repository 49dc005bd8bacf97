"""Which nodes are near each other: a pipeline should not cross an ocean for every token.

Everybody works this out from the same coordinates, so the answer must not depend on who asks: nodes are
taken in the order of their ids, and each joins the first region whose first node is near enough, or founds
one. Nodes that are not sure of their place share a region of their own, apart from all others.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarmllm.scheduling.coordinates import Coordinate, predicted_rtt_s
from swarmllm_proto.identifiers import NodeId

REGION_RTT_S = 0.03
"""Within this round trip two nodes complement each other; farther apart each side better has its own copy."""
NOWHERE = -1


def regions_of(places: Mapping[NodeId, Coordinate | None]) -> dict[NodeId, int]:
    """Region by node id: numbers from 0 in the order of their founders, `NOWHERE` for the unsure."""
    founders: list[Coordinate] = []
    regions: dict[NodeId, int] = {}
    for node_id in sorted(places):
        place = places[node_id]
        if place is None or not place.is_settled:
            regions[node_id] = NOWHERE
            continue
        near = (
            number
            for number, founder in enumerate(founders)
            if predicted_rtt_s(founder, place) <= REGION_RTT_S
        )
        number = next(near, len(founders))
        if number == len(founders):
            founders.append(place)
        regions[node_id] = number
    return regions
