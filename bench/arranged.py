"""What a mixture of experts takes with matrices as the file has them, and where ggml rearranges them.

    python -m bench.arranged --layers 6

A random model of Qwen3-30B-A3B's shape in Q4_K_M, with fewer layers and a small vocabulary. For each way, in
a process of its own: the layers but the first and the last are loaded, rows run through them, and while that
request has rows in them two layers are cut out for another one. Times are those of the processor, one thread.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from bench.common.quantised_models import THIRTY_BILLION_EXPERTS, write_model
from swarmllm_proto.ipc.base import KernelMode
from swarmllm_workers.engine.arranged_weights import arranged
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.segment import Span
from swarmllm_workers.kernels import small_batches

MIB: Final = 2**20
N_ROWS: Final = (1, 4, 16, 64)
N_CTX: Final = 256
WAYS: Final[dict[str, KernelMode]] = {"as in the file": "auto", "rearranged": "ggml"}
HEAD: Final = (
    "| matrices | load, s | private, MiB | arranged, MiB |"
    + "".join(f" {n} rows, ms |" for n in N_ROWS)
    + " cut beside a request, s | private, MiB more | keys, values, work space, MiB more |"
)


def private_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def measure(path: Path, n_layers: int, way: str) -> str:
    small_batches.use(WAYS[way])
    settings = EngineSettings(n_ctx=N_CTX, n_slots=4, n_threads=1)
    engine = Engine(path, path.parent / "segments", settings)
    before, began_s = private_bytes(), time.process_time()
    engine.layers.load(1, n_layers - 1)
    cells = [f"{time.process_time() - began_s:.2f}", f"{(private_bytes() - before) / MIB:.0f}"]
    cells.append(f"{arranged.size_bytes / MIB:.0f}")
    rows = np.random.default_rng(0).standard_normal((N_ROWS[-1], engine.n_embd)).astype(np.float32)
    route, slot, position = engine.route("old", 1, n_layers - 1), engine.take_slot("old"), 0
    for n in N_ROWS:
        taken_s = []
        for _ in range(8 if n == 1 else 2):
            began_s = time.process_time()
            engine.run(route, [Span(slot, position, rows[:n], "logits")])
            taken_s.append(time.process_time() - began_s)
            position += n
        cells.append(f"{1000 * min(taken_s):.0f}")
    before, began_s = private_bytes(), time.process_time()
    known = engine.memory
    route = engine.route("new", 2, n_layers - 2)
    engine.run(route, [Span(engine.take_slot("new"), 0, rows[:1], "logits")])
    more = engine.memory.kv_bytes + engine.memory.work_bytes - known.kv_bytes - known.work_bytes
    cells += [f"{time.process_time() - began_s:.2f}", f"{(private_bytes() - before) / MIB:.0f}"]
    cells.append(f"{more / MIB:.0f}")
    engine.close()
    return f"| {way} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="for the file, deleted at the end  [default: a new one]")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.way is not None:
        print(measure(chosen.file, chosen.layers, chosen.way))
        return
    shape = replace(THIRTY_BILLION_EXPERTS, n_layers=chosen.layers, n_vocab=32000)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        (path,) = write_model(shape, Path(name))
        print(HEAD + "\n|" + "---|" * (HEAD.count("|") - 1), flush=True)
        for way in WAYS:
            command = [sys.executable, "-m", "bench.arranged", "--layers", str(chosen.layers)]
            subprocess.run(
                [*command, "--way", way, "--file", str(path)], check=True, stderr=subprocess.DEVNULL
            )


if __name__ == "__main__":
    main()
