"""Sends this node's envelopes and heartbeats, receives those of others, and fetches envelopes that gossip
missed.

The book decides what is new (envelope_book.py); this drives it: gossip on change, heartbeats after it, rarer
and rarer, and a fetch where a heartbeat told of an envelope that gossip did not bring.

In a swarm of more than `whole_records_max` nodes the envelope has a brief record. The details are told to
those that ask for them (details_exchange.py), and a change of them alone costs the others nothing.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import msgspec
import trio
from msgspec import UNSET, UnsetType

from swarmllm.errors import SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.shared_ticks import sleep_until_tick
from swarmllm.supervision import spawn, supervise
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.libp2p.gossip import AUDIENCE_MAX, HEALTH, MODELS, Gossip
from swarmllm.swarm.peers.peer_table import Parts, PassingParts
from swarmllm.swarm.peers.trust import Note, TrustEvent, ignored_event
from swarmllm.swarm.records.comparison_pace import ComparisonPace
from swarmllm.swarm.records.details_book import DetailsBook, HeldDetails
from swarmllm.swarm.records.details_exchange import DetailsExchange, no_dials
from swarmllm.swarm.records.direct_loads import DirectLoads, NoDirectLoads
from swarmllm.swarm.records.envelope_book import UNSEALED_KEPT, EnvelopeBook, HeldEnvelope, VerifyOnce
from swarmllm.swarm.records.exchange import KIND_DETAILS, KIND_DIGESTS, NO_DIGESTS, Ask, RecordExchange
from swarmllm.swarm.records.load_publisher import LoadPublisher
from swarmllm.swarm.records.update_pace import CountedUpdate, UpdatePace
from swarmllm.swarm.router import Change
from swarmllm_proto.envelope import (
    ADDRESSES_MAX,
    ENVELOPE_MAX,
    HEARTBEAT_MAX,
    BadStatement,
    Details,
    Envelope,
    Heartbeat,
    Verify,
    seal,
    unseal,
)
from swarmllm_proto.errors import BadMessage, ProtocolError, UnsupportedVersion
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.node_load import NodeLoad
from swarmllm_proto.record_parts import split_record

log = logging.getLogger(__name__)

HEARTBEAT_S = 10.0
"""After this node published something: a node that missed it learns of it so soon, where it was not offered
either (`gossip_mesh`)."""
HEARTBEAT_MAX_S = 60.0
"""While there is nothing new, of which only those need to hear that have no connection with this node. More
rarely where the swarm is large (EXPIRY_NODES)."""
HEARTBEATS_PER_S = 1.25
"""Of the whole swarm: each node hears all of them, about twice. A node is forgotten after three that did
not come (`envelope_book.expiry_s`)."""
LOAD_WAITS_S = 0.3
HEARTBEAT_WAITS_S = 3.0
"""At most, at each node that passes it on (`held_gossip`). A heartbeat that only says that its writer lives
is wanted once in minutes."""
WHOLE_RECORDS_MAX = 64
"""Nodes known, up to which each publishes its record as a whole: all hear everything at once, as small swarms
can afford."""
WHOLE_AGAIN = 3 / 4
"""Of them; in between it stays as it was."""
TOPIC_SIZES_BYTES = {MODELS: ENVELOPE_MAX, HEALTH: HEARTBEAT_MAX}

_HOUSEKEEPING_S = 15.0
_FETCHES_MAX = 8
_INCARNATION_NAME = "incarnation"


@dataclass(frozen=True, slots=True)
class RecordParts:
    """What is kept here of each node, this one included."""

    envelopes: Parts[HeldEnvelope] = field(default_factory=Parts.alone)
    fetching: Parts[bool] = field(default_factory=Parts.alone)
    """Nodes whose newer envelope is being asked for."""
    details: Parts[HeldDetails] = field(default_factory=Parts.alone)
    """Of nodes that are of interest here."""
    counted_updates: PassingParts[CountedUpdate] = field(default_factory=PassingParts.alone)
    """Of nodes that said something new lately (`UpdatePace`)."""


class Signer(Protocol):
    @property
    def node_id(self) -> NodeId: ...

    def sign(self, content: bytes) -> bytes: ...


class RecordListener(Protocol):
    def heard(self, envelope: Envelope) -> None:
        """Another node's, and new."""
        ...

    def forgotten(self, node_id: NodeId) -> None:
        """Its envelope has expired."""
        ...

    def is_lost(self, node_id: NodeId, heard_at_s: float) -> bool:
        """Whether its connection has ended since it was last heard: then others are not told of it."""
        ...


