"""Every family of models that must be cut is cut exactly, in every way its rule allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from long_runs import IS_LONG

from swarmllm.models.hashing import build_manifest
from swarmllm_proto.architectures import ARCHITECTURES, window_period
from swarmllm_workers.engine import loaded_layers, releases, segment_file, segment_maker
from swarmllm_workers.engine.cut_check import check_cuts
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.segment import Span
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import ARRAY

from .blueprint import write
from .families import FAMILIES
from .test_exactness import N_CTX, chain_logits, cuts, open_engine, steps, tokens_for, uncut_logits

pytestmark = [pytest.mark.slow, pytest.mark.long]

CHUNKING = [1, 7, 32]
SETTINGS = EngineSettings(n_ctx=N_CTX, n_slots=2, n_threads=1)
RECURRENT = [
    "mamba",
    "mamba-2",
    "falcon-h1",
    "qwen3-next",
    "qwen3.5",
    "kimi-linear",
    "lfm2",
    "granite-4 hybrid",
    "nemotron-h",
]
FED_BY_TOKEN = ["glm-4", "glm-4 moe", "qwen2.5-vl", "qwen3.5"]
REQUIRED = (
    "llama llama4 qwen2 qwen2moe qwen3 qwen3moe qwen35 qwen35moe qwen3next gemma gemma2 gemma3 phi3 "
    "deepseek2 glm4 glm4moe starcoder2 gpt-oss command-r cohere2 olmo2 granite falcon-h1 mamba2 mistral3 "
    "seed_oss smollm3 ernie4_5 ernie4_5-moe hunyuan-dense hunyuan-moe minimax-m2 kimi-linear lfm2"
)


@pytest.fixture(autouse=True)
def _as_many_parts_as_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a chain's routes are open at once."""
    monkeypatch.setattr(loaded_layers, "PARTS_MAX", 1000)


@pytest.fixture(scope="module")
def family_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("families")

    def make(name: str) -> Path:
        path = folder / f"{name}.gguf"
        return path if path.exists() else write(path, FAMILIES[name])

    return make


