"""Streams tokens from one pipeline after another, so that a stream outlives the nodes it runs on.

When a pipeline breaks, another one is assembled from who is alive: the old one with others in the place of
lost stages (see `plan`), or a new one, which computes the prompt and the tokens that were generated so far
as one prompt. It sets its sampler to where the old one was, and goes on with the next token. Nothing is lost,
because a token counts when it is here and everything that was on its way is computed again; nothing comes
twice, because the new pipeline has a request id of its own and its first token is the one after the last that
is here.

The text continues as it would have without the break: exactly so where the next token is a function of the
text (greedy, or sampled with a seed; a request without one gets a random seed) and the nodes compute alike.
Other hardware rounds differently, and then a sampled token may differ, as it might between two runs; it is
still drawn from the model's distribution after the text so far. Penalties, grammars and stop strings take the
old tokens into account; mirostat's running limit begins anew.
"""

from __future__ import annotations

import logging
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Protocol

import trio

from swarmllm.errors import SwarmLLMError
from swarmllm.pipeline.origin.detokenizer import Detokenizer
from swarmllm.pipeline.origin.generation import (
    FetchedPrefix,
    Shape,
    SpeculationCounts,
    StageReport,
    TokenSource,
)
from swarmllm.pipeline.origin.lifecycle import WITHOUT_PIPELINE, RequestEvent, RequestState
from swarmllm.pipeline.origin.requests import OriginRequest
from swarmllm.pipeline.origin.single_stage import LocalSource
from swarmllm.pipeline.repair.hedge import Hedge
from swarmllm.pipeline.repair.standbys import Standbys
from swarmllm.pipeline.stage.compute import SampledToken

log = logging.getLogger(__name__)


class Opener(Protocol):
    def open_pipeline(self, request: OriginRequest) -> AbstractAsyncContextManager[TokenSource]:
        """Opens a pipeline that continues after the tokens that the request has. It avoids the nodes in
        `request.recovery.avoid`, and adds the node that fails to them. Raises SwarmLLMError."""
        ...

    async def wait_for_change(self, request: OriginRequest, until_s: float) -> None:
        """Returns at `until_s` by trio's clock, or earlier when a node has come, left or announced something
        new since the latest attempt."""
        ...


class Failover:
    """A source of tokens; `aclose` it."""

    def __init__(
        self,
        request: OriginRequest,
        opener: Opener,
        standbys: Standbys | None = None,
        detokenizer: Detokenizer | None = None,
    ) -> None:
        """`detokenizer`: without it, the text is as the sources say."""
        self._request = request
        self._detokenizer = detokenizer
        self._opener = opener
        self._recovery = request.recovery
        self._standbys = standbys
        self._hedge = None if standbys is None else Hedge(standbys.budget)
        self._source: TokenSource | None = None
        """The pipeline at work, or the one that broke last."""
        self._closing: AsyncExitStack | None = None
        """Of the pipeline at work."""
        self._prefill_s = 0.0
        self._first_s = 0.0
        self._latest_s = 0.0
        self._has_changed = False
        self.recovery_s = 0.0
        """From knowing that a pipeline had broken to the next token, all in all."""
        self._broken_s = 0.0
        """Since when there is no token, where it is BROKEN or RESUMING."""
        self.n_rebuilt = 0
        """Of the recoveries, those after which only the lost stages were computed again."""

    async def next(self) -> tuple[SampledToken, bytes]:
        while True:
            try:
                if self._request.state in WITHOUT_PIPELINE:
                    await self._open()
                token, piece = await self._read()
                if self._detokenizer is not None:
                    token, piece = await self._detokenizer.of(self._source, token, piece)
            except SwarmLLMError as error:
                if self._request.state is RequestState.DECODE:
                    self._broken_s = trio.current_time()
                self._request.pass_event(RequestEvent.BROKE)
                await self._leave(error)
                again_s = self._recovery.failed(error, trio.current_time())
                log.info(
                    "request %s, after %d tokens: %s",
                    self._request.id,
                    len(self._request.generated),
                    error.message,
                )
                if again_s > trio.current_time():
                    await self._opener.wait_for_change(self._request, again_s)
                continue
            self._count(token)
            return token, piece

    async def _read(self) -> tuple[SampledToken, bytes]:
        assert self._source is not None
        is_local = isinstance(self._source, LocalSource)
        if is_local or self._standbys is None or self._hedge is None or self._closing is None:
            return await self._source.next()
        read = await self._standbys.next(self._request, self._hedge, self._source, self._closing)
        if read.closing is not None:
            self._source, self._closing = read.source, read.closing
            self._has_changed = bool(self._request.generated)
        return read.token

    async def aclose(self) -> None:
        self._request.pass_event(RequestEvent.END)
        await self._leave(None)

    async def _open(self) -> None:
        self._request.n_attempts += 1
        async with AsyncExitStack() as stack:
            opening = self._opener.open_pipeline(self._request)
            self._source = await stack.enter_async_context(opening)
            self._closing = stack.pop_all()
        self._request.pass_event(RequestEvent.OPENED)
        self._has_changed = bool(self._request.generated)

    async def _leave(self, error: SwarmLLMError | None) -> None:
        closing, self._closing = self._closing, None
        if closing is None:
            return
        if error is None:
            await closing.aclose()
        else:
            # It learns of the failure, and says which node is to be avoided.
            await closing.__aexit__(type(error), error, error.__traceback__)

    def _count(self, token: SampledToken) -> None:
        before, self._latest_s = self._request.state, trio.current_time()
        self._request.pass_event(RequestEvent.TOKEN)
        self._recovery.token()
        if before is RequestState.PREFILL:
            self._first_s, self._prefill_s = self._latest_s, self._opened.prefill_s
        elif before is RequestState.RESUMING:
            self.n_rebuilt += self._opened.is_rebuilt
            self.recovery_s += self._latest_s - self._broken_s
        self._request.generated.append(token.token)

    @property
    def n_recoveries(self) -> int:
        return self._recovery.n_recoveries

    @property
    def is_exact(self) -> bool:
        source = self._source
        if isinstance(source, LocalSource) and source.used_other_format:
            return False
        return not self._request.was_rounded

    @property
    def n_generated(self) -> int:
        source = self._source
        if source is not None and self._closing is not None:
            return source.n_generated
        return len(self._request.generated)

    @property
    def is_rebuilt(self) -> bool:
        return self._opened.is_rebuilt

    @property
    def shape(self) -> Shape:
        return self._opened.shape

    @property
    def route(self) -> tuple[StageReport, ...]:
        """Of the pipeline at work."""
        return self._opened.route

    @property
    def n_cached_tokens(self) -> int:
        return self._opened.n_cached_tokens

    @property
    def fetched(self) -> FetchedPrefix | None:
        return self._opened.fetched if isinstance(self._opened, LocalSource) else None

    @property
    def guesses(self) -> SpeculationCounts:
        return self._opened.guesses

    @property
    def prefill_s(self) -> float:
        """Of the first pipeline."""
        return self._prefill_s

    @property
    def decode_s(self) -> float:
        """From the first token to the last, pauses included."""
        return self._latest_s - self._first_s if self._has_changed else self._opened.decode_s

    @property
    def _opened(self) -> TokenSource:
        assert self._source is not None, "a generation begins with its first token"
        return self._source
