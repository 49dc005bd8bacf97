"""How far apart rows are that honest nodes compute from the same input, and how far those of cheats.

    python -m bench.checked_rows [MODEL.gguf]

Prints, for a segment in the middle of the model (the guide by default), the distance of
`swarmllm.pipeline.check.verdict` per stretch of 32 rows: against rows that were computed like a request's,
the prompt in batches of 128 and the answer row by row. `swarmllm.pipeline.check.thresholds` lie between them.
"""

from __future__ import annotations

import swarmllm_workers  # noqa: F401  isort: skip  (its kernels stand before libllama)

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import llama_cpp
import numpy as np
import trio

from swarmllm.guide import GUIDE_PATH
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.check.recompute import batches
from swarmllm.pipeline.check.sampling import STRETCH_ROWS
from swarmllm.pipeline.check.thresholds import OTHER_KV, SAME_KV, TOLERANCE
from swarmllm.pipeline.check.verdict import distance
from swarmllm.workerpool import ModelFile, WorkerPool, WorkerSettings
from swarmllm_proto.tensors import Tensor

N_PROMPT, N_ROWS = 160, 256
TEXTS: Final = ("README.md", "docs/swarm.md", "docs/architecture.md", "docs/scheduling.md")
HONEST: Final[Mapping[str, Mapping[str, Any]]] = {
    "the same settings": {},
    "ggml's kernels": {"kernels": "ggml"},
    "two threads": {"n_threads": 2},
    "plain attention": {"flash_attention": "off"},
    "KV in Q8_0": {"kv_type": "q8_0"},
}
QUANTISATIONS: Final = {
    "Q6_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
    "Q5_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_0,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}


def named_folder(text: str) -> tuple[str, Path]:
    """NAME=FOLDER."""
    name, _, folder = text.partition("=")
    if not (Path(folder) / "libggml-cpu.so.0").is_file():
        raise ValueError(f"no libggml-cpu.so.0 in {folder}")
    return name, Path(folder).resolve()


@contextmanager
def libraries(folder: Path) -> Iterator[None]:
    """Workers that start meanwhile have the libggml-cpu of that folder."""
    before = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = str(folder)
    try:
        yield
    finally:
        del os.environ["LD_LIBRARY_PATH"]
        if before is not None:
            os.environ["LD_LIBRARY_PATH"] = before


class Bench:
    def __init__(self, path: Path, folder: Path) -> None:
        self._folder = folder
        self._catalogue = Catalogue(folder / "models.sqlite")
        self._n = 0
        self.entry = self._catalogue.ensure(path, "checked")
        self._texts = [Path(name).read_text(encoding="utf-8")[:4000] for name in TEXTS]

    def quantised(self, path: Path, name: str, kind: int) -> Path:
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype, options.allow_requantize, options.pure = kind, True, True
        to = self._folder / f"{name}.gguf"
        if llama_cpp.llama_model_quantize(str(path).encode(), str(to).encode(), ctypes.byref(options)):
            raise RuntimeError(f"{name} cannot be made")
        return to

    async def computed(
        self,
        inputs: Sequence[Tensor],
        ranges: Sequence[LayerRange],
        parts: Sequence[slice],
        path: Path | None = None,
        **settings: Any,
    ) -> list[Tensor]:
        """Of each input, one range after the other."""
        self._n += 1
        entry = self.entry if path is None else self._catalogue.ensure(path, path.stem.lower())
        model = ModelFile(entry.model_id, entry.path)
        options = WorkerSettings(cache_dir=self._folder / "cache", n_ctx=1024, n_slots=2, **settings)
        pool = WorkerPool(options, self._folder / f"run{self._n}")
        results = []
        async with pool.running():
            for layers in ranges:
                await pool.load(model, layers)
            for rows in inputs:
                for layers in ranges:
                    rows = await _forwarded(pool, model, layers, rows, parts)
                results.append(rows)
        return results

    async def tokens(self) -> list[Tensor]:
        self._n += 1
        model = ModelFile(self.entry.model_id, self.entry.path)
        pool = WorkerPool(WorkerSettings(cache_dir=self._folder / "cache"), self._folder / f"run{self._n}")
        async with pool.running():
            return [(await pool.tokenize(model, text=text))[:N_ROWS] for text in self._texts]


async def _forwarded(
    pool: WorkerPool, model: ModelFile, layers: LayerRange, rows: Tensor, parts: Sequence[slice]
) -> Tensor:
    results = []
    for part in parts:
        result = await pool.forward(
            model,
            request_id="checked",
            layers=layers,
            position=part.start,
            tensor=rows[part],
            want="hidden",
            n_prompt_tokens=N_PROMPT,
        )
        assert result.tensor is not None
        results.append(np.array(result.tensor))
    await pool.cancel(model.model_id, "checked")
    return np.concatenate(results)


def distances(base: Sequence[Tensor], other: Sequence[Tensor], came_in: Sequence[Tensor]) -> list[float]:
    return [
        distance(
            expected[at : at + STRETCH_ROWS], rows[at : at + STRETCH_ROWS], before[at : at + STRETCH_ROWS]
        )
        for expected, rows, before in zip(base, other, came_in, strict=True)
        for at in range(0, N_ROWS, STRETCH_ROWS)
    ]


def single_rows() -> list[slice]:
    return [*batches(N_PROMPT, N_PROMPT, 128), *(slice(at, at + 1) for at in range(N_PROMPT, N_ROWS))]


def sent_instead(base: Sequence[Tensor], came_in: Sequence[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    drawn = np.random.default_rng(1)
    yield "zeros", [np.zeros_like(rows) for rows in base]
    yield "passed through", list(came_in)
    yield "the row before", [np.roll(rows, 1, axis=0) for rows in base]
    for part in (0.1, 0.05, 0.01, 0.001):
        noisy = [rows * (1 + part * drawn.standard_normal(rows.shape)) for rows in base]
        yield f"noise of {100 * part:g} %", [rows.astype(np.float32) for rows in noisy]


async def main(path: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(path, Path(name))
        n_layers = bench.entry.manifest.n_layers
        third = LayerRange(n_layers // 3, 2 * n_layers // 3)
        like_a_request, as_checked = single_rows(), list(batches(N_ROWS, N_PROMPT, 128))
        came_in = await bench.computed(await bench.tokens(), [LayerRange(0, third.start)], like_a_request)
        base = await bench.computed(came_in, [third], like_a_request)

        def show(what: str, other: Sequence[Tensor]) -> None:
            found = distances(base, other, came_in)
            equal = sum(a.tobytes() == b.tobytes() for a, b in zip(base, other, strict=True))
            beyond = [limit for limit in (SAME_KV.least, OTHER_KV.least, TOLERANCE) if min(found) > limit]
            verdict = f"beyond {max(beyond)}" if beyond else "right"
            print(f"| {what} | {min(found):.4f} | {max(found):.4f} | {equal} of {len(base)} | {verdict} |")

        print(f"{path.name}, layers {third}, {len(base)} texts of {N_ROWS} rows\n")
        print("| rows | least | most | texts with equal bits | every stretch |\n|---|---|---|---|---|")
        for what, settings in HONEST.items():
            show(what, await bench.computed(came_in, [third], as_checked, **settings))
        small = list(batches(N_ROWS, 0, 32))
        show("batches of 32", await bench.computed(came_in, [third], small))
        for what, rows in sent_instead(base, came_in):
            show(what, rows)
        layers = [LayerRange(at, at + 1) for at in range(third.start, third.end)]
        for left_out in range(len(layers)):
            kept = layers[:left_out] + layers[left_out + 1 :]
            show(f"without layer {third.start + left_out}", await bench.computed(came_in, kept, as_checked))
        show("without the last two layers", await bench.computed(came_in, layers[:-2], as_checked))
        for what, kind in QUANTISATIONS.items():
            other = bench.quantised(path, what, kind)
            show(f"{what} of it", await bench.computed(came_in, [third], as_checked, other))


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]) if len(sys.argv) > 1 else GUIDE_PATH)
