"""Decides which changes of a node's load and speed are announced, and how: pure, `now` passed in.

A record goes to every node, several times, so values that change with every request go into a heartbeat
instead. Missed heartbeats are not repaired as records are, so a load that persists is put into the record
too, for nodes that join later. Speeds and links are details: in a large swarm only those hear of them that
use this node's models (`Router.publish_details`).
"""

from __future__ import annotations

import math
from typing import Final, Literal

import msgspec

from swarmllm.node.announcing.capability import (
    links_have_changed,
    load_has_changed,
    place_has_changed,
    speeds_have_changed,
    work_has_changed,
)
from swarmllm_proto.node_load import carrying, load_of
from swarmllm_proto.swarm import NodeCapability

SETTLED_S: Final = 60.0
"""A load that has been the same for so long belongs into the record."""

Means = Literal["record", "speeds", "links", "load", "settled", "nothing"]
"""speeds, links: of the record, no more than these; of the former others should know soon. settled: the load
has been told, and belongs into a record that tells everything."""

FIRST_S: Final = 5.0
LONGEST_S: Final = 120.0
"""Of waits between two times that drifting values are told."""


class Damping:
    """Limits how often drifting values are announced, like round trips on a busy machine.

    The first change after a quiet time is announced at once. Each one that follows waits twice as long as the
    one before, up to a limit, and each look that finds nothing halves the wait.
    """

    def __init__(self, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._wait_s = first_s
        self._due_s = -math.inf

    def __repr__(self) -> str:
        return f"<Damping {self._wait_s:g} s>"

    def admits(self, now: float, *, has_changed: bool) -> bool:
        """Whether to tell it now; to be asked at each look."""
        if now < self._due_s:
            return False
        if has_changed:
            self._due_s = now + self._wait_s
            self._wait_s = min(self._longest_s, 2 * self._wait_s)
        else:
            self._wait_s = max(self._first_s, self._wait_s / 2)
        return has_changed


class RecordChanges:
    def __init__(self) -> None:
        self._published = NodeCapability()
        """As others know it."""
        self._recorded = NodeCapability()
        """As in the last record."""
        self._load_published_s = 0.0
        self._ways = Damping()

    def __repr__(self) -> str:
        return f"<RecordChanges {self._ways}>"

    @property
    def told(self) -> NodeCapability:
        return self._published

    def of_work(self, capability: NodeCapability) -> Means:
        """A quick look, at what routes should know at once."""
        if work_has_changed(self._published, capability):
            return "record"
        if speeds_have_changed(self._published, capability):
            return "speeds"
        return "load" if load_has_changed(self._published, capability) else "nothing"

    def of_all(self, capability: NodeCapability, now: float) -> Means:
        """To be asked now and then: what wanders by itself is told ever more rarely."""
        has_moved = place_has_changed(self._published, capability)
        is_of_ways = has_moved or links_have_changed(self._published, capability)
        tells_ways = self._ways.admits(now, has_changed=is_of_ways)
        means = self.of_work(capability)
        is_settled = means == "nothing" and now >= self._load_published_s + SETTLED_S
        if tells_ways and has_moved:
            return "record"
        if is_settled and load_has_changed(self._recorded, capability):
            return "settled"
        if tells_ways and means in ("load", "nothing"):
            return "links"
        return means

    def record_published(self, capability: NodeCapability) -> None:
        self._published = self._recorded = capability

    def details_published(self, capability: NodeCapability) -> None:
        self._published = msgspec.structs.replace(
            self._published,
            observed_latencies=capability.observed_latencies,
            observed_links=capability.observed_links,
        )

    def load_settled(self) -> None:
        """What was told of the load counts as recorded."""
        self._recorded = carrying(self._recorded, load_of(self._published))

    def load_published(self, capability: NodeCapability, now: float) -> None:
        self._published = carrying(self._published, load_of(capability))
        self._load_published_s = now
