"""Muon: momentum whose update is made orthogonal, for the matrices of the layers.

After Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/): five Newton-Schulz steps with the
quintic coefficients given there. Matrices of one shape go through the steps together. On this corpus it
needs far fewer tokens than AdamW alone, which still trains the embedding, the head and the norms.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonalise(matrices: Tensor, n_steps: int = 5) -> Tensor:
    """Replace the singular values of each [rows, columns] matrix of the batch by roughly 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    for _ in range(n_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon:
    """Nesterov momentum with orthogonal updates; `step` takes the learning rate of the moment."""

    def __init__(self, weights: Iterable[Tensor], momentum: float = 0.95, decay: float = 0.01) -> None:
        self.momentum = momentum
        self.decay = decay
        self.groups: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for weight in weights:
            self.groups[tuple(weight.shape)].append(weight)
        self.velocity = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}

    def step(self, rate: float) -> None:
        with torch.no_grad():
            self._step(rate)

    def _step(self, rate: float) -> None:
        for shape, group in self.groups.items():
            gradient = torch.stack([weight.grad for weight in group if weight.grad is not None])
            velocity = self.velocity[shape]
            velocity.mul_(self.momentum).add_(gradient)
            update = orthogonalise(gradient.add(velocity, alpha=self.momentum).bfloat16()).float()
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for weight, change in zip(group, update, strict=True):
                weight.mul_(1 - rate * self.decay).sub_(change, alpha=rate * scale)
