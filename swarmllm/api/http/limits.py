"""Limits of what HTTP clients may cost this node: connections, bytes and time.

Pure bookkeeping; the server drives it.

A client is the API key of its request where that is known, and the network address before that. An IPv6
client counts as its /64, since every household has as many addresses as it likes.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, TypeVar

CHUNK_BYTES = 2**16
"""Read or written at a time."""

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Every limit of the HTTP port; docs/security.md shows them as a table."""

    handshake_s: float = 10.0
    """For all of a TLS handshake."""
    header_s: float = 15.0
    """For all of a request's header, from its first byte (of a new connection: from its opening)."""
    header_bytes: int = 2**14
    """For all of a request's header, its target included."""
    headers: int = 100
    """Lines of a request's header."""
    idle_s: float = 30.0
    """Between two requests of a connection."""
    body_s: float = 30.0
    """For all of a request's body, besides what `body_bytes_per_s` grants for its size."""
    body_bytes_per_s: float = 16 * 2**10
    body_bytes: int = 32 * 2**20
    """Of one body (`api.max_body_bytes`)."""
    bodies_bytes: int = 256 * 2**20
    """Of the bodies of all running requests."""
    bodies_bytes_of_client: int = 128 * 2**20
    write_s: float = 20.0
    """For a client to take a chunk of CHUNK_BYTES."""
    send_buffer_bytes: int = 2**17
    """Of the kernel, per connection: what a client that does not read may have waiting there."""
    backlog: int = 128
    """Connections that the kernel holds until they are accepted."""
    connections: int = 512
    connections_of_address: int = 256
    """Not for loopback addresses, behind which a proxy may stand for many."""
    requests_of_client: int = 256
    """Running at once."""
    linger_s: float = 1.0
    """For a client to read a refusal although it has not finished sending."""
    linger_bytes: int = 2**20


def limits_for(max_body_bytes: int) -> HttpLimits:
    """With `api.max_body_bytes`: at least four of the largest bodies fit in all, two of one client."""
    bodies_bytes = max(HttpLimits().bodies_bytes, 4 * max_body_bytes)
    return HttpLimits(
        body_bytes=max_body_bytes, bodies_bytes=bodies_bytes, bodies_bytes_of_client=bodies_bytes // 2
    )


def client_of(address: str) -> str:
    """The network address as a client: itself, or the /64 of IPv6."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "unknown"
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        if not parsed.is_loopback:
            return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


def is_loopback_client(client: str) -> bool:
    try:
        return ipaddress.ip_address(client).is_loopback
    except ValueError:
        return False


class ClientByteBudget:
    """Bytes that are held for clients: charged before they are read, per client and in all."""

    def __init__(self, total: int, of_client: int) -> None:
        self.total = total
        self.of_client = of_client
        self.n_held = 0
        self._held: Counter[str] = Counter()

    def take(self, client: str, n_bytes: int) -> bool:
        """False: there is no room, and nothing has been charged."""
        if self.n_held + n_bytes > self.total or self._held[client] + n_bytes > self.of_client:
            return False
        self.n_held += n_bytes
        self._held[client] += n_bytes
        return True

    def give_back(self, client: str, n_bytes: int) -> None:
        self.n_held -= n_bytes
        self._held[client] -= n_bytes
        if not self._held[client]:
            del self._held[client]


@dataclass(slots=True, eq=False)
class ConnectionPlace(Generic[C]):
    """One connection's place."""

    client: str
    holder: C
    is_waiting: bool = True
    """Nothing runs for it: it shakes hands, sends a header or is idle. Such a place can be taken away."""


@dataclass(slots=True)
class Decision(Generic[C]):
    place: ConnectionPlace[C] | None
    """None: the new connection is refused."""
    evicted: ConnectionPlace[C] | None = None
    """Must be closed; it has lost its place already."""


@dataclass
class ConnectionPlaces(Generic[C]):
    """The open connections. Where all places are taken, a new connection takes the place that has waited
    longest among those of the address with the most waiting ones: slow connections cannot keep others out."""

    limits: HttpLimits
    _places: dict[ConnectionPlace[C], None] = field(default_factory=dict)
    """In the order in which they began to wait."""
    _n_of: Counter[str] = field(default_factory=Counter)
    _running: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(tuple(self._places))

    def enter(self, client: str, holder: C) -> Decision[C]:
        evicted: ConnectionPlace[C] | None = None
        is_local = is_loopback_client(client)
        if not is_local and self._n_of[client] >= self.limits.connections_of_address:
            evicted = self._longest_waiting(client)
        elif len(self._places) >= self.limits.connections:
            waiting = Counter(place.client for place in self._places if place.is_waiting)
            if waiting:
                evicted = self._longest_waiting(max(waiting, key=waiting.__getitem__))
        else:
            return Decision(self._add(client, holder))
        if evicted is None:
            return Decision(None)
        self.leave(evicted)
        return Decision(self._add(client, holder), evicted)

    def leave(self, place: ConnectionPlace[C]) -> None:
        """May be called again."""
        if place in self._places:
            del self._places[place]
            self._n_of[place.client] -= 1
            if not self._n_of[place.client]:
                del self._n_of[place.client]

    def begin(self, place: ConnectionPlace[C], client: str) -> bool:
        """A request of `client` runs on this connection, until `end`. False: it has too many of them."""
        if self._running[client] >= self.limits.requests_of_client:
            return False
        self._running[client] += 1
        place.is_waiting = False
        return True

    def end(self, place: ConnectionPlace[C], client: str) -> None:
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        place.is_waiting = True
        if place in self._places:
            # To the end of the line.
            del self._places[place]
            self._places[place] = None

    def _add(self, client: str, holder: C) -> ConnectionPlace[C]:
        place = ConnectionPlace(client, holder)
        self._places[place] = None
        self._n_of[client] += 1
        return place

    def _longest_waiting(self, client: str) -> ConnectionPlace[C] | None:
        return next((place for place in self._places if place.is_waiting and place.client == client), None)
