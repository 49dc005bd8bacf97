"""Uses relays: to be reached where nobody can dial this node, and to reach such nodes.

A node whose control port a peer has tried in vain asks connected nodes for a reservation until RELAYS of them
have given one; where none gives one, it meets relays that the DHT names. It tells everybody in its envelope:
`/ip4/.../tcp/.../p2p/RELAY/p2p-circuit`. A node that finds none of these addresses answering goes through one
of those relays. Reservations are renewed in half of their time, and left to lapse when the node can be
dialled after all. `Relaying` decides all that.

`Circuits` makes reservations and connections through relays, and takes those that come through one, only
from relays that this node asked for a reservation, as many at a time as ACCEPTING_MAX. Every exchange runs
where no caller's cancellation reaches it and ends by its own deadlines.

libp2p cancels writes (by its deadlines, at the end of a task), and a write cancelled in the middle would
desynchronise the connection to the relay: so writes are shielded here, and end by the stream's end.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Final, Protocol

import trio
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import IOException
from multiaddr import Multiaddr

from swarmllm.errors import NodeUnreachable, SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.shared_ticks import REST_TICK_S, sleep_until_tick
from swarmllm.swarm.data.stream_fallback import StreamWire
from swarmllm.swarm.data.wire import WireClosed
from swarmllm.swarm.discovery.addresses import CircuitAddress
from swarmllm.swarm.discovery.relay.messages import (
    HOP,
    MESSAGE_MAX_BYTES,
    STOP,
    Hop,
    Status,
    Stop,
    decode_hop,
    decode_stop,
    encode_hop,
    encode_stop,
)
from swarmllm.swarm.discovery.relay.service import CIRCUIT_BYTES
from swarmllm.swarm.libp2p.host import Host, Stream
from swarmllm.swarm.libp2p.stream_framing import framed, read_framed
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import NodeId

_WRITE_S = 20.0
_END_S = 2.0


class RelayedConnection(ReadWriteCloser):  # type: ignore[misc]
    def __init__(self, stream: Stream, relay_id: NodeId, data_bytes: int = 0) -> None:
        """`data_bytes`: what the relay carries before it ends the circuit; 0: it did not say."""
        self._stream = stream
        self._data_bytes = data_bytes or CIRCUIT_BYTES
        self._n_bytes = 0
        self._wire = StreamWire(stream, self.ended_now)
        self._unread = b""
        self.relay_id = relay_id
        self.ended = trio.Event()

    def ended_now(self) -> None:
        self.ended.set()

    @property
    def room(self) -> float:
        """The share of what the relay carries that is left."""
        return max(0.0, 1.0 - self._n_bytes / self._data_bytes)

    async def read(self, n: int | None = None) -> bytes:
        try:
            if not self._unread:
                self._unread = await self._wire.receive()
                self._n_bytes += len(self._unread)
        except WireClosed as ending:
            self.ended.set()
            raise IOException(str(ending)) from None
        read = self._unread if n is None else self._unread[:n]
        self._unread = self._unread[len(read) :]
        return read

    async def write(self, data: bytes) -> None:
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _WRITE_S) as stuck:
            try:
                await self._wire.write([data])
                self._n_bytes += len(data)
            except WireClosed as ending:
                self.ended.set()
                raise IOException(str(ending)) from None
        if stuck.cancelled_caught:
            await self.close()
            raise IOException("the relay takes nothing any more")

    async def close(self) -> None:
        self._wire.abort()
        self.ended.set()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _END_S):
            try:
                await self._stream.reset()
            except Exception:
                return

    def get_remote_address(self) -> tuple[str, int] | None:
        """Where the other end is nobody knows; the relay's address would be taken for it."""
        return None

    def address(self) -> Multiaddr:
        return Multiaddr(f"/p2p/{self.relay_id}/p2p-circuit")


log = logging.getLogger(__name__)

ANSWER_S = 25.0
"""The relay has to ask the other end, within 10 s."""
ASK_AGAIN_S = 300.0
"""For a reservation, after a refusal, and of a node that is no relay."""
RESERVED_MAX_S = 6 * 3600.0
ACCEPTING_MAX = 16


@dataclass(eq=False, slots=True)
class RelayUse:
    """The state of another node as this node's relay."""

    asked_at_s: float
    """For a reservation, the last time."""
    reserved_until_s: float | None = None

    def is_over(self, now: float) -> bool:
        """There is no reservation, and it may be asked again."""
        return self.reserved_until_s is None and now - self.asked_at_s >= ASK_AGAIN_S


