"""Describes a node, its models and its peers as dataclasses, which `api` turns into JSON.

A `ModelView` is one model as this node sees it: from its catalogue, its workers, and what the swarm says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import trio

from swarmllm.downloads import WaitingView
from swarmllm.errors import InvalidRequest
from swarmllm.models import CatalogueEntry, LayerRange, merge
from swarmllm.scheduling.candidates import runnable
from swarmllm.scheduling.route import is_complete, missing_layers
from swarmllm.swarm.peers.trust import Explanation, TrustEvent
from swarmllm.swarm.peers.trust_keeper import Trust
from swarmllm.swarm.records.departures import Departed
from swarmllm.swarm.records.projector_index import taken
from swarmllm.swarm.records.registry import Registry, SwarmModel
from swarmllm.swarm.router import PeerInfo, Router
from swarmllm.transfer.model_transfer import announcement
from swarmllm.workerpool.settings import LoadOptions, ModelMemory
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.swarm import FileAnnounce, NodeRecord, ProjectorAnnounce

Ranges = tuple[LayerRange, ...]
ID_END_MIN = 6
"""Characters of a node id's end that stand for it; the start is the same for all."""


@dataclass(frozen=True, slots=True)
class Readiness:
    status: Literal["starting", "ready", "failed", "stopping"]
    reason: str = ""


class ProjectorTrouble(NamedTuple):
    """Why this node does not encode for a model."""

    cause: str
    remedy: str
    """What to do about it, with the command."""


@dataclass(frozen=True, slots=True)
class HolderView:
    node_id: NodeId
    nickname: str
    layers: tuple[LayerRange, ...]
    is_self: bool


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model of the catalogue (then `entry` is there) or one that only other nodes have."""

    model_id: ModelId | Literal[""]
    name: str
    n_layers: int
    entry: CatalogueEntry | None
    files: FileAnnounce | None
    """What of it lies on this node's disk."""
    sources: tuple[str, ...]
    """Other connected nodes that give its files."""
    loaded: tuple[LayerRange, ...]
    memory: ModelMemory
    settings: LoadOptions | None
    """With which it is loaded here."""
    holders: tuple[HolderView, ...]
    missing: tuple[LayerRange, ...]
    """Layers that no connected node holds."""
    complete: bool
    """A request would find a pipeline now."""
    trouble: str = ""
    """What is wrong with its file, where layers are loaded here: they run on, but cannot be loaded again."""
    projector_trouble: ProjectorTrouble | None = None
    """Where it has, or was to have, a projector."""
    is_projector_open: bool = False
    """A process of this node has it open."""
    encoders: tuple[NodeId, ...] = ()
    """Other connected nodes that encode pictures or sounds for it, sorted."""
    takes: frozenset[str] = frozenset()
    """What a request to this node may have besides text: "picture", "sound"."""
    waiting: WaitingView | None = None
    """Only some layers of a file are here, and it is not known yet which model they are of; then there is no
    `model_id`."""

    @property
    def takes_pictures(self) -> bool:
        return "picture" in self.takes

    @property
    def takes_sounds(self) -> bool:
        return "sound" in self.takes


@dataclass(frozen=True, slots=True)
class PeerView:
    info: PeerInfo
    record: NodeRecord | None
    """None until the peer has said something about itself."""
    trust: float
    n_damaged: int = 0
    """Jobs that arrived from it with a wrong digest, and so were sent again."""
    n_prefixes: int = 0
    """Prompts' beginnings of which it announces the KV, where it is trusted enough."""


@dataclass(frozen=True, slots=True)
class PeerDetails:
    """One node, whether connected or only remembered."""

    node_id: NodeId
    connected: PeerView | None
    record: NodeRecord | None
    trust: Explanation


@dataclass(slots=True)
class RequestCounts:
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    generated_tokens: int = 0

    def count(self, outcome: Literal["completed", "failed", "cancelled"]) -> None:
        setattr(self, outcome, getattr(self, outcome) + 1)


@dataclass(frozen=True, slots=True)
class Coverage:
    """Who holds which layers of one model, and what that comes to."""

    holders: tuple[HolderView, ...]
    missing: tuple[LayerRange, ...]
    complete: bool


class _Holding(NamedTuple):
    """The layers of a model that one node holds, as announced and as counted."""

    said: Ranges
    merged: Ranges
    runnable: Ranges


@dataclass(frozen=True, slots=True)
class _Known:
    """A coverage and the inputs that it was computed from."""

    model: SwarmModel | None
    facts: tuple[object, ...]
    holdings: Mapping[NodeId, _Holding]
    coverage: Coverage


class Nicknames(Protocol):
    def nickname_of(self, node_id: NodeId) -> str:
        """This node's or another one's; empty where it is not known."""
        ...


