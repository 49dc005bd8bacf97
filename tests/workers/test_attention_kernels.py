"""Attention of small batches has the bits that ggml gives each row, whatever the shape, and ours is taken
only where it was tried out and is faster."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from swarmllm_proto import ipc
from swarmllm_workers.engine.libllama import Context, ContextSettings, Model
from swarmllm_workers.engine.runtime_check import Graphs
from swarmllm_workers.gguf_file import GgufFile
from swarmllm_workers.kernels import row_attention
from swarmllm_workers.kernels.attention_tuning import (
    BITS_ROWS,
    AttentionBench,
    AttentionTuning,
    Heads,
    heads_of,
    measure,
)
from swarmllm_workers.kernels.ggml_functions import F16, F32, Q8_0, functions
from swarmllm_workers.kernels.row_attention import HeadShape, RowChoices

from .stepping import step_logits
from .test_batching import OpenRoom, open_room  # noqa: F401
from .test_exactness import GUIDE

# ruff: noqa: F811 (fixtures are imported)

pytestmark = pytest.mark.skipif(
    not row_attention.computes_rows(HeadShape(64, 64, 1)),
    reason="row_attention.c was not built, or has no kernels for this processor",
)


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    yield
    row_attention.force(None)
    row_attention.fill_table({})
    row_attention.has_computed()


@dataclass(frozen=True)
class Case:
    key: int = 64
    value: int = 64
    keys: int = 2
    group: int = 3
    n_cells: int = 96
    n_rows: int = 4
    mask: str = "causal"
    n_threads: int = 1
    seed: int = 0
    size: float = 1.0
    """Of queries and values."""
    bias: float = 0.0
    soft_cap: float = 0.0
    kind: int = F16
    """Of keys and values."""

    def masks(self) -> np.ndarray:
        """f16 [n_rows, n_cells]"""
        random = np.random.default_rng(self.seed)
        draws = random.random((self.n_rows, self.n_cells))
        last = self.n_cells - self.n_rows + np.arange(self.n_rows)[:, None]
        is_there = {
            "causal": np.arange(self.n_cells) <= last,
            "holes": draws < 0.6,
            "sparse": draws < 0.05,
            "one row without": (draws < 0.9) & (np.arange(self.n_rows)[:, None] > 0),
            "numbers": draws < 0.9,
        }[self.mask]
        added = random.normal(0, 2, draws.shape) if self.mask == "numbers" else 0.0
        return np.where(is_there, added, -np.inf).astype(np.float16)


def attention(case: Case, *, is_ours: bool) -> tuple[np.ndarray, bool]:
    """uint32 [n_rows, heads, value], the bits; and whether ours has computed it."""
    random = np.random.default_rng(case.seed)
    heads = case.keys * case.group
    row_attention.force(is_ours)
    row_attention.has_computed()
    with ExitStack() as closing:
        graphs = Graphs(closing, memory_bytes=2**26, n_threads=case.n_threads)
        ggml = functions()
        shapes = (case.n_rows, heads, case.key), (case.n_cells, case.keys, case.key)
        queries = case.size * random.standard_normal(shapes[0])
        operands = [graphs.filled(F32, queries.astype(np.float32))]
        for size, n in ((1.0, case.key), (case.size, case.value)):
            numbers = np.clip(size * random.standard_normal((case.n_cells, case.keys, n)), -6e4, 6e4)
            if case.kind == F16:
                operands.append(graphs.filled(F16, numbers.astype(np.float16)))
            else:
                operands.append(graphs.tensor(case.kind, n, case.keys, case.n_cells))
        operands = [ggml["ggml_permute"](graphs.context, each, 0, 2, 1, 3) for each in operands]
        mask = None if case.mask == "none" else graphs.filled(F16, case.masks())
        result = ggml["ggml_flash_attn_ext"](
            graphs.context, *operands, mask, case.key**-0.5, case.bias, case.soft_cap
        )
        address, n_bytes = ggml["ggml_get_data"](result), 4 * case.n_rows * heads * case.value
        ctypes.memset(address, 0xFF, n_bytes)
        graphs.compute(result)
        bits = np.frombuffer(ctypes.string_at(address, n_bytes), np.uint32)
    return bits, row_attention.has_computed()


STEP = row_attention.head_step()
CASES = st.builds(
    Case,
    key=st.integers(1, 256 // STEP).map(lambda n: STEP * n),
    value=st.integers(1, 256 // STEP).map(lambda n: STEP * n),
    keys=st.integers(1, 4),
    group=st.integers(1, 9),
    n_cells=st.integers(1, 5).map(lambda n: 64 * n) | st.integers(64, 300),
    n_rows=st.sampled_from([1, 1, 2, 3, 7, 8, 17, 33, 63]),
    mask=st.sampled_from(["causal", "holes", "sparse", "one row without", "numbers"]),
    n_threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
    size=st.sampled_from([1.0, 1e-3, 8.0, 500.0, 20000.0]),
)


@examples(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=CASES)
def test_rows_have_the_bits_that_ggml_gives_them(case: Case) -> None:
    expected, was_ours = attention(case, is_ours=False)
    assert not was_ours
    found, is_ours = attention(case, is_ours=True)
    assert is_ours
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("size", [1e-4, 1.0, 3000.0, 60000.0])
@pytest.mark.parametrize("n_rows", [1, 5])
def test_sums_of_a_long_context_have_the_bits_that_ggml_gives_them(size: float, n_rows: int) -> None:
    """Also where they are too small or too large for normal numbers of f16."""
    case = Case(key=64, value=3 * STEP, n_cells=2048, n_rows=n_rows, size=size, mask="holes")
    found, is_ours = attention(case, is_ours=True)
    assert is_ours
    assert np.array_equal(found, attention(case, is_ours=False)[0])


@pytest.mark.parametrize(
    "case",
    [
        Case(mask="none"),
        Case(bias=8.0),
        Case(soft_cap=30.0),
        Case(key=80, value=80),
        Case(key=288),
        Case(value=288),
        Case(n_rows=64),
        Case(kind=Q8_0),
    ],
    ids=str,
)
def test_what_ours_cannot_compute_is_ggmls(case: Case) -> None:
    found, is_ours = attention(case, is_ours=True)
    assert not is_ours
    assert np.array_equal(found, attention(case, is_ours=False)[0])


def test_nothing_is_ours_that_the_table_does_not_say() -> None:
    def is_ours(n_rows: int) -> bool:
        with AttentionBench(Heads(64, 64, 6, 2), 1) as bench:
            row_attention.has_computed()
            bench.run(n_rows)
        return row_attention.has_computed()

    assert (is_ours(1), is_ours(4)) == (False, False)
    row_attention.fill_table({HeadShape(64, 64, 2): RowChoices(True, True)})
    assert (is_ours(1), is_ours(4)) == (False, False)
    row_attention.fill_table({HeadShape(64, 64, 3): RowChoices(True, False)})
    assert (is_ours(1), is_ours(4)) == (True, False)
    row_attention.fill_table({HeadShape(64, 64, 3): RowChoices(False, True)})
    assert (is_ours(1), is_ours(4)) == (False, True)


class FakeBench:
    def __init__(
        self,
        times: dict[tuple[int, bool], int],
        wrong: int | None = None,
        orders: tuple[int, ...] = (0, 1, 2),
    ) -> None:
        """`wrong`: the number of rows for which ours has other bits. In an order of sums that is not in
        `orders` it has them for any number."""
        self.times, self.wrong, self.orders = times, wrong, orders
        self.is_ours, self.order = False, 0

    def force(self, is_ours: bool | None, order: int | None = None) -> None:
        self.is_ours, self.order = bool(is_ours), order or 0

    def run(self, n_rows: int) -> int:
        return self.times[n_rows, self.is_ours]

    def result(self, n_rows: int) -> bytes:
        is_wrong = n_rows == self.wrong or self.order not in self.orders
        return b"wrong" if self.is_ours and is_wrong else b"right"


SHAPE = HeadShape(64, 64, 7)


def test_ours_is_taken_where_it_is_faster_by_more_than_a_tie() -> None:
    bench = FakeBench({(1, False): 100, (1, True): 96, (4, False): 100, (4, True): 90})
    assert measure(bench, SHAPE, bench.force).chosen == RowChoices(False, True)


@pytest.mark.parametrize("n_rows", BITS_ROWS)
def test_ours_is_never_taken_with_other_bits(n_rows: int, caplog: pytest.LogCaptureFixture) -> None:
    bench = FakeBench(
        {(n, is_ours): 9 if is_ours else 100 for n in (1, 4) for is_ours in (False, True)}, n_rows
    )
    with caplog.at_level(logging.WARNING):
        assert measure(bench, SHAPE, bench.force).chosen == RowChoices(False, False)
    assert "attention has other bits than ggml's" in caplog.text


@pytest.mark.parametrize("order", [1, 2])
def test_sums_are_made_in_the_order_that_has_ggmls_bits(order: int) -> None:
    times = {(n, is_ours): 9 if is_ours else 100 for n in (1, 4) for is_ours in (False, True)}
    bench = FakeBench(times, orders=(order,))
    assert measure(bench, SHAPE, bench.force, (1, 2)).chosen == RowChoices(True, True, order)


def test_the_table_says_in_which_order_sums_are_made() -> None:
    """All heads of a multiple of 128 numbers tell the orders apart that this processor can make."""
    shape = Heads(128, 128, 2, 1)
    orders = row_attention.orders()
    with AttentionBench(shape, 1) as bench:
        row_attention.force(False)
        expected = bench.result(3)
        row_attention.force(None)
        found = []
        for order in orders:
            row_attention.fill_table({shape.shape: RowChoices(True, True, order)})
            found.append(bench.result(3) == expected)
    assert found.count(True) == 1


def test_the_bench_tries_sums_that_f16_cannot_hold() -> None:
    with AttentionBench(Heads(64, 64, 6, 2), 1) as bench:
        found = np.frombuffer(bench.result(9), np.float32)
    assert not np.isfinite(found).all()
    assert np.isfinite(found).any()


def test_a_model_is_tried_out_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    source = GgufFile(GUIDE)
    heads = heads_of(source)
    assert heads is not None
    tables: list[dict[HeadShape, RowChoices]] = []
    monkeypatch.setattr(row_attention, "fill_table", lambda table: tables.append(dict(table)))
    tuning = AttentionTuning()
    assert not tuning.tune([source], 1, measures=False)
    assert tables[-1] == {}
    assert tuning.tune([source], 1)
    assert list(tables[-1]) == [heads.shape]
    assert tuning.tune([source], 1, measures=False)
    source.close()
    chosen = tables[-1][heads.shape]
    told = [(each.first_rows, each.last_rows, each.chosen == "ours") for each in tuning.choices]
    assert told == [(1, 1, chosen.single), (2, 63, chosen.several)]
    assert all((each.type, each.k, each.n_threads) == ("attention", heads.key, 1) for each in tuning.choices)
    assert all(each.ggml_ns > 0 for each in tuning.choices)


def test_a_worker_tells_what_it_chose(open_room: OpenRoom) -> None:
    room = open_room(GUIDE, (0, 12), n_ctx=512)
    loaded = [message for message, _ in room.sent if isinstance(message, ipc.Loaded)]
    told = [(each.first_rows, each.last_rows) for each in loaded[-1].kernels if each.type == "attention"]
    assert told == [(1, 1), (2, 63)]


@pytest.mark.parametrize("n_rows", [1, 3, 6])
def test_a_model_has_the_same_logits(n_rows: int) -> None:
    model = Model(GUIDE)
    found = []
    for is_ours, n_threads in ((False, 1), (True, 1), (True, 2)):
        row_attention.force(is_ours)
        context = Context(
            model,
            ContextSettings(
                n_ctx=1024, n_slots=1, n_threads=n_threads, n_outputs_max=32, flash_attention="on"
            ),
        )
        tokens = np.random.default_rng(3).integers(0, model.n_vocab, 606).astype(np.int32)
        for start, end in ((0, 300), (300, 600)):
            context.decode(tokens[start:end], np.arange(start, end), 0, np.zeros(end - start, np.int8))
        row_attention.has_computed()
        found.append(step_logits(context, tokens, 600, n_rows))
        assert row_attention.has_computed() == is_ours
        context.close()
    model.close()
    assert np.array_equal(found[1], found[0])
    assert np.array_equal(found[2], found[0])
