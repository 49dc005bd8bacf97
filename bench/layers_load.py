"""How long the second half of a model takes to load from one's own file, and what disk that takes.

    python -m bench.layers_load

A random model of Llama-2-7B's shape with 16 layers in Q4_K_M (2.1 GB) is written once. Its layers 8:16 are
loaded straight from the file and by way of a segment file, each when the page cache has nothing of the file
(`cold`) and when it has all of it, as after a hash (`warm`), beside a plain read of the same bytes into one
buffer. The worker has opened the model, and its settings are those of a daemon: 4,096 cells, eight slots.
`filled in` is what having memory behind all cells takes after the load. Each figure is the median of
--rounds, `to read` that of a round's load over its read. Then rows run through the layers, one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.common.quantised_models import SEVEN_BILLION, write_model
from swarmllm_workers.engine import shared_weights
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.operation import complete
from swarmllm_workers.engine.segment import Span

SHAPE = replace(SEVEN_BILLION, n_layers=16)
SETTINGS = EngineSettings(n_ctx=4096, n_slots=8, n_threads=2, flash_attention="auto")
BUFFER_BYTES = 4 * 2**20
N_STEPS = 16
KEYS = ("s", "cpu_s", "filled_s", "disk", "step_ms", "to_read")


def forget(path: Path) -> None:
    """Of what the page cache has of a file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(path: Path, offset: int, size: int) -> None:
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with path.open("rb") as file:
        for at in range(offset, offset + size, BUFFER_BYTES):
            os.preadv(file.fileno(), [buffer[: offset + size - at]], at)


def stretch_of(engine: Engine, start: int) -> tuple[int, int]:
    """Where the bytes of the layers from `start` on and of the head lie, and how many they are."""
    wanted = [
        tensor
        for tensor in engine.source.tensors.values()
        if tensor.name.startswith("output") or tensor.name in layers_from(engine, start)
    ]
    first = min(tensor.offset for tensor in wanted)
    return first, max(tensor.offset + tensor.size_bytes for tensor in wanted) - first


def layers_from(engine: Engine, start: int) -> Iterable[str]:
    return {
        name for name in engine.source.tensors if name.startswith("blk.") and int(name.split(".")[1]) >= start
    }


def load(path: Path, folder: Path, way: str) -> tuple[float, float, float, int, float]:
    """Seconds, those of the processor, and of filling in cells; bytes of disk that are new, and milliseconds
    of a step."""
    before = shared_weights.is_supported
    if way == "segment file":
        shared_weights.is_supported = lambda: False  # type: ignore[assignment]
    engine = Engine(path, folder, SETTINGS)
    try:
        half = SHAPE.n_layers // 2
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        engine.layers.load(half, SHAPE.n_layers)
        taken_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        start_s = time.perf_counter()
        complete(engine.layers.filling())
        filled_s = time.perf_counter() - start_s
        route = engine.route("r", half, SHAPE.n_layers)
        slot = engine.take_slot("r")
        row = np.random.default_rng(0).standard_normal((1, engine.n_embd)).astype(np.float32)
        steps_s = []
        for position in range(N_STEPS):
            began_s = time.perf_counter()
            engine.run(route, [Span(slot, position, row, "logits")])
            steps_s.append(time.perf_counter() - began_s)
        n_bytes = sum(file.stat().st_blocks * 512 for file in folder.iterdir())
        return taken_s, cpu_s, filled_s, n_bytes, 1000 * statistics.median(steps_s)
    finally:
        engine.close()
        shared_weights.is_supported = before
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write every value as JSON")
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="layers-load-", dir=Path.cwd()) as name:
        (path,) = write_model(SHAPE, Path(name))
        folder = Path(name) / "segments"
        probe = Engine(path, folder, EngineSettings())
        offset, size = stretch_of(probe, SHAPE.n_layers // 2)
        probe.close()
        for _ in range(options.rounds):
            for cache in ("cold", "warm"):
                for way in ("read", "straight", "segment file"):
                    forget(path)
                    if cache == "warm":
                        read(path, 0, path.stat().st_size)
                    values = found.setdefault(f"{way}, {cache}", {key: [] for key in KEYS})
                    if way == "read":
                        start_s, start_cpu_s = time.perf_counter(), time.process_time()
                        read(path, offset, size)
                        values["s"].append(time.perf_counter() - start_s)
                        values["cpu_s"].append(time.process_time() - start_cpu_s)
                        continue
                    for key, value in zip(KEYS, load(path, folder, way), strict=False):
                        values[key].append(value)
                    values["to_read"].append(values["s"][-1] / found[f"read, {cache}"]["s"][-1])
    print(
        f"{size / 1e9:.2f} GB\n| what | s | to read | s of processor | filled in, s | new on the disk, GB |"
        " ms per step |\n|---|---|---|---|---|---|---|"
    )
    for what, values in found.items():
        cells = [
            f"{statistics.median(values[key]) / by:.2f}" if values[key] else ""
            for key, by in (
                ("s", 1),
                ("to_read", 1),
                ("cpu_s", 1),
                ("filled_s", 1),
                ("disk", 1e9),
                ("step_ms", 1),
            )
        ]
        print(f"| {what} | " + " | ".join(cells) + " |")
    if options.out is not None:
        options.out.write_text(json.dumps({"bytes": size, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
