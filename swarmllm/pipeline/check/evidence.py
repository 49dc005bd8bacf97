"""Collects the rows of a finished request that a check needs, from the stages that still have them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import trio
from blake3 import blake3
from msgspec import UNSET

from swarmllm.errors import SwarmLLMError
from swarmllm.models.layers import LayerRange, covers
from swarmllm.pipeline.check.fingerprints import is_possible
from swarmllm.pipeline.check.ledger import Ledger, Side, spans
from swarmllm.pipeline.check.likelihood import is_plain
from swarmllm.pipeline.check.recompute import RecomputeTask, compute_here
from swarmllm.pipeline.check.reported_logprobs import are_possible
from swarmllm.pipeline.check.sampling import Stretch
from swarmllm.pipeline.check.verdict import Evidence, TokenEvidence
from swarmllm.pipeline.origin.reported_fingerprints import ReportedFingerprints
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.pipeline.stage.row_committer import NoRowCommitter
from swarmllm.swarm.router import Router
from swarmllm_proto.codec import decode_response, encode_job, encode_request
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import CHECKED_ROWS_MAX
from swarmllm_proto.swarm import FetchRows, RowsPiece
from swarmllm_proto.tensors import Tensor

ANSWER_TIMEOUT_S = 10.0
_F32 = np.dtype("<f4")


class EvidenceAbsent(Exception):
    """A node does not keep the rows any more, or says so."""


class OtherRows(Exception):
    """A node shows other rows than those it signed for."""

    def __init__(self, node_id: NodeId) -> None:
        super().__init__(node_id)
        self.node_id = node_id


async def rows_here(
    compute: Compute, context: RequestContext, boundary: int, position: int, n_rows: int
) -> Tensor:
    """As they left or reached this node's layers. Raises SwarmLLMError."""
    return await compute.read_journal(
        context.model, request_id=context.request_id, end=boundary, position=position, n_rows=n_rows
    )


async def answer(
    compute: Compute,
    context: RequestContext | None,
    request: FetchRows,
    row_committer: NoRowCommitter | None = None,
) -> RowsPiece:
    """The stage's side. `context`: of a request that the asking node is the origin of."""
    absent = RowsPiece(request_id=request.request_id, known=False)
    if context is None:
        return absent
    view, row_bytes = context.view, context.n_embd * _F32.itemsize
    boundaries = {
        boundary
        for index, stage in enumerate(view.stages)
        if view.is_here(index)
        for boundary in (stage.start, stage.end)
    }
    if request.boundary not in boundaries:
        return absent
    if not request.digest_only and request.n_tokens * row_bytes > CHECKED_ROWS_MAX:
        return absent
    try:
        rows = await rows_here(compute, context, request.boundary, request.position, request.n_tokens)
    except SwarmLLMError:
        return absent
    data = np.ascontiguousarray(rows, _F32).tobytes()
    digest = blake3(data).digest()
    kept = memoryview(b"" if request.digest_only else data)
    said = (
        None
        if row_committer is None
        else row_committer.signed_for(request.boundary, request.position, digest)
    )
    return RowsPiece(
        request_id=request.request_id,
        known=True,
        digest=digest,
        rows=kept,
        commitment=UNSET if said is None else encode_job(said)[0],
    )


def token_evidence(
    came_in: Tensor,
    drawn: Stretch,
    generated: tuple[int, ...],
    *,
    is_agreed: bool | None,
    is_ended: bool,
) -> TokenEvidence:
    """About the `drawn` ones of the tokens that were `generated`, with the last of which the model is said to
    end its text if it `is_ended`."""
    return TokenEvidence(
        np.ascontiguousarray(came_in),
        drawn.position,
        generated[: drawn.position],
        generated[drawn.position : drawn.end],
        is_agreed,
        is_ended and drawn.end == len(generated),
    )


