"""Handles tokenizing, detokenizing, chat templates, and embedding rows of tokens.

How long that takes is decided by the person who wrote the text, so it is done beside the decode steps:
vocabulary, template and embedding do not change.

Grammars and JSON schemas are checked before a request begins, in processes of their own.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np

from swarmllm_proto import ipc
from swarmllm_proto.codec import encode_pieces
from swarmllm_proto.limits import IPC_PAYLOAD_MAX
from swarmllm_proto.tensors import encode_tensor
from swarmllm_workers.decode.grammar import spec_of
from swarmllm_workers.engine.operation import Operation
from swarmllm_workers.errors import CallError
from swarmllm_workers.grammars.sessions import COMPILE_S, GrammarSession, GrammarSessions
from swarmllm_workers.ring.ring import Watch
from swarmllm_workers.server.worker_state import WorkerState

EMBED_ROWS_MAX: Final = 65536
AT_ONCE_MAX: Final = 16
"""Tokens of which the rows are looked up at once: a step that somebody waits for."""
_TENSOR_HEADER_BYTES: Final = 256
"""More than a tensor's description takes."""


def embed_rows_max(n_embd: int) -> int:
    """The number of rows of f32 x `n_embd` that fit into one answer."""
    return min(EMBED_ROWS_MAX, (IPC_PAYLOAD_MAX - _TENSOR_HEADER_BYTES) // (4 * n_embd))


def _n_characters(message: ipc.Tokenize | ipc.ApplyTemplate) -> int:
    texts = [text for each in message.messages or () for text in each.values() if isinstance(text, str)]
    if isinstance(message, ipc.Tokenize) and message.text is not None:
        texts.append(message.text)
    return sum(map(len, texts))


def _encode(array: np.ndarray) -> Any:
    """As a payload that nobody changes any more: it need not be copied when it has to wait for the socket."""
    array.flags.writeable = False
    return encode_tensor(array)


class TextHandlers:
    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self.by_type: dict[type, Callable[[Any, memoryview], None]] = {
            ipc.Tokenize: self._tokenize,
            ipc.ApplyTemplate: self._apply_template,
            ipc.Detokenize: self._detokenize,
            ipc.Embed: self._embed,
        }

    def _tokenize(self, message: ipc.Tokenize, _payload: memoryview) -> None:
        engine = self._state.engine()
        if (message.text is None) == (message.messages is None):
            raise CallError("bad_message", "either text or messages, not both", "text")

        def tokens() -> Any:
            if message.messages is None:
                is_first = message.place == "first"
                if message.place == "later":
                    return _encode(engine.vocabulary.tokenize_later(message.text or ""))
                return _encode(engine.vocabulary.tokenize(message.text or "", is_rendered=is_first))
            text = engine.template(message.template).render(message.messages, message.tools, message.effort)
            return _encode(engine.vocabulary.tokenize(text, is_rendered=True))

        self._answer(ipc.Tokens(id=message.id), tokens, _n_characters(message))

    def _apply_template(self, message: ipc.ApplyTemplate, _payload: memoryview) -> None:
        engine = self._state.engine()

        def text() -> Any:
            rendered = engine.template(message.template).render(
                message.messages, message.tools, message.effort, is_to_answer=message.is_to_answer
            )
            # A template may take a character apart; what is left of it cannot be sent.
            return [rendered.encode(errors="replace")]

        self._answer(ipc.Text(id=message.id), text, _n_characters(message))

    def _detokenize(self, message: ipc.Detokenize, payload: memoryview) -> None:
        vocabulary, tokens = self._state.engine().vocabulary, self._state.tokens(payload)

        def text() -> Any:
            if message.as_generated:
                return [encode_pieces([vocabulary.piece(token) for token in tokens.tolist()])]
            return [b"".join(map(vocabulary.full_piece, tokens.tolist()))]

        self._answer(ipc.Text(id=message.id), text, tokens.nbytes)

    def _embed(self, message: ipc.Embed, payload: memoryview) -> None:
        engine, tokens = self._state.engine(), self._state.tokens(payload)
        n_max = embed_rows_max(engine.n_embd)
        if len(tokens) > n_max:
            raise CallError("bad_tensor", f"{len(tokens)} tokens, at most {n_max}", "payload")
        answer = ipc.LayerResult(id=message.id)
        if len(tokens) <= AT_ONCE_MAX:
            self._state.send(answer, encode_tensor(engine.embedding.rows(tokens)))
        else:
            n_bytes = 4 * engine.n_embd * len(tokens)
            self._answer(answer, lambda: _encode(engine.embedding.rows(tokens)), n_bytes)

    def _answer(self, answer: Any, payload: Callable[[], Any], n_bytes: int) -> None:
        """When its payload is there. `n_bytes`: what that takes, or what it is made of."""
        self._state.parsing.begin(
            self._answering(answer, payload), partial(self._state.fail, answer.id), n_bytes
        )

    def _answering(self, answer: Any, payload: Callable[[], Any]) -> Operation[None]:
        found = yield payload
        self._state.send(answer, found)


LOOK_MS: Final = 100
"""How often it is seen whether a check is late."""


class GrammarHandlers:
    def __init__(self, state: WorkerState, watch: Watch) -> None:
        self._state = state
        self._watch = watch
        self._checks: dict[int, GrammarSession] = {}
        """By call."""
        self.by_type: dict[type, Callable[[Any, memoryview], None]] = {ipc.CheckGrammar: self._check}
        self.descriptor = -1
        """Readable when the grammar process has said something; to be answered by `receive`."""

    def _sessions(self) -> GrammarSessions:
        return self._state.engine().vocabulary.grammars

    def open(self, n_vocab: int) -> None:
        """Prepare the grammar process for the open model, which has so many tokens."""
        self._sessions().prepare(n_vocab)
        self.descriptor = self._sessions().fileno()
        self._watch(self.descriptor, select.POLLIN)

    def receive(self) -> None:
        self._sessions().receive()
        self._settle()

    def pause_ms(self) -> int | None:
        """The milliseconds until something has to be checked here. None: nothing has to."""
        if not self._checks:
            return None
        self._settle()
        return LOOK_MS if self._checks else None

    def _check(self, message: ipc.CheckGrammar, _payload: memoryview) -> None:
        spec = spec_of(message.sampling)
        if spec is None:
            self._state.send(ipc.Done(id=message.id))
            return
        self._checks[message.id] = self._sessions().open(spec, COMPILE_S)

    def _settle(self) -> None:
        for call_id, session in list(self._checks.items()):
            try:
                session.check()
            except CallError as error:
                del self._checks[call_id]
                self._state.fail(call_id, error)
            else:
                if session.is_compiled:
                    del self._checks[call_id]
                    session.close()
                    self._state.send(ipc.Done(id=call_id))
