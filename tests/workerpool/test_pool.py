"""The pool against a worker that speaks the protocol and computes nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing
from patience import PATIENCE_S
from pool_parts import BROKEN_MODEL, MODEL, OTHER_MODEL, ROWS, fake_pool, pids, process_exists

from swarmllm.errors import BadModel, Conflict, ContextFull, Overloaded, WorkerDied, WorkerError
from swarmllm.models.layers import LayerRange
from swarmllm.workerpool import WorkerPool, WorkerSettings
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import KeptPrefix

# Each test spawns processes, and a Python process takes a quarter of a second to start.
pytestmark = pytest.mark.slow

CALL_TIMEOUT_S = 1.0
"""Short, and yet more than a worker that answers at once takes on a busy machine."""


async def forward(pool: WorkerPool, order: str = "r", *, position: int = 0) -> np.ndarray:
    result = await pool.forward(
        MODEL, request_id=order, layers=LayerRange(0, 4), position=position, tensor=ROWS, want="hidden"
    )
    assert result.tensor is not None
    return result.tensor


async def test_a_model_is_loaded_used_and_unloaded(tmp_path: Path) -> None:
    changes: list[dict[str, tuple[LayerRange, ...]]] = []
    steps: list[tuple[int, int]] = []
    async with fake_pool(tmp_path, on_change=lambda: changes.append(pool.models())) as pool:
        assert (await pool.info(MODEL)).n_layers == 12
        loaded = await pool.load(MODEL, LayerRange(0, 4), lambda done, total: steps.append((done, total)))
        assert loaded == pool.loaded(MODEL.model_id) == (LayerRange(0, 4),)
        assert steps == [(1, 2)]
        assert (await pool.tokenize(MODEL, text="hi")).tolist() == [104, 105]
        assert (await pool.embed(MODEL, np.array([3, 4], np.int32)))[:, 0].tolist() == [3.0, 4.0]
        np.testing.assert_array_equal(await forward(pool), ROWS + 4)
        token = await pool.forward(
            MODEL, request_id="r", layers=LayerRange(0, 4), position=3, tensor=ROWS, want="token"
        )
        assert token.token is not None
        assert (token.tensor, token.token.token, token.piece) == (None, 7, b"seven")
        await pool.release(MODEL.model_id, "r")
        await pool.load(MODEL, LayerRange(8, 12))
        assert await pool.unload(MODEL.model_id, LayerRange(0, 4)) == (LayerRange(8, 12),)
        (pid,) = pids(pool)
        assert await pool.unload(MODEL.model_id) == ()
        assert not process_exists(pid)
        assert pids(pool) == []
    segments = [models.get(MODEL.model_id) for models in changes]
    assert segments == [
        (LayerRange(0, 4),),
        (LayerRange(0, 4), LayerRange(8, 12)),
        (LayerRange(8, 12),),
        None,
    ]


async def test_each_model_has_its_own_process(tmp_path: Path) -> None:
    async with fake_pool(tmp_path) as pool:
        await pool.load(MODEL, LayerRange(0, 4))
        await pool.load(OTHER_MODEL, LayerRange(4, 8))
        assert len(set(pids(pool))) == 2
        assert pool.models() == {
            MODEL.model_id: (LayerRange(0, 4),),
            OTHER_MODEL.model_id: (LayerRange(4, 8),),
        }


async def test_calls_that_come_together_start_one_worker_and_keep_their_answers_apart(tmp_path: Path) -> None:
    lengths: dict[int, int] = {}
    async with fake_pool(tmp_path) as pool:

        async def tokenize(length: int) -> None:
            lengths[length] = len(await pool.tokenize(MODEL, text="x" * length))

        async with trio.open_nursery() as nursery:
            # Long texts fill the socket buffer, so frames wait in the backlog in pieces.
            for length in (1, 300_000, 2, 2_000_000, 3):
                nursery.start_soon(tokenize, length)
        assert lengths == {length: length for length in lengths}
        assert len(lengths) == 5
        assert pool.statistics()[0].n_starts == 1


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
            with trio.fail_after(PATIENCE_S):
                while pool.statistics()[0].n_pending < 3:
                    await trio.lowlevel.checkpoint()
            os.kill(pid, signal.SIGKILL)
            nursery.cancel_scope.deadline = trio.current_time() + PATIENCE_S
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
        with pytest.raises(WorkerDied) as caught, trio.fail_after(PATIENCE_S):
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
        with pytest.raises(WorkerDied) as caught, trio.fail_after(PATIENCE_S):
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
        with pytest.raises(WorkerDied, match="did not answer Forward"), trio.fail_after(PATIENCE_S):
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


async def test_unloading_what_is_not_loaded_is_a_conflict(tmp_path: Path) -> None:
    async with fake_pool(tmp_path) as pool:
        with pytest.raises(Conflict):
            await pool.unload(MODEL.model_id)
        await pool.load(MODEL, LayerRange(0, 4))
        with pytest.raises(Conflict, match="4:8"):
            await pool.unload(MODEL.model_id, LayerRange(4, 8))


async def test_tokens_stream_in_order_and_end_with_done(tmp_path: Path) -> None:
    async with fake_pool(tmp_path) as pool:
        prompt = np.zeros(2, np.int32)
        async with pool.generate(
            MODEL, request_id="r", tokens=prompt, sampling=Sampling(max_tokens=5)
        ) as stream:
            pieces = [(token.index, piece) async for token, piece in stream]
        assert pieces == [(i, str(i).encode()) for i in range(5)]
        assert stream.done is not None
        assert stream.done.finish_reason == "length"


async def test_leaving_a_generation_early_cancels_it_in_the_worker(tmp_path: Path) -> None:
    async with fake_pool(tmp_path) as pool:
        prompt = np.zeros(2, np.int32)
        async with pool.generate(
            MODEL, request_id="r", tokens=prompt, sampling=Sampling(max_tokens=10**6)
        ) as stream:
            async for token, _ in stream:
                if token.index == 2:
                    break
        assert stream.done is not None
        assert stream.done.finish_reason == "cancelled"
        assert pool.statistics()[0].n_pending == 0
        np.testing.assert_array_equal(await forward(pool), ROWS + 4)


async def test_cancelling_the_reader_of_a_generation_cancels_it_in_the_worker(tmp_path: Path) -> None:
    async with fake_pool(tmp_path) as pool:
        prompt = np.zeros(2, np.int32)
        with trio.CancelScope() as scope:
            async with pool.generate(
                MODEL, request_id="r", tokens=prompt, sampling=Sampling(max_tokens=10**6)
            ) as stream:
                async for _ in stream:
                    scope.cancel()
        assert scope.cancelled_caught
        assert stream.done is not None
        assert stream.done.finish_reason == "cancelled"


async def test_a_generation_ends_with_its_worker(tmp_path: Path) -> None:
    async with fake_pool(tmp_path) as pool:
        prompt = np.zeros(2, np.int32)

        async def generate_and_kill() -> None:
            async with pool.generate(
                MODEL, request_id="r", tokens=prompt, sampling=Sampling(max_tokens=10**6)
            ) as stream:
                async for token, _ in stream:
                    if token.index == 0:
                        os.kill(pids(pool)[0], signal.SIGKILL)

        await pool.info(MODEL)
        with pytest.raises(WorkerDied, match="SIGKILL"), trio.fail_after(PATIENCE_S):
            await generate_and_kill()


async def test_a_generation_that_hangs_is_found_out_by_a_probe(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, call_timeout_s=CALL_TIMEOUT_S) as pool:
        prompt = np.zeros(2, np.int32)
        await pool.info(MODEL)
        async with pool.generate(MODEL, request_id="hang", tokens=prompt, sampling=Sampling()) as stream:
            with (
                pytest.raises(WorkerDied, match="did not answer ReleaseRequestKv"),
                trio.fail_after(PATIENCE_S),
            ):
                await anext(stream)


async def test_a_slow_generation_is_left_in_peace(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, call_timeout_s=CALL_TIMEOUT_S) as pool:
        prompt = np.zeros(2, np.int32)
        await pool.info(MODEL)
        # The worker never gives a token here, but answers the probes.
        async with pool.generate(MODEL, request_id="ignore", tokens=prompt, sampling=Sampling()) as stream:
            with trio.move_on_after(2.5 * CALL_TIMEOUT_S) as scope:
                await anext(stream)
            assert scope.cancelled_caught
            assert not stream.finished


async def test_a_cancelled_caller_leaves_the_worker_in_step(tmp_path: Path) -> None:
    async with fake_pool(tmp_path) as pool:
        await pool.info(MODEL)
        for _ in range(5):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(forward, pool)
                    await trio.testing.wait_all_tasks_blocked()
                    scope.cancel()
        assert pool.statistics()[0].n_pending == 0
        np.testing.assert_array_equal(await forward(pool), ROWS + 4)
        assert pool.statistics()[0].n_starts == 1


async def test_loads_and_unloads_go_on_when_their_caller_leaves_with_what_follows(tmp_path: Path) -> None:
    changed = trio.Event()
    seen: list[dict[str, tuple[LayerRange, ...]]] = []

    async def follow() -> None:
        seen.append(pool.models())

    async with fake_pool(tmp_path, on_change=lambda: changed.set()) as pool:
        with trio.CancelScope() as scope:
            scope.cancel()
            await pool.load(MODEL, LayerRange(0, 4), then=follow)
        with trio.fail_after(PATIENCE_S):
            await changed.wait()
        assert pool.models() == {MODEL.model_id: (LayerRange(0, 4),)} == seen.pop()
        changed = trio.Event()
        with trio.CancelScope() as scope:
            scope.cancel()
            await pool.unload(MODEL.model_id, then=follow)
        with trio.fail_after(PATIENCE_S):
            await changed.wait()
        assert pool.models() == {} == seen.pop()
        with pytest.raises(Conflict):
            await pool.unload(MODEL.model_id, then=follow)
        assert not seen, "nothing follows what failed"


async def test_a_worker_without_layers_leaves_when_it_is_idle(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, idle_timeout_s=0.1) as pool:
        await pool.load(OTHER_MODEL, LayerRange(0, 4))
        await pool.tokenize(MODEL, text="hi")
        (holder,) = pids(pool)[:1]
        with trio.fail_after(PATIENCE_S):
            while pids(pool) != [holder]:  # noqa: ASYNC110 (the state of a process)
                await trio.sleep(0.01)
        assert (await pool.tokenize(MODEL, text="hi")).tolist() == [104, 105]


async def test_a_worker_that_ignores_shutdown_is_killed_at_the_end(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, "stubborn", stop_timeout_s=0.1) as pool:
        await pool.load(MODEL, LayerRange(0, 4))
        with trio.fail_after(PATIENCE_S):
            await pool.stop(MODEL.model_id)
        assert "had to be killed" in pool.statistics()[0].last_end
        await pool.info(MODEL)


async def test_calls_after_the_end_are_refused(tmp_path: Path) -> None:
    async with fake_pool(tmp_path) as pool:
        await pool.info(MODEL)
    with pytest.raises(WorkerError, match="not running"):
        await pool.info(MODEL)


async def test_a_long_runtime_folder_does_not_matter(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    async with fake_pool(folder) as pool:
        assert (await pool.info(MODEL)).n_layers == 12


async def test_the_socket_folder_is_private(tmp_path: Path) -> None:
    async with fake_pool(tmp_path):
        assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
