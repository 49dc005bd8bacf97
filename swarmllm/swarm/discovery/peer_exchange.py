"""Exchanges addresses of other nodes, beyond those in envelopes.

Envelopes are forgotten minutes after their writers fall silent; addresses that worked last week are worth
trying when nobody else is there. They are hearsay: nothing signs them, so they are tried a few times and
dropped, and a node that answers must prove the node id anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from swarmllm.errors import SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.swarm.discovery.address_sources import usable
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.peers.trust import Note, TrustEvent, ignored_event
from swarmllm.swarm.router import UnreadableRequest
from swarmllm_proto.errors import ProtocolError, UnsupportedVersion
from swarmllm_proto.identifiers import Multiaddr, NodeId
from swarmllm_proto.router_messages import (
    ADDRESSES_MAX,
    KnownPeer,
    PeerExchangeRequest,
    PeerExchangeResponse,
    decode_neighbour,
    encode_neighbour,
)

log = logging.getLogger(__name__)

ENOUGH_CONNECTIONS = 8
"""A node with as many peers finds everybody through gossip, and asks nobody."""
ENOUGH_KNOWN = 12
"""Nor does one that knows where as many are: a peer has told it of them when the two compared records."""

Addresses = Iterable[tuple[NodeId, tuple[Multiaddr, ...]]]
"""(node id, addresses of the control plane)"""


class AddressBook(Protocol):
    """The addresses that this node tells others, and the place for those that it learns."""

    def connected_addresses(self) -> Addresses: ...

    def n_heard_of(self) -> int:
        """Of how many nodes it has a signed statement where they are."""
        ...

    def remembered_addresses(self) -> Addresses:
        """Of peers of earlier runs, the latest first."""
        ...

    def hear(self, node_id: NodeId, addresses: list[Address]) -> None:
        """Another node says so, and nothing proves it."""
        ...


class PeerExchange:
    def __init__(
        self,
        ask: Callable[[NodeId, bytes], Awaitable[bytes]],
        book: AddressBook,
        note: Note = ignored_event,
    ) -> None:
        self._ask = ask
        self._book = book
        self._note = note

    async def learn_from(self, node_id: NodeId) -> None:
        """Ask a peer, unless this node knows enough."""
        n_connected = sum(1 for _ in self._book.connected_addresses())
        if n_connected >= ENOUGH_CONNECTIONS or self._book.n_heard_of() >= ENOUGH_KNOWN:
            return
        try:
            answered = await self._ask(node_id, encode_neighbour(PeerExchangeRequest()))
            response = decode_neighbour(answered, PeerExchangeResponse)
        except SwarmLLMError as error:
            provoked_by(log, node_id).debug("node %s tells of no others: %s", node_id, error)
            return
        except ProtocolError as error:
            provoked_by(log, node_id).debug("node %s answered a peer exchange wrongly: %s", node_id, error)
            self._blame(node_id, error)
            return
        for peer in response.peers:
            self._book.hear(peer.node_id, usable(peer.addresses))

    def answer(self, sender: NodeId, body: bytes) -> bytes:
        """Raises RequestRefused."""
        try:
            request = decode_neighbour(body, PeerExchangeRequest)
        except ProtocolError as error:
            raise UnreadableRequest(str(error)) from None
        connected = list(self._book.connected_addresses())
        remembered = list(self._book.remembered_addresses())
        known = {n: addresses for n, addresses in [*remembered, *connected] if addresses and n != sender}
        latest_first = dict.fromkeys(n for n, _ in [*connected, *remembered] if n in known)
        told = [KnownPeer(node_id=n, addresses=known[n][:ADDRESSES_MAX]) for n in latest_first]
        return encode_neighbour(PeerExchangeResponse(peers=tuple(told[: request.n_max])))

    def _blame(self, node_id: NodeId, error: ProtocolError) -> None:
        if not isinstance(error, UnsupportedVersion):
            self._note(node_id, TrustEvent.BROKE_PROTOCOL, str(error))
