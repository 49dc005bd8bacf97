"""Layers run straight from the pages of the model's file, with the bits of the uncut model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from swarmllm_workers.engine import shared_weights
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.loaded_layers import PARTS_MAX
from swarmllm_workers.engine.memory import predict
from swarmllm_workers.engine.segment import Span
from swarmllm_workers.engine.segment_file import plan_part
from swarmllm_workers.engine.shared_weights import FilePlace, Part, Stub
from swarmllm_workers.errors import CallError, Stopped

from .blueprint import write
from .conftest import MakeModel
from .factory import Spec, build
from .families import FAMILIES

GUIDE = Path(__file__).parents[2] / "swarmllm" / "guide" / "guide.gguf"
TOKENS = np.arange(65, 75, dtype=np.int32)
NEXT = TOKENS[:1]
OpenEngine = Callable[..., Engine]

pytestmark = pytest.mark.skipif(not shared_weights.is_supported(), reason="libllama does not tell")


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[OpenEngine]:
    engines: list[Engine] = []

    def open_(path: Path, *, owns_path: bool = False, **settings: int) -> Engine:
        chosen = replace(EngineSettings(n_ctx=64, n_slots=2, n_threads=1), **settings)  # type: ignore[arg-type]
        engines.append(Engine(path, tmp_path / "segments", chosen, owns_path=owns_path))
        return engines[-1]

    yield open_
    for engine in engines:
        engine.close()


def run(engine: Engine, request: str, start: int, end: int, position: int, data: np.ndarray) -> np.ndarray:
    route = engine.route(request, start, end)
    return engine.run(route, [Span(engine.take_slot(request), position, data, "logits")])[0].copy()


def through(engine: Engine, request: str, bounds: list[int], position: int, data: np.ndarray) -> np.ndarray:
    for start, end in pairwise(bounds):
        data = run(engine, request, start, end, position, data)
    return data


def n_mappings(path: Path) -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.endswith(str(path.resolve())) for line in lines)


def layers_of(engine: Engine) -> list[tuple[int, int]]:
    return sorted((segment.start, segment.end) for segment in engine.layers.segments)


@pytest.mark.parametrize("cuts", [[4], [1, 11], [3, 6, 9]])
def test_parts_of_the_guide_have_the_bits_of_the_whole(
    open_engine: OpenEngine, tmp_path: Path, cuts: list[int]
) -> None:
    engine = open_engine(GUIDE)
    engine.layers.load(0, 12)
    first, second = run(engine, "whole", 0, 12, 0, TOKENS), run(engine, "whole", 0, 12, len(TOKENS), NEXT)
    engine.release("whole")
    bounds = [0, *cuts, 12]
    np.testing.assert_array_equal(through(engine, "parts", bounds, 0, TOKENS), first)
    np.testing.assert_array_equal(through(engine, "parts", bounds, len(TOKENS), NEXT), second)
    assert len(engine.layers.segments) == len(bounds) - 1
    assert {segment.path for segment in engine.layers.segments} == {GUIDE}
    assert list((tmp_path / "segments").iterdir()) == []
    # Where all is asked for again, it runs through the parts.
    engine.release("parts")
    np.testing.assert_array_equal(run(engine, "again", 0, 12, 0, TOKENS), first)


SOME = ["llama-3.2, tied", "gemma-2", "qwen3-moe", "baichuan 7b", "deepseek-v2", "mamba-2", "command-r7b"]


@pytest.mark.parametrize("name", SOME)
def test_parts_of_other_architectures_have_the_bits_of_the_whole(
    open_engine: OpenEngine, tmp_path: Path, name: str
) -> None:
    engine = open_engine(write(tmp_path / "model.gguf", FAMILIES[name]))
    unit = engine.rule.cut_alignment
    engine.layers.load(0, engine.n_layers)
    expected = run(engine, "whole", 0, engine.n_layers, 0, TOKENS)
    engine.release("whole")
    bounds = [*range(0, engine.n_layers, unit)[:PARTS_MAX], engine.n_layers]
    np.testing.assert_array_equal(through(engine, "parts", bounds, 0, TOKENS), expected)
    assert len(engine.layers.segments) > 1
    assert {segment.path for segment in engine.layers.segments} == {engine.source.path}


def test_held_ranges_and_their_parts_are_over_the_file_itself(
    open_engine: OpenEngine, make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_model("llama")
    rows = np.random.default_rng(0).standard_normal((4, open_engine(path).n_embd)).astype(np.float32)
    with monkeypatch.context() as patched:
        patched.setattr(shared_weights, "is_supported", lambda: False)
        cut = open_engine(path)
        cut.layers.load(1, 4)
        expected = run(cut, "all", 1, 4, 0, rows)
        cut.layers.unload(1, 4)
    for file in (tmp_path / "segments").iterdir():
        file.unlink()
    n_before = n_mappings(path)
    engine = open_engine(path)
    engine.layers.load(1, 3)
    engine.layers.load(3, 4)
    np.testing.assert_array_equal(through(engine, "all", [1, 3, 4], 0, rows), expected)
    np.testing.assert_array_equal(through(engine, "parts", [1, 2, 3, 4], 0, rows), expected)
    assert layers_of(engine) == [(1, 2), (2, 3), (3, 4)]
    assert {segment.path for segment in engine.layers.segments} == {path}
    # Its header, as that of every engine here, and all layers in one.
    assert n_mappings(path) == n_before + 2
    assert list((tmp_path / "segments").iterdir()) == []


def test_a_container_whose_layers_have_moved_is_read_where_they_are(
    open_engine: OpenEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another version, or a worker with layers on a GPU, has left it."""
    model = build(tmp_path / "model.gguf", Spec("llama", n_embd=128, n_ff=512, n_layers=6))
    path = tmp_path / "container.gguf"
    path.write_bytes(model.read_bytes())
    with monkeypatch.context() as patched:
        patched.setattr(shared_weights, "is_supported", lambda: False)
        engine = open_engine(path, owns_path=True)
        engine.layers.load(2, 4)
        engine.layers.unload(2, 4)
    n_blocks, files = path.stat().st_blocks, sorted((tmp_path / "segments").iterdir())
    assert n_blocks < model.stat().st_blocks
    engine = open_engine(path, owns_path=True)
    engine.layers.load(1, 5)
    uncut = open_engine(model)
    uncut.layers.load(1, 5)
    rows = np.random.default_rng(0).standard_normal((4, engine.n_embd)).astype(np.float32)
    np.testing.assert_array_equal(run(engine, "r", 1, 5, 0, rows), run(uncut, "r", 1, 5, 0, rows))
    assert path.stat().st_blocks == n_blocks
    assert sorted((tmp_path / "segments").iterdir()) == files
    files[0].unlink()
    with pytest.raises(CallError, match=r"blk\.2\..* are not in"):
        open_engine(path, owns_path=True).layers.load(0, 3)


