"""Keys, values and work space that layers of many architectures take, against what was predicted.

    python -m bench.memory_by_shape

Random models of four layers or so, 1,024 wide, of the kinds that differ in what they keep: each is loaded in
a process of its own, whole or in part, and rows fill its context in batches of 512, the last one of all
slots. What it takes is the
private memory that the kernel counts afterwards, less what the process had before loading; weights are
pages of the file. What was predicted is what a load is refused by. Ends with 1 where the two differ by more
than 3 % and by more than FLOOR_BYTES; what an exact request takes beside the layers is an estimate, and only
not to be less.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bench.common.figures import RESULTS, machine
from swarmllm_proto.ipc import FlashAttention, KvType
from swarmllm_proto.limits import EXACT_ROWS
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.segment import Span, Want
from tests.workers.blueprint import Family, write
from tests.workers.families import FAMILIES

MIB = 2**20
FLOOR_BYTES = 3 * MIB
"""Of what the kernel gives in huge pages, and of what a graph leaves untouched of its buffer."""
TOLERANCE = 0.03
BATCH = 512
SIZES: dict[str, Any] = {
    "context_length": 32768,
    "embedding_length": 1024,
    "feed_forward_length": 2816,
    "attention.head_count": 16,
    "attention.head_count_kv": 4,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "rope.dimension_count": 64,
    "attention.sliding_window": 1024,
    "attention.q_lora_rank": 768,
    "expert_count": 16,
    "expert_used_count": 4,
    "expert_feed_forward_length": 512,
    "expert_shared_feed_forward_length": 512,
    "ssm.inner_size": 2048,
    "ssm.state_size": 128,
    "ssm.time_step_rank": 16,
    "kda.head_dim": 64,
}
LATENT: dict[str, Any] = {
    "attention.kv_lora_rank": 512,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "attention.head_count_kv": 1,
}
"""Of keys and values kept in common (MLA), as DeepSeek has them."""
SECTIONS = {"rope.dimension_sections": [16, 8, 8, 0]}
SHAPES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama, grouped heads": ("llama-3.1", 4, {}),
    "qwen3, mixture of experts": ("qwen3-moe", 4, {}),
    "deepseek2, latent heads": ("deepseek-v3", 4, {}),
    "gemma2, sliding window": ("gemma-2", 4, {}),
    "gemma3, sliding window": ("gemma-3", 7, {}),
    "cohere2, sliding window": ("command-r7b", 8, {}),
    "gpt-oss, window and experts": ("gpt-oss", 4, {}),
    "qwen2vl, several positions": ("qwen2.5-vl", 4, SECTIONS),
    "mamba2, states": ("mamba-2", 4, {}),
    "falcon-h1, states beside heads": ("falcon-h1", 4, {}),
    "lfm2, convolutions and heads": ("lfm2", 6, {}),
    "qwen3-next, states and heads": ("qwen3-next", 8, {}),
}
"""What it is called here: a family of the tests, its layers, and metadata that it has beyond SIZES."""


@dataclass(frozen=True)
class Case:
    layers: Literal["whole", "first", "middle", "last"]
    n_ctx: int
    n_slots: int
    kv_type: KvType
    flash_attention: FlashAttention
    n_exact: int = 0
    """Rows of an exact request beside the layers, of which alone the figures are then."""


CASES = (
    Case("whole", 1024, 8, "f16", "auto"),
    Case("whole", 2048, 2, "f16", "off"),
    Case("whole", 2048, 4, "q8_0", "on"),
    Case("first", 1024, 8, "f16", "off"),
    Case("middle", 2048, 8, "f16", "auto"),
    Case("last", 1024, 2, "q8_0", "on"),
    Case("middle", 2048, 8, "f16", "auto", n_exact=2048),
)


@dataclass(frozen=True)
class Found:
    start: int
    end: int
    predicted_bytes: int
    taken_bytes: int
    is_estimate: bool

    @property
    def is_close(self) -> bool:
        off_bytes = self.predicted_bytes - self.taken_bytes
        if self.is_estimate and off_bytes > 0:
            return True
        return abs(off_bytes) <= max(FLOOR_BYTES, TOLERANCE * self.taken_bytes)


def family(name: str, n_layers: int, keys: dict[str, Any]) -> Family:
    """A family of the tests with the sizes of this bench."""
    small = FAMILIES[name]
    sizes = SIZES | (LATENT if "attention.kv_lora_rank" in small.keys else {})
    larger = {key: _larger(key, value, sizes) if key in sizes else value for key, value in small.keys.items()}
    return replace(small, keys=larger | keys, n_layers=n_layers)


def _larger(key: str, value: Any, sizes: dict[str, Any]) -> Any:
    """What a family has none of, it has none of here, in all layers or in some."""
    if isinstance(value, list):
        return [sizes[key] if each else 0 for each in value]
    return sizes[key] if value else 0


def private_bytes() -> int:
    """Of this process, after what nobody uses was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def layers_of(engine: Engine, which: str) -> tuple[int, int] | None:
    """None: it runs whole only, or has no such cut."""
    unit, n_layers = engine.rule.cut_alignment, engine.n_layers
    if which == "whole":
        return 0, n_layers
    if not unit or 2 * unit > n_layers:
        return None
    if which == "middle":
        return (unit, n_layers - unit) if n_layers >= 3 * unit else None
    return (0, unit) if which == "first" else (unit, n_layers)


