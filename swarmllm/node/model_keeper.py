"""The models of this node, and the operations of its user that load, unload, add and remove them.

Joins the catalogue (models on disk), the worker pool (loaded layers), the transfer of models between nodes
and the registry (layers of other nodes); each change is announced to the swarm.
"""

from __future__ import annotations

import logging
import shlex
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import trio

from swarmllm.downloads import SharedDigests
from swarmllm.downloads.published_files import PublishedFiles
from swarmllm.errors import (
    BadModel,
    Conflict,
    InvalidRequest,
    ModelNotFound,
    SwarmLLMError,
    WorkerError,
)
from swarmllm.guide import GUIDE_PATH
from swarmllm.models import Catalogue, CatalogueEntry, LayerRange
from swarmllm.models.manifest import is_listed, is_text_encoder, needs_check, with_verdict
from swarmllm.models.presets import NO_PRESET, Preset, Presets
from swarmllm.models.projector import read_projector
from swarmllm.node.model_access import Sources, unseen
from swarmllm.node.on_demand import OUT_OF_MEMORY
from swarmllm.node.projectors import ProjectorKeeper
from swarmllm.node.remembered_loads import RememberedLoads
from swarmllm.node.views import Coverages, ModelView, Nicknames, view_model, view_waiting
from swarmllm.swarm.records.registry import Registry, SwarmModel
from swarmllm.transfer import ModelTransfer
from swarmllm.workerpool import AS_CONFIGURED, LoadOptions, ModelFile, WorkerPool
from swarmllm.workerpool.cut_check import engine_version
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.swarm import ProjectorAnnounce

log = logging.getLogger("swarmllm.node")
Progress = Callable[[int, int], None]
Then = Callable[[], Awaitable[object]]
_Views = list[ModelView]
"""By a name of its own: `ModelKeeper.list` hides the other."""


async def _nothing(model_id: ModelId) -> None:
    """Nobody loads models for requests."""


def _what_makes_room(name: str) -> str:
    name = shlex.quote(name)
    return (
        f"`swarmllm share {name}` distributes the model over the nodes of the swarm, "
        f"`swarmllm models load {name} --layers START:END` loads a part of it, "
        "`swarmllm models unload OTHER` gives back what another one takes."
    )


class CutChecks:
    """Has the cuts of a model tried, as soon as this node has the whole file, at the latest when a part of it
    is to be loaded. The verdict goes into the catalogue, so that is once per model and version of the
    engine."""

    def __init__(self, pool: WorkerPool, catalogue: Catalogue) -> None:
        self._pool = pool
        self._catalogue = catalogue
        self._locks: defaultdict[str, trio.Lock] = defaultdict(trio.Lock)

    def forget(self, model_id: ModelId) -> None:
        """The model is no longer known here."""
        if model_id in self._locks and not self._locks[model_id].locked():
            del self._locks[model_id]

    def is_due(self, entry: CatalogueEntry) -> bool:
        """Whether the entry may say more about its cuts once it is tried."""
        manifest = entry.manifest
        # Those of the bundled model have tests of their own.
        if is_listed(manifest) and (not self._pool.cuts.tries_listed or entry.path == GUIDE_PATH):
            return False
        return needs_check(manifest, engine_version()) and not entry.absent(manifest.tensors)

    async def ensure(self, entry: CatalogueEntry, progress: Callable[[int, int], None]) -> CatalogueEntry:
        """The entry with what is known of its cuts, tried now where that is due. `progress` is called on the
        trio thread. Where it cannot be tried now, the entry stays as it is."""
        if not self.is_due(entry):
            return entry
        async with self._locks[entry.model_id]:
            entry = await trio.to_thread.run_sync(self._catalogue.get, entry.model_id)
            if not self.is_due(entry):
                return entry
            try:
                verdict = await self._pool.cuts.check(ModelFile.of(entry), progress)
            except SwarmLLMError as error:
                log.warning("where %s may be cut cannot be tried now: %s", entry.name, error.message)
                return entry
            if verdict.cannot_run and is_listed(entry.manifest):
                log.warning("where %s may be cut cannot be tried: %s", entry.name, verdict.whole_reason)
                return entry
            manifest = with_verdict(
                entry.manifest, verdict.cut_alignment, verdict.whole_reason, engine_version()
            )
            log.info(
                "it was tried where %s may be cut: %s",
                entry.name,
                verdict.whole_reason or f"every {verdict.cut_alignment} layers",
            )
            return await trio.to_thread.run_sync(self._catalogue.revise, entry.model_id, manifest)


