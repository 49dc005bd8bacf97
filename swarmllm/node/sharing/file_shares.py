"""Shares a file of a hub without any node fetching all of it: each node fetches the layers that it is going
to hold.

Until every layer has been hashed by some node, nobody can know which model it is: a ModelId covers all of it
(see `downloads.shared_digests`). So this node's record names the file and who fetches what. Each node that
accepts that fetches its parts from the hub that it is configured for. As soon as this node knows the model,
it is shared like every other one, and the nodes find on their disks what they are to load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import trio
from msgspec import UNSET, UnsetType

from swarmllm.downloads import Downloads, PublishedModel, SharedDigests
from swarmllm.errors import Conflict, SwarmLLMError
from swarmllm.models import CatalogueEntry, LayerRange, merge
from swarmllm.models.names import check_name
from swarmllm.node.placing.accepted_shares import MEMBERS, accepts
from swarmllm.node.placing.share_book import SHARED_FILES_MAX, ShareBook
from swarmllm.node.sharing.file_followers import FollowedFile, Followers, HubAccess
from swarmllm.node.sharing.file_parts import first_parts, hand_over, layers_of
from swarmllm.node.sharing.share_plan import SharePlan
from swarmllm.node.sharing.sharing import ShareMember, ShareView, Sharing
from swarmllm.node.views import Nicknames
from swarmllm.shared_ticks import REST_TICK_S, next_tick_s
from swarmllm.swarm.records.registry import Registry
from swarmllm_proto.architectures import ARCHITECTURES
from swarmllm_proto.identifiers import Digest, ModelId, NodeId
from swarmllm_proto.swarm import FetchedFile, NodeRecord, SharedFile

log = logging.getLogger("swarmllm.node")

LOOK_S = 1.0
REST_S = 5.0
"""Between looks while nothing is shared."""
SILENT_S = 30.0
"""A node that is connected and says nothing of its parts for so long does not fetch them."""
GONE_S = 60.0
"""And one that is not connected any more does not come back."""
OUTDATED_S = 10.0
"""For so long after the model is known, other nodes' records may still say less than they have fetched."""
NO_MODEL = ModelId("")
"""In views of a file whose model is not known yet."""


@dataclass(slots=True)
class _Shared:
    """A file that this node shares."""

    file: SharedFile
    n_layers: int
    failed: dict[NodeId, str] = field(default_factory=dict)
    """Nodes that cannot fetch their parts, and why."""
    heard_s: dict[NodeId, float] = field(default_factory=dict)
    """When a node's record last said that it fetches its parts; at first, when it was asked to."""
    problem: str = ""
    retry_at_s: float = 0.0
    """When sharing the model is tried again, once it is known."""
    refused_s: float | None = None
    """When there was no room for it for the first time."""


