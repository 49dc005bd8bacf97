"""Tracks a request's position in its grammar, as its session in the grammar process knows it.

A question whose answer is not there yet raises GrammarPending: the caller does something else and asks again.
For a JSON schema the mask of the next token is found while the model computes. For GBNF libllama takes longer
for a mask than a model for a step, so it is asked about the one token that was drawn, and for a mask only
where that one is not allowed.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np

from swarmllm_proto.ipc import Sampling
from swarmllm_workers.errors import CallError
from swarmllm_workers.grammars.messages import (
    Answer,
    CheckToken,
    Compiled,
    FindMask,
    GrammarSpec,
    GrammarVerdict,
    Mask,
)
from swarmllm_workers.grammars.sessions import GrammarSessions, step_budget_s

GRACE_S: Final = 0.001
"""How long an answer is waited for before others have their turn."""


class GrammarPending(Exception):
    """The grammar process has not answered yet."""


def spec_of(sampling: Sampling) -> GrammarSpec | None:
    """The grammar that a request asks for. None: it allows any text. Raises CallError bad_message for a
    grammar and a schema at once."""
    if sampling.grammar and sampling.json_schema:
        raise CallError("bad_message", "a grammar and a JSON schema exclude each other", "sampling.grammar")
    if sampling.grammar:
        return GrammarSpec(grammar=sampling.grammar)
    if sampling.json_schema:
        return GrammarSpec(
            json_schema=sampling.json_schema,
            before=sampling.json_before,
            after=sampling.json_after,
            n_max=sampling.json_max,
        )
    return None


class Grammar:
    def __init__(
        self, sessions: GrammarSessions, spec: GrammarSpec, end_tokens: Collection[int] = ()
    ) -> None:
        """Begins to compile. `end_tokens` end a text and are no part of it. Raises CallError no_room,
        engine."""
        self._session = sessions.open(spec)
        self._is_json = not spec.grammar
        self._ends = frozenset(end_tokens)
        self._followed: list[int] = []
        """By the child, once it has answered."""
        self._version = 0
        """Of what it has followed."""
        self._asked: tuple[object, ...] | None = None
        self._known: tuple[object, ...] | None = None
        self._answer: Answer = Compiled()
        weakref.finalize(self, self._session.close)

    def close(self) -> None:
        self._session.close()

    def check(self) -> None:
        """Raises CallError bad_message if the grammar is already known to be refused or too complex."""
        self._session.check()

    def wait_for(self, timeout_s: float) -> None:
        """Sleep until an answer may have come. For tests and tools that have nothing else to do."""
        if self._asked is not None:
            self._session.wait(timeout_s)

    def look_ahead(self, tokens: Sequence[int]) -> None:
        """Raises GrammarPending if an answer about what follows `tokens` is still awaited, and CallError as
        `allows` does."""
        if self._is_json:
            self._bits(tokens)
        else:
            self._take()

    def expect(self, tokens: Sequence[int]) -> None:
        """Ask in advance for what may follow `tokens`. Raises CallError bad_message."""
        if self._is_json and self._asked is None:
            self._send_about(tokens, None)

    def allows(self, token: int, tokens: Sequence[int]) -> bool:
        """Whether `token` can follow `tokens`. Raises GrammarPending, CallError bad_message, too_complex."""
        if self._is_json:
            bits = self._bits(tokens)
            return token // 8 < len(bits) and bool(bits[token // 8] >> (token % 8) & 1)
        answer = self._ask(tokens, token)
        assert isinstance(answer, GrammarVerdict)
        return answer.allowed

    def mask(self, logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
        """A copy of `logits` f32 [n], minus infinity where the token cannot follow `tokens`. Raises
        GrammarPending, CallError bad_message."""
        bits = np.frombuffer(self._bits(tokens), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=len(logits)).astype(bool)
        masked = np.full(len(logits), -np.inf, np.float32)
        np.copyto(masked[: len(allowed)], logits[: len(allowed)], where=allowed)
        return masked

    def _bits(self, tokens: Sequence[int]) -> bytes:
        answer = self._ask(tokens, None)
        assert isinstance(answer, Mask)
        return answer.bits

    def _ask(self, tokens: Sequence[int], candidate: int | None) -> Answer:
        self._take()
        key = self._key(tokens, candidate)
        if self._known != key:
            self._send_about(tokens, candidate)
            self._take()
        return self._answer

    def _take(self) -> None:
        """Raises GrammarPending while an answer is due."""
        if self._asked is None:
            return
        answer = self._session.take(GRACE_S)
        while isinstance(answer, Compiled):
            answer = self._session.take(GRACE_S)
        if answer is None:
            raise GrammarPending
        self._answer, self._known, self._asked = answer, self._asked, None

    def _key(self, tokens: Sequence[int], candidate: int | None) -> tuple[object, ...]:
        return (self._version if self._is_where(tokens) else -1, candidate)

    def _is_where(self, tokens: Sequence[int]) -> bool:
        return self._followed == self._text_of(tokens)

    def _text_of(self, tokens: Sequence[int]) -> list[int]:
        text = list(tokens)
        return text if self._ends.isdisjoint(text) else [token for token in text if token not in self._ends]

    def _send_about(self, tokens: Sequence[int], candidate: int | None) -> None:
        text = self._text_of(tokens)
        n_kept, n_known = 0, min(len(self._followed), len(text))
        if self._followed[:n_known] == text[:n_known]:
            n_kept = n_known
        else:
            while self._followed[n_kept] == text[n_kept]:
                n_kept += 1
        new = text[n_kept:]
        if new or n_kept < len(self._followed):
            self._version += 1
        elif self._known == (self._version, candidate):
            return
        budget_s = step_budget_s(len(text) if n_kept < len(self._followed) else len(new))
        if candidate is None:
            self._session.ask(FindMask(n_kept, new, budget_s))
        else:
            self._session.ask(CheckToken(n_kept, new, candidate, budget_s))
        self._followed = text
        self._asked = (self._version, candidate)