class NamedPresets:
    """The presets of this node's models by name: read once from the catalogue's database, changed by its
    user."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._stored = Presets(catalogue)
        self._by_name: dict[str, Preset] | None = None
        self._reading = trio.Lock()

    async def get(self, name: str) -> Preset:
        """An empty one where there is none. Raises BadModel where the database cannot be read."""
        if self._by_name is None:
            async with self._reading:
                if self._by_name is None:
                    self._by_name = await trio.to_thread.run_sync(self._stored.all)
        return self._by_name.get(name, NO_PRESET)

    async def put(self, name: str, preset: Preset) -> None:
        """Raises ModelNotFound."""
        await trio.to_thread.run_sync(self._stored.put, name, preset)
        self._by_name = None

    async def drop(self, *names: str) -> None:
        """These names lead to no model any more."""
        await trio.to_thread.run_sync(self._stored.drop, *names)
        self._by_name = None


class KeeperNode(Nicknames, Protocol):
    """The part of the node that a keeper needs."""

    @property
    def node_id(self) -> NodeId: ...

    async def publish(self) -> None:
        """Tell the swarm what this node holds, if that has changed."""
        ...

    def giving_up(self, model_id: ModelId, layers: LayerRange) -> AbstractAsyncContextManager[None]:
        """Around an unload: requests that use the layers have gone elsewhere, as far as that can be."""
        ...

    def encoders_of(
        self, model_id: ModelId, entry: CatalogueEntry | None
    ) -> Mapping[NodeId, ProjectorAnnounce]:
        """Other nodes that encode pictures or sounds for a model; `entry`: what this node knows of it."""
        ...


class ModelKeeper:
    def __init__(
        self,
        catalogue: Catalogue,
        pool: WorkerPool,
        transfer: ModelTransfer,
        registry: Registry,
        gathering: SharedDigests,
        remembered: RememberedLoads,
        projectors: ProjectorKeeper,
        published_files: PublishedFiles,
        node: KeeperNode,
    ) -> None:
        self._node = node
        self._projectors = projectors
        self._published_files = published_files
        self._catalogue = catalogue
        self._pool = pool
        self._transfer = transfer
        self._registry = registry
        self._gathering = gathering
        self._remembered = remembered
        self.presets = NamedPresets(catalogue)
        self._cut_checks = CutChecks(pool, catalogue)
        self._untold: set[ModelId] = set()
        self._coverages = Coverages(node.node_id, node)
        self.by_hand: Callable[[ModelId, LayerRange | None], None] = lambda model_id, loaded: None
        """Told the id of a model that its user loads, unloads or removes, and the layers that were loaded."""
        self.give_up: Callable[[ModelId], Awaitable[None]] = _nothing
        """Unloads a model that was loaded for requests only, unless one is under way."""
        self.projector_by_hand: Callable[[ModelId], None] = lambda model_id: None
        """Told the id of a model whose projector its user loads or unloads."""

    async def list(self) -> tuple[ModelView, ...]:
        """This node's models, all of them, and of those that only others have at most
        `registry.LISTED_MAX`."""
        entries = {entry.model_id: entry for entry in await trio.to_thread.run_sync(self._catalogue.list)}
        listed = self._registry.listed()
        self._coverages.keep({*entries, *listed})
        views = await self._views(entries.values())
        for model_id in listed:
            # It may have gone meanwhile: others had their turn.
            if model_id not in entries and (model := self._registry.as_listed(model_id)) is not None:
                views.append(await self._in_turn(None, model))
        views += [view_waiting(waiting) for waiting in self._gathering.views()]
        return tuple(sorted(views, key=lambda view: (view.name, view.model_id)))

    def n_left_out(self) -> int:
        """Models of other nodes that `list` does not name."""
        return self._registry.n_models() - len(self._registry.listed())

    async def own(self) -> tuple[ModelView, ...]:
        """Those in this node's catalogue."""
        views = await self._views(await trio.to_thread.run_sync(self._catalogue.list))
        return tuple(sorted(views, key=lambda view: (view.name, view.model_id)))

    async def _views(self, entries: Iterable[CatalogueEntry]) -> _Views:
        return [await self._in_turn(entry) for entry in entries]

    async def _in_turn(self, entry: CatalogueEntry | None, model: SwarmModel | None = None) -> ModelView:
        """A view; others have their turn after one that had to be worked out."""
        n_made = self._coverages.n_made
        view = self._view(entry, model)
        if entry is not None:
            view = await self._with_troubles(view, entry)
        if self._coverages.n_made != n_made:
            await trio.lowlevel.checkpoint()
        return view

    async def _with_troubles(self, view: ModelView, entry: CatalogueEntry) -> ModelView:
        if view.loaded and (trouble := await trio.to_thread.run_sync(entry.trouble)):
            view = replace(view, trouble=trouble)
        if self._projectors.knows_trouble(entry):
            of_projector = await trio.to_thread.run_sync(self._projectors.trouble, entry)
            view = replace(view, projector_trouble=of_projector)
        return view

    async def get(self, name_or_id: str) -> ModelView:
        """Raises ModelNotFound, InvalidRequest (ambiguous)."""
        try:
            entry = await trio.to_thread.run_sync(self._catalogue.get, name_or_id)
        except ModelNotFound:
            if waiting := self._gathering.view(name_or_id):
                return view_waiting(waiting)
            for model in self._registry.named(name_or_id):
                if name_or_id in (model.name, model.model_id):
                    return self._view(None, model)
            raise
        return await self._with_troubles(self._view(entry), entry)

    async def add(
        self,
        path: Path,
        name: str | None,
        progress: Progress,
        checking: Progress,
        mmproj: Path | None = None,
    ) -> ModelView:
        """Hashes the file, and tries its cuts, which `checking` tells of; `progress`
        is called in a thread. `mmproj`: its projector; None: the one that is called like it, if that can be
        used. Raises BadModel, InvalidRequest, Conflict."""

        def report(done_bytes: int, total_bytes: int) -> None:
            trio.from_thread.check_cancelled()
            progress(done_bytes, total_bytes)

        given = None
        if mmproj is not None:
            given = await trio.to_thread.run_sync(read_projector, mmproj, report)
        entry = await trio.to_thread.run_sync(self._catalogue.add, path, name, report)
        entry = await self._tried_first(entry, checking)
        if given is not None:
            entry = await self._projectors.attach_read(entry, given)
        elif entry.projector is None:
            entry = await self._projectors.attach_found(entry, report)
        await self._node.publish()
        return await self._with_troubles(self._view(entry), entry)

    async def attach(self, name_or_id: str, mmproj: Path, progress: Progress) -> ModelView:
        """Let a model that is known here take pictures with this projector, also one whose file came from
        other nodes; `progress` is called in a thread. Raises ModelNotFound, BadModel."""

        def report(done_bytes: int, total_bytes: int) -> None:
            trio.from_thread.check_cancelled()
            progress(done_bytes, total_bytes)

        entry = await trio.to_thread.run_sync(self._catalogue.get, name_or_id)
        entry = await self._projectors.attach(entry, mmproj, report)
        await self._node.publish()
        return self._view(entry)

    async def attach_fetched(self, entry: CatalogueEntry, path: Path) -> CatalogueEntry:
        """Let a model take pictures with a projector that was fetched for it; the file becomes the node's.
        Raises BadModel."""
        entry = await self._projectors.take_in(entry, path)
        await self._node.publish()
        return entry

    async def load_projector(self, name_or_id: str, fetching: Progress) -> ModelView:
        """Open the model's projector and keep it open, now and after each start, and tell the swarm; where
        none is here, it is fetched from other nodes. Raises what `find` and `ProjectorKeeper.load` raise."""
        entry = await self._projectors.load(await self.find(name_or_id, far=True), fetching)
        self.projector_by_hand(entry.model_id)
        await self._node.publish()
        return self._view(entry)

    async def unload_projector(self, name_or_id: str) -> ModelView:
        """End its process, and encode no more pictures with it here. Raises ModelNotFound, Conflict (none is
        loaded)."""
        entry = await trio.to_thread.run_sync(self._catalogue.get, name_or_id)
        entry = await self._projectors.unload(entry)
        self.projector_by_hand(entry.model_id)
        await self._node.publish()
        return self._view(entry)

    async def hold_projector(self, entry: CatalogueEntry) -> None:
        """`load_projector` without the view, and without a word to who keeps what users load."""
        await self._projectors.load(await self.find(entry.model_id), unseen)
        await self._node.publish()

    async def let_go_projector(self, entry: CatalogueEntry) -> None:
        """End its process, and delete it if it was fetched."""
        await self._projectors.let_go(entry)
        await self._node.publish()

    async def unload_all(self, entry: CatalogueEntry, progress: Progress | None = None) -> ModelView:
        """All layers, and the projector. Raises Conflict (neither is loaded)."""
        projector = None
        with suppress(Conflict):
            projector = await self.unload_projector(entry.model_id)
        try:
            return await self.unload(entry, entry.manifest.whole, progress)
        except Conflict:
            if projector is None:
                raise
            return projector

    async def restore_projectors(self) -> None:
        """At the start: those that were loaded when the daemon ended."""
        await self._projectors.restore()

    async def resolve(self, name_or_id: str, layers: str | None) -> tuple[CatalogueEntry, LayerRange]:
        """What a load means; makes a model known that only other nodes have.

        Raises ModelNotFound, BadModel, InvalidRequest naming the field, and what `ModelTransfer.find` raises.
        """
        entry = await self.find(name_or_id, far=True)
        wanted = entry.manifest.whole if layers is None else LayerRange.parse(layers)
        check_layers(entry, wanted, may_cut=self._cut_checks.is_due(entry))
        return entry, wanted

    async def load(
        self,
        entry: CatalogueEntry,
        layers: LayerRange,
        progress: Progress,
        fetching: Progress,
        options: LoadOptions = AS_CONFIGURED,
    ) -> ModelView:
        """Make layers ready, now and after each start, and tell the swarm; what is not here is fetched from
        other nodes first, which `fetching` tells of. Raises BadModel, WorkerError, Conflict (layers of it are
        loaded with other options), and what `ModelTransfer.ensure` raises."""
        remember = partial(
            self._remembered.remember,
            entry.model_id,
            entry.name,
            layers,
            options,
            beside_others=bool(self._pool.loaded(entry.model_id)),
        )
        entry = await self.hold(entry, layers, progress, fetching, options, remember)
        self.by_hand(entry.model_id, layers)
        return self._view(entry)

    def is_complete(self, entry: CatalogueEntry) -> bool:
        """Whether connected nodes, this one among them, hold every layer."""
        return self._view(entry).complete

    async def verify(self, name_or_id: str, progress: Progress) -> tuple[ModelView, tuple[str, ...]]:
        """Hash what is here of a model; the names of its damaged parts. Raises ModelNotFound, BadModel."""
        entry = await trio.to_thread.run_sync(self._catalogue.get, name_or_id)
        damaged = await self._transfer.verify(entry, progress)
        return await self.get(entry.model_id), damaged

    async def alias(self, name_or_id: str, name: str) -> ModelView:
        """Let a further name lead to a model of this node. Raises ModelNotFound, InvalidRequest, Conflict
        (another model has it)."""
        view = self._view(await trio.to_thread.run_sync(self._catalogue.alias, name_or_id, name))
        await self._node.publish()
        return view

    async def pin(self, name_or_id: str, pinned: bool) -> ModelView:
        """Whether a model may be removed to make room. Raises ModelNotFound, Conflict (it never is)."""
        entry = await trio.to_thread.run_sync(self._catalogue.get, name_or_id)
        entry = await self._transfer.pin(entry, pinned)
        return self._view(entry)

    async def remove(self, name_or_id: str) -> ModelView:
        """Forget a model, delete what was fetched of it, and end its worker; of a model with several names,
        forget only the one that is given. Raises ModelNotFound, Conflict (it is loaded, or being fetched)."""
        if self._gathering.view(name_or_id):
            return view_waiting(await self._gathering.remove(name_or_id))
        if (left := await trio.to_thread.run_sync(self._catalogue.drop_name, name_or_id)) is not None:
            await self.presets.drop(name_or_id)
            await self._node.publish()
            return self._view(left)
        entry = await trio.to_thread.run_sync(self._catalogue.get, name_or_id)
        if entry.model_id in self._pool.models():
            # Who asked it has loaded nothing, and need unload nothing.
            await self.give_up(entry.model_id)
        if entry.model_id in self._pool.models():
            raise Conflict(
                f"{entry.name} is loaded; unload it first: swarmllm models unload {entry.name}", field="model"
            )
        view = self._view(entry)
        await self._transfer.remove(entry)
        await self.presets.drop(entry.name, *entry.further_names)
        await self._pool.forget(entry.model_id)
        self._cut_checks.forget(entry.model_id)
        await self._projectors.forget(entry.model_id)
        await self._remembered.forget(entry.model_id, entry.name, entry.manifest.whole)
        await self._node.publish()
        return view

    async def loaded(self, name_or_id: str, layers: str | None) -> tuple[CatalogueEntry, LayerRange]:
        """What an unload means; None: all. Raises ModelNotFound, InvalidRequest."""
        entry = await trio.to_thread.run_sync(self._catalogue.get, name_or_id)
        gone = entry.manifest.whole if layers is None else LayerRange.parse(layers)
        check_layers(entry, gone)
        return entry, gone

    async def unload(
        self, entry: CatalogueEntry, layers: LayerRange, progress: Progress | None = None
    ) -> ModelView:
        """Drop layers, and do not load them again at the next start. `progress`: (bytes given back and read
        anew, bytes in all). Raises Conflict (none is loaded)."""
        forget = partial(self._remembered.forget, entry.model_id, entry.name, layers)
        try:
            await self.drop(entry, layers, progress, forget)
        except Conflict:
            # What did not come back at the start is remembered all the same, and must not be for ever.
            if not await forget():
                raise
        self.by_hand(entry.model_id, None)
        return self._view(entry)

    async def find(self, name_or_id: str, *, far: bool = False) -> CatalogueEntry:
        """The model that is meant; one that only other nodes have becomes known. Raises ModelNotFound,
        BadModel, InvalidRequest (ambiguous), Conflict (only some layers are here, and nobody can know yet
        which model they are of), and what `ModelTransfer.find` raises."""
        try:
            return await trio.to_thread.run_sync(self._catalogue.resolve, name_or_id)
        except BadModel:
            entry = await trio.to_thread.run_sync(self._catalogue.get, name_or_id)
            if await self._pool.serves_without_file(ModelFile.of(entry)):
                return entry
            raise
        except ModelNotFound as unknown:
            if waiting := self._gathering.view(name_or_id):
                raise Conflict(
                    f"{waiting.name} is no model yet: it waits for {waiting.waits_for}."
                    " Connected nodes tell what they have fetched themselves: swarmllm models pull"
                    f" {waiting.source} --layers START:END",
                    field="model",
                ) from None
            try:
                return await self._transfer.find(name_or_id, far=far)
            except ModelNotFound:
                # The catalogue's words: it also knows what was meant, perhaps.
                raise unknown from None

    async def hold(
        self,
        entry: CatalogueEntry,
        layers: LayerRange,
        progress: Progress = unseen,
        fetching: Progress = unseen,
        options: LoadOptions = AS_CONFIGURED,
        then: Then | None = None,
    ) -> CatalogueEntry:
        """`load` for now only, and without the view; `then` follows, whether or not anybody waits for it.
        Raises InvalidRequest for a model that is run whole when it is asked."""
        if is_text_encoder(entry.manifest):
            raise InvalidRequest(
                f"{entry.name} encodes whole texts: it runs as a whole on the node that is asked, is not cut"
                " over nodes, and need not be loaded.",
                field="model",
            )
        entry = await self._transfer.ensure(entry, layers, fetching)
        if layers != entry.manifest.whole:
            entry = await self._cut_checks.ensure(entry, progress)
            check_layers(entry, layers)
        try:
            await self._pool.load(ModelFile.of(entry), layers, progress, options, then)
        except WorkerError as error:
            if error.kind != OUT_OF_MEMORY:
                raise
            raise WorkerError(
                f"{error.message}. {_what_makes_room(entry.name)}", kind=error.kind, field=error.field
            ) from error
        await self._node.publish()
        return entry

    async def fetch(
        self, entry: CatalogueEntry, layers: LayerRange, progress: Progress, sources: Sources = ()
    ) -> CatalogueEntry:
        """What layers need, onto this node's disk. Raises what `ModelTransfer.ensure` raises."""
        published = self._published_files.named(sources)
        return await self._transfer.ensure(entry, layers, progress, published=published)

    def has_givers(self, model_id: ModelId) -> bool:
        """Whether connected nodes have files of it."""
        return bool(self._registry.files(model_id))

    async def known(self, model_id: ModelId) -> CatalogueEntry:
        """From this node's catalogue only. Raises ModelNotFound."""
        return await trio.to_thread.run_sync(self._catalogue.get, model_id)

    async def try_cuts(self, entry: CatalogueEntry) -> CatalogueEntry:
        """With what this node can find out about where the model may be cut."""
        entry = await self._tried_first(entry, lambda done_bytes, total_bytes: None)
        await self._node.publish()
        return entry

    def may_be_told(self, model_id: ModelId) -> bool:
        """Whether other nodes may hear that its file is here."""
        return model_id not in self._untold

    async def _tried_first(self, entry: CatalogueEntry, checking: Progress) -> CatalogueEntry:
        """A model that has just come, after its cuts were tried. Other nodes hear of it then: they would load
        parts by the table alone."""
        self._untold.add(entry.model_id)
        try:
            return await self._cut_checks.ensure(entry, checking)
        finally:
            self._untold.discard(entry.model_id)

    async def drop(
        self,
        entry: CatalogueEntry,
        layers: LayerRange,
        progress: Progress | None = None,
        then: Then | None = None,
    ) -> None:
        """`unload` for now only, and without the view."""
        async with self._node.giving_up(entry.model_id, layers):
            await self._pool.unload(entry.model_id, layers, progress, then)
        await self._node.publish()

    def _view(self, entry: CatalogueEntry | None, model: SwarmModel | None = None) -> ModelView:
        """Of a model of this node's, or one that only others have."""
        if entry is not None:
            model_id, model = entry.model_id, self._registry.model(entry.model_id)
        elif model is not None:
            model_id = model.model_id
        else:
            raise ValueError("neither this node nor another one has the model")
        projector = entry.projector if entry is not None else None
        return view_model(
            entry,
            model,
            self._coverages,
            loaded=self._pool.loaded(model_id),
            memory=self._pool.memory(model_id),
            settings=self._pool.loaded_with(model_id),
            encoders=self._node.encoders_of(model_id, entry),
            is_projector_open=projector is not None and self._pool.is_projector_open(model_id, projector),
        )


def check_layers(entry: CatalogueEntry, layers: LayerRange, *, may_cut: bool = False) -> None:
    """Raises InvalidRequest, BadModel. `may_cut`: whether it may be cut so is found out later."""
    manifest = entry.manifest
    if layers not in manifest.whole:
        raise InvalidRequest(f"{entry.name} has layers {manifest.whole}, not {layers}.", field="layers")
    if not may_cut and not (manifest.can_cut_at(layers.start) and manifest.can_cut_at(layers.end)):
        why = manifest.whole_reason or f"cuts are possible at multiples of {manifest.cut_alignment}"
        raise BadModel(f"{entry.name} cannot be cut at {layers}: {why}.", field="layers")
