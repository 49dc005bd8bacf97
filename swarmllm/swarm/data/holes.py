"""Data connections between nodes behind routers: both ends dial each other's data port at the same moment.

Each dials from the port that it listens on, so that what its router shows outside is the way to that port.
Where that is, another node says: before, this node dials some peer's data port from its own, and that peer's
hello tells where it saw the connection come from (`Hello.seen`). So a router that gives each inner port one
outer port of its own choice is no hindrance; one that gives each connection another port is (symmetric NAT).
Without such a peer the port is taken to be the same outside.

The moment is agreed on over libp2p's connection, whatever way that takes (`moment`). The node that asks is
the dialler of the handshake, the other one its listener. Where both connect to nothing, each dials once more
in the ordinary way: a full cone lets in everybody once its port is open.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import trio

from swarmllm.errors import InvalidRequest, NodeUnreachable
from swarmllm.log_filter import provoked_by
from swarmllm.swarm.data.wire import HandshakeFailed, NoiseWire, WireClosed, checked_hello, noise_handshake
from swarmllm.swarm.discovery.address_race import first_to_answer
from swarmllm.swarm.discovery.addresses import Address, is_loopback
from swarmllm.swarm.discovery.own_port import connect_from, forget_at_close
from swarmllm.swarm.discovery.relay.moment import BELIEVED_MAX, believed, moment_of, moment_with
from swarmllm.swarm.libp2p.host import Host, Stream
from swarmllm.swarm.membership.connection_gater import ConnectionGater
from swarmllm.swarm.membership.identity import Identity
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.frames import FrameDecoder, FrameKind
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import SWARM_HEADER_MAX

log = logging.getLogger(__name__)

PROTOCOL = "/swarmllm/hole/1.0.0"
AT_ONCE_MAX = 8
TRIES = 3
PAUSE_S = 5.0
ANSWER_EVERY_S = 4.0
"""To one peer, which has this node dial where that peer says."""
AGAIN_FIRST_S = 60.0
AGAIN_MAX_S = 3600.0
"""After tries in vain."""
_TURNS_MAX = 1024
_OBSERVERS_MAX = 3
_OBSERVE_S = 2.0
_SEEN_S = 20.0
"""So long what a peer saw is used again: an outer port outlives its last connection."""
_ORDINARY_S = 3.0
_ACCEPTED_S = 1.0
"""What the other end dialled may have come to this node's listener."""
_LISTENER_WAITS_S = 0.02
"""So that without a firewall the dialler's packet comes first, to a socket that takes the listener's part."""


@dataclass(eq=False, slots=True)
class HoleTurn:
    """What this node keeps of its tries with a peer."""

    answered_at_s: float | None = None
    n_failures: int = 0
    again_at_s: float = 0.0

    def is_over(self, now: float) -> bool:
        has_answered = self.answered_at_s is not None and now < self.answered_at_s + ANSWER_EVERY_S
        return not has_answered and now >= self.again_at_s + AGAIN_MAX_S


class HoleUser(Protocol):
    """The data plane, as far as holes use it."""

    port: int

    @property
    def listening(self) -> Sequence[str]:
        """The IPs it listens on."""
        ...

    def addresses_of(self, node_id: NodeId) -> Sequence[Address]:
        """Of its data port, by its envelope."""
        ...

    def own_addresses(self) -> Sequence[Address]:
        """Where this node's data port may be found, as far as is known without asking."""
        ...

    def observers(self) -> Sequence[NodeId]:
        """Peers whose data port may answer this node, the best first."""
        ...

    def seen_by(self, node_id: NodeId) -> str:
        """Where that peer says it sees this end of a connection from or to this node's data port, as a
        multiaddr; empty where there is none."""
        ...

    def has_direct(self, node_id: NodeId) -> bool: ...

    def came_through_hole(self, node_id: NodeId, wire: NoiseWire, *, dialled: bool) -> None:
        """The peer had asked for it."""
        ...


