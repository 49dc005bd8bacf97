"""The interface of the network to the rest of the daemon: the Router protocol, and code that all routers
share.

Four promises, nothing more: each node has a record that it alone writes; every node can read every record;
node ids are unique; bytes can be sent to a node id, as a request with a response or as messages on one
persistent, ordered stream. Two implementations keep them: `Libp2pRouter` and `InMemoryRouter` (ships in the
package; carries tests and simulations). A router carries bytes; `swarmllm_proto.swarm` defines their meaning.

A handler's failure must reach exactly one place: the caller of a request gets it as a `RemoteError`, a
message's is logged. Only errors of our own tree are quoted to another node; of a foreign exception it learns
the type, because its text may hold anything, prompts included.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from socket import socket
from typing import Literal, Protocol

from swarmllm.errors import SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.limits import LOAD_MAX, RECORD_MAX, REQUEST_MAX, SWARM_HEADER_MAX, SWARM_PAYLOAD_MAX

RequestHandler = Callable[[NodeId, bytes], Awaitable[bytes]]
"""(sender's node id, request body) -> response body. An exception becomes a RemoteError at the caller."""

MessageHandler = Callable[[NodeId, bytes, memoryview], Awaitable[None]]
"""(sender's node id, header, payload). Called in order per sender; it should hand work on, not do it: while
it runs, nothing more is read from that sender (that is the back-pressure)."""


@dataclass(frozen=True, slots=True)
class Change:
    """Something a reader of records may want to act on."""

    kind: Literal["connected", "disconnected", "record", "reachable"]
    """reachable: whether that node, with which there is no connection, is reachable may have changed."""
    node_id: NodeId


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """One connected peer, as this node sees it."""

    node_id: NodeId
    addresses: tuple[str, ...] = ()
    rtt_s: float | None = None
    least_rtt_s: float | None = None
    """Of the latest ones, each alone: `rtt_s` is a mean, in which the ends' being busy counts."""
    bytes_per_s: float | None = None
    """Of large messages from there; None: none has come yet."""
    data_plane: Literal["direct", "libp2p", "relay", "memory", "none"] = "none"
    """relay: a libp2p stream through one."""
    bytes_sent: int = 0
    bytes_received: int = 0
    connected_since: float = 0.0
    """By trio's clock."""
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reachability:
    """What a peer found when it dialled this node, each address with a connection of its own."""

    checked_at: float
    """Seconds since the epoch."""
    asked: NodeId
    """Node id of the peer that tried."""
    control: tuple[tuple[str, bool], ...]
    """(address, whether this node answered there)"""
    data: tuple[tuple[str, bool], ...]
    observed_ip: str
    """Where this node's connections come from, for that peer; empty: unknown."""


@dataclass(frozen=True, slots=True)
class PortMappingState:
    """Whether the router of this node's network forwards ports to it."""

    state: Literal["off", "idle", "mapped", "failed"]
    """off: it is never asked; idle: it was not asked yet, because nothing says that it is needed."""
    detail: str = ""
    """In words: what is forwarded, or why nothing is."""


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """One end of a link: a connection to a proven node, of which this end only sends or only receives. To be
    given to the task that will use it, and closed here."""

    connection: socket
    key: bytes = field(repr=False)
    """ChaCha20-Poly1305, for this one direction of this one connection."""
    nonce: int
    """Of the next Noise message."""

    def close(self) -> None:
        self.connection.close()


LinkHandler = Callable[[NodeId, str, LinkEnd], Awaitable[bool]]
"""(sender's node id, purpose, the receiving end) -> whether it has been taken."""


class LinkMaker(Protocol):
    """A router that can make direct connections."""

    async def open_link(self, node_id: NodeId, purpose: str) -> LinkEnd:
        """The sending end, once the other has been taken there. Raises NodeUnreachable."""
        ...

    def serve_links(self, on_link: LinkHandler) -> None:
        """Set the handler; before that, links are refused."""
        ...


DhtMode = Literal["on", "client", "off"]


@dataclass(frozen=True, slots=True)
class DhtStatistics:
    """Since the start."""

    mode: DhtMode
    n_nodes: int
    """That answer in the DHT, as far as this node knows them."""
    n_records: int
    """What others announced, kept here for nodes that ask."""
    n_announced: int
    """Keys of this node: two for each of its models."""
    n_answered: int
    n_refused: int
    n_lookups: int


class ModelDiscovery(Protocol):
    """A router that can find models on nodes that are not connected."""

    def announce(self, models: Iterable[tuple[ModelId, str]]) -> None:
        """(ModelId, name) of everything that this node has; replaces what was announced before."""
        ...

    async def seek(self, name_or_id: str) -> bool:
        """Look for nodes that have a model. True: this node is connected with some now that it was not
        connected with. Never raises for the network's sake."""
        ...

    def statistics(self) -> DhtStatistics: ...


class Router(Protocol):
    @property
    def node_id(self) -> NodeId: ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs (with /p2p/ID) under which another node can dial this one."""
        ...

    @property
    def port_mapping(self) -> PortMappingState: ...

    @property
    def reachability(self) -> Reachability | None:
        """The last check; None until there was one, and where there is nothing to check."""
        ...

    def records(self) -> Mapping[NodeId, bytes]:
        """The latest record of every node heard of, this node's own included, by node id. In a large swarm
        without its details (`record_parts`), where they are not needed here or have not come yet."""
        ...

    async def publish(self, record: bytes) -> None:
        """Replace this node's record and spread it. Raises ValueError above the size limit."""
        ...

    async def publish_details(self, record: bytes, *, soon: bool) -> bool:
        """Replace this node's record by one that says something else in its details only (`record_parts`),
        or that says what was published of the load. Where the swarm is large, only those hear of it that use
        this node's models, `soon` or at the next occasion, and not of its load; else everybody does, as by
        `publish`: True. Raises ValueError."""
        ...

    def loads(self) -> Mapping[NodeId, bytes]:
        """What nodes have said since their record that they have to do, this one included, by node id; of
        those that have."""
        ...

    async def publish_load(self, load: bytes) -> None:
        """Say what this node has to do, until it publishes the next record. Cheaper than a record, and may be
        lost on the way to some. Where the swarm is large, only those hear each change that use this node over
        a data connection. Raises ValueError above the size limit."""
        ...

    def connected(self) -> frozenset[NodeId]:
        """Nodes with which there is a connection now (never this node)."""
        ...

    def reachable(self) -> frozenset[NodeId]:
        """Those, and the nodes that are dialled when there is something for them: lately heard of, with a
        record, and not known to be gone. The only truth about who may be planned with."""
        ...

    def untried(self) -> frozenset[NodeId]:
        """Reachable nodes with which there has been no connection: they may be but names."""
        ...

    async def reach(self, node_id: NodeId, *, timeout_s: float = 5.0) -> None:
        """Be connected with a reachable node: at once where this is so. What is sent to one does the same by
        itself. Raises NodeUnreachable, DeadlineExceeded."""
        ...

    def peers(self) -> tuple[PeerInfo, ...]: ...

    def changes(self) -> AbstractAsyncContextManager[AsyncIterator[Change]]:
        """Subscribe. Bounded: a reader that falls behind loses the oldest changes, never blocks the
        network."""
        ...

    def serve(self, on_request: RequestHandler, on_message: MessageHandler) -> None:
        """Set the handlers; before that, requests are refused and messages dropped."""
        ...

    async def connect(self, address: str, *, timeout_s: float = 10.0) -> NodeId:
        """Dial a multiaddr; returns the node id. Raises NodeUnreachable, DeadlineExceeded."""
        ...

    async def request(self, node_id: NodeId, body: bytes, *, timeout_s: float = 10.0) -> bytes:
        """Raises NodeUnreachable, DeadlineExceeded, RemoteError (the handler there failed)."""
        ...

    async def fetch(self, node_id: NodeId, body: bytes, *, timeout_s: float = 10.0) -> bytes | memoryview:
        """A request with a large answer: the same handler answers it, on a way of its own where there is
        one, so that nothing waits behind it, and not copied on arrival. Raises as `request`."""
        ...

    async def send(self, node_id: NodeId, header: bytes, payload: bytes | memoryview = b"") -> None:
        """One message on the persistent stream to that neighbour: ordered, reliable while the stream lives,
        waits while the neighbour does not read. To this node itself: delivered locally. Raises
        NodeUnreachable."""
        ...

    def send_now(self, node_id: NodeId, header: bytes, payload: bytes | memoryview = b"") -> bool:
        """`send` where nothing need be waited for: the stream is there, takes the message, and nothing is
        left to be written on it. False: it was not sent."""
        ...


log = logging.getLogger(__name__)

REASON_MAX = 2000
"""Characters of a failure's reason that travel."""


def check_record(record: bytes) -> None:
    """Raises ValueError unless the record may be published (1 byte .. RECORD_MAX)."""
    if not 0 < len(record) <= RECORD_MAX:
        raise ValueError(f"a record has 1 to {RECORD_MAX} bytes, not {len(record)}")


def check_load(load: bytes) -> None:
    """Raises ValueError unless the load may be published (1 byte .. LOAD_MAX)."""
    if not 0 < len(load) <= LOAD_MAX:
        raise ValueError(f"a load has 1 to {LOAD_MAX} bytes, not {len(load)}")


def check_request(body: bytes) -> None:
    """Raises ValueError above REQUEST_MAX."""
    if len(body) > REQUEST_MAX:
        raise ValueError(f"a request body has at most {REQUEST_MAX} bytes, not {len(body)}")


def check_message(header: bytes, payload: bytes | memoryview) -> int:
    """Size of the message in bytes. Raises ValueError above SWARM_HEADER_MAX or SWARM_PAYLOAD_MAX."""
    payload_bytes = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    if len(header) > SWARM_HEADER_MAX:
        raise ValueError(f"a message header has at most {SWARM_HEADER_MAX} bytes, not {len(header)}")
    if payload_bytes > SWARM_PAYLOAD_MAX:
        raise ValueError(f"a message payload has at most {SWARM_PAYLOAD_MAX} bytes, not {payload_bytes}")
    return len(header) + payload_bytes


class RequestRefused(Exception):
    """The request has no response; the text is safe to send to another node."""


class UnreadableRequest(RequestRefused):
    """The request breaks the protocol, which costs its sender trust."""


async def answer(handler: RequestHandler | None, sender: NodeId, body: bytes) -> bytes:
    """The handler's response. Raises RequestRefused whatever goes wrong in it."""
    if handler is None:
        raise RequestRefused("this node does not serve requests yet")
    try:
        response = await handler(sender, body)
    except SwarmLLMError as error:
        raise RequestRefused(error.message[:REASON_MAX]) from error
    except Exception as error:
        provoked_by(log, sender).exception("request from %s failed", sender)
        raise RequestRefused(f"the handler failed with {type(error).__name__}") from error
    if len(response) > REQUEST_MAX:
        raise RequestRefused(f"the response has {len(response)} bytes, more than {REQUEST_MAX}")
    return response


async def deliver(handler: MessageHandler | None, sender: NodeId, header: bytes, payload: memoryview) -> None:
    """Run the handler for one message; nothing it raises gets out, cancellation apart."""
    if handler is None:
        provoked_by(log, sender).debug("message from %s dropped: nothing serves messages yet", sender)
        return
    try:
        await handler(sender, header, payload)
    except Exception:
        provoked_by(log, sender).exception("message from %s failed", sender)
