"""From a trained tower to a quantised GGUF that libmtmd loads beside the guide, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import gguf
import numpy as np
import torch

from .drawing import SIDE
from .tower import MEAN, STD, Tower, TowerShape

QUANTISED: Final = gguf.GGMLQuantizationType.Q8_0


def export_projector(tower: Tower, path: Path, *, name: str) -> None:
    """Write the tower to `path` in one atomic step: matrices in Q8_0, the patches in f16, the rest in f32."""
    shape = tower.shape
    part = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(part, "clip")
    writer.add_name(name)
    writer.add_license("Apache-2.0")
    writer.add_description("Reads digits, shapes, bar charts and strips of layers")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "janus_pro")
    writer.add_bool("clip.use_gelu", True)
    for key, number in {
        "embedding_length": shape.width,
        "feed_forward_length": shape.n_ff,
        "block_count": shape.n_layers,
        "projection_dim": shape.n_embd,
        "image_size": SIDE,
        "patch_size": shape.patch,
        "attention.head_count": shape.n_heads,
    }.items():
        writer.add_uint32(f"clip.vision.{key}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", shape.norm_eps)
    writer.add_array("clip.vision.image_mean", [MEAN] * 3)
    writer.add_array("clip.vision.image_std", [STD] * 3)
    for own_name, weight in tower.state_dict().items():
        values = np.ascontiguousarray(weight.detach().float().numpy())
        called = _gguf_name(own_name)
        if own_name == "patch_embd.weight":
            kernel = values.reshape(shape.width, 3, shape.patch, shape.patch)
            writer.add_tensor(called, kernel.astype(np.float16))
        elif values.ndim == 1 or own_name == "position_embd":
            writer.add_tensor(called, values)
        else:
            writer.add_tensor(called, gguf.quants.quantize(values, QUANTISED), raw_dtype=QUANTISED)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(path)


def read_tower(path: Path, shape: TowerShape | None = None) -> Tower:
    """The tower in a file of `export_projector`, with its matrices as they were rounded. Raises KeyError or
    RuntimeError where the file has other tensors than the shape."""
    tower = Tower(shape or TowerShape())
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    state = {}
    for own_name, weight in tower.state_dict().items():
        tensor = tensors[_gguf_name(own_name)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        state[own_name] = torch.from_numpy(values).reshape(weight.shape).clone()
    tower.load_state_dict(state)
    return tower


def _gguf_name(own_name: str) -> str:
    if own_name == "position_embd":
        return "v.position_embd.weight"
    if own_name.startswith("mm_"):
        return own_name.replace("mm_", "mm.", 1)
    return f"v.{own_name}"
