"""Families of attention and one feed-forward per layer (`families.py` says how they are written)."""

from __future__ import annotations

from typing import Any, Final

from gguf import GGMLQuantizationType as Type

from .blueprint import Family
from .family_pieces import BASE, LAYER_NORM, NO_BIAS, NO_OUTPUT_BIAS, NO_QK_NORM, WIDE_HEADS, YARN, without

GEMMA: Final[dict[str, Any]] = {**without(BASE, "rope.freq_base"), **WIDE_HEADS, "embedding_length": 96}
GEMMA_2: Final[dict[str, Any]] = {
    **GEMMA,
    "attention.sliding_window": 8,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}

DENSE: Final[dict[str, Family]] = {
    "llama-3.1": Family("llama", BASE, absent=(NO_BIAS,), extra=("rope_freqs.weight",)),
    "llama-3.2, tied": Family("llama", BASE, absent=(NO_BIAS,), extra=("rope_freqs.weight",), tied=True),
    "mistral": Family("llama", {**BASE, "rope.freq_base": 1e6}, absent=(NO_BIAS,), types=(Type.Q4_0,)),
    "qwen2": Family("qwen2", BASE, absent=(NO_OUTPUT_BIAS,)),
    "qwen3": Family("qwen3", {**BASE, **WIDE_HEADS}, absent=(NO_BIAS,), tied=True),
    "gemma": Family("gemma", GEMMA, absent=(NO_BIAS,), tied=True),
    "gemma-2": Family("gemma2", GEMMA_2, absent=(NO_BIAS,), tied=True),
    "gemma-2 27b": Family("gemma2", GEMMA_2, absent=(NO_BIAS,), tied=True, n_layers=46),
    "gemma-3": Family(
        "gemma3",
        {**BASE, **WIDE_HEADS, "embedding_length": 96, "rope.freq_base": 1e6, "attention.sliding_window": 8},
        absent=(NO_BIAS, r"output\.weight", r"dense_\d.*"),
        n_layers=7,
        tied=True,
    ),
    "gemma-3 27b": Family(
        "gemma3",
        {**BASE, **WIDE_HEADS, "embedding_length": 96, "rope.freq_base": 1e6, "attention.sliding_window": 8},
        absent=(NO_BIAS, r"output\.weight", r"dense_\d.*"),
        n_layers=62,
        tied=True,
    ),
    "phi-3, su": Family(
        "phi3",
        {
            **BASE,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.attn_factor": 1.19,
            "attention.sliding_window": 8,
        },
        absent=(NO_BIAS,),
        extra=("rope_factors_long.weight", "rope_factors_short.weight"),
        fused_qkv=True,
    ),
    "yarn": Family("qwen2", {**BASE, **YARN}, absent=(NO_OUTPUT_BIAS,)),
    "glm-4": Family("glm4", {**BASE, "rope.dimension_count": 8}, absent=(NO_OUTPUT_BIAS,)),
    "glm-edge": Family(
        "chatglm",
        {**BASE, "rope.dimension_count": 8},
        absent=(NO_OUTPUT_BIAS, r"blk\.\d+\.attn_[qkv]\.bias"),
        fused_qkv=True,
    ),
    "starcoder2": Family("starcoder2", {**without(BASE, "attention.layer_norm_rms_epsilon"), **LAYER_NORM}),
    "command-r": Family(
        "command-r",
        {
            **without(BASE, "attention.layer_norm_rms_epsilon"),
            **LAYER_NORM,
            "logit_scale": 0.0625,
            "rope.scaling.type": "none",
        },
        absent=(NO_BIAS, NO_QK_NORM),
        tied=True,
    ),
    "command-r7b": Family(
        "cohere2",
        {
            **without(BASE, "attention.layer_norm_rms_epsilon"),
            **LAYER_NORM,
            **WIDE_HEADS,
            "logit_scale": 0.25,
            "rope.scaling.type": "none",
            "attention.sliding_window": 8,
        },
        absent=(NO_BIAS,),
        n_layers=8,
        tied=True,
    ),
    "command-r7b, other period": Family(
        "cohere2",
        {
            **without(BASE, "attention.layer_norm_rms_epsilon"),
            **LAYER_NORM,
            "logit_scale": 0.25,
            "rope.scaling.type": "none",
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": 3,
        },
        absent=(NO_BIAS,),
        n_layers=9,
        tied=True,
    ),
    "command-r7b, listed": Family(
        "cohere2",
        {
            **without(BASE, "attention.layer_norm_rms_epsilon"),
            **LAYER_NORM,
            "logit_scale": 0.25,
            "rope.scaling.type": "none",
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [True, True, False, True, True, False, True, True, False],
        },
        absent=(NO_BIAS,),
        n_layers=9,
        tied=True,
    ),
    "olmo-2": Family("olmo2", BASE, absent=(NO_BIAS,)),
    "olmo-3": Family(
        "olmo2",
        {
            **BASE,
            **YARN,
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [True, True, True, False, True],
        },
        absent=(NO_BIAS,),
        n_layers=5,
    ),
    "granite": Family(
        "granite",
        {
            **BASE,
            "attention.scale": 0.2,
            "embedding_scale": 12.0,
            "residual_scale": 0.22,
            "logit_scale": 8.0,
        },
        absent=(NO_BIAS, r"rope_.*"),
        tied=True,
    ),
    "mistral-3": Family(
        "mistral3",
        {
            **BASE,
            **WIDE_HEADS,
            **YARN,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
            "attention.temperature_scale": 0.1,
        },
        absent=(NO_BIAS,),
    ),
    "seed-oss": Family("seed_oss", {**BASE, **WIDE_HEADS}, absent=(NO_OUTPUT_BIAS,)),
    "smollm3": Family("smollm3", BASE, absent=(NO_BIAS,), n_layers=8, tied=True),
    "ernie-4.5": Family("ernie4_5", {**BASE, **WIDE_HEADS}, absent=(NO_BIAS,), tied=True),
    "hunyuan": Family(
        "hunyuan-dense",
        {**BASE, **WIDE_HEADS, "rope.scaling.type": "none", "rope.scaling.factor": 1.0},
        absent=(NO_BIAS,),
        tied=True,
    ),
    "baichuan 7b": Family("baichuan", {**BASE, "attention.head_count_kv": 4}, absent=(NO_BIAS,), n_layers=32),
    "baichuan 13b": Family(
        "baichuan", {**BASE, "attention.head_count_kv": 4}, absent=(NO_BIAS,), n_layers=40
    ),
    "minicpm": Family("minicpm", BASE, absent=(NO_BIAS,), tied=True, n_layers=5),
    "minicpm, scales given": Family(
        "minicpm",
        {**BASE, "embedding_scale": 11.0, "residual_scale": 0.3, "logit_scale": 4.0},
        absent=(NO_BIAS,),
        tied=True,
    ),
    "qwen2.5-vl": Family(
        "qwen2vl", {**BASE, "rope.dimension_sections": [4, 2, 2, 0]}, absent=(NO_OUTPUT_BIAS,)
    ),
    "qwen3-vl": Family(
        "qwen3vl",
        {**BASE, **WIDE_HEADS, "rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3},
        absent=(NO_BIAS,),
        n_layers=8,
        tied=True,
    ),
}
