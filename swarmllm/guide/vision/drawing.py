"""Draws scenes with Pillow, without a font of the system, and scales them as libmtmd does."""

from __future__ import annotations

import colorsys
import math
import random
from typing import Final

import numpy as np
from PIL import Image, ImageDraw

from .scenes import HEIGHT_MAX, N_LAYERS, NODES_MAX, PLACES, Bars, Number, Scene, Shapes, Strips

SIDE: Final = 96
"""Pixels on each side of what the projector sees."""
GREY: Final = (127, 127, 127)
"""What libmtmd lays around a picture that is no square."""
_FONT: Final = {
    "0": "01110 10001 10011 10101 11001 10001 01110",
    "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00010 00100 01000 11111",
    "3": "11111 00010 00100 00010 00001 10001 01110",
    "4": "00010 00110 01010 10010 11111 00010 00010",
    "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "00110 01000 10000 11110 10001 10001 01110",
    "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110",
    "9": "01110 10001 10001 01111 00001 00010 01100",
}
"""Digits of 5 x 7 dots, line by line."""
GLYPH_WIDTH, GLYPH_HEIGHT = 5, 7
CANVAS: Final = 192
"""Pixels on each side of a picture, and the width of strips."""
DOT: Final = 10
JITTER: Final = 1
"""Pixels by which things lie beside their places at most."""
_HUES: Final = {
    "red": (0.0, 0.85, 0.85),
    "orange": (0.08, 0.95, 0.98),
    "green": (0.36, 0.8, 0.65),
    "blue": (0.61, 0.8, 0.85),
    "pink": (0.88, 0.5, 0.97),
    "yellow": (0.15, 0.9, 0.95),
    "purple": (0.77, 0.7, 0.6),
    "black": (0.0, 0.08, 0.1),
    "grey": (0.0, 0.08, 0.55),
}
"""Hue, saturation, value."""

Colour = tuple[int, int, int]


def _colour(hue: float, saturation: float, value: float, rng: random.Random) -> Colour:
    return _rgb(
        (hue + rng.uniform(-0.012, 0.012)) % 1,
        min(1.0, saturation + rng.uniform(-0.08, 0.08)),
        min(1.0, value + rng.uniform(-0.08, 0.08)),
    )


