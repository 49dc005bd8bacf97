"""What the data plane keeps of one peer."""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from swarmllm.swarm.data.connection import Connection


@dataclass
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

    def needs(self, connection: Connection) -> bool:
        """Whether messages may get lost with it."""
        is_source = connection is self.receiving and not connection.is_forsaken
        return connection is self.sending or is_source