@pytest.fixture(scope="module")
def as_libllama_reads(
    family_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A family's file, whose list of windows is a period where this release of libllama overlooks it."""

    def make(name: str) -> Path:
        family, key = FAMILIES[name], "attention.sliding_window_pattern"
        listed = family.keys.get(key)
        if not isinstance(listed, list) or releases.reads_window_lists(family.architecture):
            return family_file(name)
        keys = {**family.keys, key: window_period(listed)}
        return write(tmp_path_factory.mktemp("periods") / "model.gguf", replace(family, keys=keys))

    return make


def test_the_required_architectures_have_a_family() -> None:
    assert set(REQUIRED.split()) <= {family.architecture for family in FAMILIES.values()}
    assert {family.architecture for family in FAMILIES.values()} <= set(ARCHITECTURES)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_is_exact_under_every_cut_that_its_rule_allows(
    name: str,
    family_file: Callable[[str], Path],
    as_libllama_reads: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    engine = open_engine(family_file(name), tmp_path)
    alignment = engine.rule.cut_alignment
    assert alignment > 0, engine.rule.whole_reason
    tokens = tokens_for(engine.n_vocab)
    expected = uncut_logits(as_libllama_reads(name), tokens, CHUNKING)
    assert np.isfinite(expected).all()
    assert expected.std() > 0.05
    ways = list(cuts(engine.n_layers, alignment))
    if len(ways) > 12:  # of the large ones the ends, the middle and the smallest pieces
        ways = [*ways[:2], ways[len(ways) // 2], *ways[-3:]]
    if len(ways) > 2 and not IS_LONG:
        # At every boundary at once, and one between several layers on either side.
        ways = [ways[(len(ways) - 2) // 2], ways[-1]]
    for bounds in ([0, engine.n_layers], *ways):
        engine.layers.load(0, engine.n_layers)
        got = chain_logits(engine, bounds, tokens, CHUNKING)
        assert np.abs(got - expected).max() == 0.0, bounds
        engine.layers.unload(0, engine.n_layers)
    engine.close()


@pytest.mark.parametrize("shares_pages", [True, False])
@pytest.mark.parametrize(
    "name",
    ["gemma-2", "gemma-3", "command-r7b", "command-r7b, other period", "command-r7b, listed", "olmo-3"],
)
def test_windows_are_exact_too_where_libllama_can_be_given_no_list_of_them(
    name: str,
    shares_pages: bool,
    family_file: Callable[[str], Path],
    as_libllama_reads: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As before 0.3.36. Then no segment has a list, and every range of layers is one of two that have a
    period, at most."""
    reference = as_libllama_reads(name)
    monkeypatch.setattr(releases, "release", lambda: "0.3.35")
    monkeypatch.setattr(segment_maker, "_shares_pages", lambda settings: shares_pages)
    planned = segment_file.plan_values

    def without_lists(*arguments: Any) -> Any:
        values = planned(*arguments)
        patterns = [value for key, value in values.items() if key.endswith("sliding_window_pattern")]
        assert all(value.type != ARRAY for value in patterns)
        return values

    monkeypatch.setattr(segment_file, "plan_values", without_lists)
    engine = open_engine(family_file(name), tmp_path)
    tokens = tokens_for(engine.n_vocab)
    expected = uncut_logits(reference, tokens, CHUNKING)
    for bounds in ([0, engine.n_layers], *cuts(engine.n_layers, engine.rule.cut_alignment)):
        engine.layers.load(0, engine.n_layers)
        # Whole, a file whose list libllama would overlook is two parts.
        if len(bounds) == 2:
            assert len(engine.layers.segments) == (2 if name == "command-r7b, listed" else 1)
        np.testing.assert_array_equal(chain_logits(engine, bounds, tokens, CHUNKING), expected)
        for start, end in pairwise(bounds):
            assert len(engine.route("r", start, end).segments) <= 2
        engine.layers.unload(0, engine.n_layers)
    engine.close()


def test_windows_that_neither_file_nor_parts_can_tell_libllama_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers of Command R7B in a row attend to everything: a part of the second alone has no window. Run
    whole, the file would be computed with the windows of its architecture's period."""
    family = FAMILIES["command-r7b"]
    for pattern, is_run in (([True, False, False, True] * 2, False), ([True, True, True, False] * 2, True)):
        keys = {**family.keys, "attention.sliding_window_pattern": pattern}
        path = write(tmp_path / f"{is_run}.gguf", replace(family, keys=keys))
        monkeypatch.setattr(releases, "release", lambda: "0.3.35")
        engine = open_engine(path, tmp_path)
        assert bool(engine.rule.cut_alignment) == is_run
        if is_run:
            engine.layers.load(0, 8)
            assert len(engine.layers.segments) == 1
        else:
            with pytest.raises(CallError, match="overlooks which of its layers") as caught:
                engine.layers.load(0, 8)
            assert caught.value.kind == "cannot_cut"
            assert check_cuts(path, tmp_path, SETTINGS, lambda done, total: None).unit == 0
        engine.close()
        monkeypatch.setattr(releases, "release", lambda: "0.3.36")
        engine = open_engine(path, tmp_path)
        assert engine.rule.cut_alignment == 2
        engine.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_daemon_and_worker_read_the_same_rule_from_a_file(
    name: str, family_file: Callable[[str], Path], tmp_path: Path
) -> None:
    engine = open_engine(family_file(name), tmp_path)
    manifest = build_manifest(family_file(name))
    assert (manifest.n_layers, manifest.cut_alignment, manifest.whole_reason) == (
        engine.n_layers,
        engine.rule.cut_alignment,
        engine.rule.whole_reason,
    )
    engine.close()


@pytest.mark.parametrize("name", ["gemma-2 27b", "glm-4"])
def test_tap_in_python_serves_them_too(name: str, family_file: Callable[[str], Path], tmp_path: Path) -> None:
    path = family_file(name)
    engine = open_engine(path, tmp_path, native_tap=False)
    engine.layers.load(0, engine.n_layers)
    tokens = tokens_for(engine.n_vocab)
    got = chain_logits(engine, [0, 2, engine.n_layers], tokens, CHUNKING)
    np.testing.assert_array_equal(got, uncut_logits(path, tokens, CHUNKING))
    engine.close()


def in_batches(engine: Engine, bounds: Sequence[int]) -> np.ndarray:
    """Logits of three requests of different lengths that share their forwards, prefill beside decode."""
    tokens = tokens_for(engine.n_vocab)
    for start, end in pairwise(bounds):
        engine.layers.load(start, end)
    routes = [engine.route("all", start, end) for start, end in pairwise(bounds)]
    rows = []
    for batch in (
        [(0, 0, 9), (1, 0, 9), (2, 0, 4)],
        [(0, 9, 10), (1, 9, 30), (2, 4, 5)],
        [(2, 5, 6), (0, 10, 11), (1, 30, 31)],
    ):
        data = [tokens[start:end] for _, start, end in batch]
        for route in routes:
            spans = [
                Span(slot, start, rows_of, "logits")
                for (slot, start, _), rows_of in zip(batch, data, strict=True)
            ]
            data = [result.copy() for result in engine.run(route, spans)]
        rows += data
    return np.array(rows)


@pytest.mark.parametrize("name", [*RECURRENT, "glm-4", "deepseek-v3"])
def test_requests_that_share_batches_equal_the_uncut_model(
    name: str, family_file: Callable[[str], Path], tmp_path: Path
) -> None:
    results = []
    for is_cut in (False, True):
        engine = open_engine(family_file(name), tmp_path, n_slots=3)
        middle = engine.rule.cut_alignment
        results.append(in_batches(engine, [0, middle, engine.n_layers] if is_cut else [0, engine.n_layers]))
        engine.close()
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_state_is_never_rolled_back_by_halves(
    name: str, family_file: Callable[[str], Path], tmp_path: Path
) -> None:
    """A repeated forward is refused and disturbs nothing; the request goes on, or begins again at 0."""
    path = family_file(name)
    engine = open_engine(path, tmp_path)
    middle, end = engine.rule.cut_alignment, engine.n_layers
    engine.layers.load(0, middle)
    engine.layers.load(middle, end)
    tokens = tokens_for(engine.n_vocab)
    expected = uncut_logits(path, tokens, CHUNKING)
    slot, route = engine.take_slot("r"), engine.route("r", 0, end)

    def run(start: int, stop: int) -> np.ndarray:
        return engine.run(route, [Span(slot, start, tokens[start:stop], "logits")])[0].copy()

    for _ in range(2):
        got = [run(start, stop) for start, stop in steps(CHUNKING)]
        np.testing.assert_array_equal(got, expected)
    for start, stop in steps(CHUNKING)[:-1]:
        run(start, stop)
    with pytest.raises(CallError) as caught:
        run(20, 21)
    assert (caught.value.kind, caught.value.field) == ("position_gap", "position")
    assert "position 0" in caught.value.message
    np.testing.assert_array_equal(run(*steps(CHUNKING)[-1]), expected[-1])
    engine.close()


@pytest.mark.parametrize("name", FED_BY_TOKEN)
def test_whole_model_takes_rows_as_it_takes_tokens(
    name: str, family_file: Callable[[str], Path], tmp_path: Path
) -> None:
    """libllama alone would abort, or read several positions for each row."""
    engine = open_engine(family_file(name), tmp_path)
    engine.layers.load(0, engine.n_layers)
    tokens = tokens_for(engine.n_vocab)
    route = engine.route("r", 0, engine.n_layers)
    assert len(route.segments) == 1
    by_token = engine.run(route, [Span(0, 0, tokens, "logits")])[0].copy()
    by_row = engine.run(route, [Span(1, 0, engine.embedding.rows(tokens), "logits")])[0].copy()
    np.testing.assert_allclose(by_row, by_token, atol=1e-3)  # other cells of the KV: another order of sums
    engine.close()


def test_a_model_with_wide_inputs_takes_rows_of_its_width_whole_and_cut(
    family_file: Callable[[str], Path], tmp_path: Path
) -> None:
    """Further parts of a picture's rows are zeros where rows are no picture's."""
    engine = open_engine(family_file("qwen3-vl"), tmp_path)
    tokens = np.arange(4, dtype=np.int32)
    rows = engine.embedding.rows(tokens)
    engine.layers.load(0, engine.n_layers)
    route = engine.route("r", 0, engine.n_layers)
    by_token = engine.run(route, [Span(0, 0, tokens, "logits")])[0].copy()
    by_row = engine.run(route, [Span(1, 0, rows, "logits")])[0].copy()
    np.testing.assert_allclose(by_row, by_token, atol=1e-3)
    engine.layers.unload(0, engine.n_layers)
    engine.layers.load(0, 4)
    assert engine.run(engine.route("r", 0, 4), [Span(0, 0, rows, "hidden")])[0].shape == rows.shape
    engine.close()


def test_no_segment_has_as_many_layers_as_another_member_of_its_family(tmp_path: Path) -> None:
    """libllama takes 27 layers of deepseek2 for V2 Lite, whose tensors are other ones."""
    path = write(tmp_path / "m.gguf", replace(FAMILIES["deepseek-v3"], n_layers=28))
    engine = open_engine(path, tmp_path)
    engine.layers.load(0, 27)
    engine.layers.load(27, 28)
    assert [(segment.start, segment.end) for segment in engine.layers.segments] == [
        (0, 13),
        (13, 27),
        (27, 28),
    ]
    tokens = tokens_for(engine.n_vocab)
    got = chain_logits(engine, [0, 27, 28], tokens, CHUNKING)
    np.testing.assert_array_equal(got, uncut_logits(path, tokens, CHUNKING))
    engine.close()


def test_llama_4_is_exact_beyond_its_chunk_of_8192_rows(tmp_path: Path) -> None:
    """The chunk is libllama's own number and in no file, and beyond it queries of layers without rotation get
    a temperature by their position. As few heads as there can be, because all rows see each other."""
    family = FAMILIES["llama-4 scout"]
    small = {"attention.head_count": 1, "attention.head_count_kv": 1, "embedding_length": 32}
    keys = {**family.keys, **small, "context_length": 16384, "rope.dimension_count": 32, "expert_count": 2}
    path = write(tmp_path / "m.gguf", replace(family, keys=keys))
    n_rows = 8192 + 20
    engine = Engine(path, tmp_path / "segments", EngineSettings(n_ctx=8448, n_slots=1, n_threads=2))
    tokens = np.random.default_rng(1).integers(0, engine.n_vocab, n_rows).astype(np.int32)
    bounds = [*range(0, n_rows - 2, 512), n_rows - 2, n_rows - 1, n_rows]

    def logits(cut: list[int]) -> np.ndarray:
        for start, end in pairwise(cut):
            engine.layers.load(start, end)
        routes = [engine.route("r", start, end) for start, end in pairwise(cut)]
        rows = []
        for start, end in pairwise(bounds):
            data = tokens[start:end]
            for route in routes:
                data = engine.run(route, [Span(0, start, data, "logits")])[0].copy()
            rows.append(data)
        engine.release("r")
        engine.layers.unload(0, engine.n_layers)
        return np.array(rows)

    np.testing.assert_array_equal(logits([0, 4, 8]), logits([0, 8]))
    engine.close()
