"""Carries large answers over connections of their own, so that decoding never waits behind a transfer.

A *bulk* connection is a data-plane connection (TCP, Noise, frames, heartbeat) whose hello says so. It carries
questions and answers instead of messages: header `[u8 kind][u64 number]`, payload the body.

    0 ask       1 answer       2 refused (payload: why, UTF-8)       3 busy

Questions are handled side by side, so one slow answer holds up no other; at most PENDING_MAX per connection.
Losing a bulk connection does not mean that the peer is gone: the questions on it fail and are asked again.

Two nodes that ask each other at the same moment may both dial. The connection that the smaller node id
dialled stays. The other node turns to it once it is asked there, and ends its own connection with the last
answer.

Where the peer's data port cannot be reached, its wire is a libp2p stream (`/swarmllm/shard/1.0.0`). A better
way is looked for now and then, beside what goes on: new questions take it, and the old connection ends with
its last answer. Through a relay, transfers leave half of what it carries for a circuit to messages.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field
from enum import IntEnum
from struct import Struct
from typing import Protocol

import trio

from swarmllm.errors import DeadlineExceeded, NodeBusy, NodeUnreachable, RemoteError
from swarmllm.log_filter import provoked_by
from swarmllm.supervision import Outcome, spawn
from swarmllm.swarm.byte_budget import BudgetKind, ByteBudget, Grant
from swarmllm.swarm.data.connection import Connection
from swarmllm.swarm.data.stream_fallback import StreamWire
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.trust import Note, TrustEvent, ignored_event
from swarmllm.swarm.router import RequestRefused
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import REQUEST_MAX

log = logging.getLogger(__name__)

_PEERS_MAX = 1024
"""For more, those are forgotten that could not be reached."""
PENDING_MAX = 32
_NO_WAY_S = 10.0
"""How long a peer without a direct way is not dialled again."""
_RELAY_ROOM_MIN = 0.5
_HEADER = Struct("<BQ")


class BulkKind(IntEnum):
    ASK = 0
    ANSWER = 1
    REFUSED = 2
    BUSY = 3


class NoBulkConnection(NodeUnreachable):
    """The peer takes no bulk connection of any kind; the caller has to ask in another way."""


_Question = Outcome[bytes | memoryview]


@dataclass(eq=False)
class BulkPeer:
    dialling: trio.Lock = field(default_factory=trio.Lock)
    connection: Connection | None = None
    retry_at_s: float = 0.0
    is_looking: bool = False
    """For a better way than `connection`."""

    @property
    def is_in_use(self) -> bool:
        return self.connection is not None or self.dialling.locked() or self.is_looking

    def is_over(self, now: float) -> bool:
        return not self.is_in_use and now >= self.retry_at_s


class BulkConnector(Protocol):
    """The part of the data plane that transfers use."""

    def all_connections(self, node_id: NodeId) -> list[Connection]:
        """Of every kind."""
        ...

    async def dial_bulk(self, node_id: NodeId) -> Connection | None:
        """A direct bulk connection; None where there is no such way."""
        ...

    async def open_bulk_stream(self, node_id: NodeId, old: Connection | None) -> Connection | None:
        """One over libp2p that is better than `old`; None where there is no such way."""
        ...

    async def answer(self, sender: NodeId, body: bytes) -> bytes:
        """The daemon's handler. Raises RequestRefused."""
        ...