def with_fingerprints(
    evidence: TokenEvidence, reported: ReportedFingerprints, context: RequestContext
) -> TokenEvidence:
    """And what they have shown already, with the log-probabilities that came with these tokens."""
    drawn = evidence.first - len(context.generated), len(evidence.reported)
    values = reported.read(*drawn)
    logprobs = tuple(reported.logprobs(*drawn)) if context.sampling.logprobs else ()
    key = context.sampling.fingerprint_key
    if values is None or key is None:
        return evidence
    plain = is_plain(context.sampling)
    is_likeliest = context.sampling.temperature == 0 and plain
    possible = is_possible(
        values, evidence.reported, evidence.first, key, context.n_vocab, is_likeliest=is_likeliest
    )
    if plain and logprobs:
        possible &= are_possible(logprobs, values, evidence.reported, evidence.first, key, context.n_vocab)
    return replace(evidence, fingerprints=values, is_possible=possible, logprobs=logprobs)


def of_fewer(evidence: TokenEvidence, n_tokens: int) -> TokenEvidence:
    """The same of at most so many of the tokens."""
    n_less = len(evidence.reported) - n_tokens
    if n_less <= 0:
        return evidence
    rows = evidence.came_in
    return replace(
        evidence,
        came_in=rows[: len(rows) - n_less] if rows.ndim > 1 else rows,
        reported=evidence.reported[:n_tokens],
        fingerprints=None if evidence.fingerprints is None else evidence.fingerprints[:n_tokens],
        logprobs=evidence.logprobs[:n_tokens],
        is_ended=False,
    )


