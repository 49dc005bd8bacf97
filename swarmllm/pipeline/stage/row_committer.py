"""Signs for the rows of one request that came to this node's stages and left them, beside the walk of its
jobs.

A row is signed for when it is final: the job after it is there (a guess may have been wrong), or the request
is over. The rows are read from the worker, which keeps them for repairs, and have a digest for each stretch
of 32; nobody on the token path waits for that. The signed statements of the previous stage are kept, for the
origin to ask for where the two contradict each other.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import trio
from blake3 import blake3

from swarmllm.errors import SwarmLLMError
from swarmllm.log_filter import provoked_by
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.pipeline.stage.ended_requests import EndedRequests, RefusedRows
from swarmllm.pipeline.stage.session_queue import NotFinite
from swarmllm.pipeline.tasks import SpawnsTasks
from swarmllm.swarm.membership.signer import RowSigner
from swarmllm.swarm.router import Router
from swarmllm_proto.codec import encode_job
from swarmllm_proto.errors import BadTensor
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.row_commitments import (
    STRETCH_ROWS,
    STRETCHES_MAX,
    RowsCommitment,
    is_signed_by,
    pipeline_digest,
    signed,
    stretch_digests,
)
from swarmllm_proto.tensors import Tensor

log = logging.getLogger(__name__)

LONG_BYTES: Final = 2**18
"""Of rows whose digests would hold the event loop up for too long."""
READ_BYTES: Final = 2**20
"""Of rows that are read from the worker at once."""
DUE_ROWS: Final = 4 * STRETCH_ROWS
"""So many final rows are signed for while a request runs, with one statement; fewer at its end."""
TELL_TIMEOUT_S: Final = 5.0
_F32: Final = np.dtype("<f4")


class TakesOwnStatements(Protocol):
    def own(self, commitment: RowsCommitment) -> None:
        """Of a stage here, for a request of this node's clients."""
        ...


class NoRowCommitter:
    """Used where nobody asks this node to commit."""

    def computed(self, stage: int, position: int, n_rows: int) -> None:
        pass

    def ran_by_link(self, stage: int, n_jobs: int) -> None:
        pass

    def hears(self, sender: NodeId, commitment: RowsCommitment) -> bool | None:
        return None

    def signed_for(self, boundary: int, position: int, digest: bytes) -> RowsCommitment | None:
        return None

    def refused(self, stage: int, position: int, error: BadTensor) -> int:
        """Rows that came to a stage here are refused. The position of the first bad one."""
        return position + (error.first if isinstance(error, NotFinite) else 0)

    async def finish(self, n_rows: int) -> None:
        pass


@dataclass(slots=True)
class _Stage:
    index: int
    next: int = 0
    """Rows below this are signed for; a multiple of a stretch's."""
    n_final: int = 0
    has_begun: bool = False
    is_over: bool = False
    """The worker does not have the rows any more."""


