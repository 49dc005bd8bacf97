"""Random walks through what a JSON schema lets a model write, and texts checked against it."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np

from swarmllm_workers.decode.vocabulary import Vocabulary
from swarmllm_workers.grammars.gbnf_matcher import NotFollowed
from swarmllm_workers.grammars.json_matcher import JsonMatcher, tokenizer_of
from swarmllm_workers.grammars.messages import GrammarSpec

CLOSING = b'"}]'


class Walks:
    """Over a vocabulary whose first 256 tokens are the single bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer_of(vocabulary.handle, vocabulary.n_vocab)

    def matcher(self, schema: Any, **around: Any) -> JsonMatcher:
        """Raises NotFollowed where the schema is refused."""
        text = msgspec.json.encode(schema).decode()
        return JsonMatcher(self._vocabulary.handle, self._tokenizer, GrammarSpec(json_schema=text, **around))

    def write(self, schema: Any, seed: int, n_tokens_max: int = 1000, **around: Any) -> str | None:
        """What a model of random choices writes, which grows ever more eager to come to an end; None where it
        comes to none."""
        rng, matcher = random.Random(seed), self.matcher(schema, **around)
        tokens: list[int] = []
        while len(tokens) < n_tokens_max:
            allowed = allowed_of(matcher)
            if not self._vocabulary.end_tokens.isdisjoint(allowed) and rng.random() < 0.3 + len(tokens) / 100:
                allowed = []
            allowed = [token for token in allowed if token not in self._vocabulary.end_tokens]
            if not allowed:
                return b"".join(map(self._vocabulary.piece, tokens)).decode()
            closing = [token for token in allowed if token in CLOSING]
            plain = [token for token in allowed if token not in b" \n\t"]
            chosen = rng.choice(
                closing if closing and rng.random() < 0.15 + len(tokens) / 80 else plain or allowed
            )
            matcher.follow(len(tokens), [chosen])
            tokens.append(chosen)
        return None

    def takes(self, schema: Any, text: str) -> bool:
        """Whether a model could write this text."""
        matcher = self.matcher(schema)
        try:
            matcher.follow(0, list(text.encode()))
            return not self._vocabulary.end_tokens.isdisjoint(allowed_of(matcher))
        except NotFollowed:
            return False


def allowed_of(matcher: JsonMatcher) -> list[int]:
    bits = np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found
