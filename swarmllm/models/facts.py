"""What people ask of a model's size: how many parameters, and how they are quantised. Pure."""

from __future__ import annotations

import math
from collections import Counter

from gguf import GGMLQuantizationType

from swarmllm.models.manifest import Manifest

_MIXED = frozenset({"Q3_K", "Q4_K", "Q5_K"})
"""Types of which llama.cpp makes mixtures with larger types for some tensors."""


def n_parameters(manifest: Manifest) -> int:
    return sum(math.prod(tensor.shape) for tensor in manifest.tensors)


def parameter_size(manifest: Manifest) -> str:
    """As people say it: 7.2B, 494M."""
    n = n_parameters(manifest)
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n >= unit:
            shown = f"{n / unit:.1f}" if n < 100 * unit and unit == 10**9 else f"{n / unit:.0f}"
            return f"{shown}{letter}"
    return str(n)


def quantisation(manifest: Manifest) -> str:
    """The type of most parameters; of a mixture with llama.cpp's name as far as the tensors tell: Q4_K_M
    where some matrices of the layers have a larger type, else Q4_K_S."""
    n_of: Counter[int] = Counter()
    for tensor in manifest.tensors:
        if len(tensor.shape) > 1:
            n_of[tensor.ggml_type] += math.prod(tensor.shape)
    if not n_of:
        return "unknown"
    most = GGMLQuantizationType(n_of.most_common(1)[0][0])
    name = str(most.name)
    if name not in _MIXED:
        return name
    in_layers = {
        GGMLQuantizationType(tensor.ggml_type).name
        for tensor in manifest.tensors
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1
    }
    return f"{name}_{'M' if in_layers & ({'Q5_K', 'Q6_K'} - {name}) else 'S'}"
