"""Keeps the number of running requests that nodes reported when they accepted one, which is newer than any
record. Pure, with `now` passed in.

A record is a second old, and origins that choose in the same second choose alike. A stage's acknowledgement
tells its load at that moment, so an origin that meets others there can still choose another route.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from swarmllm_proto.identifiers import NodeId

REPORTED_S: Final = 1.5
"""Nodes announce a change of load once a second, and it takes its time to arrive."""


class ReportedLoad(NamedTuple):
    n_running: int
    """Requests on the node, without the one that it accepted."""
    at_s: float
    request_id: str
    """What it accepted."""


class ReportedLoads:
    def __init__(self) -> None:
        self._loads: dict[NodeId, ReportedLoad] = {}
        """The latest last."""

    def __repr__(self) -> str:
        return f"<ReportedLoads {len(self._loads)} nodes>"

    def reported(self, n_running: Mapping[NodeId, int], request_id: str, now: float) -> None:
        """By nodes that have accepted this request: how many others run there."""
        for node_id, n in n_running.items():
            self._loads.pop(node_id, None)
            self._loads[node_id] = ReportedLoad(n, now, request_id)
        self._forget(now)

    def at(self, now: float) -> dict[NodeId, ReportedLoad]:
        """Of the nodes that said it within `REPORTED_S`."""
        self._forget(now)
        return dict(self._loads)

    def _forget(self, now: float) -> None:
        while self._loads:
            node_id, reported = next(iter(self._loads.items()))
            if now - reported.at_s < REPORTED_S:
                return
            del self._loads[node_id]
