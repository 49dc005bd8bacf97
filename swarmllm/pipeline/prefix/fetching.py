"""Fetches KV of a prompt's beginning before this node's worker computes the prompt, and has it checked later.

It fetches only for requests of this node's own clients that run here as a whole. A failed fetch is no error
of the request: the worker computes the prompt as usual.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Container, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import numpy as np
import trio

from swarmllm.errors import SwarmLLMError, WorkerDied
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.origin.generation import FetchedPrefix
from swarmllm.pipeline.prefix.choice import FetchClock, draw_blocks, whole_blocks, wire_rows
from swarmllm.pipeline.prefix.serving import whole_range
from swarmllm.pipeline.prefix.transfer import GivenRows, PrefixSource, PrefixTransfer, WantedPrefix
from swarmllm.pipeline.request import new_request_id
from swarmllm.pipeline.route.inputs import prefill_here_s
from swarmllm.scheduling.speeds import Observations
from swarmllm.swarm.peers.trust import TrustEvent
from swarmllm.swarm.records.prefix_index import PrefixMatch
from swarmllm.swarm.records.registry import Registry
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.blocks import BLOCK_TOKENS, extend_block_hashes, kept_root
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.ipc.kv import CheckOutcome, join_names
from swarmllm_proto.swarm import DIGEST_SIZE, NAMES_MAX, NodeCapability
from swarmllm_proto.tensors import Tensor

log = logging.getLogger(__name__)

CHECKS_MAX: Final = 8
"""Beginnings that wait for their check; of more nothing is fetched."""
IDLE_WAIT_S: Final = 30.0
"""So long a check waits for this node to have nothing else to do."""
LOOK_S: Final = 0.25
CHECK_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class _Unchecked:
    node_id: NodeId
    model: ModelFile
    layers: LayerRange
    tokens: Tensor
    """Of all blocks that came."""


@dataclass(slots=True)
class _FetchProgress:
    """The progress of one request's fetch, kept for the case that its time runs out."""

    holder: NodeId | None = None
    """The node that is to give something now."""
    unchecked: list[_Unchecked] = field(default_factory=list)
    """What the worker may have taken."""

    def asks(self, holder: NodeId | None) -> None:
        self.holder = holder


class NodeLoad(Protocol):
    def is_busy(self) -> bool:
        """Whether requests run here."""
        ...


