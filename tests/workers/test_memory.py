"""Memory is predicted close to what libllama then takes, and what cannot fit is refused."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from deadlines import DEADLINE_S

from swarmllm.guide import GUIDE_PATH
from swarmllm_proto import ipc
from swarmllm_workers.engine import memory_dry_run
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.libllama import N_BATCH
from swarmllm_workers.engine.memory import Memory, available_bytes, estimate, predict, refuse_beside
from swarmllm_workers.engine.memory_dry_run import MemoryUse, dry_run
from swarmllm_workers.errors import CallError
from swarmllm_workers.kernels import interposing

from .blueprint import write
from .conftest import MakeModel
from .families import FAMILIES
from .test_batching import OpenRoom, open_room  # noqa: F401

# ruff: noqa: F811 (fixtures are imported)

needs_memory_calls = pytest.mark.skipif(
    interposing.find_library("memory_calls") is None, reason="not built here: memory_calls"
)

MEASURED = Path(__file__).with_name("process_memory.py")
SETTINGS = {
    "plain": EngineSettings(n_ctx=2048),
    "long": EngineSettings(n_ctx=8192, n_slots=2),
    "auto": EngineSettings(n_ctx=8192, flash_attention="auto"),
    "q8_0": EngineSettings(n_ctx=8192, kv_type="q8_0", flash_attention="on"),
}


def said(log: str, what: str) -> float:
    """MiB that libllama says it took, all segments together."""
    return sum(float(figure) for figure in re.findall(rf"{what} = +([\d.]+) MiB", log))


def uses_of(engine: Engine) -> list[MemoryUse]:
    """What the dry run of each segment has said."""
    source, settings = engine.source, engine.settings
    found = [dry_run(source, each.start, each.end, settings, N_BATCH) for each in engine.layers.segments]
    assert None not in found
    return found


def assert_close(engine: Engine, log: str) -> None:
    """What was predicted to what libllama says that it has taken: 3 % at most, or as much as it rounds. Of
    the rest of the work space it says nothing."""
    memory, uses = engine.memory, uses_of(engine)
    kv = said(log, "KV buffer size") + said(log, "RS buffer size")
    assert memory.kv_bytes / 2**20 == pytest.approx(kv, rel=0.03, abs=0.02 * len(uses))
    work = said(log, "compute buffer size") + said(log, "output buffer size")
    assert sum(use.buffer_bytes for use in uses) / 2**20 == pytest.approx(
        work, rel=0.03, abs=0.02 * len(uses)
    )
    rest = sum(use.compute_bytes + use.context_bytes for use in uses)
    assert memory.work_bytes == sum(use.buffer_bytes for use in uses) + rest
    assert all(use.compute_bytes > 0 for use in uses)


@needs_memory_calls
@pytest.mark.parametrize(
    ("family", "layers"), [("llama-3.1", (0, 4)), ("llama-3.1", (1, 3)), ("deepseek-v3", (0, 4))]
)
def test_prediction_is_what_the_process_takes(tmp_path: Path, family: str, layers: tuple[int, int]) -> None:
    """Once its cells are full: not only of what libllama speaks."""
    path = write(tmp_path / "model.gguf", FAMILIES[family])
    command = [sys.executable, MEASURED, path, tmp_path / "segments", *map(str, layers)]
    measured = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S)
    predicted, taken = json.loads(measured.stdout)
    assert predicted == pytest.approx(taken, rel=0.03, abs=3 * 2**20)


def test_graphs_that_may_have_many_operations_and_rows_that_replace_token_ids_count(tmp_path: Path) -> None:
    found = {}
    for family in ("llama-3.1", "qwen3-next", "qwen2.5-vl"):
        path = write(tmp_path / "model.gguf", FAMILIES[family])
        engine = Engine(path, tmp_path / "segments", SETTINGS["plain"])
        end = engine.n_layers
        start = max(1, engine.rule.cut_alignment)
        rows_bytes = N_BATCH * engine.n_embd * 4
        for layers in ((0, end), (start, end)):
            use = dry_run(engine.source, *layers, engine.settings, N_BATCH)
            assert use is not None
            found[family, layers[0] > 0] = use.context_bytes, rows_bytes
        engine.close()
    few_bytes, _ = found["llama-3.1", False]
    assert few_bytes < 2**20
    assert found["qwen3-next", False][0] == 20 * few_bytes
    for family, n_copies in (("llama-3.1", 4), ("qwen2.5-vl", 1)):
        context_bytes, rows_bytes = found[family, True]
        assert context_bytes == few_bytes + n_copies * rows_bytes


@needs_memory_calls
@pytest.mark.parametrize("n_ctx", [1024, 4096])
def test_plain_attention_computes_with_the_scores_of_all_heads_in_f16(tmp_path: Path, n_ctx: int) -> None:
    path = write(tmp_path / "model.gguf", FAMILIES["llama-3.1"])
    for attention in ("off", "auto"):
        engine = Engine(path, tmp_path / "segments", EngineSettings(n_ctx=n_ctx, flash_attention=attention))
        use = dry_run(engine.source, 0, 4, engine.settings, N_BATCH)
        assert use is not None
        scores = FAMILIES["llama-3.1"].keys["attention.head_count"] * n_ctx * N_BATCH * 2
        if attention == "off":
            assert use.compute_bytes == pytest.approx(scores, rel=0.01)
        else:
            assert 0 < use.compute_bytes < scores / 8
        engine.close()


@needs_memory_calls
@pytest.mark.parametrize("model", ["guide", "llama", "qwen3moe", "gemma2"])
@pytest.mark.parametrize("name", SETTINGS)
def test_prediction_is_what_libllama_takes(
    make_model: MakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, model: str, name: str
) -> None:
    path = GUIDE_PATH if model == "guide" else make_model(model)
    if name == "q8_0" and model != "guide":
        pytest.skip("heads of 16 have no blocks of 32")
    engine = Engine(path, tmp_path / "segments", SETTINGS[name])
    with caplog.at_level(logging.DEBUG):
        engine.layers.load(0, engine.n_layers)
    assert_close(engine, caplog.text)
    weights_bytes = sum(segment.weights_bytes for segment in engine.layers.segments)
    assert engine.memory.weights_bytes == pytest.approx(weights_bytes, rel=0.01)
    engine.close()


@needs_memory_calls
@pytest.mark.parametrize("name", FAMILIES)
def test_prediction_is_what_libllama_takes_of_any_architecture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Whole, and what is left without the first layers."""
    path = write(tmp_path / "model.gguf", FAMILIES[name])
    for ahead in (False, True):
        caplog.clear()
        engine = Engine(path, tmp_path / "segments", SETTINGS["long"])
        start = engine.rule.cut_alignment if ahead else 0
        with caplog.at_level(logging.DEBUG):
            engine.layers.load(start, engine.n_layers)
        assert engine.memory.work_bytes > 0
        assert_close(engine, caplog.text)
        engine.close()


