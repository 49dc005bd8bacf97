"""Models of the BERT kind: their own numbers are libllama's, bit for bit."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from gguf.constants import PoolingType

from swarmllm_workers.errors import CallError
from swarmllm_workers.texts.text_encoder import TextEncoder

from .text_encoder_files import N_CTX, N_EMBD, Kind, build

TEXTS = ("a", "what is a layer?", "one two three, four five six. " * 3)
CASES: list[tuple[Kind, PoolingType]] = [
    ("bert", PoolingType.MEAN),
    ("bert", PoolingType.CLS),
    ("bert", PoolingType.LAST),
    ("nomic-bert", PoolingType.MEAN),
]


@pytest.mark.parametrize(("kind", "pooling"), CASES)
def test_a_vector_is_libllamas_own(tmp_path: Path, kind: Kind, pooling: PoolingType) -> None:
    path = build(tmp_path / "m.gguf", kind, pooling)
    encoder = TextEncoder(path, 1)
    reference = llama_cpp.Llama(
        str(path), embedding=True, n_ctx=N_CTX, n_batch=N_CTX, n_ubatch=N_CTX, n_threads=1, verbose=False
    )
    assert (encoder.pooling, encoder.n_outputs, encoder.n_tokens_max) == (pooling.name.lower(), N_EMBD, N_CTX)
    for text in TEXTS:
        own = encoder.encode(encoder.tokens(text))
        assert own.tobytes() == np.array(reference.embed(text), np.float32).tobytes()


def test_a_score_is_libllamas_own_for_both_texts_as_one(tmp_path: Path) -> None:
    path = build(tmp_path / "m.gguf", "bert", PoolingType.RANK)
    encoder = TextEncoder(path, 1)
    reference = llama_cpp.Llama(
        str(path),
        embedding=True,
        n_ctx=N_CTX,
        n_batch=N_CTX,
        n_ubatch=N_CTX,
        n_threads=1,
        pooling_type=llama_cpp.LLAMA_POOLING_TYPE_RANK,
        verbose=False,
    )
    assert (encoder.pooling, encoder.n_outputs) == ("rank", 1)
    for document in TEXTS[1:]:
        tokens = encoder.pair("who?", document)
        # [CLS] who? [SEP] document, as llama.cpp's server has it for a tokenizer that adds no end.
        one, other = (encoder.tokens(text).tolist() for text in ("who?", document))
        assert tokens.tolist() == [*one, *other[1:-1]]
        (own,) = encoder.encode(tokens)
        context, batch = reference._ctx, llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens.tolist()):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
            batch.seq_id[i][0] = 0
        assert llama_cpp.llama_decode(context.ctx, batch) == 0
        assert own == llama_cpp.llama_get_embeddings_seq(context.ctx, 0)[0]


def test_a_long_text_has_the_bits_that_it_has_in_a_large_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build(tmp_path / "m.gguf", "bert", PoolingType.MEAN)
    large = TextEncoder(path, 1)
    monkeypatch.setattr("swarmllm_workers.texts.text_encoder.TOKENS_FIRST", 4)
    small = TextEncoder(path, 1)
    for text in TEXTS:
        tokens = large.tokens(text)
        assert small.encode(tokens).tobytes() == large.encode(tokens).tobytes()


def test_what_cannot_be_encoded_is_refused(tmp_path: Path) -> None:
    encoder = TextEncoder(build(tmp_path / "m.gguf", "bert", PoolingType.CLS), 1)
    for tokens, kind in (
        (np.zeros(N_CTX + 1, np.int32), "context_full"),
        (np.zeros(0, np.int32), "bad_tensor"),
        (np.array([10**6], np.int32), "bad_tensor"),
        (np.array([-1], np.int32), "bad_tensor"),
    ):
        with pytest.raises(CallError) as caught:
            encoder.encode(tokens)
        assert caught.value.kind == kind
    with pytest.raises(CallError) as caught:
        encoder.pair("a", "b")
    assert caught.value.field == "document"


def test_a_model_that_generates_text_is_refused() -> None:
    guide = Path(__file__).parents[2] / "swarmllm" / "guide" / "guide.gguf"
    with pytest.raises(CallError) as caught:
        TextEncoder(guide, 1)
    assert caught.value.kind == "bad_model"