class RowCommitter(NoRowCommitter):
    def __init__(
        self,
        context: RequestContext,
        compute: Compute,
        router: Router,
        signer: RowSigner,
        tasks: SpawnsTasks,
        origin: TakesOwnStatements | None,
        ended: EndedRequests,
    ) -> None:
        """`origin` takes the statements where this node is the origin. `ended` keeps rows that were
        refused."""
        view = context.view
        self._context = context
        self._compute = compute
        self._router = router
        self._signer = signer
        self._tasks = tasks
        self._origin = origin
        self._log = provoked_by(log, view.origin)
        self._pipeline = pipeline_digest(context.request_id, context.model.model_id, view.origin, view.stages)
        self._stages = {
            index: _Stage(index) for index, stage in enumerate(view.stages) if view.is_here(index)
        }
        self._heard: dict[tuple[int, int], RowsCommitment] = {}
        """By stage and position: what those before this node's stages have signed."""
        self._ended = ended
        self._refused: tuple[int, int, Tensor] | None = None
        """(stage, position, rows), up to the end of the stretch with the first bad one."""
        self._lock = trio.Lock()
        self._is_due = False

    def computed(self, stage: int, position: int, n_rows: int) -> None:
        """So many rows, none of them a guess, have gone through a stage here."""
        own = self._stages[stage]
        if not own.has_begun:
            own.has_begun = True
            own.next = -(-position // STRETCH_ROWS) * STRETCH_ROWS
        own.n_final = max(own.n_final, position + n_rows)
        self._look(own)

    def ran_by_link(self, stage: int, n_jobs: int) -> None:
        """So many jobs, each of at least one row that was no guess, came and left by links."""
        if (own := self._stages.get(stage)) is not None and own.has_begun:
            own.n_final += n_jobs
            self._look(own)

    def hears(self, sender: NodeId, commitment: RowsCommitment) -> bool | None:
        """What a stage before one here has signed. None: it is for the origin, which is here; False: no
        honest node says it."""
        view = self._context.view
        if commitment.stage >= view.last or not view.is_here(commitment.stage + 1):
            return None if view.origin == view.node_id else False
        if view.stages[commitment.stage].node_id != sender or not commitment.sent:
            return False
        n_rows_max = self._context.n_prompt_tokens + self._context.sampling.max_tokens
        if commitment.position + commitment.n_rows > n_rows_max:
            return False
        if not is_signed_by(commitment, self._pipeline, sender, self._signer.verify):
            return False
        return self._heard.setdefault((commitment.stage, commitment.position), commitment) == commitment

    def signed_for(self, boundary: int, position: int, digest: bytes) -> RowsCommitment | None:
        """Where the stage that ends at `boundary` has signed that the stretch at `position` has this
        digest."""
        for commitment in self._heard.values():
            index, rest = divmod(position - commitment.position, STRETCH_ROWS)
            is_there = not rest and 0 <= index * STRETCH_ROWS < commitment.n_rows
            if is_there and self._context.view.stages[commitment.stage].end == boundary:
                return commitment if stretch_digests(commitment.sent)[index] == digest else None
        return None

    def refused(self, stage: int, position: int, error: BadTensor) -> int:
        first = super().refused(stage, position, error)
        if isinstance(error, NotFinite) and self._refused is None:
            start = first - first % STRETCH_ROWS
            rows = error.rows[max(0, start - position) : start + STRETCH_ROWS - position]
            self._refused = stage, max(start, position), rows.copy()
        return first

    async def _keep_refused(self) -> None:
        """The whole stretch as it came, for the origin to ask for."""
        if self._refused is None:
            return
        stage, position, rows = self._refused
        boundary, n_before = self._context.view.layers(stage).start, position % STRETCH_ROWS
        data = np.ascontiguousarray(rows, _F32).tobytes()
        if n_before:
            before = await self._rows(boundary, position - n_before, n_before)
            if before is None:
                return
            data = np.ascontiguousarray(before, _F32).tobytes() + data
        start = position - n_before
        commitment = self.signed_for(boundary, start, blake3(data).digest())
        self._ended.keep_rows(
            self._context.request_id,
            RefusedRows(
                self._context.view.origin,
                boundary,
                start,
                n_before + len(rows),
                data,
                None if commitment is None else encode_job(commitment)[0],
                trio.current_time(),
            ),
        )

    async def finish(self, n_rows: int) -> None:
        """The request is over here, and its rows are there still. `n_rows`: that it has in the end, 0 where
        its origin does not say; then only those that are known to be final are signed for."""
        async with self._lock:
            await self._keep_refused()
            for stage in self._stages.values():
                if not stage.has_begun:
                    continue
                if n_rows:
                    # More of them may have come by links than the worker has told of.
                    await self._commit(stage, n_rows)
                    stage.is_over = True
                    continue
                await self._commit(stage, stage.n_final // STRETCH_ROWS * STRETCH_ROWS)
                while not stage.is_over:
                    # What may have gone by links since the worker's last sign of life.
                    await self._commit(stage, stage.next + STRETCH_ROWS)
                stage.is_over = False
                await self._commit(stage, stage.n_final)
                stage.is_over = True

    def _look(self, stage: _Stage) -> None:
        if stage.n_final >= stage.next + DUE_ROWS and not self._is_due and not stage.is_over:
            self._is_due = True
            self._tasks.spawn(self._work)

    async def _work(self) -> None:
        async with self._lock:
            self._is_due = False
            for stage in self._stages.values():
                await self._commit(stage, stage.n_final // STRETCH_ROWS * STRETCH_ROWS)

    async def _commit(self, stage: _Stage, end: int) -> None:
        """To rows below `end`."""
        at_once = READ_BYTES // (_F32.itemsize * self._context.n_embd) // STRETCH_ROWS * STRETCH_ROWS
        at_once = min(max(at_once, STRETCH_ROWS), STRETCHES_MAX * STRETCH_ROWS)
        while stage.next < end and not stage.is_over:
            n_rows = min(end - stage.next, at_once)
            layers = self._context.view.layers(stage.index)
            sent = received = b""
            if stage.index < self._context.view.last:
                sent = await self._digests(layers.end, stage.next, n_rows)
            if stage.index:
                received = await self._digests(layers.start, stage.next, n_rows)
            if not sent and (stage.index < self._context.view.last or not received):
                stage.is_over = True
                return
            commitment = RowsCommitment(
                request_id=self._context.request_id,
                stage=stage.index,
                position=stage.next,
                n_rows=n_rows,
                sent=sent,
                received=received,
                signature=bytes(64),
            )
            stage.next += n_rows
            await self._tell(signed(commitment, self._pipeline, self._signer.sign))

    async def _digests(self, boundary: int, position: int, n_rows: int) -> bytes:
        """Empty: the rows are not there."""
        rows = await self._rows(boundary, position, n_rows)
        if rows is None:
            return b""
        if rows.nbytes < LONG_BYTES:
            return digests_of(rows)
        return await trio.to_thread.run_sync(digests_of, rows)

    async def _rows(self, boundary: int, position: int, n_rows: int) -> Tensor | None:
        try:
            return await self._compute.read_journal(
                self._context.model,
                request_id=self._context.request_id,
                end=boundary,
                position=position,
                n_rows=n_rows,
            )
        except SwarmLLMError:
            return None

    async def _tell(self, commitment: RowsCommitment) -> None:
        view = self._context.view
        if self._origin is not None:
            self._origin.own(commitment)
        receivers = {view.origin}
        if commitment.stage < view.last and view.stages[commitment.stage + 1].commits is True:
            receivers.add(view.stages[commitment.stage + 1].node_id)
        header, payload = encode_job(commitment)
        for node_id in sorted(receivers - {view.node_id}):
            with trio.move_on_after(TELL_TIMEOUT_S):
                try:
                    await self._router.send(node_id, header, payload)
                except SwarmLLMError as error:
                    self._log.debug("%s not told of rows: %s", node_id, error)


def digests_of(rows: Tensor) -> bytes:
    """32 bytes for each 32 rows."""
    plain = np.ascontiguousarray(rows, _F32)
    return b"".join(
        blake3(plain[at : at + STRETCH_ROWS].tobytes()).digest() for at in range(0, len(plain), STRETCH_ROWS)
    )


class MakesRowCommitters(Protocol):
    def of(self, context: RequestContext, ended: EndedRequests) -> NoRowCommitter:
        """Signs for the rows of a request. `ended` keeps rows that were refused."""
        ...


class NoRowCommitters:
    """Used where nobody signs for rows."""

    def of(self, context: RequestContext, ended: EndedRequests) -> NoRowCommitter:
        return NoRowCommitter()


@dataclass(frozen=True, slots=True)
class RowCommitters:
    """Makes the row committers of the requests in which this node takes part."""

    compute: Compute
    router: Router
    signer: RowSigner
    tasks: SpawnsTasks
    origin: TakesOwnStatements
    """Of requests of this node's clients."""

    def of(self, context: RequestContext, ended: EndedRequests) -> NoRowCommitter:
        view = context.view
        if context.wants != "tokens" or not view.last:
            return NoRowCommitter()
        if not any(view.is_here(index) and stage.commits is True for index, stage in enumerate(view.stages)):
            return NoRowCommitter()
        origin = self.origin if view.origin == view.node_id else None
        return RowCommitter(context, self.compute, self.router, self.signer, self.tasks, origin, ended)
