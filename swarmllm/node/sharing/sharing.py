"""Shares a model over the swarm: forecast, start, progress and end of a share.

The record of this node names the model from then on; each node that accepts that takes its part of the plan
by itself (`auto_shard`), this node as well, and again whenever a node comes or goes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import trio

from swarmllm.errors import BadModel, Conflict, InvalidRequest, SwarmLLMError
from swarmllm.models import CatalogueEntry, LayerRange, Manifest, covers, merge
from swarmllm.node.joining import Joining
from swarmllm.node.model_access import KnowsNewModels
from swarmllm.node.placing.auto_shard import AutoShardManager
from swarmllm.node.sharing.share_plan import SharePlan, plan_share
from swarmllm.swarm.records.registry import Registry
from swarmllm_proto.identifiers import NOT_PUBLISHED, ModelId, NodeId, PublishedName
from swarmllm_proto.swarm import NodeRecord

LOOK_AGAIN_S = 0.25
Find = Callable[[str], Awaitable[CatalogueEntry]]


@dataclass(frozen=True, slots=True)
class ShareMember:
    """A node that takes part, with what it holds of the model."""

    node_id: NodeId
    ready: tuple[LayerRange, ...]
    loading: tuple[LayerRange, ...]
    arrived_bytes: int
    total_bytes: int
    """Of what it is fetching, as it said last; 0: nothing, or it does not say."""


@dataclass(frozen=True, slots=True)
class ShareView:
    model: str
    model_id: ModelId
    n_layers: int
    """0: not known yet."""
    shared_by: tuple[NodeId, ...]
    """This node or others; empty right after the last one has withdrawn it."""
    n_ready: int
    """Layers that some node holds, this one or a connected one."""
    complete: bool
    state: str
    """What this node does for it; empty: nothing yet."""
    arrived_bytes: int
    total_bytes: int
    """Of what this node is fetching for it."""
    members: tuple[ShareMember, ...]
    problem: str = ""
    """Why nothing will become of it unless somebody does something; empty: nobody need."""


class Sharing:
    def __init__(
        self,
        placing: AutoShardManager,
        registry: Registry,
        node_id: NodeId,
        *,
        models: KnowsNewModels,
        joining: Joining | None = None,
    ) -> None:
        """`joining`: None where the other nodes are known already."""
        self._joining = joining
        self._placing = placing
        self._registry = registry
        self._node_id = node_id
        self._models = models

    async def plan(self, name: str) -> tuple[str, SharePlan]:
        """The model's name, and what would become of it. Raises what finding it raises, BadModel (its cuts
        are not known)."""
        entry = await self._models.find(name)
        return entry.name, await self.plan_of(entry.manifest)

    async def plan_of(
        self, manifest: Manifest, may_take_part: Callable[[NodeRecord], bool] = lambda record: True
    ) -> SharePlan:
        """What would become of a model of which only the layout need be known. `may_take_part`: of the
        others. Right after the start it waits until it knows of their room. Raises BadModel."""
        if manifest.n_layers < 1:
            raise BadModel(f"{manifest.name} has no layers")
        while True:
            if self._joining is not None:
                await self._joining.hear_peers()
            plan = await self._plan_now(manifest, may_take_part)
            if plan.is_complete or self._joining is None or not self._joining.is_under_way:
                return plan
            await trio.sleep(LOOK_AGAIN_S)

    async def _plan_now(self, manifest: Manifest, may_take_part: Callable[[NodeRecord], bool]) -> SharePlan:
        placing = self._placing
        await placing.learn_shapes()
        known = self._registry.working_nodes().items()
        records = {n: record for n, record in known if n == self._node_id or may_take_part(record)}
        records.setdefault(self._node_id, NodeRecord(node_id=self._node_id))
        return await trio.to_thread.run_sync(
            plan_share, manifest, self._node_id, records, placing.max_pipes, placing.own_room
        )

    async def share(
        self, name: str, source: PublishedName = NOT_PUBLISHED, *, is_permanent: bool = True
    ) -> ShareView:
        """`source`: where its file is published. `is_permanent`: over restarts. Raises what finding it
        raises, Conflict (too many, nobody could hold it, or its cuts are being tried)."""
        entry = await self._models.find(name)
        if not self._models.may_be_told(entry.model_id):
            raise Conflict(
                f"{entry.name} is being tried where it can be cut; share it when `swarmllm models add`, or"
                " its download, has ended.",
                field="model",
            )
        _, plan = await self.plan(entry.model_id)
        if not plan.is_complete:
            raise Conflict(no_room(entry.name, plan), field="model")
        await self._placing.share(entry, source, is_permanent=is_permanent)
        return self._view(entry.model_id, entry.name)

    async def unshare(self, name_or_id: str) -> ShareView:
        """By any name of the model. Raises InvalidRequest (no such share of this node), Conflict (the
        configuration shares it)."""
        shares = {share.model_id: share.name for share in self._placing.shares or ()}
        model_id = next((each for each, name in shares.items() if name_or_id in (each, name)), None)
        if model_id is None:
            # It was shared by another of its names.
            with suppress(SwarmLLMError):
                model_id = (await self._models.find(name_or_id)).model_id
        if model_id is None or model_id not in shares:
            raise InvalidRequest(self._not_shared(name_or_id, model_id), field="model")
        await self._placing.unshare(model_id)
        return self._view(model_id, shares[model_id])

    def _not_shared(self, said: str, model_id: ModelId | None) -> str:
        """Why this node cannot end sharing a model, and who can."""
        records = self._registry.working_nodes().items()
        sharers = [
            record.nickname or node_id
            for node_id, record in sorted(records)
            if any(model_id == share.model_id or said == share.name for share in record.shares or ())
            or any(said == file.name for file in record.shared_files or ())
        ]
        if sharers:
            return f"{said[:80]} is shared by {', '.join(sharers)}: run `swarmllm unshare` there."
        names = ", ".join(sorted(share.name for share in self._placing.shares or ()))
        return f"this node does not share a model {said[:80]!r} (it shares: {names or 'none'})."

    def views(self) -> tuple[ShareView, ...]:
        """Of what this node shares, and of what it holds for others; by name."""
        names = {share.model_id: share.name for share in self._placing.shares or ()}
        placed = {ModelId(model.name) for model in self._placing.models if model.shared}
        views = [self._view(model_id, names.get(model_id, "")) for model_id in {*names, *placed}]
        return tuple(sorted(views, key=lambda view: (view.model, view.model_id)))

    async def view(self, name_or_id: str) -> ShareView:
        """Of a model that nobody shares too. Raises what finding it raises."""
        for view in self.views():
            if name_or_id in (view.model, view.model_id):
                return view
        entry = await self._models.find(name_or_id)
        return self._view(entry.model_id, entry.name)

    def _view(self, model_id: ModelId, name: str) -> ShareView:
        shared_by, members, n_layers = [], [], 0
        for node_id, record in sorted(self._registry.working_nodes().items()):
            shared = {share.model_id: share.name for share in record.shares or ()}
            if model_id in shared:
                shared_by.append(node_id)
                name = name or shared[model_id]
            for said in record.models:
                if said.model_id == model_id:
                    ready, loading = (_ranges(pairs) for pairs in (said.ranges, said.loading))
                    fetched = said.fetched
                    if node_id == self._node_id:
                        fetched = self._placing.fetched(model_id)
                    done, total = fetched or (0, 0)
                    members.append(ShareMember(node_id, ready, loading, min(done, total), total))
                    n_layers = max(n_layers, said.n_layers)
        placed = next((m for m in self._placing.models if m.shared and m.name == model_id), None)
        if shape := self._placing.shape_of(model_id):
            n_layers = shape.n_layers
        ready = merge(layers for member in members for layers in member.ready)
        done, total = placed.arrived if placed is not None else (0, 0)
        return ShareView(
            name or model_id[:12],
            model_id,
            n_layers,
            tuple(shared_by),
            sum(map(len, ready)),
            n_layers > 0 and covers(ready, LayerRange(0, n_layers)),
            placed.state if placed is not None else "",
            done,
            total,
            tuple(members),
        )


def no_room(name: str, plan: SharePlan) -> str:
    """Why nobody could hold a model, in a sentence."""
    have, needs, n_nodes = sum(part.room_bytes for part in plan.parts), plan.size_bytes, len(plan.parts)
    nodes = "the node that takes part has" if n_nodes == 1 else f"the {n_nodes} nodes that take part have"
    text = f"{name} takes {_size(needs)} and {nodes} {_size(have)} left for it"
    if have >= needs:
        text += ", but not so that each layer fits on one of them"
    text += (
        ". More room: `swarmllm unshare` of another model, or more of auto_manage.max_memory_gib and"
        " auto_manage.max_disk_gib on a node"
    )
    if plan.refusing:
        who = (
            "1 connected node does" if len(plan.refusing) == 1 else f"{len(plan.refusing)} connected nodes do"
        )
        text += f"; {who} not accept what this one shares (auto_manage.accept; in a private swarm they do)"
    return f"{text}."


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"


def _ranges(pairs: tuple[tuple[int, int], ...]) -> tuple[LayerRange, ...]:
    return merge(LayerRange(*pair) for pair in pairs)
