"""Finds out whether others can reach this node: asks a peer to dial back, because a node cannot see this from
inside.

A peer that is asked tries the addresses of the asker's signed envelope, and only those: TCP, then the Noise
handshake, so that "reached" means this very node and not another one that answers there. It does so for one
asker at most every DIAL_BACK_EVERY_S, which is the most it can be used to knock at strangers' doors.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import trio

from swarmllm.errors import SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.shared_ticks import REST_TICK_S, sleep_until_tick
from swarmllm.swarm.data.wire import HandshakeFailed, noise_handshake
from swarmllm.swarm.discovery.address_sources import usable
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.libp2p.host import Host
from swarmllm.swarm.membership.connection_gater import ConnectionGater
from swarmllm.swarm.membership.identity import Identity
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.trust import Note, TrustEvent, ignored_event
from swarmllm.swarm.router import Reachability, RequestRefused, UnreadableRequest
from swarmllm_proto.envelope import Envelope
from swarmllm_proto.errors import ProtocolError, UnsupportedVersion
from swarmllm_proto.identifiers import Multiaddr, NodeId
from swarmllm_proto.router_messages import (
    DialBack,
    DialBackRequest,
    DialBackResponse,
    decode_neighbour,
    encode_neighbour,
)

log = logging.getLogger(__name__)

DIAL_BACK_EVERY_S = 30.0
CHECK_EVERY_S = 600.0
_FIRST_CHECK_S = 2.0
_RETRY_S = 5.0
_RETRY_MAX_S = 60.0
"""Where many start at once, those who are asked are busy."""
_TCP_S = 3.0
_PEERS_ASKED = 3
_ASKERS_MAX = 1024
AT_ONCE_MAX = 8
"""Nodes that are dialled back, each at 32 addresses at most; who is refused asks another node."""
_MULTISTREAM = b"\x13/multistream/1.0.0\n"
_NOISE = b"\x07/noise\n"


@dataclass(frozen=True, slots=True)
class DialBackTurn:
    """When this node last dialled back to a peer."""

    at_s: float

    def is_over(self, now: float) -> bool:
        """It may ask again."""
        return now - self.at_s >= DIAL_BACK_EVERY_S


class Envelopes(Protocol):
    def envelope(self, node_id: NodeId) -> Envelope | None:
        """The newest that has been heard."""
        ...


class DialBacks:
    """The side that dials back."""

    def __init__(
        self,
        identity: Identity,
        gater: ConnectionGater,
        envelopes: Envelopes,
        host: Host,
        peers: Parts[DialBackTurn] | None = None,
    ) -> None:
        self._identity = identity
        self._gater = gater
        self._envelopes = envelopes
        self._host = host
        self._turns: Parts[DialBackTurn] = Parts.alone() if peers is None else peers
        self._n_under_way = 0

    async def answer(self, sender: NodeId, body: bytes) -> bytes:
        """Raises RequestRefused."""
        try:
            decode_neighbour(body, DialBackRequest)
        except ProtocolError as error:
            raise UnreadableRequest(str(error)) from None
        envelope = self._envelopes.envelope(sender)
        if envelope is None:
            raise RequestRefused("your envelope is not known here yet")
        self._admit(sender)
        control: list[DialBack] = []
        data: list[DialBack] = []
        self._n_under_way += 1
        try:
            async with trio.open_nursery() as nursery:
                for address in usable(envelope.addresses):
                    nursery.start_soon(self._try, sender, address, True, control)
                for address in usable(envelope.data_addresses):
                    nursery.start_soon(self._try, sender, address, False, data)
        finally:
            self._n_under_way -= 1
        ip = self._host.remote_ip(sender)
        if "%" in ip:  # a link-local address with its zone, which means something on this machine only
            ip = ""
        return encode_neighbour(DialBackResponse(control=tuple(control), data=tuple(data), observed_ip=ip))

    def _admit(self, sender: NodeId) -> None:
        if self._n_under_way >= AT_ONCE_MAX:
            raise RequestRefused("others are being dialled back")
        now = trio.current_time()
        turn = self._turns.get(sender)
        if turn is not None and not turn.is_over(now):
            raise RequestRefused("asked again too soon")
        if len(self._turns) >= _ASKERS_MAX:
            self._turns.drop_first()
        self._turns.put(sender, DialBackTurn(now))

    async def _try(
        self, node_id: NodeId, address: Address, is_control: bool, results: list[DialBack]
    ) -> None:
        reached = False
        try:
            with trio.fail_after(_TCP_S):
                stream = await trio.open_tcp_stream(address.ip, address.port)
                if is_control:
                    await _choose_noise(stream)
            _, wire = await noise_handshake(stream, self._identity, node_id, self._gater)
            wire.abort()
            reached = True
        except (OSError, trio.TooSlowError, trio.BrokenResourceError, HandshakeFailed) as error:
            provoked_by(log, node_id).debug(
                "dialling %s back at %s: %s", node_id, address, type(error).__name__
            )
        results.append(DialBack(address=Multiaddr(str(address)), reached=reached))


async def _choose_noise(stream: trio.SocketStream) -> None:
    """What libp2p's negotiation comes to. Raises BrokenResourceError where something else answers."""
    agreed = _MULTISTREAM + _NOISE
    try:
        await stream.send_all(agreed)
        answered = b""
        while len(answered) < len(agreed):
            piece = await stream.receive_some(len(agreed) - len(answered))
            if not piece:
                raise trio.BrokenResourceError
            answered += piece
        if answered != agreed:
            raise trio.BrokenResourceError
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise


class ReachabilityChecks:
    """The side that asks. `ask(node_id, body)` sends the request; `result` is None until a peer has
    answered."""

    def __init__(
        self,
        ask: Callable[[NodeId, bytes], Awaitable[bytes]],
        connected: Collection[NodeId],
        randomness: random.Random,
        note: Note = ignored_event,
    ) -> None:
        self._note = note
        self._ask = ask
        self._connected = connected
        self._random = randomness
        self.result: Reachability | None = None

    async def run(self) -> None:
        wait_s, retry_s = _FIRST_CHECK_S, _RETRY_S
        while True:
            await sleep_until_tick(wait_s)
            if not self._connected:
                wait_s = REST_TICK_S
            elif await self.check():
                wait_s, retry_s = CHECK_EVERY_S, _RETRY_S
            else:
                wait_s, retry_s = retry_s, min(_RETRY_MAX_S, 2 * retry_s)

    async def check(self) -> bool:
        """Whether somebody answered."""
        peers = sorted(self._connected)
        for node_id in self._random.sample(peers, min(_PEERS_ASKED, len(peers))):
            try:
                answered = await self._ask(node_id, encode_neighbour(DialBackRequest()))
                response = decode_neighbour(answered, DialBackResponse)
            except SwarmLLMError as error:
                provoked_by(log, node_id).debug("node %s does not dial back: %s", node_id, error)
                continue
            except ProtocolError as error:
                provoked_by(log, node_id).debug(
                    "node %s says wrongly that it dialled back: %s", node_id, error
                )
                if not isinstance(error, UnsupportedVersion):
                    self._note(node_id, TrustEvent.BROKE_PROTOCOL, str(error))
                continue
            self.result = Reachability(
                checked_at=time.time(),
                asked=node_id,
                control=_pairs(response.control),
                data=_pairs(response.data),
                observed_ip=response.observed_ip,
            )
            return True
        return False


def _pairs(attempts: Sequence[DialBack]) -> tuple[tuple[str, bool], ...]:
    return tuple((attempt.address, attempt.reached) for attempt in attempts)
