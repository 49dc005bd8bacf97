"""Builds prompts that ask a model for the text between two texts (fill-in-the-middle), in the pattern that
code models were trained on.

As llama.cpp's server has it (`format_prompt_infill`), after "Qwen2.5-Coder Technical Report" (arXiv
2409.12186): other files of the repository, then the file's beginning and end. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from swarmllm_proto.ipc import InfillTokens

REPOSITORY = "myproject\n"
FILE = "filename\n"
"""Names that nobody told."""
SNIPPET = "\n\n--- snippet ---\n\n"
"""Before each file, where the model has no token for that."""


class FileText(NamedTuple):
    name: str
    text: str


class InfillTexts(NamedTuple):
    """All of them as token ids."""

    prefix: Sequence[int]
    suffix: Sequence[int]
    prompt: Sequence[int]
    """Behind the prefix: what the answer goes on from."""
    others: Sequence[int]
    """Files of the repository, with the tokens between them."""


def infill_prompt(tokens: InfillTokens, texts: InfillTexts, *, first: Sequence[int], n_max: int) -> list[int]:
    """At most `n_max` token ids, and no fewer than are needed without any text. Of what is too long, what is
    nearest to the gap is kept: three quarters of the room are for what stands before it, a quarter for what
    stands behind; other files get what is left. `first`: what the model wants at a text's beginning."""
    room = max(0, n_max - 3 - len(first) - len(texts.prompt))
    suffix = texts.suffix[: room // 4]
    prefix = _last(texts.prefix, room - room // 4)
    others = _last(texts.others, room - len(prefix) - len(suffix))
    before = [*first, *others, tokens.prefix, *prefix, *texts.prompt]
    return [*before, tokens.suffix, *suffix, tokens.middle]


def _last(tokens: Sequence[int], n: int) -> Sequence[int]:
    return tokens[max(0, len(tokens) - n) :]
