"""What a loaded model's products are computed by: measured with its matrices, and never with other bits."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from swarmllm_proto import ipc
from swarmllm_workers.engine.libllama import Context, ContextSettings, Model
from swarmllm_workers.gguf_file import GgufFile
from swarmllm_workers.kernels import small_batches
from swarmllm_workers.kernels.kernel_choice import (
    NEVER_LARGE,
    PANEL_ROWS_MIN,
    ROW_CLASSES,
    MatrixType,
    Way,
    ways_of,
)
from swarmllm_workers.kernels.kernel_tuning import KernelTuning, are_near, measure, ways
from swarmllm_workers.kernels.product_timing import ProductBench, matrices

from .conftest import MakeModel, StartWorker
from .factory import Spec
from .stepping import step_logits
from .test_exactness import GUIDE

pytestmark = pytest.mark.skipif(
    small_batches.find_library() is None or small_batches.last_way() <= Way.TILES,
    reason="small_batches.c was not built, or has no kernels for this processor",
)


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    yield
    small_batches.force(None)
    small_batches.use("auto")


RIGHT, WRONG = (np.array(values, np.float32).tobytes() for values in ([1.0, -2.0], [1.0, -2.1]))


class FakeBench:
    """Results as `wrong` has them; a product takes what `times` says, 1,000 ns where it says nothing."""

    def __init__(self, wrong: set[tuple[Way, int]], times: dict[Way, int]) -> None:
        self.wrong, self.times = wrong, times
        self.way = Way.DOTS

    def force(self, way: Way) -> None:
        self.way = way

    def run(self, n_rows: int) -> int:
        return self.times.get(self.way, 1000)

    def result(self, n_rows: int) -> bytes:
        return WRONG if (self.way, n_rows) in self.wrong else RIGHT

    def alone(self, n_rows: int) -> bytes:
        return RIGHT


def test_a_kernel_with_other_bits_is_left_out_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    bench = FakeBench({(Way.AVX512, 4)}, {Way.AVX512: 100, Way.AVX2: 500})
    with caplog.at_level(logging.WARNING):
        found = measure(bench, MatrixType.Q8_0, list(Way), bench.force, lambda: 0.0, 896)
    assert [each.way for each in found] == [
        Way.AVX2 if rows.first == 4 else Way.AVX512 for rows in ROW_CLASSES
    ]
    assert "kernels avx512 have other bits than ggml's here for rows of 896 of Q8_0" in caplog.text


def test_nothing_is_said_where_all_bits_are_right(caplog: pytest.LogCaptureFixture) -> None:
    bench = FakeBench({(Way.TILES, 2)}, {})  # ggml's own may differ: it is left out in silence
    found = measure(bench, MatrixType.Q8_0, list(Way), bench.force, lambda: 0.0, 896)
    assert found[1].way == Way.DOTS
    assert not caplog.text


def test_panels_whose_sums_are_far_away_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    times = {Way.PANELS_VNNI: 200, Way.PANELS_AMX: 100}
    bench = FakeBench({(Way.PANELS_AMX, 64)}, times)
    with caplog.at_level(logging.WARNING):
        found = measure(bench, MatrixType.Q4_K, list(Way), bench.force, lambda: 0.0, 512)
    assert found[-1].way == Way.PANELS_VNNI
    assert all(not each.way.has_own_sums for each in found[:-1])
    assert "kernels panels-amx have other bits" in caplog.text


@pytest.mark.parametrize("found", [[1.0, float("nan")], [1.0, float("inf")], [1.0, -2.0002]])
def test_sums_in_another_order_are_near(found: list[float]) -> None:
    assert are_near(np.array([1.0, -2.0001], np.float32).tobytes(), RIGHT)
    assert not are_near(np.array(found, np.float32).tobytes(), RIGHT)


def test_on_arm_the_bits_of_a_row_alone_count(caplog: pytest.LogCaptureFixture) -> None:
    """There ggml's own may have others in a batch, and then they are left out though they are faster."""
    wrong = {(Way.DOTS, rows.first) for rows in ROW_CLASSES if rows.first % 2 == 0}
    wrong |= {(Way.TILES, rows.first) for rows in ROW_CLASSES} | {(Way.NEON, 3)}
    bench = FakeBench(wrong, {Way.NEON: 3000, Way.TILES: 2000})
    ways = (Way.DOTS, Way.TILES, Way.NEON)
    found = measure(bench, MatrixType.Q4_K, ways, bench.force, lambda: 0.0, 512)
    small = [each.way for each in found if each.rows.last <= 7]
    assert small == [Way.NEON if at % 2 else Way.DOTS for at in range(7)]
    assert "kernels neon have other bits than ggml's here for rows of 512 of Q4_K" in caplog.text