def test_what_libllama_does_not_say_is_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(GUIDE_PATH, tmp_path / "segments", SETTINGS["plain"])
    known = predict(engine.source, 12, [(0, 12)], engine.settings)

    def refuse(*_: object, **__: object) -> None:
        raise CallError("bad_model", "not this one")

    monkeypatch.setattr(memory_dry_run, "Model", refuse)
    other = replace(engine.settings, n_slots=3)
    estimated = predict(engine.source, 12, [(0, 12)], other)
    assert estimated == estimate(engine.source, 12, [(0, 12)], other)
    assert estimated.kv_bytes == pytest.approx(known.kv_bytes, rel=0.01)
    assert known.work_bytes <= estimated.work_bytes <= 2 * known.work_bytes + 4 * 2**20
    assert predict(engine.source, 12, [(0, 12)], engine.settings) == known, "it is asked once"
    engine.close()


def test_segments_add_up_to_the_model(tmp_path: Path) -> None:
    engine = Engine(GUIDE_PATH, tmp_path / "segments", SETTINGS["plain"])
    whole = predict(engine.source, 12, [(0, 12)], engine.settings)
    parts = predict(engine.source, 12, [(0, 5), (5, 12)], engine.settings)
    assert parts.kv_bytes == whole.kv_bytes
    embedding = engine.source.tensors["token_embd.weight"].size_bytes  # its rows are read from the file
    assert whole.weights_bytes - parts.weights_bytes == pytest.approx(embedding, abs=4096)
    assert parts.work_bytes > whole.work_bytes
    engine.close()


def test_layers_beyond_the_limit_are_refused_with_numbers_and_fewer_load(open_room: OpenRoom) -> None:
    room = open_room(GUIDE_PATH, n_ctx=2048, max_bytes=40 * 2**20)
    room.call(ipc.Load, start=0, end=12)
    error = next(m for m, _ in room.sent if isinstance(m, ipc.Error))
    assert error.kind == "out_of_memory"
    assert re.search(
        r"layers 0:12 of .* would take [\d.]+ MiB \(weights [\d.]+ MiB, keys and values 12.0 MiB, work space "
        r"[\d.]+ MiB\), and 40.0 MiB are allowed \(resources.max_model_gib\)",
        error.message,
    )
    room.call(ipc.Load, start=0, end=2)
    loaded = room.sent[-1][0]
    assert isinstance(loaded, ipc.Loaded)
    assert loaded.ranges == ((0, 2),)
    assert loaded.kv_bytes == 2 * 2**20
    room.call(ipc.Load, start=2, end=12)
    assert isinstance(room.sent[-1][0], ipc.Error)


