"""One budget for the bytes that this node holds for other nodes, and waiting for room in it: pure state.

Everything that comes from outside is reserved here before it is read, by peer and kind, and released when it
has been dealt with. A kind has a limit per peer and one for all peers together. A quarter of the latter is
set aside: each of GUARANTEED_PEERS peers has a small part of it for itself, enough for a decode step. What a
peer holds beyond its part comes from the other three quarters, which peers can use up for each other.

Nothing is kept of a peer that holds nothing.

A payload takes its room as it comes, so that announcing one costs the others nothing; what comes in one
piece, as all decode jobs do, needs none. Where there is no room for it, slow payloads of others give way,
the largest first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Final, Protocol

import trio

from swarmllm.swarm.data.wire import WireClosed
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import MIB, SWARM_PAYLOAD_MAX

GUARANTEED_PEERS: Final = 256
"""As many as a node looks for."""
_SET_ASIDE: Final = 4


class BudgetKind(StrEnum):
    """What the bytes are held for."""

    REQUESTS = "requests"
    """Bodies of requests, from before they are read until they are answered."""
    RESPONSES = "responses"
    """What this node answers, until the peer has taken it."""
    ANSWERS = "answers"
    """What peers answer to this node's requests, until it is complete."""
    MESSAGES = "messages"
    """Payloads of the data plane, while they arrive and are handled."""
    JOBS = "jobs"
    """Payloads that wait in the queues of requests."""


HeldBytes = dict[BudgetKind, int]
"""Of one peer."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Bytes."""

    per_peer: int
    in_all: int

    @property
    def guaranteed(self) -> int:
        """What each peer may have, whatever the others hold."""
        return self.in_all // _SET_ASIDE // GUARANTEED_PEERS

    @property
    def shared(self) -> int:
        return self.in_all - self.in_all // _SET_ASIDE


LIMITS: Final[Mapping[BudgetKind, Limit]] = {
    BudgetKind.REQUESTS: Limit(32 * MIB, 96 * MIB),
    BudgetKind.RESPONSES: Limit(48 * MIB, 96 * MIB),
    BudgetKind.ANSWERS: Limit(48 * MIB, 96 * MIB),
    BudgetKind.MESSAGES: Limit(SWARM_PAYLOAD_MAX + 8 * MIB, 416 * MIB),
    BudgetKind.JOBS: Limit(SWARM_PAYLOAD_MAX + 8 * MIB, 416 * MIB),
}
TOTAL_MIB: Final = sum(limit.in_all for limit in LIMITS.values()) // MIB


class Grant:
    """Bytes that are reserved until `release`, or the end of a `with` block."""

    __slots__ = ("_budget", "kind", "n_bytes", "peer")

    def __init__(self, budget: ByteBudget, peer: NodeId, kind: BudgetKind, n_bytes: int) -> None:
        self._budget: ByteBudget | None = budget
        self.peer = peer
        self.kind = kind
        self.n_bytes = n_bytes

    def __repr__(self) -> str:
        return f"<Grant {self.n_bytes} bytes of {self.kind} for {self.peer}>"

    def grow(self, n_bytes: int) -> bool:
        """Reserve so many more. False: there is no room, and the grant stays as it is."""
        if self._budget is None or not self._budget._take(self.peer, self.kind, n_bytes):
            return False
        self.n_bytes += n_bytes
        return True

    def absorb(self, other: Grant) -> None:
        """Take over what another grant of the same peer and kind holds."""
        if self._budget is not None and other._budget is self._budget:
            self.n_bytes += other.n_bytes
            other._budget = None

    def release(self) -> None:
        """Idempotent."""
        budget, self._budget = self._budget, None
        if budget is not None:
            budget._give_back(self.peer, self.kind, self.n_bytes)

    def __enter__(self) -> Grant:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class ByteBudget:
    def __init__(
        self, limits: Mapping[BudgetKind, Limit] = LIMITS, peers: Parts[HeldBytes] | None = None
    ) -> None:
        self._limits = limits
        self._peers: Parts[HeldBytes] = Parts.alone() if peers is None else peers
        self._in_all = dict.fromkeys(limits, 0)
        self._shared = dict.fromkeys(limits, 0)
        """Of that, what peers hold beyond what each is guaranteed."""
        self.n_refused = 0
        """Reservations, since the start."""

    def __repr__(self) -> str:
        return f"<ByteBudget {self.n_bytes} bytes, {self.n_refused} refused>"

    @classmethod
    def of_mib(cls, total_mib: int, peers: Parts[HeldBytes] | None = None) -> ByteBudget:
        """All limits in proportion, so that together they are `total_mib`."""
        share = total_mib / TOTAL_MIB
        return cls(
            {
                kind: Limit(int(limit.per_peer * share), int(limit.in_all * share))
                for kind, limit in LIMITS.items()
            },
            peers,
        )

    @property
    def n_bytes(self) -> int:
        """Reserved now, of all kinds and peers."""
        return sum(self._in_all.values())

    def held(self, peer: NodeId, kind: BudgetKind) -> int:
        held = self._peers.get(NodeId(peer))
        return held.get(kind, 0) if held else 0

    def reserve(self, peer: NodeId, kind: BudgetKind, n_bytes: int) -> Grant | None:
        """None: there is no room for it now."""
        return Grant(self, peer, kind, n_bytes) if self._take(peer, kind, n_bytes) else None

    def can_ever_hold(self, kind: BudgetKind, n_bytes: int) -> bool:
        """Whether one peer may have so many bytes while nobody else has any."""
        limit = self._limits[kind]
        return n_bytes <= limit.per_peer and n_bytes - limit.guaranteed <= limit.shared

    def is_for_others_to_give(self, peer: NodeId, kind: BudgetKind, n_bytes: int) -> bool:
        """Whether the peer may have so many bytes more as soon as others have given theirs back."""
        return self.can_ever_hold(kind, self.held(peer, kind) + n_bytes)

    def _take(self, peer: NodeId, kind: BudgetKind, n_bytes: int) -> bool:
        if n_bytes < 0:
            raise ValueError(f"{n_bytes} bytes cannot be reserved")
        limit = self._limits[kind]
        before = self.held(peer, kind)
        held = before + n_bytes
        more_shared = max(0, held - limit.guaranteed) - max(0, before - limit.guaranteed)
        is_too_much = (
            held > limit.per_peer
            or self._in_all[kind] + n_bytes > limit.in_all
            or self._shared[kind] + more_shared > limit.shared
        )
        if n_bytes and is_too_much:
            self.n_refused += 1
            return False
        self._set(peer, kind, held)
        return True

    def _give_back(self, peer: NodeId, kind: BudgetKind, n_bytes: int) -> None:
        self._set(peer, kind, self.held(peer, kind) - n_bytes)

    def _set(self, peer: NodeId, kind: BudgetKind, held: int) -> None:
        node_id, guaranteed = NodeId(peer), self._limits[kind].guaranteed
        of_peer = self._peers.get(node_id) or {}
        before = of_peer.pop(kind, 0)
        self._in_all[kind] += held - before
        self._shared[kind] += max(0, held - guaranteed) - max(0, before - guaranteed)
        if held:
            of_peer[kind] = held
        if of_peer:
            self._peers.put(node_id, of_peer)
        else:
            self._peers.drop(node_id)