class FileShares:
    def __init__(
        self,
        node_id: NodeId,
        *,
        registry: Registry,
        downloads: Downloads,
        gathering: SharedDigests,
        sharing: Sharing,
        followers: Followers,
        accept: tuple[str, ...],
        book: ShareBook,
        nicknames: Nicknames,
        on_change: Callable[[], None],
    ) -> None:
        """`accept`: whose files this node fetches parts of, node ids or `members`. `on_change` is called when
        the swarm should hear of what is shared."""
        self._node_id = node_id
        self._registry = registry
        self._downloads = downloads
        self._gathering = gathering
        self._sharing = sharing
        self._followers = followers
        self._accept = accept
        self._book = book
        self._nicknames = nicknames
        self._on_change = on_change
        self._wake = trio.Event()
        self._shared = {
            header: _Shared(file, max((part.end for part in file.parts), default=0))
            for header, file in book.files.items()
        }

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look(trio.current_time())
            if self._shared or self._followers.files:
                wait_s = LOOK_S
            else:
                wait_s = REST_S if self._accept else REST_TICK_S
            with trio.move_on_at(next_tick_s(trio.current_time(), wait_s)):
                await self._wake.wait()
            self._wake = trio.Event()

    # What the swarm is told.

    @property
    def shared(self) -> tuple[SharedFile, ...] | UnsetType:
        return tuple(each.file for each in self._shared.values() if each.file.parts) or UNSET

    @property
    def fetched(self) -> tuple[FetchedFile, ...] | UnsetType:
        if self._downloads.is_offline or not (self._accept or self._shared):
            return UNSET
        files = self._followers.files.values()
        return tuple(followed.announcement() for followed in files if followed.layers)

    async def plan(self, found: PublishedModel) -> SharePlan | None:
        """What would become of it if each node fetched its own layers; None: that cannot be. Raises
        BadModel."""
        if not found.source or found.layout.architecture not in ARCHITECTURES:
            return None
        if await self._gathering.model_of(found.header, found.file_bytes) is not None:
            return None
        plan = await self._sharing.plan_of(found.layout, self._is_able)
        return plan if first_parts(plan, found.layout, self._node_id) else None

    def _is_able(self, record: NodeRecord) -> bool:
        """Whether another node would fetch layers for this one."""
        return record.fetched_files is not UNSET and accepts(record.capability, self._node_id)

    async def share(self, source: str, name: str | None, access: HubAccess) -> ShareView:
        """Raises Conflict (each node for itself cannot fetch it, the name is another model's, or two such
        files are shared already), and what reading the header raises."""
        found = await self._downloads.published(source, token=access.token, endpoint=access.endpoint)
        name = found.name if name is None else name
        check_name(name)
        plan = await self.plan(found)
        if plan is None:
            raise Conflict(
                f"{name} cannot be fetched by each node for itself; fetch it first:"
                f" swarmllm models pull {source}",
                field="source",
            )
        if found.header not in self._shared and len(self._shared) >= SHARED_FILES_MAX:
            raise Conflict(f"this node shares {SHARED_FILES_MAX} such files already.", field="source")
        waiting = self._gathering.waiting_for(found.header, found.file_bytes)
        if (waiting is None or waiting.name != name) and not await self._downloads.is_free(name):
            raise Conflict(f"another model is called {name}; choose with --name", field="name")
        parts = first_parts(plan, found.layout, self._node_id)
        file = SharedFile(
            source=found.source,
            name=name,
            header=Digest(found.header),
            size_bytes=found.file_bytes,
            sha256=Digest(found.sha256) if found.sha256 else UNSET,
            parts=parts,
        )
        self._followers.may_use(file.header, access)
        self._shared[file.header] = shared = _Shared(file, found.layout.n_layers)
        await self._save()
        log.info("sharing %s: each node fetches its layers of %s", name, file.source)
        return self._view(file, shared)

    async def unshare(self, name: str) -> ShareView | None:
        """None: there is no such file."""
        for header, shared in self._shared.items():
            if shared.file.name == name:
                del self._shared[header]
                await self._save()
                return self._view(shared.file, shared)
        return None

    def views(self) -> tuple[ShareView, ...]:
        """Of what this node shares, and of what it fetches parts of for others."""
        views = [self._view(shared.file, shared) for shared in self._shared.values()]
        views += [
            self._view(followed.file, None)
            for header, followed in self._followers.files.items()
            if followed.file is not None and followed.layers and header not in self._shared
        ]
        return tuple(views)

    def view(self, name: str) -> ShareView | None:
        return next((view for view in self.views() if view.model == name), None)

    async def look(self, now_s: float) -> None:
        """One look at everything, and what follows from it."""
        records = self._registry.working_nodes()
        offers = {
            node_id: record.shared_files or ()
            for node_id, record in records.items()
            if node_id != self._node_id and (MEMBERS in self._accept or node_id in self._accept)
        }
        offers[self._node_id] = self.shared or ()
        await self._followers.look(self._node_id, offers, now_s)
        for shared in list(self._shared.values()):
            followed = self._followers.files.get(shared.file.header)
            if followed is not None and followed.entry is not None:
                await self._finish(shared, followed.entry, now_s)
            elif shared.file.parts:
                await self._replace_failed(shared, followed, records, now_s)

    async def _finish(self, shared: _Shared, entry: CatalogueEntry, now_s: float) -> None:
        """The model is known."""
        if now_s < shared.retry_at_s:
            return
        try:
            await self._sharing.share(entry.model_id, shared.file.source)
        except SwarmLLMError as error:
            if shared.refused_s is None:
                shared.refused_s = now_s
            if now_s - shared.refused_s >= OUTDATED_S:
                shared.problem, shared.retry_at_s = error.message, now_s + SILENT_S
            return
        # It may have been withdrawn meanwhile.
        if self._shared.pop(shared.file.header, None) is not None:
            await self._save()

    async def _replace_failed(
        self,
        shared: _Shared,
        followed: FollowedFile | None,
        records: Mapping[NodeId, NodeRecord],
        now_s: float,
    ) -> None:
        file = shared.file
        n_failed = len(shared.failed)
        for node_id in {part.node_id for part in file.parts} - shared.failed.keys():
            if why := self._failure_of(shared, followed, node_id, records, now_s):
                log.info("sharing %s: node %s does not fetch its layers: %s", file.name, node_id, why)
                shared.failed[node_id] = why
        if len(shared.failed) == n_failed:
            return
        others = [
            node_id
            for node_id, record in records.items()
            if node_id != self._node_id and self._is_able(record)
        ]
        others.sort(
            key=lambda node_id: (-(records[node_id].capability.placing_free_disk_bytes or 0), node_id)
        )
        parts = None
        # Without any layer here, this node would not even learn which model it is.
        if self._node_id not in shared.failed or self._gathering.waiting_for(file.header, file.size_bytes):
            takers = [self._node_id, *others]
            parts = hand_over(file.parts, shared.n_layers, shared.failed.keys(), takers)
        if parts is None:
            reasons = [
                f"{self._nicknames.nickname_of(node_id) or node_id}: {why}"
                for node_id, why in shared.failed.items()
            ]
            shared.problem = f"nobody can fetch the rest of it. {'; '.join(reasons)}"
            log.warning("the share of %s is stuck: %s", file.name, shared.problem)
        shared.file = msgspec.structs.replace(file, parts=parts or ())
        await self._save()

    def _failure_of(
        self,
        shared: _Shared,
        followed: FollowedFile | None,
        node_id: NodeId,
        records: Mapping[NodeId, NodeRecord],
        now_s: float,
    ) -> str:
        """Why a node does not fetch its parts; empty: it does, or may still begin."""
        if node_id == self._node_id:
            return followed.problem if followed is not None else ""
        record = records.get(node_id)
        said = _said(record, shared.file.header)
        since_s = shared.heard_s.setdefault(node_id, now_s)
        if said is None:
            is_over = now_s - since_s > (SILENT_S if record is not None else GONE_S)
            return "it is gone" if is_over and record is None else "it does not answer" if is_over else ""
        shared.heard_s[node_id] = now_s
        return (said.problem or "it failed") if said.state == "failed" else ""

    async def _save(self) -> None:
        self._book.files = {header: shared.file for header, shared in self._shared.items()}
        await self._book.save()
        self._on_change()
        self._wake.set()

    def _view(self, file: SharedFile, shared: _Shared | None) -> ShareView:
        records = self._registry.working_nodes()
        members: list[ShareMember] = []
        held: list[LayerRange] = []
        for node_id in dict.fromkeys(part.node_id for part in file.parts):
            layers = merge(layers_of(part) for part in file.parts if part.node_id == node_id)
            followed = self._followers.files.get(file.header) if node_id == self._node_id else None
            said = followed.announcement() if followed else _said(records.get(node_id), file.header)
            done, total = (said.arrived_bytes, said.total_bytes) if said is not None else (0, 0)
            members.append(ShareMember(node_id, (), layers, min(done, total), total))
            held += [LayerRange(*pair) for pair in said.layers] if said is not None else []
        own = self._followers.files.get(file.header)
        done, total = own.arrived if own is not None else (0, 0)
        writers = [
            n
            for n, record in records.items()
            if any(f.header == file.header for f in record.shared_files or ())
        ]
        return ShareView(
            file.name,
            NO_MODEL,
            shared.n_layers if shared is not None else max((part.end for part in file.parts), default=0),
            tuple(sorted({*writers, *((self._node_id,) if shared is not None else ())})),
            0,
            False,
            f"fetched, each node its layers: {sum(map(len, merge(held)))} are on a disk",
            done,
            total,
            tuple(members),
            shared.problem if shared is not None else "",
        )


def _said(record: NodeRecord | None, header: str) -> FetchedFile | None:
    files = () if record is None else record.fetched_files or ()
    return next((each for each in files if each.header == header), None)