def _rgb(hue: float, saturation: float, value: float) -> Colour:
    red, green, blue = colorsys.hsv_to_rgb(hue, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def _paper(rng: random.Random) -> Colour:
    level = rng.randint(240, 255)
    return level, level, level


def draw(scene: Scene, rng: random.Random) -> Image.Image:
    """In RGB; shades, and a little the places, vary with `rng`."""
    match scene:
        case Number():
            return _number(scene, rng)
        case Shapes():
            return _shapes(scene, rng)
        case Bars():
            return _bars(scene, rng)
        case Strips():
            return _strips(scene, rng)


def _number(scene: Number, rng: random.Random) -> Image.Image:
    columns = len(scene.digits) * (GLYPH_WIDTH + 1) - 1
    image = Image.new("RGB", (CANVAS, CANVAS), _paper(rng))
    pen = ImageDraw.Draw(image)
    ink = _rgb(0, 0, rng.uniform(0, 0.25))
    left = (CANVAS - columns * DOT) // 2 + rng.randint(-JITTER, JITTER)
    top = (CANVAS - GLYPH_HEIGHT * DOT) // 2 + rng.randint(-JITTER, JITTER)
    for at, digit in enumerate(scene.digits):
        for y, line in enumerate(_FONT[digit].split()):
            for x, dots in enumerate(line):
                if dots == "1":
                    x0 = left + (at * (GLYPH_WIDTH + 1) + x) * DOT
                    y0 = top + y * DOT
                    pen.rectangle((x0, y0, x0 + DOT - 1, y0 + DOT - 1), fill=ink)
    return image


def _shapes(scene: Shapes, rng: random.Random) -> Image.Image:
    side = CANVAS
    image = Image.new("RGB", (side, side), _paper(rng))
    pen = ImageDraw.Draw(image)
    down, right = divmod(PLACES.index(scene.place), 2)
    cell_width, cell_height = side / 2 / 3, side / 2 / 2
    radius = rng.uniform(13, 14.5)
    colour = _colour(*_HUES[scene.colour], rng)
    for cell in range(scene.count):
        row, column = divmod(cell, 3)
        x = right * side / 2 + (column + 0.5) * cell_width + rng.uniform(-1, 1)
        y = down * side / 2 + (row + 0.5) * cell_height + rng.uniform(-JITTER, JITTER)
        _shape(pen, scene.noun, x, y, radius, colour)
    return image


def _shape(pen: ImageDraw.ImageDraw, noun: str, x: float, y: float, radius: float, colour: Colour) -> None:
    if noun == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif noun == "square":
        half = radius * 0.88
        pen.rectangle((x - half, y - half, x + half, y + half), fill=colour)
    else:
        n_corners = 3 if noun == "triangle" else 10
        corners = []
        for corner in range(n_corners):
            length = radius * (0.42 if noun == "star" and corner % 2 else 1.15)
            angle = 2 * math.pi * corner / n_corners - math.pi / 2
            corners.append((x + length * math.cos(angle), y + length * math.sin(angle)))
        pen.polygon(corners, fill=colour)


def _bars(scene: Bars, rng: random.Random) -> Image.Image:
    width, height = CANVAS, CANVAS
    image = Image.new("RGB", (width, height), _paper(rng))
    pen = ImageDraw.Draw(image)
    line, faint = (90, 90, 90), (206, 206, 204)
    left, right, top, bottom = 12, width - 8, 10, height - 10
    unit = (bottom - top) / HEIGHT_MAX
    for level in range(1, HEIGHT_MAX + 1):
        y = bottom - level * unit
        pen.line((left, y, right, y), fill=faint, width=1)
    n = len(scene.heights)
    step = (right - left) / n
    thickness = step * rng.uniform(0.55, 0.7)
    fill = _colour(*_HUES["blue"], rng)
    for at, level in enumerate(scene.heights):
        x = left + (at + 0.5) * step
        pen.rectangle((x - thickness / 2, bottom - level * unit, x + thickness / 2, bottom), fill=fill)
    pen.line((left, top, left, bottom), fill=line, width=2)
    pen.line((left, bottom, right, bottom), fill=line, width=2)
    return image


def _strips(scene: Strips, rng: random.Random) -> Image.Image:
    """As the dashboard draws them, in its light colours: a line for each node, and below them what is covered
    in green and what is missing in red."""
    panel, sunk = (255, 255, 255), (240, 240, 237)
    good, bad = (26, 122, 72), (179, 38, 30)
    cell, left, top, line = 15, 6 + rng.randint(-JITTER, JITTER), 12 + rng.randint(-JITTER, JITTER), 26
    image = Image.new("RGB", (CANVAS, top + NODES_MAX * line + 24), panel)
    pen = ImageDraw.Draw(image)
    for at, (start, end) in enumerate(scene.held):
        y = top + at * line
        for layer in range(N_LAYERS):
            x = left + layer * cell
            pen.rectangle((x, y, x + cell - 2, y + 18), fill=sunk)
        colour = _rgb(rng.random(), rng.uniform(0.45, 0.6), 0.65)
        pen.rounded_rectangle((left + start * cell, y, left + end * cell - 2, y + 18), 4, fill=colour)
    y = top + NODES_MAX * line
    for start, end in _covered(scene):
        pen.rounded_rectangle((left + start * cell, y, left + end * cell - 1, y + 8), 3, fill=good)
    if scene.missing is not None:
        start, end = scene.missing
        pen.rectangle((left + start * cell, y, left + end * cell - 1, y + 8), fill=bad)
    return image


def _covered(scene: Strips) -> list[tuple[int, int]]:
    if scene.missing is None:
        return [(0, N_LAYERS)]
    parts = (0, scene.missing[0]), (scene.missing[1], N_LAYERS)
    return [part for part in parts if part[0] < part[1]]


def as_seen(image: Image.Image) -> np.ndarray:
    """u8 [SIDE, SIDE, 3]: scaled to fit (bicubic, as Pillow and libmtmd do), amid a grey square."""
    scale = np.float32(SIDE) / np.float32(max(image.size))
    width, height = (min(SIDE, math.ceil(np.float32(each) * scale)) for each in image.size)
    square = Image.new("RGB", (SIDE, SIDE), GREY)
    small = (
        image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BICUBIC)
    )
    square.paste(small, ((SIDE - width) // 2, (SIDE - height) // 2))
    return np.asarray(square)
