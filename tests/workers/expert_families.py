"""Families whose layers choose among experts (`families.py` says how they are written)."""

from __future__ import annotations

from typing import Final

from .blueprint import Family
from .family_pieces import BASE, MLA, MOE, NO_BIAS, NO_OUTPUT_BIAS, WIDE_HEADS, YARN, without

EXPERTS: Final[dict[str, Family]] = {
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
    "qwen2-moe": Family(
        "qwen2moe", {**BASE, **MOE, "expert_shared_feed_forward_length": 64}, absent=(NO_OUTPUT_BIAS,)
    ),
    "qwen3-moe": Family("qwen3moe", {**BASE, **WIDE_HEADS, **MOE}, absent=(NO_BIAS,)),
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
        predicts=True,
    ),
    "gpt-oss": Family(
        "gpt-oss",
        {**BASE, **WIDE_HEADS, **MOE, **YARN, "attention.sliding_window": 8},
        absent=(r"blk\.\d+\.ffn_gate_up_exps\.bias",),
    ),
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
    "qwen3-vl moe": Family(
        "qwen3vlmoe",
        {**BASE, **WIDE_HEADS, **MOE, "rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3},
        absent=(NO_BIAS,),
        n_layers=8,
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
