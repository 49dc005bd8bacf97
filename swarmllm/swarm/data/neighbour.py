"""Keeps the data plane's state of one peer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import trio

from swarmllm.swarm.data.connection import Connection
from swarmllm.swarm.router import PeerInfo
from swarmllm_proto.envelope import Envelope
from swarmllm_proto.identifiers import NodeId

FAILURES_COUNT_S = 300.0


@dataclass(eq=False)
class Neighbour:
    connections: set[Connection] = field(default_factory=set)
    sending: Connection | None = None
    receiving: Connection | None = None
    establishing: trio.Lock = field(default_factory=trio.Lock)
    delivering: trio.Lock = field(default_factory=trio.Lock)
    turning: trio.Event | None = None
    """There while `sending` is being changed for another: senders wait."""
    n_failures: int = 0
    retry_at_s: float = 0.0
    n_bytes_sent: int = 0
    n_bytes_received: int = 0

    @property
    def sends_directly(self) -> bool:
        return self.sending is not None and self.sending.alive and self.sending.wire_kind == "direct"

    @property
    def is_in_use(self) -> bool:
        return bool(self.connections) or self.establishing.locked() or self.turning is not None

    def is_over(self, now: float) -> bool:
        """Nobody has tried to reach it for so long that its failures say nothing."""
        return not self.is_in_use and now >= self.retry_at_s + FAILURES_COUNT_S

    def needs(self, connection: Connection) -> bool:
        """Whether messages may get lost with it."""
        is_source = connection is self.receiving and not connection.peer_has_left
        return connection is self.sending or is_source


@dataclass(frozen=True, slots=True)
class LinkStatus:
    kind: Literal["direct", "libp2p", "relay", "none"]
    rtt_s: float | None
    n_bytes_sent: int
    n_bytes_received: int
    bytes_per_s: float | None = None
    least_rtt_s: float | None = None


def peer_info(
    node_id: NodeId, envelope: Envelope | None, link: LinkStatus, connected_since_s: float
) -> PeerInfo:
    return PeerInfo(
        node_id=node_id,
        addresses=envelope.addresses if envelope else (),
        rtt_s=link.rtt_s,
        least_rtt_s=link.least_rtt_s,
        bytes_per_s=link.bytes_per_s,
        data_plane=link.kind,
        bytes_sent=link.n_bytes_sent,
        bytes_received=link.n_bytes_received,
        connected_since=connected_since_s,
    )
