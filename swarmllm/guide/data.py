"""From conversations to tokens and batches.

Conversations are not packed into long rows: conversations of like length share a batch instead. Nothing
is attended to across samples, every one starts at position 0 as it will in use, and attention over short
rows costs little, which on a CPU is a third of the time.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from . import corpus
from .template import ANSWER_PREFIX, END_OF_TEXT, IM_END, SPECIAL_TOKENS, render

PRE_TOKENIZER = "qwen2"
PATTERN = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
IGNORED = -100
"""Target of a position that is not learned."""
MAX_TOKENS = 640
"""Longer conversations are left out; there are hardly any."""
N_SAMPLES_PER_POOL = 6000
"""Batches are made within pools of this many conversations."""


def train_tokenizer(texts: Iterable[str], n_vocab: int) -> Tokenizer:
    """A byte-level BPE of exactly `n_vocab` tokens; the special ones come first.

    All 256 bytes are tokens, so any UTF-8 text makes the round trip. libllama's pre-tokenizer "qwen2" splits
    numbers into single digits, which makes copying a number the same task as copying a word. Qwen's own NFC
    normaliser is left out, as libllama has none. Raises ValueError where the texts give fewer tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != n_vocab:
        raise ValueError(f"the texts give {tokenizer.get_vocab_size()} tokens, not {n_vocab}")
    return tokenizer


def render_sample(sample: corpus.Sample, rng: random.Random) -> str:
    return render(sample.messages, sample.tools, sort_keys=rng.random() < 0.6)


def sample_texts(
    n: int, seed: int, echo_share: float = 0.0, mix: corpus.Mix = corpus.WIDE_MIX
) -> Iterator[str]:
    rng = random.Random(seed)
    for sample in corpus.build(n, seed, echo_share, mix):
        yield render_sample(sample, rng)


@dataclass(frozen=True)
class Batch:
    """`tokens` and `targets` are int64 [row, position]; targets are the next tokens, or IGNORED."""

    tokens: Tensor
    targets: Tensor
    n_tokens: int


class AnswerMask:
    """Finds the tokens that the model has to write: answers with their end token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.prefix = tokenizer.encode(ANSWER_PREFIX).ids
        self.end = tokenizer.token_to_id(IM_END)

    def targets(self, ids: list[int]) -> list[int]:
        """For each position the token to predict there, or IGNORED."""
        targets = [IGNORED] * len(ids)
        n_prefix, at = len(self.prefix), 0
        while at <= len(ids) - n_prefix:
            if ids[at : at + n_prefix] != self.prefix:
                at += 1
                continue
            at += n_prefix
            while at < len(ids):
                targets[at - 1] = ids[at]
                at += 1
                if ids[at - 1] == self.end:
                    break
        return targets


def _collate(rows: list[tuple[list[int], list[int]]], padding: int) -> Batch:
    width = max(len(ids) for ids, _ in rows)
    tokens = np.full((len(rows), width), padding, dtype=np.int64)
    targets = np.full((len(rows), width), IGNORED, dtype=np.int64)
    for row, (ids, wanted) in enumerate(rows):
        tokens[row, : len(ids)] = ids
        targets[row, : len(wanted)] = wanted
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), sum(len(ids) for ids, _ in rows))


def batches(
    tokenizer: Tokenizer,
    n_batch_tokens: int,
    seed: int,
    echo_share: float = 0.0,
    mix: corpus.Mix = corpus.WIDE_MIX,
) -> Iterator[Batch]:
    """Yield batches of about `n_batch_tokens` positions without end; the same seed gives the same ones."""
    mask = AnswerMask(tokenizer)
    padding = tokenizer.encode(END_OF_TEXT).ids[0]
    rng = random.Random(seed)
    while True:
        texts = list(sample_texts(N_SAMPLES_PER_POOL, rng.randrange(2**62), echo_share, mix))
        encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
        encoded = sorted((ids[:-1] for ids in encoded if len(ids) <= MAX_TOKENS), key=len)
        pool: list[list[list[int]]] = [[]]
        for ids in encoded:
            if (len(pool[-1]) + 1) * len(ids) > n_batch_tokens and pool[-1]:
                pool.append([])
            pool[-1].append(ids)
        rng.shuffle(pool)
        for rows in pool:
            yield _collate([(ids, mask.targets(ids)) for ids in rows], padding)