class Holes:
    def __init__(
        self,
        identity: Identity,
        gater: ConnectionGater,
        host: Host,
        user: HoleUser,
        turns: Parts[HoleTurn] | None = None,
    ) -> None:
        self._identity = identity
        self._gater = gater
        self._host = host
        self._user = user
        self._turns: Parts[HoleTurn] = Parts.alone() if turns is None else turns
        self._asking: set[NodeId] = set()
        self._answering: set[NodeId] = set()
        self._looking = trio.Lock()
        self._seen_at: Address | None = None
        self._seen_until_s = 0.0
        self.n_punched = 0
        host.serve(PROTOCOL, self._answer)

    async def punch(self, node_id: NodeId) -> NoiseWire | None:
        """This node asks. None: there is no hole, or none is to be tried now. Not to be cancelled."""
        turn = self._turn(node_id)
        is_free = self._is_free(node_id) and node_id not in self._answering
        if not is_free or trio.current_time() < turn.again_at_s or not self._host.is_connected(node_id):
            return None
        self._asking.add(node_id)
        try:
            wire = await self._ask(node_id)
            for _ in range(TRIES - 1):
                if wire is not None or self._user.has_direct(node_id) or not self._host.is_connected(node_id):
                    break
                await trio.sleep(PAUSE_S)
                wire = await self._ask(node_id)
        finally:
            self._asking.discard(node_id)
        if wire is not None or self._user.has_direct(node_id):
            self.forgive(node_id)
        else:
            turn.again_at_s = trio.current_time() + min(AGAIN_MAX_S, AGAIN_FIRST_S * 2**turn.n_failures)
            turn.n_failures += 1
        return wire

    def forgive(self, node_id: NodeId) -> None:
        """There is another way to this peer than there was: the next try may come at once."""
        if (turn := self._turns.get(node_id)) is not None:
            turn.n_failures, turn.again_at_s = 0, 0.0

    def _turn(self, node_id: NodeId) -> HoleTurn:
        turn = self._turns.get(node_id)
        if turn is None:
            if len(self._turns) >= _TURNS_MAX:
                self._turns.drop_first()
            turn = self._turns.put(node_id, HoleTurn())
        return turn

    def _is_free(self, node_id: NodeId) -> bool:
        return node_id not in self._asking and len(self._asking) + len(self._answering) < AT_ONCE_MAX

    async def _ask(self, node_id: NodeId) -> NoiseWire | None:
        wire = None
        try:
            async with (
                self._seen(node_id) as seen,
                moment_with(
                    self._host, node_id, PROTOCOL, self._own_addresses(seen), measures_again=True
                ) as said,
            ):
                addresses = self._believed(node_id, said)
                wire = await self._dial_all(node_id, addresses, as_dialler=True)
                if wire is None and not self._user.has_direct(node_id):
                    wire = await self._dial_ordinarily(node_id, addresses)
        except NodeUnreachable as error:
            provoked_by(log, node_id).debug("no hole to the data port of %s: %s", node_id, error)
        self.n_punched += wire is not None
        return wire

    async def _answer(self, sender: NodeId, stream: Stream) -> None:
        turn = self._turn(sender)
        now = trio.current_time()
        is_too_soon = turn.answered_at_s is not None and now < turn.answered_at_s + ANSWER_EVERY_S
        # Where both ask at the same moment, the smaller id's question counts.
        is_settled = sender in self._asking and self._identity.node_id < sender
        is_full = len(self._asking) + len(self._answering) >= AT_ONCE_MAX
        if is_too_soon or is_settled or is_full or sender in self._answering:
            await stream.reset()
            return
        turn.answered_at_s = now
        self._answering.add(sender)
        try:
            async with self._seen(sender) as seen:

                async def own() -> tuple[Address, ...]:
                    return self._own_addresses(seen)

                said = await moment_of(stream, own, measures_again=True)
                await self._dial_for(sender, self._believed(sender, said))
        except (ProtocolError, trio.TooSlowError) as error:
            log.debug("node %s agrees on no moment: %s", sender, type(error).__name__)
            await stream.reset()
        finally:
            self._answering.discard(sender)

    async def _dial_for(self, sender: NodeId, addresses: Sequence[Address]) -> None:
        await trio.sleep(_LISTENER_WAITS_S)
        wire = await self._dial_all(sender, addresses, as_dialler=False)
        dialled = wire is None
        if wire is None:
            await trio.sleep(_ACCEPTED_S)
        if wire is None and not self._user.has_direct(sender):
            wire = await self._dial_ordinarily(sender, addresses)
        if wire is not None:
            self.n_punched += 1
            self._user.came_through_hole(sender, wire, dialled=dialled)
        if self._user.has_direct(sender):
            self.forgive(sender)

    def _own_addresses(self, seen: Address | None) -> tuple[Address, ...]:
        first = () if seen is None else (seen,)
        return tuple(dict.fromkeys((*first, *self._user.own_addresses())))[:BELIEVED_MAX]

    def _believed(self, node_id: NodeId, said: Sequence[Address]) -> tuple[Address, ...]:
        is_here = all(map(is_loopback, self._user.listening))
        return believed(said, self._user.addresses_of(node_id), on_loopback=is_here)

    @asynccontextmanager
    async def _seen(self, besides: NodeId) -> AsyncIterator[Address | None]:
        """Where a peer sees connections from this data port come from, while such a connection stands: a
        router may give up an outer port with the last connection that has it."""
        wire = None
        # One at a time: from one port to another there can be one connection only.
        async with self._looking:
            if trio.current_time() >= self._seen_until_s:
                self._seen_at = None
                observers = [each for each in self._user.observers() if each != besides]
                self._seen_at = self._connected_at(observers)
                for observer in [] if self._seen_at else observers[:_OBSERVERS_MAX]:
                    with trio.move_on_after(_OBSERVE_S):
                        wire, self._seen_at = await self._observed_by(observer)
                    if wire is not None:
                        self._seen_until_s = trio.current_time() + _SEEN_S
                        break
            seen = self._seen_at
        try:
            yield seen
        finally:
            if wire is not None:
                wire.abort()

    def _connected_at(self, observers: Sequence[NodeId]) -> Address | None:
        for said in filter(None, map(self._user.seen_by, observers)):
            try:
                return Address.parse(said)
            except InvalidRequest:
                continue
        return None

    async def _observed_by(self, observer: NodeId) -> tuple[NoiseWire | None, Address | None]:
        addresses = list(self._user.addresses_of(observer))
        here = self._host.remote_ip(observer)
        address = next((each for each in addresses if each.ip == here), addresses[0] if addresses else None)
        if address is None:
            return None, None
        wire = None
        try:
            stream = await connect_from(self._user.listening, self._user.port, address)
            forget_at_close(stream.socket)
            _, wire = await noise_handshake(stream, self._identity, observer, self._gater)
            return wire, Address.parse(await _hello_of(wire))
        except (NodeUnreachable, HandshakeFailed, WireClosed, ProtocolError, InvalidRequest) as error:
            provoked_by(log, observer).debug("%s does not say where it sees this node: %s", observer, error)
            if wire is not None:
                wire.abort()
            return None, None
        except BaseException:
            if wire is not None:
                wire.abort()
            raise

    async def _dial_all(
        self, node_id: NodeId, addresses: Sequence[Address], *, as_dialler: bool
    ) -> NoiseWire | None:
        """From the data port, to all at once."""
        made: list[NoiseWire] = []

        async def dial(address: Address) -> None:
            try:
                stream = await connect_from(self._user.listening, self._user.port, address)
                expected = node_id if as_dialler else None
                proven, wire = await noise_handshake(stream, self._identity, expected, self._gater)
            except (NodeUnreachable, HandshakeFailed) as error:
                log.debug("a hole at %s: %s", address, error)
                return
            if proven == node_id:
                made.append(wire)
                nursery.cancel_scope.cancel()
            else:
                wire.abort()

        async with trio.open_nursery() as nursery:
            for address in addresses:
                nursery.start_soon(dial, address)
        for surplus in made[1:]:
            surplus.abort()
        return made[0] if made else None

    async def _dial_ordinarily(self, node_id: NodeId, addresses: Sequence[Address]) -> NoiseWire | None:
        if not addresses:
            return None
        try:
            with trio.fail_after(_ORDINARY_S):
                _, stream = await first_to_answer(addresses)
            _, wire = await noise_handshake(stream, self._identity, node_id, self._gater)
        except (NodeUnreachable, HandshakeFailed, trio.TooSlowError):
            return None
        return wire


async def _hello_of(wire: NoiseWire) -> str:
    """Raises WireClosed, ProtocolError."""
    decoder = FrameDecoder(SWARM_HEADER_MAX + 1, 0)
    while True:
        for frame in decoder.feed(await wire.receive()):
            if frame.header[:1] != bytes((FrameKind.HELLO,)):
                raise WireClosed("the peer did not say hello")
            return checked_hello(frame.header[1:]).seen
