"""The model families that must be exact under any cut, with metadata as llama.cpp's converters write it.

Keys that a converter leaves out are left out here (the pattern of sliding windows, which layers are
recurrent), because that is where a cut goes wrong: libllama then derives them from a layer's number. Sliding
windows are shorter than the tests' prompt. Sizes are small and no power of two where scaling is involved.
"""

from __future__ import annotations

from typing import Any, Final

from gguf import GGMLQuantizationType as Type

from .blueprint import Family

BASE: Final[dict[str, Any]] = {
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": 16,
}
MOE: Final[dict[str, Any]] = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
}
WIDE_HEADS: Final[dict[str, Any]] = {"attention.key_length": 16, "attention.value_length": 16}
LAYER_NORM: Final[dict[str, Any]] = {"attention.layer_norm_epsilon": 1e-5}
YARN: Final[dict[str, Any]] = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
}
MLA: Final[dict[str, Any]] = {
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 32,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": 32,
    "attention.value_length_mla": 32,
}
SSM: Final[dict[str, Any]] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
}

NO_QKV_BIAS: Final = r"blk\.\d+\.attn_[qkv]\.bias"
NO_OUTPUT_BIAS: Final = r"blk\.\d+\.attn_output\.bias|output\.bias"
NO_FFN_BIAS: Final = r"blk\.\d+\.ffn_(gate|up|down)\.bias"
NO_BIAS: Final = rf"{NO_QKV_BIAS}|{NO_OUTPUT_BIAS}|{NO_FFN_BIAS}"
NO_QK_NORM: Final = r"blk\.\d+\.attn_[qk]_norm\.weight"
NO_SHARED_GATE: Final = r"blk\.\d+\.ffn_gate_inp_shexp\.weight"


def without(keys: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key not in names}


def _alternating(n_layers: int, period: int, value: int) -> list[int]:
    """`value` in every period-th layer, 0 in the others."""
    return [value if (layer + 1) % period == 0 else 0 for layer in range(n_layers)]


