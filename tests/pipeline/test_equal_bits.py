"""One other bit of an exact request is wrong, where kernels of the same class compute it again; nobody is
charged on the word of one, or of one that contradicts itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from bench.common.arithmetic import FakePool
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.check.equal_bits import are_equal, draw_piece, exact_batches, judge_bits
from swarmllm.pipeline.check.verdict import Evidence, Match, Sampled, TokenEvidence, Verdict
from swarmllm.swarm.peers.trust import NEUTRAL, WORK_MIN, TrustEvent
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.tensors import Tensor

from .fakes import Swarm, open_swarm
from .test_checks import (
    ALWAYS,
    LIAR,
    PROMPT,
    A,
    B,
    H,
    LyingPool,
    M,
    N,
    Twist,
    checked,
    count,
    drawn,  # noqa: F401
    five,
    noisy,
    prefer,
)

EXACT = Sampling(max_tokens=12, temperature=0.0, exact=True)
SLIGHT = 1e-4


def biased(_: Tensor, rows: Tensor) -> Tensor:
    return rows * (1 + SLIGHT)


async def asked_and_checked(swarm: Swarm, before_check: Callable[[], object] = lambda: None) -> None:
    counts = swarm[A].pipelines.statistics()
    with trio.fail_after(600):
        async with swarm[A].pipelines.generate(Prompt(text=PROMPT), swarm.entry, EXACT) as generation:
            assert [piece async for piece in generation]
            before_check()
    await checked(swarm, counts.checked + counts.checks_dropped + 1)


def said_of(swarm: Swarm, node_id: NodeId) -> list[str]:
    """Of its results that were right."""
    recent = swarm[A].trust.explain(node_id).recent
    return [each.detail for each in recent if each.trust_event is TrustEvent.CHECKED]


async def test_the_slightest_noise_is_charged_when_two_others_agree(patient_clock: MockClock) -> None:
    async with open_swarm(five(LyingPool("4:8", noisy(SLIGHT))), settings=ALWAYS) as swarm:
        await prefer(swarm, LIAR, M, N)
        await asked_and_checked(swarm)
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == 1
        assert swarm[A].trust.score(LIAR) < WORK_MIN
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (M, N, H))
        await prefer(swarm, M, N)
        await asked_and_checked(swarm)
        assert said_of(swarm, M) == ["equal bits"]


class LateHolder(LyingPool):
    """Has the layers only when a check needs them: no route of the node ends here before."""

    def __init__(self, twist: Twist | None = None) -> None:
        super().__init__("0:4")
        self.later = twist

    def come(self) -> None:
        self.ranges, self.twist = (LayerRange(0, 12),), self.later


async def test_this_node_charges_on_its_own_word_when_it_computes_the_same_twice(
    patient_clock: MockClock,
) -> None:
    here = LateHolder()
    pools = {A: here, LIAR: LyingPool("4:8", noisy(SLIGHT)), H: FakePool("8:12")}
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        await asked_and_checked(swarm, here.come)
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == 1


async def test_a_node_that_computes_other_bits_each_time_charges_nobody(patient_clock: MockClock) -> None:
    here = LateHolder(noisy(SLIGHT))
    pools = {A: here, LIAR: FakePool("4:8"), H: FakePool("8:12")}
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        await asked_and_checked(swarm, here.come)
        assert count(swarm, LIAR, TrustEvent.CHECKED) == 1
        assert said_of(swarm, LIAR) == ["within tolerance"]


async def test_on_the_word_of_one_other_node_both_lose_a_little(patient_clock: MockClock) -> None:
    pools = five(LyingPool("4:8", noisy(SLIGHT)))
    del pools[N]
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        await prefer(swarm, LIAR, M)
        await asked_and_checked(swarm)
        assert (count(swarm, LIAR, TrustEvent.DISPUTED), count(swarm, M, TrustEvent.DISPUTED)) == (1, 1)
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == 0


async def test_who_announces_a_class_that_is_not_its_own_harms_no_honest_node(
    patient_clock: MockClock,
) -> None:
    """B is asked first, its rows are other ones, and two others have those of the stage."""
    pools = {A: FakePool("0:4"), M: FakePool("4:8"), B: LyingPool("4:8", biased)}
    pools |= {N: FakePool("4:8"), H: FakePool("8:12")}
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        await prefer(swarm, M, B, N)
        for _ in range(3):
            swarm[A].trust.note(B, TrustEvent.SERVED)
        await asked_and_checked(swarm)
        assert count(swarm, M, TrustEvent.CHECKED) == 1
        assert count(swarm, B, TrustEvent.WRONG_RESULT) == 1
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (M, N, H))


async def test_kernels_of_another_class_tolerate_what_honest_rows_differ_by(patient_clock: MockClock) -> None:
    """The noise stands for what other kernels make of the same rows."""
    pools = five(FakePool("4:8"))
    for node_id in (M, N):
        pools[node_id] = LyingPool("4:8", noisy(SLIGHT))
        pools[node_id].kernels = "of another class"
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        await prefer(swarm, LIAR, M, N)
        await asked_and_checked(swarm)
        assert count(swarm, LIAR, TrustEvent.CHECKED) == 1
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (LIAR, M, N, H))


def test_pieces_of_the_prompt_stay_whole() -> None:
    spans = [(each.start, each.stop) for each in exact_batches(230, 150, 100)]
    assert spans == [(0, 64), (64, 128), (128, 150), (150, 182), (182, 214), (214, 230)]
    assert [(each.start, each.stop) for each in exact_batches(128, 300, 128)] == [(0, 128)]


@pytest.mark.parametrize(("chance", "expected"), [(0.0, (0, 64)), (0.5, (64, 64)), (0.99, (128, 42))])
def test_a_drawn_piece_ends_where_the_worker_ends_one(chance: float, expected: tuple[int, int]) -> None:
    assert draw_piece(170, 150, 4096, lambda: chance) == expected


def test_where_not_all_fits_the_last_piece_is_whole_and_earlier_rows_count_as_input() -> None:
    assert draw_piece(500, 400, 2**16, lambda: 0.99) == (64, 64)  # 128 rows fit
    assert draw_piece(500, 400, 2**17 + 1, lambda: 0.0) is None
    assert draw_piece(170, 150, 4096, lambda: 0.0, first=70) == (70, 58)
    assert draw_piece(170, 150, 4096, lambda: 0.0, first=170) is None


def test_one_bit_is_enough() -> None:
    came_in, rows = np.zeros((3, 4), np.float32), np.ones((3, 4), np.float32)
    other = rows.copy()
    other.view(np.uint32)[2, 3] ^= 1
    evidence = Evidence(came_in, 3, other, other, is_received_here=False, is_agreed=True)
    assert judge_bits(evidence, other) == (Verdict.RIGHT, Match.EQUAL)
    assert judge_bits(evidence, rows) == (Verdict.WRONG, Match.WRONG)
    assert are_equal(rows, rows.copy())
    assert not are_equal(rows, other)
    assert not are_equal(rows, rows[:2])


def test_one_other_token_is_enough() -> None:
    reported = TokenEvidence(np.zeros((9, 4), np.float32), 0, (), (5, 6, 7), is_agreed=True)
    same = [Sampled(5), Sampled(6), Sampled(7)]
    other = [Sampled(5), Sampled(8, ((6, -0.7), (8, -0.7))), Sampled(7)]
    assert judge_bits(reported, same) == (Verdict.RIGHT, Match.EQUAL)
    assert judge_bits(reported, other) == (Verdict.WRONG, Match.WRONG)
    assert judge_bits(reported, []) == (Verdict.UNKNOWN, Match.WRONG)
    unsaid = TokenEvidence(reported.came_in, 0, (), reported.reported, is_agreed=None)
    assert judge_bits(unsaid, other) == (Verdict.DISPUTED_BEFORE, Match.WRONG)
    assert not are_equal(same, other)
    assert are_equal(same, list(same))
