"""Text that must follow a grammar (GBNF) or a JSON schema, with libllama's grammar sampler.

libllama aborts when a token is accepted that the grammar does not allow, and crashes on deeply nested
parentheses: what reaches it is measured before, and only tokens that it has allowed are accepted. Its parser
prints what it dislikes, together with the grammar, straight to stderr, which ends in the daemon's log:
stderr is closed off meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec
import numpy as np
from llama_cpp import llama_cpp as lib

from swarmllm_workers.decode.bounded_call import TookTooLong, bounded
from swarmllm_workers.decode.json_schema import Unsupported, gbnf
from swarmllm_workers.errors import CallError

GRAMMAR_MAX: Final = 256 * 1024
"""Characters of a grammar, also of one made from a JSON schema."""
DEPTH_MAX: Final = 100
"""Of parentheses."""
CONVERSION_S: Final = 2.0

_QUOTED: Final = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)
CANDIDATE: Final = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""`llama_token_data`."""


def grammar_of_schema(schema: str, *, before: str = "", after: str = "", n_max: int = 1) -> str:
    """GBNF for JSON that follows `schema`, one to `n_max` times between two texts. Raises CallError
    bad_message."""
    field = "sampling.json_schema"
    try:
        with bounded(CONVERSION_S):
            return gbnf(msgspec.json.decode(schema), before=before, after=after, n_max=n_max)
    except Unsupported as error:
        raise CallError("bad_message", f"the schema cannot be enforced: {error}"[:400], field) from None
    except TookTooLong:
        raise CallError("bad_message", "the schema is too complex", field) from None
    except (msgspec.MsgspecError, RecursionError, TypeError, AttributeError) as error:
        raise CallError("bad_message", f"this is no schema: {error}"[:200], field) from None


class Grammar:
    """Where the generated tokens have led in a grammar. Raises CallError bad_message where it is none."""

    def __init__(self, vocabulary: Any, text: str, field: str = "sampling.grammar") -> None:
        if len(text) > GRAMMAR_MAX:
            raise CallError("bad_message", f"longer than {GRAMMAR_MAX} characters", field)
        if "\0" in text or _depth(text) > DEPTH_MAX:
            raise CallError("bad_message", f"nested more than {DEPTH_MAX} deep, or with a NUL", field)
        with _silent():
            handle = lib.llama_sampler_init_grammar(vocabulary, text.encode("utf-8", "replace"), b"root")
        if not handle:
            raise CallError(
                "bad_message", "not a grammar that libllama reads (GBNF, with a rule root)", field
            )
        self._handle = handle
        self._accepted: list[int] = []
        weakref.finalize(self, lib.llama_sampler_free, handle)

    def follow(self, tokens: Sequence[int]) -> None:
        """Go to where these tokens lead, all of which have been allowed when they were chosen."""
        n = len(self._accepted)
        if list(tokens[:n]) != self._accepted:
            lib.llama_sampler_reset(self._handle)
            n = 0
        for token in tokens[n:]:
            lib.llama_sampler_accept(self._handle, token)
        self._accepted = list(tokens)

    def follow_untrusted(self, tokens: Sequence[int]) -> None:
        """The same for tokens that somebody else says were chosen. Raises CallError bad_message."""
        lib.llama_sampler_reset(self._handle)
        self._accepted = []
        for token in tokens:
            if not self.allows(token):
                place = len(self._accepted)
                raise CallError("bad_message", f"token {place} is not allowed by the grammar", "generated")
            lib.llama_sampler_accept(self._handle, token)
            self._accepted.append(token)

    def allows(self, token: int) -> bool:
        return bool(np.isfinite(self.mask(np.zeros(1, np.float32), np.array([token], np.int32))[0]))

    def mask(self, logits: np.ndarray, tokens: np.ndarray | None = None) -> np.ndarray:
        """A copy of `logits` f32 [n], minus infinity where the token cannot come next. `tokens`: their ids,
        0 to n - 1 where they are all."""
        candidates = np.zeros(len(logits), CANDIDATE)
        candidates["id"] = np.arange(len(logits)) if tokens is None else tokens
        candidates["logit"] = logits
        array = lib.llama_token_data_array(
            data=candidates.ctypes.data_as(lib.llama_token_data_p), size=len(candidates), selected=-1
        )
        lib.llama_sampler_apply(self._handle, ctypes.byref(array))
        return np.ascontiguousarray(candidates["logit"])


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in _QUOTED.sub("", text):
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest


@contextmanager
def _silent() -> Iterator[None]:
    kept = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)
