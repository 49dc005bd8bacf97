"""What the origin's sources count of their tokens, when one follows another, and who may take part in one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import trio
from msgspec.structs import replace
from node_ids import A, B
from trio.testing import MockClock

from bench.common.arithmetic import fake_entry
from swarmllm.errors import NodeBusy, NodeRefused, NodeUnreachable, RemoteError, SwarmLLMError
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.job import RequestView
from swarmllm.pipeline.origin.assignment import assign
from swarmllm.pipeline.origin.output import Blamed
from swarmllm.pipeline.origin.requests import OriginRequest
from swarmllm.pipeline.origin.single_stage import LocalSource
from swarmllm.pipeline.repair.failover import Failover
from swarmllm.pipeline.repair.retry_policy import FIRST_PAUSE_S, RetryPolicy
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.route.measuring import ObservedCompute
from swarmllm.scheduling.speeds import Observations
from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.codec import encode_response
from swarmllm_proto.ipc import GenerateDone, Sampling, Token
from swarmllm_proto.swarm import Piece, PipelineAck, PipelineAssignment, Stage

MODEL = ModelFile("m", Path("/nowhere"))


class Worker:
    """A worker whose generation gives these tokens after a second each."""

    def __init__(self, *compute_s: float, first_index: int = 0) -> None:
        self.tokens = [
            Token(request_id="r", index=first_index + i, token=i, compute_s=each)
            for i, each in enumerate(compute_s)
        ]
        self.tokens[-1] = replace(self.tokens[-1], finish_reason="stop")
        self.done: GenerateDone | None = None

    async def __aiter__(self) -> AsyncIterator[tuple[Token, bytes]]:
        for token in self.tokens:
            await trio.sleep(1.0)
            yield token, b"x"
        self.done = GenerateDone(
            request_id="r",
            finish_reason="stop",
            n_prompt_tokens=6,
            n_generated=len(self.tokens),
            prefill_s=3.0,
            decode_s=1.0,
        )

    @asynccontextmanager
    async def generate(self, model: ModelFile, **_: object) -> AsyncIterator[Worker]:
        yield self

    def loaded(self, model_id: str) -> tuple[LayerRange, ...]:
        return (LayerRange(0, 2), LayerRange(2, 4))

    def __getattr__(self, name: str) -> object:
        return None


def context() -> RequestContext:
    view = RequestView(A, A, (Stage(node_id=A, start=0, end=4),), True)
    return RequestContext("r", MODEL, 4, 997, 6, Sampling(), view)


async def test_a_route_tells_what_a_token_took_without_the_first_whose_time_is_the_prompts(
    autojump_clock: MockClock,
) -> None:
    source = LocalSource(Worker(100.0, 2.0, 4.0), context(), "here")
    for _ in range(3):
        await source.next()
    (stage,) = source.route
    assert stage.compute_s == 3.0
    assert (stage.prefill_s, source.decode_s, source.n_generated) == (1.0, 2.0, 3)


@pytest.mark.parametrize("n_before", [0, 5])
async def test_a_generation_of_this_nodes_worker_is_observed(
    autojump_clock: MockClock, n_before: int
) -> None:
    """Layers are counted up to the last, tokens from the second: the first one's time is the prompt's, which
    also has the tokens of an earlier pipeline as rows."""
    observations = Observations()
    compute = ObservedCompute(cast(Any, Worker(100.0, 2.0, 2.0, first_index=n_before)), observations)
    call: Any = {"request_id": "r"} | ({"n_generated": n_before} if n_before else {})
    async with compute.generate(MODEL, **call) as generation:
        assert [piece async for _, piece in generation] == [b"x"] * 3
    seen = observations.latency(MODEL.model_id)
    assert seen.decode_s == pytest.approx(2.0 / 4)
    assert seen.prefill_s == pytest.approx(3.0 / 4 / (6 + n_before))


class Pipelines:
    """Opens sources that give so many tokens each and break then."""

    def __init__(self, *n_tokens: int) -> None:
        self.n_tokens = list(n_tokens)
        self.reported: list[tuple[int, ...]] = []
        self.failures: list[SwarmLLMError | None] = []
        self.paused_s: list[float] = []

    @asynccontextmanager
    async def open_pipeline(self, request: OriginRequest) -> AsyncIterator[Any]:
        self.reported.append(tuple(request.generated))
        left = [self.n_tokens.pop(0)]

        async def following() -> tuple[Token, bytes]:
            await trio.sleep(1.0)
            if not left[0]:
                raise NodeUnreachable("lost")
            left[0] -= 1
            return Token(request_id="r", index=0, token=len(self.reported)), b"x"

        try:
            yield SimpleNamespace(
                next=following, prefill_s=0.5, decode_s=9.0, n_generated=7, is_rebuilt=False
            )
        except SwarmLLMError as error:
            self.failures.append(error)
            raise
        else:
            self.failures.append(None)

    async def wait_for_change(self, request: OriginRequest, until_s: float) -> None:
        self.paused_s.append(until_s - trio.current_time())
        await trio.sleep_until(until_s)


async def test_a_stream_that_broke_before_its_first_token_has_decoded_for_no_time(
    autojump_clock: MockClock,
) -> None:
    request = OriginRequest("r", fake_entry(), np.ones(4, np.int32), Sampling(), RetryPolicy(60.0))
    stream = Failover(request, Pipelines(1))
    stream._has_changed = True
    assert (stream.decode_s, stream.recovery_s) == (0.0, 0.0)


async def test_after_a_failure_the_next_pipeline_goes_on_at_once_and_later_ones_after_a_pause(
    autojump_clock: MockClock,
) -> None:
    pipelines = Pipelines(2, 0, 1)
    request = OriginRequest("r", fake_entry(), np.ones(4, np.int32), Sampling(), RetryPolicy(60.0))
    stream = Failover(request, pipelines)
    tokens = [(await stream.next())[0].token for _ in range(3)]
    assert tokens == [1, 1, 3]
    assert pipelines.reported == [(), (1, 1), (1, 1)]
    assert pipelines.paused_s == [pytest.approx(2 * FIRST_PAUSE_S)], "none before the second pipeline"
    await stream.aclose()
    assert [type(each) for each in pipelines.failures] == [NodeUnreachable, NodeUnreachable, type(None)]
    assert (request.n_attempts, stream.n_recoveries, stream.n_rebuilt) == (3, 1, 0)
    # Of the second pipeline its vain second, the pause, and the second of the third's token.
    assert stream.recovery_s == pytest.approx(2 * FIRST_PAUSE_S + 2.0)
    assert stream.prefill_s == 0.5, "that of the first pipeline"
    assert stream.decode_s == pytest.approx(1.0 + 1.0 + 2 * FIRST_PAUSE_S + 2.0)
    assert stream.n_generated == 3


ANSWERS = {
    "something else": (Piece(status="absent"), RemoteError, "something else than an acknowledgement"),
    "of another request": (PipelineAck(request_id="s", accepted=True), NodeRefused, "no reason given"),
    "a refusal": (PipelineAck(request_id="r", accepted=False, reason="full"), NodeRefused, "full"),
    "busy": (PipelineAck(request_id="r", accepted=False, reason="later", busy=True), NodeBusy, "later"),
}


@pytest.mark.parametrize("answers", ANSWERS)
async def test_who_does_not_accept_an_assignment_takes_no_part_and_is_named(
    autojump_clock: MockClock, answers: str
) -> None:
    answer, error, words = ANSWERS[answers]
    assignment = PipelineAssignment(
        request_id="r",
        model_id=MODEL.model_id,
        origin=A,
        stages=(Stage(node_id=A, start=0, end=2), Stage(node_id=B, start=2, end=4)),
        n_prompt_tokens=3,
        sampling=Sampling(),
    )
    failed = Blamed()

    async def respond(sender: str, body: bytes) -> bytes:
        return encode_response(answer)  # type: ignore[arg-type]

    async def ignore(sender: str, header: bytes, payload: memoryview) -> None:
        raise AssertionError

    async with InMemoryNetwork() as network:
        origin, other = network.add(A), network.add(B)
        other.serve(respond, ignore)
        with pytest.raises(error, match=words):
            await assign(origin, assignment, timeout_s=5.0, blamed=failed)
    assert failed == Blamed(culprit=B)
