"""The picture that the demo asks about: the dashboard's layer strips of a model whose middle third no node
holds."""

from __future__ import annotations

import base64
import io
import random
from typing import TYPE_CHECKING, Final

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from swarmllm.cli.chat.conversation import PictureFile

if TYPE_CHECKING:
    from PIL.Image import Image

QUESTION: Final = "Which layers are missing?"
IN_WORDS: Final = (
    "[a picture: a strip of layers for each of two nodes, and below them a bar, green where layers are held"
    " and red where they are missing]"
)
_HELD: Final = ((0, 4), (8, 12))
_MISSING: Final = (4, 8)
_SEED: Final = 4
_WIDTH: Final = 56
"""Columns in a terminal."""
_UPPER_HALF: Final = "▀"


def picture() -> Image:
    # Pillow takes a while to import, and no other command needs it.
    from swarmllm.guide.vision.drawing import draw
    from swarmllm.guide.vision.scenes import Strips

    return draw(Strips(_HELD, _MISSING), random.Random(_SEED))


def as_file(image: Image) -> PictureFile:
    written = io.BytesIO()
    image.save(written, "PNG")
    data = base64.b64encode(written.getvalue()).decode()
    return PictureFile("strips.png", f"data:image/png;base64,{data}", *image.size)


def shown(image: Image, console: Console) -> Text:
    """In half blocks, two pixels a character, where the console has 256 colours; else in words."""
    if not console.is_terminal or console.color_system not in ("256", "truecolor"):
        return Text(IN_WORDS, "dim")
    # Like Pillow: no other command needs it.
    import numpy as np

    width = min(_WIDTH, console.width - 4)
    height = max(2, round(image.height * width / image.width)) // 2 * 2
    pixels = np.asarray(image.resize((width, height)))
    text = Text()
    for y in range(0, height, 2):
        text.append("  ")
        for x in range(width):
            upper, lower = (Color.from_rgb(*each) for each in pixels[y : y + 2, x].tolist())
            text.append(_UPPER_HALF, Style(color=upper, bgcolor=lower))
        text.append("\n")
    text.rstrip()
    return text
