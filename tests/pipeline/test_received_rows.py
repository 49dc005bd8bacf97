"""Which chunks a stage takes after damage, and how far it says to be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_ids import A, B, C

from bench.common.arithmetic import FakePool
from swarmllm.pipeline.job import ComputeStep, Job, RequestView
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.stage.session import Session as StageSession
from swarmllm.pipeline.stage.session_queue import ReceivedRows
from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.swarm.peers.trust import NEUTRAL, TrustEvent
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import LayerForward, Stage
from swarmllm_proto.tensors import tensor_bytes

from .test_links import MODEL

CHUNK = 4


def received(*positions: int, stage: int = 0, n_stages: int = 2) -> ReceivedRows:
    rows = ReceivedRows(n_stages)
    for position in positions:
        rows.add(stage, position, CHUNK)
    return rows


def test_without_damage_a_gap_is_not_passed_over_in_silence() -> None:
    """A worker is to find it: a stage before this one has left rows out."""
    assert not received(0).is_behind_damage(0, 2 * CHUNK)


@pytest.mark.parametrize(("position", "is_behind"), [(0, False), (CHUNK, False), (2 * CHUNK, True)])
def test_after_damage_only_what_lies_ahead_of_the_next_rows_comes_again(
    position: int, is_behind: bool
) -> None:
    rows = received(0)
    assert rows.damaged(CHUNK)
    assert rows.is_behind_damage(0, position) is is_behind


def test_the_damaged_chunk_itself_is_taken_wherever_it_lies() -> None:
    rows = received(0)
    assert rows.damaged(2 * CHUNK)
    assert not rows.is_behind_damage(0, 2 * CHUNK)
    assert rows.is_behind_damage(0, 3 * CHUNK)


def test_stages_of_one_node_are_told_apart() -> None:
    rows = received(0, CHUNK, stage=1)
    assert rows.damaged(0)
    assert rows.is_behind_damage(0, 2 * CHUNK)
    assert not rows.is_behind_damage(1, 2 * CHUNK)


def test_of_damage_behind_damage_the_origin_is_not_told_twice() -> None:
    rows = received()
    assert [rows.damaged(position) for position in (CHUNK, 2 * CHUNK, CHUNK, 0)] == [True, False, True, True]


@pytest.mark.parametrize(("position", "is_pending"), [(0, False), (CHUNK, False), (2 * CHUNK, True)])
def test_damage_is_over_once_its_rows_or_earlier_ones_have_come(position: int, is_pending: bool) -> None:
    rows = received()
    assert rows.damaged(CHUNK)
    rows.add(0, position, CHUNK)
    assert rows.damaged(3 * CHUNK) is not is_pending


def test_a_token_that_the_origin_has_repeated_ends_its_damage() -> None:
    rows = received(0)
    assert rows.damaged(CHUNK)
    rows.repeated()
    assert rows.damaged(2 * CHUNK)


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(1, 5))))
def test_as_far_as_any_row_has_come(chunks: list[tuple[int, int, int]]) -> None:
    rows = ReceivedRows(2)
    for stage, position, n_tokens in chunks:
        rows.add(stage, position, n_tokens)
    assert rows.n_rows == max((position + n for _, position, n in chunks), default=0)


N_EMBD, N_PROMPT = 4, 20


class Session:
    """The second of three stages, with what it noted of other nodes; its task does not run."""

    def __init__(self, network: InMemoryNetwork) -> None:
        for each in (A, C):
            network.add(each)
        self.noted: list[tuple[str, TrustEvent]] = []
        stages = tuple(Stage(node_id=node, start=i, end=i + 1) for i, node in enumerate((A, B, C)))
        view = RequestView(node_id=B, origin=A, stages=stages, prompt_here=False)
        context = RequestContext("r", MODEL, N_EMBD, 997, N_PROMPT, Sampling(max_tokens=7), view)
        self.session = StageSession(
            context, FakePool("1:2"), network.add(B), silence_timeout_s=10.0, trust=self
        )

    def note(self, node_id: NodeId, event: TrustEvent, detail: str = "") -> None:
        self.noted.append((node_id, event))

    def score(self, node_id: NodeId) -> float:
        return NEUTRAL

    @property
    def n_queued(self) -> int:
        return len(self.session._queue._items)

    def arrive(self, position: int, n_tokens: int = CHUNK, value: float = 1.0) -> bool:
        rows = tensor_bytes(np.full((n_tokens, N_EMBD), value, np.float32))
        message = LayerForward(
            request_id="r",
            step="layer",
            stage=1,
            position=position,
            n_tokens=n_tokens,
            prefill_left=max(0, N_PROMPT - position - n_tokens),
        )
        return self.session.arrive(A, message, memoryview(rows))


async def test_a_tokens_row_is_taken_wherever_it_lies_because_tokens_come_one_at_a_time() -> None:
    async with InMemoryNetwork() as network:
        parts = Session(network)
        assert parts.session.arrived_damaged(A, 0)
        assert parts.arrive(N_PROMPT + 3, n_tokens=1)
        assert parts.session.rows() == (N_PROMPT + 4, 0)


async def test_of_a_repeated_token_that_comes_damaged_again_the_origin_is_told() -> None:
    async with InMemoryNetwork() as network:
        parts = Session(network)
        position = N_PROMPT + 1
        assert parts.session.arrived_damaged(A, position)
        assert parts.session.arrived_damaged(A, position + 1)
        assert parts.n_queued == 1
        parts.session.offer(Job(ComputeStep.EMBED, position=position, n_tokens=1, token=5))
        assert parts.session.arrived_damaged(A, position + 1)
        assert parts.n_queued == 3


@pytest.mark.parametrize("is_over", [False, True])
async def test_what_comes_too_late_is_not_read_and_held_against_nobody(is_over: bool) -> None:
    async with InMemoryNetwork() as network:
        parts = Session(network)
        assert parts.arrive(0)
        if is_over:
            parts.session.stop()
        n_queued = parts.n_queued
        assert parts.arrive(CHUNK)
        assert parts.session.arrived_damaged(A, 2 * CHUNK)
        assert parts.arrive(2 * CHUNK, value=np.nan)
        assert parts.session.rows()[0] == (CHUNK if is_over else 2 * CHUNK)
        assert parts.noted == ([] if is_over else [(A, TrustEvent.BAD_NUMBERS)])
        assert parts.n_queued - n_queued == (0 if is_over else 3)