class Coverages:
    """The coverage of each model, worked out again only after something about it has changed, and then only
    for the nodes of which it has changed."""

    def __init__(self, node_id: NodeId, nicknames: Nicknames) -> None:
        self._node_id = node_id
        self._nicknames = nicknames
        self._known: dict[ModelId | None, _Known] = {}
        self.n_made = 0

    def of(
        self,
        model_id: ModelId | None,
        model: SwarmModel | None,
        n_layers: int,
        alignment: int,
        loaded: Ranges,
    ) -> Coverage:
        """`loaded`: this node's own ranges, as its pool has them; its record may still be on its way to the
        registry."""
        facts = (n_layers, alignment, loaded)
        known = self._known.get(model_id)
        if known is None or known.model is not model or known.facts != facts:
            known = self._known[model_id] = self._make(model, n_layers, alignment, loaded, known)
        return known.coverage

    def keep(self, model_ids: Iterable[ModelId]) -> None:
        """Forget all others."""
        self._known = {m: self._known[m] for m in model_ids if m in self._known}

    def _order(self, held: tuple[str, Ranges]) -> tuple[bool, int, int, str]:
        """This node first, then by where the layers begin."""
        node_id, ranges = held
        return node_id != self._node_id, ranges[0].start, ranges[0].end, node_id

    def _make(
        self,
        model: SwarmModel | None,
        n_layers: int,
        alignment: int,
        loaded: Ranges,
        last: _Known | None,
    ) -> _Known:
        self.n_made += 1
        facts = (n_layers, alignment, loaded)
        is_same_model = last is not None and last.facts[:2] == facts[:2]
        before = last.holdings if last is not None and is_same_model else {}
        held: dict[NodeId, Ranges] = {self._node_id: loaded} if loaded else {}
        held |= {n: ranges for n, ranges in (model.held if model else {}).items() if n != self._node_id}
        holdings = {
            node_id: known
            if (known := before.get(node_id)) is not None and known.said is said
            else _Holding(said, merge(said), runnable(said, n_layers, alignment))
            for node_id, said in sorted(held.items(), key=self._order)
        }
        nickname_of = self._nicknames.nickname_of
        coverage = Coverage(
            tuple(
                HolderView(holder, nickname_of(holder), holding.merged, holder == self._node_id)
                for holder, holding in holdings.items()
            ),
            missing_layers(n_layers, {layers for each in holdings.values() for layers in each.merged}),
            is_complete(n_layers, alignment, {node: each.runnable for node, each in holdings.items()}),
        )
        return _Known(model, facts, holdings, coverage)


def view_model(
    entry: CatalogueEntry | None,
    model: SwarmModel | None,
    coverages: Coverages,
    *,
    loaded: tuple[LayerRange, ...],
    memory: ModelMemory,
    settings: LoadOptions | None,
    encoders: Mapping[NodeId, ProjectorAnnounce] | None = None,
    is_projector_open: bool = False,
) -> ModelView:
    """`loaded` as `Coverages.of` has it."""
    n_layers = entry.manifest.n_layers if entry else model.n_layers if model else 0
    alignment = entry.manifest.cut_alignment if entry else 1
    model_id = entry.model_id if entry else model.model_id if model else None
    coverage = coverages.of(model_id, model, n_layers, alignment, loaded)
    return ModelView(
        model_id=model_id or "",
        name=entry.name if entry else model.name if model else "",
        n_layers=n_layers,
        entry=entry,
        files=announcement(entry) if entry else None,
        sources=model.sources if model else (),
        loaded=loaded,
        memory=memory,
        settings=settings,
        holders=coverage.holders,
        missing=coverage.missing,
        complete=coverage.complete,
        is_projector_open=is_projector_open,
        encoders=tuple(sorted(encoders or ())),
        takes=_takes(entry, encoders or {}),
    )


def _takes(entry: CatalogueEntry | None, encoders: Mapping[NodeId, ProjectorAnnounce]) -> frozenset[str]:
    elsewhere = frozenset[str](each for said in encoders.values() for each in taken(said))
    return elsewhere | (entry.projector.takes if entry is not None and entry.projector is not None else set())


def view_waiting(waiting: WaitingView) -> ModelView:
    return ModelView(
        model_id="",
        name=waiting.name,
        n_layers=waiting.n_layers,
        entry=None,
        files=None,
        sources=(),
        loaded=(),
        memory=ModelMemory(),
        settings=None,
        holders=(),
        missing=(LayerRange(0, waiting.n_layers),),
        complete=False,
        waiting=waiting,
    )


class PeerLookup:
    """Finds other nodes by id, by the end of an id, or by nickname."""

    def __init__(self, router: Router, registry: Registry, trust: Trust) -> None:
        self._router = router
        self._registry = registry
        self._trust = trust

    def peers(self) -> tuple[PeerView, ...]:
        """The connected ones."""
        return tuple(
            PeerView(
                info,
                self._registry.node(info.node_id),
                self._trust.score(info.node_id),
                self._trust.count(info.node_id, TrustEvent.DAMAGED),
                self._registry.n_prefixes(info.node_id),
            )
            for info in self._router.peers()
        )

    def departed(self) -> tuple[Departed, ...]:
        """Those that left lately, the latest first."""
        return self._registry.departures.view(trio.current_time())

    def show(self, name: str) -> PeerDetails:
        """Everything about one node, connected or not. Raises InvalidRequest where the name means none, or
        several."""
        node_id = self._find(name.removeprefix("…"))
        connected = {view.info.node_id: view for view in self.peers()}
        return PeerDetails(
            node_id, connected.get(node_id), self._registry.node(node_id), self._trust.explain(node_id)
        )

    def _find(self, name: str) -> NodeId:
        records = self._registry.nodes()
        known = {*records, *self._router.connected(), *self._trust.known()} - {self._router.node_id}
        if name in known:
            return NodeId(name)
        named = [n for n in known if (record := records.get(n)) is not None and record.nickname == name]
        if not named and len(name) >= ID_END_MIN:
            named = [n for n in known if n.endswith(name)]
        if len(named) == 1:
            return named[0]
        if named:
            raise InvalidRequest(f"{len(named)} nodes are called {name!r}: use a node id.", field="peer")
        raise InvalidRequest(f"No node {name!r} is known here; see swarmllm peers.", field="peer")