class RecordSpread:
    def __init__(
        self,
        identity: Signer,
        verify: Verify,
        started_at_ms: int,
        nursery: trio.Nursery,
        feed: ChangeFeed,
        *,
        ask: Ask,
        connected: Collection[NodeId],
        listener: RecordListener,
        note: Note = ignored_event,
        parts: RecordParts | None = None,
        whole_records_max: int = WHOLE_RECORDS_MAX,
        dial: Callable[[NodeId], Awaitable[None]] = no_dials,
        direct_loads: DirectLoads | None = None,
    ) -> None:
        """`connected`: the peers that are, whenever it is looked at. `dial`: see `DetailsExchange`."""
        parts = parts or RecordParts()
        self._identity = identity
        verify = VerifyOnce(verify)
        # Gossip asks for the same message several times while it passes it on.
        self._unseal_heartbeat = lru_cache(maxsize=UNSEALED_KEPT)(
            lambda content: unseal(content, Heartbeat, verify)
        )
        self._nursery = nursery
        self._feed = feed
        self._connected = connected
        self._listener = listener
        self._note = note
        self._book = EnvelopeBook(identity.node_id, verify, parts.envelopes)
        self._fetching = parts.fetching
        self._n_beats = 0
        self._n_loads = 0
        self._n_beats_since_change = 0
        self._said_at_s = -math.inf
        """When this node last said something to everybody."""
        self._changed = trio.Event()
        self._gossip: Gossip | None = None
        self.own = Envelope(node_id=identity.node_id, started_at_ms=started_at_ms, sequence=0)
        self._plain: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._forwarded: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._circuits: tuple[str, ...] = ()
        self.exchange = RecordExchange(self._book, ask, self)
        self._details = DetailsBook(identity.node_id, self._book, verify, parts.details)
        direct_loads = direct_loads or NoDirectLoads()
        self.details = DetailsExchange(self._details, ask, connected, self, feed, dial, loads=direct_loads)
        self._load_publisher = LoadPublisher(direct_loads)
        self._whole_records_max = whole_records_max
        self._is_brief = False
        self._record = b""
        """This node's, with its details."""
        self._own_details = Details(
            node_id=identity.node_id, started_at_ms=started_at_ms, number=0, details=b""
        )
        self._pace = ComparisonPace(random.Random(random.random()))
        self._pace_changed = trio.Event()
        self._updates = UpdatePace(parts.counted_updates)
        self.records: Mapping[NodeId, bytes] = self._book.records()
        self.loads = self._book.loads

    def begin(self, gossip: Gossip, addresses: tuple[str, ...], data_addresses: tuple[str, ...]) -> None:
        """From here on others hear of this node."""
        self._gossip = gossip
        self._plain = (addresses, data_addresses)
        self.own = msgspec.structs.replace(self.own, addresses=addresses, data_addresses=data_addresses)
        self._book.write_own(self.own, seal(self.own, self._identity.sign), trio.current_time())
        supervise(self._nursery, "heartbeats", self._send_heartbeats)
        supervise(self._nursery, "record expiry", self._keep_house)
        self._pace.begin(trio.current_time())
        supervise(self._nursery, "record comparisons", self._keep_comparing)
        supervise(self._nursery, "record details", self.details.run)
        supervise(
            self._nursery,
            "load changes",
            self._load_publisher.run,
            lambda: self.own.details is not UNSET,
            lambda: len(self._book),
            self._publish_heartbeat,
        )

    async def synchronise(self, node_id: NodeId) -> None:
        """Learn everything that a node knows with which there is a new connection. Raises as
        `RecordExchange.synchronise`."""
        if await self.exchange.synchronise(node_id) and self._book.has_room:
            self._learned()

    def answer(self, sender: NodeId, kind: int, body: bytes) -> bytes:
        """To another node that compares records with this one. Raises RequestRefused."""
        if kind == KIND_DETAILS:
            return self.details.answer(body)
        answered = self.exchange.answer(kind, body)
        # Of few nodes there are no fingerprints, and nothing says whether the two know the same.
        has_other = kind == KIND_DIGESTS and body and answered != NO_DIGESTS
        if has_other and sender in self._connected and self._book.has_room:
            self._pace.differs(sender, trio.current_time())
            self._pace_changed.set()
        return answered

    async def publish(self, record: bytes) -> None:
        self._load_publisher.in_record(record)
        await self._publish_record(record)

    async def _publish_record(self, record: bytes) -> None:
        self._record = record
        load = self._load_publisher.sustained()
        parts = self._parts(record, load)
        if parts is not None:
            self._write_details(parts[1])
            self._load_publisher.recorded(load)
        self.own = msgspec.structs.replace(
            self.own,
            sequence=self.own.sequence + 1,
            record=record if parts is None else parts[0],
            details=UNSET if parts is None else self._own_details.number,
            audience=self._audience(MODELS),
        )
        sealed = seal(self.own, self._identity.sign)
        self._book.write_own(self.own, sealed, trio.current_time(), whole=b"" if parts is None else record)
        self._n_beats_since_change = 0
        self._said_at_s = trio.current_time()
        self._changed.set()
        self._feed.announce(Change("record", self._identity.node_id))
        if self._gossip is not None:
            await self._gossip.publish(MODELS, sealed)

    async def publish_details(self, record: bytes, *, soon: bool) -> bool:
        """See `Router`."""
        parts = self._parts(record, self._load_publisher.sustained())
        if parts is None or self.own.details is UNSET:
            await self.publish(record)
            return True
        self._record = record
        self._write_details(parts[1])
        self._book.complete(self._identity.node_id, record)
        self._feed.announce(Change("record", self._identity.node_id))
        if soon:
            await self._publish_heartbeat()
        return False

    def _parts(self, record: bytes, load: NodeLoad) -> tuple[bytes, bytes] | None:
        """The brief record and its details; None: it is published as a whole."""
        n_nodes, most = len(self._book), self._whole_records_max
        self._is_brief = n_nodes > most or (self._is_brief and n_nodes > WHOLE_AGAIN * most)
        if not self._is_brief:
            return None
        try:
            return split_record(record, load)
        except ProtocolError as error:
            log.debug("this node's record is published as a whole: %s", error)
            return None

    def _write_details(self, details: bytes) -> None:
        if details == self._own_details.details and self._own_details.number:
            return
        number = self._own_details.number + 1
        self._own_details = msgspec.structs.replace(self._own_details, number=number, details=details)
        self._details.write_own(self._own_details, seal(self._own_details, self._identity.sign))

    async def publish_load(self, load: bytes) -> None:
        """In a heartbeat, which is a fifth of the smallest record; in those that follow too, until the next
        record. In a large swarm by `LoadPublisher`."""
        self._n_loads += 1
        self._book.hear_load(self._identity.node_id, self.own.version, self._n_loads, load)
        self._feed.announce(Change("record", self._identity.node_id))
        self._load_publisher.changed(load)
        if self.own.details is UNSET:
            await self._publish_heartbeat()

    async def _publish_heartbeat(self) -> None:
        self._n_beats += 1
        self._said_at_s = trio.current_time()
        if self._gossip is not None:
            await self._gossip.publish(HEALTH, self._heartbeat())

    def _heartbeat(self) -> bytes:
        heartbeat = Heartbeat(
            node_id=self._identity.node_id,
            started_at_ms=self.own.started_at_ms,
            sequence=self.own.sequence,
            beat=self._n_beats,
            load=self._load_to_tell() or UNSET,
            audience=self._audience(HEALTH),
            details=UNSET if self.own.details is UNSET else self._own_details.number,
        )
        return seal(heartbeat, self._identity.sign)

    def _load_to_tell(self) -> bytes:
        if self.own.details is UNSET:
            return self._book.load(self._identity.node_id)
        return self._load_publisher.for_heartbeat()

    def _audience(self, topic: str) -> bytes | UnsetType:
        # Where more nodes are known than may be neighbours, no two have the same ones.
        if self._gossip is None or len(self._book) > AUDIENCE_MAX + 1:
            return UNSET
        return self._gossip.audience(topic) or UNSET

    async def reach_through(self, circuits: tuple[str, ...]) -> None:
        """From now on this node announces these relays, and no others."""
        self._circuits = circuits
        await self._announce_addresses()

    @property
    def plain_addresses(self) -> tuple[str, ...]:
        """Of the control port: this machine's own, or those that a person has it announce."""
        return self._plain[0]

    async def also_at(self, addresses: tuple[str, ...], data_addresses: tuple[str, ...]) -> None:
        """From now on this node announces these besides its own: a router forwards them. Before they were
        others, or none."""
        self._forwarded = (addresses, data_addresses)
        await self._announce_addresses()

    async def _announce_addresses(self) -> None:
        """The shorter way of this machine's own addresses is tried first."""
        control, data = (
            (*own[: ADDRESSES_MAX - len(more)], *more)
            for own, more in (
                (self._plain[0], (*self._forwarded[0], *self._circuits)),
                (self._plain[1], self._forwarded[1]),
            )
        )
        self.own = msgspec.structs.replace(self.own, addresses=control, data_addresses=data)
        load = self._book.load(self._identity.node_id)
        await self._publish_record(self._record)
        if load:
            await self.publish_load(load)

    @property
    def book(self) -> EnvelopeBook:
        return self._book

    def envelope(self, node_id: NodeId) -> Envelope | None:
        return self._book.envelope(node_id)

    def validate(self, topic: str, content: bytes) -> bool | None:
        """Whether gossip is to be passed on. None: it is of another version of the protocol, or was said
        before. Neither is anybody's fault, and what is old is of no use to others."""
        try:
            statement = self._unsealed(topic, content)
            beat = statement.beat if isinstance(statement, Heartbeat) else None
            if self._book.is_old(statement.node_id, statement.version, trio.current_time(), beat):
                return None
        except BadMessage as error:
            provoked_by(log, "gossip").debug("gossip on %s refused: %s", topic, error)
            if isinstance(error, UnsupportedVersion):
                return None
            self._blame_author(error)
            return False
        return True

    def _unsealed(self, topic: str, content: bytes) -> Envelope | Heartbeat:
        return self._book.unseal(content) if topic == MODELS else self._unseal_heartbeat(content)

    def author_and_audience(self, topic: str, content: bytes) -> tuple[NodeId, bytes] | None:
        statement = self._unsealed(topic, content)
        return None if statement.audience is UNSET else (statement.node_id, statement.audience)

    def may_wait_s(self, topic: str, content: bytes) -> float:
        """See `GossipReader`."""
        statement = self._unsealed(topic, content)
        if isinstance(statement, Heartbeat):
            known = self._book.envelope(statement.node_id)
            if known is not None and known.version >= statement.version:
                return LOAD_WAITS_S if statement.load else HEARTBEAT_WAITS_S
        if statement.node_id == self._identity.node_id:
            return 0.0
        return self._updates.may_wait_s(statement.node_id, trio.current_time())

    def blame(self, sender: NodeId, error: BadMessage) -> None:
        """A peer has sent a statement that is refused, although each node checks what it passes on."""
        if not isinstance(error, UnsupportedVersion):
            self._note(sender, TrustEvent.BROKE_PROTOCOL, str(error))
            self._blame_author(error, sender)

    def pass_on(self, node_id: NodeId) -> None:
        """Gossip a newcomer's envelope: it did so itself when it was connected with few nodes, or none."""
        gossip = self._gossip
        for sealed in self._book.sealed([node_id], ENVELOPE_MAX):
            if gossip is not None:
                spawn(self._nursery, "peer", gossip.pass_on, MODELS, sealed)

    def is_lost(self, node_id: NodeId, heard_at_s: float) -> bool:
        return self._listener.is_lost(node_id, heard_at_s)

    def _blame_author(self, error: BadMessage, blamed: NodeId | None = None) -> None:
        """Only a node whose signature proves that it said so, never the subject of a forged statement."""
        author = error.author if isinstance(error, BadStatement) else None
        if author not in (None, blamed, self._identity.node_id):
            self._note(author, TrustEvent.BROKE_PROTOCOL, str(error))

    def receive(self, topic: str, content: bytes) -> None:
        """Gossip that passed `validate`."""
        if topic == MODELS:
            self.take(content, {})
            return
        heartbeat = self._unseal_heartbeat(content)
        node_id = heartbeat.node_id
        if node_id == self._identity.node_id:
            return
        if heartbeat.details:
            self._book.hear_details(node_id, heartbeat.started_at_ms, heartbeat.details)
        is_unknown = self._book.envelope(node_id) is None and node_id not in self._connected
        if is_unknown and self._book.has_room:
            # Seldom only that one is missing here.
            self._learned()
        elif self._book.hear(node_id, heartbeat.version, trio.current_time(), heartbeat.beat):
            self._fetch_soon(node_id)
        elif heartbeat.load and self._book.hear_load(
            node_id, heartbeat.version, heartbeat.beat, heartbeat.load
        ):
            self._feed.announce(Change("record", node_id))

    def direct_load_came(self, node_id: NodeId, load: bytes) -> None:
        """On a data connection; empty: there is none any more that tells it."""
        if self._book.hear_direct_load(node_id, load):
            self._feed.announce(Change("record", node_id))

    def take(self, sealed: bytes, ages_s: Mapping[NodeId, float]) -> NodeId:
        now = trio.current_time()
        verdict, node_id = self._book.take(sealed, now, connected=self._connected, ages_s=ages_s)
        if verdict == "refused" and node_id == self._identity.node_id:
            provoked_by(log, node_id).error(
                "another node uses this node's identity; was the data folder copied?"
            )
        if verdict == "new" and (envelope := self._book.envelope(node_id)) is not None:
            self._listener.heard(envelope)
            self._details.envelope_came(node_id)
            if envelope.details:
                self.details.told()
            if envelope.record:
                self._feed.announce(Change("record", node_id))
        return node_id

    def _fetch_soon(self, node_id: NodeId) -> None:
        """Get a newer envelope of which a heartbeat told: from its writer, else from a connected node."""
        connected = self._connected
        if node_id in self._fetching or len(self._fetching) >= _FETCHES_MAX or not connected:
            return
        source = node_id if node_id in connected else random.choice(list(connected))
        self._fetching.put(node_id, True)

        async def fetch() -> None:
            try:
                await self.exchange.fetch(source, {node_id: 0.0})
            except SwarmLLMError as error:
                provoked_by(log, node_id).debug("the envelope of %s was not to be had: %s", node_id, error)
            finally:
                self._fetching.drop(node_id)

        spawn(self._nursery, "peer", fetch)

    def _learned(self) -> None:
        self._pace.learned(trio.current_time())
        self._pace_changed.set()

    async def _keep_comparing(self) -> None:
        while True:
            self._pace_changed = trio.Event()
            with trio.move_on_at(self._pace.due_at_s):
                await self._pace_changed.wait()
                continue
            await self._compare()

    async def _compare(self) -> None:
        """With a connected node."""
        began_s, n_new, node_id = trio.current_time(), 0, self._pace.first
        if not self._book.has_room:
            node_id = None
        elif node_id not in self._connected:
            node_id = random.choice(list(self._connected)) if self._connected else None
        if node_id is not None:
            try:
                misses = self._book.misses_signs(began_s, self._connected)
                n_new = await self.exchange.synchronise(node_id, also_ages=misses)
            except SwarmLLMError as error:
                provoked_by(log, node_id).debug("comparing records with %s: %s", node_id, error)
        now = trio.current_time()
        self._pace.compared(n_new, now - began_s, now)

    async def _send_heartbeats(self) -> None:
        while True:
            await self._publish_heartbeat()
            await self._until_next_beat()
            self._n_beats_since_change += 1

    async def _until_next_beat(self) -> None:
        """After a record a heartbeat is due as late as after a heartbeat: it tells as much."""
        jitter = random.uniform(0.8, 1.2)
        while True:
            # The swarm may have grown meanwhile: nodes that start together have few others to know at first.
            interval_s = heartbeat_interval_s(len(self._book), self._n_beats_since_change)
            due_at_s = self._said_at_s + interval_s * jitter
            if trio.current_time() >= due_at_s:
                return
            self._changed = trio.Event()
            with trio.move_on_at(due_at_s):
                await self._changed.wait()

    async def _keep_house(self) -> None:
        while True:
            await sleep_until_tick(_HOUSEKEEPING_S)
            self.expire(trio.current_time())

    def expire(self, now: float) -> None:
        """Forget the nodes that have been silent for too long."""
        for node_id in self._book.expire(now, self._connected):
            self._details.forget(node_id)
            self._listener.forgotten(node_id)
            self._feed.announce(Change("record", node_id))


def heartbeat_interval_s(n_nodes: int, n_beats_since_change: int) -> float:
    """Doubles from beat to beat until something changes."""
    quiet_s = HEARTBEAT_S * float(2 ** min(n_beats_since_change, 8))
    shared_s = n_nodes / HEARTBEATS_PER_S
    return max(shared_s, min(HEARTBEAT_MAX_S, quiet_s))


def next_incarnation(data_dir: Path, now_ms: int) -> int:
    """When this life begins, in ms: `now_ms`, but later than every life before it even where the clock was
    set back. Blocking."""
    path = data_dir / _INCARNATION_NAME
    try:
        last_ms = int(path.read_text("ascii"))
    except (FileNotFoundError, ValueError):
        last_ms = 0
    started_at_ms = max(now_ms, last_ms + 1)
    temporary = path.with_suffix(".new")
    temporary.write_text(f"{started_at_ms}\n", "ascii")
    temporary.rename(path)
    return started_at_ms
