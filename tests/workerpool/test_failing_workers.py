"""The pool against workers that die, fall silent, lie or never come up."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio
from deadlines import DEADLINE_S
from pool_parts import BROKEN_MODEL, CALL_TIMEOUT_S, MODEL, ROWS, fake_pool, forward, pids, process_exists

from swarmllm.errors import BadModel, ContextFull, Overloaded, WorkerDied, WorkerError
from swarmllm.models.layers import LayerRange
from swarmllm.workerpool import WorkerPool, WorkerSettings
from swarmllm_proto.swarm import KeptPrefix

# Each test spawns processes, and a Python process takes a quarter of a second to start.
pytestmark = pytest.mark.slow


async def test_a_self_check_that_ends_its_worker_goes_on_with_coarser_parts(tmp_path: Path) -> None:
    async with fake_pool(tmp_path) as pool:
        cases = (("sound", 2), ("dies-below-4", 4), ("listed-dies-below-4", 6), ("dies-always", 0))
        for name, alignment in cases:
            verdict = await pool.cuts.check(replace(MODEL, path=Path(f"/nowhere/{name}.gguf")))
            assert verdict.cut_alignment == alignment
        assert "a self-check ended its worker" in verdict.whole_reason
        assert pids(pool) == []


async def test_a_killed_worker_fails_its_requests_at_once_and_the_next_call_brings_it_back(
    tmp_path: Path,
) -> None:
    async with fake_pool(tmp_path) as pool:
        await pool.load(MODEL, LayerRange(0, 4))
        await pool.load(MODEL, LayerRange(8, 12))
        (pid,) = pids(pool)
        failures: list[str] = []

        async def wait_in_vain() -> None:
            with pytest.raises(WorkerDied) as caught:
                await forward(pool, "ignore")
            failures.append(caught.value.message)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(wait_in_vain)
            with trio.fail_after(DEADLINE_S):
                while pool.statistics()[0].n_pending < 3:
                    await trio.lowlevel.checkpoint()
            os.kill(pid, signal.SIGKILL)
            nursery.cancel_scope.deadline = trio.current_time() + DEADLINE_S
        assert failures == [f"worker process {pid} was killed by SIGKILL"] * 3
        assert pool.loaded(MODEL.model_id) == (LayerRange(0, 4), LayerRange(8, 12))
        np.testing.assert_array_equal(await forward(pool), ROWS + 4)
        assert pids(pool) != [pid]
        assert pool.loaded(MODEL.model_id) == (LayerRange(0, 4), LayerRange(8, 12))
        assert not process_exists(pid)


async def test_what_is_unloaded_while_the_worker_is_dead_does_not_come_back(tmp_path: Path) -> None:
    async with fake_pool(tmp_path) as pool:
        await pool.load(MODEL, LayerRange(0, 4))
        await pool.load(MODEL, LayerRange(8, 12))
        with pytest.raises(WorkerDied):
            await forward(pool, "die")
        assert await pool.unload(MODEL.model_id, LayerRange(8, 12)) == (LayerRange(0, 4),)
        np.testing.assert_array_equal(await forward(pool), ROWS + 4)
        assert pool.models() == {MODEL.model_id: (LayerRange(0, 4),)}
        with pytest.raises(WorkerDied):
            await forward(pool, "die")
        n_starts = pool.statistics()[0].n_starts
        failed = pool.statistics()[0]
        assert (failed.n_failures, failed.last_failure) == (2, failed.last_end)
        assert await pool.unload(MODEL.model_id) == ()
        assert pool.statistics()[0].n_starts == n_starts


async def test_what_a_worker_keeps_is_known_while_it_lives(tmp_path: Path) -> None:
    async with fake_pool(tmp_path) as pool:
        await forward(pool)
        assert pool.kept_prefixes() == {}
        await forward(pool, "keeps-two")
        kept = KeptPrefix(bytes(32), 2), KeptPrefix(bytes(32), 1)
        assert pool.kept_prefixes() == {MODEL.model_id: kept}
        with pytest.raises(WorkerDied):
            await forward(pool, "die")
        assert pool.kept_prefixes() == {}


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("die", "was killed by SIGKILL; its last words: I have seen enough"),
        ("garbage", "sent a broken message (message: "),
        ("oversized", "sent a broken message (header: 4294967295 bytes"),
        ("stranger", "sent a broken message (id: "),
        ("counts-wrong", "sent a broken message (n_blocks: 2 numbers for 1 names"),
        ("wrong-answer", "sent a broken message (type: Tokens answers a call that expects LayerResult)"),
    ],
)
async def test_a_worker_that_breaks_the_contract_is_ended_with_the_reason(
    tmp_path: Path, order: str, reason: str
) -> None:
    async with fake_pool(tmp_path) as pool:
        await pool.info(MODEL)
        with pytest.raises(WorkerDied) as caught, trio.fail_after(DEADLINE_S):
            await forward(pool, order)
        assert reason in caught.value.message
        np.testing.assert_array_equal(await forward(pool), ROWS + 4)


@pytest.mark.parametrize(
    ("habit", "reason"),
    [
        ("exits", "exited with status 3 before it connected; its last words: no such model | really not"),
        ("garbage", "sent a broken message (header: 4294967295 bytes"),
        ("half-a-frame", "sent a broken message (header: the stream ended after 1 of 16 bytes)"),
        ("never-connects", "did not connect within 3 s and was killed"),
        ("never-ready", "connected, but did not get ready in time and had to be killed"),
    ],
)
async def test_a_worker_that_does_not_come_up_is_reported(tmp_path: Path, habit: str, reason: str) -> None:
    # Long enough for a process to start and connect.
    options = {"start_timeout_s": 3.0} if habit.startswith("never") else {}
    async with fake_pool(tmp_path, habit, **options) as pool:
        with pytest.raises(WorkerDied) as caught, trio.fail_after(DEADLINE_S):
            await pool.info(MODEL)
        assert reason in caught.value.message


async def test_a_command_that_cannot_be_run_is_reported(tmp_path: Path) -> None:
    pool = WorkerPool(
        WorkerSettings(cache_dir=tmp_path), tmp_path / "run", command=[str(tmp_path / "missing")]
    )
    async with pool.running():
        with pytest.raises(WorkerDied, match="cannot be started"):
            await pool.info(MODEL)


async def test_a_worker_that_falls_silent_is_killed_after_the_call_timeout(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, call_timeout_s=CALL_TIMEOUT_S) as pool:
        await pool.info(MODEL)
        with pytest.raises(WorkerDied, match="did not answer Forward within 1 s and had to be killed"):
            await forward(pool, "hang")
        np.testing.assert_array_equal(await forward(pool), ROWS + 4)


async def test_a_stopped_process_is_killed_after_the_call_timeout(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, call_timeout_s=CALL_TIMEOUT_S) as pool:
        await pool.info(MODEL)
        (pid,) = pids(pool)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerDied, match="did not answer Forward"), trio.fail_after(DEADLINE_S):
            await forward(pool)
        assert not process_exists(pid)


async def test_errors_of_the_worker_arrive_as_the_daemons_own(tmp_path: Path) -> None:
    async with fake_pool(tmp_path) as pool:
        with pytest.raises(ContextFull, match="900 of 800 cells"):
            await forward(pool, "context-full")
        with pytest.raises(Overloaded, match="all 2 taken"):
            await forward(pool, "no-slot")
        with pytest.raises(BadModel, match="only 12 layers") as refused:
            await pool.load(MODEL, LayerRange(4, 13))
        assert refused.value.field == "end"
        assert pool.models() == {}
        with pytest.raises(BadModel, match="not a GGUF file"):
            await pool.load(BROKEN_MODEL, LayerRange(0, 4))
        assert pool.statistics()[0].n_starts == 1


async def test_a_fatal_error_answers_its_call_and_ends_the_worker(tmp_path: Path) -> None:
    async with fake_pool(tmp_path) as pool:
        with pytest.raises(WorkerError, match="no more") as caught:
            await forward(pool, "gives-up")
        assert caught.value.kind == "out_of_memory"
        np.testing.assert_array_equal(await forward(pool), ROWS + 4)
        assert "gave up (out_of_memory: no more) and exited with status 1" in pool.statistics()[0].last_end


async def test_a_worker_that_ignores_shutdown_is_killed_at_the_end(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, "stubborn", stop_timeout_s=0.1) as pool:
        await pool.load(MODEL, LayerRange(0, 4))
        with trio.fail_after(DEADLINE_S):
            await pool.stop(MODEL.model_id)
        assert "had to be killed" in pool.statistics()[0].last_end
        await pool.info(MODEL)