FAMILIES: Final[dict[str, Family]] = {
    "llama-3.1": Family("llama", BASE, absent=(NO_BIAS,), extra=("rope_freqs.weight",)),
    "llama-3.2, tied": Family("llama", BASE, absent=(NO_BIAS,), extra=("rope_freqs.weight",), tied=True),
    "mistral": Family("llama", {**BASE, "rope.freq_base": 1e6}, absent=(NO_BIAS,), types=(Type.Q4_0,)),
    "mixtral": Family("llama", {**without(MOE, "expert_feed_forward_length"), **BASE}, absent=(NO_BIAS,)),
    "llama-4 scout": Family(
        "llama4",
        {**BASE, **MOE, "expert_used_count": 1, "interleave_moe_layer_step": 1},
        absent=(NO_BIAS,),
        extra=("rope_freqs.weight",),
        n_layers=8,
    ),
    "llama-4 maverick": Family(
        "llama4",
        {**BASE, **MOE, "expert_used_count": 1, "interleave_moe_layer_step": 2},
        absent=(NO_BIAS,),
        n_layers=8,
    ),
    "qwen2": Family("qwen2", BASE, absent=(NO_OUTPUT_BIAS,)),
    "qwen2-moe": Family(
        "qwen2moe", {**BASE, **MOE, "expert_shared_feed_forward_length": 64}, absent=(NO_OUTPUT_BIAS,)
    ),
    "qwen3": Family("qwen3", {**BASE, **WIDE_HEADS}, absent=(NO_BIAS,), tied=True),
    "qwen3-moe": Family("qwen3moe", {**BASE, **WIDE_HEADS, **MOE}, absent=(NO_BIAS,)),
    "qwen3-next": Family(
        "qwen3next",
        {
            **BASE,
            **WIDE_HEADS,
            **MOE,
            **SSM,
            "expert_shared_feed_forward_length": 32,
            "full_attention_interval": 4,
            "rope.dimension_count": 8,
        },
        absent=(NO_BIAS, r"blk\.\d+\.ssm_in\.weight"),
        n_layers=8,
    ),
    "qwen3.5": Family(
        "qwen35",
        {
            **BASE,
            **WIDE_HEADS,
            **SSM,
            "full_attention_interval": 4,
            "rope.dimension_count": 8,
            "rope.dimension_sections": [2, 1, 1, 0],
        },
        absent=(NO_BIAS,),
        n_layers=8,
    ),
    "qwen3.5-moe": Family(
        "qwen35moe",
        {
            **BASE,
            **WIDE_HEADS,
            **MOE,
            **SSM,
            "expert_shared_feed_forward_length": 32,
            "full_attention_interval": 4,
            "rope.dimension_count": 8,
            "rope.dimension_sections": [2, 1, 1, 0],
        },
        absent=(NO_BIAS,),
        n_layers=8,
    ),
    "gemma": Family(
        "gemma",
        {**without(BASE, "rope.freq_base"), **WIDE_HEADS, "embedding_length": 96},
        absent=(NO_BIAS,),
        tied=True,
    ),
    "gemma-2": Family(
        "gemma2",
        {
            **without(BASE, "rope.freq_base"),
            **WIDE_HEADS,
            "embedding_length": 96,
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        absent=(NO_BIAS,),
        tied=True,
    ),
    "gemma-2 27b": Family(
        "gemma2",
        {
            **without(BASE, "rope.freq_base"),
            **WIDE_HEADS,
            "embedding_length": 96,
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        absent=(NO_BIAS,),
        tied=True,
        n_layers=46,
    ),
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
    "deepseek-v2-lite": Family(
        "deepseek2",
        {
            **BASE,
            **MLA,
            **MOE,
            **YARN,
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "expert_weights_scale": 1.0,
            "rope.scaling.yarn_log_multiplier": 0.0707,
        },
        absent=(NO_BIAS, r"blk\.\d+\.attn_kv_b\.weight", r"blk\.\d+\.exp_probs_b\.bias"),
        n_layers=27,
    ),
    "deepseek-v3": Family(
        "deepseek2",
        {
            **BASE,
            **MLA,
            **MOE,
            **YARN,
            "leading_dense_block_count": 2,
            "attention.q_lora_rank": 32,
            "expert_shared_count": 1,
            "expert_weights_scale": 2.5,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
            "rope.scaling.yarn_log_multiplier": 0.1,
        },
        absent=(NO_BIAS, r"blk\.\d+\.attn_kv_b\.weight"),
    ),
    "glm-4": Family("glm4", {**BASE, "rope.dimension_count": 8}, absent=(NO_OUTPUT_BIAS,)),
    "glm-4 moe": Family(
        "glm4moe",
        {
            **BASE,
            **WIDE_HEADS,
            **MOE,
            "rope.dimension_count": 8,
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_weights_scale": 2.0,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "nextn_predict_layers": 1,
        },
        absent=(NO_OUTPUT_BIAS,),
        n_layers=5,
    ),
    "starcoder2": Family("starcoder2", {**without(BASE, "attention.layer_norm_rms_epsilon"), **LAYER_NORM}),
    "gpt-oss": Family(
        "gpt-oss",
        {**BASE, **WIDE_HEADS, **MOE, **YARN, "attention.sliding_window": 8},
        absent=(r"blk\.\d+\.ffn_gate_up_exps\.bias",),
    ),
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
    "falcon-h1": Family(
        "falcon-h1", {**BASE, **WIDE_HEADS, **SSM}, absent=(NO_BIAS, r"blk\.\d+\.ssm_norm\.weight")
    ),
    "mamba-2": Family(
        "mamba2",
        {
            "context_length": 2**20,
            "embedding_length": 64,
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            **SSM,
        },
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
    "ernie-4.5 moe": Family(
        "ernie4_5-moe",
        {
            **BASE,
            **WIDE_HEADS,
            **MOE,
            "interleave_moe_layer_step": 1,
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 64,
        },
        absent=(NO_BIAS,),
    ),
    "hunyuan": Family(
        "hunyuan-dense",
        {**BASE, **WIDE_HEADS, "rope.scaling.type": "none", "rope.scaling.factor": 1.0},
        absent=(NO_BIAS,),
        tied=True,
    ),
    "hunyuan moe": Family(
        "hunyuan-moe",
        {
            **BASE,
            **MOE,
            "expert_shared_feed_forward_length": 96,
            "expert_shared_count": 1,
            "rope.scaling.type": "none",
        },
        absent=(NO_BIAS,),
        tied=True,
    ),
    "minimax-m2": Family(
        "minimax-m2",
        {**BASE, **WIDE_HEADS, **MOE, "rope.dimension_count": 8, "expert_gating_func": 2},
        absent=(NO_BIAS,),
    ),
    "kimi-linear": Family(
        "kimi-linear",
        {
            **without(BASE, "rope.freq_base"),
            **MLA,
            **MOE,
            "attention.head_count_kv": _alternating(8, 4, 1),
            "ssm.conv_kernel": 4,
            "kda.head_dim": 16,
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_weights_scale": 2.446,
            "expert_gating_func": 2,
        },
        absent=(NO_BIAS, r"blk\.\d+\.attn_kv_b\.weight", r"blk\.\d+\.attn_q_a.*"),
        n_layers=8,
    ),
    "lfm2": Family(
        "lfm2",
        {**BASE, "attention.head_count_kv": [0, 0, 2, 0, 0, 2], "shortconv.l_cache": 3},
        absent=(NO_BIAS,),
        n_layers=6,
        tied=True,
    ),
    "lfm2-moe": Family(
        "lfm2moe",
        {
            **BASE,
            **MOE,
            "attention.head_count_kv": [0, 0, 2, 0, 0, 2],
            "shortconv.l_cache": 3,
            "leading_dense_block_count": 2,
            "expert_gating_func": 2,
        },
        absent=(NO_BIAS,),
        n_layers=6,
        tied=True,
    ),
    "granite-4 hybrid": Family(
        "granitehybrid",
        {
            **BASE,
            **MOE,
            **SSM,
            "attention.head_count_kv": [0, 0, 2, 0, 2],
            "attention.scale": 0.2,
            "embedding_scale": 12.0,
            "residual_scale": 0.22,
            "logit_scale": 8.0,
            "expert_shared_feed_forward_length": 32,
            "rope.scaling.finetuned": False,
        },
        absent=(NO_BIAS,),
        n_layers=5,
        tied=True,
    ),
    "mamba": Family(
        "mamba",
        {
            "context_length": 2**20,
            "embedding_length": 64,
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": 1e-5,
            **without(SSM, "ssm.group_count"),
            "ssm.dt_b_c_rms": False,
        },
        tied=True,
    ),
    "jamba": Family(
        "jamba",
        {
            **without(BASE, "rope.freq_base", "rope.dimension_count"),
            **without(SSM, "ssm.group_count"),
            "attention.head_count_kv": [0, 0, 2, 0, 0, 2],
        },
        absent=(NO_BIAS, r"blk\.\d+\.ffn_(gate_inp|(gate|up|down)_exps)\.weight"),
        n_layers=6,
    ),
    "nemotron-h": Family(
        "nemotron_h",
        {
            **BASE,
            **SSM,
            "feed_forward_length": [0, 96, 0, 96, 0, 96, 0, 96],
            "attention.head_count_kv": [0, 0, 2, 0, 0, 0, 2, 0],
            "attention.layer_norm_epsilon": 1e-5,
        },
        absent=(NO_BIAS,),
        n_layers=8,
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
    "ernie-4.5 moe, every second layer": Family(
        "ernie4_5-moe",
        {
            **BASE,
            **WIDE_HEADS,
            **MOE,
            "interleave_moe_layer_step": 2,
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "expert_shared_feed_forward_length": 64,
        },
        absent=(NO_BIAS,),
        n_layers=6,
    ),
    "nemotron-3": Family(
        "nemotron_h_moe",
        {
            **BASE,
            **WIDE_HEADS,
            **SSM,
            **MOE,
            "feed_forward_length": [0, 96, 0, 96, 0, 96, 0, 96],
            "attention.head_count_kv": [0, 0, 2, 0, 0, 0, 2, 0],
            "attention.layer_norm_epsilon": 1e-5,
            "expert_shared_feed_forward_length": 64,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
        },
        absent=(NO_BIAS, r"blk\.\d+\.ffn_latent.*"),
        n_layers=8,
    ),
    "qwen3-vl": Family(
        "qwen3vl",
        {**BASE, **WIDE_HEADS, "rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3},
        absent=(NO_BIAS,),
        tied=True,
    ),
    "qwen3-vl moe": Family(
        "qwen3vlmoe",
        {**BASE, **WIDE_HEADS, **MOE, "rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3},
        absent=(NO_BIAS,),
    ),
    "deepseek-v2": Family(
        "deepseek2",
        {
            **BASE,
            **MLA,
            **MOE,
            **YARN,
            "leading_dense_block_count": 1,
            "attention.q_lora_rank": 32,
            "expert_shared_count": 2,
            "expert_weights_scale": 16.0,
            "rope.scaling.yarn_log_multiplier": 0.0707,
        },
        absent=(NO_BIAS, r"blk\.\d+\.attn_kv_b\.weight", r"blk\.\d+\.exp_probs_b\.bias"),
    ),
    "glm-4.7 flash": Family(
        "deepseek2",
        {
            **BASE,
            **MLA,
            **MOE,
            "leading_dense_block_count": 1,
            "attention.q_lora_rank": 32,
            "expert_shared_count": 1,
            "expert_weights_scale": 1.8,
            "expert_weights_norm": True,
            "expert_gating_func": 2,
            "nextn_predict_layers": 1,
        },
        absent=(NO_BIAS, r"blk\.\d+\.attn_kv_b\.weight"),
        n_layers=5,
    ),
}
