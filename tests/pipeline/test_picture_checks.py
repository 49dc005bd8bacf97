"""A node that gives rows of something else in the right form is found, and no honest one is charged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import trio
from deadlines import DEADLINE_S
from node_ids import A, B, C, D
from vision_models import picture

from bench.common.arithmetic import N_EMBD
from swarmllm.errors import BadModel
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.pipeline.vision.checking import PENDING_MAX
from swarmllm.swarm.in_memory.link import LinkQuality
from swarmllm.swarm.peers.trust import EFFECTS, NEUTRAL, TrustEvent, after
from swarmllm_proto.swarm import VisionEncodeRequest, VisionEncodeResponse

from .fakes import Swarm
from .test_remote_encoders import (
    LIARS,
    SEEING,
    SHOWN,
    SeeingPool,
    assert_same,
    lie,
    look,
    seeing,
    what,
    with_rows,
)

OTHER = picture(31, 31)
WRONG = after(NEUTRAL, TrustEvent.WRONG_RESULT)
CHECKED = after(NEUTRAL, TrustEvent.CHECKED)


@dataclass(frozen=True)
class Rows:
    """A lie with a digest that fits."""

    rows: np.ndarray

    def __call__(self, request: VisionEncodeRequest, said: VisionEncodeResponse) -> VisionEncodeResponse:
        return with_rows(request, said, self.rows) if said.n_rows else said


WELL_FORMED = {
    "another picture": Rows(what(OTHER).rows),
    "zeros": Rows(np.zeros((5, N_EMBD), np.float32)),
    "noise": Rows(np.random.default_rng(3).standard_normal((5, N_EMBD)).astype(np.float32)),
    "the right ones backwards": Rows(what(SHOWN).rows[::-1]),
}


def near(swarm: Swarm) -> None:
    """B is asked first."""
    for node_id, rtt_s in ((C, 0.02), (D, 0.03)):
        swarm.network.set_link(A, node_id, LinkQuality(rtt_s))


async def until(swarm: Swarm, is_so: Callable[[PipelineStatistics], bool]) -> PipelineStatistics:
    with trio.fail_after(DEADLINE_S):
        while not is_so(counts := swarm[A].pipelines.statistics()):
            await trio.lowlevel.checkpoint()
    return counts


@pytest.mark.parametrize("name", WELL_FORMED)
async def test_a_liar_is_charged_when_two_others_agree_and_its_rows_are_dropped(name: str) -> None:
    async with seeing(B, C, D, check_rate=1.0) as swarm:
        near(swarm)
        lie(swarm[B], WELL_FORMED[name])
        encoded, looked = await look(swarm)
        assert looked.node_id == B
        assert encoded.rows.tobytes() != what(SHOWN).rows.tobytes(), "so far nobody knows"
        counts = await until(swarm, lambda counts: counts.checked == 1)
        assert (counts.checks_wrong, counts.checks_disputed) == (1, 0)
        assert swarm[A].trust.score(B) == pytest.approx(WRONG)
        assert swarm[A].trust.score(C) == swarm[A].trust.score(D) == NEUTRAL
        assert swarm[A].pipelines._suspects.now(trio.current_time()) == {B}
        encoded, looked = await look(swarm)
        assert_same(encoded, what(SHOWN))
        assert looked.node_id == C, "who was doubted comes last"


async def test_an_honest_node_is_checked_and_trusted_a_little_more() -> None:
    async with seeing(B, C, check_rate=1.0) as swarm:
        near(swarm)
        assert (await look(swarm))[1].node_id == B
        counts = await until(swarm, lambda counts: counts.checked == 1)
        assert counts.checks_wrong == counts.checks_disputed == 0
        assert swarm[A].trust.score(B) == pytest.approx(CHECKED)
        assert swarm[C].pool.seen == [SHOWN.digest]
        assert (await look(swarm))[1].is_kept


async def test_one_liar_against_one_honest_node_is_a_dispute_and_accuses_nobody() -> None:
    for liar in (B, C):
        async with seeing(B, C, check_rate=1.0) as swarm:
            near(swarm)
            lie(swarm[liar], WELL_FORMED["zeros"])
            assert (await look(swarm))[1].node_id == B
            counts = await until(swarm, lambda counts: counts.checked == 1)
            assert (counts.checks_wrong, counts.checks_disputed) == (0, 1)
            for node_id in (B, C):
                assert swarm[A].trust.score(node_id) == NEUTRAL == EFFECTS[TrustEvent.DISPUTED].floor
            assert swarm[A].pipelines._suspects.now(trio.current_time()) == {B, C}
            assert not (await look(swarm))[1].is_kept, "nor are the rows believed"


async def test_who_lies_when_asked_a_second_time_is_found_by_the_third() -> None:
    async with seeing(B, C, D, check_rate=1.0) as swarm:
        near(swarm)
        lie(swarm[C], WELL_FORMED["another picture"])
        lie(swarm[D], lambda request, said: said)
        assert (await look(swarm))[1].node_id == B
        counts = await until(swarm, lambda counts: counts.checks_wrong == 1)
        assert counts.checks_disputed == 0
        assert swarm[A].trust.score(B) == pytest.approx(CHECKED)
        assert swarm[A].trust.score(C) == pytest.approx(WRONG)
        assert swarm[A].trust.score(D) == NEUTRAL


async def test_the_own_encoder_decides_by_itself() -> None:
    """It was gone when the picture was asked for, and is back when the rows are checked."""
    async with seeing(B, check_rate=1.0) as swarm:
        lie(swarm[B], WELL_FORMED["noise"])
        own = SeeingPool()
        swarm[A].pipelines._picture_checker.compute = own  # type: ignore[assignment]
        swarm[A].pipelines.encoders._compute = NoEncoder()  # type: ignore[assignment]
        assert (await look(swarm, entry=SEEING))[1].node_id == B
        counts = await until(swarm, lambda counts: counts.checked == 1)
        assert counts.checks_wrong == 1
        assert swarm[A].trust.score(B) == pytest.approx(WRONG)
        assert own.seen == [SHOWN.digest]


class NoEncoder(SeeingPool):
    def __init__(self) -> None:
        super().__init__(failure=BadModel("the projector /mm has changed"))


async def test_without_another_holder_nothing_is_said() -> None:
    async with seeing(B, check_rate=1.0) as swarm:
        lie(swarm[B], WELL_FORMED["zeros"])
        await look(swarm)
        counts = await until(swarm, lambda counts: counts.checks_dropped == 1)
        assert counts.checked == 0
        assert swarm[A].trust.score(B) == NEUTRAL


async def test_what_is_drawn_follows_trust_and_nothing_is_where_checks_are_off() -> None:
    for base, drawn, is_checked in ((0.0, 0.0, False), (0.1, 0.49, True), (0.1, 0.51, False)):
        async with seeing(B, C, check_rate=base) as swarm:
            near(swarm)
            swarm[A].pipelines._picture_checker.chance = lambda: drawn  # noqa: B023
            await look(swarm)
            await trio.testing.wait_all_tasks_blocked(0.02)
            assert bool(swarm[C].pool.seen) is is_checked


async def test_a_holder_that_does_not_answer_a_check_is_no_witness() -> None:
    async with seeing(B, C, check_rate=1.0) as swarm:
        near(swarm)
        lie(swarm[C], LIARS["an encoder that is gone"])
        await look(swarm)
        counts = await until(swarm, lambda counts: counts.checks_dropped == 1)
        assert counts.checked == 0
        assert swarm[A].trust.score(B) == swarm[A].trust.score(C) == NEUTRAL


async def test_no_more_checks_wait_than_there_is_memory_for() -> None:
    async with seeing(B, C, check_rate=1.0) as swarm:
        near(swarm)
        checker = swarm[A].pipelines._picture_checker
        gate = swarm[C].pool.gate = trio.Event()
        for index in range(PENDING_MAX + 4):
            assert (await look(swarm, picture(40 + index, 40)))[1].node_id == B
        assert len(checker._pending) == PENDING_MAX
        gate.set()
        # One was under way.
        counts = await until(swarm, lambda counts: counts.checked == PENDING_MAX + 1)
        assert counts.checks_wrong == 0
