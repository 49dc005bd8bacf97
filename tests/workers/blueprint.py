"""Write a random model of any architecture that libllama knows.

Metadata is all that has to be said: `llama_model_init_from_user` answers with every tensor that the
architecture could have, and a family (`families.py`) names the optional ones that published files of its
kind lack. What is written is a GGUF like any other, and libllama is the judge of it: a tensor too few and it
does not load.
"""

from __future__ import annotations

import ctypes
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType, GGUFWriter
from llama_cpp import llama_cpp as lib

from .factory import N_VOCAB, add_vocabulary, random_matrix

_ggml = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))


class _Tensor(ctypes.Structure):
    """The head of `struct ggml_tensor`."""

    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("shape", ctypes.c_int64 * 4))


class _ReadSettings(ctypes.Structure):
    """`struct gguf_init_params`."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


_get_name = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(("ggml_get_name", _ggml))
_read_gguf = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p, _ReadSettings)(("gguf_init_from_file", _ggml))
_free_gguf = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(("gguf_free", _ggml))

_ALWAYS_ABSENT = (r".*\.(scale|input_scale)|rope_freqs\.weight|rope_factors_\w+\.weight",)
"""Tensors of any architecture that few files have: scales of NVFP4, rope factors."""
_FULL_PRECISION = re.compile(
    r".*(norm|ssm_a|ssm_d|conv1d\w*|conv|ffn_gate_inp\w*|sinks|rope_freqs|rope_factors\w*)(\.weight)?|.*\.bias"
)
"""Tensors that llama.cpp's converter never quantises."""


@dataclass(frozen=True)
class Family:
    """One kind of published model, small."""

    architecture: str
    keys: dict[str, Any]
    """Metadata without the architecture's prefix. int is written as u32, float as f32."""
    absent: tuple[str, ...] = ()
    """Patterns of the optional tensors that files of this kind do not have."""
    extra: tuple[str, ...] = ()
    """Tensors to have that are left out elsewhere: rope_freqs, rope_factors."""
    types: tuple[Type, ...] = (Type.Q8_0,)
    n_layers: int = 4
    tied: bool = False
    fused_qkv: bool = False
    fused_experts: bool = False
    predicts: bool = False
    """Its last layer is for multi-token prediction and has the tensors for it. 0.3.35 takes no other file."""
    extra_tokens: tuple[str, ...] = ()
    """Of the vocabulary, behind `SPECIAL_TOKENS`."""


def write(path: Path, family: Family) -> Path:
    outline = path.with_suffix(".outline")
    # Layers for multi-token prediction are asked for like any other: libllama skips them otherwise.
    keys = {key: value for key, value in family.keys.items() if key != "nextn_predict_layers"}
    writer = _begin(outline, replace(family, keys=keys))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shapes = tensor_shapes(outline)
    outline.unlink()
    shapes = dict(_as_published(shapes, family))
    absent = [re.compile(pattern) for pattern in (*_ALWAYS_ABSENT, *family.absent)]
    if family.tied:
        absent.append(re.compile(r"output\.weight"))
    writer = _begin(path, family)
    turn = 0
    for name, shape in shapes.items():
        if any(pattern.fullmatch(name) for pattern in absent) and name not in family.extra:
            continue
        type_ = Type.F32
        if len(shape) > 1 and not _FULL_PRECISION.fullmatch(name):
            type_ = family.types[turn % len(family.types)] if shape[0] % 32 == 0 else Type.F16
            turn += 1
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        writer.add_tensor(name, _values(name, shape[::-1], type_, rng), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _as_published(
    shapes: dict[str, tuple[int, ...]], family: Family
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """libllama asks for the queries apart and for the experts' gates fused, files have what they have."""
    for name, shape in shapes.items():
        stem, _, part = name.rpartition(".attn_q.")
        if family.fused_qkv and stem and part:
            others = [shapes[f"{stem}.attn_{letter}.{part}"][-1] for letter in "kv"]
            yield f"{stem}.attn_qkv.{part}", (*shape[:-1], shape[-1] + sum(others))
            continue
        if family.fused_qkv and re.fullmatch(r".*\.attn_[kv]\.\w+", name):
            continue
        stem, _, part = name.partition(".ffn_gate_up_exps.")
        if part and not family.fused_experts:
            for half in ("gate", "up"):
                yield f"{stem}.ffn_{half}_exps.{part}", (shape[0], shape[1] // 2, *shape[2:])
            continue
        yield name, shape
    if family.predicts:
        layer, n_embd = f"blk.{family.n_layers - 1}.nextn", family.keys["embedding_length"]
        yield f"{layer}.eh_proj.weight", (2 * n_embd, n_embd)
        yield from ((f"{layer}.{name}.weight", (n_embd,)) for name in ("enorm", "hnorm"))


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Every tensor libllama would take for this metadata, with its shape as GGUF stores it."""
    shapes: dict[str, tuple[int, ...]] = {}

    def record(tensor: int, _user_data: int | None) -> None:
        sizes = list(_Tensor.from_address(tensor).shape)
        while len(sizes) > 1 and sizes[-1] == 1:
            sizes.pop()
        shapes[_get_name(tensor).decode()] = tuple(sizes)

    metadata = _read_gguf(str(path).encode(), _ReadSettings(True, None))
    assert metadata, path
    callback = lib.llama_model_set_tensor_data_t(record)
    params = lib.llama_model_default_params()
    params.load_mtp = False
    model = lib.llama_model_init_from_user(metadata, callback, None, params)
    assert model, f"libllama refuses the metadata of {path.name}"
    lib.llama_model_free(model)
    _free_gguf(metadata)
    return shapes


def _begin(path: Path, family: Family) -> GGUFWriter:
    prefix = family.architecture
    writer = GGUFWriter(path, prefix, use_temp_file=False)
    writer.add_name("random model")
    writer.add_quantization_version(2)
    keys = {"block_count": family.n_layers, **family.keys}
    for key, value in keys.items():
        name = key if key.startswith("xielu.") else f"{prefix}.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            element = GGUFValueType.UINT32 if type(value[0]) is int else None
            writer.add_key_value(name, value, GGUFValueType.ARRAY, sub_type=element)
    add_vocabulary(writer, family.extra_tokens)
    n_vocab = N_VOCAB + len(family.extra_tokens)
    writer.add_key_value(f"{prefix}.vocab_size", n_vocab, GGUFValueType.UINT32)
    return writer


def _values(name: str, shape: tuple[int, ...], type_: Type, rng: np.random.Generator) -> np.ndarray:
    if len(shape) > 1 and type_ != Type.F32:
        return random_matrix(rng, shape, type_)
    noise = rng.standard_normal(shape).astype(np.float32)
    if re.search(r"ssm_a$|ssm_a\.", name):
        return -0.2 - np.abs(noise)  # states decay
    if name.startswith("rope_f"):
        return 1 + np.abs(noise)
    if "norm" in name and not name.endswith(".bias"):
        return 1 + 0.1 * noise
    if len(shape) > 1:
        return noise * np.float32(shape[-1] ** -0.5)
    return 0.2 * noise
