"""Follow JSON under a schema with llguidance. For the grammar process only: compiling has no bound."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from llama_cpp import llama_cpp as lib
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.llamacpp import lltokenizer_from_vocab

from swarmllm_workers.grammars.gbnf_matcher import NotFollowed
from swarmllm_workers.grammars.messages import GrammarSpec
from swarmllm_workers.grammars.schema_references import Unsupported
from swarmllm_workers.grammars.schema_rewriter import NO_SCHEMA, rewritings

REASON_MAX: Final = 300
"""Characters of what llguidance complains of."""
_OPTIONS: Final = {"whitespace_flexible": True, "whitespace_pattern": r" |\n[ \t]{0,20}"}
"""Between two parts of the JSON: what llama.cpp allows. A model may indent, not fill a page with blanks."""
_WHERE: Final = re.compile(
    r"^at \d+\(\d+\): failed to compile JSON schema: |\s*<non-verbose/>|\s+\d+ \| .*", re.DOTALL
)
"""In a complaint: places in a grammar that the client has not written."""
_SPECIAL: Final = 8 | 16
"""LLAMA_TOKEN_ATTR_CONTROL and _USER_DEFINED"""


def tokenizer_of(vocabulary: Any, n_vocab: int) -> LLTokenizer:
    """The tokenizer for llguidance. Takes more than a second for a large vocabulary."""
    ends = [token for token in range(n_vocab) if lib.llama_vocab_is_eog(vocabulary, token)]
    with warnings.catch_warnings():
        # It calls some functions of libllama by older names.
        warnings.simplefilter("ignore", DeprecationWarning)
        return lltokenizer_from_vocab(vocabulary, eos_token=ends or [lib.llama_vocab_eos(vocabulary)])


class JsonMatcher:
    """Raises NotFollowed where the schema cannot be enforced to the letter."""

    def __init__(self, vocabulary: Any, tokenizer: LLTokenizer, spec: GrammarSpec) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._n_bytes = (tokenizer.vocab_size + 31) // 32 * 4
        self._n_followed = 0
        self._matcher = self._compile(spec)

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        complaint = ""
        try:
            schema = msgspec.json.decode(spec.json_schema)
            for rewritten in rewritings(schema):
                matcher = self._matcher_of(self._lark(rewritten, spec))
                self._mask_of(matcher)
                if not matcher.is_error():
                    # The first mask has been thrown away, the lexer's states that it needed have not.
                    return matcher
                complaint = complaint or _WHERE.sub("", matcher.get_error())
        except Unsupported as error:
            complaint = str(error)
        except NO_SCHEMA as error:
            raise NotFollowed(f"this is no schema: {error}"[:REASON_MAX]) from None
        if complaint.startswith("oneOf constraints"):
            complaint = "oneOf: its parts are not seen to exclude each other"
        raise NotFollowed(f"the schema cannot be enforced: {complaint}"[:REASON_MAX])

    def _matcher_of(self, lark: str) -> LLMatcher:
        return LLMatcher(self._tokenizer, lark, log_level=0, limits=LLParserLimits(verbose_errors=False))

    def _lark(self, schema: dict[str, Any], spec: GrammarSpec) -> str:
        around = f"{self._literal(spec.before)} json {self._literal(spec.after)}"
        more = f' ("\\n"? around){{0,{spec.n_max - 1}}}' if spec.n_max > 1 else ""
        text = json.dumps({**schema, "x-guidance": _OPTIONS}, ensure_ascii=False)
        # Without forcing, each way of writing a text in tokens is allowed, as it is with libllama's grammars.
        return (
            f'%llguidance {{"no_forcing": true}}\nstart: around{more}\naround: {around}\njson: %json {text}\n'
        )

    def _literal(self, text: str) -> str:
        """The text, in which marks that are tokens of their own may be written as such."""
        if not text:
            return ""
        spelt = _quoted(text)
        data = text.encode()
        tokens = (lib.llama_token * (len(data) + 8))()
        n = lib.llama_tokenize(self._vocabulary, data, len(data), tokens, len(tokens), False, True)
        parts = []
        for token in tokens[: max(n, 0)]:
            is_special = bool(lib.llama_vocab_get_attr(self._vocabulary, token) & _SPECIAL)
            piece = self._tokenizer.decode_bytes([token]).decode("utf-8", "replace")
            parts.append(f"<[{token}]>" if is_special else _quoted(piece))
        if not any(part.startswith("<") for part in parts):
            return spelt
        return f"( {spelt} | {' '.join(parts)} )"

    def follow(self, n_kept: int, tokens: Sequence[int]) -> None:
        """Raises NotFollowed for a token that is not allowed."""
        if n_kept < self._n_followed:
            self._matcher.rollback(self._n_followed - n_kept)
            self._n_followed = n_kept
        if tokens:
            n = self._matcher.try_consume_tokens(list(tokens))
            self._check()
            self._n_followed += n
            if n < len(tokens):
                raise NotFollowed(f"token {self._n_followed} is not allowed by the grammar")

    def allows(self, token: int) -> bool:
        return self._matcher.validate_tokens([token]) == 1

    def mask(self) -> bytes:
        bits = self._mask_of(self._matcher)
        # An error looks like the end: a mask of nothing but end-of-text tokens.
        self._check()
        return bits

    def _mask_of(self, matcher: LLMatcher) -> bytes:
        bits = np.zeros(self._n_bytes, np.uint8)
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, len(bits))
        return bits.tobytes()

    def _check(self) -> None:
        if self._matcher.is_error():
            complaint = _WHERE.sub("", self._matcher.get_error())
            raise NotFollowed(f"the schema is too complex: {complaint}"[:REASON_MAX])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
