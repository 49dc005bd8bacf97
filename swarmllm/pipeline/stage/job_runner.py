"""The actions of the job processor's states: what a walk does on this node. `processor` makes the decisions.

One runner per request and node; its walks run one after the other. A token's path is kept lean on purpose,
because every microsecond here is paid once per stage and token: no task per token, no copy of a tensor, no
logging.

Two states do less than their names say. Where the first stage is here, EMBED hands over token
ids and the worker looks the rows up in the same call that runs the layers. And where the next token's first
stage is elsewhere, SEND lets the job go before the origin is told of the token: the ring waits for one, a
reader for the other. Not where both go to the same node: there the next token may come by a link (see
links), and must not overtake this one.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import trio
from msgspec import UNSET

from swarmllm.errors import InvalidRequest, NodeUnreachable, SwarmLLMError, WorkerError
from swarmllm.log_filter import provoked_by
from swarmllm.pipeline.job import ComputeStep, Job
from swarmllm.pipeline.origin.pictures import embedded
from swarmllm.pipeline.prefix.names import give_names, last_names
from swarmllm.pipeline.processor import (
    JobOutcome,
    JobState,
    advance,
    after_embed,
    after_head,
    after_layers,
    after_validating,
    destination,
)
from swarmllm.pipeline.request import OriginMessage, OriginSide, RequestContext
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.pipeline.stage.row_committer import NoRowCommitter
from swarmllm.swarm.router import Router
from swarmllm.workerpool.forward_result import Want
from swarmllm.workerpool.ring import NO_RING, RingHint
from swarmllm_proto.codec import decode_job, encode_job, encode_scores
from swarmllm_proto.frames import Payload
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Token
from swarmllm_proto.swarm import (
    CancelInference,
    JobMessage,
    LayerForward,
    PipelineError,
    PrefillProgress,
    ReplayRows,
    StageBlocks,
    StageTiming,
    StreamingToken,
)
from swarmllm_proto.tensors import Tensor, encode_tensor, pack_rows

log = logging.getLogger(__name__)

LONG_BYTES = 128 * 1024
"""Of rows whose packing would hold the event loop up for too long."""
NOT_FINITE = "not_finite"
FAULTS_OF_ROWS = ("position_gap", NOT_FINITE)
"""Kinds of WorkerError that are no fault of the worker where the rows came from another node."""


def is_unchecked(error: SwarmLLMError) -> bool:
    """Whether an honest origin would have refused the request: it has its own worker compile a grammar before
    it asks for a pipeline."""
    return type(error) is InvalidRequest and error.field in ("grammar", "response_format")


class JobRunner:
    def __init__(
        self,
        context: RequestContext,
        compute: Compute,
        router: Router,
        origin_side: OriginSide | None,
        row_committer: NoRowCommitter | None = None,
    ) -> None:
        self._context = context
        self._view = context.view
        self._log = provoked_by(log, context.view.origin)
        self._compute = compute
        self._router = router
        self._origin_side = origin_side
        self._row_committer = row_committer or NoRowCommitter()
        self._has_sampled = False
        self.n_sent = 0
        """Rows below this have left this node."""
        self._last_want: Want = "none"
        if context.wants == "normed":
            self._last_want = "scores" if context.scored else "normed"
        self._actions: dict[JobState, Callable[[Job], Awaitable[JobState]]] = {
            JobState.VALIDATING: self._validate,
            JobState.EMBED: self._embed,
            JobState.PROCESS_LAYERS: self._process_layers,
            JobState.HEAD: self._head,
            JobState.SEND: self._send,
        }

    async def run(self, job: Job) -> None:
        """From VALIDATING to DONE. Raises SwarmLLMError where the request cannot go on here."""
        state = JobState.VALIDATING
        while state is not JobState.DONE:
            state = await self._actions[state](job)
        self.n_sent = max(self.n_sent, job.position + job.n_tokens)

    async def replay(self, message: ReplayRows) -> None:
        """Rows that have left a stage here go to the next one once more. Raises SwarmLLMError."""
        rows = await self._compute.read_journal(
            self._context.model,
            request_id=self._context.request_id,
            end=self._view.layers(message.stage).end,
            position=message.position,
            n_rows=message.n_tokens,
        )
        job = Job(
            ComputeStep.LAYER,
            stage=message.stage + 1,
            position=message.position,
            n_tokens=message.n_tokens,
            prefill_left=1,
            tensor=rows,
            since_s=trio.current_time(),
            until=message.until,
        )
        if self._view.is_here(job.stage):
            await self.run(job)
        else:
            await self._send(job)

    async def generate(self, tokens: Tensor, on_token: Callable[[], None]) -> None:
        """For another node, where the only stage is here: the worker runs the whole decode loop. Tells the
        origin every token, and with the last one how much of the prompt was known here. Raises
        SwarmLLMError."""
        context = self._context
        since_s = trio.current_time()
        last: tuple[Token, bytes, StageTiming] | None = None
        async with self._compute.generate(
            context.model,
            request_id=context.request_id,
            tokens=tokens,
            sampling=context.sampling,
            n_generated=len(context.generated),
            owner=context.owner,
            own_kv=True,  # The origin may check it, and this node answers for what it used.
            clients_of=self._view.origin,
        ) as generation:
            async for token, piece in generation:
                now_s = trio.current_time()
                timing = StageTiming(0, token.compute_s, max(0.0, now_s - since_s))
                since_s = now_s
                on_token()
                if token.finish_reason is not None:
                    last = token, piece, timing
                else:
                    await self.tell_origin(_streaming_token(context, token, (timing,)), piece)
            if last is None:
                raise WorkerError("the worker ended a generation without a reason")
            done = generation.done
        token, piece, timing = last
        n_cached = done.n_cached_tokens if done is not None else 0
        await self.tell_origin(_streaming_token(context, token, (timing,), n_cached), piece)

    async def tell_origin(self, message: OriginMessage, piece: bytes = b"") -> None:
        if self._origin_side is not None:
            self._origin_side.receive(self._view.node_id, message, piece)
        else:
            await self._router.send(self._view.origin, *encode_job(message, piece))

    async def hold_slot(self, hold_s: float, prefixes: Sequence[StageBlocks]) -> None:
        """Keep what this node's worker has of the request for another one. `prefixes`: what the origin called
        the rows in the end, under which another stage may fetch them."""
        try:
            await give_names(self._compute, self._context, prefixes)
            await self._compute.hold(self._context.model.model_id, self._context.request_id, hold_s)
        except SwarmLLMError as error:
            self._log.info("slot of request %s not held: %s", self._context.request_id, error)

    async def free_slot(self, prefixes: Sequence[StageBlocks]) -> None:
        """`prefixes`: what the origin called the rows in the end."""
        try:
            await give_names(self._compute, self._context, prefixes)
            # Not release: a forward of this request may still be running.
            await self._compute.cancel(self._context.model.model_id, self._context.request_id)
        except SwarmLLMError as error:
            self._log.info("slot of request %s not freed: %s", self._context.request_id, error)

    async def cancel_at(self, node_id: NodeId, *, hold: bool) -> None:
        """Of the origin's side: the request is over for a node with stages of it."""
        prefixes = last_names(self._origin_side, node_id)
        n_rows = 0 if self._origin_side is None else self._origin_side.n_rows
        message = CancelInference(
            request_id=self._context.request_id, prefixes=prefixes, hold=hold, n_rows=n_rows or UNSET
        )
        try:
            await self._router.send(node_id, *encode_job(message))
        except SwarmLLMError as error:
            self._log.debug("request %s not cancelled at %s: %s", self._context.request_id, node_id, error)

    def _advance(self, job: Job, state: JobState, outcome: JobOutcome) -> JobState:
        """What comes of a state passes the table, before the job moves and anybody is told. Raises
        WorkerError."""
        after = advance(job, state, outcome, self._view)
        if outcome is JobOutcome.INCOMPLETE:
            self._raise_incomplete(job)
        return after

    async def _validate(self, job: Job) -> JobState:
        loaded = self._compute.loaded(self._context.model.model_id)
        return self._advance(job, JobState.VALIDATING, after_validating(job, self._view, loaded))

    async def _embed(self, job: Job) -> JobState:
        first_is_here = self._view.is_here(0)
        if job.token is None:
            await self._embed_chunk(job, first_is_here)
        elif first_is_here:
            job.tensor = np.array([job.token, *job.guesses], np.int32)
            job.step = ComputeStep.LAYER
        return self._advance(job, JobState.EMBED, after_embed(job, self._view))

    async def _embed_chunk(self, job: Job, first_is_here: bool) -> None:
        assert self._origin_side is not None, "only the origin holds a prompt"
        job.tensor, job.timings, job.stage = None, (), 0
        chunk = self._origin_side.next_chunk()
        if chunk is None:
            return
        job.position, job.n_tokens, job.prefill_left, job.until = chunk
        rows = self._origin_side.prompt[job.position : job.position + job.n_tokens]
        job.since_s = trio.current_time()
        job.tensor = await embedded(
            self._compute,
            self._context.model,
            rows,
            job.position,
            self._origin_side.pictures,
            as_ids=first_is_here,
        )
        job.step = ComputeStep.LAYER

    async def _process_layers(self, job: Job) -> JobState:
        stage, tensor = job.stage, job.tensor
        if tensor is None:
            assert job.token is not None
            tensor = np.array([job.token, *job.guesses], np.int32)
        samples = stage == self._view.last and job.prefill_left == 0
        first_sample = samples and not self._has_sampled
        want = "token" if samples else self._last_want if stage == self._view.last else "hidden"
        end = job.position + job.n_tokens
        result = await self._compute.forward(
            self._context.model,
            request_id=self._context.request_id,
            layers=self._view.layers(stage),
            position=job.position,
            tensor=tensor,
            want=want,
            sampling=self._context.sampling if first_sample or want == "scores" else None,
            n_prompt_tokens=self._context.n_prompt_rows,
            generated=self._context.generated if first_sample else (),
            scored=self._context.scored[job.position : end] if want == "scores" else (),
            ring=self._ring_hint(job, samples),
            rounded=self._context.rounds(stage),
            exact_rows=self._context.exact_rows,
            picture_runs=self._context.picture_runs,
            owner=self._context.owner,
        )
        is_finite = result.tensor is None or bool(np.isfinite(result.tensor).all())
        if is_finite:
            is_chunk = job.position < self._context.n_given_tokens
            self._row_committer.computed(stage, job.position, job.n_tokens if is_chunk else 1)
        if result.onward and result.token is None:
            return self._advance(job, JobState.PROCESS_LAYERS, JobOutcome.PASSED_ON)
        self._has_sampled |= samples
        job.is_passed_on, job.resent = result.onward, False
        job.tensor, job.sampled, job.piece = result.tensor, result.token, result.piece
        job.scores = result.scores
        if not is_finite:
            # Finite rows can be so large that no layer makes numbers of them: not to be passed on.
            raise WorkerError("what the layers make of these rows is no number", kind=NOT_FINITE)
        if job.until == stage:
            job.tensor = None  # The stages after it have had it.
        now_s = trio.current_time()
        busy_s = max(0.0, now_s - job.since_s)
        job.timings = (*job.timings, StageTiming(stage, result.compute_s, busy_s))
        job.since_s = now_s
        outcome = after_layers(job, self._view)
        after = self._advance(job, JobState.PROCESS_LAYERS, outcome)
        if outcome is JobOutcome.LAST_LAYER and job.prefill_left > 0:
            await self.tell_origin(self._progress(job), self._passed_rows(job))
            job.token = None
        return after

    async def _head(self, job: Job) -> JobState:
        sampled = job.sampled
        assert sampled is not None, "the last stage's forward samples"
        job.token, job.finish_reason = sampled.token, sampled.finish_reason
        reported = _streaming_token(self._context, sampled, job.timings)
        outcome = after_head(job, self._view)
        if job.is_passed_on and outcome is not JobOutcome.FINISHED:
            outcome = JobOutcome.PASSED_ON
        after = self._advance(job, JobState.HEAD, outcome)
        origin_is_first = self._view.origin == self._view.stages[0].node_id
        if job.is_passed_on and origin_is_first:
            return after
        if outcome is JobOutcome.TOKEN_ELSEWHERE and not origin_is_first:
            job.unreported = reported, job.piece
        else:
            await self.tell_origin(reported, job.piece)
        return after

    def _ring_hint(self, job: Job, samples: bool) -> RingHint:
        """A chunk of the prompt keeps to the daemons' way, where others may still be ahead of it."""
        if not samples and job.position < self._context.n_given_tokens:
            return NO_RING
        waited_s = max(0.0, trio.current_time() - job.since_s)
        return RingHint(job.stage, job.timings, waited_s, job.resent, job.number, job.fresh)

    async def _send(self, job: Job) -> JobState:
        after = self._advance(job, JobState.SEND, JobOutcome.SENT)
        receiver = destination(job, self._view)
        if job.step is ComputeStep.HEAD:
            await self._send_to(receiver, self._progress(job), self._passed_rows(job))
            return after
        embedded = job.step is ComputeStep.LAYER
        forward = LayerForward(
            request_id=self._context.request_id,
            step="layer" if embedded else "embed",
            stage=job.stage,
            position=job.position,
            n_tokens=job.n_tokens,
            prefill_left=job.prefill_left,
            token=0 if embedded or job.token is None else job.token,
            timings=job.timings,
            until=job.until,
            number=job.number,
            fresh=job.fresh,
        )
        payload = await self._packed(job.tensor, job.stage) if embedded and job.tensor is not None else b""
        await self._send_to(receiver, forward, payload)
        if job.unreported is not None:
            reported, job.unreported = job.unreported, None
            await self.tell_origin(*reported)
        return after

    async def _packed(self, rows: Tensor, stage: int) -> Payload:
        row_format = self._context.row_format(stage)
        if row_format == "f32":
            return encode_tensor(rows)
        if rows.nbytes < LONG_BYTES:
            return pack_rows(rows, row_format)
        return await trio.to_thread.run_sync(pack_rows, rows, row_format)

    async def _send_to(self, receiver: NodeId, message: JobMessage, payload: Payload = b"") -> None:
        await self.relay(receiver, *encode_job(message, payload))

    async def relay(self, receiver: NodeId, header: bytes, payload: bytes | memoryview) -> None:
        """Send a job message as it is. Raises NodeUnreachable, after the origin's side was told."""
        if receiver == self._view.node_id and self._origin_side is not None:
            message = decode_job(header, payload)
            if isinstance(message, StreamingToken | PrefillProgress | PipelineError):
                self._origin_side.receive(receiver, message, payload)
                return
        try:
            await self._router.send(receiver, header, payload)
        except NodeUnreachable:
            if self._origin_side is not None:
                self._origin_side.lost(receiver)
            raise

    def _progress(self, job: Job) -> PrefillProgress:
        return PrefillProgress(
            request_id=self._context.request_id,
            position=job.position + job.n_tokens,
            timings=job.timings,
        )

    def _passed_rows(self, job: Job) -> bytes:
        if self._context.scored:
            return encode_scores(job.scores)
        return b"" if job.tensor is None else b"".join(encode_tensor(job.tensor))

    def _raise_incomplete(self, job: Job) -> None:
        layers = self._view.layers(min(job.stage, self._view.last))
        raise WorkerError(
            f"layers {layers} of {self._context.model.model_id[:12]} are not loaded here", kind="not_loaded"
        )


def _streaming_token(
    context: RequestContext, token: Token, timings: tuple[StageTiming, ...], n_cached_tokens: int = 0
) -> StreamingToken:
    return StreamingToken(
        request_id=context.request_id,
        index=token.index,
        token=token.token,
        finish_reason=token.finish_reason,
        timings=timings,
        logprobs=token.logprobs,
        n_cached_tokens=n_cached_tokens,
        stopped_by=token.stopped_by,
        fingerprint=token.fingerprint,
    )