def test_a_processor_without_ways_in_between_has_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_batches, "last_way", lambda: Way.NEON)
    monkeypatch.setattr(small_batches, "ways_of_panels", lambda: ())
    assert ways() == (Way.DOTS, Way.TILES, Way.NEON)
    library = small_batches._library
    assert library is not None
    small_batches.use("auto")
    for name in ("swarmllm_unmeasured", "swarmllm_unmeasured_k", "swarmllm_unmeasured_32"):
        table = list((ctypes.c_uint8 * len(ROW_CLASSES)).in_dll(library, name))
        assert table[0] == Way.DOTS
        assert set(table[1:7]) == {Way.NEON}


def test_products_of_ggmls_graphs_have_the_same_bits_in_every_way(make_model: MakeModel) -> None:
    path = make_model(Spec("llama", n_layers=2, n_embd=256, n_ff=512, head_size=64, types=(Type.Q8_0,)))
    for k in (256, 512):
        source = GgufFile(path)
        with ProductBench(source, MatrixType.Q8_0, k, 1, cached_bytes=2**20) as bench:
            for n_rows in (1, 2, 3, 7, 8, 9, 17):
                found = set()
                for way in ways_of(MatrixType.Q8_0, n_rows, ways()):
                    small_batches.force(way)
                    found.add(bench.result(n_rows))
                    assert bench.run(n_rows) > 0
                found.add(bench.alone(n_rows))
                assert len(found) == 1
        source.close()


def test_slices_are_as_tall_as_most_matrices_and_not_as_the_embedding() -> None:
    source = GgufFile(GUIDE)
    heights = [x.shape[1] for x in matrices(source) if (x.type, x.shape[0]) == (Type.Q8_0, 256)]
    with ProductBench(source, MatrixType.Q8_0, 256, 1, cached_bytes=0) as bench:
        assert bench.matrix_rows in {height for height in heights if height < max(heights)}
    source.close()


def test_files_without_such_matrices_are_not_measured(make_model: MakeModel) -> None:
    source = GgufFile(make_model(Spec("llama", types=(Type.F16,))))
    with pytest.raises(LookupError):
        ProductBench(source, MatrixType.Q8_0, 64, 1, cached_bytes=0)
    tuning = KernelTuning()
    tuning.tune(tuning.read([make_model(Spec("llama", types=(Type.F16,)))]), 1)
    assert tuning.choices == ()


def test_a_measurement_is_kept_and_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_in = tmp_path / "kernel-timings.json"
    first = KernelTuning("auto", kept_in)
    first.tune(first.read([GUIDE]), 1)
    assert {choice.k for choice in first.choices} == {256, 512}
    assert len(first.choices) == 2 * len(ROW_CLASSES)
    told: list[Any] = []
    monkeypatch.setattr("swarmllm_workers.kernels.kernel_tuning.large_batch_from", told.extend)
    assert first.large_batch_from is None
    sizes = {key[1]: n_bytes for key, n_bytes in first._bytes_of.items()}
    assert [(n, choices[0].rows) for n, choices in told] == [(sizes[k], ROW_CLASSES[0]) for k in (256, 512)]
    assert sizes[256] > sizes[512] > 10**5
    small = KernelTuning("auto", kept_in, rows_max=PANEL_ROWS_MIN - 1)
    small.tune(small.read([GUIDE]), 1)
    assert small.large_batch_from == NEVER_LARGE
    monkeypatch.setattr("swarmllm_workers.kernels.kernel_tuning.measure", None)
    again = KernelTuning("auto", kept_in)
    again.tune(again.read([GUIDE]), 1)
    assert again.choices == first.choices
    monkeypatch.undo()
    kept_in.write_bytes(b'{"machine": "')
    anew = KernelTuning("auto", kept_in)
    anew.tune(anew.read([GUIDE]), 1)
    assert len(anew.choices) == len(first.choices)
    assert kept_in.read_bytes().endswith(b"}")


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    tuning = KernelTuning("auto", tmp_path / "none" / "kernel-timings.json")
    tuning.tune(tuning.read([GUIDE]), 1)
    assert tuning.choices
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_model_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"no")
    KernelTuning().tune(KernelTuning().read([tmp_path / "x.gguf", tmp_path / "none.gguf"]), 1)


