"""Every quantisation passes through a cut as it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from swarmllm_workers.engine import shared_weights
from swarmllm_workers.gguf_file import GgufFile

from .factory import QUANTISATIONS, Spec, build
from .test_exactness import chain_logits, open_engine, steps, tokens_for, uncut_logits

MANY = Spec(
    "llama",
    n_layers=len(QUANTISATIONS),
    n_embd=256,
    n_ff=256,
    n_heads=2,
    head_size=128,
    types=QUANTISATIONS,
    tied=True,
)
"""Seven matrices per layer, taken from a list that seven does not divide: every type stands in every
place, and every segment holds several."""


@pytest.fixture(scope="module")
def many_types(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("types") / "m.gguf", MANY)


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["over the same pages", "in files"])
def test_all_types_are_cut_byte_for_byte_and_run_bit_for_bit(
    parts: str, many_types: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if parts == "in files":
        monkeypatch.setattr(shared_weights, "is_supported", lambda: False)
    engine = open_engine(many_types, tmp_path)
    bounds = [0, *range(1, MANY.n_layers, 6), MANY.n_layers]
    engine.layers.load(0, engine.n_layers)
    tokens = tokens_for(engine.n_vocab)
    chunking = [1, 39]
    got = chain_logits(engine, bounds, tokens, chunking)
    expected = uncut_logits(many_types, tokens, chunking)
    assert len(expected) == len(steps(chunking))
    assert np.isfinite(expected).all()
    assert np.abs(got - expected).max() == 0.0
    engine.close()

    source = GgufFile(many_types)
    types = {tensor.type for tensor in source.tensors.values()}
    assert types >= set(QUANTISATIONS)
    n_compared = 0
    for path in (tmp_path / "segments").glob("*.gguf"):
        start = int(path.stem.split("-")[-2])
        segment = GgufFile(path)
        for tensor in segment.tensors.values():
            if tensor.name.startswith("blk."):
                _, index, rest = tensor.name.split(".", 2)
                original = source.tensors[f"blk.{int(index) + start}.{rest}"]
                assert tensor.type == original.type
                assert segment.tensor_data(tensor).tobytes() == source.tensor_data(original).tobytes()
                n_compared += 1
    assert n_compared >= 9 * MANY.n_layers if parts == "in files" else n_compared == 0
