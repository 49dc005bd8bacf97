"""Knows which nodes hold which layers of which model, from the records it hears.

`Registry` is pure state. Two things flow in: records (what nodes say about themselves) and the set of
reachable nodes (what this node knows about liveness); everything that comes out is restricted to nodes that
are reachable now, because a record outlives its writer. Which record of a node is the newest is the router's
business: the one applied last counts.

Everything is indexed by model (see model_index.py) and kept incrementally: a record costs what differs from
the node's previous one, and an answer costs what is in it. What a model looks like is worked out when
somebody asks, and again only after something about it has changed.

Trust changes with every event and with time, and nobody tells the registry. So each read compares the nodes
it is about with the trust of now; a node whose trust has changed enters or leaves the index then.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from swarmllm.log_filter import provoked_by
from swarmllm.models.layers import LayerRange
from swarmllm.swarm.peers.peer_table import Parts, PassingParts
from swarmllm.swarm.peers.trust import NeutralTrust, NodeTrust, may_work
from swarmllm.swarm.records.departures import Departed, Departures, GaveUp
from swarmllm.swarm.records.model_index import NODE_MODELS_MAX, IndexedRecord, ModelIndex
from swarmllm.swarm.records.model_index import Contradiction as Contradiction
from swarmllm.swarm.records.model_index import Holder as Holder
from swarmllm.swarm.records.model_index import SwarmModel as SwarmModel
from swarmllm.swarm.records.prefix_index import Beginning, PrefixIndex, PrefixMatch
from swarmllm.swarm.records.projector_index import ProjectorIndex, Projectors
from swarmllm.swarm.router import Router
from swarmllm_proto.codec import decode_record
from swarmllm_proto.errors import BadMessage, ProtocolError
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.node_load import decode_load, with_load
from swarmllm_proto.swarm import FileAnnounce, NodeRecord, ProjectorAnnounce, ShardAnnounce

if TYPE_CHECKING:
    from trio_typing import TaskStatus

log = logging.getLogger(__name__)


LISTED_MAX = 256
"""Models of the swarm in one list. How many there are is for strangers to decide."""


@dataclass(eq=False, slots=True)
class Announced:
    """What a node has announced about itself."""

    content: bytes | None = None
    """As it came last, whether it could be read or not."""
    record: NodeRecord | None = None
    """The last that could be read, with what the node has said since of its load."""
    load: bytes | None = None
    """As it came last since that record."""
    is_distrusted: bool = False
    """It is reachable, has a record and may not work."""


@dataclass(frozen=True, slots=True)
class RegistryParts:
    """What the registry keeps of each node, this one included."""

    announced: Parts[Announced] = field(default_factory=Parts.alone)
    present: Parts[Announced] = field(default_factory=Parts.alone)
    """The same, of the nodes that the registry has been told are reachable."""
    distrusted: Parts[bool] = field(default_factory=Parts.alone)
    """To find those that are, without a look at all."""
    indexed: Parts[IndexedRecord] = field(default_factory=Parts.alone)
    prefixes: Parts[tuple[Beginning, ...]] = field(default_factory=Parts.alone)
    projectors: Parts[Projectors] = field(default_factory=Parts.alone)
    departed: PassingParts[Departed] = field(default_factory=PassingParts.alone)
    gave_up: PassingParts[GaveUp] = field(default_factory=PassingParts.alone)


class Registry:
    def __init__(
        self,
        node_id: NodeId,
        trust: NodeTrust | None = None,
        share_min: float = 0.0,
        parts: RegistryParts | None = None,
    ) -> None:
        """`trust`: the offers of nodes that may work (see trust.py) count, and a node that gives a model of
        this node another number of layers is noted, once per announcement, which is ignored. `share_min`: the
        score from which a node's announcements of kept KV count."""
        self._node_id = node_id
        self._trust = trust = trust or NeutralTrust()
        self._share_min = share_min
        parts = parts or RegistryParts()
        self._announced = parts.announced
        self._loaded: set[NodeId] = set()
        self._present = parts.present
        self._distrusted = parts.distrusted
        self._prefixes = PrefixIndex(peers=parts.prefixes)
        self._projectors = ProjectorIndex(peers=parts.projectors)
        self._index = ModelIndex(node_id, trust.note, parts.indexed)
        self._announcers_of: dict[ModelId, set[NodeId]] = {}
        self._listed: tuple[object, Sequence[ModelId]] | None = None
        self.departures = Departures(parts.departed, parts.gave_up)
        """Kept by the object that tells the registry who is reachable."""

    def __repr__(self) -> str:
        return f"<Registry records={len(self._announced)} reachable={len(self._present)}>"

    def apply(self, node_id: NodeId, record: bytes) -> NodeRecord:
        """Take over what `node_id` says about itself; a bad record leaves its last good one in place.

        Raises swarmllm_proto.errors.ProtocolError, naming the field: undecodable, or another node's.
        """
        announced = self._announced.put(node_id, self._node(node_id))
        announced.content, announced.load = record, None
        self._loaded.discard(node_id)
        decoded = decode_record(record)
        if decoded.node_id != node_id:
            raise BadMessage("node_id", f"{node_id} may not write the record of {decoded.node_id}")
        self._note_models(node_id, announced.record, decoded)
        announced.record = decoded
        self._prefixes.put(node_id, decoded.prefix_caches)
        self._projectors.put(node_id, decoded.projectors or ())
        self._place(node_id)
        return decoded

    def apply_load(self, node_id: NodeId, load: bytes) -> None:
        """Take over what `node_id` has said of its load since its record; without one it means nothing.

        Raises swarmllm_proto.errors.ProtocolError, naming the field.
        """
        announced = self._announced.get(node_id)
        if announced is None or announced.record is None:
            return
        announced.load = load
        self._loaded.add(node_id)
        announced.record = with_load(announced.record, decode_load(load))
        self._place(node_id)

    def load(self, node_id: NodeId) -> bytes | None:
        """What was applied last since the node's record, as it came."""
        announced = self._announced.get(node_id)
        return announced.load if announced else None

    def loaded(self) -> frozenset[NodeId]:
        """The nodes of which a load was applied since their record."""
        return frozenset(self._loaded)

    def forget(self, node_id: NodeId) -> None:
        self._loaded.discard(node_id)
        if (announced := self._announced.drop(node_id)) is not None:
            self._note_models(node_id, announced.record, None)
            announced.content = announced.record = None
        self._prefixes.forget(node_id)
        self._projectors.forget(node_id)
        self._place(node_id)

    def set_reachable(self, node_ids: Iterable[NodeId]) -> None:
        now = frozenset(node_ids)
        for node_id in self.reachable() ^ now:
            self.set_present(node_id, node_id in now)

    def set_present(self, node_id: NodeId, is_present: bool) -> None:
        """Whether that node is reachable."""
        if is_present:
            self._present.put(node_id, self._node(node_id))
        else:
            self._present.drop(node_id)
        self._place(node_id)

    def reachable(self) -> frozenset[NodeId]:
        """As it has been told."""
        return frozenset(self._present)

    def announcers(self) -> list[NodeId]:
        """Whose records have come, whether they could be read or not."""
        return list(self._announced)

    def announcers_of(self, model_id: ModelId) -> Collection[NodeId]:
        """Nodes whose last record says that they hold layers of a model, reachable or not, trusted or not. Of
        each node NODE_MODELS_MAX models count."""
        return self._announcers_of.get(model_id, ())

    def _note_models(self, node_id: NodeId, old: NodeRecord | None, new: NodeRecord | None) -> None:
        before, now = (
            {each.model_id for each in record.models[:NODE_MODELS_MAX]} if record is not None else set()
            for record in (old, new)
        )
        for model_id in before - now:
            nodes = self._announcers_of[model_id]
            nodes.remove(node_id)
            if not nodes:
                del self._announcers_of[model_id]
        for model_id in now - before:
            self._announcers_of.setdefault(model_id, set()).add(node_id)

    def content(self, node_id: NodeId) -> bytes | None:
        """The record that was applied last, as it came."""
        announced = self._announced.get(node_id)
        return announced.content if announced else None

    @property
    def version(self) -> int:
        """Another number after every change of what the nodes that count hold or give."""
        return self._index.version

    def node(self, node_id: NodeId) -> NodeRecord | None:
        """The last record heard of a node, reachable or not."""
        announced = self._announced.get(node_id)
        return announced.record if announced else None

    def announced(self, model_id: ModelId, node_id: NodeId) -> ShardAnnounce | None:
        """What the node's last record says of its layers of the model."""
        record = self.node(node_id)
        models = record.models if record is not None else ()
        return next((each for each in models if each.model_id == model_id), None)

    def working_nodes(self) -> dict[NodeId, NodeRecord]:
        """The records of this node and of those that are reachable and may work."""
        self._settle_all()
        return self._index.records()

    def nodes(self) -> Mapping[NodeId, NodeRecord]:
        """Every record heard, reachable or not."""
        return {n: each.record for n, each in self._announced.items() if each.record is not None}

    def holders(self, model_id: ModelId) -> list[Holder]:
        """Ranges that are ready on reachable nodes and this one, ordered by range, then node id."""
        return sorted(
            (Holder(layers, node_id) for node_id, held in self.held(model_id).items() for layers in held),
            key=lambda holder: (holder.layers.start, holder.layers.end, holder.node_id),
        )

    def held(self, model_id: ModelId) -> Mapping[NodeId, tuple[LayerRange, ...]]:
        """The same by node, in no particular order; of each node at most
        `model_index.NODE_RANGES_MAX` ranges."""
        self._settle_for(model_id)
        return self._index.held(model_id)

    def model(self, model_id: ModelId) -> SwarmModel | None:
        """What reachable nodes and this one hold or have files of, of one model. The same object until
        something about it changes.

        The id fixes the number of layers, so nodes can only disagree about it when one lies or errs: this
        node's own word wins, else the most frequent. Names are free: same rule.
        """
        self._settle_for(model_id)
        return self._index.model(model_id)

    def listed(self, limit: int = LISTED_MAX) -> Sequence[ModelId]:
        """Ids of models that reachable nodes and this node hold or have files of. Where there are more than
        `limit`, nodes take turns: the first model of each, then the second of each, this node first. So no
        node's announcements push out those of others."""
        self._settle_all()
        key = (self._index.version, limit)
        if self._listed is None or self._listed[0] != key:
            self._listed = key, self._index.fair_choice(limit)
        return self._listed[1]

    def as_listed(self, model_id: ModelId) -> SwarmModel | None:
        """`model` without another look at who is trusted: right after `listed`."""
        return self._index.model(model_id)

    def models(self, limit: int = LISTED_MAX) -> dict[ModelId, SwarmModel]:
        """All that are listed, at once; by model id."""
        found = ((model_id, self.as_listed(model_id)) for model_id in self.listed(limit))
        return {model_id: model for model_id, model in found if model is not None}

    def n_models(self) -> int:
        """How many there are in all."""
        self._settle_all()
        return len(self._index)

    def named(self, name: str, limit: int = LISTED_MAX) -> list[SwarmModel]:
        """Models of this id or, as some node calls them, of this name; by id, `limit` of them."""
        self._settle_all()
        found = sorted(itertools.islice(self._index.called(name), limit))
        models = (self._index.model(model_id) for model_id in found)
        return [model for model in models if model is not None]

    def files(self, model_id: ModelId) -> dict[NodeId, FileAnnounce]:
        """What other reachable nodes have files of, of one model: node id -> what it said."""
        self._settle_for(model_id)
        return self._index.files(model_id)

    def files_named(
        self, name_or_id: str, limit: int = LISTED_MAX
    ) -> dict[ModelId, dict[NodeId, FileAnnounce]]:
        """Model id -> node id -> what that node has of the models of which some other reachable node gives
        files under this name, or whose ids begin like this (from `MIN_ID_PREFIX` characters on)."""
        self._settle_all()
        called = itertools.chain(self._index.called(name_or_id), self._index.beginning_with(name_or_id))
        files: dict[ModelId, dict[NodeId, FileAnnounce]] = {}
        for model_id in called:
            found = self._index.files(model_id)
            if any(each.name == name_or_id for each in found.values()) or (
                found and model_id.startswith(name_or_id)
            ):
                files[model_id] = found
            if len(files) == limit:
                break
        return files

    def holders_of_prefix(self, model_id: ModelId, hashes: Sequence[bytes]) -> PrefixMatch:
        """The longest beginning of a prompt, whose complete blocks have these hashes, of which other
        reachable nodes that are trusted enough announce the KV, and those nodes."""
        return self._prefixes.longest(model_id, hashes, self._shares)

    def has_prefixes(self, model_id: ModelId) -> bool:
        """Whether any node has announced KV of this model's prompts."""
        return self._prefixes.has(model_id)

    def blocks_of_prefix(self, model_id: ModelId, hashes: Sequence[bytes]) -> dict[NodeId, int]:
        """How many first blocks of a prompt each of those nodes announces; nobody who has none."""
        return self._prefixes.blocks(model_id, hashes, self._shares)

    def may_share(self, node_id: NodeId) -> bool:
        """Whether it is trusted enough for KV to come from there or go there."""
        return self._shares(node_id)

    def n_prefixes(self, node_id: NodeId) -> int:
        """Prompts' beginnings of which that node announces the KV; 0 where its word does not count."""
        return self._prefixes.count(node_id) if self._shares(node_id) else 0

    def encoders(self, model_id: ModelId) -> dict[NodeId, ProjectorAnnounce]:
        """Which other reachable nodes that may work encode pictures for a model, and with what."""
        return self._projectors.holders(model_id, self._counts_of_others)

    def had_encoders(self, model_id: ModelId, medium: str) -> bool:
        """Whether there have been some that take this medium since the start, as far as `encoders` was
        asked."""
        return self._projectors.had_holders(model_id, medium)

    def _counts_of_others(self, node_id: NodeId) -> bool:
        return node_id != self._node_id and self._counts(node_id)

    def _shares(self, node_id: NodeId) -> bool:
        return self._counts_of_others(node_id) and self._trust.score(node_id) >= self._share_min

    def _settle(self, node_ids: Iterable[NodeId]) -> None:
        """Bring the index in line with the trust of now."""
        find = self._announced.get
        changed = [
            node_id
            for node_id in node_ids
            if (announced := find(node_id)) is not None and announced.is_distrusted == self._may_work(node_id)
        ]
        for node_id in changed:
            self._place(node_id)

    def _settle_all(self) -> None:
        self._settle(self._present)

    def _settle_for(self, model_id: ModelId) -> None:
        """For one model: only its announcers can leave it, and only a distrusted node can enter."""
        self._settle([*self._index.announcers(model_id), *self._distrusted])

    def _place(self, node_id: NodeId) -> None:
        """What the node says now counts in full or not at all."""
        node = self._node(node_id)
        record = node.record
        counts = record is not None and self._counts(node_id)
        node.is_distrusted = record is not None and node_id in self._present and not counts
        if node.is_distrusted:
            self._distrusted.put(node_id, True)
        else:
            self._distrusted.drop(node_id)
        self._index.put(node_id, record if counts else None)

    def _node(self, node_id: NodeId) -> Announced:
        return self._announced.get(node_id) or self._present.get(node_id) or Announced()

    def _may_work(self, node_id: NodeId) -> bool:
        return may_work(self._trust.score(node_id))

    def _counts(self, node_id: NodeId) -> bool:
        return node_id == self._node_id or (node_id in self._present and self._may_work(node_id))


