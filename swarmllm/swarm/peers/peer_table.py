"""One table of all peers, and each package's view of its own part of them: pure state, bounded by the
packages.

What this node holds of a peer is one object (see `directory.Peer`) with a part for each package: its
envelope, its reputation, its connections, and so on. A package sees its own part of all peers, as `Parts`,
and decides by its own rules and limits when a part begins and ends. The table knows the peers: a peer begins
with its first part and is forgotten with its last, so no part outlives its peer and no peer its parts.

`PeerTable.tidy` drops parts that mean the same as no part (a limit that has filled up again, a pause that is
over).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from operator import attrgetter
from typing import Any, Generic, Protocol, Self, TypeVar

from swarmllm_proto.identifiers import NodeId

T = TypeVar("T")


class HasParts(Protocol):
    """A peer, as the table sees it; its parts are attributes, None where there is none."""

    node_id: NodeId
    n_parts: int


class PassingPart(Protocol):
    def is_over(self, now: float) -> bool:
        """Whether it says nothing that its absence would not say. `now`: trio's clock, in seconds."""
        ...


P = TypeVar("P", bound=PassingPart)


class PeerTable:
    """The peers by node id: the one place where a peer begins and where it is forgotten."""

    def __init__(self, new_peer: Callable[[NodeId], HasParts]) -> None:
        self._new_peer = new_peer
        self._peers: dict[NodeId, Any] = {}
        """The one dictionary of peers."""
        self.parts: list[Parts[Any]] = []
        """Of all packages."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._peers)} peers>"

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, node_id: NodeId) -> bool:
        return node_id in self._peers

    def tidy(self, now: float) -> None:
        """Let go of the parts that are over, and so of the peers that have no others."""
        for parts in self.parts:
            if isinstance(parts, PassingParts):
                parts.tidy(now)


class Parts(Collection[NodeId], Generic[T]):
    """One part of each peer that has it, by node id; iterates over the ids, the first that were put come
    first."""

    def __init__(self, table: PeerTable, name: str) -> None:
        """`name`: the attribute of a peer that holds the part."""
        self._table = table
        self._peers = table._peers
        self.name = name
        self._of: Callable[[Any], T | None] = attrgetter(name)
        self._having: dict[Any, None] = {}
        """The peers that have it, in order."""
        self._watchers: list[Callable[[NodeId], None]] = []
        table.parts.append(self)

    @classmethod
    def alone(cls) -> Self:
        """Of peers of which nothing else is held."""
        return cls(PeerTable(_SinglePartPeer), "part")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} of {len(self._having)} peers>"

    def __len__(self) -> int:
        return len(self._having)

    def __contains__(self, node_id: object) -> bool:
        peer = self._peers.get(node_id)  # type: ignore[call-overload]
        return peer is not None and self._of(peer) is not None

    def __iter__(self) -> Iterator[NodeId]:
        return map(_node_id, self._having)

    def items(self) -> Iterator[tuple[NodeId, T]]:
        return zip(map(_node_id, self._having), map(self._of, self._having), strict=True)  # type: ignore[arg-type]

    def values(self) -> Iterator[T]:
        return map(self._of, self._having)  # type: ignore[arg-type]

    def get(self, node_id: NodeId) -> T | None:
        peer = self._peers.get(node_id)
        return None if peer is None else self._of(peer)

    def watch(self, on_change: Callable[[NodeId], None]) -> None:
        """Called with the node of each part that begins, ends, is replaced or is `touched`."""
        self._watchers.append(on_change)

    def touched(self, node_id: NodeId) -> None:
        """Something in that node's part has changed of which whoever watches is to know."""
        for on_change in self._watchers:
            on_change(node_id)

    def put(self, node_id: NodeId, part: T) -> T:
        """In the place of the one that is there, else at the end."""
        peer = self._peers.get(node_id)
        if peer is None:
            peer = self._peers[node_id] = self._table._new_peer(node_id)
        if self._of(peer) is None:
            peer.n_parts += 1
            self._having[peer] = None
        setattr(peer, self.name, part)
        self.touched(node_id)
        return part

    def put_last(self, node_id: NodeId, part: T) -> T:
        """At the end in any case."""
        self.put(node_id, part)
        peer = self._peers[node_id]
        del self._having[peer]
        self._having[peer] = None
        return part

    def drop(self, node_id: NodeId) -> T | None:
        """The part that was there."""
        peer = self._peers.get(node_id)
        if peer is None or (part := self._of(peer)) is None:
            return None
        setattr(peer, self.name, None)
        del self._having[peer]
        peer.n_parts -= 1
        if not peer.n_parts:
            del self._peers[node_id]
        self.touched(node_id)
        return part

    def drop_first(self) -> None:
        """The part that was put first."""
        self.drop(next(iter(self)))


class PassingParts(Parts[P]):
    """Parts that become superfluous with time."""

    def tidy(self, now: float) -> None:
        for node_id in [node_id for node_id, part in self.items() if part.is_over(now)]:
            self.drop(node_id)


class _SinglePartPeer:
    __slots__ = ("n_parts", "node_id", "part")

    def __init__(self, node_id: NodeId) -> None:
        self.node_id = node_id
        self.n_parts = 0
        self.part: Any = None


_node_id: Callable[[Any], NodeId] = attrgetter("node_id")
