"""Small random models of the BERT kind, as llama.cpp's converter writes them."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Literal

import numpy as np
from gguf import GGUFWriter
from gguf.constants import PoolingType

N_EMBD, N_FF, N_HEADS, N_LAYERS, N_CTX = 32, 64, 4, 3, 96
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
Kind = Literal["bert", "nomic-bert"]


def vocabulary() -> list[str]:
    """Every letter as the beginning of a word, and as what follows."""
    letters = string.ascii_lowercase + string.digits + ".,?!"
    return [*SPECIAL, *("▁" + letter for letter in letters), *letters]


def build(path: Path, kind: Kind, pooling: PoolingType, *, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, kind)
    tokens = vocabulary()
    writer.add_name(f"random {kind}")
    writer.add_block_count(N_LAYERS)
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEADS)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_pooling_type(pooling)
    if kind == "nomic-bert":
        writer.add_rope_freq_base(1000.0)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_type_count(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    writer.add_sep_token_id(3)
    writer.add_mask_token_id(4)

    def matrix(name: str, n_columns: int, n_rows: int) -> None:
        writer.add_tensor(name, rng.normal(0, 0.2, (n_rows, n_columns)).astype(np.float32))

    def vector(name: str, size: int, around: float = 0.0) -> None:
        writer.add_tensor(name, (around + rng.normal(0, 0.1, size)).astype(np.float32))

    def norm(name: str) -> None:
        vector(f"{name}.weight", N_EMBD, 1.0)
        vector(f"{name}.bias", N_EMBD)

    def linear(name: str, n_in: int, n_out: int) -> None:
        matrix(f"{name}.weight", n_in, n_out)
        if kind == "bert":
            vector(f"{name}.bias", n_out)

    matrix("token_embd.weight", N_EMBD, len(tokens))
    matrix("token_types.weight", N_EMBD, 2)
    norm("token_embd_norm")
    if kind == "bert":
        matrix("position_embd.weight", N_EMBD, N_CTX)
    for layer in range(N_LAYERS):
        block = f"blk.{layer}"
        if kind == "bert":
            for name in ("attn_q", "attn_k", "attn_v"):
                linear(f"{block}.{name}", N_EMBD, N_EMBD)
        else:
            linear(f"{block}.attn_qkv", N_EMBD, 3 * N_EMBD)
            linear(f"{block}.ffn_gate", N_EMBD, N_FF)
        linear(f"{block}.attn_output", N_EMBD, N_EMBD)
        norm(f"{block}.attn_output_norm")
        linear(f"{block}.ffn_up", N_EMBD, N_FF)
        linear(f"{block}.ffn_down", N_FF, N_EMBD)
        norm(f"{block}.layer_output_norm")
    if pooling == PoolingType.RANK:
        matrix("cls.weight", N_EMBD, N_EMBD)
        vector("cls.bias", N_EMBD)
        matrix("cls.output.weight", N_EMBD, 1)
        vector("cls.output.bias", 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
