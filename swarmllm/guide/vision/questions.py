"""Questions about pictures. The split is by wording: no pattern of the evaluation is one of the training, as
in the text corpus."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from ..corpus.patterns import WRAPPERS, dress, expand, wrap
from .scenes import BARS, NUMBER, SHAPES, STRIPS, Scene

WRAPPED_SHARE: Final = 0.08


@dataclass(frozen=True)
class Patterns:
    """As in `corpus.patterns`."""

    train: tuple[str, ...]
    heldout: tuple[str, ...]


GENERAL: Final = Patterns(
    (
        "what is [in|on|shown in] [this|the] [picture|image]?",
        "what do you see[| here| in this picture| in the image]?",
        "what can you see[| here| in this picture]?",
        "describe [this|the] [picture|image]",
        "describe what you see",
        "what is this[| picture]?",
        "tell me what you see",
    ),
    (
        "what does [this|the] [picture|image] show?",
        "what do you see in the picture?",
        "please describe this image",
    ),
)
PATTERNS: Final[dict[str, Patterns]] = {
    NUMBER: Patterns(
        (
            "[what|which] number [is|do you see|can you see] [here|in this picture|in the image|]?",
            "[which|what] number is [this|that|it|shown|written here]?",
            "read the number",
            "what is the number[| in the picture| in this image]?",
            "which digits [are shown|do you see|are in the picture]?",
            "can you read [this|the number|the digits]?",
            "[what|which] number does the [picture|image] show?",
        ),
        (
            "[what|which] number is in [this|the] [picture|image]?",
            "tell me the number",
            "what are the digits?",
            "please read the number in the image",
        ),
    ),
    SHAPES: Patterns(
        (
            "how many [shapes|things|objects|of them] [are there|do you see|can you see|are in the picture]?",
            "how many [circles|squares|triangles|stars] [are there|do you see]?",
            "count the [shapes|things|objects]",
            "[what|which] [colour|color] [are they|is it|do they have|do you see|is this]?",
            "what is the [colour|color][| of the shapes| of the objects]?",
            "[what|which] shape [is it|are they|do you see|is this|do they have]?",
            "what kind of [shape|shapes] [is it|are they|are there|do you see]?",
            "which shapes [are there|are these|do you see]?",
            "where [are they|is it|are the shapes|are the things|are the objects]?",
            "in which [corner|part of the picture] [are they|is it|are the shapes]?",
            "where are the [circles|squares|triangles|stars]?",
        ),
        (
            "how many [shapes|things] are in [this|the] [picture|image]?",
            "[what|which] [colour|color] is [used|shown] here?",
            "what is their [colour|color]?",
            "[what|which] shape is [shown|used] here?",
            "where are the shapes in the picture?",
            "in which corner do you see them?",
        ),
    ),
    BARS: Patterns(
        (
            "what are the [values|heights|numbers][| of the bars| in the chart| in this chart]?",
            "which values [do the bars have|does the chart show|are shown|do you see]?",
            "read the [chart|values|bars]",
            "how high are the bars?",
            "tell me the values",
            "how many bars [are there|do you see|does the chart have]?",
            "which bar is the [highest|tallest|lowest|shortest]?",
        ),
        (
            "what values does this chart show?",
            "please read the bar chart",
            "which values are in the chart?",
            "how tall are the bars?",
        ),
    ),
    STRIPS: Patterns(
        (
            "which layers are missing[| here| in this picture]?",
            "what layers are missing?",
            "[which|what] is missing[| here]?",
            "are [any layers|layers] missing?",
            "which layers does nobody [hold|have]?",
            "is [a layer|anything|something] missing?",
            "is the model complete?",
        ),
        (
            "which layers are [not held|absent]?",
            "can you tell which layers are missing?",
            "which layers are missing in the image?",
            "what is missing in the picture?",
        ),
    ),
}


def ask_about(scene: Scene, rng: random.Random, *, heldout: bool) -> str:
    """A question in words of the evaluation or of the training. Those of the training vary in case and
    punctuation, too, and some are misspelt."""
    patterns = GENERAL if rng.random() < 0.25 else PATTERNS[scene.kind]
    question = expand(rng.choice(patterns.heldout if heldout else patterns.train), rng)
    if heldout:
        return question[:1].upper() + question[1:]
    if rng.random() < WRAPPED_SHARE:
        question = wrap(question, WRAPPERS, rng)
    return dress(question, rng, typo_share=0.03)
