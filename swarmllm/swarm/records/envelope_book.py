"""Keeps the newest envelope of each node, with its signature checked once: pure state, bounded, with an
expiry.

Age travels with a digest: a node that is told of an envelope takes over how long ago its writer was heard,
instead of starting the clock anew. Without that, two nodes would tell each other of a dead third one for
ever.

A signature costs a tenth of a millisecond, and the same statement arrives several times: gossip is checked
before it is passed on and read after it, and what gossip brought comes again when two nodes compare what
they know.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Final, Literal

import msgspec
from blake3 import blake3
from msgspec import Meta

from swarmllm.swarm.peers.peer_table import Parts
from swarmllm_proto.envelope import Envelope, Verify, unseal
from swarmllm_proto.identifiers import NodeId

NODES_MAX = 4096
"""Envelopes kept: a thousand-node swarm four times over."""
BYTES_MAX = 64 * 1024 * 1024
"""Of all envelopes of other nodes, with their records. An honest record of twenty models has a few KiB."""
EXPIRY_S = 300.0
"""Without a sign of life for this long, a node that is not connected is forgotten, in a swarm of up to
`EXPIRY_NODES`. In a larger one nodes speak more rarely (`spread.heartbeat_interval_s`), and are kept for
longer in proportion."""
EXPIRY_NODES = 120
GOES_ROUND_S: Final = 60.0
"""So long gossip may take. A node that knows an envelope for longer does not pass it on."""
FINGERPRINT_BYTES: Final = 8
BUCKETS_MAX: Final = 1024
_BUCKET_NODES = 8
"""Of a group, on average."""
_MISSED_SHARE = 1 / 8
_UNGROUPED_NODES = 32
"""Of so few, or fewer, a list is as short as their fingerprints and one answer."""


def bucket_of(node_id: NodeId, n_buckets: int) -> int:
    """The group of a node. `n_buckets`: a power of two."""
    return int.from_bytes(blake3(node_id.encode()).digest(4), "little") % n_buckets


def expiry_s(n_nodes: int) -> float:
    """Seconds, in a swarm of so many. See EXPIRY_S."""
    return EXPIRY_S * max(1.0, n_nodes / EXPIRY_NODES)


class Digest(msgspec.Struct, frozen=True, array_like=True):
    """What two nodes compare to learn which envelopes one of them lacks."""

    node_id: NodeId
    started_at_ms: Annotated[int, Meta(ge=0, le=2**53)]
    sequence: Annotated[int, Meta(ge=0, le=2**53)]
    age_s: Annotated[float, Meta(ge=0, le=1e9)]
    """Since the writer was last heard."""


IsLost = Callable[[NodeId, float], bool]
"""(node id, when it was heard) -> whether this node knows better than its book that it is gone."""
Digests = Annotated[tuple[Digest, ...], Meta(max_length=NODES_MAX)]


@dataclass(eq=False, slots=True)
class HeldEnvelope:
    envelope: Envelope
    sealed: bytes
    heard_at_s: float
    taken_at_s: float
    """When this envelope came."""
    heard_beat: int = -1
    """The latest heartbeat that named it."""
    load: bytes = b""
    """What its writer has said since that it has to do; empty: nothing."""
    load_beat: int = -1
    """The heartbeat that said so."""
    direct_load: bytes = b""
    """What its writer says of it on a data connection, which is newer; empty: there is none that says so."""
    details: int = 0
    """The highest number of details that its writer has named since its record became a brief one; 0: the
    record is whole."""
    whole: bytes = b""
    """The brief record together with its details; empty: they are not here."""

    @property
    def n_bytes(self) -> int:
        """What is kept of it: the envelope as it came, and the record taken out of it."""
        return len(self.sealed) + len(self.envelope.record) + len(self.whole)


Verdict = Literal["new", "known", "refused"]
UNSEALED_KEPT: Final = 8


class EnvelopeBook:
    """`now` is any clock that does not run backwards, in seconds."""

    def __init__(
        self,
        node_id: NodeId,
        verify: Verify,
        peers: Parts[HeldEnvelope] | None = None,
        *,
        nodes_max: int = NODES_MAX,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        """`peers` holds this node's own envelope too."""
        self._node_id = node_id
        self.unseal = lru_cache(maxsize=UNSEALED_KEPT)(lambda sealed: unseal(sealed, Envelope, verify))
        """As `envelope.unseal`: gossip asks for the same one several times before it is taken."""
        self._nodes_max = nodes_max
        self._bytes_max = bytes_max
        self.n_bytes = 0
        """Of the envelopes of other nodes."""
        self._entries: Parts[HeldEnvelope] = Parts.alone() if peers is None else peers

    def __repr__(self) -> str:
        return f"<EnvelopeBook {len(self._entries)} nodes>"

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def has_room(self) -> bool:
        """For the whole swarm, as far as can be told. Where there is none, what is taken in drives out what
        others know, and two books never become equal."""
        return len(self._entries) < self._nodes_max // 2 and self.n_bytes < self._bytes_max // 2

    def write_own(self, envelope: Envelope, sealed: bytes, now: float, whole: bytes = b"") -> None:
        """`whole`: the record, where the envelope has a brief one."""
        self._put(HeldEnvelope(envelope, sealed, now, now, whole=whole))

    def take(
        self,
        sealed: bytes,
        now: float,
        *,
        connected: Collection[NodeId] = (),
        ages_s: Mapping[NodeId, float] = MappingProxyType({}),
    ) -> tuple[Verdict, NodeId]:
        """(what became of it, whose it is). Raises BadMessage for a forged or malformed one.

        "refused": somebody else writes under this node's own id, or the book is full of connected nodes.
        """
        envelope = self.unseal(sealed)
        node_id = envelope.node_id
        held = self._entries.get(node_id)
        heard_at_s = now - min(ages_s.get(node_id, 0.0), expiry_s(len(self._entries)))
        if held is not None and held.envelope.version >= envelope.version:
            if held.envelope.version == envelope.version:
                self._heard(held, max(held.heard_at_s, heard_at_s))
            return "known", node_id
        if node_id == self._node_id:
            return "refused", node_id
        entry = HeldEnvelope(envelope, sealed, heard_at_s, now, details=envelope.details or 0)
        if entry.details and held is not None and held.envelope.started_at_ms == envelope.started_at_ms:
            entry.details = max(entry.details, held.details)
        if held is not None:
            entry.direct_load = held.direct_load
        if held is None and len(self._entries) >= self._nodes_max and not self._make_room(connected):
            return "refused", node_id
        more = entry.n_bytes - (held.n_bytes if held is not None else 0)
        if self.n_bytes + more > self._bytes_max and not self._make_bytes(node_id, more, connected):
            return "refused", node_id
        self._put(entry)
        return "new", node_id

    def is_old(self, node_id: NodeId, version: tuple[int, int], now: float, beat: int | None = None) -> bool:
        """Whether this envelope, or this heartbeat that names it, has been round the swarm before. Peers may
        repeat what was said once, for good reasons or bad ones, and everybody would pass it on to everybody
        again."""
        held = self._entries.get(node_id)
        if held is None or held.envelope.version < version:
            return False
        if held.envelope.version > version:
            return True
        return now >= held.taken_at_s + GOES_ROUND_S if beat is None else beat <= held.heard_beat

    def hear(self, node_id: NodeId, version: tuple[int, int], now: float, beat: int = -1) -> bool:
        """A sign of life. True when it names an envelope newer than the one held: go and ask for it."""
        held = self._entries.get(node_id)
        if held is None:
            return True
        if version >= held.envelope.version:
            self._heard(held, now)
        if version == held.envelope.version:
            held.heard_beat = max(held.heard_beat, beat)
        return version > held.envelope.version

    def hear_load(self, node_id: NodeId, version: tuple[int, int], beat: int, load: bytes) -> bool:
        """What a heartbeat says of its writer's load; returns whether it has changed. It belongs to the
        envelope that the heartbeat names: a newer one has a newer load, and an older one is about to be
        replaced."""
        held = self._entries.get(node_id)
        if held is None or held.envelope.version != version or beat <= held.load_beat:
            return False
        held.load, held.load_beat = load, beat
        return True

    def hear_direct_load(self, node_id: NodeId, load: bytes) -> bool:
        """On a data connection with it; empty: there is no such connection any more. Returns whether that
        changes what is known of its load."""
        held = self._entries.get(node_id)
        if held is None or held.direct_load == load:
            return False
        held.direct_load = load
        return True

    def hear_details(self, node_id: NodeId, started_at_ms: int, number: int) -> None:
        """A heartbeat of that life says which details are the newest."""
        held = self._entries.get(node_id)
        if held is not None and held.details and held.envelope.started_at_ms == started_at_ms:
            held.details = max(held.details, number)

    def newest_details(self, node_id: NodeId) -> int:
        """The number of the newest details that its writer has named; 0: its record is whole, or not here."""
        held = self._entries.get(node_id)
        return held.details if held is not None else 0

    def complete(self, node_id: NodeId, whole: bytes) -> bool:
        """`records` has the record with its details from now on, or, where `whole` is empty, without. False:
        there is no room for it, or no such record."""
        held = self._entries.get(node_id)
        if held is None:
            return False
        if node_id != self._node_id:
            more = len(whole) - len(held.whole)
            if more > 0 and self.n_bytes + more > self._bytes_max:
                return False
            self.n_bytes += more
        held.whole = whole
        return True

    def fingerprints(self, is_lost: IsLost) -> bytes:
        """One for each group of nodes, of which envelope is the newest of each, without the lost ones. Of few
        nodes: nothing."""
        n_nodes = len(self._entries)
        if n_nodes <= _UNGROUPED_NODES:
            return b""
        n_buckets = min(BUCKETS_MAX, 1 << (n_nodes // _BUCKET_NODES).bit_length())
        return b"".join(self._fingerprints(n_buckets, is_lost))

    def differing(self, fingerprints: bytes, now: float, is_lost: IsLost) -> tuple[Digest, ...]:
        """The digests of the groups in which another node knows something else, by its `fingerprints`; of all
        where it tells of none. Raises ValueError for what is no list of fingerprints."""
        digests = self.digests(now, is_lost)
        if not fingerprints:
            return digests
        n_buckets, rest = divmod(len(fingerprints), FINGERPRINT_BYTES)
        if rest or n_buckets > BUCKETS_MAX or n_buckets & (n_buckets - 1):
            raise ValueError(f"{len(fingerprints)} bytes are not 1, 2, 4 ... {BUCKETS_MAX} fingerprints")
        theirs = [
            fingerprints[at : at + FINGERPRINT_BYTES] for at in range(0, len(fingerprints), FINGERPRINT_BYTES)
        ]
        differ = [
            own != their for own, their in zip(self._fingerprints(n_buckets, is_lost), theirs, strict=True)
        ]
        return tuple(digest for digest in digests if differ[bucket_of(digest.node_id, n_buckets)])

    def _fingerprints(self, n_buckets: int, is_lost: IsLost) -> list[bytes]:
        """The order of the nodes is the same everywhere."""
        hashes = [blake3() for _ in range(n_buckets)]
        for node_id in sorted(self._entries):
            entry = self._entries.get(node_id)
            if entry is not None and (node_id == self._node_id or not is_lost(node_id, entry.heard_at_s)):
                known = f"{node_id} {entry.envelope.started_at_ms} {entry.envelope.sequence}\n"
                hashes[bucket_of(node_id, n_buckets)].update(known.encode())
        return [each.digest(FINGERPRINT_BYTES) for each in hashes]

    def digests(self, now: float, is_lost: IsLost) -> tuple[Digest, ...]:
        """Without the lost nodes."""
        return tuple(
            Digest(
                node_id,
                entry.envelope.started_at_ms,
                entry.envelope.sequence,
                0.0 if node_id == self._node_id else max(0.0, now - entry.heard_at_s),
            )
            for node_id, entry in self._entries.items()
            if node_id == self._node_id or not is_lost(node_id, entry.heard_at_s)
        )

    def lacking(self, digests: Iterable[Digest], now: float) -> dict[NodeId, float]:
        """Whose envelopes to ask the sender of these digests for, with the ages to pass to `take`."""
        wanted: dict[NodeId, float] = {}
        oldest_s = expiry_s(len(self._entries))
        for digest in digests:
            if digest.node_id == self._node_id or digest.age_s >= oldest_s:
                continue
            held = self._entries.get(digest.node_id)
            if held is None or held.envelope.version < (digest.started_at_ms, digest.sequence):
                wanted[digest.node_id] = digest.age_s
            elif held.envelope.version == (digest.started_at_ms, digest.sequence):
                self._heard(held, max(held.heard_at_s, now - digest.age_s))
        return wanted

    def sealed(self, node_ids: Iterable[NodeId], size_max_bytes: int) -> list[bytes]:
        """The envelopes of these nodes as they came, as many as fit."""
        fitting: list[bytes] = []
        for node_id in node_ids:
            if (entry := self._entries.get(node_id)) is None:
                continue
            size_max_bytes -= len(entry.sealed)
            if size_max_bytes < 0:
                break
            fitting.append(entry.sealed)
        return fitting

    def envelope(self, node_id: NodeId) -> Envelope | None:
        entry = self._entries.get(node_id)
        return entry.envelope if entry else None

    def heard_at_s(self, node_id: NodeId) -> float | None:
        """When another node that has a record gave its last sign of life; None: it has none."""
        entry = self._entries.get(node_id)
        has_record = entry is not None and entry.envelope.record and node_id != self._node_id
        return entry.heard_at_s if entry is not None and has_record else None

    def watch(self, on_change: Callable[[NodeId], None]) -> None:
        """Called with the node when what `heard_at_s` says of it may be something else."""
        self._entries.watch(on_change)

    def node_ids(self) -> list[NodeId]:
        return list(self._entries)

    def records(self) -> Mapping[NodeId, bytes]:
        """By node id, without the empty ones, with the details that are here: as it is whenever it is looked
        at."""
        return _Records(self._entries)

    def load(self, node_id: NodeId) -> bytes:
        """Empty: it has said nothing since its record."""
        entry = self._entries.get(node_id)
        return (entry.direct_load or entry.load) if entry else b""

    def loads(self) -> dict[NodeId, bytes]:
        """Of those that have said since their record what they have to do."""
        return {
            node_id: load
            for node_id, entry in self._entries.items()
            if (load := entry.direct_load or entry.load)
        }

    def expire(self, now: float, connected: Collection[NodeId]) -> list[NodeId]:
        """Forget who was not heard for `expiry_s` and is not connected; whom it forgot."""
        silent, oldest_s = self._silent(connected), expiry_s(len(self._entries))
        gone = [node_id for node_id, entry in silent if now - entry.heard_at_s >= oldest_s]
        for node_id in gone:
            self._drop(node_id)
        return gone

    def misses_signs(self, now: float, connected: Collection[NodeId]) -> bool:
        """Whether many of those that are not connected were not heard for half of the time after which they
        are forgotten: in a swarm that lives, gossip reaches this node badly."""
        silent, old_s = self._silent(connected), expiry_s(len(self._entries)) / 2
        n_old = sum(now - entry.heard_at_s >= old_s for _, entry in silent)
        return n_old > _MISSED_SHARE * len(silent)

    def _make_room(self, connected: Collection[NodeId]) -> bool:
        candidates = self._silent(connected)
        if not candidates:
            return False
        self._drop(min(candidates, key=lambda each: each[1].heard_at_s)[0])
        return True

    def _make_bytes(self, writer: NodeId, more: int, connected: Collection[NodeId]) -> bool:
        """The largest go first, which honest nodes have none of; what is as small as the new one stays."""
        others = [each for each in self._silent(connected) if each[0] != writer]
        for node_id, entry in sorted(others, key=lambda each: -each[1].n_bytes):
            if self.n_bytes + more <= self._bytes_max or entry.n_bytes <= more:
                break
            self._drop(node_id)
        return self.n_bytes + more <= self._bytes_max

    def _heard(self, entry: HeldEnvelope, at_s: float) -> None:
        entry.heard_at_s = at_s
        self._entries.touched(entry.envelope.node_id)

    def _put(self, entry: HeldEnvelope) -> None:
        node_id = entry.envelope.node_id
        if node_id != self._node_id:
            held = self._entries.get(node_id)
            self.n_bytes += entry.n_bytes - (held.n_bytes if held is not None else 0)
        self._entries.put(node_id, entry)

    def _drop(self, node_id: NodeId) -> None:
        if (entry := self._entries.drop(node_id)) is not None:
            self.n_bytes -= entry.n_bytes

    def _silent(self, connected: Collection[NodeId]) -> list[tuple[NodeId, HeldEnvelope]]:
        return [
            (node_id, entry)
            for node_id, entry in self._entries.items()
            if node_id != self._node_id and node_id not in connected
        ]


class _Records(Mapping[NodeId, bytes]):
    def __init__(self, entries: Parts[HeldEnvelope]) -> None:
        self._entries = entries

    def __getitem__(self, node_id: NodeId) -> bytes:
        entry = self._entries.get(node_id)
        if entry is None or not entry.envelope.record:
            raise KeyError(node_id)
        return entry.whole or entry.envelope.record

    def __iter__(self) -> Iterator[NodeId]:
        return (node_id for node_id, entry in self._entries.items() if entry.envelope.record)

    def __len__(self) -> int:
        return sum(bool(entry.envelope.record) for entry in self._entries.values())

    def items(self) -> ItemsView[NodeId, bytes]:
        return _RecordItems(self)


class _RecordItems(ItemsView[NodeId, bytes]):
    """Iterates without a look-up per record, because all records are read after every change."""

    _mapping: _Records

    def __iter__(self) -> Iterator[tuple[NodeId, bytes]]:
        entries = self._mapping._entries.items()
        return (
            (node_id, record)
            for node_id, entry in entries
            if (record := entry.whole or entry.envelope.record)
        )


KEPT_MAX = 4096
"""Verdicts, those asked for last: about 1 MiB."""


class VerifyOnce:
    """A `Verify` that remembers its results, right or wrong."""

    def __init__(self, verify: Verify, kept_max: int = KEPT_MAX) -> None:
        self._verify = verify
        self._kept_max = kept_max
        self._verdicts: OrderedDict[tuple[str, bytes, bytes], bool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._verdicts)

    def __call__(self, node_id: NodeId, content: bytes, signature: bytes) -> bool:
        # A hash stands for the content: a thousand records would be too much to keep.
        key = (node_id, signature, hashlib.sha256(content).digest())
        verdict = self._verdicts.pop(key, None)
        if verdict is None:
            verdict = self._verify(node_id, content, signature)
        self._verdicts[key] = verdict
        if len(self._verdicts) > self._kept_max:
            self._verdicts.popitem(last=False)
        return verdict
