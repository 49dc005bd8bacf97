"""The origin's side of one pipeline whose stages have been asked to take part: feeds the prompt, collects
tokens.

All messages of the stages arrive through `receive`, called from the router's handler: it only records them
and wakes the reader, so it never waits, and a slow client slows nobody else. What is buffered is bounded by
the tokens asked for. Work (embedding chunks, repeating a token) goes to the request's session on this node,
in order with the jobs that a stage here gets.

An attempt is in one state of the table in `lifecycle`; every event passes the table before it has an effect.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import msgspec
import numpy as np
import trio

from swarmllm.errors import DeadlineExceeded, NodeUnreachable, RemoteError
from swarmllm.pipeline.job import ComputeStep, Job
from swarmllm.pipeline.origin.generation import Shape, SpeculationCounts, StageAccount, StageReport, described
from swarmllm.pipeline.origin.lifecycle import LIFECYCLE, OVER, ChainEvent, ChainState
from swarmllm.pipeline.origin.output import (
    Blamed,
    Chunk,
    EarlyTokens,
    InvalidReport,
    PrematureEnd,
    PromptWindow,
    RowsNotSent,
    TokenLog,
    require_end,
    require_stop_string,
    require_token,
)
from swarmllm.pipeline.origin.pictures import PictureRows
from swarmllm.pipeline.origin.reported_fingerprints import ReportedFingerprints
from swarmllm.pipeline.prefix.names import PrefixNames
from swarmllm.pipeline.repair.plan import StageRemainder, is_anew, rebuilds, recomputed
from swarmllm.pipeline.repair.rebuild import RebuildSchedule
from swarmllm.pipeline.repair.retry_policy import SLOW_LOOK_S, PipelineSpeed
from swarmllm.pipeline.request import OriginMessage, RequestContext
from swarmllm.pipeline.stage.compute import SampledToken
from swarmllm.pipeline.stage.failure_reports import (
    BAD_ROWS,
    UNUSABLE_ROWS,
    is_the_reporters_fault,
    reported_error,
)
from swarmllm.pipeline.stage.session import Session
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.picture_runs import whole_before
from swarmllm_proto.swarm import PipelineError, PrefillProgress, StageBlocks, StreamingToken
from swarmllm_proto.tensors import Tensor

log = logging.getLogger(__name__)

MAX_REPEATS = 3
"""Damaged jobs that one request survives; more means that something is broken, not unlucky."""


class StallHandler(Protocol):
    async def investigate(self, chain: Chain) -> None:
        """Nothing has come of it for a while: who is at work, and is that worth waiting for?"""
        ...

    def repeats(self, chain: Chain, position: int) -> None:
        """A job is repeated after damage, with what is behind it."""
        ...


class Chain:
    """One attempt at one request. `failure`, once set, is final."""

    shape: Shape = "chain"
    fits_context = True  # A stage with less room would refuse the rows, and end no text.
    guesses = SpeculationCounts()  # What the last stage says with the last token.

    def __init__(
        self,
        context: RequestContext,
        prompt: Tensor,
        *,
        chunk_tokens: int,
        silence_timeout_s: float,
        look_after_s: float,
        stall_handler: StallHandler,
        nicknames: Mapping[NodeId, str],
        prefix_names: PrefixNames | None = None,
        pace: PipelineSpeed | None = None,
        checked_stage: int | None = None,
        pictures: PictureRows | None = None,
    ) -> None:
        """`checked_stage`: the stage that is to be checked, for which all stages hold what they have when the
        chain is complete."""
        stages = context.view.stages
        self._state = LIFECYCLE.first
        self.context = context
        self.prompt = prompt
        self.pictures = pictures
        self.n_cached_tokens = 0
        """Rows of the prompt that every stage had already."""
        self.prefix_names = prefix_names
        self.fetched: frozenset[int] = frozenset()
        """Stages whose first rows rest on KV of another node."""
        self._generated: list[int] = []
        """In this attempt."""
        self._chunk_tokens = chunk_tokens
        self.window = PromptWindow(len(prompt), chunk_tokens, len(stages) + 1)
        self.account = StageAccount(stages, context.row_bytes())
        self.failure: Exception | None = None
        self.blamed = Blamed()
        self.pace = pace
        self.checked_stage = checked_stage
        self.fingerprints = ReportedFingerprints(context.sampling, is_kept=checked_stage == context.view.last)
        self._look_after_s = look_after_s
        self._stall_handler = stall_handler
        self._heard_s = self._looked_s = 0.0
        self._n_resumed = len(context.generated)
        self._tokens = TokenLog(context.n_prompt_tokens, context.sampling.max_tokens, self._n_resumed)
        self._silence_timeout_s = silence_timeout_s
        self._nicknames = nicknames
        self._described = described(stages, self._name)
        self._session: Session | None = None
        self._feeding: RebuildSchedule | None = None
        """While stages are built again."""
        self.is_ended_by_model = False
        self.recomputed: frozenset[int] | None = None
        """Stages that compute again what another pipeline has left to the rest; None: it began anew."""
        self._early = EarlyTokens[tuple[StreamingToken, bytes]]()
        self._buffer: deque[tuple[SampledToken, bytes]] = deque()
        self._reader = trio.lowlevel.ParkingLot()
        self._is_feeding = False
        self._n_repeats = 0
        self._started_s = 0.0
        self._first_s = self._latest_s = 0.0

    def __repr__(self) -> str:
        n_tokens = self._tokens.n_received
        return f"<Chain {self.context.request_id} {self._state.name} {self.window!r} tokens={n_tokens}>"

    @property
    def state(self) -> ChainState:
        return self._state

    def _pass(self, event: ChainEvent) -> None:
        """The event happens. Raises UnknownTransition where it cannot."""
        self._state = LIFECYCLE.after(self._state, event)

    @property
    def route(self) -> tuple[StageReport, ...]:
        return self.account.reports(
            [self._nicknames.get(stage.node_id, "") for stage in self.account.stages], self.decode_s
        )

    @property
    def node_ids(self) -> frozenset[NodeId]:
        """Of its stages."""
        return frozenset(stage.node_id for stage in self.context.view.stages)

    @property
    def is_complete(self) -> bool:
        """The last token has come."""
        return self._state is ChainState.FINISHED

    @property
    def prefill_s(self) -> float:
        return self._first_s - self._started_s if self.has_begun else 0.0

    @property
    def decode_s(self) -> float:
        return self._latest_s - self._first_s if self.has_begun else 0.0

    @property
    def n_generated(self) -> int:
        return self._tokens.n_received

    @property
    def has_begun(self) -> bool:
        """Whether this pipeline has given a token."""
        return self._tokens.n_received > self._n_resumed

    def prefixes_of(self, node_id: NodeId) -> tuple[StageBlocks, ...]:
        """Of the prompt and what came of it, but for the newest token, which no stage has computed; of the
        prompt's last token there is always the logits to be computed."""
        if self.prefix_names is None:
            return ()
        return self.prefix_names.of_node(node_id, self.computed_tokens)

    def start(self, session: Session, n_known_blocks: int = 0) -> None:
        """All stages have accepted: let the first chunks go, after what every stage has rows of."""
        self._pass(ChainEvent.START)
        n_known = min(n_known_blocks * BLOCK_TOKENS, (len(self.prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        n_known = whole_before(self.context.picture_runs, n_known)
        self.n_cached_tokens = min(n_known, self.context.n_prompt_tokens)
        size = len(self.context.view.stages) + 1
        ends, runs = self._ends, self.context.picture_runs
        self.window = PromptWindow(len(self.prompt), self._chunk_tokens, size, n_known, ends, runs)
        self._begin(session)
        self._feed()

    @property
    def _ends(self) -> tuple[int, ...]:
        """At which chunks end. One does where the prompt ends: stages that are built again compute its rows
        in the batches of the first time, and not with those of generated tokens, which rounds otherwise."""
        inner = () if self.pictures is None else self.pictures.ends
        return (*inner, self.context.n_prompt_tokens)

    def resume(
        self,
        session: Session,
        left: Sequence[StageRemainder],
        known: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Start in the place of a pipeline that broke. `left`: what each stage still has of it. `known`: by
        stage, how many first rows a new one has of an earlier request."""
        n_due = len(self.prompt) - 1
        runs = self.context.picture_runs
        planned = rebuilds(left, n_due, {stage: whole_before(runs, n) for stage, n in known.items()})
        log.info(
            "request %s resumes at row %d: of its stages %s have KV, %s a journal",
            self.context.request_id,
            n_due,
            [stage for stage, each in enumerate(left) if each.n_rows >= n_due],
            [stage for stage, each in enumerate(left) if each.n_journal >= n_due],
        )
        if is_anew(planned, len(left)):
            self.start(session, planned[0].begin // BLOCK_TOKENS)
            return
        self._pass(ChainEvent.RESUME)
        self.recomputed = recomputed(planned)
        ends = self._ends
        self._feeding = RebuildSchedule(planned, n_due, self._chunk_tokens, ends, runs) if planned else None
        self.window = PromptWindow(len(self.prompt), self._chunk_tokens, len(left) + 1, n_due)
        self._begin(session)
        self._feed()

    @property
    def is_rebuilt(self) -> bool:
        """It goes on with what another one left."""
        return self.recomputed is not None

    @property
    def is_to_be_checked(self) -> bool:
        """Whether its stages hold the rows that they computed, for a check."""
        return self.checked_stage is not None and self.is_complete

    @property
    def generated(self) -> tuple[int, ...]:
        """By earlier pipelines and by this one."""
        return (*self.context.generated, *self._generated)

    @property
    def tokens(self) -> Tensor:
        """i32, the prompt and what came of it."""
        return np.concatenate((self.prompt, np.array(self._generated, np.int32)))

    @property
    def computed_tokens(self) -> Tensor:
        """The same without the newest one, which no stage has computed."""
        return self.tokens[:-1]

    @property
    def n_rows(self) -> int:
        """See `OriginSide`."""
        return len(self.prompt) + len(self._generated) - 1 if self.has_begun else 0

    @property
    def may_be_resumed(self) -> bool:
        return self.is_to_be_checked or (
            self._state in (ChainState.FAILED, ChainState.GIVEN_UP)
            and self._tokens.n_received > 0
            and len(self.context.view.stages) > 1
        )

    def _begin(self, session: Session) -> None:
        self._session = session
        self._started_s = self._heard_s = trio.current_time()

    async def next(self) -> tuple[SampledToken, bytes]:
        """Raises SwarmLLMError once everything that came before the failure has been read."""
        await self._wait(lambda: bool(self._buffer))
        return self._buffer.popleft()

    async def next_by(self, until_s: float) -> tuple[SampledToken, bytes] | None:
        """Returns None where none has come by `until_s` (trio's clock), and later than that where stages were
        being asked then."""
        is_there = await self._wait(lambda: bool(self._buffer), until_s)
        return self._buffer.popleft() if is_there else None

    async def _wait(self, is_there: Callable[[], bool], until_s: float = float("inf")) -> bool:
        while not is_there():
            if self.failure is not None:
                raise self.failure
            look_after_s = min(self._look_after_s, SLOW_LOOK_S) if self.is_slow else self._look_after_s
            # The reader may stop waiting and begin anew; the silence goes on.
            look_s = max(self._heard_s, self._looked_s) + look_after_s
            with trio.CancelScope(deadline=min(look_s, until_s)) as scope:
                await self._reader.park()
            if scope.cancelled_caught and look_s <= until_s:
                self._looked_s = trio.current_time()
                await self._silent()
            elif scope.cancelled_caught:
                return False
        return True

    @property
    def began_s(self) -> float:
        """By trio's clock; before it has begun, now."""
        return self._started_s if self._session is not None else trio.current_time()

    @property
    def silent_s(self) -> float:
        """Since when nothing has come."""
        return trio.current_time() - self._heard_s

    @property
    def n_due(self) -> int | None:
        """How many rows have been computed, and one: the row whose result comes next. None while stages are
        built again."""
        if self._feeding is not None:
            return None
        n_new = self._tokens.n_received - self._n_resumed
        return len(self.prompt) + n_new if n_new else self.window.n_passed + 1

    @property
    def is_slow(self) -> bool:
        """Whether tokens come far more slowly than was planned."""
        return self.pace is not None and self.pace.is_slow(self.account.n_decoded, self.decode_s)

    async def _silent(self) -> None:
        if self.silent_s < self._silence_timeout_s:
            await self._stall_handler.investigate(self)
            return
        what = f"the pipeline {self._described} was silent for {self._silence_timeout_s:g} s"
        self.fail(DeadlineExceeded(what))

    def next_chunk(self) -> Chunk | None:
        self._is_feeding = False
        chunk = self.window.next_chunk() if self._feeding is None else self._feeding.next_embedded()
        self._feed()
        return chunk

    def may_say(self, sender: NodeId, message: OriginMessage) -> bool:
        """False: no honest node sends that. Only the last stage of this chain gives its tokens."""
        return not isinstance(message, StreamingToken) or sender == self.context.view.stages[-1].node_id

    def receive(self, sender: NodeId, message: OriginMessage, payload: bytes | memoryview) -> None:
        if self._state in OVER:
            return
        stages = self.context.view.stages
        try:
            if isinstance(message, PipelineError):
                self._failed_at(sender, message)
            elif sender != stages[-1 if self._feeding is None else self._feeding.until].node_id:
                log.warning(
                    "request %s: a message of the last stage came from %s", self.context.request_id, sender
                )
            else:
                if isinstance(message, StreamingToken):
                    self._require_possible(ChainEvent.TOKEN)
                    self._token(message, payload)
                else:
                    self._require_possible(ChainEvent.PROGRESS)
                    self._progress(message, payload)
        except InvalidReport as error:
            others = self.node_ids - {sender, self.context.view.node_id}
            if isinstance(error, RowsNotSent) and others:
                self.blamed.doubted = others | {sender}
            else:
                self.blame(sender)
                self.blamed.has_lied = isinstance(error, PrematureEnd) and self.blamed.culprit == sender
            self.fail(RemoteError(f"node {self._name(sender)} broke the protocol: {error}"))

    def _require_possible(self, event: ChainEvent) -> None:
        """Raises InvalidReport where a stage reports what nobody has asked it for."""
        if event not in LIFECYCLE.rows[self._state]:
            raise InvalidReport(f"{event.value}, while {self._state.value}")

    def fail(self, error: Exception) -> None:
        was_over = self._state in OVER
        self._pass(ChainEvent.FAILURE)
        if not was_over:
            self.failure = error
            self._reader.unpark_all()
            if self._session is not None:
                self._session.stop()

    def give_up(self) -> None:
        """The reader knows why it ends, because the error is on its way to it."""
        self._pass(ChainEvent.GIVE_UP)

    def close(self) -> None:
        """Nobody reads what comes of it any more."""
        self._pass(ChainEvent.CLOSE)

    def blame(self, node_id: NodeId) -> None:
        """The first node that is named is the culprit: what else fails is usually its consequence."""
        self.blamed.blame(node_id)

    def lost(self, node_id: NodeId) -> None:
        """A node disconnected."""
        if node_id in self.node_ids:
            self.blame(node_id)
            what = f"node {self._name(node_id)} disconnected from the pipeline {self._described}"
            self.fail(NodeUnreachable(what))

    def _token(self, message: StreamingToken, payload: bytes | memoryview) -> None:
        require_token(message.token, self.context.n_vocab, len(payload))
        require_stop_string(message, len(self.context.sampling.stop))
        self._early.put(message.index, (message, bytes(payload)), len(payload), self._tokens.n_received)
        while self._state not in OVER and (early := self._early.take(self._tokens.n_received)) is not None:
            self._next_token(*early)

    def _next_token(self, message: StreamingToken, payload: bytes) -> None:
        self._tokens.receive(message.index, message.token)
        self.fingerprints.take(message.fingerprint, message.logprobs)
        require_end(message, self.context.sampling, is_full=self._tokens.is_full or not self.fits_context)
        if self._tokens.is_full and message.finish_reason is None:
            # Nobody is to go on from here, whatever the last stage says.
            message = msgspec.structs.replace(message, finish_reason="length")
        self._pass(ChainEvent.TOKEN if message.finish_reason is None else ChainEvent.LAST)
        self._generated.append(message.token)
        self._latest_s = self._heard_s = trio.current_time()
        if message.index == self._n_resumed:
            self._first_s = self._latest_s
            self.account.add_prefill(message.timings)
        else:
            self.account.add_decoded(message.timings)
        self._buffer.append((message, payload))
        self._reader.unpark_all()
        if message.finish_reason is not None:
            self.guesses = SpeculationCounts.reported(message.guessed, self._tokens.n_received)
            self.is_ended_by_model = message.finish_reason == "stop" and message.stopped_by is None
            # Nobody needs to wait for the reader: all stages may free their slots now.
            n_cached = min(message.n_cached_tokens, self.context.n_prompt_tokens)
            self.n_cached_tokens = max(self.n_cached_tokens, n_cached)
            assert self._session is not None
            self._session.stop()
        elif self._tokens.awaited:
            self._tokens.awaited = False
            self._repeat_token()

    def _progress(self, message: PrefillProgress, payload: bytes | memoryview) -> None:
        self._pass(ChainEvent.PROGRESS)
        if self._feeding is None:
            has_advanced = self.window.passed(message.position)
        else:
            has_advanced = self._feeding.passed(message.position)
            self._feeding = None if self._feeding.is_over else self._feeding
        self.account.add_prefill(message.timings)
        if has_advanced:
            # A reader that waits for the first token counts this as a sign of life.
            self._heard_s = trio.current_time()
            self._reader.unpark_all()
        self._feed()

    def _failed_at(self, sender: NodeId, message: PipelineError) -> None:
        if sender not in self.node_ids:
            log.warning(
                "request %s: %s reports a failure without a part in it", self.context.request_id, sender
            )
            return
        if message.damaged:
            self._require_possible(ChainEvent.DAMAGE)
            self._pass(ChainEvent.DAMAGE)
            self._repeat(sender, message.position)
            return
        here = self.context.view.node_id
        is_of_rows = message.kind in (BAD_ROWS, UNUSABLE_ROWS)
        if is_of_rows and not self.context.view.hands_to(message.node_id, sender):
            raise InvalidReport(f"it gets no rows from {self._name(message.node_id)}")
        if message.kind == BAD_ROWS and message.node_id != here:
            # One of the two lies, and which cannot be seen from here.
            self.blamed.doubted = frozenset({sender, message.node_id})
        elif is_the_reporters_fault(message, self.context.sampling):
            self.blame(sender)
        self.fail(reported_error(message, self._name(sender), self.context.sampling))

    def _repeat(self, sender: NodeId, position: int) -> None:
        self._n_repeats += 1
        self._stall_handler.repeats(self, position)
        if self._n_repeats > MAX_REPEATS:
            # One of them damages what it sends, or the other one says so.
            before = {node_id for node_id in self.node_ids if self.context.view.hands_to(node_id, sender)}
            self.blamed.doubted = frozenset({sender, *before} - {self.context.view.node_id})
            self.fail(RemoteError(f"{self._n_repeats} jobs arrived damaged at {self._name(sender)}"))
            return
        log.info(
            "request %s: position %d was damaged on its way to %s", self.context.request_id, position, sender
        )
        if position < self.window.n_tokens:
            if self.has_begun:
                raise InvalidReport(f"no job is under way at {position}")
            (self.window if self._feeding is None else self._feeding.window).rewind(position)
            self._feed()
        elif self._tokens.repeats_now(position):
            self._repeat_token()

    def _repeat_token(self) -> None:
        assert self._session is not None
        self._session.offer(
            Job(
                ComputeStep.EMBED,
                position=self._tokens.position(),
                n_tokens=1,
                token=self._tokens.last_token,
                since_s=trio.current_time(),
            )
        )

    def _feed(self) -> None:
        """Have one chunk embedded; taking it asks for the next, so that no more than one waits in the
        session."""
        assert self._session is not None
        may_embed = self.window.may_send()
        if self._feeding is not None:
            for message in self._feeding.next_replays(self.context.request_id):
                self._session.ask_replay(message)
            may_embed = self._feeding.may_embed
        if not self._is_feeding and may_embed:
            self._is_feeding = True
            # At HEAD with chunks left, a job asks for the next chunk (see `processor`).
            self._session.offer(Job(ComputeStep.HEAD, prefill_left=1))

    def _name(self, node_id: NodeId) -> str:
        nickname = self._nicknames.get(node_id, "")
        return f"{nickname} ({node_id})" if nickname else node_id
