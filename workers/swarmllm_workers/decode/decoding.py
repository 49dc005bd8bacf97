"""The head's state of one request: sampler, tokens so far, and the text they make.

Of the text, readers see what is sure (see `TextStream`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swarmllm_proto.fingerprints import drawn_tokens, encode_fingerprint
from swarmllm_proto.ipc import FinishReason, Sampling, TokenAgain, TokenLogprob
from swarmllm_proto.text_stream import TextStream
from swarmllm_workers.decode.grammar import Grammar, spec_of
from swarmllm_workers.decode.sampling import Sampler, logprobs
from swarmllm_workers.decode.vocabulary import Vocabulary
from swarmllm_workers.errors import CallError


@dataclass(frozen=True)
class Decoded:
    index: int
    token: int
    text: bytes
    """UTF-8 that may be shown now."""
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] = ()
    stopped_by: int | None = None
    """The index of the stop string that ended it."""
    fingerprint: bytes = b""
    """Of the logits; empty where the sampling asks for none."""


class Decoding:
    """`decode` is idempotent: asked again for an index that it has passed, it forgets what came after and
    answers the same (unless the logits have changed)."""

    def __init__(self, vocabulary: Vocabulary, sampling: Sampling) -> None:
        """Raises CallError bad_message, no_room. What its grammar is worth is known later."""
        self._vocabulary = vocabulary
        self.sampling = sampling
        spec = spec_of(sampling)
        self.grammar = Grammar(vocabulary.grammars, spec, vocabulary.end_tokens) if spec is not None else None
        self._sampler = Sampler(sampling, vocabulary.handle, vocabulary.n_vocab, self.grammar)
        self._tokens: list[int] = []
        self._text = TextStream(sampling.stop)

    @property
    def tokens(self) -> Sequence[int]:
        """The tokens generated so far."""
        return self._tokens

    @property
    def n_generated(self) -> int:
        return len(self._tokens)

    def resume(self, generated: Sequence[int]) -> None:
        """Continue after `generated`, tokens that another decoding has sampled and shown. Raises CallError
        bad_message for tokens outside the vocabulary. The next `decode` checks that the grammar allows
        them."""
        n_vocab = self._vocabulary.n_vocab
        if any(token >= n_vocab for token in generated):
            raise CallError("bad_message", f"token ids lie in [0, {n_vocab})", "generated")
        self._sampler.resume(generated)
        self._tokens = list(generated)
        for token in generated:
            self._text.push(self._vocabulary.piece(token))

    def decode(self, logits: np.ndarray, index: int) -> Decoded:
        """Sample generated token `index` from f32 [n_vocab]. Raises CallError position_gap where tokens
        before it are unknown, engine where the logits are not finite, bad_message where the grammar is
        refused, too_complex where it takes too long; GrammarPending where the grammar has to be asked first:
        then it is to be called again."""
        if not 0 <= index <= len(self._tokens):
            raise CallError(
                "position_gap",
                f"token {index} is asked for after {len(self._tokens)} were generated",
                "n_prompt_tokens",
            )
        if index < len(self._tokens):
            self._rewind(index)
        token = self._sampler.sample(logits, index, self._tokens)
        self._tokens.append(token)
        text = self._text.push(self._vocabulary.piece(token))
        finish = self._finish_reason(token)
        if finish is not None:
            text += self._text.flush()
            if self._text.is_stopped:
                finish = "stop"
        elif self.grammar is not None:
            self.grammar.expect(self._tokens)
        return Decoded(
            index,
            token,
            text,
            finish,
            self._logprobs(logits, token),
            self._text.stopped_by,
            self._fingerprint(logits, index, token),
        )

    def decode_again(self, logits: np.ndarray, reported: int) -> TokenAgain:
        """Sample the next token from f32 [n_vocab], to compare it with `reported`, the token that others say
        follows. Whatever was sampled, decoding continues after `reported`. Raises as `decode`."""
        index, n_top = len(self._tokens), self.sampling.top_logprobs
        decoded = self.decode(logits, index)
        ends = decoded.token in self._vocabulary.end_tokens and not self.sampling.ignore_eos
        again = TokenAgain(
            decoded.token,
            ends,
            logprobs(logits, reported, n_top, self._vocabulary.full_piece),
            self._fingerprint(logits, index, reported),
            self._sampler.apart(logits, index, reported),
        )
        self._tokens[-1] = reported
        return again

    def check(self) -> None:
        """Raises CallError bad_message if the grammar is already known to be refused or too complex."""
        if self.grammar is not None:
            self.grammar.check()

    def close(self) -> None:
        if self.grammar is not None:
            self.grammar.close()

    def _logprobs(self, logits: np.ndarray, token: int) -> tuple[TokenLogprob, ...]:
        if not self.sampling.logprobs:
            return ()
        return logprobs(logits, token, self.sampling.top_logprobs, self._vocabulary.full_piece)

    def _fingerprint(self, logits: np.ndarray, index: int, token: int) -> bytes:
        key = self.sampling.fingerprint_key
        if key is None:
            return b""
        drawn = logits[drawn_tokens(key, index, len(logits))]
        return encode_fingerprint(drawn, self._sampler.largest, logits[token])

    def _finish_reason(self, token: int) -> FinishReason | None:
        if self._text.is_stopped:
            return "stop"
        if token in self._vocabulary.end_tokens and not self.sampling.ignore_eos:
            return "stop"
        return "length" if len(self._tokens) >= self.sampling.max_tokens else None

    def _rewind(self, index: int) -> None:
        del self._tokens[index:]
        self._text = TextStream(self.sampling.stop)
        for token in self._tokens:
            self._text.push(self._vocabulary.piece(token))
