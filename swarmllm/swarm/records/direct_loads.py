"""What the spread of records needs of data connections: loads that the two ends tell each other."""

from __future__ import annotations

from typing import Protocol

from swarmllm_proto.identifiers import NodeId


class DirectLoads(Protocol):
    """Loads of nodes with which there is a data connection."""

    def tell_load(self, load: bytes) -> None:
        """This node's, to those that have asked for it."""
        ...

    def ask_for_load(self, node_id: NodeId) -> None:
        """Where there is a data connection with that node, for as long as it stays. Idempotent."""
        ...


class NoDirectLoads:
    """There are no data connections."""

    def tell_load(self, load: bytes) -> None:
        pass

    def ask_for_load(self, node_id: NodeId) -> None:
        pass
