"""Families with layers that keep a state (`families.py` says how they are written)."""

from __future__ import annotations

from typing import Final

from .blueprint import Family
from .family_pieces import BASE, MLA, MOE, NO_BIAS, SSM, WIDE_HEADS, alternating, without

RECURRENT: Final[dict[str, Family]] = {
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
    "kimi-linear": Family(
        "kimi-linear",
        {
            **without(BASE, "rope.freq_base"),
            **MLA,
            **MOE,
            "attention.head_count_kv": alternating(8, 4, 1),
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
    "lfm2, heads listed": Family(
        "lfm2",
        {
            **BASE,
            "attention.head_count": [4, 0, 4, 4, 0, 4, 4, 0, 4],
            "attention.head_count_kv": [0, 0, 2, 0, 0, 2, 0, 0, 2],
            "shortconv.l_cache": 3,
        },
        absent=(NO_BIAS,),
        n_layers=9,
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
}