async def follow_router(
    registry: Registry, router: Router, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Keep the registry in step with the router. Runs for ever; started once the registry holds everything
    the router knew at the call.

    On any change it looks at all records, not only at the one the change names: changes may be lost when
    their reader is slow, records never are, and comparing a few thousand identities takes well under a
    millisecond. Between two records that it takes over, other tasks run: one record is at most
    `limits.RECORD_MAX` bytes, but how many come at once is not bounded.
    """
    async with router.changes() as changes:
        await _catch_up(registry, router)
        task_status.started()
        async for _ in changes:
            await _catch_up(registry, router)


async def _catch_up(registry: Registry, router: Router) -> None:
    records = dict(router.records().items())
    await _take_over_reachable(registry, router)
    for node_id in [each for each in registry.announcers() if each not in records]:
        registry.forget(node_id)
    for node_id in [n for n, record in records.items() if registry.content(n) is not record]:
        before = registry.node(node_id)
        _apply(registry.apply, node_id, records[node_id])
        registry.departures.record_replaced(node_id, before, registry.node(node_id), trio.current_time())
        await trio.lowlevel.checkpoint()
    loads = router.loads()
    for node_id, load in loads.items():
        if registry.load(node_id) is not load:
            _apply(registry.apply_load, node_id, load)
            await trio.lowlevel.checkpoint()
    for node_id in registry.loaded() - loads.keys():
        # What it said on its data connection counts no more, now that there is none.
        if (content := registry.content(node_id)) is not None:
            _apply(registry.apply, node_id, content)
            await trio.lowlevel.checkpoint()
    await _take_over_reachable(registry, router)


async def _take_over_reachable(registry: Registry, router: Router) -> None:
    """One node at a time, those that have left first: each takes its announcements along."""
    known, now = registry.reachable(), router.reachable()
    for node_id in (*(known - now), *(now - known)):
        registry.set_present(node_id, node_id in now)
        if node_id in now:
            registry.departures.came(node_id)
        else:
            registry.departures.left(node_id, registry.node(node_id), trio.current_time(), time.time())
        await trio.lowlevel.checkpoint()


def _apply(apply: Callable[[NodeId, bytes], object], node_id: NodeId, record: bytes) -> None:
    try:
        apply(node_id, record)
    except ProtocolError as error:
        provoked_by(log, node_id).warning("record of node %s refused: %s", node_id, error)
