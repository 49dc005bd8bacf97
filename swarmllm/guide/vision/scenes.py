"""What can be on a picture: numbers, shapes, bar charts, and the dashboard's strips of layers.

A scene is drawn by chance from a seed. About one in ten is held out and one in ten kept for validation, by
what is on it and not by its seed: no training picture shows the same number, the same shapes at the same
place, the same bars or the same strips.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal
from zlib import crc32

NUMBER, SHAPES, BARS, STRIPS = "number", "shapes", "bars", "strips"
KINDS: Final = (NUMBER, SHAPES, BARS, STRIPS)
COLOURS: Final = ("red", "green", "blue", "orange", "pink")
MORE_COLOURS: Final = ("yellow", "purple", "black", "grey")
"""Drawn while the projector is trained and never shown to the guide: shapes of the five colours are few, and
a projector that sees no others learns some of them by heart and miscounts those that are held out."""
NOUNS: Final = ("circle", "square", "triangle", "star")
PLACES: Final = ("upper left", "upper right", "lower left", "lower right")
SHAPES_MAX: Final = 6
DIGITS_MAX: Final = 3
BARS_MIN: Final = 2
BARS_MAX: Final = 5
HEIGHT_MAX: Final = 9
N_LAYERS: Final = 12
NODES_MAX: Final = 3
N_PARTS: Final = 10
"""One of so many parts of all scenes is held out, and one is for validation."""

Split = Literal["training", "validation", "heldout"]
"""Recipes are chosen by the validation scenes; the held-out ones are for the last measurement."""

Layers = tuple[int, int]
"""The first, and the one behind the last."""


@dataclass(frozen=True)
class Number:
    """Of one to three digits, as it is written: it may begin with zeros."""

    digits: str
    kind: str = NUMBER


@dataclass(frozen=True)
class Shapes:
    """So many of one shape and colour in one quarter of the picture."""

    count: int
    colour: str
    noun: str
    place: str
    kind: str = SHAPES


@dataclass(frozen=True)
class Bars:
    """Heights from 1 to 9 of two to five bars. One is the highest, and one the lowest."""

    heights: tuple[int, ...]
    kind: str = BARS


@dataclass(frozen=True)
class Strips:
    """What each node holds of a model's 12 layers, and the run of layers that nobody holds, if any."""

    held: tuple[Layers, ...]
    missing: Layers | None
    kind: str = STRIPS


Scene = Number | Shapes | Bars | Strips


def number(rng: random.Random) -> Number:
    n_digits = rng.choice((1, 2, 2, 3, 3, 3))
    return Number("".join(rng.choice("0123456789") for _ in range(n_digits)))


def shapes(rng: random.Random) -> Shapes:
    return Shapes(rng.randint(1, SHAPES_MAX), rng.choice(COLOURS), rng.choice(NOUNS), rng.choice(PLACES))


def bars(rng: random.Random) -> Bars:
    n = rng.randint(BARS_MIN, BARS_MAX)
    while True:
        heights = tuple(rng.randint(1, HEIGHT_MAX) for _ in range(n))
        if heights.count(max(heights)) == heights.count(min(heights)) == 1:
            return Bars(heights)


def strips(rng: random.Random) -> Strips:
    """Nodes hold one run each; runs may overlap. Where layers are missing it is one run of them."""
    missing: Layers | None = None
    if rng.random() < 0.8:
        start = rng.randrange(N_LAYERS)
        missing = start, start + min(rng.choice((1, 1, 2, 3, 4, 5, 6)), N_LAYERS - start)
    parts = [(0, N_LAYERS)]
    if missing is not None:
        parts = [part for part in ((0, missing[0]), (missing[1], N_LAYERS)) if part[0] < part[1]]
    n_nodes = rng.randint(max(1, len(parts)), NODES_MAX)
    held = list(parts)
    while len(held) < n_nodes:
        at = rng.randrange(len(held))
        start, end = held[at]
        if end - start < 2:
            held.append((start, end))
            continue
        cut = rng.randrange(start + 1, end)
        overlap = rng.choice((0, 0, 0, 1))
        held[at : at + 1] = [(start, cut), (max(start, cut - overlap), end)]
    return Strips(tuple(sorted(held)), missing)


_MAKERS: Final[dict[str, Callable[[random.Random], Scene]]] = {
    NUMBER: number,
    SHAPES: shapes,
    BARS: bars,
    STRIPS: strips,
}


def split_of(scene: Scene) -> Split:
    part = crc32(repr(scene).encode()) % N_PARTS
    return "heldout" if part == 0 else "validation" if part == 1 else "training"


def with_another_colour(scene: Scene, rng: random.Random) -> Scene:
    """Shapes in one of `MORE_COLOURS`; any other scene as it is."""
    return replace(scene, colour=rng.choice(MORE_COLOURS)) if isinstance(scene, Shapes) else scene


def scene(kind: str, rng: random.Random, split: Split) -> Scene:
    """A scene of that split."""
    while True:
        found = _MAKERS[kind](rng)
        if split_of(found) == split:
            return found
