"""Fetches KV of a prompt's beginning from nodes that keep it, slice by slice, and has the worker take it in.

Who keeps what, and whether a request fetches at all, is decided elsewhere (`fetching`, `stage_fetching`). A
failed fetch is no error of the request: the worker computes the prompt as usual.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Container, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import trio
from blake3 import blake3
from msgspec import UNSET

from swarmllm.errors import DeadlineExceeded, NodeBusy, SwarmLLMError, WorkerError
from swarmllm.log_filter import provoked_by
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.prefix.choice import (
    AHEAD_S,
    LANES,
    TRIES,
    AvoidedPeers,
    Declined,
    FetchClock,
    HolderPath,
    Offer,
    PrefixFetchSettings,
    Slices,
    WireRows,
    choose,
    first_timeout_s,
    why_declined,
)
from swarmllm.pipeline.prefix.lateness import LateHolders
from swarmllm.pipeline.prefix.serving import PrefixStore
from swarmllm.pipeline.statistics import DeclineReason, MissReason, PipelineStatistics
from swarmllm.swarm.byte_budget import BudgetKind, ByteBudget
from swarmllm.swarm.peers.trust import NodeTrust, TrustEvent
from swarmllm.swarm.router import Router
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.codec import decode_response, encode_request
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import PrefixSnapshotResponse
from swarmllm_proto.ipc.kv import join_names
from swarmllm_proto.swarm import DIGEST_SIZE, PrefixKv, PrefixKvFetch

log = logging.getLogger(__name__)

FETCHES_MAX: Final = 4
"""At the same time."""


class NotGiven(Exception):
    """The holder did not give what it keeps. `event`: what it did wrong, where it did."""

    def __init__(self, why: str, event: TrustEvent | None = None) -> None:
        super().__init__(why)
        self.trust_event = event

    @property
    def reason(self) -> MissReason:
        return "unreachable" if self.trust_event is None else "wrong"


class NotKept(NotGiven):
    """It says that it does not have the rows."""

    @property
    def reason(self) -> MissReason:
        return "absent"


class NotNow(NotGiven):
    """It says that it is busy, or nothing came in time."""

    def __init__(self, why: str, *, says_busy: bool = False) -> None:
        super().__init__(why)
        self.says_busy = says_busy

    @property
    def reason(self) -> MissReason:
        return "busy" if self.says_busy else "late"


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A holder of a beginning of the prompt."""

    node_id: NodeId
    names: Sequence[bytes]
    """Of the blocks that it keeps, as it knows them."""
    held: LayerRange | None = None
    """Of which the names are; None: of the whole model, and announced."""

    @property
    def n_blocks(self) -> int:
        return len(self.names)


FindSources = Callable[[Container[NodeId]], Sequence[PrefixSource]]
"""Sources of the longest beginning that anybody keeps but the nodes given; all of the same length."""


@dataclass(frozen=True, slots=True)
class WantedPrefix:
    """The beginning of a prompt that is requested."""

    model: ModelFile
    layers: LayerRange
    names: Sequence[bytes]
    """Of the prompt's blocks, as this node's worker knows them."""
    kv_format: str
    wire: WireRows
    scope: NodeId | None = None
    """The origin that named the blocks; None: names for everybody."""
    worker_scope: str = ""
    """The same as this node's worker knows it."""


@dataclass(frozen=True, slots=True)
class GivenRows:
    """The rows that a holder gave, from the first one on."""

    node_id: NodeId
    wanted: WantedPrefix
    n_rows: int
    """Of whole blocks."""
    parts: list[PrefixKv]
    """Of exactly these rows."""
    is_cut_short: bool = False
    """The holder would have given more, and there was no time for it."""

    @property
    def other_format(self) -> bool:
        """They were not computed and kept as this node's worker would."""
        return any(part.other_format is True for part in self.parts)

    @property
    def n_bytes(self) -> int:
        return sum(len(part.data) for part in self.parts)


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


@dataclass(frozen=True, slots=True)
class _Found:
    """A source that is worth asking."""

    source: PrefixSource
    offer: Offer
    slices: Slices
    until_s: float
    """So long nobody else is asked, unless a block of its comes."""


