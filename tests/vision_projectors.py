"""Tensors and metadata of projector families whose rows have one position each and see what came before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np


class Writer(Protocol):
    gguf: Any

    def matrix(self, name: str, *shape: int, scale: float | None = None) -> None: ...
    def normal(self, *shape: int) -> np.ndarray: ...
    def vector(self, name: str, size: int, around: float = 0.0) -> None: ...


@dataclass(frozen=True)
class Sizes:
    n_embd: int
    """Of the text model."""
    width: int
    """Of the vision encoder's layers."""
    merge: int
    """Patches on each side of the square that becomes one row."""


def _pair(writer: Writer, sizes: Sizes, *, n_inputs: int, first: str, last: str, bias: bool = True) -> None:
    writer.matrix(first, sizes.n_embd, n_inputs)
    writer.matrix(last, sizes.n_embd, sizes.n_embd)
    if bias:
        writer.vector(f"{first}.bias", sizes.n_embd)
        writer.vector(f"{last}.bias", sizes.n_embd)


def _merger(writer: Writer, sizes: Sizes) -> None:
    writer.gguf.add_uint32("clip.vision.spatial_merge_size", sizes.merge)
    writer.vector("mm.input_norm.weight", sizes.width, 1.0)
    writer.matrix("mm.patch_merger", sizes.width, sizes.width * sizes.merge**2)


def _pixtral(writer: Writer, sizes: Sizes) -> None:
    _pair(writer, sizes, n_inputs=sizes.width, first="mm.1", last="mm.2")
    writer.vector("v.token_embd.img_break", sizes.n_embd)
    if sizes.merge > 1:
        _merger(writer, sizes)


def _lightonocr(writer: Writer, sizes: Sizes) -> None:
    _pair(writer, sizes, n_inputs=sizes.width, first="mm.1", last="mm.2", bias=False)
    _merger(writer, sizes)


def _phi4(writer: Writer, sizes: Sizes) -> None:
    _bounds(writer, 32**2, 64**2)
    _pair(writer, sizes, n_inputs=sizes.width, first="mm.0", last="mm.2")


def _bounds(writer: Writer, n_min: int, n_max: int) -> None:
    writer.gguf.add_uint32("clip.vision.image_min_pixels", n_min)
    writer.gguf.add_uint32("clip.vision.image_max_pixels", n_max)


def _ldpv2(writer: Writer, sizes: Sizes) -> None:
    _pair(writer, sizes, n_inputs=sizes.width, first="mm.model.mlp.0", last="mm.model.mlp.2")
    kernel = writer.normal(sizes.n_embd, 1, 3, 3) / 3
    writer.gguf.add_tensor("mm.model.peg.0.weight", kernel.astype(np.float16))
    writer.vector("mm.model.peg.0.bias", sizes.n_embd)


def _unshuffled(writer: Writer, sizes: Sizes) -> int:
    writer.gguf.add_uint32("clip.vision.projector.scale_factor", sizes.merge)
    return sizes.width * sizes.merge**2


def _lfm2(writer: Writer, sizes: Sizes) -> None:
    n_inputs = _unshuffled(writer, sizes)
    writer.vector("mm.input_norm.weight", n_inputs, 1.0)
    writer.vector("mm.input_norm.bias", n_inputs)
    _pair(writer, sizes, n_inputs=n_inputs, first="mm.1", last="mm.2")


def _kimivl(writer: Writer, sizes: Sizes) -> None:
    n_inputs = _unshuffled(writer, sizes)
    writer.vector("mm.input_norm.weight", sizes.width, 1.0)
    writer.vector("mm.input_norm.bias", sizes.width)
    _pair(writer, sizes, n_inputs=n_inputs, first="mm.1", last="mm.2")


def _adapter(writer: Writer, sizes: Sizes) -> None:
    width, n_embd, n_ff = sizes.width, sizes.n_embd, 48
    writer.matrix("adapter.conv", width, width, 2, 2, scale=(4 * width) ** -0.5)
    writer.vector("adapter.conv.bias", width)
    writer.matrix("adapter.linear.linear", n_embd, width)
    writer.vector("adapter.linear.norm1.weight", n_embd, 1.0)
    writer.vector("adapter.linear.norm1.bias", n_embd)
    writer.matrix("adapter.linear.dense_h_to_4h", n_ff, n_embd)
    writer.matrix("adapter.linear.gate", n_ff, n_embd)
    writer.matrix("adapter.linear.dense_4h_to_h", n_embd, n_ff)
    writer.vector("adapter.boi", n_embd)
    writer.vector("adapter.eoi", n_embd)


def _llama4(writer: Writer, sizes: Sizes) -> None:
    n_inputs = _unshuffled(writer, sizes)
    writer.matrix("mm.model.mlp.1", 48, n_inputs)
    writer.matrix("mm.model.mlp.2", 48, 48)
    writer.matrix("mm.model.fc", sizes.n_embd, 48)


def _dots_ocr(writer: Writer, sizes: Sizes) -> None:
    n_inputs = _unshuffled(writer, sizes)
    _bounds(writer, 32**2, 64**2)
    writer.vector("mm.input_norm.weight", sizes.width, 1.0)
    writer.vector("mm.input_norm.bias", sizes.width)
    writer.vector("mm.post_norm.weight", sizes.width, 1.0)
    _pair(writer, sizes, n_inputs=n_inputs, first="mm.0", last="mm.2")


def _resampler(writer: Writer, sizes: Sizes) -> None:
    """MiniCPM-V 2.6: learned queries look at the picture."""
    width, n_embd, n_queries = sizes.width, sizes.n_embd, 24
    writer.gguf.add_int32("clip.minicpmv_version", 3)
    writer.gguf.add_uint32("clip.minicpmv_query_num", n_queries)
    writer.vector("resampler.pos_embed_k", n_embd)
    writer.gguf.add_tensor("resampler.query", writer.normal(n_queries, n_embd))
    writer.matrix("resampler.proj", n_embd, n_embd)
    writer.matrix("resampler.kv", n_embd, width)
    for part in ("q", "k", "v", "out"):
        writer.matrix(f"resampler.attn.{part}", n_embd, n_embd)
        writer.vector(f"resampler.attn.{part}.bias", n_embd)
    for part in ("q", "kv", "post"):
        writer.vector(f"resampler.ln_{part}.weight", n_embd, 1.0)
        writer.vector(f"resampler.ln_{part}.bias", n_embd)


@dataclass(frozen=True)
class Plain:
    add: Callable[[Writer, Sizes], None]
    image: int = 32
    patch: int = 8
    merge: int = 2
    has_class: bool = False
    has_positions: bool = True
    n_positions: int | None = None
    """Where they are not those of a picture of `image`."""
    is_linear: bool = False
    """Patches are embedded by a matrix, not by a convolution."""


PLAIN: Final[dict[str, Plain]] = {
    "pixtral": Plain(_pixtral, merge=1, has_positions=False),
    "lightonocr": Plain(_lightonocr, image=64, has_positions=False),
    "phi4": Plain(_phi4),
    "ldpv2": Plain(_ldpv2, image=96, patch=4),
    "lfm2": Plain(_lfm2, image=64, patch=16),
    "kimivl": Plain(_kimivl),
    "adapter": Plain(_adapter),
    "llama4": Plain(_llama4, has_class=True, is_linear=True),
    "dots_ocr": Plain(_dots_ocr, has_positions=False),
    "resampler": Plain(_resampler, n_positions=70 * 70),
}