def measure(path: Path, case: Case, folder: Path) -> Found | None:
    settings = EngineSettings(
        n_ctx=case.n_ctx,
        n_slots=case.n_slots,
        n_threads=2,
        kv_type=case.kv_type,
        flash_attention=case.flash_attention,
    )
    engine = Engine(path, folder, settings)
    layers = layers_of(engine, case.layers)
    if layers is None:
        return None
    engine.footprint.predicted([layers])
    if case.n_exact:
        engine.layers.load(*layers)
        fill(engine, layers, replace(case, n_exact=0))
        for request_id in requests(case.n_slots):
            engine.release(request_id)
        before = private_bytes()
        predicted = engine.footprint.apart([layers], case.n_exact)
        engine.set_apart("0", case.n_exact)
    else:
        before = private_bytes()
        engine.layers.load(*layers)
        predicted = engine.memory
    fill(engine, layers, case)
    copied_bytes = 0 if case.n_exact else engine.memory.weights_bytes - engine.memory.mapped_bytes
    taken_bytes = private_bytes() - before - copied_bytes
    return Found(*layers, predicted.kv_bytes + predicted.work_bytes, taken_bytes, bool(case.n_exact))


def fill(engine: Engine, layers: tuple[int, int], case: Case) -> None:
    """With one slot's rows, and in the last batch those of all slots."""
    rng = np.random.default_rng(0)
    route = engine.route("0", *layers)
    slots = [engine.take_slot(each) for each in requests(1 if case.n_exact else case.n_slots)]
    n_rows, n_batch = (case.n_exact, EXACT_ROWS) if case.n_exact else (case.n_ctx, BATCH)
    want: Want = "logits" if layers[1] == engine.n_layers else "hidden"

    def rows(n: int) -> np.ndarray:
        if layers[0] == 0:
            return rng.integers(0, 250, n).astype(np.int32)
        return rng.standard_normal((n, engine.n_embd), np.float32)

    last = n_rows - n_batch
    for position in range(0, last, n_batch):
        engine.run(route, [Span(slots[0], position, rows(n_batch), want)])
    n_each = n_batch // len(slots)
    engine.run(route, [Span(slot, 0 if n else last, rows(n_each), want) for n, slot in enumerate(slots)])


def requests(n: int) -> list[str]:
    return [str(number) for number in range(n)]


def measure_apart(path: Path, at: int) -> Found | None:
    """In a process of its own: what one leaves behind another one would find."""
    command = [sys.executable, "-m", "bench.memory_by_shape", "--one", str(path), str(at)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    found = json.loads(said.splitlines()[-1])
    return None if found is None else Found(**found)


def row(shape: str, case: Case, found: Found) -> str:
    off_bytes = found.predicted_bytes - found.taken_bytes
    cells = (
        shape,
        f"{found.start}:{found.end}" + (f", {case.n_exact} rows, exact" if case.n_exact else ""),
        f"{case.n_ctx:,}",
        str(case.n_slots),
        f"{case.kv_type}, {case.flash_attention}",
        f"{found.predicted_bytes / MIB:.1f}",
        f"{found.taken_bytes / MIB:.1f}",
        f"{100 * off_bytes / found.taken_bytes:+.1f} %",
        "" if found.is_close else "no",
    )
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "| model | layers | cells | slots | keys and values, fused attention | predicted, MiB | taken, MiB"
    " | off | within 3 % |\n|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="shapes whose name has this")
    parser.add_argument("--one", nargs=2, metavar=("FILE", "CASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with tempfile.TemporaryDirectory() as name:
            found = measure(Path(options.one[0]), CASES[int(options.one[1])], Path(name))
        print(json.dumps(found and asdict(found)))
        return
    lines, is_close = [HEAD], True
    print(HEAD, flush=True)
    for shape, (name, n_layers, keys) in SHAPES.items():
        if options.only not in shape:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder) / "model.gguf", family(name, n_layers, keys))
            for at, case in enumerate(CASES):
                if (one := measure_apart(path, at)) is not None:
                    lines.append(row(shape, case, one))
                    is_close = is_close and one.is_close
                    print(lines[-1], flush=True)
    if not options.only:
        command = "python -m bench.memory_by_shape"
        here = ", ".join(f"{name} {value}" for name, value in machine().items())
        text = f"`{command}` ({here})\n\n" + "\n".join(lines) + "\n"
        (RESULTS / "memory-by-shape.md").write_text(text)
    sys.exit(not is_close)


if __name__ == "__main__":
    main()
