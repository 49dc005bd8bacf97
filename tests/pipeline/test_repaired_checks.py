"""What stages computed again for a pipeline that broke is checked like anything else."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from bench.common.arithmetic import FakePool
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.check.repaired_rows import comparable_rows
from swarmllm.pipeline.repair.plan import StageRemainder, rebuilds, recomputed
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers.trust import NEUTRAL, WORK_MIN, TrustEvent
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.tensors import Tensor

from .fakes import Swarm, computes, open_swarm
from .test_checks import LIAR, PROMPT, TWISTS, A, B, C, LyingPool, M, N, Twist, checked, drawn, noisy

__all__ = ["drawn"]
D = node_id_named("d")
ALWAYS = PipelineSettings(check_rate=1.0, prefill_chunk_tokens=40)
AT, N_TOKENS = 5, 40


async def break_and_check(swarm: Swarm, victim: str) -> int:
    """One answer whose node dies after some tokens, and the check of the one that was completed; how often
    stages were rebuilt."""
    counts = swarm[A].pipelines.statistics()
    sampling = Sampling(max_tokens=N_TOKENS)
    with trio.fail_after(600):
        async with swarm[A].pipelines.generate(Prompt(text=PROMPT), swarm.entry, sampling) as generation:
            async for piece in generation:
                if piece.index == AT:
                    assert victim in {stage.node_id for stage in generation.route}
                    swarm.kill(victim)
    assert generation.n_generated == N_TOKENS
    await checked(swarm, counts.checked + counts.checks_dropped + 1)
    return generation.n_rebuilt


async def fast(swarm: Swarm, *node_ids: str) -> None:
    """The earlier one of these is, the more a node says to be fast."""
    said = {each: computes(swarm.entry.model_id, 0.001 * 10**i) for i, each in enumerate(node_ids)}
    await swarm.tell(A, said)


@pytest.mark.parametrize("twist", ["zeros", "passed through unchanged", "one row for all", "noise of 15 %"])
async def test_a_standby_that_computes_wrong_rows_is_found(twist: str, patient_clock: MockClock) -> None:
    pools: dict[str, FakePool] = {A: FakePool("0:4"), B: FakePool("4:8"), C: FakePool("8:12")}
    pools |= {LIAR: LyingPool("4:8", TWISTS[twist]), M: FakePool("4:8"), N: FakePool("4:8")}
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        await fast(swarm, B, LIAR, M, N)
        assert await break_and_check(swarm, B) == 1
        trust = swarm[A].trust
        assert trust.explain(LIAR).counts[TrustEvent.WRONG_RESULT.value] == 1
        assert trust.score(LIAR) < WORK_MIN
        assert all(trust.score(each) >= NEUTRAL for each in (C, M, N))
        await swarm.quiet()


class ForgingPool(FakePool):
    """What it has kept of the rows that it sent is something else."""

    async def read_journal(self, model: ModelFile, **call: Any) -> Tensor:
        rows = await super().read_journal(model, **call)
        return rows * 1.2 if call["end"] == self.ranges[0].end else rows


async def test_a_stage_that_replays_other_rows_to_a_standby_is_found(patient_clock: MockClock) -> None:
    pools: dict[str, FakePool] = {A: FakePool("0:3"), LIAR: ForgingPool("3:6"), C: FakePool("6:9")}
    pools |= {D: FakePool("9:12"), B: FakePool("6:9"), M: FakePool("3:6"), N: FakePool("3:6")}
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        await fast(swarm, LIAR, C, D, B, M, N)
        assert await break_and_check(swarm, C) == 1
        trust = swarm[A].trust
        assert trust.explain(LIAR).counts[TrustEvent.WRONG_RESULT.value] == 1
        assert trust.score(LIAR) < WORK_MIN
        assert all(trust.score(each) >= NEUTRAL for each in (B, D, M, N))
        await swarm.quiet()


def other_kernels() -> Twist:
    """What unlike kernels do: other bits, within the tolerance."""
    return noisy(0.0005)


@pytest.mark.parametrize(("victim", "wanted"), list(product("BCD", range(3))))
async def test_honest_nodes_of_a_mended_pipeline_are_right(
    victim: str, wanted: int, drawn: list[str], patient_clock: MockClock
) -> None:
    """The one that died computed a little otherwise than the one in its place. Of four stages each is drawn
    in turn; `wanted` 0 is the one after the origin's."""
    dies, spare = {"B": (B, M), "C": (C, N), "D": (D, LIAR)}[victim]
    layers = {B: "3:6", C: "6:9", D: "9:12"}
    pools: dict[str, FakePool] = {A: FakePool("0:3"), spare: FakePool(layers[dies])}
    for node_id, held in layers.items():
        pools[node_id] = LyingPool(held, other_kernels()) if node_id == dies else FakePool(held)
    # Who computes it again.
    others = [node_id_named(f"other{number}") for number in range(3)]
    pools |= {node_id: FakePool(held) for node_id, held in zip(others, layers.values(), strict=True)}
    stages = [spare if each == dies else each for each in (B, C, D)]
    drawn[:] = [stages[wanted], dies]
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        await fast(swarm, B, C, D, spare)
        await swarm.tell(A, {each: computes(swarm.entry.model_id, 10.0) for each in others})
        assert await break_and_check(swarm, dies) == 1
        trust, counts = swarm[A].trust, swarm[A].pipelines.statistics()
        assert (counts.checks_wrong, counts.checks_disputed) == (0, 0)
        assert all(trust.score(each) >= NEUTRAL for each in pools if each not in (A, dies))
        # What the stage after the new one got came from the one that died.
        may_be_checked = stages[wanted - 1] != spare or not wanted
        assert (counts.checked, counts.checks_dropped) == ((1, 0) if may_be_checked else (0, 1))
        await swarm.quiet()


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=6), st.integers(1, 40), st.data()
)
def test_only_rows_of_which_neighbours_have_the_same_records_are_compared(
    kept: list[tuple[bool, bool]], n_due: int, data: st.DataObject
) -> None:
    """Played: who made the rows that each stage has sent, and those that came to it."""
    left = [StageRemainder(n_due * has_kv, n_due * (has_kv and has_journal)) for has_kv, has_journal in kept]
    again = recomputed(rebuilds(left, n_due))
    n_rows = n_due + data.draw(st.integers(1, 40))
    late = ["late"] * (n_rows - n_due)
    sent = [["again" if stage in again else "before"] * n_due + late for stage in range(len(left))]
    came = [sent[stage - 1] if stage in again else ["before"] * n_due + late for stage in range(1, len(left))]
    for stage in range(len(left)):
        rows = comparable_rows(stage, len(left), again, n_due=n_due, n_prompt=n_due, n_rows=n_rows)
        is_known = not stage or came[stage - 1] == sent[stage - 1]
        assert (rows is not None) == is_known
        if rows is None:
            continue
        assert rows.end == (n_due if not stage and stage not in again else n_rows)
        if stage + 1 < len(left):
            came_on = came[stage]
            assert came_on[rows.first : rows.end] == sent[stage][rows.first : rows.end]
            assert not rows.first or came_on[rows.first - 1] != sent[stage][rows.first - 1]
        else:
            assert not rows.first
