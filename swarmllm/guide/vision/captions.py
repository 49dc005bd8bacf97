"""What the projector writes: a short text about the picture, a token in each row.

The guide was trained on text alone and stays as it is, so the rows of a picture have to be something that it
reads: nearly the rows of tokens. It can repeat words, so they spell a request to repeat what is seen, as in
"repeat: 427". The rows behind it are no token's; they are learned (`words`), and make the guide answer with
that caption whatever is asked next, and then stop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .scenes import Bars, Number, Scene, Shapes, Strips

if TYPE_CHECKING:
    from tokenizers import Tokenizer

N_ROWS: Final = 36
REQUEST: Final = "repeat:"
FILLER: Final = "\n"
"""The token of rows before the request and behind the caption."""
N_CAPTION: Final = 16
"""Rows for the caption; shorter ones are filled up."""
N_ENDING: Final = 4
"""Learned rows behind it."""


def caption(scene: Scene) -> str:
    """What is on the picture, and the answer to every question about it."""
    match scene:
        case Number():
            return scene.digits
        case Shapes():
            plural = "s" if scene.count > 1 else ""
            return f"{scene.count} {scene.colour} {scene.noun}{plural} {scene.place}"
        case Bars():
            return f"bars {''.join(map(str, scene.heights))}"
        case Strips():
            if scene.missing is None:
                return "none missing"
            return f"{scene.missing[0]}:{scene.missing[1]} missing"


def token_rows(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of all rows before the ending, for a caption: N_ROWS - N_ENDING of them. Raises ValueError
    for a caption that is too long."""
    filler: int = tokenizer.encode(FILLER).ids[0]
    request: list[int] = tokenizer.encode(REQUEST).ids
    spelled: list[int] = tokenizer.encode(f" {text}").ids
    n_before = N_ROWS - N_ENDING - N_CAPTION - len(request)
    if len(spelled) > N_CAPTION:
        raise ValueError(f"{text!r} has more than {N_CAPTION} tokens")
    return [filler] * n_before + request + spelled + [filler] * (N_CAPTION - len(spelled))