class Collector:
    """Collects evidence at the origin, for one finished request whose stages still hold it."""

    def __init__(
        self,
        router: Router,
        compute: Compute,
        context: RequestContext,
        tokens: Tensor,
        chunk_tokens: int,
        ledger: Ledger | None = None,
    ) -> None:
        """`tokens`: i32, all that were computed; the prompt was in chunks of so many. `ledger`: what the
        stages have said of their rows before anybody knew that these are looked at."""
        self._router = router
        self._compute = compute
        self._context = context
        self._tokens = tokens
        self._chunk_tokens = chunk_tokens
        self._row_bytes = context.n_embd * _F32.itemsize
        self._ledger = ledger

    async def collect(self, stage: int, stretch: Stretch) -> Evidence:
        """Raises EvidenceAbsent, OtherRows, SwarmLLMError."""
        view = self._context.view
        layers = view.layers(stage)
        node_id, next_id = view.stages[stage].node_id, view.stages[stage + 1].node_id
        is_agreed: bool | None = True
        if stage == 0:
            came_in = await self._compute.embed(self._context.model, self._tokens[: stretch.end])
            # The last stage tells the first one each token, and may tell the origin another one.
            is_told_here = stretch.end <= self._context.n_given_tokens
            is_agreed = True if is_told_here or view.is_here(view.last) else None
        else:
            before = view.stages[stage - 1].node_id
            came_in = await self._from_the_start(before, layers.start, stretch.end)
            self._require_own(stage - 1, "sent", 0, came_in)
            if before != view.node_id:
                is_agreed = await self._is_agreed(stage - 1, layers.start, came_in)
        sent = await self._reported_rows(node_id, layers.end, stretch)
        received = await self._reported_rows(next_id, layers.end, stretch)
        self._require_own(stage, "sent", stretch.position, sent)
        self._require_own(stage + 1, "received", stretch.position, received)
        return Evidence(
            np.ascontiguousarray(came_in, _F32),
            stretch.n_rows,
            sent,
            received,
            next_id == view.node_id or self._has_settled(stage, stretch),
            is_agreed,
            self._context.rounds(stage),
        )

    def _require_own(self, stage: int, side: Side, position: int, rows: Tensor | None) -> None:
        """What a stage shows is what it has signed for, as far as it has. Raises OtherRows."""
        node_id = self._context.view.stages[stage].node_id
        if self._ledger is None or rows is None or node_id == self._context.view.node_id:
            return
        for start, n_rows in spans(position, len(rows)):
            said = self._ledger.said(stage, side, start, n_rows)
            part = rows[start - position : start - position + n_rows]
            if said is not None and said != blake3(np.ascontiguousarray(part, _F32).tobytes()).digest():
                raise OtherRows(node_id)

    def _has_settled(self, stage: int, stretch: Stretch) -> bool:
        """Both sides of a boundary have signed for the same rows."""
        return self._ledger is not None and self._ledger.is_agreed(stage, stretch.position, stretch.n_rows)

    async def _is_agreed(self, stage: int, boundary: int, came_in: Tensor) -> bool | None:
        """Whether the stage after `stage` says that these rows came to it. It cannot take back that it has
        signed for them."""
        if self._ledger is not None and self._ledger.is_agreed(stage, 0, len(came_in)):
            return True
        return await self._has(self._context.view.stages[stage + 1].node_id, boundary, came_in)

    async def collect_tokens(
        self, drawn: Stretch, generated: tuple[int, ...], *, is_ended: bool
    ) -> TokenEvidence:
        """See `token_evidence`. Raises EvidenceAbsent, OtherRows, SwarmLLMError."""
        view = self._context.view
        start = view.layers(view.last).start
        n_rows = self._context.n_prompt_tokens + drawn.end - 1
        before = view.stages[-2].node_id
        came_in = await self._from_the_start(before, start, n_rows)
        self._require_own(view.last - 1, "sent", 0, came_in)
        is_agreed: bool | None = True
        if before != view.node_id:
            is_agreed = await self._is_agreed(view.last - 1, start, came_in)
        return token_evidence(came_in, drawn, generated, is_agreed=is_agreed, is_ended=is_ended)

    async def _from_the_start(self, node_id: NodeId, boundary: int, n_rows: int) -> Tensor:
        """Where the first rows were an earlier request's, this node computes them again, if it can."""
        here = node_id == self._context.view.node_id
        loaded = self._compute.loaded(self._context.model.model_id)
        before = LayerRange(0, boundary)
        try:
            return await self._rows(node_id, boundary, 0, n_rows)
        except SwarmLLMError:
            if not here or not covers(loaded, before) or "q8_0" in self._context.row_formats:
                # (Nobody rounds the rows of a task on their way, as those were that came in.)
                raise
        task = RecomputeTask(self._context, before, self._tokens[:n_rows], n_rows, self._chunk_tokens)
        return await compute_here(self._compute, task)

    async def _reported_rows(self, node_id: NodeId, boundary: int, stretch: Stretch) -> Tensor | None:
        try:
            return await self._rows(node_id, boundary, *stretch)
        except EvidenceAbsent:
            return None

    async def _rows(self, node_id: NodeId, boundary: int, position: int, n_rows: int) -> Tensor:
        if node_id == self._context.view.node_id:
            return await rows_here(self._compute, self._context, boundary, position, n_rows)
        at_once = min(4096, CHECKED_ROWS_MAX // self._row_bytes)
        pieces: list[Tensor] = []
        while n_rows and at_once:
            n = min(n_rows, at_once)
            piece = await self._ask(node_id, boundary, position, n)
            if not piece.known or len(piece.rows) != n * self._row_bytes:
                raise EvidenceAbsent
            pieces.append(np.frombuffer(piece.rows, _F32).reshape(n, self._context.n_embd))
            position, n_rows = position + n, n_rows - n
        if n_rows:
            raise EvidenceAbsent
        return np.concatenate(pieces)

    async def _has(self, node_id: NodeId, boundary: int, rows: Tensor) -> bool | None:
        """Whether a stage says that these rows came to it."""
        is_alike = True
        for position in range(0, len(rows), 4096):
            part = rows[position : position + 4096]
            try:
                piece = await self._ask(node_id, boundary, position, len(part), digest_only=True)
            except EvidenceAbsent:
                return None
            if not piece.known:
                return None
            is_alike &= piece.digest == blake3(np.ascontiguousarray(part, _F32).tobytes()).digest()
        return is_alike

    async def _ask(
        self, node_id: NodeId, boundary: int, position: int, n_rows: int, *, digest_only: bool = False
    ) -> RowsPiece:
        request = FetchRows(
            request_id=self._context.request_id,
            boundary=boundary,
            position=position,
            n_tokens=n_rows,
            digest_only=digest_only,
        )
        try:
            with trio.fail_after(ANSWER_TIMEOUT_S):
                body = await self._router.request(
                    node_id, encode_request(request), timeout_s=ANSWER_TIMEOUT_S
                )
            piece = decode_response(body)
        except (trio.TooSlowError, SwarmLLMError, ProtocolError):
            raise EvidenceAbsent from None
        if not isinstance(piece, RowsPiece) or piece.request_id != request.request_id:
            raise EvidenceAbsent
        return piece
