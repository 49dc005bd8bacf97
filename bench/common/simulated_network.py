"""Where the nodes of a simulated swarm are, and the network between them: in-memory routers whose links are
as long as the way."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import trio

from swarmllm.swarm.in_memory.link import LinkQuality
from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.swarm.in_memory.router import InMemoryRouter, MemoryPeer, Record

REGION_POINTS_S = ((0.0, 0.0), (0.09, 0.0), (0.03, 0.15))
"""Round trips between regions: 90 to 160 ms."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node really is."""

    region: int
    point_s: tuple[float, float]
    access_s: float

    def rtt_s(self, other: Place) -> float:
        return math.dist(self.point_s, other.point_s) + self.access_s + other.access_s


def random_place(rng: random.Random) -> Place:
    region = rng.randrange(len(REGION_POINTS_S))
    x_s, y_s = REGION_POINTS_S[region]
    return Place(region, (x_s + rng.gauss(0, 0.003), y_s + rng.gauss(0, 0.003)), rng.uniform(0.0005, 0.004))


class SimulatedNetwork(InMemoryNetwork):
    """Latency from where nodes are, worked out when it is asked for: a million pairs are not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, Place] = {}

    def quality(self, sender: str, receiver: str) -> LinkQuality:
        if sender == receiver:
            return LinkQuality()
        return LinkQuality(self.places[sender].rtt_s(self.places[receiver]) / 2)

    def _join(self, a: str, b: str) -> None:
        """Records go over where one of the two has none yet; `reunite` does it after a separation. Nobody
        here listens to changes, so none are announced: half a million pairs meet before the first tick."""
        now = trio.current_time()
        here, there = self._routers[a], self._routers[b]
        here._peers[b], there._peers[a] = MemoryPeer(now), MemoryPeer(now)
        for source, target in ((here._records, there._records), (there._records, here._records)):
            if len(target) <= 1 < len(source):
                target.update(source)

    def reunite(self, lost: list[str]) -> None:
        others = [node_id for node_id in self.places if node_id not in lost and node_id in self._routers]
        for a in lost:
            for b in others:
                self.heal(a, b)
        for source, targets in ((others[0], lost), *((node_id, others) for node_id in lost)):
            changes = self.router(source).known()
            for target in targets:
                for writer, record in changes.items() if source == others[0] else [(source, changes[source])]:
                    self.router(target).learn(writer, record)

    def spread(self, origin: InMemoryRouter, writer: str, record: Record) -> None:
        """At once, to whoever `origin` is connected with."""
        origin._records[writer] = record
        for node_id in origin._peers:
            self._routers[node_id]._records[writer] = record
