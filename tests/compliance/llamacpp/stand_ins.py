"""Small random models in the place of those from the web that llama.cpp's server tests ask for.

Their vocabularies are real: those of Llama 2, of StarCoder and of BGE, from the same source distribution as
the tests. What they say means nothing, and they hardly ever end an answer by themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import PoolingType

N_EMBD: Final = 64
N_FF: Final = 96
N_HEADS: Final = 4
N_LAYERS: Final = 2
N_CTX: Final = 8192
N_CTX_BERT: Final = 512
POOLINGS: Final = {
    "none": PoolingType.NONE,
    "mean": PoolingType.MEAN,
    "cls": PoolingType.CLS,
    "last": PoolingType.LAST,
    "rank": PoolingType.RANK,
}


class _Builder:
    def __init__(self, path: Path, architecture: str, vocabulary: Path) -> None:
        self.writer = GGUFWriter(path, architecture)
        self.writer.add_name(path.stem)
        self.n_vocab = self._copy_vocabulary(vocabulary)
        self.writer.add_block_count(N_LAYERS)
        self.writer.add_embedding_length(N_EMBD)
        self.writer.add_feed_forward_length(N_FF)
        self.writer.add_head_count(N_HEADS)
        self._random = np.random.default_rng(7)

    def _copy_vocabulary(self, path: Path) -> int:
        """The number of its tokens."""
        n_vocab = 0
        for name, field in GGUFReader(path).fields.items():
            if not name.startswith("tokenizer."):
                continue
            value: Any = field.contents()
            kind, *items = field.types
            self.writer.add_key_value(name, value, kind, *(items or [None]))
            if name == "tokenizer.ggml.tokens":
                assert kind is GGUFValueType.ARRAY
                n_vocab = len(value)
        return n_vocab

    def matrix(self, name: str, n_columns: int, n_rows: int) -> None:
        scale = n_columns**-0.5
        values = self._random.normal(0, scale, (n_rows, n_columns))
        # A row of these is added to what f32 is computed with, which ggml does of f32 only.
        is_f32 = n_rows == 1 or name == "token_types.weight"
        self.writer.add_tensor(name, values.astype(np.float32 if is_f32 else np.float16))

    def vector(self, name: str, size: int, around: float = 0.0) -> None:
        self.writer.add_tensor(name, (around + self._random.normal(0, 0.1, size)).astype(np.float32))

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def build_stand_ins(folder: Path, vocabularies: Path) -> None:
    """words.gguf, infill.gguf, and for each of POOLINGS one of its name."""
    _build_generator(folder / "words.gguf", vocabularies / "ggml-vocab-llama-spm.gguf")
    _build_generator(folder / "infill.gguf", vocabularies / "ggml-vocab-starcoder.gguf")
    for pooling in POOLINGS:
        _build_encoder(folder / f"{pooling}.gguf", vocabularies / "ggml-vocab-bert-bge.gguf", pooling)


def _build_generator(path: Path, vocabulary: Path) -> None:
    builder = _Builder(path, "llama", vocabulary)
    builder.writer.add_context_length(N_CTX)
    builder.writer.add_layer_norm_rms_eps(1e-6)
    builder.matrix("token_embd.weight", N_EMBD, builder.n_vocab)
    builder.vector("output_norm.weight", N_EMBD, 1.0)
    builder.matrix("output.weight", N_EMBD, builder.n_vocab)
    for layer in range(N_LAYERS):
        block = f"blk.{layer}"
        builder.vector(f"{block}.attn_norm.weight", N_EMBD, 1.0)
        for name in ("attn_q", "attn_k", "attn_v"):
            builder.matrix(f"{block}.{name}.weight", N_EMBD, N_EMBD)
        builder.matrix(f"{block}.attn_output.weight", N_EMBD, N_EMBD)
        builder.vector(f"{block}.ffn_norm.weight", N_EMBD, 1.0)
        builder.matrix(f"{block}.ffn_gate.weight", N_EMBD, N_FF)
        builder.matrix(f"{block}.ffn_up.weight", N_EMBD, N_FF)
        builder.matrix(f"{block}.ffn_down.weight", N_FF, N_EMBD)
    builder.close()


def _build_encoder(path: Path, vocabulary: Path, pooling: str) -> None:
    builder = _Builder(path, "bert", vocabulary)
    writer = builder.writer
    writer.add_context_length(N_CTX_BERT)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_pooling_type(POOLINGS[pooling])

    def norm(name: str) -> None:
        builder.vector(f"{name}.weight", N_EMBD, 1.0)
        builder.vector(f"{name}.bias", N_EMBD)

    def linear(name: str, n_in: int, n_out: int) -> None:
        builder.matrix(f"{name}.weight", n_in, n_out)
        builder.vector(f"{name}.bias", n_out)

    builder.matrix("token_embd.weight", N_EMBD, builder.n_vocab)
    builder.matrix("token_types.weight", N_EMBD, 2)
    builder.matrix("position_embd.weight", N_EMBD, N_CTX_BERT)
    norm("token_embd_norm")
    for layer in range(N_LAYERS):
        block = f"blk.{layer}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            linear(f"{block}.{name}", N_EMBD, N_EMBD)
        norm(f"{block}.attn_output_norm")
        linear(f"{block}.ffn_up", N_EMBD, N_FF)
        linear(f"{block}.ffn_down", N_FF, N_EMBD)
        norm(f"{block}.layer_output_norm")
    if pooling == "rank":
        linear("cls", N_EMBD, N_EMBD)
        linear("cls.output", N_EMBD, 1)
    builder.close()
