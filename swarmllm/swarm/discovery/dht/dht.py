"""The DHT of a running node: asks other nodes in it, finds neighbours, announces what is here, looks up
models.

Deadlines are on every wait and all work is counted: a lookup asks at most ASKED_MAX nodes, announcing goes on
in the background. What comes back is where to look. Nothing found here says that a node lives or has what it
announced once: the caller connects to what it uses, and the connected set decides.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

import trio

from swarmllm.errors import NodeUnreachable, SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.supervision import Outcome, detach
from swarmllm.swarm.discovery.dht.messages import (
    MESSAGE_MAX_BYTES,
    Contact,
    DhtMessageKind,
    Message,
    decode,
    encode,
    node_key,
    place,
)
from swarmllm.swarm.discovery.dht.serving import DhtAsker, DhtCore, DhtNode, Serving
from swarmllm.swarm.discovery.dht.table import PARALLEL, Lookup, RoutingEntry
from swarmllm.swarm.libp2p.host import Host, Stream
from swarmllm.swarm.libp2p.stream_framing import framed, read_framed
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.router import DhtMode, DhtStatistics
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)

ASK_S = 5.0
"""For a question and its answer, the dial included."""
UNDER_WAY_MAX = 16
_STUCK_S = 60.0
"""Slow is not stuck: two nodes that are short of processor time would lose the connection that others use,
and make it anew."""
_END_S = 2.0
PROTOCOL = "/swarmllm/kad/1.0.0"
ANNOUNCE_EVERY_S = 3600.0
ENOUGH_PROVIDERS = 8
_SETTLE_S = 2.0
"""Nodes come in crowds: at the start, and when a partition heals."""
_REFRESH_S = 600.0
EAGER_CONTACTS: Final = 2
"""So many entries of its routing table a node looks for at once among those that it meets. The others it asks
one by one: where a hundred nodes start together, all meet many at the same time."""
UNHURRIED_S: Final = 10.0
"""Between two of them."""
_LOOKUP_S = 20.0
_HOLDERS = 20


class DhtClient:
    """Asks another node, connecting with it first where that is needed.

    Each exchange is a task of its own that its caller's deadline does not reach: half a dial or half a write
    cancelled would break a connection that others use. It ends by its own deadlines, and a stream that is
    stuck takes its connection with it.
    """

    def __init__(
        self,
        host: Host,
        nursery: trio.Nursery,
        protocol: str,
        node: DhtNode,
    ) -> None:
        self._host = host
        self._nursery = nursery
        self._protocol = protocol
        self._node = node
        self._turns = trio.Semaphore(UNDER_WAY_MAX)

    async def ask(self, contact: Contact, question: Message) -> Message:
        """Raises NodeUnreachable, whatever went wrong."""
        try:
            return await self._run(contact, question, expects_answer=True)
        except SwarmLLMError as error:
            raise NodeUnreachable(f"node {contact.node_id} in the DHT: {error.message}") from None

    async def tell(self, contact: Contact, statement: Message) -> bool:
        """What has no answer. Whether it was sent."""
        try:
            await self._run(contact, statement, expects_answer=False)
        except SwarmLLMError:
            return False
        return True

    async def _run(self, contact: Contact, message: Message, *, expects_answer: bool) -> Message:
        if not self._node.lets_in(contact.node_id):
            raise NodeUnreachable("it is not let in")
        with trio.move_on_after(ASK_S):
            async with self._turns:
                exchange: Outcome[Message] = Outcome()
                detach(
                    self._nursery,
                    "question",
                    self._converse,
                    contact,
                    message,
                    expects_answer,
                    exchange,
                    outcome=exchange,
                )
                return await exchange.wait()
        raise NodeUnreachable("no answer in time")

    async def _converse(
        self, contact: Contact, message: Message, expects_answer: bool, exchange: Outcome[Message]
    ) -> Message:
        """The caller has the answer at once, before the stream is closed. Raises NodeUnreachable."""
        stream: Stream | None = None
        answer: Message | None = None
        failure = "no answer in time"
        if not self._host.is_connected(contact.node_id):
            # It has deadlines of its own, and half a dial cancelled would leave half a connection.
            await self._host.dial(contact.node_id, list(contact.addresses))
            self._node.met_in_passing(contact.node_id)

        with trio.move_on_after(_STUCK_S) as stuck:
            try:
                stream = await self._host.open_stream(
                    contact.node_id, self._protocol, framed(encode(message))
                )
                if expects_answer:
                    with trio.fail_after(ASK_S):
                        answer = decode(await read_framed(stream, MESSAGE_MAX_BYTES))
                else:
                    answer = message
            except (NodeUnreachable, ProtocolError) as error:
                failure = str(error)
            except Exception as error:  # libp2p's, of many kinds
                failure = type(error).__name__
            if answer is not None:
                exchange.succeed(answer)
            else:
                exchange.fail(NodeUnreachable(failure))
        if stuck.cancelled_caught:
            provoked_by(log, contact.node_id).info(
                "a question in the DHT to node %s is stuck; closing the connection", contact.node_id
            )
            await self._host.close_hard(contact.node_id)
        elif stream is not None:
            with trio.move_on_after(_END_S):
                try:
                    await (stream.close() if answer is not None else stream.reset())
                except Exception as error:
                    log.debug("ending a stream of the DHT: %s", type(error).__name__)
        if answer is None:
            raise NodeUnreachable(failure)
        return answer


def protocol_name(network_id: str) -> str:
    """As the wire has it: nodes of other networks do not even speak of it."""
    return f"{PROTOCOL}/{network_id}" if network_id else PROTOCOL


@dataclass(frozen=True, slots=True)
class DhtParts:
    """What the DHT keeps of each peer. The providers of a key stay with the key."""

    met: Parts[bool] = field(default_factory=Parts.alone)
    """Peers that are to be asked whether they speak the protocol."""
    askers: Parts[DhtAsker] = field(default_factory=Parts.alone)
    n_entries: Parts[int] = field(default_factory=Parts.alone)
    """How many keys each provides."""
    contacts: Parts[RoutingEntry] = field(default_factory=Parts.alone)
    """The routing table."""


class Dht:
    def __init__(
        self,
        host: Host,
        nursery: trio.Nursery,
        node: DhtNode,
        *,
        network_id: str = "",
        mode: DhtMode = "on",
        parts: DhtParts | None = None,
    ) -> None:
        parts = parts or DhtParts()
        self._host = host
        self._node = node
        self._mode = mode
        self._own_key = node_key(host.node_id)
        self.core = DhtCore(host.node_id, node, parts.n_entries, parts.contacts)
        self._asking = DhtClient(host, nursery, protocol_name(network_id), node)
        self._serving = Serving(self.core, node, parts.askers)
        self._changed = trio.Event()
        self._met = parts.met
        self._unhurried_at_s = -math.inf
        """From then on one more of those may be asked that are in no hurry."""
        self._provided_at_s: dict[bytes, float] = {}
        self._n_known_when_provided = 0
        self._n_lookups = 0
        if mode == "on":
            host.serve(protocol_name(network_id), self._serving.serve)

    def statistics(self) -> DhtStatistics:
        return DhtStatistics(
            self._mode,
            len(self.core.table),
            len(self.core.providers),
            len(self.core.provided),
            self._serving.n_answered,
            self._serving.n_refused,
            self._n_lookups,
        )

    def met(self, node_id: NodeId) -> None:
        """This node is connected now: if it speaks the protocol, it belongs into the table."""
        self._met.put(node_id, True)
        self._changed.set()

    def provide(self, keys: Collection[bytes]) -> None:
        """What is here from now on, and all of it. Told to others soon, and again while it stays."""
        self.core.provided = set(keys)
        self._provided_at_s = {
            key: at_s for key, at_s in self._provided_at_s.items() if key in self.core.provided
        }
        self._changed.set()

    async def run(self) -> None:
        """Keep the table and the announcements fresh, until cancelled."""
        if self._mode == "off":
            return
        refresh_at_s = trio.current_time() + _REFRESH_S
        while True:
            with trio.move_on_at(self._next_at_s(trio.current_time())):
                await self._changed.wait()
            self._changed = trio.Event()
            n_before = len(self.core.table)
            async with trio.open_nursery() as nursery:
                for contact in self._take_met(trio.current_time()):
                    nursery.start_soon(self._get_to_know, contact)
            now = trio.current_time()
            if (not n_before and len(self.core.table)) or now >= refresh_at_s:
                refresh_at_s = now + _REFRESH_S
                self.core.providers.expire(now)
                await self._search(DhtMessageKind.FIND_NODE, self._own_key, is_asked_for=False)
            await self._announce()

    async def find_providers(self, key: bytes, *, n_enough: int = ENOUGH_PROVIDERS) -> list[Contact]:
        """Nodes that said that they have it, this one excepted; they may be long gone. Never raises for the
        network's sake."""
        if self._mode == "off":
            return []
        self._n_lookups += 1
        found = {c.node_id: c for c in self.core.providers.find(key, trio.current_time())}
        if len(found) < n_enough:

            def learn(answer: Message) -> bool:
                for contact in answer.providers:
                    found.setdefault(contact.node_id, contact)
                return len(found) >= n_enough

            await self._search(DhtMessageKind.GET_PROVIDERS, key, learn)
        found.pop(self._host.node_id, None)
        return [self.core.placed(contact) for contact in found.values()]

    def _next_at_s(self, now: float) -> float:
        at_s = now + (_SETTLE_S if self._due() else _REFRESH_S)
        return min(at_s, self._unhurried_at_s) if len(self._met) else at_s

    def _take_met(self, now: float) -> list[Contact]:
        """Who is to be asked now, of those that are still connected."""
        connected = self._node.connected()
        for node_id in [each for each in self._met if each not in connected]:
            self._met.drop(node_id)
        n_wanted = max(0, EAGER_CONTACTS - len(self.core.table))
        if not n_wanted and len(self._met) and now >= self._unhurried_at_s:
            n_wanted, self._unhurried_at_s = 1, now + UNHURRIED_S
        met = [Contact(node_id) for node_id in itertools.islice(self._met, n_wanted)]
        for contact in met:
            self._met.drop(contact.node_id)
        return met

    async def _get_to_know(self, contact: Contact) -> bool:
        answer = await self._ask(contact, Message(DhtMessageKind.FIND_NODE, self._own_key))
        return answer is not None

    async def _search(
        self,
        kind: DhtMessageKind,
        key: bytes,
        is_enough: Callable[[Message], bool] = lambda answer: False,
        *,
        is_asked_for: bool = True,
    ) -> list[Contact]:
        """The nodes nearest to a key that answer. `is_asked_for`: somebody waits for the result. Otherwise
        nobody is dialled for it in a swarm whose nodes all know each other without the DHT: two hundred that
        start together would make thousands of connections."""
        may_dial = is_asked_for or not self._node.knows_the_swarm()
        lookup = Lookup(place(key), self._host.node_id, self.core.table.closest(place(key)))
        changed = trio.Event()

        async def ask_in_turn() -> None:
            nonlocal changed
            while not lookup.is_over:
                contact = lookup.next()
                if contact is None:
                    await changed.wait()
                    continue
                if not may_dial and contact.node_id not in self._node.connected():
                    lookup.failed(contact.node_id)
                    continue
                answer = await self._ask(self.core.placed(contact), Message(kind, key))
                if answer is None:
                    lookup.failed(contact.node_id)
                else:
                    lookup.answered(contact.node_id, answer.closer)
                    if is_enough(answer):
                        nursery.cancel_scope.cancel()
                changed.set()
                changed = trio.Event()

        with trio.move_on_after(_LOOKUP_S):
            async with trio.open_nursery() as nursery:
                for _ in range(PARALLEL):
                    nursery.start_soon(ask_in_turn)
        return lookup.closest()

    async def _ask(self, contact: Contact, question: Message) -> Message | None:
        try:
            answer = await self._asking.ask(contact, question)
        except NodeUnreachable as error:
            log.debug("%s", error)
            self.core.table.failed(contact.node_id)
            return None
        if answer.kind != question.kind:
            self.core.table.failed(contact.node_id)
            return None
        self.core.table.answered(contact, trio.current_time())
        return answer

    def _due(self) -> list[bytes]:
        """Keys that should be announced now, if there is anybody to announce them to. When the table has
        grown a lot, others are nearest to a key than those who were told."""
        n_known = len(self.core.table)
        if n_known >= 2 * self._n_known_when_provided:
            self._n_known_when_provided = n_known
            self._provided_at_s.clear()
        if not n_known:
            return []
        since_s = trio.current_time() - ANNOUNCE_EVERY_S
        return sorted(key for key in self.core.provided if self._provided_at_s.get(key, since_s) <= since_s)

    async def _announce(self) -> None:
        for key in self._due():
            nearest = await self._search(DhtMessageKind.FIND_NODE, key, is_asked_for=False)
            own = self.core.placed(Contact(self._host.node_id))
            statement = Message(DhtMessageKind.ADD_PROVIDER, key, providers=(own,))
            n_told = await self._tell_all(nearest[:_HOLDERS], statement)
            if n_told and key in self.core.provided:
                self._provided_at_s[key] = trio.current_time()

    async def _tell_all(self, contacts: Iterable[Contact], statement: Message) -> int:
        n_told = 0

        async def tell(contact: Contact) -> None:
            nonlocal n_told
            n_told += await self._asking.tell(self.core.placed(contact), statement)

        async with trio.open_nursery() as nursery:
            for contact in contacts:
                nursery.start_soon(tell, contact)
        return n_told
