"""The models that benches run, by the name that `--model` takes: the bundled one, and random ones of real
shapes, which are written once, into `bench/cache`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.common.quantised_models import FILE_TYPES, SEVEN_BILLION, SIX_HUNDRED_MILLION, write_model
from bench.common.shapes import HALF_BILLION, Shape, build
from swarmllm.guide import GUIDE_PATH

CACHE: Final = Path(__file__).parents[1] / "cache"
SHAPES: Final = {"0.6b": SIX_HUNDRED_MILLION, "7b": SEVEN_BILLION}
MODELS: Final = ("guide", "0.5b", *(f"{shape}-{file_type}" for shape in SHAPES for file_type in FILE_TYPES))
"""0.5b is in Q8_0."""


@dataclass(frozen=True)
class BenchModel:
    gguf: Path
    n_layers: int


def bench_model(name: str) -> BenchModel:
    """One of MODELS."""
    if name == "guide":
        return BenchModel(GUIDE_PATH, 12)
    if name == "0.5b":
        return BenchModel(half_billion(), HALF_BILLION.n_layers)
    shape_name, _, file_type = name.partition("-")
    return _random(name, SHAPES[shape_name], file_type)


def half_billion() -> Path:
    path = CACHE / "half-billion-q8_0.gguf"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        build(HALF_BILLION, path)
    return path


def _random(name: str, shape: Shape, file_type: str) -> BenchModel:
    path = CACHE / f"{name}.gguf"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_model(shape, CACHE, FILE_TYPES[file_type], stem=name)
    return BenchModel(path, shape.n_layers)
