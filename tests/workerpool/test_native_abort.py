"""libllama aborts where nothing could have foreseen it: the request learns so, others go on, the next is
served."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from pool_parts import pids, process_exists
from workers.factory import SPECS, build

import swarmllm.guide
from swarmllm.errors import WorkerDied
from swarmllm.models.layers import LayerRange
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings
from swarmllm_proto.ipc import Sampling

pytestmark = pytest.mark.slow

GUIDE = ModelFile("00" * 32, Path(swarmllm.guide.__file__).with_name("guide.gguf"))
GREEDY = Sampling(temperature=0.0, max_tokens=3, ignore_eos=True)
TOKENS = np.array([1, 2, 3], np.int32)


def with_whole_numbers_for_a_bias(path: Path) -> Path:
    """A file that loads, and whose third layer asks libllama to add i32 to f32: it aborts when that is
    computed, and only then."""
    data = bytearray(build(path, SPECS["qwen2"]).read_bytes())
    name = b"blk.2.attn_q.bias"
    at = data.index(name) + len(name) + 4 + 8
    assert struct.unpack_from("<I", data, at) == (0,)  # f32
    struct.pack_into("<I", data, at, 26)  # i32
    path.write_bytes(data)
    return path


async def tokens_of(pool: WorkerPool, model: ModelFile) -> list[int]:
    async with pool.generate(model, request_id="g", tokens=TOKENS, sampling=GREEDY) as stream:
        return [token.token async for token, _ in stream]


async def test_an_abort_costs_its_request_and_nobody_else(tmp_path: Path) -> None:
    fatal = ModelFile("11" * 32, with_whole_numbers_for_a_bias(tmp_path / "fatal.gguf"))
    pool = WorkerPool(WorkerSettings(cache_dir=tmp_path / "cache", n_threads=1), tmp_path / "run")
    async with pool.running():
        await pool.load(GUIDE, LayerRange(0, 12))
        before = await tokens_of(pool, GUIDE)
        (guides,) = pids(pool)
        await pool.load(fatal, LayerRange(0, 4))
        (pid,) = set(pids(pool)) - {guides}
        with pytest.raises(WorkerDied, match=rf"worker process {pid} was killed by SIGABRT") as died:
            await tokens_of(pool, fatal)
        assert "unsupported types" in died.value.message  # libllama's last words
        assert "/" not in died.value.message, "where it was built is nobody's business"
        assert not process_exists(pid)
        assert await tokens_of(pool, GUIDE) == before
        assert process_exists(guides)

        hidden = await pool.forward(
            fatal, request_id="r", layers=LayerRange(0, 2), position=0, tensor=TOKENS, want="hidden"
        )
        assert hidden.tensor is not None
        (again,) = set(pids(pool)) - {guides}
        assert again != pid
        assert pool.loaded(fatal.model_id) == (LayerRange(0, 4),)
