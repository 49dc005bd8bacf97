"""The architecture in PyTorch: a llama exactly as libllama computes it.

libllama rotates neighbouring pairs (2i, 2i+1) of a head for the architecture "llama". Training with the
same interleaved rotation makes every weight go into the GGUF as it is, without the permutation that
converters need.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. `n_embd` and `n_ff` are multiples of 256 so that K-quants are possible."""

    n_layers: int = 12
    n_embd: int = 256
    n_heads: int = 4
    n_kv_heads: int = 2
    n_ff: int = 512
    n_vocab: int = 2048
    n_context: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_heads


GUIDE_SHAPE = Shape()
DRAFT_SHAPE = Shape(n_layers=1)


def rotation(n_positions: int, shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [n_positions, head_size / 2], float32."""
    powers = torch.arange(0, shape.head_size, 2, dtype=torch.float32) / shape.head_size
    angles = torch.outer(torch.arange(n_positions, dtype=torch.float32), shape.rope_theta**-powers)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last axis of [batch, head, position, head_size]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Norm(nn.Module):  # type: ignore[misc]
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.n_embd))
        self.eps = shape.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_size = shape.n_kv_heads * shape.head_size
        self.attn_norm = Norm(shape)
        self.attn_q = nn.Linear(shape.n_embd, shape.n_embd, bias=False)
        self.attn_k = nn.Linear(shape.n_embd, kv_size, bias=False)
        self.attn_v = nn.Linear(shape.n_embd, kv_size, bias=False)
        self.attn_output = nn.Linear(shape.n_embd, shape.n_embd, bias=False)
        self.ffn_norm = Norm(shape)
        self.ffn_gate = nn.Linear(shape.n_embd, shape.n_ff, bias=False)
        self.ffn_up = nn.Linear(shape.n_embd, shape.n_ff, bias=False)
        self.ffn_down = nn.Linear(shape.n_ff, shape.n_embd, bias=False)

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n_batch, n_positions, n_embd = x.shape
        size = self.shape.head_size
        q = self.attn_q(x).view(n_batch, n_positions, self.shape.n_heads, size).transpose(1, 2)
        k = self.attn_k(x).view(n_batch, n_positions, self.shape.n_kv_heads, size).transpose(1, 2)
        v = self.attn_v(x).view(n_batch, n_positions, self.shape.n_kv_heads, size).transpose(1, 2)
        n_shared = self.shape.n_heads // self.shape.n_kv_heads
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        k, v = k.repeat_interleave(n_shared, dim=1), v.repeat_interleave(n_shared, dim=1)
        scores = q @ k.transpose(-1, -2) * size**-0.5
        future = torch.ones(n_positions, n_positions, dtype=torch.bool).triu(1)
        out = scores.masked_fill(future, -torch.inf).softmax(-1).to(v.dtype) @ v
        return self.attn_output(out.transpose(1, 2).reshape(n_batch, n_positions, n_embd))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self._attend(self.attn_norm(x), cos, sin)
        h = self.ffn_norm(x)
        return x + self.ffn_down(silu(self.ffn_gate(h)) * self.ffn_up(h))


class Llama(nn.Module):  # type: ignore[misc]
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.n_vocab, shape.n_embd)
        self.blk = nn.ModuleList(Layer(shape) for _ in range(shape.n_layers))
        self.output_norm = Norm(shape)
        self.output = nn.Linear(shape.n_embd, shape.n_vocab, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                is_sink = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * shape.n_layers) ** 0.5 if is_sink else 0.02)
        cos, sin = rotation(shape.n_context, shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Normed hidden states [batch, position, n_embd] of token ids [batch, position]."""
        n_positions = tokens.shape[1]
        cos, sin = self.cos[:n_positions], self.sin[:n_positions]
        x = self.token_embd(tokens)
        for layer in self.blk:
            x = layer(x, cos, sin)
        return self.output_norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, position, n_vocab] of token ids [batch, position]."""
        return self.output(self.hidden(tokens))
