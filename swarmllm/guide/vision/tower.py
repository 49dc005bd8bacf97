"""The projector in PyTorch, as libmtmd computes one of the family `janus_pro`: a vision transformer over
patches of the picture, and two layers that turn each of its outputs into a row of the text model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from .captions import N_ROWS
from .drawing import SIDE

MEAN = STD = 0.5
"""Of the pixels between 0 and 1, in all three colours."""


@dataclass(frozen=True)
class TowerShape:
    patch: int = 16
    width: int = 128
    n_layers: int = 4
    n_heads: int = 4
    n_ff: int = 512
    n_embd: int = 256
    """Of the text model."""
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if (SIDE // self.patch) ** 2 != N_ROWS:
            raise ValueError(f"patches of {self.patch} pixels do not make {N_ROWS} rows")


def _gelu(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


class TowerLayer(nn.Module):  # type: ignore[misc]
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.n_heads = shape.n_heads
        self.ln1 = nn.LayerNorm(shape.width, shape.norm_eps)
        self.attn_q = nn.Linear(shape.width, shape.width)
        self.attn_k = nn.Linear(shape.width, shape.width)
        self.attn_v = nn.Linear(shape.width, shape.width)
        self.attn_out = nn.Linear(shape.width, shape.width)
        self.ln2 = nn.LayerNorm(shape.width, shape.norm_eps)
        self.ffn_up = nn.Linear(shape.width, shape.n_ff)
        self.ffn_down = nn.Linear(shape.n_ff, shape.width)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x)
        q, k, v = (self._heads(part(h)) for part in (self.attn_q, self.attn_k, self.attn_v))
        seen = scaled_dot_product_attention(q, k, v)
        x = x + self.attn_out(seen.transpose(1, 2).flatten(-2))
        return x + self.ffn_down(_gelu(self.ffn_up(self.ln2(x))))


class Tower(nn.Module):  # type: ignore[misc]
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embd = nn.Linear(3 * shape.patch**2, shape.width)
        self.position_embd = nn.Parameter(torch.randn(N_ROWS, shape.width) * 0.3)
        self.blk = nn.ModuleList(TowerLayer(shape) for _ in range(shape.n_layers))
        self.post_ln = nn.LayerNorm(shape.width, shape.norm_eps)
        self.mm_0 = nn.Linear(shape.width, shape.n_embd)
        self.mm_1 = nn.Linear(shape.n_embd, shape.n_embd)
        for name, weight in self.named_parameters():
            if name.endswith(("attn_out.weight", "ffn_down.weight")):
                nn.init.normal_(weight, std=0.02 / (2 * shape.n_layers) ** 0.5)
            elif weight.ndim == 2 and name.startswith("blk."):
                nn.init.normal_(weight, std=shape.width**-0.5)
            elif name.endswith(".bias"):
                nn.init.zeros_(weight)

    def features(self, pixels: Tensor) -> Tensor:
        """f32 [batch, N_ROWS, width] of u8 [batch, SIDE, SIDE, 3]."""
        x = (pixels.float() / 255 - MEAN) / STD
        size = self.shape.patch
        n = SIDE // size
        x = x.view(-1, n, size, n, size, 3).permute(0, 1, 3, 5, 2, 4).reshape(len(x), N_ROWS, -1)
        x = self.patch_embd(x) + self.position_embd
        for layer in self.blk:
            x = layer(x)
        return self.post_ln(x)

    def rows(self, features: Tensor) -> Tensor:
        """f32 [..., n_embd]: what the text model gets."""
        return self.mm_1(_gelu(self.mm_0(features)))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.rows(self.features(pixels))
