"""Random models of real sizes in some of llama.cpp's file types, in as many parts as wanted.

The weights are random bytes, written block by block straight as quantised values; only the scales in each
block are set, so that activations neither vanish nor overflow. 4 GB take seconds, and no array is larger
than a few megabytes. Speed does not depend on the values; the text such a model writes is noise.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from bench.common.shapes import Shape, add_vocabulary
from swarmllm_proto.split_files import SplitName

SEVEN_BILLION = Shape(
    n_layers=32, n_embd=4096, n_heads=32, n_kv_heads=32, n_ff=11008, n_vocab=32000, context_length=4096
)
"""Llama-2-7B."""
SIX_HUNDRED_MILLION = Shape(
    n_layers=28, n_embd=1024, n_heads=16, n_kv_heads=8, n_ff=3072, n_vocab=151936, context_length=8192
)
"""About Qwen3-0.6B. K-quants need rows of a multiple of 256, which those of Qwen2.5-0.5B are not."""
SEVENTY_BILLION = Shape(
    n_layers=80, n_embd=8192, n_heads=64, n_kv_heads=8, n_ff=28672, n_vocab=32000, context_length=4096
)
"""Llama-2-70B."""
THIRTY_BILLION_EXPERTS = Shape(
    n_layers=48,
    n_embd=2048,
    n_heads=32,
    n_kv_heads=4,
    n_ff=6144,
    n_vocab=151936,
    context_length=32768,
    n_experts=128,
    n_experts_used=8,
    n_ff_expert=768,
    n_embd_head=128,
)
"""Qwen3-30B-A3B: of each token 8 of 128 experts."""
TINY_EXPERTS = Shape(
    n_layers=4,
    n_embd=256,
    n_heads=4,
    n_kv_heads=2,
    n_ff=512,
    n_vocab=1024,
    context_length=512,
    n_experts=16,
    n_experts_used=4,
    n_ff_expert=256,
    n_embd_head=64,
)
TINY = Shape(n_layers=4, n_embd=256, n_heads=4, n_kv_heads=4, n_ff=512, n_vocab=1024, context_length=512)
"""To try the bench itself."""

_ALIGNMENT = 32
_BLOCKS_AT_ONCE = 2**14
_DEVIATION = 0.02
"""Of the weights."""
_SCALES_AT = {Type.Q4_K: 0, Type.Q6_K: 208, Type.Q8_0: 0, Type.Q4_0: 0}
"""Where a block has its f16 scale."""


@dataclass(frozen=True)
class FileType:
    """Which types llama.cpp's quantisation gives to the matrices of a file."""

    most: Type
    some: Type
    """Of the values and the second matrix of the feed-forward network in about half of the layers."""
    output: Type


FILE_TYPES = {
    "q4_k_m": FileType(Type.Q4_K, Type.Q6_K, Type.Q6_K),
    "q6_k": FileType(Type.Q6_K, Type.Q6_K, Type.Q6_K),
    "q8_0": FileType(Type.Q8_0, Type.Q8_0, Type.Q8_0),
    "q4_0": FileType(Type.Q4_0, Type.Q4_0, Type.Q6_K),
}
Q4_K_M = FILE_TYPES["q4_k_m"]


@dataclass(frozen=True)
class _Tensor:
    name: str
    type: Type
    n_columns: int
    n_rows: int = 1
    n_experts: int = 1

    @property
    def shape(self) -> list[int]:
        shape = [self.n_columns, self.n_rows, self.n_experts]
        while len(shape) > 1 and shape[-1] == 1:
            shape.pop()
        return shape

    @property
    def size_bytes(self) -> int:
        block, block_bytes = GGML_QUANT_SIZES[self.type]
        return self.n_experts * self.n_rows * self.n_columns // block * block_bytes


