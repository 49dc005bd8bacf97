"""Transfers models between nodes: finds one by name, fetches what is needed, announces what is here.

The catalogue comes first: a name in this node's catalogue means this node's model, whatever others use the
name for. Only a ModelId identifies a model, because it covers all of it. A name that is not in the catalogue
means the model that the connected nodes call by it; where they do not agree, the caller has to give the id.

There is one fetch per model at a time; a caller that wants more of the model waits, and then finds most of it
on the disk.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from swarmllm.errors import (
    BadModel,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NodeUnreachable,
    RemoteError,
    SwarmLLMError,
)
from swarmllm.log_filter import provoked_by
from swarmllm.models import CatalogueEntry, LayerRange, Store, TensorEntry, merge, needed_tensors
from swarmllm.models.hashing import Progress
from swarmllm.models.manifest import EMBEDDING_INDEX, HEAD_INDEX
from swarmllm.swarm.peers.trust import Note, TrustEvent, ignored_event
from swarmllm.swarm.records.registry import Registry
from swarmllm.swarm.router import DhtStatistics, ModelDiscovery, Router
from swarmllm.transfer.fetch import Fetch, PublishedFile
from swarmllm.transfer.piece_client import PieceClient, fetch_container
from swarmllm.transfer.projector_fetch import ProjectorFetch, most_given
from swarmllm.transfer.settings import TransferSettings
from swarmllm.transfer.uploads import Uploads
from swarmllm_proto.identifiers import Digest, ModelId, NodeId
from swarmllm_proto.swarm import MODEL_RANGES_MAX, FetchPiece, FileAnnounce, Piece

log = logging.getLogger(__name__)

_REGISTERED_S = 3.0
_LOOK_AGAIN_S = 0.05
T = TypeVar("T")

Fetching = Callable[[CatalogueEntry, tuple[TensorEntry, ...], Progress], Awaitable[None]]
"""Brings tensors into a container of the store."""


@dataclass(slots=True)
class TransferStatistics:
    """Since the start."""

    fetched_bytes: int = 0
    given_bytes: int = 0
    liars: list[NodeId] = field(default_factory=list)
    """Nodes that sent wrong bytes; they are not asked again."""


class ModelTransfer:
    def __init__(
        self,
        router: Router,
        registry: Registry,
        store: Store,
        settings: TransferSettings,
        *,
        in_use: Callable[[], Collection[str]],
        on_change: Callable[[], None],
        note: Note = ignored_event,
        seeker: ModelDiscovery | None = None,
    ) -> None:
        """`in_use`: ids of the models that must stay; `on_change` is called when there is more or less to
        give."""
        self._router = router
        self._registry = registry
        self._store = store
        self._settings = settings
        self._in_use = in_use
        self._on_change = on_change
        self._note = note
        self._seeker = seeker
        self._uploads = Uploads(store.catalogue, settings)
        self._locks: defaultdict[ModelId, trio.Lock] = defaultdict(trio.Lock)
        self._statistics = TransferStatistics()

    @property
    def store(self) -> Store:
        return self._store

    def configure(self, settings: TransferSettings) -> None:
        """From now on; what is under way goes on as it began."""
        self._settings = settings
        self._uploads.configure(settings)
        self._on_change()

    @property
    def gives(self) -> bool:
        """Whether others get anything of this node's models."""
        return self._settings.share

    def statistics(self) -> TransferStatistics:
        self._statistics.given_bytes = self._uploads.n_bytes
        return self._statistics

    async def answer(self, request: FetchPiece) -> Piece:
        """Another node asks for bytes."""
        return await self._uploads.answer(request)

    def announcements(self, entries: Iterable[CatalogueEntry]) -> tuple[FileAnnounce, ...]:
        """What this node has to give, of everything it knows."""
        if not self._settings.share:
            return ()
        return tuple(announcement(entry) for entry in entries)

    def sources(self, model_id: ModelId) -> tuple[str, ...]:
        """The connected nodes that have files of a model."""
        return tuple(sorted(self._registry.files(model_id)))

    def announce_far(self, models: Iterable[tuple[ModelId, str]]) -> None:
        """(ModelId, name) of what this node has for others, wherever they are."""
        if self._seeker is not None:
            self._seeker.announce(models)

    def seeking(self) -> DhtStatistics | None:
        """None: nothing looks beyond the connected nodes."""
        return self._seeker.statistics() if self._seeker else None

    async def find(self, name_or_id: str, *, far: bool = False) -> CatalogueEntry:
        """Make a model known that only other nodes have; none of its tensors is fetched yet. `far`: take the
        time to look beyond the connected ones.

        Raises ModelNotFound, InvalidRequest where the name means several, BadModel, RemoteError, StoreFull.
        """
        found = self._announced(name_or_id)
        if not found and far:
            found = await self._look_far(name_or_id, lambda: self._announced(name_or_id))
        if not found:
            raise ModelNotFound(
                f"model {name_or_id[:80]!r} is known neither here nor to a connected node; add its file with:"
                " swarmllm models add PATH",
                field="model",
            )
        if len(found) > 1:
            ids = ", ".join(model_id[:12] for model_id in sorted(found))
            raise InvalidRequest(
                f"connected nodes have several models called {name_or_id}; name one by its id: {ids}",
                field="model",
            )
        ((model_id, files),) = found.items()
        async with self._locks[model_id]:
            try:
                return await trio.to_thread.run_sync(self._store.catalogue.get, model_id)
            except ModelNotFound:
                return await self._adopt(model_id, files)

    async def ensure(
        self,
        entry: CatalogueEntry,
        layers: LayerRange | None,
        progress: Progress,
        *,
        origin: bool = False,
        fetch: Fetching | None = None,
        published: Sequence[PublishedFile] = (),
    ) -> CatalogueEntry:
        """Fetch what is not here of what running `layers` needs, and, as `origin`, embedding prompts; by
        `fetch`, else from the connected nodes and beside them from a hub, where one of `published` is right.

        Returns the entry as it is then. Raises NodeUnreachable where nobody gives a part, StoreFull,
        BadModel; what has arrived is kept in any case.
        """
        if not entry.is_stored:
            return entry
        needed = needed_tensors(entry.manifest, layers, origin=origin)
        if not entry.absent(needed):
            if layers is not None:
                await trio.to_thread.run_sync(self._store.touch, entry)
            return entry
        async with self._locks[entry.model_id]:
            entry = await trio.to_thread.run_sync(self._store.catalogue.get, entry.model_id)
            missing = entry.absent(needed)
            if not missing:
                return entry
            await trio.to_thread.run_sync(self._store.touch, entry)
            gone = await trio.to_thread.run_sync(
                self._store.make_room, sum(tensor.size_bytes for tensor in missing), self._replaceable(entry)
            )
            for other in gone:
                log.info("removed %s to make room", other.name)
                self._uploads.forget(other.model_id)
            try:
                await (fetch or partial(self._fetch, published=published))(entry, missing, progress)
            finally:
                with trio.CancelScope(shield=True):
                    entry = await trio.to_thread.run_sync(self._store.seal, entry)
                self._changed(entry)
        return entry

    async def take_in(self, path: Path, name: str) -> CatalogueEntry:
        """A complete file of the store's own disk becomes a model of the store, unless this machine has it
        already. Raises BadModel, InvalidRequest, Conflict."""
        entry = await trio.to_thread.run_sync(self._store.take_in, path, name)
        self._changed(entry)
        return entry

    async def take_in_parts(
        self, part: Path, name: str, digests: Mapping[str, str], names: Collection[str]
    ) -> CatalogueEntry:
        """Some tensors (`names`) of a file on the store's own disk, of which all digests are known now,
        become a model of the store. The file stays. Raises BadModel, StoreFull."""
        store = self._store
        manifest = await trio.to_thread.run_sync(store.manifest_of_parts, part, name, digests)
        async with self._locks[manifest.model_id]:
            entry = await trio.to_thread.run_sync(store.take_in_parts, part, name, manifest, names)
            self._changed(entry)
        return entry

    async def make_room(self, n_bytes: int) -> None:
        """For a model that is not known yet. Raises StoreFull."""
        for other in await trio.to_thread.run_sync(self._store.make_room, n_bytes, self._replaceable(None)):
            log.info("removed %s to make room", other.name)
            self._uploads.forget(other.model_id)

    async def fetch_projector(
        self, entry: CatalogueEntry, part_of: Callable[[Digest], Path], progress: Progress
    ) -> tuple[Digest, Path]:
        """The projector that most nodes give for a model: its BLAKE3, and the file with these bytes, which
        `part_of` names. Raises NodeUnreachable where nobody gives one, BadModel where they give another file,
        StoreFull."""
        announced = {
            node_id: each
            for node_id, each in self._registry.encoders(entry.model_id).items()
            if node_id not in self._statistics.liars
        }
        given = most_given(announced, entry.manifest.n_embd_input)
        if given is None:
            raise NodeUnreachable(f"no connected node gives a projector for {entry.name}")
        await self.make_room(given.size_bytes)
        part = part_of(given.digest)
        fetch = ProjectorFetch(
            self._router, self._settings, entry.model_id, given, part, progress, self._note
        )
        try:
            await fetch.run()
        finally:
            self._statistics.fetched_bytes += fetch.n_bytes
            self._blame(fetch.liars)
        return given.digest, part

    async def verify(self, entry: CatalogueEntry, progress: Progress) -> tuple[str, ...]:
        """Names of the parts whose bytes are not what they should be; `progress` is called in a thread.
        Raises BadModel."""

        def report(done_bytes: int, total_bytes: int) -> None:
            trio.from_thread.check_cancelled()
            progress(done_bytes, total_bytes)

        async with self._locks[entry.model_id]:
            entry = await trio.to_thread.run_sync(self._store.catalogue.resolve, entry.model_id)
            damaged = await trio.to_thread.run_sync(self._store.verify, entry, report)
            if damaged:
                log.warning("%d parts of %s are damaged: %s", len(damaged), entry.name, damaged[0])
                self._changed(entry)
            return damaged

    async def pin(self, entry: CatalogueEntry, pinned: bool) -> CatalogueEntry:
        """Raises Conflict for a file of the user's."""
        return await trio.to_thread.run_sync(self._store.pin, entry, pinned)

    async def remove(self, entry: CatalogueEntry) -> None:
        """Forget a model, and delete what was fetched of it."""
        async with self._locks[entry.model_id]:
            await trio.to_thread.run_sync(self._store.remove, entry)
            self._changed(entry)
        if not self._locks[entry.model_id].locked():
            del self._locks[entry.model_id]

    def _announced(self, name_or_id: str) -> dict[ModelId, dict[NodeId, FileAnnounce]]:
        return self._registry.files_named(name_or_id)

    async def _look_far(self, name_or_id: str, look: Callable[[], T]) -> T:
        """`look` once nodes have been met that may have it."""
        if self._seeker is None or not await self._seeker.seek(name_or_id):
            return look()
        found = look()
        with trio.move_on_after(_REGISTERED_S):
            # The registry follows the router by a task of its own.
            while not found:
                await trio.sleep(_LOOK_AGAIN_S)
                found = look()
        return found

    async def _adopt(self, model_id: ModelId, files: dict[NodeId, FileAnnounce]) -> CatalogueEntry:
        failure: SwarmLLMError = ModelNotFound("nobody has it any more", field="model")
        for node_id, announced in sorted(files.items()):
            if node_id in self._statistics.liars:
                continue
            asking = PieceClient(self._router, self._settings, node_id, model_id)
            try:
                entry = await fetch_container(asking, self._store, model_id, announced.name)
            except BadModel as error:
                failure = RemoteError(f"node {node_id}: {error.message}")
                provoked_by(log, node_id).warning(
                    "node %s does not have the model it announces: %s", node_id, error.message
                )
                self._blame({node_id})
            except (RemoteError, DeadlineExceeded) as error:
                failure = error
            else:
                provoked_by(log, node_id).info(
                    "%s is known now; its header came from %s", entry.name, node_id
                )
                self._changed(entry)
                return entry
            finally:
                self._statistics.fetched_bytes += asking.n_bytes
        raise failure

    async def _fetch(
        self,
        entry: CatalogueEntry,
        tensors: tuple[TensorEntry, ...],
        progress: Progress,
        published: Sequence[PublishedFile],
    ) -> None:
        holders = self._givers(entry) or await self._look_far(entry.model_id, lambda: self._givers(entry))
        if not holders:
            raise NodeUnreachable(
                f"{sum(tensor.size_bytes for tensor in tensors)} bytes of {entry.name} are not here, and no "
                "connected node has them to give"
            )
        # Many have the same: not everybody asks the first ones.
        start = sum(map(ord, self._router.node_id)) % len(holders)
        chosen = (holders[start:] + holders[:start])[: self._settings.max_holders]
        fetch = Fetch(
            self._router,
            self._store,
            entry,
            tensors,
            chosen,
            self._settings,
            progress,
            self._note,
            published,
        )
        try:
            await fetch.run()
        finally:
            self._statistics.fetched_bytes += fetch.n_bytes
            self._blame(fetch.plan.liars)

    def _givers(self, entry: CatalogueEntry) -> list[NodeId]:
        files = self._registry.files(entry.model_id)
        return [node_id for node_id in sorted(files) if node_id not in self._statistics.liars]

    def _blame(self, node_ids: Collection[NodeId]) -> None:
        for node_id in node_ids:
            self._note(node_id, TrustEvent.WRONG_BYTES)
        self._statistics.liars += sorted(set(node_ids) - set(self._statistics.liars))

    def _changed(self, entry: CatalogueEntry) -> None:
        self._uploads.forget(entry.model_id)
        self._on_change()

    def _replaceable(self, wanted: CatalogueEntry | None) -> Callable[[CatalogueEntry], bool]:
        """Whether a model may be removed to make room: not in use, and others have all that is here. It is
        asked in a thread of trio's."""
        in_use = {*self._in_use(), *([wanted.model_id] if wanted else [])}
        in_use |= {model_id for model_id, lock in self._locks.items() if lock.locked()}

        def may_go(entry: CatalogueEntry) -> bool:
            others = trio.from_thread.run_sync(self._registry.files, entry.model_id).values()
            mine = announcement(entry)
            elsewhere = merge(LayerRange(*layers) for other in others for layers in other.layers)
            return (
                entry.model_id not in in_use
                and all(any(LayerRange(*layers) in there for there in elsewhere) for layers in mine.layers)
                and (not mine.embedding or any(other.embedding for other in others))
                and (not mine.head or any(other.head for other in others))
            )

        return may_go


def announcement(entry: CatalogueEntry) -> FileAnnounce:
    """What this node has of a model, whole shards only."""
    whole = {shard.index: shard.kind for shard in entry.manifest.shards if not entry.absent(shard.tensors)}
    layers = merge(LayerRange(index, index + 1) for index, kind in whole.items() if kind == "layer")
    return FileAnnounce(
        model_id=entry.model_id,
        name=entry.name,
        n_layers=entry.manifest.n_layers,
        layers=tuple((each.start, each.end) for each in layers)[:MODEL_RANGES_MAX],
        embedding=EMBEDDING_INDEX in whole,
        head=HEAD_INDEX in whole,
    )
