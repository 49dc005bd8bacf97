"""Judges the fingerprints of logits that a last stage sent with its tokens. Pure.

A fingerprint comes with each token, before anybody can know which answers are checked. Computing the same
rows through the same layers again shows whose logits they are: rounding moves them a little, other weights or
another KV move them further.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from swarmllm_proto.fingerprints import N_DRAWN, drawn_tokens
from swarmllm_proto.tensors import Tensor

LARGEST: Final = N_DRAWN
"""Where the largest logit stands."""
OWN: Final = N_DRAWN + 1
"""Where the logit of the token itself stands."""
WORST_TOKEN: Final = 2.0
"""In the mean over the tokens a single one counts for no more: logits of another text are about so far
away."""
NEAR: Final = 0.1
"""A fingerprint so near is of nearly the same logits: by these, hardly an eighth of the probability can lie
between a random number and the token that it draws."""


def distance(again: Tensor, reported: Tensor) -> float:
    """Mean over the tokens, of which none counts for more than WORST_TOKEN. As `distances`."""
    return float(np.mean(np.minimum(distances(again, reported), WORST_TOKEN)))


def distances(again: Tensor, reported: Tensor) -> Tensor:
    """f64 [n], for each token: length of the difference / length of what lies between the drawn logits and
    their mean. f32 [n, N_VALUES] each, of the same tokens."""
    drawn = again[:, :N_DRAWN].astype(np.float64)
    off = np.linalg.norm(reported.astype(np.float64) - again, axis=1)
    around = np.linalg.norm(drawn - drawn.mean(axis=1, keepdims=True), axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(off == 0, 0.0, off / around))


def is_possible(
    reported: Tensor, tokens: Sequence[int], first: int, key: int, n_vocab: int, *, is_likeliest: bool
) -> bool:
    """Whether there are logits with these fingerprints, f32 [n, N_VALUES], from which these tokens were
    taken, of which `first` is the index of the first. `is_likeliest`: each token is to be the likeliest
    one."""
    for at, (values, token) in enumerate(zip(reported, tokens, strict=True)):
        drawn, (largest, own) = values[:N_DRAWN], values[N_DRAWN:]
        ids = drawn_tokens(key, first + at, n_vocab)
        if drawn.max() > largest or own > largest or (is_likeliest and own != largest):
            return False
        said = dict(zip([token, *ids.tolist()], [own, *drawn.tolist()], strict=True))
        if own != said[token] or any(
            said[one] != value for one, value in zip(ids.tolist(), drawn, strict=True)
        ):
            return False
    return True