def write_model(
    shape: Shape,
    folder: Path,
    types: FileType = Q4_K_M,
    *,
    stem: str = "random",
    n_parts: int = 1,
    is_sparse: bool = False,
) -> list[Path]:
    """A llama model, or a qwen3moe model where the shape has experts, as llama-gguf-split would leave it: the
    files, in order. About 1 GB a second. `is_sparse`: the tensors are holes, which read as zeros and take no
    disk."""
    tensors = list(_tensors(shape, types))
    n_tensors = len(tensors)
    metadata = _metadata(shape, folder / "metadata.tmp", stem)
    rng = np.random.default_rng(0)
    scales = {kind: _scales(rng, kind) for kind in _SCALES_AT}
    names = SplitName(stem, 1, n_parts).all() if n_parts > 1 else (f"{stem}.gguf",)
    total_bytes = sum(tensor.size_bytes for tensor in tensors)
    paths = []
    for number, name in enumerate(names):
        inside, size_bytes = [], 0
        while tensors and (number == n_parts - 1 or size_bytes < total_bytes / n_parts):
            inside.append(tensors.pop(0))
            size_bytes += inside[-1].size_bytes
        keys = [metadata] if number == 0 else []
        n_keys = _n_keys(metadata) if number == 0 else 0
        if n_parts > 1:
            said = (("split.no", 2, number), ("split.count", 2, n_parts))
            keys += [_text(key) + struct.pack("<IH", kind, value) for key, kind, value in said]
            keys.append(_text("split.tensors.count") + struct.pack("<Ii", 5, n_tensors))
            n_keys += 3
        path = folder / str(name)
        with path.open("wb") as file:
            _write(file, keys, n_keys, inside, rng, {} if is_sparse else scales)
        paths.append(path)
    return paths


def _tensors(shape: Shape, types: FileType) -> Iterator[_Tensor]:
    most = types.most
    n_kv, n_layers = shape.n_head * shape.n_kv_heads, shape.n_layers
    n_q, n_experts = shape.n_head * shape.n_heads, shape.n_experts
    yield _Tensor("token_embd.weight", most, shape.n_embd, shape.n_vocab)
    for layer in range(n_layers):
        eighth = n_layers // 8
        has_more = layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2
        more = types.some if has_more else most
        prefix = f"blk.{layer}."
        yield _Tensor(f"{prefix}attn_norm.weight", Type.F32, shape.n_embd)
        yield _Tensor(f"{prefix}attn_q.weight", most, shape.n_embd, n_q)
        yield _Tensor(f"{prefix}attn_k.weight", most, shape.n_embd, n_kv)
        yield _Tensor(f"{prefix}attn_v.weight", more, shape.n_embd, n_kv)
        yield _Tensor(f"{prefix}attn_output.weight", most, n_q, shape.n_embd)
        yield _Tensor(f"{prefix}ffn_norm.weight", Type.F32, shape.n_embd)
        if n_experts:
            n_ff = shape.n_ff_expert
            yield _Tensor(f"{prefix}attn_q_norm.weight", Type.F32, shape.n_head)
            yield _Tensor(f"{prefix}attn_k_norm.weight", Type.F32, shape.n_head)
            yield _Tensor(f"{prefix}ffn_gate_inp.weight", Type.F32, shape.n_embd, n_experts)
            yield _Tensor(f"{prefix}ffn_gate_exps.weight", most, shape.n_embd, n_ff, n_experts)
            yield _Tensor(f"{prefix}ffn_up_exps.weight", most, shape.n_embd, n_ff, n_experts)
            yield _Tensor(f"{prefix}ffn_down_exps.weight", more, n_ff, shape.n_embd, n_experts)
            continue
        yield _Tensor(f"{prefix}ffn_gate.weight", most, shape.n_embd, shape.n_ff)
        yield _Tensor(f"{prefix}ffn_up.weight", most, shape.n_embd, shape.n_ff)
        yield _Tensor(f"{prefix}ffn_down.weight", more, shape.n_ff, shape.n_embd)
    yield _Tensor("output_norm.weight", Type.F32, shape.n_embd)
    yield _Tensor("output.weight", types.output, shape.n_embd, shape.n_vocab)


