"""Collects addresses of other nodes: the settings' addresses, mDNS, envelopes, and what callers name.

All of it ends as suggestions to the dialler, which decides when to dial. Only `connect` dials at once, in a
task that goes on when its caller does not wait for it: half a dial cancelled would leave half a connection.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable

import trio

from swarmllm.errors import DeadlineExceeded, InvalidRequest, NodeUnreachable
from swarmllm.log_filter import provoked_by
from swarmllm.supervision import detach, supervise
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.discovery.addresses import Address, NodeAddress
from swarmllm.swarm.discovery.dialler import ADDRESSES_PER_NODE, Dial, Dialler
from swarmllm.swarm.libp2p.host import Host
from swarmllm.swarm.peers.connection_limits import ConnectionAdmission
from swarmllm_proto.envelope import Envelope
from swarmllm_proto.identifiers import Multiaddr, NodeId

log = logging.getLogger(__name__)

SUGGESTED_FAILURES_MAX = 5
REMEMBERED_FAILURES_MAX = 200
"""Failures after which an address that somebody told, or an earlier run left, is given up: after about a
minute, and after about two hours."""

_RESOLVE_AGAIN_S = 300.0
_RESOLVE_RETRY_S = 15.0


class AddressSources:
    def __init__(
        self, host: Host, nursery: trio.Nursery, dialler: Dialler, admission: ConnectionAdmission
    ) -> None:
        self._host = host
        self._nursery = nursery
        self._dialler = dialler
        self._admission = admission
        self._bootstrap: set[NodeAddress] = set()
        self.named: set[NodeId] = set()
        """Nodes that a person has written down."""
        self._dial: Dial = host.dial

    def begin(self, bootstrap: Iterable[NodeAddress], dial: Dial) -> None:
        self._dial = dial
        self._meet_also(bootstrap)
        supervise(self._nursery, "dialler", self._dialler.run, dial, self._host.connected)

    def read_again(self, bootstrap: Iterable[str]) -> int:
        """The settings were read again: addresses that are new are dialled from now on, too. How many they
        are. Raises InvalidRequest, and then nothing is changed."""
        return self._meet_also([NodeAddress.parse(text, field="bootstrap") for text in bootstrap])

    def _meet_also(self, bootstrap: Iterable[NodeAddress]) -> int:
        new = dict.fromkeys(where for where in bootstrap if where not in self._bootstrap)
        for where in new:
            self._bootstrap.add(where)
            self.named.add(where.node_id)
            supervise(self._nursery, "bootstrap resolver", self._keep_resolving, where)
        return len(new)

    def found_by_mdns(self, node_id: NodeId, addresses: list[Address]) -> None:
        self._suggest(node_id, addresses)

    def remembered(self, peers: Iterable[tuple[NodeId, tuple[Multiaddr, ...]]]) -> None:
        """From an earlier run."""
        for node_id, addresses in peers:
            self._suggest(node_id, usable(addresses), max_failures=REMEMBERED_FAILURES_MAX)

    def add_suggested(self, node_id: NodeId, addresses: list[Address]) -> None:
        """Another node says so, and nothing proves it."""
        if addresses:
            self._suggest(node_id, addresses, max_failures=SUGGESTED_FAILURES_MAX)

    def heard(self, envelope: Envelope) -> None:
        self._suggest(envelope.node_id, usable(envelope.addresses))

    async def connect(
        self, address: str, feed: ChangeFeed, connected: Callable[[], Collection[NodeId]], timeout_s: float
    ) -> NodeId:
        """Dial now; the node's id once it counts as connected. Raises InvalidRequest, NodeUnreachable,
        DeadlineExceeded."""
        where = NodeAddress.parse(address, field="address")
        return await self._connect(where.node_id, where.resolve, feed, connected, timeout_s)

    async def meet(
        self,
        feed: ChangeFeed,
        connected: Callable[[], Collection[NodeId]],
        node_id: NodeId,
        addresses: list[Address],
        timeout_s: float,
    ) -> NodeId:
        """The same, with a node that another one named. Raises NodeUnreachable, DeadlineExceeded."""
        if not self._admission.lets_in(node_id):
            raise NodeUnreachable(f"node {node_id} is not let in")

        async def where() -> list[Address]:
            return addresses[:ADDRESSES_PER_NODE]

        self.add_suggested(node_id, addresses)
        return await self._connect(node_id, where, feed, connected, timeout_s)

    async def _connect(
        self,
        node_id: NodeId,
        where: Callable[[], Awaitable[list[Address]]],
        feed: ChangeFeed,
        connected: Callable[[], Collection[NodeId]],
        timeout_s: float,
    ) -> NodeId:
        if node_id == self._host.node_id:
            return node_id
        async with feed.subscribe() as changes:
            dialling = detach(self._nursery, "question", self._dial_for_caller, node_id, where)
            with trio.move_on_after(timeout_s):
                await dialling.wait()
                while node_id not in connected():
                    await anext(changes)
                return node_id
        raise DeadlineExceeded(f"node {node_id} was not reached within {timeout_s:g} s")

    def _suggest(
        self,
        node_id: NodeId,
        addresses: list[Address],
        *,
        is_permanent: bool = False,
        max_failures: float = math.inf,
    ) -> None:
        if self._admission.lets_in(node_id):
            now = trio.current_time()
            self._dialler.suggest(
                node_id, addresses, now, is_permanent=is_permanent, max_failures=max_failures
            )

    async def _keep_resolving(self, where: NodeAddress) -> None:
        """Names may come to mean another address while the daemon runs, and may resolve only after it
        started."""
        while True:
            addresses = await where.resolve()
            if addresses:
                self._suggest(where.node_id, addresses, is_permanent=True)
            else:
                log.warning("the bootstrap address %s does not resolve", where.host)
            await trio.sleep(_RESOLVE_AGAIN_S if addresses else _RESOLVE_RETRY_S)

    async def _dial_for_caller(self, node_id: NodeId, where: Callable[[], Awaitable[list[Address]]]) -> None:
        await self._dial(node_id, await where())


def usable(texts: Iterable[str]) -> list[Address]:
    """The ones that can be dialled among addresses from another node."""
    addresses: list[Address] = []
    for text in texts:
        try:
            addresses.append(Address.parse(text))
        except InvalidRequest:
            provoked_by(log, "unknown").debug("an unusable address was ignored")
    return addresses
