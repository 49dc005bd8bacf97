"""Samples again from each of many rows, as somebody did who told the tokens that follow them."""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np

from swarmllm_proto.codec import encode_again
from swarmllm_proto.ipc import LayerResult, TokenAgain
from swarmllm_workers.decode.decoding import Decoding
from swarmllm_workers.decode.grammar import GrammarPending
from swarmllm_workers.errors import CallError
from swarmllm_workers.schedule.work import ForwardWork

_NO_LOGITS: Final = np.empty((0, 0), np.float32)


class ResampleWork(ForwardWork):
    """A Forward that wants "again": batches of as many rows as there is room for logits."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """As ForwardWork. Raises CallError bad_message, no_room."""
        super().__init__(*arguments, **named)
        message = self._message
        if message.sampling is None:
            raise CallError("bad_message", "must come along", "sampling")
        n_before = self._position + 1 - message.n_prompt_tokens
        if len(message.generated) != n_before:
            raise CallError(
                "bad_message", f"{len(message.generated)} tokens, where {n_before} come before", "generated"
            )
        self._decoding = Decoding(self._engine.vocabulary, message.sampling)
        self._decoding.resume(message.generated)
        self._again: list[TokenAgain] = []
        self._logits = _NO_LOGITS
        """Of rows that are not sampled from yet."""
        self._is_own = False
        """They outlive the next batch, which overwrites others."""

    def accept(self, result: np.ndarray, compute_s: float) -> None:
        self._compute_s += compute_s
        self._n_done += self._n_running
        self._logits, self._is_own = result, False
        self.go_on()

    def go_on(self) -> None:
        started = time.perf_counter()
        try:
            self._sample_all()
        except GrammarPending:
            if not self._is_own:
                self._logits, self._is_own = self._logits.copy(), True
            self.is_parked = True
            return
        finally:
            self._compute_s += time.perf_counter() - started
        self.is_parked = False
        if self.is_finished or self._n_done == len(self._data):
            self._deliver_all()

    def _sample_all(self) -> None:
        """Raises GrammarPending, CallError; then `_logits` are those that are left."""
        told = self._message.scored
        while len(self._logits):
            token = told[len(self._again)]
            again = self._decoding.decode_again(self._logits[0], token)
            self._again.append(again)
            self._logits = self._logits[1:]
            if self._decoding.grammar is not None and again.token != token:
                # Whether the grammar goes on after the other one is not known.
                self.is_finished = True
                return

    def _deliver_all(self) -> None:
        self.is_finished = True
        self._decoding.close()
        message = self._message
        answer = LayerResult(id=message.id, request_id=message.request_id, compute_s=self._compute_s)
        self._send(answer, encode_again(tuple(self._again)))

    def cancel(self) -> None:
        self._decoding.close()
        super().cancel()