@pytest.mark.parametrize("mode", ["ggml", "ours"])
def test_where_one_side_is_wanted_nothing_is_measured(mode: ipc.KernelMode) -> None:
    tuning = KernelTuning(mode)
    tuning.tune(tuning.read([GUIDE]), 1)
    assert tuning.choices == ()


def test_logits_are_the_same_whoever_computes() -> None:
    model = Model(GUIDE)
    context = Context(model, ContextSettings(n_ctx=256, n_slots=1, n_threads=1, n_outputs_max=32))
    tokens = np.random.default_rng(5).integers(0, model.n_vocab, 50 + 21).astype(np.int32)
    context.decode(tokens[:50], np.arange(50), 0, np.zeros(50, np.int8))

    def logits(n_rows: int) -> np.ndarray:
        context.truncate(0, 50)
        return step_logits(context, tokens, 50, n_rows)

    tuning = KernelTuning()
    tuning.tune(tuning.read([GUIDE]), 1)
    for n_rows in (1, 2, 3, 7, 8, 9, 21):
        found = [logits(n_rows)]  # as was chosen
        for way in ways_of(MatrixType.Q8_0, n_rows, ways()):
            small_batches.force(way)
            found.append(logits(n_rows))
        small_batches.force(None)
        assert all(np.array_equal(each, found[0]) for each in found)
    context.close()
    model.close()


@pytest.mark.parametrize("n_rows", [1, 2, 8, 9, 16, 17, 32, 33])
def test_the_table_decides_by_row_length_and_number_of_rows(n_rows: int) -> None:
    """Where the table says tiles, ggml's are asked, and nowhere else."""
    library = small_batches._library
    assert library is not None
    asked: list[int] = []

    @ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, *[ctypes.c_int64] * 3)
    def tiled(_params: int, _m: int, n: int, _k: int) -> bool:
        asked.append(n)
        return True

    def ask(k: int) -> bool:
        a, b = (np.zeros(rows * k // 32 * 34, np.uint8) for rows in (8, n_rows))
        out = np.empty(8 * n_rows, np.float32)
        params = (ctypes.c_int * 2)(0, 1)
        sizes = [ctypes.c_int64(x) for x in (8, n_rows, k // 32)]
        ours = [(ctypes.c_void_p(x.ctypes.data), ctypes.c_int64(k // 32)) for x in (a, b)]
        result = ctypes.c_void_p(out.ctypes.data), ctypes.c_int64(8)
        types = (Type.Q8_0, Type.Q8_0, Type.F32)
        library.llamafile_sgemm.restype = ctypes.c_bool
        return bool(library.llamafile_sgemm(params, *sizes, *ours[0], *ours[1], *result, *types))

    at = next(i for i, rows in enumerate(ROW_CLASSES) if rows.first <= n_rows <= rows.last)
    tiles_here = [Way.TILES if i == at else Way.DOTS for i in range(len(ROW_CLASSES))]
    dots_here = [Way.DOTS if i == at else Way.TILES for i in range(len(ROW_CLASSES))]
    own = ctypes.c_void_p.in_dll(library, "swarmllm_tiled")
    before = own.value
    try:
        own.value = ctypes.cast(tiled, ctypes.c_void_p).value
        small_batches.fill_table(
            {
                (MatrixType.Q8_0, 256): tiles_here,
                (MatrixType.Q8_0, 512): dots_here,
                (MatrixType.Q8_0, 1024): [Way.AVX2] * len(ROW_CLASSES),
                (MatrixType.Q4_K, 2048): [Way.DOTS] * len(ROW_CLASSES),
            }
        )
        assert ask(256)
        assert not ask(512)
        assert ask(1024)
        assert ask(2048) == (n_rows > 1)  # not in the table: ours, but a single row
        assert asked == [n_rows]
        small_batches.use("ggml")
        assert ask(1024) == (n_rows > 7)
        assert len(asked) == 1 + (n_rows > 7)
    finally:
        own.value = before


def test_workers_write_the_same_text_and_say_what_they_chose(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    texts = {}
    for mode in ("ggml", "ours", "auto"):
        worker = start_worker()
        worker.open(GUIDE, kernels=mode, kernel_timings=str(tmp_path / "timings.json"))
        loaded = worker.call(ipc.Load, start=0, end=12).message
        assert bool(loaded.kernels) == (mode == "auto")
        prompt = worker.tokenize(text="What is a swarm of small machines?")
        texts[mode] = worker.generate(prompt).tokens
    assert texts["ggml"] == texts["ours"] == texts["auto"]
    assert (tmp_path / "timings.json").is_file()
