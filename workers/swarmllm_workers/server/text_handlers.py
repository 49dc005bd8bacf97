"""Between text and tokens, with the model's tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from swarmllm_proto import ipc
from swarmllm_proto.tensors import encode_tensor
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.errors import CallError


class TextHandlers:
    def __init__(
        self,
        opened: Callable[[], Engine],
        tokens: Callable[[memoryview], np.ndarray],
        send: Callable[..., None],
    ) -> None:
        """`tokens`: i32 [n] from a payload, checked."""
        self._opened = opened
        self._read_tokens = tokens
        self._send = send
        self.by_type: dict[type, Callable[[Any, memoryview], None]] = {
            ipc.Tokenize: self._tokenize,
            ipc.ApplyTemplate: self._apply_template,
            ipc.Detokenize: self._detokenize,
        }

    def _tokenize(self, message: ipc.Tokenize, _payload: memoryview) -> None:
        engine = self._opened()
        if (message.text is None) == (message.messages is None):
            raise CallError("bad_message", "either text or messages, not both", "text")
        if message.messages is not None:
            text = engine.template().render(message.messages, message.tools, message.effort)
            tokens = engine.vocabulary.tokenize(text, is_rendered=True)
        else:
            tokens = engine.vocabulary.tokenize(message.text or "", is_rendered=False)
        self._send(ipc.Tokens(id=message.id), encode_tensor(tokens))

    def _apply_template(self, message: ipc.ApplyTemplate, _payload: memoryview) -> None:
        text = self._opened().template().render(message.messages, message.tools, message.effort)
        # A template may take a character apart; what is left of it cannot be sent.
        self._send(ipc.Text(id=message.id), [text.encode(errors="replace")])

    def _detokenize(self, message: ipc.Detokenize, payload: memoryview) -> None:
        vocabulary = self._opened().vocabulary
        pieces = [vocabulary.full_piece(token) for token in self._read_tokens(payload).tolist()]
        self._send(ipc.Text(id=message.id), [b"".join(pieces)])
