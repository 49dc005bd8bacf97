"""Learns the rows that the projector is to write.

These are the rows behind a caption, with which the guide repeats it whatever is asked, and stops; and small
changes to the rows of the captions' tokens, with which it repeats words that it would not repeat else.

The guide is frozen; only these rows are learned, from the captions of random scenes. No picture is drawn.
Noise on all rows makes up for what the projector will write only nearly right.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import embedding

from ..template import IM_START
from .captions import N_CAPTION, N_ENDING, N_ROWS, caption, token_rows
from .frozen import FrozenGuide, answers_loss
from .questions import ask_about
from .scenes import BARS, NUMBER, SHAPES, STRIPS, scene

NOISE: Final = 0.15
"""Standard deviation of the noise, as a share of that of the rows of tokens."""


LEARNED_KINDS: Final = (NUMBER, SHAPES, BARS, STRIPS, BARS, SHAPES, BARS, STRIPS)
"""The guide repeats short numbers at once; words, and many digits of which some are alike, take longer."""


class PictureWords(nn.Module):  # type: ignore[misc]
    """`ending`: f32 [N_ENDING, n_embd]; `changes`: f32 [n_vocab, n_embd], to the rows of captions' tokens."""

    def __init__(self, guide: FrozenGuide, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._guide, self._tokenizer = guide, tokenizer
        embed = guide.model.token_embd
        filler = token_rows(tokenizer, "")[-1]
        start = embed.weight[filler] + 0.3 * embed.weight.std() * torch.randn(N_ENDING, embed.embedding_dim)
        self.ending = nn.Parameter(start.clone())
        self.changes = nn.Parameter(torch.zeros_like(embed.weight))
        self._n_kept = N_ROWS - N_ENDING - N_CAPTION
        before = torch.tensor(
            tokenizer.encode(f"{IM_START}user\n").ids + token_rows(tokenizer, "")[: self._n_kept]
        )
        guide.begin(embed(before))

    def batch(
        self, n: int, rng: random.Random, *, kinds: Sequence[str] = LEARNED_KINDS
    ) -> list[tuple[str, str, str]]:
        """(kind, question, caption) of n scenes of the training."""
        found = []
        for number in range(n):
            shown = scene(kinds[number % len(kinds)], rng, "training")
            found.append((shown.kind, ask_about(shown, rng, heldout=False), caption(shown)))
        return found

    def loss(self, asked: list[tuple[str, str, str]], rng: random.Random | None) -> tuple[Tensor, Tensor]:
        """Mean loss of the answers' tokens, and which answers are right as a whole, bool [batch]. `rng`: for
        the noise, without which there is none."""
        answers = [answer for _, _, answer in asked]
        shown = [token_rows(self._tokenizer, answer)[self._n_kept :] for answer in answers]
        embed = self._guide.model.token_embd
        numbers = torch.tensor(shown)
        tokens = embed(numbers) + embedding(numbers, self.changes)
        rows = torch.cat((tokens, self.ending.expand(len(asked), -1, -1)), 1)
        if rng is not None:
            generator = torch.Generator().manual_seed(rng.randrange(2**62))
            rows = rows + NOISE * embed.weight.std() * torch.randn(rows.shape, generator=generator)
        return answers_loss(
            self._guide, self._tokenizer, rows, [question for _, question, _ in asked], answers
        )