LOOK_S = 0.05


async def reserve_within(
    budget: ByteBudget, peer: NodeId, kind: BudgetKind, n_bytes: int, seconds: float
) -> Grant | None:
    """None: there was no room in that time, or there never can be."""
    grant = budget.reserve(peer, kind, n_bytes)
    if grant is not None or not budget.can_ever_hold(kind, n_bytes):
        return grant
    with trio.move_on_after(seconds):
        while (grant := budget.reserve(peer, kind, n_bytes)) is None:  # noqa: ASYNC110 (the budget is pure)
            await trio.sleep(LOOK_S)
    return grant


class Receiver(Protocol):
    """A connection."""

    @property
    def node_id(self) -> NodeId: ...

    @property
    def n_reserved_bytes(self) -> int:
        """For the payload that it receives."""
        ...

    @property
    def is_slow(self) -> bool:
        """Whether that payload comes slowly."""
        ...

    def give_way(self) -> None:
        """End, and give back what is reserved."""
        ...


async def reserve_or_displace(
    budget: ByteBudget,
    receivers: Callable[[], Iterable[Receiver]],
    node_id: NodeId,
    n_bytes: int,
    seconds: float,
) -> Grant | None:
    """Room among the messages for `node_id`. None: there was none within that time."""
    kind = BudgetKind.MESSAGES
    with trio.move_on_after(seconds):
        while (grant := budget.reserve(node_id, kind, n_bytes)) is None:
            if not budget.is_for_others_to_give(node_id, kind, n_bytes):
                return None
            slowest = largest_slow(receivers(), node_id)
            if slowest is not None:
                slowest.give_way()
            await trio.sleep(0.0 if slowest is not None else LOOK_S)
        return grant
    return None


def largest_slow(receivers: Iterable[Receiver], node_id: NodeId) -> Receiver | None:
    """Of other nodes than `node_id`."""
    slow = [each for each in receivers if each.node_id != node_id and each.n_reserved_bytes and each.is_slow]
    return max(slow, key=lambda each: each.n_reserved_bytes, default=None)


UNRESERVED_BYTES: Final = 64 * 1024
AT_ONCE_BYTES: Final = 1024 * 1024
ROOM_S: Final = 30.0
"""Payloads that hold the room either are quick or give way to this one; its sender waits meanwhile."""

Reserve = Callable[[int, float], Awaitable[Grant | None]]
"""(bytes, seconds) -> room for them, if there is any within that time."""


class PayloadRoom:
    def __init__(self, reserve: Reserve | None) -> None:
        """Without `reserve` there is always room."""
        self._reserve = reserve
        self._grant: Grant | None = None

    def __repr__(self) -> str:
        return f"<PayloadRoom {self.n_bytes} bytes>"

    @property
    def n_bytes(self) -> int:
        return self._grant.n_bytes if self._grant is not None else 0

    @property
    def is_in_use(self) -> bool:
        return self._grant is not None

    def take_now(self, n_received: int, size: int) -> bool:
        """Room for the next piece of a payload of which so many bytes have come. False: `take` has to wait
        for it."""
        more = self._more(n_received, size)
        return not more or (self._grant is not None and self._grant.grow(more))

    async def take(self, n_received: int, size: int) -> None:
        """Raises WireClosed where there is no room within ROOM_S."""
        grant = None
        if self._reserve is not None:
            grant = await self._reserve(self._more(n_received, size), ROOM_S)
        if grant is None:
            raise WireClosed(f"no room for a payload of {size} bytes")
        if self._grant is not None:
            grant.absorb(self._grant)
        self._grant = grant

    def release(self) -> None:
        if self._grant is not None:
            self._grant.release()
            self._grant = None

    def _more(self, n_received: int, size: int) -> int:
        due = min(size, n_received + UNRESERVED_BYTES)
        if self._reserve is None or size <= UNRESERVED_BYTES or due <= self.n_bytes:
            return 0
        return min(size - self.n_bytes, max(due - self.n_bytes, AT_ONCE_BYTES))
