"""Fetches KV of a prompt's beginning before this node's worker computes the prompt, and has it checked later.

It fetches only for requests of this node's own clients that run here as a whole. A failed fetch is no error
of the request: the worker computes the prompt as usual.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Container, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import trio
from blake3 import blake3

from swarmllm.errors import SwarmLLMError, WorkerDied, WorkerError
from swarmllm.log_filter import provoked_by
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.origin.generation import FetchedPrefix
from swarmllm.pipeline.prefix.choice import (
    LANES,
    TRIES,
    AvoidedPeers,
    FetchClock,
    HolderPath,
    Offer,
    PrefixFetchSettings,
    Slices,
    choose,
    draw_blocks,
    whole_blocks,
)
from swarmllm.pipeline.prefix.serving import PrefixStore, whole_range
from swarmllm.pipeline.request import new_request_id
from swarmllm.pipeline.route.inputs import prefill_here_s
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.scheduling.speeds import Observations
from swarmllm.swarm.byte_budget import BudgetKind, ByteBudget
from swarmllm.swarm.peers.trust import NodeTrust, TrustEvent
from swarmllm.swarm.records.prefix_index import PrefixMatch
from swarmllm.swarm.records.registry import Registry
from swarmllm.swarm.router import Router
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.blocks import BLOCK_TOKENS, extend_block_hashes, kept_root
from swarmllm_proto.codec import decode_response, encode_request
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.ipc import PrefixLookedUp, PrefixSnapshotResponse
from swarmllm_proto.ipc.kv import CheckOutcome, join_names
from swarmllm_proto.swarm import DIGEST_SIZE, NAMES_MAX, NodeCapability, PrefixKv, PrefixKvFetch
from swarmllm_proto.tensors import Tensor

log = logging.getLogger(__name__)

CHECKS_MAX: Final = 8
"""Beginnings that wait for their check; of more nothing is fetched."""
IDLE_WAIT_S: Final = 30.0
"""So long a check waits for this node to have nothing else to do."""
LOOK_S: Final = 0.25
CHECK_TRIES: Final = 3
FETCHES_MAX: Final = 4
"""At the same time."""


class NotGiven(Exception):
    """The holder did not give what it announced. `event`: what it did wrong, where it did."""

    def __init__(self, why: str, event: TrustEvent | None = None) -> None:
        super().__init__(why)
        self.trust_event = event


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


@dataclass(frozen=True, slots=True)
class _WantedPrefix:
    """The beginning of a prompt that is requested."""

    model: ModelFile
    layers: LayerRange
    names: Sequence[bytes]
    kv_format: str
    slices: Slices


@dataclass(frozen=True, slots=True)
class _GivenRows:
    """The rows that a holder gave, from the first one on."""

    node_id: NodeId
    wanted: _WantedPrefix
    n_rows: int
    """Of whole blocks."""
    parts: list[PrefixKv]
    """Of exactly these rows."""


def _without_gap(every: Sequence[tuple[int, int]], found: Container[int]) -> tuple[int, int]:
    """How many of the slices (first row, how many) are there from the first one on, up to the end of a block,
    and how many rows they have."""
    n_slices = n_rows = 0
    for i, (first_row, n) in enumerate(every):
        if i not in found:
            break
        end = first_row + n
        if end % BLOCK_TOKENS == 0:
            n_slices, n_rows = i + 1, end
    return n_slices, n_rows


class NodeLoad(Protocol):
    def is_busy(self) -> bool:
        """Whether requests run here."""
        ...


@dataclass(slots=True)
class PrefixFetcher:
    router: Router
    registry: Registry
    store: PrefixStore
    settings: PrefixFetchSettings
    counts: PipelineStatistics
    trust: NodeTrust
    observations: Observations
    budget: ByteBudget
    here: NodeLoad
    key: str = field(default="", repr=False)
    """What names are keyed with."""
    chance: Callable[[], float] = field(default_factory=lambda: secrets.SystemRandom().random)
    _avoided: AvoidedPeers = field(default_factory=AvoidedPeers)
    _under_way: dict[bytes, trio.Event] = field(default_factory=dict)
    """By the name of the last block."""
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
            with trio.move_on_after(self.settings.asker_timeout_s) as scope:
                fetched = await self._bring(entry, tokens, asking)
            if scope.cancelled_caught:
                self.counts.prefix_misses += 1
                if asking.holder is not None:
                    self._avoided.add(asking.holder, trio.current_time())
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
        layers = whole_range(self.store, model_id, n_layers)
        n_blocks = min(whole_blocks(len(tokens)), NAMES_MAX // DIGEST_SIZE)
        if layers is None or not n_blocks:
            return None
        began_s = trio.current_time()
        root = kept_root(self.key, model_id, n_layers)
        hashes = extend_block_hashes(root, tokens[: n_blocks * BLOCK_TOKENS])
        match, holders = self._holders(model_id, hashes, set())
        if not holders:
            return None
        names, model = hashes[: match.n_blocks], ModelFile.of(entry)
        while (other := self._under_way.get(names[-1])) is not None:
            await other.wait()
        done = self._under_way[names[-1]] = trio.Event()
        try:
            here = await self.store.look_up_prefix(model, layers, join_names(names))
            if here.n_blocks >= match.n_blocks or not here.row_bytes or len(self._under_way) > FETCHES_MAX:
                return None
            prefill_s = prefill_here_s(
                model_id, entry.manifest, self.observations, self._capabilities(holders)
            )
            if prefill_s is None:
                self.counts.prefix_declined += 1
                return None
            cold_s = (len(tokens) - here.n_blocks * BLOCK_TOKENS) * prefill_s
            clock = FetchClock(began_s, self.settings.network_timeout_s, cold_s, prefill_s)
            with ExitStack() as grants:
                found = await self._ask_holders(model, layers, hashes, here, clock, asking, grants)
                return await self._take_in(found, tokens, asking, began_s) if found is not None else None
        except SwarmLLMError as error:
            log.info("the worker takes no part in fetching KV: %s", error.message)
            return None
        finally:
            del self._under_way[names[-1]]
            done.set()

    def _holders(
        self, model_id: ModelId, hashes: Sequence[bytes], but: set[NodeId]
    ) -> tuple[PrefixMatch, list[NodeId]]:
        """Of the longest beginning of these blocks that anybody keeps who is not avoided nor in `but`."""
        now_s, n_blocks = trio.current_time(), len(hashes)
        while n_blocks:
            match = self.registry.holders_of_prefix(model_id, hashes[:n_blocks])
            holders = [
                each for each in match.node_ids if each not in but and not self._avoided.has(each, now_s)
            ]
            if holders:
                return match, holders
            n_blocks = match.n_blocks - 1 if match.n_blocks else 0
        return PrefixMatch(), []

    async def _ask_holders(
        self,
        model: ModelFile,
        layers: LayerRange,
        hashes: Sequence[bytes],
        here: PrefixLookedUp,
        clock: FetchClock,
        asking: _FetchProgress,
        grants: ExitStack,
    ) -> _GivenRows | None:
        """The most that a holder gave: of all holders of the longest beginning, and of shorter ones, the
        soonest is asked first, and another one where it breaks off."""
        best: _GivenRows | None = None
        asked: set[NodeId] = set()
        n_known = here.n_blocks * BLOCK_TOKENS
        while len(asked) < TRIES:
            match, holders = self._holders(model.model_id, hashes, asked)
            n_best = max(n_known, best.n_rows if best is not None else 0)
            slices = Slices(match.n_blocks * BLOCK_TOKENS, here.row_bytes)
            if slices.n_rows <= n_best:
                break
            spare_s = clock.spare_s(trio.current_time())
            offer = choose(self._paths(holders), slices, n_best, clock.s_per_row, spare_s)
            if offer is None:
                self.counts.prefix_declined += not asked
                break
            asked.add(offer.path.node_id)
            grant = self.budget.reserve(offer.path.node_id, BudgetKind.MESSAGES, slices.n_bytes)
            if grant is None:
                self.counts.prefix_misses += 1
                break
            grants.enter_context(grant)
            wanted = _WantedPrefix(model, layers, hashes[: match.n_blocks], here.kv_format, slices)
            came = await self._fetch(wanted, offer, clock, n_known, asking)
            if came is not None and came.n_rows > n_best:
                best = came
            if came is not None and came.n_rows == slices.n_rows:
                break
        return best

    def _paths(self, holders: list[NodeId]) -> list[HolderPath]:
        peers = {peer.node_id: peer for peer in self.router.peers()}
        known = [peers[each] for each in holders if each in peers]
        return [HolderPath(peer.node_id, peer.rtt_s, peer.bytes_per_s) for peer in known]

    def _capabilities(self, node_ids: list[NodeId]) -> list[NodeCapability]:
        records = (self.registry.node(node_id) for node_id in node_ids)
        return [record.capability for record in records if record is not None]

    async def _take_in(
        self, came: _GivenRows, tokens: Tensor, asking: _FetchProgress, began_s: float
    ) -> FetchedPrefix | None:
        """None: a miss. Raises SwarmLLMError of this node's worker."""
        wanted, n_rows = came.wanted, came.n_rows
        own = np.array(tokens[:n_rows], np.int32)
        asking.unchecked.append(_Unchecked(came.node_id, wanted.model, wanted.layers, own))
        try:
            n_taken = await self._take(came)
        except NotGiven as reason:
            asking.unchecked.clear()
            self._failed(came.node_id, reason)
            return None
        except SwarmLLMError:
            asking.unchecked.clear()
            self.counts.prefix_misses += 1
            raise
        if not n_taken:
            asking.unchecked.clear()
            return None
        seconds = trio.current_time() - began_s
        n_received = sum(len(part.data) for part in came.parts)
        self.counts.prefix_hits += 1
        self.counts.prefix_tokens += n_rows
        self.counts.prefix_fetched_bytes += n_received
        return FetchedPrefix(came.node_id, n_rows, n_received, seconds)

    def _failed(self, node_id: NodeId, reason: NotGiven, lost_s: float = math.inf) -> None:
        self._avoided.add(node_id, trio.current_time(), lost_s)
        if reason.trust_event is not None:
            self.trust.note(node_id, reason.trust_event, "kept KV")
        provoked_by(log, node_id).info("no KV from %s: %s", node_id, reason)
        self.counts.prefix_misses += 1

    async def _fetch(
        self, wanted: _WantedPrefix, offer: Offer, clock: FetchClock, n_known: int, asking: _FetchProgress
    ) -> _GivenRows | None:
        """What came from one holder without a gap, in whole blocks; None: nothing, or it lied."""
        node_id, every = offer.path.node_id, wanted.slices.all()
        waiting = deque(enumerate(every))
        found: dict[int, PrefixKv] = {}
        failures: list[NotGiven] = []

        async def lane() -> None:
            try:
                while waiting:
                    index, (first_row, n_rows) = waiting.popleft()
                    found[index] = await self._ask(wanted, node_id, first_row, n_rows)
                    clock.came(_without_gap(every, found)[1] - n_known)
                    scope.deadline = clock.deadline_s
            except NotGiven as reason:
                failures.append(reason)
                nursery.cancel_scope.cancel()

        asking.holder, began_s = node_id, trio.current_time()
        with trio.move_on_at(clock.deadline_s) as scope:
            async with trio.open_nursery() as nursery:
                for _ in range(min(LANES, len(waiting))):
                    nursery.start_soon(lane)
        asking.holder = None
        n_slices, n_rows = _without_gap(every, found)
        if n_slices < len(every):
            lost_s = math.inf if failures else trio.current_time() - began_s
            reason = failures[0] if failures else NotGiven("it did not come in time")
            self._failed(node_id, reason, lost_s)
            if reason.trust_event is not None:
                return None
        return _GivenRows(node_id, wanted, n_rows, [found[i] for i in range(n_slices)]) if n_rows else None

    async def _ask(self, wanted: _WantedPrefix, node_id: NodeId, first_row: int, n_rows: int) -> PrefixKv:
        request = PrefixKvFetch(
            model_id=wanted.model.model_id,
            names=join_names(wanted.names),
            kv_format=wanted.kv_format,
            first_row=first_row,
            n_rows=n_rows,
        )
        try:
            answer = await self.router.fetch(
                node_id, encode_request(request), timeout_s=self.settings.network_timeout_s
            )
            piece = decode_response(answer)
        except ProtocolError as error:
            raise NotGiven(f"the answer cannot be read: {error}", TrustEvent.BROKE_PROTOCOL) from None
        except SwarmLLMError as error:
            raise NotGiven(error.message) from None
        if not isinstance(piece, PrefixKv):
            raise NotGiven("it answered something else", TrustEvent.BROKE_PROTOCOL)
        if piece.status != "ok":
            raise NotGiven(f"it is {piece.status}")
        if len(piece.digest) != DIGEST_SIZE or not piece.data:
            raise NotGiven("the answer has no rows or no digest", TrustEvent.BROKE_PROTOCOL)
        return piece

    async def _take(self, came: _GivenRows) -> int:
        """Raises NotGiven for what is no KV of these rows, SwarmLLMError of this node's worker."""
        wanted, parts, n_blocks = came.wanted, came.parts, came.n_rows // BLOCK_TOKENS
        snapshot = PrefixSnapshotResponse(
            id=0,
            n_blocks=n_blocks,
            sizes=tuple(len(part.data) for part in parts),
            digest=blake3(b"".join(part.digest for part in parts)).hexdigest(),
        )
        try:
            return await self.store.import_prefix(
                wanted.model,
                wanted.layers,
                join_names(wanted.names[:n_blocks]),
                snapshot,
                [part.data for part in parts],
                from_peer=True,
            )
        except WorkerError as error:
            if error.kind not in ("bad_tensor", "bad_message"):
                raise
            raise NotGiven(error.message, TrustEvent.BAD_NUMBERS) from None

    async def _check(self, due: _Unchecked) -> None:
        with trio.move_on_after(IDLE_WAIT_S):
            while self.here.is_busy():  # noqa: ASYNC110 (nobody tells when the last request ends)
                await trio.sleep(LOOK_S)
        blocks = draw_blocks(len(due.tokens) // BLOCK_TOKENS, self.chance)
        outcome: CheckOutcome = "gone"
        for attempt in range(CHECK_TRIES):
            try:
                outcome = await self.store.check_prefix(
                    due.model, due.layers, due.tokens, blocks, new_request_id()
                )
                break
            except WorkerDied:
                break
            except SwarmLLMError as error:
                log.info("KV from %s is not checked: %s", due.node_id, error.message)
                await trio.sleep(LOOK_S * (attempt + 1))
        if outcome == "wrong":
            self.counts.prefix_wrong += 1
            self.trust.note(due.node_id, TrustEvent.WRONG_RESULT, "KV of a prompt's beginning")
            self._avoided.add(due.node_id, trio.current_time())
        elif outcome in ("equal", "close"):
            self.counts.prefix_checked += 1
            self.trust.note(due.node_id, TrustEvent.CHECKED, outcome)
