"""One stream over several pipelines: what the next is asked for, when, and what the client is told of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from bench.common.arithmetic import fake_entry
from swarmllm.errors import InvalidRequest, NodeUnreachable, NoPipeline, RemoteError, SwarmLLMError
from swarmllm.pipeline.origin.lifecycle import RequestState
from swarmllm.pipeline.origin.requests import OriginRequest
from swarmllm.pipeline.repair.failover import Failover
from swarmllm.pipeline.repair.retry_policy import RetryPolicy
from swarmllm_proto.ipc import Sampling

DEADLINE_S = 60.0
LOST = NodeUnreachable("a node is gone")


@dataclass
class Pipelines:
    """Each of these gives tokens (ints) or raises; one that is an error cannot be opened at all."""

    planned: list[SwarmLLMError | list[Any]]
    is_rebuilt: bool = False
    token_s: float = 1.0
    resumed: list[tuple[int, ...]] = field(default_factory=list)
    """What each was told to go on after."""
    ended: list[BaseException | None] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    @asynccontextmanager
    async def open_pipeline(self, request: OriginRequest) -> AsyncIterator[Any]:
        plan = self.planned.pop(0)
        self.resumed.append(tuple(request.generated))
        if isinstance(plan, SwarmLLMError):
            raise plan
        try:
            yield self._source(plan, len(request.generated))
        except BaseException as error:
            self.ended.append(error)
            raise
        self.ended.append(None)

    def _source(self, plan: list[Any], n_before: int) -> Any:
        async def following() -> tuple[Any, bytes]:
            await trio.sleep(self.token_s)
            item = plan.pop(0)
            if isinstance(item, Exception):
                raise item
            source.n_generated += 1
            return SimpleNamespace(token=item), b""

        source = SimpleNamespace(
            next=following,
            is_rebuilt=self.is_rebuilt and n_before > 0,
            n_generated=n_before,
            prefill_s=0.25,
            decode_s=0.5,
        )
        return source

    async def wait_for_change(self, request: OriginRequest, until_s: float) -> None:
        self.waited.append(until_s - trio.current_time())
        await trio.sleep_until(until_s)


def a_request() -> OriginRequest:
    return OriginRequest("req_1", fake_entry(), np.ones(4, np.int32), Sampling(), RetryPolicy(DEADLINE_S))


async def read(source: Failover, n: int) -> list[int]:
    return [(await source.next())[0].token for _ in range(n)]


async def test_the_next_pipeline_goes_on_after_what_the_reader_has(autojump_clock: MockClock) -> None:
    pipelines, request = Pipelines([[5, 6, LOST], [7, 8]]), a_request()
    source = Failover(request, pipelines)
    assert await read(source, 4) == [5, 6, 7, 8] == request.generated
    assert pipelines.resumed == [(), (5, 6)]
    assert pipelines.ended == [LOST]  # It has learnt why it is left.
    assert pipelines.waited == []
    assert (source.n_recoveries, source.n_rebuilt, source.n_generated) == (1, 0, 4)
    await source.aclose()
    assert pipelines.ended == [LOST, None]
    assert request.state is RequestState.ENDED


async def test_where_nobody_is_there_it_waits_between_attempts(autojump_clock: MockClock) -> None:
    pipelines = Pipelines([[5, LOST], NoPipeline("1"), NoPipeline("2"), [6]], is_rebuilt=True)
    source = Failover(a_request(), pipelines)
    assert await read(source, 2) == [5, 6]
    assert pipelines.resumed == [(), (5,), (5,), (5,)]
    assert len(pipelines.waited) == 2
    assert all(0 < pause_s < 1 for pause_s in pipelines.waited)
    # From knowing of the failure: both pauses, and a second to the next token.
    assert source.recovery_s == pytest.approx(sum(pipelines.waited) + 1)
    assert (source.n_recoveries, source.n_rebuilt) == (1, 1)
    # From the first token to the last: a second until it broke, and the recovery.
    assert source.decode_s == pytest.approx(1 + source.recovery_s)
    assert source.prefill_s == 0.25


async def test_before_the_first_token_another_attempt_is_no_recovery(autojump_clock: MockClock) -> None:
    pipelines, request = Pipelines([RemoteError("one"), [9, 10]]), a_request()
    source = Failover(request, pipelines)
    assert await read(source, 1) == [9]
    assert request.n_attempts == 2
    assert (source.n_recoveries, source.n_rebuilt, source.recovery_s) == (0, 0, 0.0)
    assert source.decode_s == 0.5  # As the only pipeline that gave tokens says.


async def test_what_cannot_be_survived_ends_the_stream_at_once(autojump_clock: MockClock) -> None:
    refused = InvalidRequest("no")
    pipelines, request = Pipelines([[5, refused]]), a_request()
    source = Failover(request, pipelines)
    assert await read(source, 1) == [5]
    with pytest.raises(InvalidRequest):
        await source.next()
    assert pipelines.ended == [refused]
    assert request.state is RequestState.BROKEN
    assert source.n_generated == 1
    await source.aclose()
    assert pipelines.ended == [refused]


async def test_a_reader_that_leaves_closes_the_pipeline_without_blaming_it() -> None:
    pipelines, request = Pipelines([[5, 6]], token_s=0.0), a_request()
    source = Failover(request, pipelines)
    await read(source, 1)
    await source.aclose()
    assert pipelines.ended == [None]
    assert request.state is RequestState.ENDED
