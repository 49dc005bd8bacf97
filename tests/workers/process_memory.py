"""What layers take of the memory of a fresh process: `python process_memory.py MODEL FOLDER START END`.

Prints the bytes that were predicted and those that the kernel counts once all cells are full, as JSON. In a
process that has run other tests, what these left to the allocator counts, too.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path

import numpy as np

from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.libllama import N_BATCH
from swarmllm_workers.engine.segment import Span

N_CTX = 8192


def private_bytes() -> int:
    """Of this process, after what nobody uses was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def measure(path: Path, folder: Path, start: int, end: int) -> tuple[int, int]:
    """(predicted, taken)"""
    engine = Engine(path, folder, EngineSettings(n_ctx=N_CTX, n_slots=2))
    engine.footprint.predicted([(start, end)])
    before = private_bytes()
    engine.layers.load(start, end)
    route, slot = engine.route("r", start, end), engine.take_slot("r")
    rows = np.zeros(N_BATCH, np.int32) if start == 0 else np.zeros((N_BATCH, engine.n_embd), np.float32)
    for position in range(0, N_CTX, N_BATCH):
        engine.run(route, [Span(slot, position, rows, "none")])
    taken = private_bytes() - before
    predicted = engine.memory.kv_bytes + engine.memory.work_bytes
    engine.close()
    return predicted, taken


if __name__ == "__main__":
    model, segments, first, last = sys.argv[1:]
    print(json.dumps(measure(Path(model), Path(segments), int(first), int(last))))
