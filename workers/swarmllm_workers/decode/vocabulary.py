"""Text to tokens and tokens to bytes, with the model's own tokenizer.

What a special token looks like in the output: control tokens are hidden, user-defined ones are shown, and
so are control tokens that a reader of the text must see, because tool calls and reasoning are marked with
them.
"""

from __future__ import annotations

import ctypes
import re
from typing import Final

import numpy as np
from llama_cpp import llama_cpp as lib

from swarmllm_proto.ipc import InfillTokens
from swarmllm_workers.engine.libllama import Model
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import GgufFile
from swarmllm_workers.grammars.sessions import GrammarSessions

CONTROL: Final = 8
"""LLAMA_TOKEN_ATTR_CONTROL"""
_NORMAL_TYPE: Final = 1
"""LLAMA_TOKEN_TYPE_NORMAL in `tokenizer.ggml.token_type`"""
_SHOWN_CONTROL: Final = re.compile(
    r"</?\|?(tool|tools|tool_call|tool_calls|tool_response|function|function_call|think|thinking|thought)\|?>"
    r"|\[/?(TOOL_CALLS|TOOL_RESULTS|THINK|ARGS|CALL_ID)\]|<\|python_tag\|>"
)


class Vocabulary:
    def __init__(self, model: Model, source: GgufFile) -> None:
        self._vocabulary = model.vocabulary
        self.handle = model.vocabulary
        """libllama's own; lives as long as the model."""
        self.n_vocab = model.n_vocab
        self.grammars = GrammarSessions(model.path)
        """Of this vocabulary's tokens."""
        self._pieces: dict[int, bytes] = {}
        self.bos_text = self._token_text(lib.llama_vocab_bos(self._vocabulary))
        self.eos_text = self._token_text(lib.llama_vocab_eos(self._vocabulary))
        self.end_tokens = self._find_end_tokens(source)

    def _find_end_tokens(self, source: GgufFile) -> frozenset[int]:
        """Every token that ends generation. libllama is asked about special tokens only: calling it for
        each of 150,000 takes a tenth of a second."""
        types = source.values.get("tokenizer.ggml.token_type")
        special = set(np.nonzero(types.numbers() != _NORMAL_TYPE)[0].tolist()) if types else set()
        special |= {lib.llama_vocab_eos(self._vocabulary), lib.llama_vocab_eot(self._vocabulary)}
        return frozenset(
            token
            for token in special
            if 0 <= token < self.n_vocab and lib.llama_vocab_is_eog(self._vocabulary, token)
        )

    def infill_tokens(self) -> InfillTokens | None:
        """The tokens for infilling. None: the model lacks one that is needed."""
        prefix, suffix, middle, repository, file = (
            token if 0 <= (token := find(self._vocabulary)) < self.n_vocab else None
            for find in (
                lib.llama_vocab_fim_pre,
                lib.llama_vocab_fim_suf,
                lib.llama_vocab_fim_mid,
                lib.llama_vocab_fim_rep,
                lib.llama_vocab_fim_sep,
            )
        )
        if prefix is None or suffix is None or middle is None:
            return None
        return InfillTokens(prefix, suffix, middle, repository, file)

    def tokenize(self, text: str, *, is_rendered: bool) -> np.ndarray:
        """i32 [n]. A beginning-of-text token is added where the model wants one, except to a rendered
        template that has its own. Raises CallError bad_message for text that is no Unicode."""
        has_own = is_rendered and bool(self.bos_text) and text.startswith(self.bos_text)
        return self._tokenize(text, add_special=not has_own)

    def tokenize_later(self, text: str) -> np.ndarray:
        """As `tokenize`, for a piece of text that follows a picture: no token is added."""
        return self._tokenize(text, add_special=False)

    def _tokenize(self, text: str, *, add_special: bool) -> np.ndarray:
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise CallError("bad_message", "the text has unpaired surrogates", "text") from None
        n_max = len(data) + 16
        tokens = (lib.llama_token * n_max)()
        n = lib.llama_tokenize(self._vocabulary, data, len(data), tokens, n_max, add_special, True)
        if n < 0:
            raise CallError("engine", f"the tokenizer failed with {n}")
        return np.frombuffer(tokens, np.int32, n).copy()

    def piece(self, token: int) -> bytes:
        """The bytes that the token adds to the text; not always whole characters."""
        known = self._pieces.get(token)
        if known is None:
            known = self._pieces[token] = self._read_piece(token)
        return known

    def full_piece(self, token: int) -> bytes:
        """The same with every special token spelt out."""
        return self._bytes(token)

    def _read_piece(self, token: int) -> bytes:
        if not 0 <= token < self.n_vocab:
            return b""
        is_control = bool(lib.llama_vocab_get_attr(self._vocabulary, token) & CONTROL)
        text = self._bytes(token)
        return b"" if is_control and not _SHOWN_CONTROL.fullmatch(text.decode("utf-8", "replace")) else text

    def _bytes(self, token: int) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = lib.llama_token_to_piece(self._vocabulary, token, buffer, size, 0, True)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def _token_text(self, token: int) -> str:
        return self._bytes(token).decode("utf-8", "replace") if 0 <= token < self.n_vocab else ""
