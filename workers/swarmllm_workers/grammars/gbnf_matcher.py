"""Follow a client's GBNF with libllama's grammar sampler. For the grammar process only: it may hang or abort.

Clients' GBNF stays with libllama, so that it means here what it means in llama.cpp. libllama's work per
token has no bound for ambiguous grammars, and some input makes it abort. Both cost one child of the grammar
process.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from llama_cpp import llama_cpp as lib

from swarmllm_workers.grammars.messages import GrammarSpec

GRAMMAR_MAX: Final = 256 * 1024
"""Characters."""
DEPTH_MAX: Final = 100
"""Of parentheses."""
CANDIDATE: Final = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""`llama_token_data`."""

_QUOTED: Final = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)
_RANGE: Final = re.compile(r"(\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|[^\\\]])", re.DOTALL)
_NAMED: Final = {"n": "\n", "r": "\r", "t": "\t"}


class NotFollowed(Exception):
    """The text is no grammar, or a token is not allowed by it."""


class GbnfMatcher:
    """Raises NotFollowed where the text is no grammar."""

    def __init__(self, vocabulary: Any, n_vocab: int, spec: GrammarSpec) -> None:
        text = spec.grammar
        if len(text) > GRAMMAR_MAX:
            raise NotFollowed(f"longer than {GRAMMAR_MAX} characters")
        if "\0" in text or nesting(text) > DEPTH_MAX:
            raise NotFollowed(f"nested more than {DEPTH_MAX} deep, or with a NUL")
        refuse_reversed_ranges(text)
        handle = lib.llama_sampler_init_grammar(vocabulary, text.encode("utf-8", "replace"), b"root")
        if not handle:
            raise NotFollowed("not a grammar that libllama reads (GBNF, with a rule root)")
        self._handle = handle
        self._n_vocab = n_vocab
        self._tokens: list[int] = []

    def follow(self, n_kept: int, tokens: Sequence[int]) -> None:
        """Raises NotFollowed for a token that is not allowed."""
        if n_kept < len(self._tokens):
            tokens = [*self._tokens[:n_kept], *tokens]
            lib.llama_sampler_reset(self._handle)
            self._tokens = []
        for token in tokens:
            # libllama aborts where it is made to accept what it does not allow.
            if not self.allows(token):
                raise NotFollowed(f"token {len(self._tokens)} is not allowed by the grammar")
            lib.llama_sampler_accept(self._handle, token)
            self._tokens.append(token)

    def allows(self, token: int) -> bool:
        return 0 <= token < self._n_vocab and bool(self._find(np.array([token], np.int32))[0])

    def mask(self) -> bytes:
        allowed = self._find(np.arange(self._n_vocab, dtype=np.int32))
        if not allowed.any():
            raise NotFollowed("no token of this model can go on in the grammar")
        return np.packbits(allowed, bitorder="little").tobytes()

    def _find(self, tokens: np.ndarray) -> np.ndarray:
        """Bool [n]: which of the tokens can come next."""
        candidates = np.zeros(len(tokens), CANDIDATE)
        candidates["id"] = tokens
        array = lib.llama_token_data_array(
            data=candidates.ctypes.data_as(lib.llama_token_data_p), size=len(candidates), selected=-1
        )
        lib.llama_sampler_apply(self._handle, ctypes.byref(array))
        allowed: np.ndarray = np.isfinite(candidates["logit"])
        return allowed


def nesting(text: str) -> int:
    """How deep parentheses are nested."""
    depth = deepest = 0
    for character in _QUOTED.sub("", text):
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest


def refuse_reversed_ranges(text: str) -> None:
    """Raises NotFollowed for a class such as [z-a]: libllama reads it and then allows nothing."""
    for quoted in _QUOTED.findall(text):
        if not quoted.startswith("["):
            continue
        parts = _RANGE.findall(quoted[1:-1].removeprefix("^"))
        for at in range(1, len(parts) - 1):
            low, dash, high = parts[at - 1 : at + 2]
            if dash == "-" and _code(low) > _code(high):
                raise NotFollowed(f"the range {low}-{high} is empty: its ends are the wrong way round")


def _code(character: str) -> int:
    if not character.startswith("\\"):
        return ord(character)
    if character[1] in "xuU" and len(character) > 2:
        return int(character[2:], 16)
    return ord(_NAMED.get(character[1], character[1]))