@dataclass(slots=True)
class PrefixFetcher:
    registry: Registry
    transfer: PrefixTransfer
    observations: Observations
    here: NodeLoad
    key: str = field(default="", repr=False)
    """What names are keyed with."""
    chance: Callable[[], float] = field(default_factory=lambda: secrets.SystemRandom().random)
    _unchecked: deque[_Unchecked] = field(default_factory=deque)
    _has_work: trio.Event = field(default_factory=trio.Event)

    @asynccontextmanager
    async def brought(
        self, entry: CatalogueEntry, tokens: Tensor, *, is_exact: bool
    ) -> AsyncIterator[FetchedPrefix | None]:
        """Before a prompt is computed: what could be had of its beginning is in the worker. It is checked
        after the block. Raises nothing of its own."""
        asking = _FetchProgress()
        fetched = None
        if not is_exact and len(self._unchecked) < CHECKS_MAX:
            with trio.move_on_after(self.transfer.settings.asker_timeout_s) as scope:
                fetched = await self._bring(entry, tokens, asking)
            if scope.cancelled_caught:
                self.transfer.gave_up(asking.holder)
        try:
            yield fetched
        finally:
            if asking.unchecked:
                self._unchecked.extend(asking.unchecked)
                self._has_work.set()

    async def run(self) -> None:
        """Check what came, one after the other, while nothing else is to be done here."""
        while True:
            while self._unchecked:
                await self._check(self._unchecked.popleft())
            self._has_work = trio.Event()
            await self._has_work.wait()

    async def _bring(
        self, entry: CatalogueEntry, tokens: Tensor, asking: _FetchProgress
    ) -> FetchedPrefix | None:
        model_id, n_layers = entry.model_id, entry.manifest.n_layers
        layers = whole_range(self.transfer.store, model_id, n_layers)
        n_blocks = min(whole_blocks(len(tokens)), NAMES_MAX // DIGEST_SIZE)
        if layers is None or not n_blocks:
            return None
        began_s = trio.current_time()
        root = kept_root(self.key, model_id, n_layers)
        hashes = extend_block_hashes(root, tokens[: n_blocks * BLOCK_TOKENS])
        match, holders = self._holders(model_id, hashes, ())
        if not holders:
            if self.registry.holders_of_prefix(model_id, hashes).node_ids:
                self.transfer.declined("avoided", "all that keep it failed a short time ago")
            return None
        names, model = hashes[: match.n_blocks], ModelFile.of(entry)
        try:
            async with self.transfer.turn(names[-1]) as has_turn:
                turn_s = trio.current_time()
                here = await self.transfer.store.look_up_prefix(model, layers, join_names(names))
                if here.n_blocks >= match.n_blocks or not here.row_bytes:
                    return None
                if not has_turn:
                    self.transfer.declined("too_many", "too much is fetched already")
                    return None
                prefill_s = prefill_here_s(
                    model_id, entry.manifest, self.observations, self._capabilities(holders)
                )
                if prefill_s is None:
                    self.transfer.declined("own_speed_unknown", "nothing is known of how fast this node is")
                    return None
                n_known = here.n_blocks * BLOCK_TOKENS
                cold_s = (len(tokens) - n_known) * prefill_s
                now_s, limit_s = trio.current_time(), self.transfer.settings.network_timeout_s
                clock = FetchClock.started(began_s, turn_s, now_s, limit_s, cold_s, prefill_s)
                wire = wire_rows(here, self.transfer.settings)
                wanted = WantedPrefix(model, layers, hashes, here.kv_format, wire)
                find = partial(self._sources, model_id, hashes)
                with ExitStack() as grants:
                    found = await self.transfer.ask_sources(wanted, find, n_known, clock, asking.asks, grants)
                    return await self._take_in(found, tokens, asking, began_s) if found is not None else None
        except SwarmLLMError as error:
            log.info("the worker takes no part in fetching KV: %s", error.message)
            return None

    def _sources(
        self, model_id: ModelId, hashes: Sequence[bytes], but: Container[NodeId]
    ) -> list[PrefixSource]:
        match, holders = self._holders(model_id, hashes, but)
        return [PrefixSource(node_id, hashes[: match.n_blocks]) for node_id in holders]

    def _holders(
        self, model_id: ModelId, hashes: Sequence[bytes], but: Container[NodeId]
    ) -> tuple[PrefixMatch, list[NodeId]]:
        """Of the longest beginning of these blocks that anybody keeps who is not avoided nor in `but`."""
        now_s, n_blocks = trio.current_time(), len(hashes)
        while n_blocks:
            match = self.registry.holders_of_prefix(model_id, hashes[:n_blocks])
            holders = [
                each
                for each in match.node_ids
                if each not in but and not self.transfer.avoided.has(each, now_s)
            ]
            if holders:
                return match, holders
            n_blocks = match.n_blocks - 1 if match.n_blocks else 0
        return PrefixMatch(), []

    def _capabilities(self, node_ids: list[NodeId]) -> list[NodeCapability]:
        records = (self.registry.node(node_id) for node_id in node_ids)
        return [record.capability for record in records if record is not None]

    async def _take_in(
        self, came: GivenRows, tokens: Tensor, asking: _FetchProgress, began_s: float
    ) -> FetchedPrefix | None:
        """None: a miss. Raises SwarmLLMError of this node's worker."""
        wanted, n_rows = came.wanted, came.n_rows
        own = np.array(tokens[:n_rows], np.int32)
        asking.unchecked.append(_Unchecked(came.node_id, wanted.model, wanted.layers, own))
        try:
            is_taken = await self.transfer.take_in(came)
        except SwarmLLMError:
            asking.unchecked.clear()
            raise
        if not is_taken:
            asking.unchecked.clear()
            return None
        took_s = trio.current_time() - began_s
        return FetchedPrefix(came.node_id, n_rows, came.n_bytes, took_s, other_format=came.other_format)

    async def _check(self, due: _Unchecked) -> None:
        with trio.move_on_after(IDLE_WAIT_S):
            while self.here.is_busy():  # noqa: ASYNC110 (nobody tells when the last request ends)
                await trio.sleep(LOOK_S)
        blocks = draw_blocks(len(due.tokens) // BLOCK_TOKENS, self.chance)
        outcome: CheckOutcome = "gone"
        for attempt in range(CHECK_TRIES):
            try:
                outcome = await self.transfer.store.check_prefix(
                    due.model, due.layers, due.tokens, blocks, new_request_id()
                )
                break
            except WorkerDied:
                break
            except SwarmLLMError as error:
                log.info("KV from %s is not checked: %s", due.node_id, error.message)
                await trio.sleep(LOOK_S * (attempt + 1))
        if outcome == "wrong":
            self.transfer.counts.prefix_wrong += 1
            self.transfer.trust.note(due.node_id, TrustEvent.WRONG_RESULT, "KV of a prompt's beginning")
            self.transfer.avoided.add(due.node_id, trio.current_time())
        elif outcome in ("equal", "close"):
            self.transfer.counts.prefix_checked += 1
            self.transfer.trust.note(due.node_id, TrustEvent.CHECKED, outcome)
