"""What each model architecture needs to be cut at a layer boundary: a table of data.

A segment is a small GGUF of some layers, renumbered from 0, that is fed hidden states (see `wire.md` and
the worker's `segment_file`). That is all most architectures need. The others differ in few ways, each a
column here: a layer's kind that depends on its absolute index, an input that is transformed before layer 0,
another name for the last layer's output, or state shared between layers, which no cut can keep.

An architecture that is not in the table runs whole. Every row has been checked with llama-cpp-python 0.3.36
on random models of 8 layers from llama.cpp's own test program (`tests/test-llama-archs.cpp`): for every cut
the row allows, prefill and 20 decode steps gave libllama's own logits bit for bit. Left out, with the
reason:

- the number of layers decides the computation: baichuan, deepseek2, minicpm, minicpm3;
- libllama refuses to be fed rows: glm4, glm4moe (as text models);
- what a cut gives differs: afmoe, smallthinker, talkie; mpt is exact only with learned positions;
- state that cannot be rolled back: mamba, mamba2, falcon-h1 and other recurrent models;
- several positions per row, or state shared between layers: qwen2vl, gemma3n, gemma4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

PER_LAYER_KEYS: Final = frozenset(
    {
        "attention.compress_ratios",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.indexer.types",
        "attention.recurrent_layers",
        "attention.sliding_window_pattern",
        "expert_feed_forward_length",
        "expert_used_count",
        "feed_forward_length",
        "swiglu_clamp_exp",
        "swiglu_clamp_shexp",
        "xielu.alpha_n",
        "xielu.alpha_p",
        "xielu.beta",
        "xielu.eps",
    }
)
"""Metadata keys (without the architecture's prefix) whose arrays have one element per layer."""


@dataclass(frozen=True)
class Architecture:
    name: str
    cut_alignment: int = 1
    """Layers may be cut at multiples of this."""
    alignment_key: str = ""
    """Metadata key (without prefix) whose number, where present, takes the place of `cut_alignment`."""
    sliding_window_period: int = 0
    """Every so many layers one attends to everything and the others to a window, unless the metadata says
    which: segments then get the list written out, and any cut works. 0: not so, or always in the
    metadata."""
    sliding_window_dense_first: bool = False
    """The layer that attends to everything is the first of each period, not the last."""
    window_is_optional: bool = False
    """Without `attention.sliding_window` libllama builds the model with full attention everywhere. A
    segment none of whose layers has a window loses the key; in other architectures, where libllama
    insists on a window, its layers get one that is wider than any context."""
    tap: str = "l_out"
    """Name in libllama's graph of a layer's output, which the graph completes with `-{layer}`."""
    input_tensor: str = ""
    """Name of the tensor that libllama derives from what it is fed (scaled, normalised, with positions
    added) and hands to layer 0. Segments that do not begin at layer 0 have it overwritten with the
    hidden state."""
    scales_tokens_only: bool = False
    """libllama multiplies embeddings of tokens by sqrt(n_embd), rows it is fed by nothing: the worker
    multiplies."""
    reset_keys: tuple[tuple[str, float], ...] = ()
    """Metadata (without prefix) set to these values in segments that do not begin at layer 0."""
    whole_reason: str = ""
    """Why it cannot be cut at all; "" where it can."""
    whole_n_layers: frozenset[int] = frozenset()
    """libllama tells this family's members apart by their number of layers and computes these differently."""

    def attends_in_window(self, layer: int, period: int) -> bool:
        """Whether a layer (absolute index) attends to a window, by a period. 0: every layer does."""
        at = layer % period if period else 1
        return period == 0 or (at != 0 if self.sliding_window_dense_first else at < period - 1)


@dataclass(frozen=True)
class CutRule:
    """How one model may be cut."""

    cut_alignment: int
    """Layers may be cut at multiples of this; 0: the model runs whole only."""
    whole_reason: str = ""


_PLAIN: Final = (
    "arcee arctic bailingmoe bailingmoe2 chatglm codeshell command-r dbrx deci deepseek dots1 ernie4_5 "
    "exaone falcon gptneox grovemoe hunyuan-dense hunyuan-moe internlm2 jais llama maincoder minimax-m2 "
    "mistral3 nemotron olmo olmoe openelm orion pangu-embedded phi2 phi3 phimoe plamo qwen qwen2 qwen2moe "
    "qwen3 qwen3moe refact seed_oss stablelm starcoder2 xverse"
)
"""Architectures that need nothing."""

_UNSCALED: Final = (("embedding_scale", 1.0),)

_TABLE: Final = (
    *(Architecture(name) for name in _PLAIN.split()),
    Architecture("bloom", input_tensor="inp_norm-0"),
    # Its windowed layers rotate positions and the others do not: both kinds must stay what they are.
    Architecture("cohere2", cut_alignment=4),
    Architecture("ernie4_5-moe", alignment_key="interleave_moe_layer_step"),
    Architecture("exaone4", whole_n_layers=frozenset({64})),
    Architecture("gemma", input_tensor="inp_scaled"),
    Architecture(
        "gemma2", sliding_window_period=2, input_tensor="inp_scaled", whole_n_layers=frozenset({46})
    ),
    Architecture(
        "gemma3",
        sliding_window_period=6,
        window_is_optional=True,
        scales_tokens_only=True,
        whole_n_layers=frozenset({62}),
    ),
    Architecture("gpt-oss", sliding_window_period=2),
    Architecture("gpt2", input_tensor="inpL"),
    Architecture("granite", reset_keys=_UNSCALED),
    Architecture("granitemoe", reset_keys=_UNSCALED),
    Architecture("grok", reset_keys=_UNSCALED),
    Architecture("mellum", sliding_window_period=4),
    Architecture("olmo2", sliding_window_period=4, window_is_optional=True),
    Architecture("plamo3", sliding_window_period=8, window_is_optional=True),
    Architecture("smollm3", cut_alignment=4),
    Architecture("starcoder", input_tensor="inpL"),
)

ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType({row.name: row for row in _TABLE})


def cut_rule(architecture: str, n_layers: int, number: Callable[[str], int | None]) -> CutRule:
    """The rule for a model; `number` looks up one of its metadata numbers by the full key (None: absent)."""
    row = ARCHITECTURES.get(architecture)
    if row is None:
        return CutRule(0, f"cutting the architecture {architecture} has not been verified")
    if row.whole_reason:
        return CutRule(0, row.whole_reason)
    if n_layers in row.whole_n_layers:
        return CutRule(0, f"libllama treats {architecture} with {n_layers} layers as a kind of its own")
    alignment = row.cut_alignment
    if row.alignment_key:
        alignment = number(f"{architecture}.{row.alignment_key}") or alignment
    if alignment >= n_layers:
        return CutRule(0, f"its layers may be cut at multiples of {alignment} only, and it has {n_layers}")
    return CutRule(alignment)
