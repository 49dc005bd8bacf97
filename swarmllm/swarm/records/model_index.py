"""Indexes announcements by model: pure state that costs, per record, what differs from the node's last one.

What one node can put in here is bounded by its record: `NODE_MODELS_MAX` models, the ones ready to run first,
and `NODE_RANGES_MAX` ranges of each. A model is what its announcers say of it: it is worked out when it is
asked for and kept until one of them says something else.

What there is one of for each announcement is a Struct that no garbage collection looks at: 256 nodes that
announce 256 models each would make every full collection take longer than a token. None of them is ever part
of a cycle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, zip_longest
from operator import itemgetter
from typing import Final

import msgspec

from swarmllm.models.catalogue import MIN_ID_PREFIX
from swarmllm.models.layers import LayerRange
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.trust import Note, TrustEvent
from swarmllm_proto.identifiers import ModelId, NodeId, is_model_id
from swarmllm_proto.swarm import FileAnnounce, NodeRecord, ShardAnnounce

NODE_MODELS_MAX: Final = 256
"""Of one node, loaded and on disk together."""
NODE_RANGES_MAX: Final = 16
"""Of one node and one model. What a node holds end to end is one range; of more than these the widest
count."""


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """One contiguous range that one connected node (or this one) has ready to run."""

    layers: LayerRange
    node_id: NodeId


@dataclass(frozen=True)
class SwarmModel:
    """A model of which connected nodes hold layers, or have files to give."""

    model_id: ModelId
    name: str
    n_layers: int
    held: Mapping[NodeId, tuple[LayerRange, ...]]
    """By node id, what is ready to run there."""
    sources: tuple[NodeId, ...]
    """Other nodes that give its files, sorted."""

    @cached_property
    def holders(self) -> tuple[Holder, ...]:
        """Ordered by range, then node id."""
        found = (Holder(layers, node_id) for node_id, held in self.held.items() for layers in held)
        return tuple(sorted(found, key=lambda each: (each.layers.start, each.layers.end, each.node_id)))


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A node gives a model of this node another number of layers: the id is a hash that fixes it."""

    node_id: NodeId
    model_id: ModelId
    said: int
    known: int

    def __str__(self) -> str:
        return f"it gives model {self.model_id[:12]} {self.said} layers, which has {self.known}"


class _Announced(msgspec.Struct, frozen=True, gc=False):
    """What one node announces of one model."""

    n_layers: int
    ready: ShardAnnounce | None
    files: FileAnnounce | None
    nickname: str

    @property
    def names(self) -> set[str]:
        return {each.name for each in (self.ready, self.files) if each is not None}


@dataclass(eq=False, slots=True)
class IndexedRecord:
    """A node's record that is in the index, and what the index took from it."""

    node_id: NodeId
    record: NodeRecord
    said: dict[ModelId, _Announced] = field(default_factory=dict)
    """By model id, in the order in which the node names them."""
    ranges: dict[ModelId, tuple[LayerRange, ...]] = field(default_factory=dict)
    """The held ranges in `said`, made when they are asked for. The same object as long as the node says the
    same: readers look only at what has changed."""


class _Model(msgspec.Struct, gc=False):
    nodes: dict[IndexedRecord, None] = msgspec.field(default_factory=dict)
    """Those that announce it, in the order in which they did."""
    view: SwarmModel | None = None
    """None: to be worked out."""


