"""Replaces a relayed connection by a direct one: both ends dial each other at the same moment (DCUtR).

A NAT or firewall lets in packets that look like answers. So both ends send their first packet at the same
moment, each from the port it listens on to the port the other listens on, and each packet opens the way for
the other's. The node that was dialled through the relay begins: it dials the other directly, which may be
reachable after all; if it is not, the two agree on a moment over the relay. The node that began takes the
listener's part of the handshakes. Where that fails it dials once more in the ordinary way: the other end's
NAT (a full cone) may now let in everybody, and the other end's listener takes the listener's part.

This works where the NAT keeps the node's port: with firewalls, and with routers that keep a source port while
it is free, as Linux does. It is tried TRIES times. A failure costs nothing.
"""

from __future__ import annotations

import logging
from typing import Protocol

import trio

from swarmllm.errors import NodeUnreachable
from swarmllm.log_filter import provoked_by
from swarmllm.swarm.discovery.addresses import Address, is_loopback
from swarmllm.swarm.discovery.relay.messages import DCUTR
from swarmllm.swarm.discovery.relay.moment import believed, moment_of, moment_with
from swarmllm.swarm.libp2p.host import Host, Stream
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)

TRIES = 3
SETTLE_S = 1.0
"""Before the first try: the relayed connection has just come."""
PAUSE_S = 2.0
_LISTENER_WAITS_S = 0.02
"""So that without a firewall the handshake's dialler is the one whose packet comes first."""
AT_ONCE_MAX = 8


class PunchingNode(Protocol):
    """The part of the node that hole punching uses."""

    def own_addresses(self) -> tuple[Address, ...]:
        """Where the other end should dial this node."""
        ...

    def known_addresses(self, node_id: NodeId) -> tuple[Address, ...]:
        """Where that node says it is."""
        ...

    async def turned_direct(self, node_id: NodeId) -> None:
        """There is a direct connection that was not there."""
        ...


class Punching:
    def __init__(
        self,
        host: Host,
        node: PunchingNode,
        peers: Parts[bool] | None = None,
    ) -> None:
        self._host = host
        self._node = node
        self._under_way: Parts[bool] = Parts.alone() if peers is None else peers
        self.n_punched = 0
        host.serve(DCUTR, self._answer)

    async def punch(self, node_id: NodeId) -> None:
        """The part of the one that was dialled through a relay. Never raises for the network's sake."""
        if node_id in self._under_way or len(self._under_way) >= AT_ONCE_MAX:
            return
        self._under_way.put(node_id, True)
        try:
            await trio.sleep(SETTLE_S)
            await self._dial_all(node_id, self._node.known_addresses(node_id), as_listener=False)
            for _ in range(TRIES):
                if self._host.is_direct(node_id) or not self._host.is_connected(node_id):
                    break
                await self._agree_and_dial(node_id)
                await trio.sleep(PAUSE_S)
        finally:
            self._under_way.drop(node_id)
        await self._settle(node_id)

    async def _settle(self, node_id: NodeId) -> None:
        if self._host.is_direct(node_id):
            self.n_punched += 1
            provoked_by(log, node_id).info(
                "node %s is connected directly now, not only through a relay", node_id
            )
            await self._node.turned_direct(node_id)

    async def _agree_and_dial(self, node_id: NodeId) -> None:
        try:
            async with moment_with(
                self._host, node_id, DCUTR, self._node.own_addresses(), later_s=_LISTENER_WAITS_S
            ) as said:
                addresses = self._believed(node_id, said)
                await self._dial_all(node_id, addresses, as_listener=True)
                if not self._host.is_direct(node_id):
                    # The other end's packet may have opened its way for everybody, and then its listener
                    # answers.
                    await self._dial_all(node_id, addresses, as_listener=False)
        except NodeUnreachable as error:
            log.debug("%s", error)

    async def _answer(self, sender: NodeId, stream: Stream) -> None:
        if (
            len(self._under_way) >= AT_ONCE_MAX
            or sender in self._under_way
            or not self._host.is_relayed(stream)
        ):
            await stream.reset()
            return
        self._under_way.put(sender, True)
        try:
            said = await moment_of(stream, self._own_addresses)
            await self._dial_all(sender, self._believed(sender, said), as_listener=False)
        except (ProtocolError, trio.TooSlowError) as error:
            log.debug("node %s agrees on no moment: %s", sender, type(error).__name__)
            await stream.reset()
            return
        finally:
            self._under_way.drop(sender)
        await self._settle(sender)

    async def _own_addresses(self) -> tuple[Address, ...]:
        return self._node.own_addresses()

    def _believed(self, node_id: NodeId, said: tuple[Address, ...]) -> tuple[Address, ...]:
        is_here = all(map(is_loopback, self._host.listening))
        return believed(said, self._node.known_addresses(node_id), on_loopback=is_here)

    async def _dial_all(self, node_id: NodeId, addresses: tuple[Address, ...], *, as_listener: bool) -> None:
        async def dial(address: Address) -> None:
            try:
                await self._host.dial_from_listening_port(node_id, address, as_listener=as_listener)
            except NodeUnreachable as error:
                log.debug("%s", error)

        async with trio.open_nursery() as nursery:
            for address in addresses:
                nursery.start_soon(dial, address)