def test_loading_tells_what_it_has_read_and_stops_when_told(
    open_engine: OpenEngine, make_model: MakeModel
) -> None:
    path = make_model("llama")
    engine = open_engine(path)
    told: list[tuple[int, int]] = []
    engine.layers.load(1, 3, lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] == predict(engine.source, 4, [(1, 3)], engine.settings).weights_bytes
    assert told == sorted(told)
    n_before = n_mappings(path)

    def stop(_done: int, _total: int) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        engine.layers.load(3, 4, stop)
    assert engine.layers.ranges == ((1, 3),)
    assert n_mappings(path) == n_before


def test_weights_that_parts_share_are_in_memory_and_count_once(
    open_engine: OpenEngine, tmp_path: Path
) -> None:
    path = tmp_path / "guide.gguf"
    path.write_bytes(GUIDE.read_bytes())
    engine = open_engine(path)
    n_before = n_mappings(path)
    engine.layers.load(0, 12)
    run(engine, "old", 0, 12, 0, TOKENS)
    weights_bytes, before = engine.layers.weights_bytes, engine.memory
    rows = np.ones((4, engine.n_embd), np.float32)
    run(engine, "new", 4, 8, 0, rows)
    # The old segment stays for its request, with its KV.
    parts = predict(engine.source, 12, [(0, 4), (4, 8), (8, 12)], engine.settings)
    assert engine.layers.weights_bytes == weights_bytes
    assert engine.memory.weights_bytes == before.weights_bytes
    assert engine.memory.kv_bytes == before.kv_bytes + parts.kv_bytes == 2 * before.kv_bytes
    engine.release("old")
    assert engine.memory.kv_bytes == before.kv_bytes
    assert engine.memory.weights_bytes <= before.weights_bytes * 1.01
    assert all(segment.is_shared for segment in engine.layers.segments)
    assert n_mappings(path) == n_before + 1
    engine.release("new")
    engine.layers.unload(0, 12)
    assert n_mappings(path) == n_before


def test_parts_fit_beside_a_segment_where_only_their_kv_and_work_space_is_allowed(
    open_engine: OpenEngine,
) -> None:
    probe = open_engine(GUIDE)
    whole, parts = (
        predict(probe.source, 12, pieces, probe.settings) for pieces in ([(0, 12)], [(0, 6), (6, 12)])
    )
    needed = whole.total_bytes + parts.kv_bytes + parts.work_bytes
    rows = np.ones((4, probe.n_embd), np.float32)
    for max_bytes, fits in ((needed, True), (needed - 1, False)):
        engine = open_engine(GUIDE, max_bytes=max_bytes)
        engine.layers.load(0, 12)
        run(engine, "old", 0, 12, 0, TOKENS)
        if fits:
            run(engine, "new", 6, 12, 0, rows)
        else:
            with pytest.raises(CallError, match="are allowed"):
                run(engine, "new", 6, 12, 0, rows)
            assert layers_of(engine) == [(0, 12)]