class Circuits:
    """`on_inbound(node_id)` is told of connections that came through a relay; it runs while they live."""

    def __init__(
        self,
        host: Host,
        on_inbound: Callable[[NodeId], Awaitable[None]] | None = None,
        relays: Parts[RelayUse] | None = None,
    ) -> None:
        self._host = host
        self._on_inbound = on_inbound
        self._n_accepting = 0
        self.relays: Parts[RelayUse] = Parts.alone() if relays is None else relays
        self._connections: list[RelayedConnection] = []
        host.serve(STOP, self._accept)

    def carriers(self) -> set[NodeId]:
        """The relays over which this node has connections with others."""
        return {each.relay_id for each in self._living()}

    def _living(self) -> list[RelayedConnection]:
        return [each for each in self._connections if not each.ended.is_set()]

    async def reserve(self, relay_id: NodeId) -> None:
        """Raises NodeUnreachable. Not to be cancelled."""
        stream, answer = await self._ask(relay_id, Hop("reserve"))
        await _reset(stream)
        lasts_s = min(answer.expires_at - time.time(), RESERVED_MAX_S)
        if answer.status is not Status.OK or lasts_s <= 0:
            raise NodeUnreachable(f"relay {relay_id} takes no reservation: {answer.status.name}")
        now = trio.current_time()
        relay = self.relays.get(relay_id) or self.relays.put(relay_id, RelayUse(now))
        relay.reserved_until_s = now + lasts_s

    def _has_reserved(self, relay_id: NodeId) -> bool:
        relay = self.relays.get(relay_id)
        until_s = relay.reserved_until_s if relay is not None else None
        return until_s is not None and until_s > trio.current_time()

    async def connect(self, relay_id: NodeId, node_id: NodeId) -> None:
        """A connection with that node, through that relay. Raises NodeUnreachable. Not to be cancelled."""
        stream, answer = await self._ask(relay_id, Hop("connect", node_id))
        if answer.status is not Status.OK:
            await _reset(stream)
            raise NodeUnreachable(f"relay {relay_id} does not connect with {node_id}: {answer.status.name}")
        connection = RelayedConnection(stream, relay_id, answer.data_bytes)
        await self._host.adopt(connection, node_id, dialled=True)
        self._connections = [*self._living(), connection]

    async def _ask(self, relay_id: NodeId, question: Hop) -> tuple[Stream, Hop]:
        stream = await self._host.open_stream(relay_id, HOP)
        try:
            await stream.write(framed(encode_hop(question)))
            with trio.fail_after(ANSWER_S):
                answer = decode_hop(await read_framed(stream, MESSAGE_MAX_BYTES))
        except Exception as error:
            await _reset(stream)
            raise NodeUnreachable(f"relay {relay_id}: {type(error).__name__}") from None
        if answer.kind != "status":
            await _reset(stream)
            raise NodeUnreachable(f"relay {relay_id} does not answer what it was asked")
        return stream, answer

    async def _accept(self, relay_id: NodeId, stream: Stream) -> None:
        if self._n_accepting >= ACCEPTING_MAX:
            await stream.reset()
            return
        self._n_accepting += 1
        try:
            with trio.fail_after(ANSWER_S):
                asked = decode_stop(await read_framed(stream, MESSAGE_MAX_BYTES))
            dialler = asked.node_id
            if dialler is None:
                status = Status.UNEXPECTED_MESSAGE
            elif not self._has_reserved(relay_id):
                status = Status.PERMISSION_DENIED
            else:
                status = Status.OK
            await stream.write(framed(encode_stop(Stop("status", status=status))))
            if dialler is None or status is not Status.OK:
                return
            connection = RelayedConnection(stream, relay_id)
            await self._host.adopt(connection, dialler, dialled=False)
            self._connections = [*self._living(), connection]
        except (ProtocolError, trio.TooSlowError, NodeUnreachable) as error:
            log.debug("a connection through relay %s: %s", relay_id, error)
            await stream.reset()
            return
        finally:
            self._n_accepting -= 1
        if self._on_inbound is not None:
            await self._on_inbound(dialler)
        # The stream is closed when this returns.
        await connection.ended.wait()


async def _reset(stream: Stream) -> None:
    with trio.move_on_after(2.0):
        try:
            await stream.reset()
        except Exception as error:
            log.debug("resetting a stream: %s", type(error).__name__)


RELAYS = 2
ADDRESSES_PER_RELAY = 3
LOOK_EVERY_S = 5.0
FIND_FIRST_S: Final = 10.0
FIND_MAX_S: Final = 1800.0
"""Until the DHT is asked for relays again by a node that has none: twice as long each time, up to that."""
_ASKED_PER_LOOK = 4
_DETOURS_MAX = 3
_REMEMBERED_MAX = 1024


class RelayedNode(Protocol):
    """The part of the node that relaying uses."""

    def is_hidden(self) -> bool:
        """Whether others were found to be unable to dial this node."""
        ...

    def counted(self) -> Collection[NodeId]:
        """The peers that count as connected."""
        ...

    def addresses(self, node_id: NodeId) -> Collection[str]:
        """Those of a node's envelope."""
        ...

    async def meet_relays(self) -> None:
        """Connect with some nodes that the DHT names as relays, if it names any."""
        ...

    async def tell(self, addresses: tuple[str, ...]) -> None:
        """Put circuit addresses into this node's own envelope."""
        ...