class ModelIndex:
    def __init__(
        self,
        node_id: NodeId,
        note: Note,
        peers: Parts[IndexedRecord] | None = None,
    ) -> None:
        self._node_id = node_id
        self._note = note
        self._models: dict[ModelId, _Model] = {}
        self._nodes: Parts[IndexedRecord] = Parts.alone() if peers is None else peers
        self._ids_of: dict[str, dict[ModelId, int]] = {}
        """Name -> model id -> how many nodes call it so."""
        self._ids_with: dict[str, set[ModelId]] = {}
        """The first MIN_ID_PREFIX characters of an id -> ids."""
        self.version = 0
        self.n_touched = 0
        """Entries that were put, replaced or taken out, in all: what the index has had to do."""

    def __len__(self) -> int:
        return len(self._models)

    def records(self) -> dict[NodeId, NodeRecord]:
        """Those that are in here."""
        return {node_id: indexed.record for node_id, indexed in self._nodes.items()}

    def put(self, node_id: NodeId, record: NodeRecord | None) -> None:
        """All that the node says now, or nothing."""
        indexed = self._nodes.get(node_id)
        if record is (indexed and indexed.record):
            return
        if indexed is None:
            if record is None:
                return
            indexed = self._nodes.put(node_id, IndexedRecord(node_id, record))
        before = indexed.said
        if record is None:
            after = {}
            self._nodes.drop(node_id)
        else:
            after, indexed.record = _said(record), record
        indexed.said = after
        for model_id, said in before.items():
            if after.get(model_id) != said:
                self._take_out(indexed, model_id, said)
        for model_id, said in after.items():
            if before.get(model_id) != said:
                self._put_in(indexed, model_id, said)
        if list(before) != list(after):
            self.version += 1

    def announcers(self, model_id: ModelId) -> Iterable[NodeId]:
        model = self._models.get(model_id)
        return [indexed.node_id for indexed in model.nodes] if model else ()

    def held(self, model_id: ModelId) -> Mapping[NodeId, tuple[LayerRange, ...]]:
        model = self._models.get(model_id)
        if model is None:
            return {}
        held = {}
        for indexed, said in self._true(model_id, model):
            if said.ready is not None:
                if (ranges := indexed.ranges.get(model_id)) is None:
                    ranges = indexed.ranges[model_id] = _ranges(said.ready)
                if ranges:
                    held[indexed.node_id] = ranges
        return held

    def files(self, model_id: ModelId) -> dict[NodeId, FileAnnounce]:
        model = self._models.get(model_id)
        said = self._true(model_id, model) if model else ()
        return {
            indexed.node_id: each.files
            for indexed, each in said
            if each.files is not None and indexed.node_id != self._node_id
        }

    def model(self, model_id: ModelId) -> SwarmModel | None:
        model = self._models.get(model_id)
        if model is None:
            return None
        if model.view is None:
            model.view = self._view(model_id, model)
        return model.view

    def called(self, name_or_id: str) -> Iterator[ModelId]:
        if is_model_id(name_or_id) and name_or_id in self._models:
            yield name_or_id
        yield from (m for m in self._ids_of.get(name_or_id, ()) if m != name_or_id)

    def beginning_with(self, prefix: str) -> Iterator[ModelId]:
        if len(prefix) >= MIN_ID_PREFIX:
            ids = self._ids_with.get(prefix[:MIN_ID_PREFIX], ())
            yield from (model_id for model_id in ids if model_id.startswith(prefix))

    def fair_choice(self, limit: int) -> list[ModelId]:
        """`limit` model ids, one of each node in turn, this node's first."""
        if len(self._models) <= limit:
            return list(self._models)
        own = self._nodes.get(self._node_id)
        chosen = dict.fromkeys(islice(own.said if own else (), limit))
        others = [iter(indexed.said) for _, indexed in sorted(self._nodes.items(), key=itemgetter(0))]
        for turn in zip_longest(*others):
            for model_id in turn:
                if len(chosen) >= limit:
                    return list(chosen)
                if model_id is not None:
                    chosen[model_id] = None
        return list(chosen)

    def _own(self, model_id: ModelId) -> _Announced | None:
        own = self._nodes.get(self._node_id)
        return own.said.get(model_id) if own is not None else None

    def _true(self, model_id: ModelId, model: _Model) -> Iterator[tuple[IndexedRecord, _Announced]]:
        """The announcements that do not contradict this node, where it knows the number of layers."""
        own = self._own(model_id)
        for indexed in model.nodes:
            said = indexed.said[model_id]
            if own is None or said.n_layers == own.n_layers:
                yield indexed, said

    def _blame(self, indexed: IndexedRecord, model_id: ModelId, model: _Model) -> None:
        own = self._own(model_id)
        for other in model.nodes if indexed.node_id == self._node_id else (indexed,):
            said = other.said[model_id].n_layers
            if own is not None and said != own.n_layers:
                contradiction = Contradiction(other.node_id, model_id, said, own.n_layers)
                self._note(other.node_id, TrustEvent.BROKE_PROTOCOL, str(contradiction))

    def _put_in(self, indexed: IndexedRecord, model_id: ModelId, said: _Announced) -> None:
        model = self._models.get(model_id)
        if model is None:
            model = self._models[model_id] = _Model()
            self._ids_with.setdefault(model_id[:MIN_ID_PREFIX], set()).add(model_id)
        model.nodes[indexed] = None
        model.view = None
        for name in said.names:
            ids = self._ids_of.setdefault(name, {})
            ids[model_id] = ids.get(model_id, 0) + 1
        self._touched()
        self._blame(indexed, model_id, model)

    def _take_out(self, indexed: IndexedRecord, model_id: ModelId, said: _Announced) -> None:
        model = self._models[model_id]
        del model.nodes[indexed]
        indexed.ranges.pop(model_id, None)
        model.view = None
        for name in said.names:
            ids = self._ids_of[name]
            ids[model_id] -= 1
            if not ids[model_id]:
                del ids[model_id]
            if not ids:
                del self._ids_of[name]
        if not model.nodes:
            del self._models[model_id]
            ids_with = self._ids_with[model_id[:MIN_ID_PREFIX]]
            ids_with.remove(model_id)
            if not ids_with:
                del self._ids_with[model_id[:MIN_ID_PREFIX]]
        self._touched()

    def _touched(self) -> None:
        self.version += 1
        self.n_touched += 1

    def _view(self, model_id: ModelId, model: _Model) -> SwarmModel:
        said: Counter[tuple[str, int]] = Counter()
        for writer, each in self._true(model_id, model):
            for name in each.names:
                is_own = writer.node_id == self._node_id
                said[name, each.n_layers] += 2 * len(model.nodes) + 1 if is_own else 1
        (name, n_layers), _ = min(said.items(), key=lambda vote: (-vote[1], vote[0]))
        n_layers_of = {indexed.node_id: each.n_layers for indexed, each in self._true(model_id, model)}
        fitting = {
            # The same object where nothing is left out: readers look only at what has changed.
            node_id: ranges
            if n_layers_of[node_id] <= n_layers
            else tuple(layers for layers in ranges if layers.end <= n_layers)
            for node_id, ranges in self.held(model_id).items()
        }
        held = {node_id: ranges for node_id, ranges in fitting.items() if ranges}
        return SwarmModel(model_id, name, n_layers, held, tuple(sorted(self.files(model_id))))


def _said(record: NodeRecord) -> dict[ModelId, _Announced]:
    """A model that is named twice counts as it is named first, and so does its number of layers."""
    ready: dict[ModelId, ShardAnnounce] = {}
    for shard in record.models:
        ready.setdefault(shard.model_id, shard)
    files: dict[ModelId, FileAnnounce] = {}
    for file in record.files:
        shown = ready.get(file.model_id)
        if shown is None or shown.n_layers == file.n_layers:
            files.setdefault(file.model_id, file)
    ids = islice(dict.fromkeys((*ready, *files)), NODE_MODELS_MAX)
    return {
        m: _Announced((ready.get(m) or files[m]).n_layers, ready.get(m), files.get(m), record.nickname)
        for m in ids
    }


def _ranges(ready: ShardAnnounce) -> tuple[LayerRange, ...]:
    pairs = set(ready.ranges)
    if len(pairs) > NODE_RANGES_MAX:
        pairs = set(sorted(pairs, key=lambda pair: (pair[0] - pair[1], pair))[:NODE_RANGES_MAX])
    return tuple(LayerRange(start, end) for start, end in sorted(pairs))
