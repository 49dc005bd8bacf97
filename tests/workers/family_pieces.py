"""What the metadata of several model families has in common, at the sizes of tests."""

from __future__ import annotations

from typing import Any, Final

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


def without(keys: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key not in names}


def alternating(n_layers: int, period: int, value: int) -> list[int]:
    """`value` in every period-th layer, 0 in the others."""
    return [value if (layer + 1) % period == 0 else 0 for layer in range(n_layers)]
