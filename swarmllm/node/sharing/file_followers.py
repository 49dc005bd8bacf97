"""Fetches this node's parts of files that nodes share before anyone can name their models.

This node's parts are named in the records of nodes whose shares it accepts, or in its own record. It fetches
them within its disk budget, publishes its progress in its record, and retries what failed, until nobody asks
for it any more. Layers that never become a model are removed some time after that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from swarmllm.downloads import Download, DownloadRequest, Downloads, SharedDigests, SharedFileRequest
from swarmllm.downloads.unidentified_model import UnidentifiedModel
from swarmllm.errors import StoreFull, SwarmLLMError
from swarmllm.models import CatalogueEntry, LayerRange, merge, needed_tensors, subtract
from swarmllm.node.placing.disk import PlacingDisk
from swarmllm.node.placing.share_book import FOLLOWED_FILES_MAX, ShareBook
from swarmllm.node.sharing.file_parts import layers_of
from swarmllm_proto.identifiers import Digest, NodeId
from swarmllm_proto.swarm import FetchedFile, SharedFile

log = logging.getLogger("swarmllm.node")

RETRY_S = 30.0
"""After a part could not be fetched."""
ASK_AGAIN_S = 5.0
KEPT_S = 600.0
"""For so long layers of a file that nobody shares any more wait for their model; then they are removed."""


@dataclass(frozen=True, slots=True)
class HubAccess:
    """The hub access that the user gave when sharing a file; None: the node's own settings."""

    token: str | None = field(default=None, repr=False)
    endpoint: str | None = None


@dataclass(slots=True)
class FollowedFile:
    """A file of which this node fetches, or has fetched, some layers."""

    header: str
    size_bytes: int
    offered_s: float
    """When a node asked for it last."""
    file: SharedFile | None = None
    """None: known from an earlier run only."""
    is_own: bool = False
    layers: tuple[LayerRange, ...] = ()
    """That are asked of this node."""
    held: tuple[LayerRange, ...] = ()
    entry: CatalogueEntry | None = None
    """The model, once it is known."""
    problem: str = ""
    retry_at_s: float = 0.0
    download: Download | None = None
    unidentified: UnidentifiedModel | None = None
    """Where the bytes of the last download are, if nobody knew the model then."""
    arrived: tuple[int, int] = (0, 0)
    reserved: dict[LayerRange, int] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[LayerRange, ...]:
        return subtract(self.layers, self.held)

    def announcement(self) -> FetchedFile:
        done, total = self.arrived
        return FetchedFile(
            header=Digest(self.header),
            state="failed" if self.problem else "fetching" if self.missing else "done",
            layers=tuple((layers.start, layers.end) for layers in self.held)[:64],
            arrived_bytes=min(done, total),
            total_bytes=total,
            problem=self.problem[:300],
        )


