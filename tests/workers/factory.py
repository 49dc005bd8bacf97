"""Small random models of several architectures, written with gguf-py: what the exactness tests cut.

Weights are scaled so that hidden states keep their size from layer to layer: a damaged layer then changes
every logit. The vocabulary is GPT-2's 256 byte letters and a few special tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, TokenType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

_ggml = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
_quantize_chunk = ctypes.CFUNCTYPE(
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_void_p,
)(("ggml_quantize_chunk", _ggml))

QUANTISATIONS: tuple[Type, ...] = (
    *(Type.F32, Type.F16, Type.BF16),
    *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0),
    *(Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K),
    *(Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S),
    *(Type.IQ3_XXS, Type.IQ3_S, Type.IQ4_NL, Type.IQ4_XS),
    *(Type.TQ1_0, Type.TQ2_0, Type.MXFP4),
)
"""Every type that published files hold matrices in."""

SLOW_TO_ENCODE = (Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S)
"""ggml takes up to twelve seconds to prepare for these."""

SPECIAL_TOKENS = (
    ("<|endoftext|>", TokenType.CONTROL),
    ("<|im_start|>", TokenType.CONTROL),
    ("<|im_end|>", TokenType.CONTROL),
    ("<tool_call>", TokenType.CONTROL),
    ("</tool_call>", TokenType.CONTROL),
    ("<note>", TokenType.USER_DEFINED),
)
N_VOCAB = 256 + len(SPECIAL_TOKENS)
TEXT_TOKENS = 256
"""Ids below are single bytes."""


def special(name: str) -> int:
    return TEXT_TOKENS + [text for text, _ in SPECIAL_TOKENS].index(name)


@dataclass(frozen=True)
class Spec:
    """A model to build. Features are named after what they add to a plain llama layer."""

    architecture: str
    n_layers: int = 4
    n_embd: int = 64
    n_heads: int = 4
    n_kv_heads: int = 2
    head_size: int = 16
    n_ff: int = 96
    tied: bool = False
    qkv_bias: bool = False
    fused_qkv: bool = False
    fused_gate: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    n_experts: int = 0
    shared_expert: bool = False
    leading_dense: int = 0
    types: tuple[Type, ...] = (Type.Q8_0,)
    """Of the matrices, in turn."""
    embedding_type: Type = Type.Q8_0
    keys: dict[str, object] = field(default_factory=dict)
    """Metadata without the architecture's prefix."""
    plain_keys: dict[str, int] = field(default_factory=dict)
    """Metadata by full name."""
    context_length: int = 512
    template: str = ""
    extra_tokens: tuple[str, ...] = ()
    """Of the vocabulary, behind SPECIAL_TOKENS."""