class Relaying:
    def __init__(
        self,
        host: Host,
        circuits: Circuits,
        node: RelayedNode,
        randomness: random.Random,
    ) -> None:
        self._host = host
        self.circuits = circuits
        self._node = node
        self._random = randomness
        self._last_reported: tuple[str, ...] = ()
        self.n_detours = 0
        self._find_again_at_s = -math.inf
        self._find_pause_s = FIND_FIRST_S

    @property
    def relays(self) -> tuple[NodeId, ...]:
        """The relays through which this node can be reached now."""
        return tuple(sorted(self._reserved()))

    def _reserved(self) -> dict[NodeId, float]:
        """Until when, of each relay."""
        uses = self.circuits.relays.items()
        return {n: use.reserved_until_s for n, use in uses if use.reserved_until_s is not None}

    async def run(self) -> None:
        while True:
            await self.look()
            is_quiet = not self._node.is_hidden() and not self._reserved()
            await sleep_until_tick(REST_TICK_S if is_quiet else LOOK_EVERY_S)

    async def look(self) -> None:
        """Have as many reservations as are needed, and let others know."""
        now, connected = trio.current_time(), set(self._node.counted())
        for relay_id, use in self.circuits.relays.items():
            until_s = use.reserved_until_s
            if until_s is not None and (relay_id not in connected or until_s <= now):
                use.reserved_until_s = None
        if self._node.is_hidden():
            for relay_id in self._worth_asking(now, connected):
                await self._reserve(relay_id, now)
                if sum(until_s > now + LOOK_EVERY_S for until_s in self._reserved().values()) >= RELAYS:
                    break
        told = tuple(text for relay_id in self.relays for text in self._circuit_addresses(relay_id))
        if told != self._last_reported:
            self._last_reported = told
            await self._node.tell(told)
        if told:
            self._find_pause_s = FIND_FIRST_S
        elif self._node.is_hidden() and now >= self._find_again_at_s:
            # The next look asks those that were found. With one relay a node can be reached, and looks no
            # further.
            await self._node.meet_relays()
            self._find_again_at_s = trio.current_time() + self._find_pause_s
            self._find_pause_s = min(FIND_MAX_S, 2 * self._find_pause_s)

    async def detour(self, node_id: NodeId) -> None:
        """A connection with a node none of whose addresses answers. Raises NodeUnreachable."""
        circuits = [
            circuit for text in self._node.addresses(node_id) if (circuit := CircuitAddress.parse(text))
        ]
        by_relay = {
            circuit.relay_id: circuit for circuit in circuits if circuit.relay_id != self._host.node_id
        }
        # Those that are connected first.
        relay_ids = sorted(by_relay, key=lambda relay_id: not self._host.is_connected(relay_id))
        failure = NodeUnreachable(f"node {node_id} is known to no relay")
        for relay_id in relay_ids[:_DETOURS_MAX]:
            where = [c.address for c in circuits if c.relay_id == relay_id]
            try:
                if not self._host.is_connected(relay_id):
                    await self._host.dial(relay_id, where, may_detour=False)
                await self.circuits.connect(relay_id, node_id)
            except NodeUnreachable as error:
                failure = error
            else:
                self.n_detours += 1
                provoked_by(log, node_id).info("node %s is reached through relay %s", node_id, relay_id)
                return
        raise failure

    def _worth_asking(self, now: float, connected: Collection[NodeId]) -> list[NodeId]:
        """Relays whose reservation is half over, then others, until there are enough."""
        uses, held = self.circuits.relays, self._reserved()
        due = [
            relay_id
            for relay_id, use in uses.items()
            if relay_id in held and now - use.asked_at_s >= (held[relay_id] - use.asked_at_s) / 2
        ]
        if len(held) >= RELAYS:
            return due
        strangers = [
            node_id for node_id in connected if (use := uses.get(node_id)) is None or use.is_over(now)
        ]
        return [*due, *self._random.sample(strangers, min(_ASKED_PER_LOOK, len(strangers)))]

    async def _reserve(self, relay_id: NodeId, now: float) -> None:
        uses = self.circuits.relays
        if len(uses) >= _REMEMBERED_MAX:
            held = self._reserved()
            uses.drop(next((each for each in uses if each not in held), relay_id))
        use = uses.get(relay_id) or uses.put(relay_id, RelayUse(now))
        use.asked_at_s = now
        try:
            await self.circuits.reserve(relay_id)
        except SwarmLLMError as error:
            log.debug("%s", error.message)
        else:
            provoked_by(log, relay_id).info("node %s is this node's relay", relay_id)

    def _circuit_addresses(self, relay_id: NodeId) -> list[str]:
        found = [text for text in self._node.addresses(relay_id) if CircuitAddress.parse(text) is None]
        return [f"{text}/p2p/{relay_id}/p2p-circuit" for text in found[:ADDRESSES_PER_RELAY]]
