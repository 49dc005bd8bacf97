"""Identifies a model that several nodes have fetched parts of, by the digests that they exchange.

A node that waits asks every connected node what it knows of the file: when its layers are there, when a node
connects, and now and then, because an answer may have been lost. A node that waits for the same file is told
what this node hashed. When all digests are known, the manifest is, and with it the ModelId: the layers become
an ordinary model of the store, are announced, and can be loaded. Each waiting node comes to that by itself,
and since what they know is the same, so is the id.

A node also answers with the digests of files that its catalogue knows whole.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from blake3 import blake3

from swarmllm.downloads.digest_book import runs_of
from swarmllm.downloads.unidentified_model import STATE_FILE, UnidentifiedModel, read_waiting
from swarmllm.errors import BadModel, Conflict, ModelNotFound, RemoteError, SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.models import Catalogue, CatalogueEntry, LayerRange, TensorEntry
from swarmllm.models.hashing import READ_BYTES
from swarmllm.models.tensor_locations import TensorLocations
from swarmllm.supervision import spawn
from swarmllm.swarm.router import Router
from swarmllm.transfer import ModelTransfer
from swarmllm_proto.codec import decode_response, encode_request
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.file_digests import Digests, FetchDigests
from swarmllm_proto.identifiers import NodeId

if TYPE_CHECKING:
    from trio_typing import TaskStatus

REMEMBERED = 64
"""Files whose header has been hashed."""


class KnownFiles:
    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._headers: OrderedDict[tuple[str, int], str] = OrderedDict()
        """(ModelId, modification time) -> BLAKE3 of the file up to its first tensor."""

    async def digests(self, header: str, size_bytes: int) -> dict[int, bytes] | None:
        """Of every tensor of a file, in the order of their offsets; None: there is no such model here."""
        entry = await self.entry(header, size_bytes)
        if entry is None:
            return None
        return {place: bytes.fromhex(tensor.blake3) for place, tensor in enumerate(_by_offset(entry))}

    async def entry(self, header: str, size_bytes: int) -> CatalogueEntry | None:
        """The model of a file with this header (BLAKE3 up to the first tensor) and size; None: there is none
        here."""
        for entry in await trio.to_thread.run_sync(self._catalogue.of_size, size_bytes):
            tensors = _by_offset(entry)
            if tensors and await self._header(entry, tensors[0]) == header:
                return entry
        return None

    async def _header(self, entry: CatalogueEntry, first: TensorEntry) -> str:
        key = (entry.model_id, entry.state.mtime_ns)
        if key not in self._headers:
            self._headers[key] = await trio.to_thread.run_sync(
                _hash_start, TensorLocations(entry), first.offset
            )
            while len(self._headers) > REMEMBERED:
                self._headers.popitem(last=False)
        return self._headers.get(key, "")


def _by_offset(entry: CatalogueEntry) -> list[TensorEntry]:
    return sorted(entry.manifest.tensors, key=lambda tensor: tensor.offset)


def _hash_start(places: TensorLocations, n_bytes: int) -> str:
    """Empty where it cannot be read."""
    hasher, at = blake3(), 0
    try:
        while at < n_bytes and (data := places.read_container(at, min(READ_BYTES, n_bytes - at))):
            hasher.update(data)
            at += len(data)
    except (OSError, BadModel):
        return ""
    return hasher.hexdigest() if at == n_bytes else ""


log = logging.getLogger(__name__)

REASK_S = 60.0
ANSWER_TIMEOUT_S = 10.0
ASKED_AT_ONCE = 16
_UNKNOWN = Digests(status="unknown")


@dataclass(frozen=True, slots=True)
class WaitingView:
    """A model that waits for its id, for people."""

    name: str
    source: str
    size_bytes: int
    n_layers: int
    architecture: str
    layers: tuple[LayerRange, ...]
    """Those that are here."""
    waits_for: str
    """What nobody has told yet, in words."""
    contradictions: tuple[tuple[str, tuple[str, ...]], ...]
    """(tensor, nodes that say different things of it, and are not believed)"""


class SharedDigests:
    def __init__(
        self,
        folder: Path,
        router: Router,
        transfer: ModelTransfer,
        *,
        may_believe: Callable[[NodeId], bool],
        reask_s: float = REASK_S,
    ) -> None:
        """`folder` holds one folder per waiting model. `may_believe(node_id)`: what others say does not
        count."""
        self._folder = folder
        self._router = router
        self._transfer = transfer
        self._may_believe = may_believe
        self._reask_s = reask_s
        self._known = KnownFiles(transfer.store.catalogue)
        self._waiting: dict[Path, UnidentifiedModel] = {}
        self._settling = trio.Lock()
        self._nursery: trio.Nursery | None = None

    def views(self) -> tuple[WaitingView, ...]:
        return tuple(self._view(model) for model in self._waiting.values())

    def view(self, name: str) -> WaitingView | None:
        model = self._named(name)
        return self._view(model) if model else None

    def in_folder(self, folder: Path) -> UnidentifiedModel | None:
        return self._waiting.get(folder)

    async def model_of(self, header: str, size_bytes: int) -> CatalogueEntry | None:
        """The model of a file, if it is known here. `header`: BLAKE3 up to the first tensor."""
        return await self._known.entry(header, size_bytes)

    def waiting_for(self, header: str, size_bytes: int) -> UnidentifiedModel | None:
        """What has been fetched of a file whose model is not known yet."""
        for model in self._waiting.values():
            if (model.header_digest, model.state.size_bytes) == (header, size_bytes):
                return model
        return None

    async def ask_again(self, model: UnidentifiedModel) -> None:
        """The others may know more now."""
        await self._ask_around(model)
        await self._settle_if_possible(model)

    def check_name(self, name: str, folder: Path) -> None:
        """Raises Conflict where layers of another file wait under this name."""
        model = self._named(name)
        if model is not None and model.folder != folder:
            raise Conflict(
                f"layers of {model.state.source} wait under the name {name}; choose with --name", field="name"
            )

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take up what an earlier run left, and ask around until cancelled."""
        await self._take_up()
        async with trio.open_nursery() as nursery, self._router.changes() as changes:
            self._nursery = nursery
            task_status.started()
            nursery.start_soon(self._ask_now_and_then)
            try:
                async for change in changes:
                    if change.kind == "connected":
                        for model in list(self._waiting.values()):
                            spawn(nursery, "model", self._ask_one, model, change.node_id)
            finally:
                self._nursery = None

    async def add(self, model: UnidentifiedModel) -> CatalogueEntry | None:
        """Layers of it have come: ask around; the model that it turned out to be, if it did."""
        self._waiting[model.folder] = model
        await self._ask_around(model)
        return await self._settle(model)

    async def look(self, folder: Path) -> None:
        """This node may know the file now."""
        model = self._waiting.get(folder)
        if model is not None:
            await self._settle(model)

    async def discard(self, model: UnidentifiedModel) -> None:
        """Delete layers that will become no model; where they have become one, it stays. Raises Conflict
        (more of them is being fetched)."""
        if model.folder in self._waiting:
            await self.remove(model.name)
        elif model.is_fetching:
            raise Conflict(f"layers of {model.name} are being fetched")
        else:
            await trio.to_thread.run_sync(model.forget)

    async def remove(self, name: str) -> WaitingView:
        """Forget it, delete what was fetched. Raises ModelNotFound, Conflict (more of it is being
        fetched)."""
        model = self._named(name)
        if model is None:
            raise ModelNotFound(f"no layers wait under the name {name[:80]!r}", field="model")
        if model.is_fetching:
            raise Conflict(f"layers of {name} are being fetched; cancel that first", field="model")
        async with self._settling:
            view = self._view(model)
            await trio.to_thread.run_sync(model.forget)
            self._waiting.pop(model.folder, None)
        return view

    async def answer(self, sender: NodeId, question: FetchDigests) -> Digests:
        """Another node asks what is known here of a file."""
        for model in self._waiting.values():
            if model.is_about(question):
                is_heard = bool(question.known) and self._may_believe(sender)
                if is_heard and model.hear(sender, question.known) and self._nursery is not None:
                    spawn(self._nursery, "model", self._keep, model)
                return Digests(status="part", known=model.own_runs())
        if not self._transfer.gives:
            return _UNKNOWN
        digests = await self._known.digests(question.header, question.size_bytes)
        return Digests(status="whole", known=runs_of(digests)) if digests else _UNKNOWN

    async def _take_up(self) -> None:
        for state in await trio.to_thread.run_sync(lambda: sorted(self._folder.glob(f"*/{STATE_FILE}"))):
            model = await trio.to_thread.run_sync(read_waiting, state.parent)
            if model is not None and model.held:
                self._waiting[model.folder] = model
                log.info("%s: layers %s wait for the digests of the others", model.name, model.held)

    async def _ask_now_and_then(self) -> None:
        while True:
            for model in list(self._waiting.values()):
                await self._ask_around(model)
                await self._settle_if_possible(model)
            await trio.sleep(self._reask_s)

    async def _ask_around(self, model: UnidentifiedModel) -> None:
        limit = trio.CapacityLimiter(ASKED_AT_ONCE)
        for node_id in [each for each in model.book.heard if not self._may_believe(each)]:
            model.hear(node_id, ())

        async def ask(node_id: NodeId) -> None:
            async with limit:
                await self._ask(model, node_id)

        async with trio.open_nursery() as nursery:
            for node_id in sorted(self._router.connected()):
                nursery.start_soon(ask, node_id)

    async def _ask_one(self, model: UnidentifiedModel, node_id: NodeId) -> None:
        await self._ask(model, node_id)
        await self._settle_if_possible(model)

    async def _keep(self, model: UnidentifiedModel) -> None:
        await self._save(model)
        await self._settle_if_possible(model)

    async def _save(self, model: UnidentifiedModel) -> None:
        try:
            await model.save()
        except OSError as error:
            # Removed meanwhile, or no room: what others say can be asked for again.
            log.debug("%s is not saved: %s", model.name, error.strerror)

    async def _settle_if_possible(self, model: UnidentifiedModel) -> None:
        try:
            await self._settle(model)
        except SwarmLLMError as error:
            log.warning("%s is known now, but cannot be taken in: %s", model.name, error.message)

    async def _ask(self, model: UnidentifiedModel, node_id: NodeId) -> None:
        """What a node knows of the file; one that waits for it too is told what this node knows."""
        if not self._may_believe(node_id):
            return
        before = model.book.heard.get(node_id)
        try:
            answer = await self._request(node_id, model.question())
            if answer.status == "part":
                await self._request(node_id, model.question(model.own_runs()))
        except (SwarmLLMError, ProtocolError) as error:
            provoked_by(log, node_id).debug("asking %s about %s: %s", node_id, model.name, error)
            return
        # What it told by itself meanwhile is newer than its answer.
        is_newest = model.book.heard.get(node_id) is before
        if is_newest and model.hear(node_id, answer.known):
            for tensor, nodes in model.contradictions(self._router.node_id):
                log.warning("%s: %s contradict each other on tensor %s", model.name, ", ".join(nodes), tensor)
            await self._save(model)

    async def _request(self, node_id: NodeId, question: FetchDigests) -> Digests:
        body = await self._router.request(node_id, encode_request(question), timeout_s=ANSWER_TIMEOUT_S)
        answer = decode_response(body)
        if not isinstance(answer, Digests):
            raise RemoteError(f"node {node_id} answered something else")
        return answer

    async def _settle(self, model: UnidentifiedModel) -> CatalogueEntry | None:
        """Where every digest is known, the layers become a model; None: they go on waiting. Raises BadModel,
        StoreFull; then they go on waiting too."""
        async with self._settling:
            if self._waiting.get(model.folder) is not model:
                return model.entry
            if model.is_fetching:
                return None
            here = await self._known.digests(model.header_digest, model.state.size_bytes)
            digests = model.all_digests(here)
            if digests is None:
                return None
            model.entry = entry = await self._transfer.take_in_parts(
                model.part, model.name, digests, model.state.digests.keys()
            )
            await trio.to_thread.run_sync(model.forget)
            del self._waiting[model.folder]
        log.info("%s is known now: %s", entry.name, entry.model_id)
        return entry

    def _named(self, name: str) -> UnidentifiedModel | None:
        return next((model for model in self._waiting.values() if model.name == name), None)

    def _view(self, model: UnidentifiedModel) -> WaitingView:
        layout = model.layout
        return WaitingView(
            name=model.name,
            source=model.state.source,
            size_bytes=model.state.size_bytes,
            n_layers=layout.n_layers if layout else 0,
            architecture=layout.architecture if layout else "",
            layers=model.held,
            waits_for=model.waits_for(),
            contradictions=model.contradictions(self._router.node_id),
        )