@dataclass(slots=True)
class _Asked:
    """A source that is being asked."""

    found: _Found
    changed: trio.lowlevel.ParkingLot
    """Who waits for a block, or the end."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    has_block: bool = False
    is_left: bool = False
    """Another one was quicker."""
    is_over: bool = False
    came: GivenRows | None = None

    @property
    def node_id(self) -> NodeId:
        return self.found.source.node_id

    @property
    def slices(self) -> Slices:
        return self.found.slices

    @property
    def until_s(self) -> float:
        return self.found.until_s

    def gives(self) -> None:
        self.has_block = True
        self.changed.unpark_all()

    def leave(self) -> None:
        self.is_left = True
        self.scope.cancel()


@dataclass(slots=True)
class PrefixTransfer:
    router: Router
    store: PrefixStore
    settings: PrefixFetchSettings
    counts: PipelineStatistics
    trust: NodeTrust
    budget: ByteBudget
    avoided: AvoidedPeers = field(default_factory=AvoidedPeers)
    late: LateHolders = field(default_factory=LateHolders)
    _under_way: dict[bytes, trio.Event] = field(default_factory=dict)
    """By the name of the last block."""

    @asynccontextmanager
    async def turn(self, name: bytes) -> AsyncIterator[bool]:
        """Waits while another request fetches the same. False: too many others are fetched."""
        while (other := self._under_way.get(name)) is not None:
            await other.wait()
        done = self._under_way[name] = trio.Event()
        try:
            yield len(self._under_way) <= FETCHES_MAX
        finally:
            del self._under_way[name]
            done.set()

    async def ask_sources(
        self,
        wanted: WantedPrefix,
        find: FindSources,
        n_known: int,
        clock: FetchClock,
        on_asking: Callable[[NodeId | None], None],
        grants: ExitStack,
    ) -> GivenRows | None:
        """The most that a holder gave: of all sources of the longest beginning, and of shorter ones, the
        soonest is asked first, and another one where it breaks off. Where it has not given a block yet when
        another one has to be asked if it is to be in time, both are, and the first block decides. `n_known`:
        rows that are here."""
        best: GivenRows | None = None
        asked: list[_Asked] = []
        avoided: set[NodeId] = set()
        changed = trio.lowlevel.ParkingLot()
        async with trio.open_nursery() as nursery:
            while True:
                n_best = max(n_known, best.n_rows if best is not None else 0)
                until_s = math.inf
                found = None
                if len(asked) < TRIES:
                    found = self._next_offer(wanted, find, n_best, clock, avoided, is_first=not asked)
                if found is not None and (grant := self._room_for(found)) is not None:
                    grants.enter_context(grant)
                    avoided.add(found.source.node_id)
                    asked.append(each := _Asked(found, changed))
                    until_s = each.until_s
                    nursery.start_soon(self._fetch, wanted, each, clock, n_known)
                under_way = [each for each in asked if not each.is_over]
                on_asking(under_way[-1].node_id if under_way else None)
                if not under_way:
                    return best
                with trio.move_on_at(until_s):
                    while not any(each.has_block or each.is_over for each in under_way):
                        await changed.park()
                quickest = next((each for each in under_way if each.has_block), None)
                if quickest is None:
                    continue
                for each in under_way:
                    if each is not quickest:
                        each.leave()
                while not all(each.is_over for each in under_way):
                    await changed.park()
                came = quickest.came
                if came is not None and came.n_rows > n_best:
                    best = came
                if came is not None and (came.n_rows == quickest.slices.n_rows or came.is_cut_short):
                    on_asking(None)
                    return best

    def _next_offer(
        self,
        wanted: WantedPrefix,
        find: FindSources,
        n_best: int,
        clock: FetchClock,
        avoided: set[NodeId],
        *,
        is_first: bool,
    ) -> _Found | None:
        """The source that is to be asked next, of those that are not `avoided`, which those are added to that
        would be too late. None: nobody has more than `n_best` rows and would give them soon."""
        declined: Declined | None = None
        while True:
            sources = {source.node_id: source for source in find(avoided)}
            n_blocks = max((source.n_blocks for source in sources.values()), default=0)
            slices = Slices(n_blocks * BLOCK_TOKENS, wanted.wire.row_bytes, wanted.wire.read_bytes)
            if slices.n_rows <= n_best:
                break
            now_s = trio.current_time()
            paths, spare_s = self._paths(sources), clock.spare_s(now_s)
            offer = choose(paths, slices, n_best, clock.s_per_row, spare_s)
            if offer is not None:
                until_s = now_s + first_timeout_s(offer, paths, slices, spare_s)
                return _Found(sources[offer.path.node_id], offer, slices, until_s)
            declined = why_declined(paths, slices, n_best, clock.s_per_row, spare_s)
            late = {path.node_id for path in paths if path.late_s}
            if not late:
                break
            avoided |= late  # Others may have less, and be quicker.
        if declined is not None and is_first:
            self.declined(declined.reason, str(declined))
        return None

    def _room_for(self, found: _Found) -> AbstractContextManager[object] | None:
        """None: there is no room for what this holder would give."""
        n_bytes = sum(found.slices.bytes_max(n_rows) for _, n_rows in found.slices.all())
        grant = self.budget.reserve(found.source.node_id, BudgetKind.MESSAGES, n_bytes)
        if grant is None:
            self.counts.prefix_missed["refused"] += 1
        return grant

    def declined(self, reason: DeclineReason, why: str) -> None:
        """Nobody was asked for KV that others keep."""
        log.info("KV that another node keeps is not fetched, %s", why)
        self.counts.prefix_not_asked[reason] += 1

    async def take_in(self, came: GivenRows) -> bool:
        """Whether the worker took it. Raises SwarmLLMError of this node's worker."""
        try:
            n_taken = await self._take(came)
        except NotGiven as reason:
            self._failed(came.node_id, reason)
            return False
        except SwarmLLMError:
            self.counts.prefix_missed["refused"] += 1
            raise
        if not n_taken:
            return False
        self.counts.prefix_hits += 1
        self.counts.prefix_tokens += came.n_rows
        self.counts.prefix_fetched_bytes += came.n_bytes
        return True

    def gave_up(self, holder: NodeId | None) -> None:
        """The request's time for fetching is over. `holder`: the node that was to give something."""
        self.counts.prefix_missed["late"] += 1
        log.info("KV from %s did not come in time for its request", holder or "this node's worker")
        if holder is not None:
            waited_s = max(self.settings.asker_timeout_s, self.settings.network_timeout_s)
            self.late.gave_nothing(holder, waited_s, trio.current_time())

    def _paths(self, node_ids: Container[NodeId]) -> list[HolderPath]:
        now_s = trio.current_time()
        return [
            HolderPath(
                peer.node_id,
                # The others have the waiting for a processor in them, and that is what `late` is for.
                peer.rtt_s if peer.least_rtt_s is None else peer.least_rtt_s,
                peer.bytes_per_s,
                self.late.expected_s(peer.node_id, now_s),
            )
            for peer in self.router.peers()
            if peer.node_id in node_ids
        ]

    def _failed(
        self, node_id: NodeId, reason: NotGiven, waited_s: float = 0.0, named_by: NodeId | None = None
    ) -> None:
        """`waited_s`: for rows of which some did not come. `named_by`: the origin that said what is kept
        there; None: the node announced it itself."""
        now_s = trio.current_time()
        if isinstance(reason, NotNow):
            self.late.gave_nothing(node_id, waited_s, now_s, says_busy=reason.says_busy)
        elif named_by is None or not isinstance(reason, NotKept):
            self.avoided.add(node_id, now_s)
        if reason.trust_event is not None:
            self.trust.note(node_id, reason.trust_event, "kept KV")
        provoked_by(log, node_id).info(
            "KV from %s is missing, %s after %.3f s: %s", node_id, reason.reason, waited_s, reason
        )
        self.counts.prefix_missed[reason.reason] += 1

    async def _fetch(self, wanted: WantedPrefix, asked: _Asked, clock: FetchClock, n_known: int) -> None:
        """Sets what came without a gap, in whole blocks; nothing, where nothing came or the holder lied."""
        try:
            asked.came = await self._slices(wanted, asked, clock, n_known)
        finally:
            asked.is_over = True
            asked.changed.unpark_all()

    async def _slices(
        self, wanted: WantedPrefix, asked: _Asked, clock: FetchClock, n_known: int
    ) -> GivenRows | None:
        source, slices, offer = asked.found.source, asked.slices, asked.found.offer
        node_id, every = offer.path.node_id, slices.all()
        waiting = deque(enumerate(every))
        found: dict[int, PrefixKv] = {}
        failures: list[NotGiven] = []
        began_s, first_at_s, n_first = trio.current_time(), math.inf, 0

        def has_time() -> bool:
            """For the next slice, and those that were asked for before it."""
            n_came, (first_row, n_rows) = sum(every[i][1] for i in found), waiting[0][1]
            n_due, n_since = first_row + n_rows - n_came, n_came - n_first
            return clock.has_time_for(n_due, n_since, first_at_s, trio.current_time())

        async def lane(n_more: int) -> None:
            nonlocal first_at_s, n_first
            try:
                while waiting and has_time():
                    index, (first_row, n_rows) = waiting.popleft()
                    found[index] = piece = await self._ask(wanted, source, first_row, n_rows)
                    if len(piece.data) > slices.bytes_max(n_rows):
                        raise NotGiven("the answer has more than the rows", TrustEvent.BROKE_PROTOCOL)
                    if not n_first:
                        first_at_s, n_first = trio.current_time(), n_rows
                    clock.came(_without_gap(every, found)[1] - n_known)
                    if _without_gap(every, found)[1]:
                        asked.gives()
                        asked.scope.deadline = clock.deadline_s
                    while n_more:
                        n_more -= 1
                        nursery.start_soon(lane, 0)
            except NotGiven as reason:
                failures.append(reason)
                nursery.cancel_scope.cancel()

        asked.scope.deadline = clock.deadline_s
        with asked.scope:
            async with trio.open_nursery() as nursery:
                # Of a line that was not measured, one slice shows whether more would come in time.
                n_later = 0 if offer.path.bytes_per_s else LANES - 1
                nursery.start_soon(lane, n_later)
                await trio.sleep(AHEAD_S)
                for _ in range(LANES - 1 - n_later):
                    nursery.start_soon(lane, 0)
        n_slices, n_rows = _without_gap(every, found)
        now_s = trio.current_time()
        is_cut_short = bool(waiting and n_rows) and not failures and not asked.scope.cancelled_caught
        if n_slices == len(every) or is_cut_short:
            on_time_s = replace(offer.path, late_s=0.0).takes_s(every[0][1] * slices.row_bytes, 1)
            self.late.gave(node_id, first_at_s - began_s - on_time_s, now_s)
        elif not asked.is_left or now_s >= asked.until_s:
            reason = failures[0] if failures else NotNow("it did not come in time")
            self._failed(node_id, reason, now_s - began_s, named_by=wanted.scope)
            if reason.trust_event is not None:
                return None
        if not n_rows:
            return None
        return GivenRows(node_id, wanted, n_rows, [found[i] for i in range(n_slices)], is_cut_short)

    async def _ask(self, wanted: WantedPrefix, source: PrefixSource, first_row: int, n_rows: int) -> PrefixKv:
        held = source.held
        request = PrefixKvFetch(
            model_id=wanted.model.model_id,
            names=join_names(source.names),
            kv_format=wanted.kv_format,
            first_row=first_row,
            n_rows=n_rows,
            scope=UNSET if held is None or wanted.scope is None else wanted.scope,
            held=UNSET if held is None else (held.start, held.end),
            layers=UNSET if held in (None, wanted.layers) else (wanted.layers.start, wanted.layers.end),
            takes=wanted.wire.takes or UNSET,
            kv_encoding=wanted.wire.kv_encoding or UNSET,
        )
        try:
            answer = await self.router.fetch(
                source.node_id, encode_request(request), timeout_s=self.settings.network_timeout_s
            )
            piece = decode_response(answer)
        except ProtocolError as error:
            raise NotGiven(f"the answer cannot be read: {error}", TrustEvent.BROKE_PROTOCOL) from None
        except (NodeBusy, DeadlineExceeded) as error:
            raise NotNow(error.message, says_busy=isinstance(error, NodeBusy)) from None
        except SwarmLLMError as error:
            raise NotGiven(error.message) from None
        if not isinstance(piece, PrefixKv):
            raise NotGiven("it answered something else", TrustEvent.BROKE_PROTOCOL)
        if piece.status == "absent":
            raise NotKept("it does not keep that")
        if piece.status == "busy":
            raise NotNow("it is busy", says_busy=True)
        if len(piece.digest) != DIGEST_SIZE or not piece.data:
            raise NotGiven("the answer has no rows or no digest", TrustEvent.BROKE_PROTOCOL)
        if piece.other_format is True and wanted.wire.takes is None:
            raise NotGiven("it gave rows of another format", TrustEvent.BROKE_PROTOCOL)
        return piece

    async def _take(self, came: GivenRows) -> int:
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
                wanted.worker_scope,
                from_peer=True,
                other_format=came.other_format,
            )
        except WorkerError as error:
            if error.kind not in ("bad_tensor", "bad_message"):
                raise
            raise NotGiven(error.message, TrustEvent.BAD_NUMBERS) from None
