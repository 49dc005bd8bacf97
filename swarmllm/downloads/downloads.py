"""Starts, continues and lists the downloads of a node.

A download uses two packages: `find` looks up models of this node and of the swarm, and the store of
`transfer` keeps the fetched bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import trio

from swarmllm.downloads.download import (
    ENDED,
    Download,
    DownloadRequest,
    DownloadView,
    SharedFileRequest,
)
from swarmllm.downloads.fetch_layers import FetchLayers, LayerFetch, check_same_file
from swarmllm.downloads.header_plan import PublishedModel, find_address, read_published
from swarmllm.downloads.hub_projector import HubProjector, find_projector
from swarmllm.downloads.hub_search import FoundModel, search_hub
from swarmllm.downloads.published_files import PublishedFiles, published_name
from swarmllm.downloads.remote import FileRemote, RemoteFileInfo, open_http
from swarmllm.downloads.settings import DownloadSettings
from swarmllm.downloads.shared_digests import SharedDigests
from swarmllm.downloads.source import (
    DownloadError,
    FileChanged,
    Offline,
    check_url,
    model_name,
    parse_source,
)
from swarmllm.downloads.split_remote import SplitRemote, open_remote
from swarmllm.downloads.unidentified_model import PartialModelState, UnidentifiedModel, read_waiting
from swarmllm.downloads.whole_file import WholeFile
from swarmllm.errors import BadModel, Conflict, InvalidRequest, ModelNotFound, SwarmLLMError
from swarmllm.models import CatalogueEntry, LayerRange
from swarmllm.models.model_files import allocated_bytes
from swarmllm.models.names import check_name, normalise_name
from swarmllm.supervision import spawn
from swarmllm.transfer import ModelTransfer
from swarmllm_proto.identifiers import NOT_PUBLISHED

if TYPE_CHECKING:
    import httpx
    from trio_typing import TaskStatus

    from swarmllm.models import TensorEntry

log = logging.getLogger(__name__)

REMEMBERED = 20
"""Ended downloads that can still be looked at."""
SHARED_MAX_FAILURES = 4
HEADERS_AT_ONCE = 2
"""That are read for plans; each may take 256 MiB of memory."""


class KnownModels(Protocol):
    async def find(self, name_or_id: str) -> CatalogueEntry:
        """Here or at a connected node. Raises ModelNotFound."""
        ...

    async def try_cuts(self, entry: CatalogueEntry) -> CatalogueEntry:
        """Of a model whose whole file has come, before it counts as done."""
        ...


class TakesProjectors(Protocol):
    async def attach_fetched(self, entry: CatalogueEntry, path: Path) -> CatalogueEntry:
        """Let a model take pictures with the projector in this file, which leaves its folder. Raises
        SwarmLLMError where it cannot be used."""
        ...


class Downloads:
    def __init__(
        self,
        folder: Path,
        transfer: ModelTransfer,
        settings: DownloadSettings,
        *,
        gathering: SharedDigests,
        models: KnownModels,
        projectors: TakesProjectors | None = None,
        published_files: PublishedFiles | None = None,
    ) -> None:
        """`projectors`: None: none is fetched."""
        self._folder = folder
        self._transfer = transfer
        self._settings = settings
        self._models = models
        self._projectors = projectors
        self.gathering = gathering
        self.published_files = published_files or PublishedFiles(settings)
        self._downloads: dict[str, Download] = {}
        self._turns = trio.CapacityLimiter(settings.max_downloads)
        self._headers = trio.CapacityLimiter(HEADERS_AT_ONCE)
        self._nursery: trio.Nursery | None = None

    def configure(self, settings: DownloadSettings) -> None:
        """For downloads that are asked for from now on."""
        self._settings = self.published_files.settings = settings

    @property
    def is_offline(self) -> bool:
        return self._settings.offline

    async def is_free(self, name: str) -> bool:
        """Whether no model here has this name, and no layers wait under it."""
        if self.gathering.view(name) is not None:
            return False
        try:
            await trio.to_thread.run_sync(self._transfer.store.catalogue.get, name)
        except ModelNotFound:
            return True
        except SwarmLLMError:
            pass
        return False

    def list(self) -> tuple[DownloadView, ...]:
        """The latest first."""
        return tuple(download.view() for download in reversed(self._downloads.values()))

    def get(self, download_id: str) -> Download:
        """Raises ModelNotFound."""
        if download_id not in self._downloads:
            raise ModelNotFound("There is no such download.", field="id")
        return self._downloads[download_id]

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry downloads until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    def start(self, request: DownloadRequest) -> Download:
        """One that runs already is not begun twice. Raises InvalidRequest, Offline, Conflict."""
        settings = self._settings_for(request.token, request.endpoint)
        if request.shared is not None:
            settings = _for_others(settings, is_own=request.shared.is_own)
        parsed = parse_source(request.source, settings.endpoint)
        if request.layers is not None:
            LayerRange.parse(request.layers)
        if request.name is not None:
            check_name(request.name)
        _check_online(settings)
        for other in self._running():
            if other.source == parsed:
                if other.layers == request.layers:
                    return other
                raise Conflict("Other layers of this file are being fetched; wait for them.", field="layers")
        download = Download(parsed, request)
        if self._nursery is None:
            raise SwarmLLMError("the node is starting or stopping")
        self._downloads[download.id] = download
        for old in [each for each in self._downloads.values() if each.state in ENDED][:-REMEMBERED]:
            del self._downloads[old.id]
        spawn(self._nursery, "download", self._carry, download, settings, failed=download.has_failed)
        return download

    def retry(self, download_id: str) -> Download:
        """A new download in place of one that failed or was cancelled, asked for in the same way; it goes on
        where that one ended. Raises ModelNotFound, Conflict, and what `start` raises."""
        ended = self.get(download_id)
        if ended.state not in ("failed", "cancelled"):
            raise Conflict(f"Only what failed or was cancelled is tried again; this one is {ended.state}.")
        download = self.start(ended.request)
        del self._downloads[download_id]
        return download

    async def clear(self, download_id: str) -> DownloadView:
        """Forget one that has ended, and throw away what has come of a file that became no model. Raises
        ModelNotFound, Conflict while it runs."""
        download = self.get(download_id)
        if download.state not in ENDED:
            raise Conflict("This download is not over; stop it first.")
        del self._downloads[download_id]
        whole = download.whole
        in_use = {each.whole.part for each in self._downloads.values() if each.whole is not None}
        if whole is not None and whole.part not in in_use:
            await trio.to_thread.run_sync(_throw_away, whole)
        return download.view()

    def _running(self) -> Iterator[Download]:
        return (each for each in self._downloads.values() if each.state not in ENDED)

    async def published(
        self, source: str, *, token: str | None = None, endpoint: str | None = None
    ) -> PublishedModel:
        """What `start` would fetch, from its header alone. Raises InvalidRequest, Offline, DownloadError,
        BadModel."""
        settings = self._settings_for(token, endpoint)
        parsed = parse_source(source, settings.endpoint)
        _check_online(settings)
        async with self._headers:
            return await read_published(parsed, settings)

    async def search(
        self, term: str, *, token: str | None = None, endpoint: str | None = None
    ) -> tuple[FoundModel, ...]:
        """Models of the hub that `term` finds, from their headers alone. Raises InvalidRequest, Offline,
        DownloadError."""
        settings = self._settings_for(token, endpoint)
        _check_online(settings)
        return await search_hub(term, settings, self._headers)

    def _settings_for(self, token: str | None, endpoint: str | None) -> DownloadSettings:
        settings = self._settings
        if endpoint:
            check_url(endpoint)
            settings = replace(settings, endpoint=endpoint.rstrip("/"), token="")
        return replace(settings, token=token) if token else settings

    async def _carry(self, download: Download, settings: DownloadSettings) -> None:
        download.state = "waiting"
        try:
            with download.scope:
                async with self._turns, open_http(settings) as http:
                    download.state = "fetching"
                    entry = await self._fetch(download, settings, http)
                    if entry is not None:
                        download.model = entry.name
                        log.info("%s became model %s", download.source.text, entry.name)
                        download.error = await _follow_up(download, entry) or download.projector_trouble
                    download.state = "done"
        except SwarmLLMError as error:
            download.state, download.error = "failed", error.message
            log.warning("fetching %s failed: %s", download.source.text, error.message)
        except OSError as error:
            download.state, download.error = "failed", f"The disk: {error.strerror or error}"
        except Exception as error:
            # A mistake of ours, or of a library, in what some server sent: it costs this download only.
            download.state, download.error = "failed", f"an error of this node's own ({_named(error)})"
            log.exception("fetching %s failed", download.source.text)
        finally:
            if download.state not in ENDED and download.scope.cancel_called:
                download.state = "cancelled"
            download.ended.set()

    async def _fetch(
        self, download: Download, settings: DownloadSettings, http: httpx.AsyncClient
    ) -> CatalogueEntry | None:
        source = download.source
        url = source.url or await find_address(source, settings, http, download.retries(settings))
        download.published = published_name(url, settings.endpoint) if source.is_endpoint else NOT_PUBLISHED
        remote = open_remote(http, url, settings.token if source.is_endpoint else "", settings)
        if download.sha256 and isinstance(remote, SplitRemote):
            raise InvalidRequest("A model in parts has a SHA-256 for each; leave it out.", field="sha256")
        name = download.name or normalise_name(model_name(url))
        for is_last in (False, True):
            facts = await download.retries(settings).keep_trying(remote.facts)
            try:
                if download.layers is not None:
                    return await self._parts(download, remote, facts, name, settings)
                projector = await self._projector_of(download, url, settings, http)
                entry = await self._whole(download, remote, facts, name, settings)
                return entry if projector is None else await self._see(download, entry, projector, settings)
            except FileChanged as error:
                if is_last:
                    raise
                log.info("download begins anew: %s", error.message)
        raise AssertionError

    async def _whole(
        self,
        download: Download,
        remote: FileRemote,
        facts: RemoteFileInfo,
        name: str,
        settings: DownloadSettings,
    ) -> CatalogueEntry:
        folder = self._folder_of(remote)
        whole = WholeFile(remote, folder, settings, download.retries(settings), download.progress)
        download.whole = whole
        here_bytes = await trio.to_thread.run_sync(allocated_bytes, whole.part)
        await self._transfer.make_room(max(0, facts.size_bytes - here_bytes))
        await whole.run(facts, download.sha256, lambda: setattr(download, "state", "checking"))
        entry = await self._transfer.take_in(whole.part, name)
        await trio.to_thread.run_sync(whole.forget)
        await self.gathering.look(folder)
        if await trio.to_thread.run_sync(folder.exists):
            await trio.to_thread.run_sync(folder.rmdir)
        download.whole = None
        return await self._models.try_cuts(entry)

    async def _projector_of(
        self, download: Download, url: str, settings: DownloadSettings, http: httpx.AsyncClient
    ) -> HubProjector | None:
        """That of the model's repository, which is fetched after it; its bytes are told before."""
        if self._projectors is None or not download.request.mmproj or not download.source.is_endpoint:
            return None
        try:
            found = await find_projector(url, settings, http)
        except DownloadError as error:
            log.info("no projector is looked for beside %s: %s", url, error.message)
            return None
        if found is not None and not found.problem:
            download.projector, download.projector_bytes = found.file, found.facts.size_bytes
        return found

    async def _see(
        self,
        download: Download,
        entry: CatalogueEntry,
        projector: HubProjector,
        settings: DownloadSettings,
    ) -> CatalogueEntry:
        """The model with its projector; where that cannot be had, or used, the download says why, and the
        model is here all the same."""
        if self._projectors is None or entry.projector is not None:
            download.has_no_projector()
            return entry
        folder = self._folder_of(projector.remote)
        try:
            projector.require_fit(entry.manifest)
            download.state = "fetching"
            await self._transfer.make_room(projector.facts.size_bytes)
            retries = download.retries(settings)
            whole = await projector.fetch(folder, settings, retries, download.projector_progress)
            download.state = "checking"
            try:
                entry = await self._projectors.attach_fetched(entry, whole.part)
            finally:
                await trio.to_thread.run_sync(_throw_away, whole)
        except SwarmLLMError as error:
            download.has_no_projector(f"{entry.name} takes no pictures: {error.message}")
            log.warning("projector not fetched: %s", download.projector_trouble)
        return entry

    async def _parts(
        self,
        download: Download,
        remote: FileRemote,
        facts: RemoteFileInfo,
        name: str,
        settings: DownloadSettings,
    ) -> CatalogueEntry | None:
        """The model, or None as long as nobody can know which one it is."""
        if not facts.has_ranges:
            raise DownloadError(f"{remote.url}: this server gives no parts of files; fetch all of it")
        layers = LayerRange.parse(download.layers or "")
        shared = download.request.shared
        sha256 = shared.sha256 if shared else download.sha256
        if sha256 and facts.sha256 and sha256 != facts.sha256:
            raise DownloadError(f"{remote.url}: the server says that its SHA-256 is {facts.sha256}")
        if shared is not None and facts.size_bytes != shared.size_bytes:
            raise BadModel(f"{remote.url} has {facts.size_bytes} bytes, and not {shared.size_bytes}")
        folder = self._folder_of(remote)
        self.gathering.check_name(name, folder)
        if self.gathering.in_folder(folder) is None:
            entry = await self._known(shared, name)
            if entry is not None:
                return await self._known_parts(download, remote, facts, entry, layers, settings)
        return await self._unknown_parts(download, remote, facts, name, layers, settings)

    async def _known(self, shared: SharedFileRequest | None, name: str) -> CatalogueEntry | None:
        if shared is not None:
            return await self.gathering.model_of(shared.header, shared.size_bytes)
        try:
            return await self._models.find(name)
        except ModelNotFound:
            return None

    async def _known_parts(
        self,
        download: Download,
        remote: FileRemote,
        facts: RemoteFileInfo,
        entry: CatalogueEntry,
        layers: LayerRange,
        settings: DownloadSettings,
    ) -> CatalogueEntry:
        await download.retries(settings).keep_trying(partial(check_same_file, remote, facts, entry))

        async def fetch(
            wanted: CatalogueEntry,
            tensors: tuple[TensorEntry, ...],
            progress: Callable[[int, int], None],
        ) -> None:
            store, retries = self._transfer.store, download.retries(settings)
            await LayerFetch(remote, facts, store, wanted, tensors, settings, retries, progress).run()

        return await self._transfer.ensure(entry, layers, download.progress, fetch=fetch)

    async def _unknown_parts(
        self,
        download: Download,
        remote: FileRemote,
        facts: RemoteFileInfo,
        name: str,
        layers: LayerRange,
        settings: DownloadSettings,
    ) -> CatalogueEntry | None:
        folder, shared = self._folder_of(remote), download.request.shared
        model = self.gathering.in_folder(folder) or await trio.to_thread.run_sync(read_waiting, folder)
        if model is None or not model.is_of(remote.url, facts):
            if model is not None and model.held:
                raise DownloadError(
                    f"{remote.url} has changed since other layers of it were fetched; to begin anew:"
                    f" swarmllm models rm {model.name}"
                )
            state = PartialModelState(
                url=remote.url,
                source=download.source.text,
                name=name,
                size_bytes=facts.size_bytes,
                validator=facts.validator,
                sha256=shared.sha256 if shared else download.sha256 or facts.sha256,
            )
            model = UnidentifiedModel(folder, state)
            await trio.to_thread.run_sync(model.begin)
        download.unidentified = model
        model.is_fetching = True
        try:
            fetching = FetchLayers(
                remote, facts, model, settings, download.retries(settings), download.progress
            )
            await fetching.run(layers, partial(self._make_room_for, shared), shared.header if shared else "")
        finally:
            model.is_fetching = False
        download.state = "checking"
        entry = await self.gathering.add(model)
        if entry is None:
            download.model = model.name
            download.waits_for = partial(self._waits_for, folder)
            log.info("%s: layers %s wait for %s", model.name, layers, download.waits_for())
            return None
        return await self._transfer.ensure(entry, layers, download.progress)

    async def _make_room_for(self, shared: SharedFileRequest | None, n_bytes: int) -> None:
        if shared is not None:
            shared.allow(n_bytes)
        await self._transfer.make_room(n_bytes)

    def _waits_for(self, folder: Path) -> str:
        """Empty as soon as it waits no longer."""
        model = self.gathering.in_folder(folder)
        return model.waits_for() if model is not None else ""

    def _folder_of(self, remote: FileRemote) -> Path:
        return self._folder / hashlib.sha256(remote.url.encode()).hexdigest()[:16]


async def _follow_up(download: Download, entry: CatalogueEntry) -> str:
    """Why what should be done with the model cannot be done: the model is here all the same."""
    try:
        if download.request.then is not None:
            await download.request.then(entry, download.published)
    except SwarmLLMError as error:
        return error.message
    return ""


def _throw_away(whole: WholeFile) -> None:
    """Blocking. Layers of the same file that wait for their model stay."""
    whole.forget()
    with contextlib.suppress(OSError):
        whole.part.parent.rmdir()


def _for_others(settings: DownloadSettings, *, is_own: bool) -> DownloadSettings:
    """Others can go on in place of a node that meets trouble, so that it gives up sooner."""
    settings = replace(settings, max_failures=min(settings.max_failures, SHARED_MAX_FAILURES))
    return settings if is_own else replace(settings, token="")


def _check_online(settings: DownloadSettings) -> None:
    if settings.offline:
        raise Offline("This node is offline (downloads.offline or HF_HUB_OFFLINE): it fetches nothing.")


def _named(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return type(error).__name__
