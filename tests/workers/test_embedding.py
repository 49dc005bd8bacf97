"""Rows looked up in the file are the rows libllama looks up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from swarmllm_workers.engine.embedding import Embedding
from swarmllm_workers.engine.libllama import Context, ContextSettings, Model
from swarmllm_workers.engine.tap import Tap
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import GgufFile

from .factory import N_VOCAB, QUANTISATIONS, Spec, build


@pytest.mark.parametrize("kind", QUANTISATIONS, ids=lambda kind: kind.name)
def test_rows_equal_libllamas_lookup_bit_for_bit(kind: Type, tmp_path: Path) -> None:
    spec = Spec("llama", n_layers=1, n_embd=256, n_ff=64, head_size=64, embedding_type=kind)
    path = build(tmp_path / "m.gguf", spec)
    tokens = np.random.default_rng(1).integers(0, N_VOCAB, 50).astype(np.int32)
    model = Model(path)
    tap = Tap(output_name="embd", input_name="", n_embd=256, n_rows_max=64)
    context = Context(
        model,
        ContextSettings(
            n_ctx=64, n_slots=1, n_threads=1, eval_callback=tap.callback, eval_user_data=tap.user_data
        ),
    )
    tap.arm(np.empty((50, 256), np.float32))
    context.decode(tokens, np.arange(50), np.zeros(50), np.ones(50))
    expected = tap.take(50)
    assert expected.std() > 0.01
    rows = Embedding(GgufFile(path)).rows(tokens)
    np.testing.assert_array_equal(rows.view(np.uint32), expected.view(np.uint32))
    context.close()
    model.close()


def test_token_outside_of_the_vocabulary_is_refused(tmp_path: Path) -> None:
    embedding = Embedding(GgufFile(build(tmp_path / "m.gguf", Spec("llama", n_layers=1))))
    for token in (-1, N_VOCAB):
        with pytest.raises(CallError) as caught:
            embedding.rows(np.array([0, token], np.int32))
        assert caught.value.kind == "bad_tensor"
    assert embedding.rows(np.empty(0, np.int32)).shape == (0, 64)