def _metadata(shape: Shape, path: Path, name: str) -> bytes:
    """All keys, as gguf-py writes them."""
    writer = GGUFWriter(path, "qwen3moe" if shape.n_experts else "llama", use_temp_file=False)
    writer.add_name(name)
    writer.add_block_count(shape.n_layers)
    writer.add_context_length(shape.context_length)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.n_head)
    if shape.n_experts:
        writer.add_key_length(shape.n_head)
        writer.add_value_length(shape.n_head)
        writer.add_expert_count(shape.n_experts)
        writer.add_expert_used_count(shape.n_experts_used)
        writer.add_expert_feed_forward_length(shape.n_ff_expert)
        writer.add_rope_freq_base(1e6)
    add_vocabulary(writer, shape.n_vocab)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    data = path.read_bytes()
    path.unlink()
    return data


def _n_keys(metadata: bytes) -> int:
    return int(struct.unpack_from("<Q", metadata, 16)[0])


def _write(
    file: BinaryIO,
    keys: list[bytes],
    n_keys: int,
    tensors: list[_Tensor],
    rng: np.random.Generator,
    scales: dict[Type, Callable[[np.ndarray], None]],
) -> None:
    """Without `scales` the tensors are holes."""
    keys = [key[24:] if key.startswith(b"GGUF") else key for key in keys]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), n_keys) + b"".join(keys)
    at = 0
    for tensor in tensors:
        shape = tensor.shape
        head += _text(tensor.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += struct.pack("<IQ", tensor.type, at)
        at += -(-tensor.size_bytes // _ALIGNMENT) * _ALIGNMENT
    file.write(head + bytes(-len(head) % _ALIGNMENT))
    if not scales:
        file.truncate(file.tell() + at)
        return
    for tensor in tensors:
        if tensor.type == Type.F32:
            around = 0 if tensor.n_rows > 1 else 1
            values = around + 0.05 * rng.standard_normal(tensor.n_columns * tensor.n_rows)
            file.write(values.astype(np.float32).tobytes())
        else:
            _write_blocks(file, tensor, rng, scales[tensor.type])
        file.write(bytes(-tensor.size_bytes % _ALIGNMENT))


def _write_blocks(
    file: BinaryIO, tensor: _Tensor, rng: np.random.Generator, set_scales: Callable[[np.ndarray], None]
) -> None:
    _, block_bytes = GGML_QUANT_SIZES[tensor.type]
    left = tensor.size_bytes // block_bytes
    while left:
        n_blocks = min(left, _BLOCKS_AT_ONCE)
        blocks = np.frombuffer(bytearray(rng.bytes(n_blocks * block_bytes)), np.uint8)
        blocks = blocks.reshape(n_blocks, block_bytes)
        set_scales(blocks)
        file.write(blocks.data)
        left -= n_blocks


def _scales(rng: np.random.Generator, kind: Type) -> Callable[[np.ndarray], None]:
    """Sets the scales of random blocks so that their weights have the mean 0 and _DEVIATION."""
    at = _SCALES_AT[kind]

    def with_scale(scale: float) -> Callable[[np.ndarray], None]:
        values = [scale, 7.5 * scale] if kind == Type.Q4_K else [scale]
        raw = np.array(values, np.float16).view(np.uint8)

        def set_them(blocks: np.ndarray) -> None:
            if kind == Type.Q4_0:  # -8 has no counterpart
                blocks[blocks < 0x10] |= 0x80
                blocks[blocks & 0x0F == 0] |= 0x08
            blocks[:, at : at + len(raw)] = raw

        return set_them

    sample = np.frombuffer(bytearray(rng.bytes(256 * GGML_QUANT_SIZES[kind][1])), np.uint8).reshape(256, -1)
    with_scale(2.0**-10)(sample)
    return with_scale(2.0**-10 * _DEVIATION / float(dequantize(sample, kind).std()))


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