SPECS: dict[str, Spec] = {
    "llama": Spec("llama", types=(Type.Q8_0, Type.F16)),
    "llama-tied": Spec("llama", tied=True, types=(Type.Q4_0,), embedding_type=Type.F16),
    "llama-kquants": Spec(
        "llama",
        n_layers=3,
        n_embd=256,
        n_ff=256,
        head_size=64,
        types=(Type.Q4_K, Type.Q6_K),
        embedding_type=Type.Q4_K,
    ),
    "llama-moe": Spec("llama", n_experts=4, n_layers=3),
    "qwen2": Spec("qwen2", qkv_bias=True, types=(Type.Q4_0, Type.Q8_0)),
    "qwen2moe": Spec("qwen2moe", n_experts=4, shared_expert=True, qkv_bias=True, n_layers=3),
    "qwen3": Spec("qwen3", qk_norm=True, types=(Type.F16,)),
    "qwen3moe": Spec("qwen3moe", n_experts=4, qk_norm=True, n_layers=3),
    "gemma2": Spec(
        "gemma2",
        n_layers=6,
        # sqrt(96) is no power of two: scaling back and forth would lose bits
        n_embd=96,
        tied=True,
        post_norms=True,
        keys={
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": Spec(
        "gemma3",
        n_layers=12,
        n_embd=96,
        tied=True,
        qk_norm=True,
        post_norms=True,
        keys={"attention.sliding_window": 8},
        types=(Type.Q8_0, Type.F16),
    ),
    "gemma": Spec("gemma", n_embd=96, tied=True),
    "granite": Spec(
        "granite",
        keys={"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0, "attention.scale": 0.2},
    ),
    "smollm3": Spec("smollm3", n_layers=12, tied=True),
    "phi3": Spec(
        "phi3",
        fused_qkv=True,
        fused_gate=True,
        keys={"rope.dimension_count": 16, "rope.scaling.original_context_length": 512},
    ),
}


def build(path: Path, spec: Spec, *, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, spec.architecture, use_temp_file=False)
    _add_metadata(writer, spec)
    turn = 0

    def matrix(name: str, n_columns: int, *rows: int, type_: Type | None = None) -> None:
        nonlocal turn
        chosen = type_ or spec.types[turn % len(spec.types)]
        turn += 1
        # As many rows as columns on average: the scale keeps a row's length.
        writer.add_tensor(name, random_matrix(rng, (*rows, n_columns), chosen), raw_dtype=chosen)

    def vector(name: str, size: int, around: float) -> None:
        writer.add_tensor(name, (around + 0.1 * rng.standard_normal(size)).astype(np.float32))

    n_vocab = N_VOCAB + len(spec.extra_tokens)
    matrix("token_embd.weight", spec.n_embd, n_vocab, type_=spec.embedding_type)
    vector("output_norm.weight", spec.n_embd, 1.0)
    if not spec.tied:
        matrix("output.weight", spec.n_embd, n_vocab)
    for i in range(spec.n_layers):
        _add_layer(i, spec, matrix, vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_layer(
    i: int, spec: Spec, matrix: Callable[..., None], vector: Callable[[str, int, float], None]
) -> None:
    n_q, n_kv = spec.n_heads * spec.head_size, spec.n_kv_heads * spec.head_size
    at = f"blk.{i}"
    vector(f"{at}.attn_norm.weight", spec.n_embd, 1.0)
    if spec.fused_qkv:
        matrix(f"{at}.attn_qkv.weight", spec.n_embd, n_q + 2 * n_kv)
    else:
        for name, n_rows in (("attn_q", n_q), ("attn_k", n_kv), ("attn_v", n_kv)):
            matrix(f"{at}.{name}.weight", spec.n_embd, n_rows)
            if spec.qkv_bias:
                vector(f"{at}.{name}.bias", n_rows, 0.0)
    if spec.qk_norm:
        vector(f"{at}.attn_q_norm.weight", spec.head_size, 1.0)
        vector(f"{at}.attn_k_norm.weight", spec.head_size, 1.0)
    matrix(f"{at}.attn_output.weight", n_q, spec.n_embd)
    vector(f"{at}.ffn_norm.weight", spec.n_embd, 1.0)
    if spec.post_norms:
        vector(f"{at}.post_attention_norm.weight", spec.n_embd, 1.0)
        vector(f"{at}.post_ffw_norm.weight", spec.n_embd, 1.0)
    if spec.n_experts:
        matrix(f"{at}.ffn_gate_inp.weight", spec.n_embd, spec.n_experts, type_=Type.F32)
        matrix(f"{at}.ffn_gate_exps.weight", spec.n_embd, spec.n_experts, spec.n_ff)
        matrix(f"{at}.ffn_up_exps.weight", spec.n_embd, spec.n_experts, spec.n_ff)
        matrix(f"{at}.ffn_down_exps.weight", spec.n_ff, spec.n_experts, spec.n_embd)
        if spec.shared_expert:
            vector(f"{at}.ffn_gate_inp_shexp.weight", spec.n_embd, 0.0)
            matrix(f"{at}.ffn_gate_shexp.weight", spec.n_embd, spec.n_ff)
            matrix(f"{at}.ffn_up_shexp.weight", spec.n_embd, spec.n_ff)
            matrix(f"{at}.ffn_down_shexp.weight", spec.n_ff, spec.n_embd)
    else:
        if not spec.fused_gate:
            matrix(f"{at}.ffn_gate.weight", spec.n_embd, spec.n_ff)
        matrix(f"{at}.ffn_up.weight", spec.n_embd, spec.n_ff * (2 if spec.fused_gate else 1))
        matrix(f"{at}.ffn_down.weight", spec.n_ff, spec.n_embd)


def _add_metadata(writer: GGUFWriter, spec: Spec) -> None:
    prefix = spec.architecture
    writer.add_name("random model")
    writer.add_block_count(spec.n_layers)
    writer.add_context_length(spec.context_length)
    writer.add_embedding_length(spec.n_embd)
    # An array where one number would do: per-layer arrays must survive the cut.
    writer.add_feed_forward_length([spec.n_ff] * spec.n_layers)
    writer.add_head_count([spec.n_heads] * spec.n_layers)
    writer.add_head_count_kv([spec.n_kv_heads] * spec.n_layers)
    writer.add_key_length(spec.head_size)
    writer.add_value_length(spec.head_size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    if spec.n_experts:
        writer.add_expert_count(spec.n_experts)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(spec.n_ff)
        if spec.shared_expert:
            writer.add_expert_shared_feed_forward_length(spec.n_ff)
    for key, value in spec.keys.items():
        if isinstance(value, float):
            writer.add_float32(f"{prefix}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{prefix}.{key}", value)
        else:
            writer.add_uint32(f"{prefix}.{key}", value)
    for key, number in spec.plain_keys.items():
        writer.add_uint32(key, number)
    writer.add_array("general.tags", [])
    add_vocabulary(writer, spec.extra_tokens)
    if spec.template:
        writer.add_chat_template(spec.template)


def add_vocabulary(writer: GGUFWriter, extra: Sequence[str] = ()) -> None:
    tokens = (*SPECIAL_TOKENS, *((text, TokenType.USER_DEFINED) for text in extra))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(_byte_letters() + [text for text, _ in tokens])
    writer.add_token_types([TokenType.NORMAL] * 256 + [kind for _, kind in tokens])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(special("<|im_end|>"))
    writer.add_bos_token_id(special("<|endoftext|>"))
    writer.add_add_bos_token(False)


def random_matrix(rng: np.random.Generator, shape: tuple[int, ...], type_: Type) -> np.ndarray:
    """Weights of standard deviation 1/sqrt(columns), encoded as `type_`."""
    if type_ in SLOW_TO_ENCODE:
        return _random_bits(rng, shape, type_)
    return quantise((rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32), type_)


def _random_bits(rng: np.random.Generator, shape: tuple[int, ...], type_: Type) -> np.ndarray:
    """Random quants are as good as fitted ones, with a scale that gives the weights their size."""
    block, n_bytes = GGML_QUANT_SIZES[type_]
    data = rng.integers(0, 256, (int(np.prod(shape)) // block, n_bytes), dtype=np.uint8)

    def set_scale(scale: float) -> None:
        bits = int(np.float16(scale).view(np.uint16))
        if type_ == Type.IQ1_M:  # four bits at the top of each of the last four words
            words = data[:, -8:].copy().view(np.uint16)
            words = words & 0x0FFF | np.array([bits >> 4 * i & 15 for i in range(4)], np.uint16) << 12
            data[:, -8:] = words.view(np.uint8)
        else:
            data[:, 0:2] = np.array([bits], np.uint16).view(np.uint8)

    set_scale(1.0)
    set_scale(shape[-1] ** -0.5 / float(dequantize(data, type_).std()))
    return data.reshape(*shape[:-1], -1)


def quantise(weights: np.ndarray, type_: Type) -> np.ndarray:
    """f32 [..., n_columns] as libllama's own tool would encode it: u8 [..., n_bytes], or f32, f16."""
    if type_ == Type.F32:
        return weights
    if type_ == Type.F16:
        return weights.astype(np.float16)
    block, block_bytes = GGML_QUANT_SIZES[type_]
    n_columns = weights.shape[-1]
    encoded = np.zeros((*weights.shape[:-1], n_columns // block * block_bytes), np.uint8)
    n_rows = weights.size // n_columns
    weights = np.ascontiguousarray(weights)
    size = _quantize_chunk(type_, weights.ctypes.data, encoded.ctypes.data, 0, n_rows, n_columns, None)
    assert size == encoded.nbytes, type_
    return encoded


def _byte_letters() -> list[str]:
    """GPT-2's letter for each byte: itself where it can be printed, the next one from 256 on where it
    cannot."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + unprintable.index(byte)) for byte in range(256)]
