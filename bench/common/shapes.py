"""Random models of a given shape, built in seconds: what benchmarks and memory tests run instead of
downloads.

Speed does not depend on the values of the weights, so every matrix is one random pattern of Q8_0 blocks,
scaled so that activations neither vanish nor overflow. The text such a model writes is noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType

Q8_0_BLOCK = 32
Q8_0_BLOCK_BYTES = 34


@dataclass(frozen=True)
class Shape:
    """The numbers that decide what a step costs."""

    n_layers: int
    n_embd: int
    n_heads: int
    n_kv_heads: int
    n_ff: int
    n_vocab: int
    context_length: int = 8192
    n_experts: int = 0
    """0: the feed-forward network is one of `n_ff`."""
    n_experts_used: int = 0
    n_ff_expert: int = 0
    n_embd_head: int = 0
    """0: `n_embd` / `n_heads`."""

    @property
    def n_head(self) -> int:
        """Width of one head."""
        return self.n_embd_head or self.n_embd // self.n_heads

    @property
    def n_weights(self) -> int:
        n_kv = self.n_embd // self.n_heads * self.n_kv_heads
        layer = 2 * self.n_embd * self.n_embd + 2 * self.n_embd * n_kv + 3 * self.n_embd * self.n_ff
        return self.n_layers * layer + 2 * self.n_embd * self.n_vocab


HALF_BILLION = Shape(n_layers=24, n_embd=896, n_heads=14, n_kv_heads=2, n_ff=4864, n_vocab=151936)
"""Qwen2.5-0.5B, with an output matrix of its own."""
HALF_BILLION_SMALL_VOCABULARY = Shape(
    n_layers=24, n_embd=896, n_heads=14, n_kv_heads=2, n_ff=4864, n_vocab=32000
)
"""The same layers with a quarter of the head: cheaper to build."""


def build(shape: Shape, path: Path, *, seed: int = 0) -> Path:
    """Write a qwen2 model (Q8_0, with biases, GPT-2 tokenizer) of this shape to `path`. Takes about a
    second per 500 MB."""
    rng = np.random.default_rng(seed)
    pattern = _q8_0_pattern(rng)
    writer = GGUFWriter(path, "qwen2", use_temp_file=False)
    writer.add_name(path.stem)
    writer.add_block_count(shape.n_layers)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    add_vocabulary(writer, shape.n_vocab)

    def matrix(name: str, n_rows: int, n_columns: int) -> None:
        n_bytes = n_columns // Q8_0_BLOCK * Q8_0_BLOCK_BYTES
        first = int(rng.integers(0, len(pattern) // Q8_0_BLOCK_BYTES)) * Q8_0_BLOCK_BYTES
        data = np.resize(np.roll(pattern, -first), n_rows * n_bytes).reshape(n_rows, n_bytes)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType.Q8_0)

    def vector(name: str, size: int, *, around: float) -> None:
        writer.add_tensor(name, (around + 0.05 * rng.standard_normal(size)).astype(np.float32))

    n_kv = shape.n_embd // shape.n_heads * shape.n_kv_heads
    matrix("token_embd.weight", shape.n_vocab, shape.n_embd)
    vector("output_norm.weight", shape.n_embd, around=1.0)
    matrix("output.weight", shape.n_vocab, shape.n_embd)
    for i in range(shape.n_layers):
        vector(f"blk.{i}.attn_norm.weight", shape.n_embd, around=1.0)
        for name, n_rows in (("attn_q", shape.n_embd), ("attn_k", n_kv), ("attn_v", n_kv)):
            matrix(f"blk.{i}.{name}.weight", n_rows, shape.n_embd)
            vector(f"blk.{i}.{name}.bias", n_rows, around=0.0)
        matrix(f"blk.{i}.attn_output.weight", shape.n_embd, shape.n_embd)
        vector(f"blk.{i}.ffn_norm.weight", shape.n_embd, around=1.0)
        matrix(f"blk.{i}.ffn_gate.weight", shape.n_ff, shape.n_embd)
        matrix(f"blk.{i}.ffn_up.weight", shape.n_ff, shape.n_embd)
        matrix(f"blk.{i}.ffn_down.weight", shape.n_embd, shape.n_ff)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _q8_0_pattern(rng: np.random.Generator) -> np.ndarray:
    """u8: blocks of 32 int8 weights of standard deviation 0.03 after scaling. The number of blocks is
    prime, so that rows of no matrix repeat each other."""
    n_blocks = 16381
    blocks = np.empty((n_blocks, Q8_0_BLOCK_BYTES), np.uint8)
    scales = (0.03 / 42 * (0.8 + 0.4 * rng.random(n_blocks))).astype(np.float16)
    blocks[:, :2] = scales.view(np.uint8).reshape(n_blocks, 2)
    weights = np.clip(rng.standard_normal((n_blocks, Q8_0_BLOCK)) * 42, -127, 127).astype(np.int8)
    blocks[:, 2:] = weights.view(np.uint8)
    return blocks.reshape(-1)


def add_vocabulary(writer: GGUFWriter, n_vocab: int) -> None:
    tokens = _byte_letters() + [f"t{i}" for i in range(256, n_vocab - 1)] + ["<|endoftext|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.NORMAL] * (n_vocab - 1) + [TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(n_vocab - 1)
    writer.add_add_bos_token(False)


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte: itself where it can be printed, the next one from 256 on where it
    cannot."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + unprintable.index(byte)) for byte in range(256)]
