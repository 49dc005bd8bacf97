"""Requests to repeat random words: dense practice in copying, for the second phase of the training."""

from __future__ import annotations

import random

from .sample import Sample, assistant, user
from .slots import city, invented, layer_range, number, person

_ASKS = (
    "repeat after me: {w}",
    "say: {w}",
    "echo {w}",
    "repeat: {w}",
    "please repeat: {w}",
    "write: {w}",
    "copy this: {w}",
)


def _word(rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.5:
        return invented(rng) if rng.random() < 0.5 else invented(rng).lower()
    if roll < 0.65:
        return city(rng)
    if roll < 0.75:
        return person(rng)
    if roll < 0.9:
        return str(number(rng))
    start, end = layer_range(rng)
    return f"{start}:{end}"


def echo(rng: random.Random) -> Sample:
    words = " ".join(_word(rng) for _ in range(rng.randrange(2, 10)))
    return Sample((user(rng.choice(_ASKS).replace("{w}", words)), assistant(words)), "echo")
