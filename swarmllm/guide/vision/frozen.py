"""The guide as it is in its file, in PyTorch and frozen, its tokenizer, and how well it answers.

Its weights are those that libllama uses: the quantised matrices of the file, as float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from ..data import IGNORED, PATTERN
from ..model import GUIDE_SHAPE, Llama, rotate
from ..template import ANSWER_PREFIX, IM_END, SPECIAL_TOKENS


def guide_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of the file."""
    reader = gguf.GGUFReader(path)
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    merges = reader.get_field("tokenizer.ggml.merges").contents()
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def guide_model(path: Path) -> Llama:
    model = Llama(GUIDE_SHAPE)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    state = {
        name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for name, tensor in tensors.items()
    }
    model.load_state_dict(state)
    model.requires_grad_(False)
    return model


Past = list[tuple[Tensor, Tensor]]
"""Keys and values [1, kv head, position, head size] of each layer."""


class FrozenGuide:
    """Rows in, hidden states out, behind a beginning of the prompt that is computed once."""

    def __init__(self, model: Llama) -> None:
        self.model = model
        self.past: Past = []
        self.n_past = 0

    def begin(self, rows: Tensor) -> None:
        """Keep the keys and values of [n, n_embd] rows, with which every prompt begins."""
        self.past, self.n_past = [], 0
        past: Past = []
        with torch.no_grad():
            self._run(rows[None], past)
        self.past, self.n_past = past, len(rows)

    def hidden(self, rows: Tensor) -> Tensor:
        """Normed hidden states of f32 [batch, n, n_embd]."""
        return self.model.output_norm(self._run(rows, None))

    def _run(self, rows: Tensor, kept: Past | None) -> Tensor:
        shape = self.model.shape
        n, size = rows.shape[1], shape.head_size
        cos, sin = (each[self.n_past : self.n_past + n] for each in (self.model.cos, self.model.sin))
        mask = torch.ones(n, self.n_past + n, dtype=torch.bool).tril(self.n_past)
        x = rows
        for at, layer in enumerate(self.model.blk):
            h = layer.attn_norm(x)
            q = layer.attn_q(h).unflatten(-1, (shape.n_heads, size)).transpose(1, 2)
            k = layer.attn_k(h).unflatten(-1, (shape.n_kv_heads, size)).transpose(1, 2)
            v = layer.attn_v(h).unflatten(-1, (shape.n_kv_heads, size)).transpose(1, 2)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            if kept is not None:
                kept.append((k, v))
            if self.past:
                before = [each.expand(len(rows), -1, -1, -1) for each in self.past[at]]
                k, v = torch.cat((before[0], k), 2), torch.cat((before[1], v), 2)
            n_shared = shape.n_heads // shape.n_kv_heads
            k, v = k.repeat_interleave(n_shared, 1), v.repeat_interleave(n_shared, 1)
            seen = scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + layer.attn_output(seen.transpose(1, 2).flatten(-2))
            h = layer.ffn_norm(x)
            x = x + layer.ffn_down(silu(layer.ffn_gate(h)) * layer.ffn_up(h))
        return x


def answers_loss(
    guide: FrozenGuide, tokenizer: Tokenizer, rows: Tensor, questions: Sequence[str], answers: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Mean loss of the answers' tokens where a user's message begins with rows, f32 [batch, n, n_embd], and a
    question; and which answers are right as a whole with greedy decoding, bool [batch]."""
    asked = [tokenizer.encode(f"{each}{IM_END}\n{ANSWER_PREFIX}").ids for each in questions]
    said = [tokenizer.encode(f"{each}{IM_END}").ids for each in answers]
    width = max(len(text) + len(answer) for text, answer in zip(asked, said, strict=True)) - 1
    ids = torch.full((len(said), width), tokenizer.encode(IM_END).ids[0])
    targets = torch.full((len(said), width), IGNORED)
    for row, (text, answer) in enumerate(zip(asked, said, strict=True)):
        whole = (text + answer)[:-1]
        ids[row, : len(whole)] = torch.tensor(whole)
        targets[row, len(text) - 1 : len(whole)] = torch.tensor(answer)
    hidden = guide.hidden(torch.cat((rows, guide.model.token_embd(ids)), 1))[:, rows.shape[1] :]
    learned = targets != IGNORED
    logits = guide.model.output(hidden[learned])
    wrong = torch.zeros(targets.shape, dtype=torch.bool)
    wrong[learned] = logits.argmax(-1) != targets[learned]
    return cross_entropy(logits, targets[learned]), ~wrong.any(1)
