"""Matrices that ggml wants in another order are in memory once, however many parts are loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from swarmllm_workers.engine import arranged_weights, shared_weights
from swarmllm_workers.engine.arranged_weights import ArrangedMatrices, MatrixKey, arranged
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.runtime_check import Graphs
from swarmllm_workers.engine.segment import Span
from swarmllm_workers.errors import CallError
from swarmllm_workers.kernels import repacking, small_batches
from swarmllm_workers.kernels.ggml_functions import F32

from .conftest import MakeModel
from .factory import Spec

pytestmark = pytest.mark.skipif(
    not (shared_weights.is_supported() and small_batches.leaves_weights()),
    reason="libllama does not tell where its tensors are, or left_weights.c was not built",
)

DENSE = Spec("llama", n_layers=4, n_embd=256, n_ff=512, head_size=64, types=(Type.Q4_0, Type.Q2_K))
EXPERTS = Spec(
    "qwen3moe", n_layers=4, n_embd=128, n_ff=256, head_size=32, qk_norm=True, n_experts=4, types=(Type.Q4_0,)
)
TOKENS = np.arange(65, 75, dtype=np.int32)


@pytest.fixture(params=[DENSE, EXPERTS], ids=["dense", "experts"])
def path(request: pytest.FixtureRequest, make_model: MakeModel) -> Path:
    made = make_model(request.param)
    if not repacking.rearranges([made]):
        pytest.skip("ggml rearranges nothing on this processor")
    return made


@pytest.fixture
def engine(path: Path, tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(path, tmp_path / "segments", EngineSettings(n_ctx=64, n_slots=4, n_threads=1))
    yield engine
    engine.close()
    assert arranged.size_bytes == 0


def run(engine: Engine, request: str, start: int, end: int, data: np.ndarray) -> np.ndarray:
    route = engine.route(request, start, end)
    return engine.run(route, [Span(engine.take_slot(request), 0, data, "logits")])[0].copy()


def test_parts_have_the_matrices_of_the_whole_and_its_bits(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(small_batches, "leaves_weights", lambda: False)
        engine.layers.load(0, 4)
    assert arranged.size_bytes == 0
    assert not engine.layers.segments[0].is_shared
    expected = run(engine, "as libllama loads it", 0, 4, TOKENS)
    engine.release("as libllama loads it")
    engine.layers.unload(0, 4)

    engine.layers.load(0, 4)
    np.testing.assert_array_equal(run(engine, "whole", 0, 4, TOKENS), expected)
    size_bytes, memory = arranged.size_bytes, engine.memory
    assert size_bytes > 0
    hidden = run(engine, "parts", 0, 1, TOKENS)
    np.testing.assert_array_equal(run(engine, "parts", 3, 4, run(engine, "parts", 1, 3, hidden)), expected)
    # The request that began in the whole keeps it.
    assert sorted((each.start, each.end) for each in engine.layers.open) == [(0, 1), (0, 4), (1, 3), (3, 4)]
    assert all(each.is_shared for each in engine.layers.open)
    assert arranged.size_bytes == size_bytes
    assert engine.memory.weights_bytes == memory.weights_bytes


def test_a_cut_arranges_nothing_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.layers.load(1, 4)
    rows = np.ones((2, engine.n_embd), np.float32)
    expected = run(engine, "all", 1, 4, rows)
    engine.release("all")
    size_bytes = arranged.size_bytes

    def again(_size_bytes: int) -> None:
        raise AssertionError("it is arranged already")

    monkeypatch.setattr(arranged_weights, "_new", again)
    np.testing.assert_array_equal(run(engine, "parts", 2, 4, run(engine, "parts", 1, 2, rows)), expected)
    assert [(each.start, each.end) for each in engine.layers.open] == [(1, 2), (2, 4)]
    assert arranged.size_bytes == size_bytes
    monkeypatch.undo()
    engine.release("parts")
    engine.layers.unload(1, 2)
    assert 0 < arranged.size_bytes < size_bytes


def test_a_matrix_is_kept_while_somebody_uses_it_or_will() -> None:
    matrices, made = ArrangedMatrices(), []
    key = MatrixKey(1, 2, 3, 4, 5 * 2**20 + 1)
    assert matrices.take(key, made.append) == matrices.take(key, made.append) == made[0]
    assert made[0] % 2**21 == 0
    ctypes.memset(made[0], 1, key.size_bytes)
    matrices.give_back(key)
    with matrices.keeping():
        matrices.give_back(key)
        assert matrices.size_bytes == key.size_bytes
        matrices.take(key, made.append)
    assert len(made) == 1
    matrices.take(key._replace(mtime_ns=4), made.append)
    assert len(made) == 2
    matrices.give_back(key)
    matrices.give_back(key._replace(mtime_ns=4))
    assert matrices.size_bytes == 0


def test_what_cannot_be_arranged_takes_no_memory() -> None:
    matrices = ArrangedMatrices()

    def fail(_address: int) -> None:
        raise CallError("bad_model", "no")

    with pytest.raises(CallError, match="no"):
        matrices.take(MatrixKey(1, 2, 3, 4, 2**20), fail)
    assert matrices.size_bytes == 0
    with pytest.raises(CallError, match="cannot map"):
        matrices.take(MatrixKey(1, 2, 3, 4, 2**62), fail)


def test_libllama_fills_no_tensor_with_what_is_left() -> None:
    with ExitStack() as closing:
        graphs = Graphs(closing)
        numbers = np.arange(32, dtype=np.float32)
        tensor = graphs.tensor(F32, 32)
        data = (ctypes.c_float * 32).from_address(graphs.ggml["ggml_get_data"](tensor))
        library = small_batches._library
        assert library is not None
        fill = library.ggml_backend_tensor_set
        fill.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
        start = numbers.ctypes.data
        backend = graphs.ggml["ggml_backend_cpu_buffer_from_ptr"](ctypes.addressof(data) // 64 * 64, 256)
        ctypes.c_void_p.from_address(tensor + 8).value = backend
        small_batches.leave_weights(start, start + numbers.nbytes)
        fill(tensor, start, 0, numbers.nbytes)
        assert not any(data)
        small_batches.leave_weights(start - 4, start)
        fill(tensor, start, 0, numbers.nbytes)
        assert list(data) == list(numbers)
        small_batches.leave_weights(0, 0)
        graphs.ggml["ggml_backend_buffer_free"](backend)
