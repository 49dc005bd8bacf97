"""Using relays: reservations with them, connections through them, and being connected with through them.

Every exchange runs where no caller's cancellation reaches it and ends by its own deadlines. Connections that
come through a relay are taken only from relays that this node asked for a reservation, as many at a time as
ACCEPTING_MAX.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from swarmllm.errors import NodeUnreachable
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
from swarmllm.swarm.discovery.relay.relayed_connection import RelayedConnection
from swarmllm.swarm.libp2p.host import Host, Stream
from swarmllm.swarm.libp2p.stream_framing import framed, read_framed
from swarmllm.swarm.peers.parts import Parts
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)

ANSWER_S = 25.0
"""The relay has to ask the other end, within 10 s."""
ASK_AGAIN_S = 300.0
"""For a reservation, after a refusal, and of a node that is no relay."""
RESERVED_MAX_S = 6 * 3600.0
ACCEPTING_MAX = 16


@dataclass(eq=False, slots=True)
class RelayUse:
    """What this node has with another as its relay."""

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
        host.serve(STOP, self._accept)

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
