"""Fetches KV for the stages of a cut model before their rows come, from nodes that the origin names.

The origin of a request knows which stages of its earlier requests keep the prompt's beginning
(`stage_holders`), and sends a stage that does not to one that does. The stage fetches the KV of its own
layers, from a stage of the same layers or of more, as `fetching` does for whole models: predicted first, in
slices, with the same time limits and the same checks of the bytes.

A stage sees no tokens, so it cannot compute a block of the KV again. What it fetched stays marked: it is
used for requests of the origin that named the holder, given to nobody, and announced to nobody. It is in the
format of this node's worker: an answer that goes on after a stage was lost says the same as before.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import trio

from swarmllm.errors import SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.own_models import FindsOwnModels
from swarmllm.pipeline.prefix.choice import FetchClock, WireRows
from swarmllm.pipeline.prefix.transfer import PrefixSource, PrefixTransfer, WantedPrefix
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.route.inputs import prefill_here_s
from swarmllm.scheduling.speeds import Observations
from swarmllm.swarm.records.registry import Registry
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc.kv import NAME_SIZE, join_names, split_names
from swarmllm_proto.limits import PREFIX_KV_MAX, PREFIX_READ_MAX
from swarmllm_proto.swarm import KeptElsewhere, StageBlocks

log = logging.getLogger(__name__)

FETCHED_MAX: Final = 1024
"""Beginnings of which it is known that they came from another node."""


class FetchesForStages(Protocol):
    async def bring(
        self,
        context: RequestContext,
        prefixes: Sequence[StageBlocks],
        kept: Sequence[KeptElsewhere],
        *,
        is_awaited: bool = True,
    ) -> None:
        """What could be had of the prompt's beginning for the stages here is in the worker then.
        `is_awaited`: a request waits, which must not lose more than it may gain. Raises nothing of its
        own."""
        ...

    async def n_blocks_here(self, context: RequestContext, prefixes: Sequence[StageBlocks]) -> int:
        """Of the prompt's first blocks, those of which every stage here has rows. Raises SwarmLLMError."""
        ...

    def fetched(
        self, context: RequestContext, prefixes: Sequence[StageBlocks], n_blocks: int
    ) -> tuple[int, ...]:
        """The stages here whose first rows rest on KV that another node gave. `n_blocks`: of the request's
        first blocks, those of which every stage here has rows."""
        ...


class FetchesNothing:
    async def bring(
        self,
        context: RequestContext,
        prefixes: Sequence[StageBlocks],
        kept: Sequence[KeptElsewhere],
        *,
        is_awaited: bool = True,
    ) -> None:
        await trio.lowlevel.checkpoint()

    async def n_blocks_here(self, context: RequestContext, prefixes: Sequence[StageBlocks]) -> int:
        await trio.lowlevel.checkpoint()
        return 0

    def fetched(
        self, context: RequestContext, prefixes: Sequence[StageBlocks], n_blocks: int
    ) -> tuple[int, ...]:
        return ()


