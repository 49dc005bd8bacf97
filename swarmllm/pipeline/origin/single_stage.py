"""Pipelines of one stage: the worker there runs the whole decode loop, and no job walks at all.

`LocalSource` reads from this node's worker; `RemoteChain` from the worker of another node.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import trio

from swarmllm.errors import WorkerError
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.origin.generation import FetchedPrefix, Shape, SpeculationCounts, StageReport
from swarmllm.pipeline.origin.lifecycle import ChainEvent
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.stage.compute import Compute, LocalGeneration
from swarmllm.pipeline.stage.session import Session
from swarmllm_proto.codec import encode_job
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Token
from swarmllm_proto.swarm import RemoteGenerateRequest, StageBlocks
from swarmllm_proto.tensors import Tensor, encode_tensor


class LocalSource:
    shape: Shape = "local"
    is_rebuilt = False

    def __init__(
        self,
        generation: LocalGeneration,
        context: RequestContext,
        nickname: str,
        fetched: FetchedPrefix | None = None,
    ) -> None:
        """`fetched`: KV that came for it from another node."""
        self.fetched = fetched
        self._generation = generation
        self._tokens = generation.__aiter__()
        self._context = context
        self._nickname = nickname
        self._compute_s = 0.0
        self._n_tokens = 0
        """Of this worker's own."""
        self._started_s = trio.current_time()
        self._first_s = 0.0
        self._latest_s = 0.0

    async def next(self) -> tuple[Token, bytes]:
        try:
            token, piece = await self._tokens.__anext__()
        except StopAsyncIteration:
            raise WorkerError("the worker ended a generation without a reason") from None
        self._latest_s = trio.current_time()
        if self._n_tokens:
            self._compute_s += token.compute_s
        else:
            self._first_s = self._latest_s
        self._n_tokens += 1
        if token.finish_reason is not None:
            # The worker's last word follows at once; who leaves before it would cancel a request that is
            # over.
            async for _ in self._tokens:
                raise WorkerError("the worker went on after the end of a generation")
        return token, piece

    @property
    def n_generated(self) -> int:
        return len(self._context.generated) + self._n_tokens

    @property
    def n_cached_tokens(self) -> int:
        done = self._generation.done
        return done.n_cached_tokens if done is not None else 0

    @property
    def used_other_format(self) -> bool:
        """It rests on KV that another node computed in another format, for it or for an earlier request. The
        latter is known at the end."""
        done = self._generation.done
        has_fetched = self.fetched is not None and self.fetched.other_format
        return has_fetched or (done is not None and done.other_format is True)

    @property
    def guesses(self) -> SpeculationCounts:
        done = self._generation.done
        return SpeculationCounts(done.guesses if done is not None else ())

    @property
    def prefill_s(self) -> float:
        return self._first_s - self._started_s if self._n_tokens else 0.0

    @property
    def decode_s(self) -> float:
        return self._latest_s - self._first_s if self._n_tokens else 0.0

    @property
    def route(self) -> tuple[StageReport, ...]:
        view = self._context.view
        return (
            StageReport(
                node_id=view.node_id,
                nickname=self._nickname,
                layers=view.layers(0),
                compute_s=self._compute_s / max(1, self._n_tokens - 1),
                prefill_s=self.prefill_s,
            ),
        )


@asynccontextmanager
async def open_local(
    compute: Compute,
    context: RequestContext,
    tokens: Tensor,
    nickname: str,
    brought: AbstractAsyncContextManager[FetchedPrefix | None],
) -> AsyncIterator[LocalSource]:
    """`brought`: around it, KV that another node has of the prompt's beginning is in the worker."""
    async with (
        brought as fetched,
        compute.generate(
            context.model,
            request_id=context.request_id,
            tokens=tokens,
            sampling=context.sampling,
            n_generated=len(context.generated),
            session=context.conversation,
        ) as generation,
    ):
        yield LocalSource(generation, context, nickname, fetched)


class RemoteChain(Chain):
    """The origin's side; the stage's is `JobRunner.generate`."""

    shape: Shape = "remote-generate"
    fits_context = False
    """A worker there whose context is smaller ends the text where it is full."""

    @property
    def may_be_resumed(self) -> bool:
        """A check needs nothing of the node but the tokens."""
        return False

    def prefixes_of(self, node_id: NodeId) -> tuple[StageBlocks, ...]:
        """The worker there sees the tokens and knows by itself what it has."""
        return ()

    def start(self, session: Session, n_known_blocks: int = 0) -> None:
        self._pass(ChainEvent.START)
        self._begin(session)
        request = RemoteGenerateRequest(request_id=self.context.request_id, n_tokens=len(self.prompt))
        stage = self.context.view.stages[0]
        session.relay(stage.node_id, *encode_job(request, encode_tensor(self.prompt)))
