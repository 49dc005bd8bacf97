"""The pool over real workers and the bundled model."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from deadlines import DEADLINE_S
from kernel_timings import KERNEL_TIMINGS
from pool_parts import pids, process_exists

import swarmllm.guide
from swarmllm.errors import BadModel, Conflict, InvalidRequest, WorkerDied, WorkerError
from swarmllm.models.layers import LayerRange
from swarmllm.workerpool import ForwardResult, LoadOptions, ModelFile, WorkerPool, WorkerSettings
from swarmllm_proto.ipc import Sampling

pytestmark = pytest.mark.slow

GUIDE = ModelFile("00" * 32, Path(swarmllm.guide.__file__).with_name("guide.gguf"))
WHOLE = LayerRange(0, 12)
GREEDY = Sampling(temperature=0.0, max_tokens=8, ignore_eos=True)
ENDLESS = Sampling(temperature=0.0, max_tokens=1000, ignore_eos=True)


@asynccontextmanager
async def real_pool(folder: Path, **settings: Any) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(
        WorkerSettings(cache_dir=folder / "cache", kernel_timings=KERNEL_TIMINGS, **settings), folder / "run"
    )
    async with pool.running():
        yield pool
        seen = pids(pool)
    assert not [pid for pid in seen if process_exists(pid)]


async def greedy(pool: WorkerPool, request_id: str = "g") -> list[int]:
    tokens = await pool.tokenize(GUIDE, messages=[{"role": "user", "content": "What is a pipeline?"}])
    async with pool.generate(GUIDE, request_id=request_id, tokens=tokens, sampling=GREEDY) as stream:
        return [token.token async for token, _ in stream]


async def test_a_walk_over_three_stages_gives_the_tokens_of_a_whole_generation(tmp_path: Path) -> None:
    async with real_pool(tmp_path) as pool:
        assert (await pool.info(GUIDE)).n_layers == WHOLE.end
        await pool.load(GUIDE, WHOLE)
        whole = await greedy(pool)
        await pool.unload(GUIDE.model_id, LayerRange(5, 12))
        assert pool.loaded(GUIDE.model_id) == (LayerRange(0, 5),)
        assert await pool.load(GUIDE, LayerRange(5, 12)) == (WHOLE,)
        stages = [LayerRange(0, 3), LayerRange(3, 5), LayerRange(5, 12)]
        tokens = await pool.tokenize(GUIDE, messages=[{"role": "user", "content": "What is a pipeline?"}])
        n_prompt = len(tokens)
        walked: list[int] = []
        position = 0
        while len(walked) < len(whole):
            hidden = await pool.embed(GUIDE, tokens)
            for layers in stages[:-1]:
                result = await pool.forward(
                    GUIDE, request_id="w", layers=layers, position=position, tensor=hidden, want="hidden"
                )
                assert result.tensor is not None
                hidden = result.tensor
            last = await pool.forward(
                GUIDE,
                request_id="w",
                layers=stages[-1],
                position=position,
                tensor=hidden,
                want="token",
                sampling=GREEDY,
                n_prompt_tokens=n_prompt,
            )
            assert last.token is not None
            position += len(tokens)
            walked.append(last.token.token)
            tokens = np.array([last.token.token], np.int32)
        assert walked == whole


async def test_options_of_a_load_count_until_the_last_layer_goes(tmp_path: Path) -> None:
    async with real_pool(tmp_path, n_ctx=256) as pool:
        await pool.load(GUIDE, LayerRange(0, 6))
        configured = pool.memory(GUIDE.model_id).kv_bytes
        await pool.unload(GUIDE.model_id)
        await pool.tokenize(GUIDE, text="a")  # a worker is up, with the configured settings
        options = LoadOptions(n_ctx=512, kv_type="q8_0", flash_attention="on", use_mmap=False)
        await pool.load(GUIDE, LayerRange(0, 6), options=options)
        assert pool.memory(GUIDE.model_id).kv_bytes == pytest.approx(configured * 2 * 17 / 32, rel=0.01)
        assert pool.context_sizes() == {GUIDE.model_id: 512}
        said = pool.loaded_with(GUIDE.model_id)
        assert said is not None
        assert (said.kv_type, said.use_mmap, said.n_threads) == ("q8_0", False, 1)

        await pool.load(GUIDE, LayerRange(6, 12))  # more of the same, without saying it again
        await pool.load(GUIDE, LayerRange(6, 12), options=LoadOptions(n_ctx=512))
        with pytest.raises(Conflict, match="n_ctx = 512") as refused:
            await pool.load(GUIDE, WHOLE, options=LoadOptions(n_ctx=1024))
        assert refused.value.field == "n_ctx"
        before = await greedy(pool)

        await pool.stop(GUIDE.model_id)
        assert await greedy(pool) == before  # the worker that replaces it has them, too
        assert pool.memory(GUIDE.model_id).kv_bytes == pytest.approx(configured * 2 * 2 * 17 / 32, rel=0.01)

        freed: list[tuple[int, int]] = []
        weights = pool.memory(GUIDE.model_id).weights_bytes
        await pool.unload(GUIDE.model_id, LayerRange(4, 6), lambda *progress: freed.append(progress))
        assert [done for done, _ in freed] == sorted(done for done, _ in freed)
        assert freed[-1][0] == freed[-1][1] > 0
        left = pool.memory(GUIDE.model_id).weights_bytes
        assert left < weights
        await pool.unload(GUIDE.model_id, None, lambda *progress: freed.append(progress))
        assert freed[-1] == (left, left)
        await pool.load(GUIDE, LayerRange(0, 6))
        assert pool.memory(GUIDE.model_id).kv_bytes == configured


async def test_a_model_whose_file_is_deleted_runs_on(tmp_path: Path) -> None:
    path = Path(shutil.copy(GUIDE.path, tmp_path / "copy.gguf"))
    model = replace(GUIDE, path=path)
    async with real_pool(tmp_path) as pool:
        await pool.load(model, WHOLE)
        before = await greedy(pool)
        assert not await pool.serves_without_file(model)
        await trio.to_thread.run_sync(path.unlink)
        assert await pool.serves_without_file(model)
        assert await greedy(pool) == before
        await trio.to_thread.run_sync(path.write_bytes, b"something else")
        assert await pool.serves_without_file(model)
        assert await greedy(pool) == before
        await pool.stop(model.model_id)
        assert not await pool.serves_without_file(model)


async def test_a_mapped_file_that_is_cut_off_costs_its_own_worker_only(tmp_path: Path) -> None:
    path = Path(shutil.copy(GUIDE.path, tmp_path / "copy.gguf"))
    model = ModelFile("11" * 32, path)
    async with real_pool(tmp_path) as pool:
        await pool.load(model, WHOLE)
        await pool.load(GUIDE, WHOLE)
        expected = await greedy(pool)
        tokens = await pool.tokenize(model, text="What is a pipeline?")
        os.truncate(path, 4096)
        with pytest.raises(WorkerDied, match="SIGBUS"):
            async with pool.generate(model, request_id="r", tokens=tokens, sampling=GREEDY) as stream:
                [token async for token, _ in stream]
        assert await greedy(pool) == expected
        with pytest.raises(BadModel):
            await pool.tokenize(model, text="a")
        await pool.forget(model.model_id)
        assert len(pids(pool)) == 1


async def test_options_that_exclude_each_other_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    async with real_pool(tmp_path) as pool:
        with pytest.raises(InvalidRequest, match="flash attention") as refused:
            await pool.load(GUIDE, WHOLE, options=LoadOptions(kv_type="q8_0", flash_attention="off"))
        assert refused.value.field == "kv_type"
        assert pool.models() == {}


async def test_a_killed_worker_fails_its_generation_and_is_reloaded_by_the_next(tmp_path: Path) -> None:
    async with real_pool(tmp_path) as pool:
        await pool.load(GUIDE, WHOLE)
        before = await greedy(pool)
        tokens = await pool.tokenize(GUIDE, text="a")
        (pid,) = pids(pool)

        async def generate_and_kill() -> None:
            async with pool.generate(GUIDE, request_id="r", tokens=tokens, sampling=ENDLESS) as stream:
                async for token, _ in stream:
                    if token.index == 3:
                        os.kill(pid, signal.SIGKILL)
                        scope.deadline = trio.current_time() + DEADLINE_S

        with (
            trio.CancelScope() as scope,
            pytest.raises(WorkerDied, match=f"worker process {pid} was killed by"),
        ):
            await generate_and_kill()
        assert not scope.cancelled_caught
        assert not process_exists(pid)
        assert pool.models() == {GUIDE.model_id: (WHOLE,)}
        assert await greedy(pool) == before


async def test_a_request_does_not_go_on_in_the_process_that_replaces_its_own(tmp_path: Path) -> None:
    async with real_pool(tmp_path) as pool:
        await pool.load(GUIDE, LayerRange(0, 4))
        tokens = await pool.tokenize(GUIDE, text="What is a worker?")

        async def forward(position: int) -> ForwardResult:
            return await pool.forward(
                GUIDE,
                request_id="r",
                layers=LayerRange(0, 4),
                position=position,
                tensor=tokens[position:],
                want="hidden",
            )

        whole = await forward(0)
        (pid,) = pids(pool)
        os.kill(pid, signal.SIGKILL)
        # Even if another request has brought a fresh process up in between.
        with trio.fail_after(DEADLINE_S):
            while True:
                try:
                    await pool.embed(GUIDE, tokens)
                    break
                except WorkerDied:
                    continue
        with pytest.raises(WorkerDied, match=f"worker process {pid} was killed by"):
            await forward(2)
        again = await forward(0)
        assert again.tensor is not None
        assert whole.tensor is not None
        assert np.array_equal(again.tensor, whole.tensor)


async def test_leaving_a_generation_early_frees_its_only_slot(tmp_path: Path) -> None:
    async with real_pool(tmp_path, n_slots=1) as pool:
        await pool.load(GUIDE, WHOLE)
        tokens = await pool.tokenize(GUIDE, text="a")
        for request_id in ("r1", "r2"):
            async with pool.generate(GUIDE, request_id=request_id, tokens=tokens, sampling=ENDLESS) as stream:
                async for token, _ in stream:
                    if token.index == 3:
                        break
            assert stream.done is not None
            assert stream.done.finish_reason == "cancelled"
        # A generation that ran to its end leaves the slot free, too.
        assert await greedy(pool, "r3") == await greedy(pool, "r4")


async def test_output_follows_a_schema_and_a_wrong_one_is_the_callers_fault(tmp_path: Path) -> None:
    schema = '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}'
    async with real_pool(tmp_path) as pool:
        await pool.load(GUIDE, WHOLE)
        tokens = await pool.tokenize(GUIDE, messages=[{"role": "user", "content": "What is a pipeline?"}])

        async def ask(**fields: Any) -> bytes:
            sampling = Sampling(temperature=0.0, max_tokens=100, **fields)
            async with pool.generate(GUIDE, request_id="r", tokens=tokens, sampling=sampling) as stream:
                return b"".join([piece async for _, piece in stream])

        assert set(json.loads(await ask(json_schema=schema))) == {"ok"}
        for fields, field in (
            ({"json_schema": '{"type": "dance"}'}, "response_format"),
            ({"grammar": "root ::= nothing"}, "grammar"),
            ({"logit_bias": ((2**31 - 1, 1.0),)}, "logit_bias"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await ask(**fields)
            assert caught.value.field == field


async def test_faults_of_one_call_leave_the_worker_serving(tmp_path: Path) -> None:
    async with real_pool(tmp_path, n_ctx=64) as pool:
        await pool.load(GUIDE, LayerRange(0, 4))
        (pid,) = pids(pool)
        rows = np.zeros((2, 256), np.float32)

        async def forward(**changed: Any) -> None:
            arguments: dict[str, Any] = {
                "layers": LayerRange(0, 4),
                "position": 0,
                "tensor": rows,
                "want": "hidden",
            }
            await pool.forward(GUIDE, request_id="r", **{**arguments, **changed})

        for changed, kind in (
            ({"layers": LayerRange(4, 8)}, "not_loaded"),
            ({"tensor": rows[:, :100]}, "bad_tensor"),
            ({"position": 7}, "position_gap"),
        ):
            with pytest.raises(WorkerError) as caught:
                await forward(**changed)
            assert caught.value.kind == kind
        with pytest.raises(InvalidRequest, match="too large for a worker: header"):
            await pool.tokenize(GUIDE, text="a" * 65 * 2**20)
        await forward()
        assert pids(pool) == [pid]


async def test_a_file_that_is_no_model_is_refused_by_the_worker(tmp_path: Path) -> None:
    path = tmp_path / "poem.gguf"
    path.write_text("roses are red")
    async with real_pool(tmp_path) as pool:
        with pytest.raises(BadModel):
            await pool.load(ModelFile("11" * 32, path), LayerRange(0, 1))


async def test_text_survives_the_way_to_tokens_and_back(tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Grüße, 世界"}]
    async with real_pool(tmp_path) as pool:
        prompt = await pool.apply_template(GUIDE, messages)
        tokens = await pool.tokenize(GUIDE, messages=messages)
        assert await pool.detokenize(GUIDE, tokens) == prompt
        assert "Grüße, 世界" in prompt
        assert await pool.detokenize(GUIDE, tokens[:0]) == ""
        shown = b"".join(await pool.pieces(GUIDE, tokens)).decode()
        assert "Grüße, 世界" in shown
        assert len(shown) < len(prompt)
        assert await pool.end_tokens(GUIDE) == set((await pool.info(GUIDE)).eos_tokens) != set()
        with pytest.raises(WorkerError, match="token ids lie in"):
            await pool.detokenize(GUIDE, np.array([10**6], np.int32))
        with pytest.raises(InvalidRequest) as refused:
            await pool.tokenize(GUIDE, messages=messages, effort="high")
        assert refused.value.field == "reasoning_effort"
        assert (await pool.tokenize(GUIDE, messages=messages, effort="none")).tolist() == tokens.tolist()
        # The worker is none the worse for it.
        assert (await pool.tokenize(GUIDE, messages=messages)).tolist() == tokens.tolist()


async def test_kept_kv_goes_from_worker_to_worker(tmp_path: Path) -> None:
    names, layers = b"".join(bytes([i]) * 32 for i in range(3)), LayerRange(0, 4)
    tokens = np.random.default_rng(4).integers(300, 2000, 193).astype(np.int32)
    async with real_pool(tmp_path / "a") as giving, real_pool(tmp_path / "b") as taking:
        for pool in (giving, taking):
            await pool.load(GUIDE, layers)
        rows = await giving.embed(GUIDE, tokens)
        known = {"layers": layers, "names": names, "scope": "s"}
        assert await giving.name_prefix(GUIDE, request_id="r", **known) == 0
        await giving.forward(GUIDE, request_id="r", layers=layers, position=0, tensor=rows, want="hidden")
        await giving.release(GUIDE.model_id, "r")
        snapshot, data = await giving.export_prefix(GUIDE, layers, names, "s")
        assert snapshot.n_blocks == 3
        with pytest.raises(WorkerError, match="digest"):
            await taking.import_prefix(GUIDE, layers, names, snapshot, bytes(len(data)), "s")
        assert await taking.import_prefix(GUIDE, layers, names, snapshot, bytes(data), "s") == 3
        found = []
        for pool in (giving, taking):
            assert await pool.name_prefix(GUIDE, request_id="t", **known) == 3
            result = await pool.forward(
                GUIDE, request_id="t", layers=layers, position=192, tensor=rows[192:], want="hidden"
            )
            assert result.tensor is not None
            found.append(result.tensor)
        np.testing.assert_allclose(found[0], found[1], atol=1e-3)
