"""The pool against a worker that speaks the protocol and computes nothing."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing
from deadlines import DEADLINE_S
from pool_parts import (
    CALL_TIMEOUT_S,
    MODEL,
    OTHER_MODEL,
    ROWS,
    fake_pool,
    forward,
    pids,
    process_exists,
)

from swarmllm.errors import Conflict, WorkerDied, WorkerError
from swarmllm.models.layers import LayerRange
from swarmllm_proto.ipc import Sampling

# Each test spawns processes, and a Python process takes a quarter of a second to start.
pytestmark = pytest.mark.slow


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


async def test_a_forgotten_model_leaves_nothing_behind(tmp_path: Path) -> None:
    async with fake_pool(tmp_path) as pool:
        await pool.tokenize(OTHER_MODEL, text="hi")
        before = what_is_open()
        for n in range(6):
            model = replace(MODEL, model_id=f"{n:064x}")
            if n % 3:
                await pool.load(model, LayerRange(0, 4))
            await pool.tokenize(model, text="hi")
            assert len(pids(pool)) == 2
            if n % 3 == 2:
                await pool.unload(model.model_id)
            await pool.forget(model.model_id)
            assert len(pids(pool)) == 1
        await pool.forget(MODEL.model_id)  # one that it never had
        assert what_is_open() == before
        assert len(pool.statistics()) == 1
        assert pool.models() == {}


async def test_a_model_that_is_forgotten_while_its_worker_starts_gets_none(tmp_path: Path) -> None:
    async with fake_pool(tmp_path) as pool:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.info, MODEL)
            await trio.testing.wait_all_tasks_blocked()
            await pool.forget(MODEL.model_id)
        assert pids(pool) == []
        assert pool.statistics() == ()


async def test_nothing_is_kept_of_models_whose_workers_left_idle(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, idle_timeout_s=0.2) as pool:
        await pool.tokenize(MODEL, text="hi")
        with trio.fail_after(DEADLINE_S):
            while pool.statistics():  # noqa: ASYNC110 - nobody is told
                await trio.sleep(0.05)
        assert (await pool.tokenize(MODEL, text="hi")).tolist() == [104, 105]


def what_is_open() -> tuple[int, int, int]:
    """This process's open files, tasks and children."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    files = len(list(Path("/proc/self/fd").iterdir()))
    return files, trio.lowlevel.current_statistics().tasks_living, len(children)


async def test_a_cut_that_fails_is_left_to_the_request_that_needs_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "swarmllm.workerpool")
    async with fake_pool(tmp_path) as pool:
        pool.cut(MODEL.model_id, LayerRange(0, 1))  # there is no worker yet
        await pool.load(MODEL, LayerRange(0, 12))
        for start in (0, 4, 9):
            pool.cut(MODEL.model_id, LayerRange(start, 12), if_idle=True)
        with trio.fail_after(DEADLINE_S):
            while "cut ahead" not in caplog.text:  # noqa: ASYNC110
                await trio.sleep(0.01)
        np.testing.assert_array_equal(await forward(pool), ROWS + 4)
    refused = [record.getMessage() for record in caplog.records if "cut ahead" in record.getMessage()]
    assert refused == [f"layers 9:12 of {MODEL.model_id} are not cut ahead: out_of_memory: not there"]


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
        with pytest.raises(WorkerDied, match="SIGKILL"), trio.fail_after(DEADLINE_S):
            await generate_and_kill()


async def test_a_generation_that_hangs_is_found_out_by_a_probe(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, call_timeout_s=CALL_TIMEOUT_S) as pool:
        prompt = np.zeros(2, np.int32)
        await pool.info(MODEL)
        async with pool.generate(MODEL, request_id="hang", tokens=prompt, sampling=Sampling()) as stream:
            with (
                pytest.raises(WorkerDied, match="did not answer ReleaseRequestKv"),
                trio.fail_after(DEADLINE_S),
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
        with trio.fail_after(DEADLINE_S):
            await changed.wait()
        assert pool.models() == {MODEL.model_id: (LayerRange(0, 4),)} == seen.pop()
        changed = trio.Event()
        with trio.CancelScope() as scope:
            scope.cancel()
            await pool.unload(MODEL.model_id, then=follow)
        with trio.fail_after(DEADLINE_S):
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
        with trio.fail_after(DEADLINE_S):
            while pids(pool) != [holder]:  # noqa: ASYNC110 (the state of a process)
                await trio.sleep(0.01)
        assert (await pool.tokenize(MODEL, text="hi")).tolist() == [104, 105]


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
