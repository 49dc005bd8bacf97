"""Families of architectures that llama.cpp runs and the table does not have: what a self-check is for.

Metadata and tensors as in `families`.
"""

from __future__ import annotations

from typing import Final

from .blueprint import Family
from .family_pieces import BASE, LAYER_NORM, MLA, MOE, NO_BIAS, WIDE_HEADS, YARN, without

_N_LAYERS: Final = 8

CUT_EXACTLY: Final[dict[str, tuple[Family, int]]] = {
    "apertus": (
        Family(
            "apertus",
            {
                **BASE,
                "xielu.alpha_n": [0.8 + 0.01 * layer for layer in range(_N_LAYERS)],
                "xielu.alpha_p": [0.7 + 0.01 * layer for layer in range(_N_LAYERS)],
                "xielu.beta": [0.5] * _N_LAYERS,
                "xielu.eps": [-1e-6] * _N_LAYERS,
            },
            absent=(NO_BIAS,),
            n_layers=_N_LAYERS,
        ),
        1,
    ),
    "bitnet": (Family("bitnet", BASE, absent=(NO_BIAS,), n_layers=_N_LAYERS, tied=True), 1),
    "jais-2": (
        Family(
            "jais2",
            # As many heads of keys as of queries: 0.3.35 knows no other biases.
            {
                **without(BASE, "attention.layer_norm_rms_epsilon"),
                **LAYER_NORM,
                "attention.head_count_kv": 4,
            },
            n_layers=_N_LAYERS,
        ),
        1,
    ),
    "plm": (
        Family("plm", {**BASE, **MLA, "attention.head_count_kv": 4}, absent=(NO_BIAS,), n_layers=_N_LAYERS),
        1,
    ),
    "mistral-4": (
        Family(
            "mistral4",
            {
                **BASE,
                **MLA,
                **MOE,
                **YARN,
                "leading_dense_block_count": 1,
                "attention.q_lora_rank": 32,
                "expert_shared_count": 1,
                "expert_weights_scale": 1.0,
            },
            absent=(NO_BIAS, r"blk\.\d+\.attn_kv_b\.weight"),
            n_layers=_N_LAYERS,
        ),
        1,
    ),
    "mimo-2": (
        Family(
            "mimo2",
            {
                **BASE,
                **WIDE_HEADS,
                **MOE,
                "attention.sliding_window": 16,
                "attention.sliding_window_pattern": [True, True, True, False] * 2,
                "rope.freq_base_swa": 5e3,
            },
            absent=(NO_BIAS,),
            n_layers=_N_LAYERS,
        ),
        4,  # libllama wants layers of both kinds in every part
    ),
    "exaone moe": (
        Family(
            "exaone-moe",
            {
                **BASE,
                **WIDE_HEADS,
                **MOE,
                "attention.sliding_window": 16,
                "leading_dense_block_count": 1,
                "expert_shared_count": 1,
                "expert_shared_feed_forward_length": 32,
                "expert_gating_func": 2,
                "expert_weights_scale": 2.5,
                "expert_weights_norm": True,
            },
            absent=(NO_BIAS,),
            n_layers=_N_LAYERS,
        ),
        4,  # every fourth layer attends to everything, which the file does not say
    ),
}
"""With the parts that a self-check finds exact."""

RUN_WHOLE: Final[dict[str, tuple[Family, str]]] = {
    "afmoe": (
        Family(
            "afmoe",
            {
                **BASE,
                **WIDE_HEADS,
                **MOE,
                "attention.sliding_window": 16,
                "leading_dense_block_count": 1,
                "expert_shared_count": 1,
                "expert_gating_func": 2,
            },
            absent=(NO_BIAS,),
            n_layers=_N_LAYERS,
        ),
        "other numbers than in the whole model",
    ),
    "smallthinker": (
        Family(
            "smallthinker",
            {**BASE, **MOE, "attention.sliding_window": 8, "expert_gating_func": 2},
            absent=(NO_BIAS,),
            n_layers=_N_LAYERS,
        ),
        "its window of 4096 tokens",
    ),
    "gemma 3n": (
        Family(
            "gemma3n",
            {
                **BASE,
                **WIDE_HEADS,
                "attention.sliding_window": 8,
                "altup.num_inputs": 4,
                "embedding_length_per_layer_input": 16,
                "attention.shared_kv_layers": 2,
                "attention.sliding_window_pattern": [True, True, True, False] * 2,
            },
            n_layers=_N_LAYERS,
            tied=True,
        ),
        "per_layer_token_embd",
    ),
}
"""With what the reason says."""