class Bulk:
    """Sends and answers questions with large answers, over `ways`."""

    def __init__(
        self,
        own_id: NodeId,
        nursery: trio.Nursery,
        ways: BulkConnector,
        budget: ByteBudget | None = None,
        note: Note = ignored_event,
        peers: Parts[BulkPeer] | None = None,
    ) -> None:
        self._budget = budget or ByteBudget()
        self._note = note
        self._own_id = own_id
        self._nursery = nursery
        self._ways = ways
        self._peers: Parts[BulkPeer] = Parts.alone() if peers is None else peers
        self._questions: dict[Connection, dict[int, _Question]] = {}
        self._n_answering: dict[Connection, int] = {}
        self._numbers = itertools.count(1)

    async def fetch(self, node_id: NodeId, body: bytes, timeout_s: float) -> bytes | memoryview:
        """Raises NoBulkConnection, NodeUnreachable, DeadlineExceeded, RemoteError."""
        with trio.move_on_after(timeout_s):
            return await self._fetch(node_id, body)
        raise DeadlineExceeded(f"node {node_id} did not answer within {timeout_s:g} s")

    async def take(self, connection: Connection, header: bytes, payload: memoryview) -> None:
        """A frame of a bulk connection."""
        if len(header) != _HEADER.size:
            return
        kind, number = _HEADER.unpack(header)
        if len(payload) > REQUEST_MAX:
            self._note(
                connection.node_id, TrustEvent.BROKE_PROTOCOL, f"{len(payload)} bytes on a bulk connection"
            )
            connection.end("more than a question or an answer may have")
            return
        if kind == BulkKind.ASK:
            await self._asked(connection, number, payload)
            return
        question = self._questions.get(connection, {}).get(number)
        if question is None:
            return
        node_id = connection.node_id
        if kind == BulkKind.ANSWER:
            question.succeed(payload)
        elif kind == BulkKind.REFUSED:
            reason = bytes(payload).decode("utf-8", "replace")
            question.fail(RemoteError(f"node {node_id}: {reason}"))
        elif kind == BulkKind.BUSY:
            question.fail(NodeBusy(f"node {node_id}: it is busy"))

    def lost(self, connection: Connection) -> None:
        """It has ended."""
        for question in self._questions.pop(connection, {}).values():
            question.fail(NodeUnreachable(f"node {connection.node_id} was lost while it was asked"))
        self._n_answering.pop(connection, None)
        if not connection.ready.is_set():
            self._had_no_hello(connection)
            return
        peer = self._peers.get(connection.node_id)
        if peer is not None and peer.connection is connection:
            self._peers.drop(connection.node_id)

    def _had_no_hello(self, connection: Connection) -> None:
        """A connection dialled here has ended before the peer said hello: the next way is a stream."""
        peer = self._peers.get(connection.node_id)
        if peer is not None and peer.connection is connection:
            peer.connection, peer.retry_at_s = None, trio.current_time() + _NO_WAY_S

    async def _fetch(self, node_id: NodeId, body: bytes) -> bytes | memoryview:
        while True:
            connection = await self._connection(node_id)
            try:
                return await self._ask(connection, body)
            except NodeUnreachable:
                if connection.ready.is_set():
                    raise
                self._had_no_hello(connection)

    async def _ask(self, connection: Connection, body: bytes) -> bytes | memoryview:
        """Raises NodeUnreachable, NodeBusy, RemoteError."""
        number, question = next(self._numbers), Outcome[bytes | memoryview]()
        questions = self._questions.setdefault(connection, {})
        questions[number] = question
        try:
            await connection.send(_HEADER.pack(BulkKind.ASK, number), body)
            return await question.wait()
        finally:
            questions.pop(number, None)
            if not questions and self._questions.get(connection) is questions:
                del self._questions[connection]
            self._end_if_replaced(connection)

    async def _connection(self, node_id: NodeId) -> Connection:
        if len(self._peers) >= _PEERS_MAX:
            for idle in [each for each, peer in self._peers.items() if not peer.is_in_use]:
                self._peers.drop(idle)
        peer = self._peers.get(node_id) or self._peers.put(node_id, BulkPeer())
        async with peer.dialling:
            if peer.connection is None or not peer.connection.alive:
                peer.connection = await self._establish(node_id, peer)
                self._keep_one(node_id, peer)
            elif peer.connection.wire_kind != "direct" and self._may_look(peer):
                peer.is_looking = True
                spawn(self._nursery, "connection", self._look_for_better, node_id, peer, peer.connection)
            connection = peer.connection
        if isinstance(connection.wire, StreamWire) and connection.wire.relay_room() < _RELAY_ROOM_MIN:
            raise NodeUnreachable(f"the relay to node {node_id} carries no more transfers")
        return connection

    async def _establish(self, node_id: NodeId, peer: BulkPeer) -> Connection:
        """One that was dialled is not ready yet: a question follows this node's hello, a round trip before
        the peer's can be here."""
        if there := [c for c in self._ways.all_connections(node_id) if _is_ready_and_direct(c)]:
            return there[0]
        if trio.current_time() >= peer.retry_at_s:
            dialled = await self._ways.dial_bulk(node_id)
            if dialled is not None:
                spawn(self._nursery, "connection", dialled.says_hello)  # Where it does not, this ends it.
                await dialled.introduced()
                return dialled
            peer.retry_at_s = trio.current_time() + _NO_WAY_S
        connection = await self._ready(await self._ways.open_bulk_stream(node_id, None))
        if connection is None:
            raise NoBulkConnection(f"node {node_id} takes no bulk connection")
        return connection

    def _keep_one(self, node_id: NodeId, peer: BulkPeer) -> None:
        """Of a connection dialled here and one that the peer, of the smaller id, dialled and asks on."""
        own = peer.connection
        if own is None or not own.dialled or self._own_id < node_id:
            return
        for theirs in self._ways.all_connections(node_id):
            if _is_ready_and_direct(theirs) and not theirs.dialled and theirs in self._n_answering:
                peer.connection = theirs
                self._end_if_replaced(own)
                return

    def _may_look(self, peer: BulkPeer) -> bool:
        return not peer.is_looking and trio.current_time() >= peer.retry_at_s

    async def _look_for_better(self, node_id: NodeId, peer: BulkPeer, old: Connection) -> None:
        try:
            better = await self._ready(await self._ways.dial_bulk(node_id))
            better = better or await self._ready(await self._ways.open_bulk_stream(node_id, old))
        finally:
            peer.is_looking = False
            peer.retry_at_s = trio.current_time() + _NO_WAY_S
        if better is None:
            return
        if peer.connection is old and self._peers.get(node_id) is peer:
            provoked_by(log, node_id).info(
                "transfers from node %s take a better way now: %s", node_id, better.wire_kind
            )
            peer.connection = better
            self._end_if_replaced(old)
        else:
            better.end("no longer needed")

    def _end_if_replaced(self, connection: Connection) -> None:
        peer = self._peers.get(connection.node_id)
        is_current = peer is None or peer.connection is connection
        is_busy = self._questions.get(connection) or self._n_answering.get(connection)
        if not is_current and not is_busy and connection.dialled:
            connection.end("no longer needed")

    async def _ready(self, connection: Connection | None) -> Connection | None:
        return connection if connection is not None and await connection.says_hello() else None

    async def _asked(self, connection: Connection, number: int, body: memoryview) -> None:
        n_answering = self._n_answering.get(connection, 0)
        grant = self._budget.reserve(connection.node_id, BudgetKind.REQUESTS, len(body))
        if n_answering >= PENDING_MAX or grant is None:
            if grant is not None:
                grant.release()
            await self._reply(connection, BulkKind.BUSY, number, b"")
            return
        self._n_answering[connection] = n_answering + 1
        if (peer := self._peers.get(connection.node_id)) is not None:
            self._keep_one(connection.node_id, peer)
        spawn(
            self._nursery,
            "connection",
            self._handle,
            connection,
            number,
            bytes(body),
            grant,
            failed=lambda _: connection.end("an error here"),
        )

    async def _handle(self, connection: Connection, number: int, body: bytes, asked: Grant) -> None:
        try:
            with asked:
                try:
                    kind, content = BulkKind.ANSWER, await self._ways.answer(connection.node_id, body)
                except RequestRefused as refusal:
                    kind, content = BulkKind.REFUSED, str(refusal).encode()
            # It waits here until the peer reads.
            grant = self._budget.reserve(connection.node_id, BudgetKind.RESPONSES, len(content))
            if grant is None:
                await self._reply(connection, BulkKind.BUSY, number, b"")
                return
            with grant:
                await self._reply(connection, kind, number, content)
        finally:
            if connection in self._n_answering:
                self._n_answering[connection] -= 1

    async def _reply(self, connection: Connection, kind: BulkKind, number: int, content: bytes) -> None:
        try:
            await connection.send(_HEADER.pack(kind, number), content)
        except NodeUnreachable as error:
            provoked_by(log, connection.node_id).debug("an answer found nobody: %s", error)


def _is_ready_and_direct(connection: Connection) -> bool:
    is_ready = connection.alive and connection.ready.is_set()
    return is_ready and connection.bulk and connection.wire_kind == "direct"