def test_parts_of_many_requests_are_few(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(GUIDE)
    engine.layers.load(0, 12)
    expected = run(engine, "whole", 0, 12, 0, TOKENS)
    engine.release("whole")
    hidden, most = TOKENS, 0
    for layer in range(12):
        hidden = run(engine, f"part {layer}", layer, layer + 1, 0, hidden)
        engine.release(f"part {layer}")
        most = max(most, len(engine.layers.segments))
    np.testing.assert_array_equal(hidden, expected)
    assert most == 1 + PARTS_MAX
    # The first layers, which were asked for first, are one part again.
    assert layers_of(engine)[0] == (0, 4)
    assert list((tmp_path / "segments").iterdir()) == []
    np.testing.assert_array_equal(run(engine, "whole", 0, 12, 0, TOKENS), expected)


def test_parts_in_which_requests_run_stay(open_engine: OpenEngine) -> None:
    engine = open_engine(GUIDE, n_slots=12)
    engine.layers.load(0, 12)
    rows = np.ones((1, engine.n_embd), np.float32)
    for layer in range(PARTS_MAX):
        run(engine, f"r{layer}", layer, layer + 1, 0, rows)
    kept = layers_of(engine)
    with pytest.raises(CallError, match="there may be 9") as caught:
        run(engine, "more", 10, 11, 0, rows)
    assert caught.value.kind == "no_room"
    assert layers_of(engine) == kept
    for layer in range(PARTS_MAX):
        run(engine, f"r{layer}", layer, layer + 1, 1, rows)
    engine.release("r0")
    engine.release("r1")
    engine.release("r2")
    run(engine, "more", 10, 11, 0, rows)
    assert len(engine.layers.segments) == 1 + PARTS_MAX


def test_a_container_stays_as_it_is_while_parts_are_mapped_from_it(
    open_engine: OpenEngine, make_model: MakeModel, tmp_path: Path
) -> None:
    path = tmp_path / "container.gguf"
    path.write_bytes(make_model("llama").read_bytes())
    engine = open_engine(path, owns_path=True)
    engine.layers.load(0, 4)
    expected = run(engine, "whole", 0, 4, 0, TOKENS)
    engine.release("whole")
    n_blocks = path.stat().st_blocks
    np.testing.assert_array_equal(through(engine, "parts", [0, 1, 4], 0, TOKENS), expected)
    engine.layers.unload(0, 1)
    assert path.stat().st_blocks == n_blocks
    engine.layers.load(0, 1)
    engine.release("parts")
    np.testing.assert_array_equal(through(engine, "again", [0, 1, 4], 0, TOKENS), expected)


@pytest.mark.usefixtures("segment_files")
def test_a_libllama_that_does_not_tell_gets_segment_files(
    open_engine: OpenEngine, make_model: MakeModel, tmp_path: Path
) -> None:
    engine = open_engine(make_model("llama"))
    engine.layers.load(0, 4)
    expected = run(engine, "whole", 0, 4, 0, TOKENS)
    engine.release("whole")
    np.testing.assert_array_equal(through(engine, "parts", [0, 1, 4], 0, TOKENS), expected)
    assert len(list((tmp_path / "segments").iterdir())) == 2


def test_layers_that_libllama_does_not_map_get_a_segment_file(
    open_engine: OpenEngine, make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(make_model("llama"))
    engine.layers.load(1, 4)
    rows = np.ones((4, engine.n_embd), np.float32)
    expected = run(engine, "all", 1, 4, 0, rows)
    engine.release("all")
    monkeypatch.setattr("swarmllm_workers.operating_system.mappings", list)
    np.testing.assert_array_equal(through(engine, "parts", [1, 2, 4], 0, rows), expected)
    assert len(list((tmp_path / "segments").iterdir())) == 2


def test_a_part_for_which_there_is_no_memory_is_not_cut_to_a_file(
    open_engine: OpenEngine, make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> int:
        raise CallError("out_of_memory", "cannot map")

    engine = open_engine(make_model("llama"))
    monkeypatch.setattr(shared_weights, "map_or_fail", no_memory)
    with pytest.raises(CallError, match="cannot map"):
        engine.layers.load(1, 4)
    assert list((tmp_path / "segments").iterdir()) == []


def test_bytes_that_a_file_does_not_have_are_refused_before_they_are_mapped(
    make_model: MakeModel, tmp_path: Path, open_engine: OpenEngine
) -> None:
    engine = open_engine(make_model("llama"))
    assert engine.architecture is not None
    part = plan_part(engine.source, engine.architecture, 1, 2)
    short = tmp_path / "short.gguf"
    short.write_bytes(engine.source.path.read_bytes()[:-4096])
    places = {name: FilePlace(short, *place[1:]) for name, place in part.places.items()}
    last = max(places, key=lambda name: places[name].offset)
    places[last] = places[last]._replace(offset=short.stat().st_size - places[last].size_bytes + 1)
    with pytest.raises(CallError, match="is shorter than its tensors"):
        Stub(Part(part.header, part.size_bytes, places))
    with pytest.raises(CallError, match="cannot map the layers' files"):
        Stub(Part(part.header, part.size_bytes, {"x": FilePlace(tmp_path / "none", 0, 1)}))
    assert n_mappings(short) == 0