@dataclass(slots=True)
class StageFetcher:
    node_id: NodeId
    registry: Registry
    transfer: PrefixTransfer
    observations: Observations
    own_models: FindsOwnModels
    _fetched: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Names of first blocks."""

    async def bring(
        self,
        context: RequestContext,
        prefixes: Sequence[StageBlocks],
        kept: Sequence[KeptElsewhere],
        *,
        is_awaited: bool = True,
    ) -> None:
        origin = context.view.origin
        if not kept or not (origin == self.node_id or self.registry.may_share(origin)):
            return
        holder: NodeId | None = None

        def asks(node_id: NodeId | None) -> None:
            nonlocal holder
            holder = node_id

        with trio.move_on_after(self.transfer.settings.asker_timeout_s) as scope:
            for blocks in _of_stages_here(context, prefixes):
                sources = self._sources(kept, blocks)
                try:
                    await self._bring(context, blocks, sources, asks, is_awaited=is_awaited)
                except SwarmLLMError as error:
                    provoked_by(log, origin).info("KV is not fetched for a stage: %s", error.message)
        if scope.cancelled_caught:
            self.transfer.gave_up(holder)

    async def n_blocks_here(self, context: RequestContext, prefixes: Sequence[StageBlocks]) -> int:
        n_blocks: list[int] = []
        for blocks in _of_stages_here(context, prefixes):
            here = await self.transfer.store.look_up_prefix(
                context.model, context.view.layers(blocks.stage), blocks.names, self._scope(context)
            )
            n_blocks.append(here.n_blocks)
        return min(n_blocks, default=0)

    def _scope(self, context: RequestContext) -> str:
        """Whose names they are; empty: this node's own."""
        origin = context.view.origin
        return "" if origin == self.node_id else origin

    def fetched(
        self, context: RequestContext, prefixes: Sequence[StageBlocks], n_blocks: int
    ) -> tuple[int, ...]:
        mine = _of_stages_here(context, prefixes)
        if not n_blocks:
            # All of it is computed here.
            for blocks in mine:
                self._fetched.pop(_first(blocks), None)
        return tuple(blocks.stage for blocks in mine if _first(blocks) in self._fetched)

    def _sources(self, kept: Sequence[KeptElsewhere], blocks: StageBlocks) -> list[PrefixSource]:
        """What of `kept` this node may and can use for a stage."""
        found: list[PrefixSource] = []
        own = split_names(blocks.names)
        for each in kept:
            if each.stage != blocks.stage or each.n_blocks > len(own):
                continue
            if self.registry.may_share(each.node_id):
                names = split_names(each.names) or own[: each.n_blocks]
                found.append(PrefixSource(each.node_id, names, LayerRange(each.start, each.end)))
        return found

    async def _bring(
        self,
        context: RequestContext,
        blocks: StageBlocks,
        sources: Sequence[PrefixSource],
        asks: Callable[[NodeId | None], None],
        *,
        is_awaited: bool,
    ) -> None:
        """Raises SwarmLLMError of this node."""
        if not sources:
            return
        began_s, transfer = trio.current_time(), self.transfer
        model, layers, names = context.model, context.view.layers(blocks.stage), split_names(blocks.names)
        origin, scope = context.view.origin, self._scope(context)
        n_blocks = max(source.n_blocks for source in sources)
        async with transfer.turn(names[n_blocks - 1]) as has_turn:
            turn_s = trio.current_time()
            here = await transfer.store.look_up_prefix(
                model, layers, join_names(names[:n_blocks]), scope, cuts=True
            )
            if here.n_blocks >= n_blocks or not here.row_bytes:
                return
            if not has_turn:
                transfer.declined("too_many", "too much is fetched already")
                return
            entry = await self.own_models.get(model.model_id)
            records = [self.registry.node(source.node_id) for source in sources]
            others = [record.capability for record in records if record is not None]
            whole_s = prefill_here_s(model.model_id, entry.manifest, self.observations, others)
            if whole_s is None:
                transfer.declined("own_speed_unknown", "nothing is known of how fast this node is")
                return
            prefill_s = whole_s * len(layers) / entry.manifest.n_layers
            n_known = here.n_blocks * BLOCK_TOKENS
            # What nobody waits for may take all the time that the network is given.
            cold_s = (context.n_given_tokens - n_known) * prefill_s if is_awaited else math.inf
            now_s, limit_s = trio.current_time(), transfer.settings.network_timeout_s
            clock = FetchClock.started(began_s, turn_s, now_s, limit_s, cold_s, prefill_s)
            n_held = max(len(source.held) for source in sources if source.held is not None)
            read_bytes = math.ceil(here.row_bytes * n_held / len(layers) * PREFIX_KV_MAX / PREFIX_READ_MAX)
            wire = WireRows(here.row_bytes, read_bytes=read_bytes)
            wanted = WantedPrefix(model, layers, names, here.kv_format, wire, origin, scope)
            with ExitStack() as grants:
                came = await transfer.ask_sources(
                    wanted, partial(self._longest, sources), n_known, clock, asks, grants
                )
                if came is not None:
                    self._note(_first(blocks))
                    await transfer.take_in(came)

    def _longest(self, sources: Sequence[PrefixSource], but: Container[NodeId]) -> list[PrefixSource]:
        now_s = trio.current_time()
        able = [
            source
            for source in sources
            if source.node_id not in but and not self.transfer.avoided.has(source.node_id, now_s)
        ]
        n_blocks = max((source.n_blocks for source in able), default=0)
        return [source for source in able if source.n_blocks == n_blocks]

    def _note(self, first: bytes) -> None:
        self._fetched[first] = None
        self._fetched.move_to_end(first)
        if len(self._fetched) > FETCHED_MAX:
            self._fetched.popitem(last=False)


def _of_stages_here(context: RequestContext, prefixes: Iterable[StageBlocks]) -> list[StageBlocks]:
    """Those with a name."""
    view = context.view
    mine = {stage for stage in range(len(view.stages)) if view.is_here(stage)}
    return [blocks for blocks in prefixes if blocks.stage in mine and blocks.names]


def _first(blocks: StageBlocks) -> bytes:
    return blocks.names[:NAME_SIZE]