def test_mapped_weights_are_not_free_though_linux_counts_them_as_available(
    open_room: OpenRoom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a load of 3.25 GiB, MemAvailable had grown: pages of files that are mapped count."""
    room = open_room(GUIDE_PATH, n_ctx=256)
    engine = Engine(GUIDE_PATH, tmp_path / "segments", EngineSettings(n_ctx=256))

    def needed_bytes(start: int, end: int) -> int:
        return engine.footprint.predicted([(start, end)]).total_bytes

    available = needed_bytes(0, 8) + 2**20
    monkeypatch.setattr("swarmllm_workers.engine.memory.available_bytes", lambda: available)
    # Another worker's: the same room cannot be given twice.
    room.call(ipc.Load, start=0, end=8, mapped_beside_bytes=2 * 2**20)
    refused = next(m for m, _ in room.sent if isinstance(m, ipc.Error))
    assert refused.kind == "out_of_memory"
    room.call(ipc.Load, start=0, end=8)
    loaded = room.sent[-1][0]
    assert isinstance(loaded, ipc.Loaded)
    assert loaded.mapped_bytes == pytest.approx(loaded.weights_bytes, rel=0.02)
    # And what this worker holds itself: the pages of eight layers are not free for four more.
    available = needed_bytes(8, 12) + loaded.mapped_bytes - 2**20
    room.call(ipc.Load, start=8, end=12)
    error = room.sent[-1][0]
    assert isinstance(error, ipc.Error)
    assert error.kind == "out_of_memory"
    available += 2 * 2**20
    room.call(ipc.Load, start=8, end=12)
    assert isinstance(room.sent[-1][0], ipc.Loaded)
    engine.close()


def test_what_is_copied_or_locked_counts_as_taken_by_the_system_itself(tmp_path: Path) -> None:
    for settings in (EngineSettings(n_ctx=256, use_mmap=False), EngineSettings(n_ctx=256, use_mlock=True)):
        engine = Engine(GUIDE_PATH, tmp_path / "segments", settings)
        engine.layers.load(0, 2)
        assert engine.memory.mapped_bytes == 0
        engine.close()


def test_what_leaves_makes_room_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmllm_workers.engine.memory.available_bytes", lambda: 1000)
    held = Memory(600, 100, 50, mapped_bytes=600)
    needed, settings = Memory(900, 100, 50), EngineSettings()
    with pytest.raises(CallError):
        refuse_beside(needed, "x", held, Memory(), settings)
    with pytest.raises(CallError):
        refuse_beside(needed, "x", held, held, settings, mapped_beside_bytes=200)
    # 1000 are available, of which the mapped ones are in use until they leave, and 150 more come back.
    refuse_beside(needed, "x", held, held, settings, mapped_beside_bytes=100)


def test_context_that_no_machine_has_is_refused_before_anything_is_reserved(open_room: OpenRoom) -> None:
    room = open_room(GUIDE_PATH, n_ctx=2**24)
    room.call(ipc.Load, start=0, end=12)
    error = next(m for m, _ in room.sent if isinstance(m, ipc.Error))
    assert error.kind == "out_of_memory"
    assert "are available" in error.message


def write_all(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 600 kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 2**60),
        (MEMINFO, 600 * 1024),
        (
            MEMINFO
            | {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "90000\n",
                "sys/fs/cgroup/a/memory.max": "100000\n",
                "sys/fs/cgroup/a/memory.current": "90000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 3000\nactive_file 2000\n",
            },
            15000,
        ),
        (
            MEMINFO
            | {
                "proc/self/cgroup": "3:cpu:/x\n2:memory:/x\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "70000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "90000\n",
            },
            0,
        ),
    ],
    ids=["nobody says", "machine", "version 2, the parent's limit", "version 1 in a container, used up"],
)
def test_available_is_the_least_of_machine_and_control_groups(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    assert available_bytes(write_all(tmp_path, files)) == expected


def test_memory_adds_up() -> None:
    assert (Memory(1, 2, 3) + Memory(10, 20, 30)).total_bytes == 66
