"""The tokenizer: a byte-level BPE trained on the corpus, with the pre-tokenizer that libllama calls "qwen2".

All 256 bytes are tokens, so any UTF-8 text makes the round trip. "qwen2" splits numbers into single
digits, which makes copying a number the same task as copying a word. Qwen's own NFC normaliser is left
out, as libllama has none.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .template import SPECIAL_TOKENS

PRE_TOKENIZER = "qwen2"
PATTERN = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], n_vocab: int) -> Tokenizer:
    """A BPE of exactly `n_vocab` tokens; the special ones come first."""
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
