"""Starts standbys beside slow pipelines; the first one to give the next token keeps the request.

A standby is another attempt at the same request: the prompt and the tokens so far, computed as one prompt,
with an id of its own. Its next token is the one that the slow pipeline owes, so nothing comes twice, and the
text is what it would have been (see `failover`). The slower one is cancelled, and its stages free what they
hold.

Being overtaken is no fault. A pipeline that was overtaken is waited for a little longer, behind the client's
back: if it gives its token, it was slow, which is measured and costs no trust; if it stays silent, its stages
are asked like those of any silent request.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import trio

from swarmllm.errors import DeadlineExceeded, NoPipeline, SwarmLLMError
from swarmllm.pipeline.check.sampling import SINGLE_ROW
from swarmllm.pipeline.origin.attempts import Attempts
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.origin.generation import TokenSource
from swarmllm.pipeline.origin.requests import Attempt, OriginRequest
from swarmllm.pipeline.repair.hedge import USUAL_TOKENS, AwaitedToken, Hedge, HedgeBudget
from swarmllm.pipeline.repair.retry_policy import PipelineSpeed
from swarmllm.pipeline.route.assembly import Assembly
from swarmllm.pipeline.stage.compute import SampledToken
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.pipeline.tasks import PipelineTasks
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)


class Standby(NamedTuple):
    """A pipeline that could start now."""

    assembly: Assembly
    spared: frozenset[NodeId]
    """Nodes of the other one that it does without: one of these may be the slow one."""


class ReadToken(NamedTuple):
    token: tuple[SampledToken, bytes]
    source: TokenSource
    closing: AsyncExitStack | None
    """Of a source that is not the one that was read before."""


class Routes(Protocol):
    async def standby(self, request: OriginRequest, suspected: frozenset[NodeId]) -> Assembly:
        """The best pipeline for the next token without these nodes, as far as they can be spared. Raises
        NoPipeline."""
        ...

    def pace(self, request: OriginRequest, assembly: Assembly) -> PipelineSpeed: ...

    def took_over(self, request: OriginRequest, assembly: Assembly) -> None:
        """The request goes on there."""
        ...


@dataclass(slots=True)
class Standbys:
    """For all requests of this node."""

    node_id: NodeId
    attempts: Attempts
    routes: Routes
    counts: PipelineStatistics
    budget: HedgeBudget
    tasks: PipelineTasks
    judged_after_s: float
    """So long an overtaken pipeline may take to say what it is at."""

    def served(self, request: OriginRequest) -> None:
        """It is over."""
        if request.current is not None and request.current.context.view.node_ids != {self.node_id}:
            self.budget.served(len(request.tokens) + SINGLE_ROW * len(request.generated))

    async def next(
        self, request: OriginRequest, hedge: Hedge, source: TokenSource, closing: AsyncExitStack
    ) -> ReadToken:
        """The next token, of `source` or of a standby; `closing` ends the former. Raises SwarmLLMError."""
        if not isinstance(source, Chain) or not hedge.is_on or not may_be_repeated(request):
            return ReadToken(await source.next(), source, None)
        while True:
            token = await source.next_by(hedge.look_at_s(awaited(source), trio.current_time()))
            if token is not None:
                return ReadToken(token, source, None)
            standby = await self._standby(request, source)
            now_s, work = trio.current_time(), len(request.rows) + SINGLE_ROW
            if standby is None:
                hedge.nothing_found(now_s)
            elif hedge.begins(awaited(source), standby.assembly.first_s, work, now_s):
                return await self._race(request, hedge, source, closing, standby)

    async def _standby(self, request: OriginRequest, slow: Chain) -> Standby | None:
        # Who is asked how far it is counts what came since it was last asked, so it is not asked for this.
        suspected = slow.node_ids - {self.node_id}
        try:
            assembly = await self.routes.standby(request, suspected)
        except NoPipeline:
            return None
        # What this node runs as a whole is not begun beside another: it would share no stage with it.
        is_here = assembly.node_ids == {self.node_id}
        spared = suspected - assembly.node_ids
        return None if is_here or not spared else Standby(assembly, spared)

    async def _race(
        self, request: OriginRequest, hedge: Hedge, slow: Chain, closing: AsyncExitStack, standby: Standby
    ) -> ReadToken:
        assert request.current is not None, "the slow one"
        overtaken, attempt = request.current, self.attempts.stand_by(request, standby.assembly)
        pace = self.routes.pace(request, standby.assembly)
        self.counts.hedges += 1
        read: ReadToken | None = None
        failure: SwarmLLMError | None = None
        try:
            async with trio.open_nursery() as nursery:
                n_running = 2

                def ended() -> None:
                    nonlocal n_running
                    n_running -= 1
                    if read is not None or not n_running:
                        nursery.cancel_scope.cancel()

                async def go_on() -> None:
                    nonlocal read, failure
                    try:
                        token = await slow.next()
                        read = read or ReadToken(token, slow, None)
                    except SwarmLLMError as error:
                        failure = error
                    ended()

                async def stand_by() -> None:
                    nonlocal read
                    try:
                        async with AsyncExitStack() as stack:
                            source = await stack.enter_async_context(self.attempts.open(attempt, pace))
                            token = await source.next()
                            if read is None:
                                read = ReadToken(token, source, stack.pop_all())
                    except SwarmLLMError as error:
                        log.info("request %s: its standby failed: %s", request.id, error.message)
                    ended()

                nursery.start_soon(go_on)
                nursery.start_soon(stand_by)
        except BaseException:
            # The reader left in the turn in which the standby gave its token.
            if read is not None and read.closing is not None:
                with trio.CancelScope(shield=True):
                    await read.closing.aclose()
            raise
        if read is None or read.source is slow:
            hedge.lost(trio.current_time())
            if read is not None:
                return read
            assert failure is not None, "both have failed"
            raise failure
        request.taken_over_by(attempt)
        self._took_over(overtaken, slow, closing, standby)
        hedge.won()
        return read

    def _took_over(self, overtaken: Attempt, slow: Chain, closing: AsyncExitStack, standby: Standby) -> None:
        request = overtaken.request
        self.counts.hedges_won += 1
        log.info("request %s goes on at its standby after %d tokens", request.id, len(request.generated))
        self.routes.took_over(request, standby.assembly)
        self.attempts.doubt(standby.spared)

        async def leave() -> None:
            await self._leave(overtaken, slow, closing, standby.spared)

        self.tasks.spawn_if_running(leave)

    async def _leave(
        self, overtaken: Attempt, slow: Chain, closing: AsyncExitStack, spared: frozenset[NodeId]
    ) -> None:
        """What was overtaken may still give its token, or be found to do nothing."""
        try:
            with trio.move_on_after(self.judged_after_s):
                await slow.next()
        except SwarmLLMError as failure:
            log.debug("request %s: what was overtaken failed: %s", overtaken.request.id, failure.message)
        finally:
            if slow.failure is None:
                slow.blamed.doubted = spared
                slow.fail(DeadlineExceeded("a standby gave the token first"))
            error = slow.failure or SwarmLLMError("it is over")
            with trio.CancelScope(shield=True), suppress(SwarmLLMError):
                await closing.__aexit__(type(error), error, None)
            self.attempts.release(overtaken)


def may_be_repeated(request: OriginRequest) -> bool:
    """Whether another pipeline would go on with the same text."""
    return not request.sampling.exact and not request.sampling.mirostat


def awaited(chain: Chain) -> AwaitedToken:
    pace, n_tokens = chain.pace, chain.account.n_decoded
    assert pace is not None, "it answers a request"
    return AwaitedToken(
        pace.token_s if chain.has_begun else pace.first_s,
        chain.silent_s,
        chain.decode_s / n_tokens if n_tokens >= USUAL_TOKENS else 0.0,
    )