class Followers:
    def __init__(
        self,
        *,
        downloads: Downloads,
        gathering: SharedDigests,
        disk: PlacingDisk,
        book: ShareBook,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called when the swarm should hear of a part that has come, or cannot be had."""
        self.files: dict[str, FollowedFile] = {}
        """By header."""
        self._downloads = downloads
        self._gathering = gathering
        self._disk = disk
        self._book = book
        self._on_change = on_change
        self._access: dict[str, HubAccess] = {}

    def may_use(self, header: str, access: HubAccess) -> None:
        """For a file that this node's user shares; kept nowhere else."""
        self._access[header] = access

    async def look(self, own: NodeId, offers: Mapping[NodeId, Iterable[SharedFile]], now_s: float) -> None:
        """`offers`: what the nodes share that are followed, this one's own too."""
        wanted = _wanted(own, offers)
        for header, size_bytes in self._book.followed.items():
            self.files.setdefault(header, FollowedFile(header, size_bytes, now_s))
        for header, (file, is_own, layers) in wanted.items():
            is_new = header not in self.files
            if is_new and len(self.files) >= FOLLOWED_FILES_MAX:
                continue
            followed = self.files.setdefault(header, FollowedFile(header, file.size_bytes, now_s))
            followed.file, followed.is_own, followed.layers = file, is_own, layers
            followed.offered_s = now_s
            if is_new and not is_own:
                self._book.followed[header] = file.size_bytes
                await self._book.save()
        for header, followed in list(self.files.items()):
            if header not in wanted:
                followed.layers = ()
            before = followed.announcement()
            try:
                await self._advance(followed, now_s)
            except SwarmLLMError as error:
                followed.problem, followed.retry_at_s = error.message, now_s + RETRY_S
            now = followed.announcement()
            if (before.state, before.layers) != (now.state, now.layers):
                self._on_change()
            if header not in wanted and (followed.entry is not None or now_s - followed.offered_s > KEPT_S):
                await self._forget(followed)

    async def _advance(self, followed: FollowedFile, now_s: float) -> None:
        was_known = followed.entry is not None
        followed.entry = await self._gathering.model_of(followed.header, followed.size_bytes)
        waiting = None
        if followed.entry is None:
            waiting = self._gathering.waiting_for(followed.header, followed.size_bytes)
            followed.held = waiting.held if waiting is not None else ()
        else:
            followed.held = _here(followed.entry, followed.layers)
            if not was_known:
                await self._is_known(followed, followed.entry)
        download = followed.download
        if download is not None and not download.ended.is_set():
            followed.arrived = (download.done_bytes, download.total_bytes)
            if not any(download.layers == str(layers) for layers in followed.missing):
                download.scope.cancel()
            return
        if download is not None:
            followed.download, followed.unidentified = None, download.unidentified
            if download.state == "failed":
                followed.problem, followed.retry_at_s = download.error, now_s + RETRY_S
                log.info(
                    "fetching layers %s of %s: %s", download.layers, followed.header[:12], download.error
                )
        if not followed.layers and waiting is not None and now_s >= followed.retry_at_s:
            # Its writer has withdrawn it, probably because it knows the model now.
            followed.retry_at_s = now_s + ASK_AGAIN_S
            await self._gathering.ask_again(waiting)
        if not followed.missing:
            followed.problem = ""
        elif now_s >= followed.retry_at_s:
            followed.problem = ""
            await self._fetch(followed, followed.missing[0])

    async def _fetch(self, followed: FollowedFile, layers: LayerRange) -> None:
        """Raises what starting a download raises."""
        file = followed.file
        if file is None or not file.source:
            return

        def allow(n_bytes: int) -> None:
            n_bytes = max(n_bytes, followed.reserved.get(layers, 0))
            others = sum(room for part, room in followed.reserved.items() if part != layers)
            free_bytes = self._disk.free_bytes + sum(followed.reserved.values())
            if not followed.is_own and others + n_bytes > free_bytes:
                raise StoreFull(
                    f"layers {layers} of {file.name} take {n_bytes} bytes, and this node has"
                    f" {free_bytes - others} left for what others share (auto_manage.max_disk_gib)"
                )
            followed.reserved[layers] = n_bytes
            self._disk.reserve(followed.header, others + n_bytes)

        access = self._access.get(followed.header, HubAccess()) if followed.is_own else HubAccess()
        followed.arrived = (0, 0)
        followed.download = self._downloads.start(
            DownloadRequest(
                file.source,
                layers=str(layers),
                name=await self._name_for(followed, file),
                token=access.token,
                endpoint=access.endpoint,
                shared=SharedFileRequest(
                    file.header,
                    file.size_bytes,
                    file.sha256 or "",
                    allow,
                    is_own=followed.is_own,
                ),
            )
        )

    async def _name_for(self, followed: FollowedFile, file: SharedFile) -> str:
        """As its writer calls it, unless that is another model here."""
        if followed.entry is not None:
            return followed.entry.name
        waiting = self._gathering.waiting_for(followed.header, followed.size_bytes)
        if waiting is not None:
            return waiting.name
        return file.name if await self._downloads.is_free(file.name) else f"{file.name}-{file.header[:8]}"

    async def _is_known(self, followed: FollowedFile, entry: CatalogueEntry) -> None:
        followed.reserved.clear()
        self._disk.reserve(followed.header, 0)
        if entry.is_stored and not followed.is_own:
            await self._disk.charge(entry.model_id)

    async def _forget(self, followed: FollowedFile) -> None:
        download = followed.download
        if download is not None and not download.ended.is_set():
            return
        del self.files[followed.header]
        self._access.pop(followed.header, None)
        self._disk.reserve(followed.header, 0)
        left = self._gathering.waiting_for(followed.header, followed.size_bytes) or followed.unidentified
        if left is not None and not followed.is_own:
            try:
                await self._gathering.discard(left)
            except SwarmLLMError as error:
                log.info("layers of %s stay: %s", left.name, error.message)
        if self._book.followed.pop(followed.header, None) is not None:
            await self._book.save()
        self._on_change()


def _wanted(
    own: NodeId, offers: Mapping[NodeId, Iterable[SharedFile]]
) -> dict[str, tuple[SharedFile, bool, tuple[LayerRange, ...]]]:
    """Header -> (the file, whether this node shares it, the layers that this node is asked for); its own
    first."""
    wanted: dict[str, tuple[SharedFile, bool, tuple[LayerRange, ...]]] = {}
    for node_id in sorted(offers, key=lambda node_id: (node_id != own, node_id)):
        for file in offers[node_id]:
            layers = merge(layers_of(part) for part in file.parts if part.node_id == own)
            if not layers and node_id != own:
                continue
            first, is_own, before = wanted.get(file.header, (file, node_id == own, ()))
            if (first.size_bytes, first.sha256) == (file.size_bytes, file.sha256):
                wanted[file.header] = (first, is_own, merge([*before, *layers]))
    return wanted


def _here(entry: CatalogueEntry, wanted: Iterable[LayerRange]) -> tuple[LayerRange, ...]:
    return merge(
        layers
        for layers in wanted
        if layers in entry.manifest.whole and not entry.absent(needed_tensors(entry.manifest, layers))
    )
