"""Makes the record books of two nodes equal: they compare digests, and ask for what is missing.

The asking node sends a fingerprint for each group of the nodes that it knows. The other one answers with the
digests of the groups that differ. Two nodes that know the same thousand nodes compare 1 KiB instead of 80.

Runs over the request protocol with kinds of its own. A node joins late, misses gossip or wakes from a sleep:
one exchange with any peer and it knows what that peer knows.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Final, Protocol

import msgspec
import trio
from msgspec import Meta

from swarmllm.errors import RemoteError
from swarmllm.log_filter import provoked_by
from swarmllm.swarm.records.envelope_book import NODES_MAX, Digests, EnvelopeBook
from swarmllm.swarm.router import RequestRefused, UnreadableRequest
from swarmllm_proto.codec import field_and_reason
from swarmllm_proto.envelope import ENVELOPE_MAX
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import REQUEST_MAX

log = logging.getLogger(__name__)

KIND_APPLICATION = 0
KIND_DIGESTS = 1
KIND_ENVELOPES = 2
KIND_PEERS = 3
KIND_DIAL_BACK = 4
KIND_LET_GO = 5
KIND_MAY_LET_GO = 6
KIND_DETAILS = 7

NO_DIGESTS: Final = msgspec.msgpack.encode(())
"""The answer where two nodes know the same."""
_RESPONSE_BYTES = REQUEST_MAX - 64 * 1024
_PER_ASKING = 256

_Asked = Annotated[tuple[NodeId, ...], Meta(max_length=NODES_MAX)]
_Envelopes = Annotated[
    tuple[Annotated[bytes, Meta(max_length=ENVELOPE_MAX)], ...], Meta(max_length=NODES_MAX)
]

_digests = msgspec.msgpack.Decoder(Digests)
_asked = msgspec.msgpack.Decoder(_Asked)
_envelopes = msgspec.msgpack.Decoder(_Envelopes)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

Ask = Callable[[NodeId, int, bytes], Awaitable[bytes]]
"""(node id, kind, body) -> response body. Raises NodeUnreachable, DeadlineExceeded, RemoteError."""


class EnvelopeReader(Protocol):
    """Takes envelopes of other nodes."""

    def take(self, sealed: bytes, ages_s: Mapping[NodeId, float]) -> NodeId:
        """Whose it is. `ages_s`: since each writer was heard, in seconds. Raises BadMessage."""
        ...

    def blame(self, sender: NodeId, error: BadMessage) -> None:
        """For what was wrong with what it sent."""
        ...

    def pass_on(self, node_id: NodeId) -> None:
        """What that node said of itself on connecting is new here, and so it may be elsewhere."""
        ...

    def is_lost(self, node_id: NodeId, heard_at_s: float) -> bool:
        """Whether a node's connection has ended since it was last heard."""
        ...


class RecordExchange:
    def __init__(self, book: EnvelopeBook, ask: Ask, reader: EnvelopeReader) -> None:
        self._book = book
        self._ask = ask
        self._reader = reader

    async def synchronise(self, node_id: NodeId, *, also_ages: bool = False) -> int:
        """Learn everything `node_id` knows; with `also_ages` also when it heard those of whom both know the
        same, which takes 80 bytes for each. Of how many other nodes it told what was lacking here. Raises
        NodeUnreachable, DeadlineExceeded, RemoteError."""
        known = b"" if also_ages else self._book.fingerprints(self._reader.is_lost)
        answered = await self._ask(node_id, KIND_DIGESTS, known)
        try:
            digests = _digests.decode(answered)
        except _UNREADABLE as error:
            raise self._unreadable(node_id, "digests", error) from None
        lacking = self._book.lacking(digests, trio.current_time())
        fetched = await self.fetch(node_id, lacking)
        if node_id in lacking:
            self._reader.pass_on(node_id)
        return len(fetched - {node_id})

    async def fetch(self, node_id: NodeId, wanted: dict[NodeId, float]) -> set[NodeId]:
        """Ask `node_id` for the envelopes of these nodes (with their ages). Whose came. Raises as
        `synchronise`."""
        left = list(wanted)
        fetched: set[NodeId] = set()
        while left:
            body = msgspec.msgpack.encode(left[:_PER_ASKING])
            answered = await self._ask(node_id, KIND_ENVELOPES, body)
            try:
                envelopes = _envelopes.decode(answered)
            except _UNREADABLE as error:
                raise self._unreadable(node_id, "envelopes", error) from None
            received = set()
            for sealed in envelopes:
                if (writer := self._take_one(node_id, sealed, wanted)) is not None:
                    received.add(writer)
                # Checking and decoding the largest takes a few milliseconds, and there may be hundreds.
                await trio.lowlevel.checkpoint()
            if received.isdisjoint(left):
                break
            fetched.update(received.intersection(left))
            left = [wanted_id for wanted_id in left if wanted_id not in received]
        return fetched

    def answer(self, kind: int, body: bytes) -> bytes:
        """Raises RequestRefused."""
        if kind == KIND_DIGESTS:
            now = trio.current_time()
            try:
                digests = self._book.differing(body, now, self._reader.is_lost)
            except ValueError as error:
                raise UnreadableRequest(f"fingerprints: {error}") from None
            return msgspec.msgpack.encode(digests)
        if kind == KIND_ENVELOPES:
            try:
                asked = _asked.decode(body)
            except _UNREADABLE as error:
                field, reason = field_and_reason(error, "node_ids")
                raise UnreadableRequest(f"{field}: {reason}") from None
            return msgspec.msgpack.encode(self._book.sealed(asked, _RESPONSE_BYTES))
        raise RequestRefused(f"requests of kind {kind} are not known here")

    def _unreadable(self, node_id: NodeId, what: str, error: Exception) -> RemoteError:
        bad = BadMessage(*field_and_reason(error, what))
        self._reader.blame(node_id, bad)
        return RemoteError(f"node {node_id} sent unreadable {what}: {bad}")

    def _take_one(self, sender: NodeId, sealed: bytes, ages_s: Mapping[NodeId, float]) -> NodeId | None:
        try:
            return self._reader.take(sealed, ages_s)
        except BadMessage as error:
            provoked_by(log, sender).debug("node %s passed on a bad envelope: %s", sender, error)
            self._reader.blame(sender, error)
            return None
