"""A generation in progress: the prompt in chunks, then a token per step, or several if guesses are right."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from msgspec import UNSET

from swarmllm_proto.ipc import (
    FinishReason,
    Generate,
    GenerateDone,
)
from swarmllm_proto.limits import EXACT_ROWS
from swarmllm_workers.cache.prefixes import Name
from swarmllm_workers.decode.decoding import Decoded, Decoding
from swarmllm_workers.decode.grammar import GrammarPending
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.ranges import Route
from swarmllm_workers.engine.segment import Span
from swarmllm_workers.errors import CallError
from swarmllm_workers.schedule.owner_shares import OWN
from swarmllm_workers.schedule.work import Send, token_message
from swarmllm_workers.speculation.speculation import Guesser, Speculation


@dataclass
class _Judged:
    """The result of a step: rows of logits, and what is known of the tokens that they give."""

    logits: np.ndarray
    guesses: tuple[int, ...]
    is_prefill: bool
    compute_s: float
    decoded: list[Decoded] = field(default_factory=list)
    _is_own: bool = False

    def keep(self) -> None:
        """Copy the rows, because the next batch overwrites them."""
        if not self._is_own:
            self.logits, self._is_own = self.logits.copy(), True


class GenerateWork:
    """A Generate: the prompt in chunks, then a token per step. A restarted one runs its prompt and what it
    has generated so far as one prompt."""

    def __init__(
        self,
        message: Generate,
        tokens: np.ndarray,
        engine: Engine,
        send: Send,
        speculation: Speculation | None = None,
    ) -> None:
        """Raises CallError context_full."""
        n_ctx = engine.settings.n_ctx
        if len(tokens) > n_ctx:
            raise CallError(
                "context_full",
                f"the prompt has {len(tokens) - message.n_generated} tokens, the context {n_ctx} (n_ctx)",
                "payload",
            )
        self.call_id = message.id
        self.request_id = message.request_id
        self.is_finished = False
        self.can_restart = True
        self.layers = 0, engine.n_layers
        self.owner = message.owner or OWN
        self.has_tokens = True
        self._session = message.session_id
        self._own_kv = message.own_kv
        self._clients_of = None if message.own_kv else ""
        if message.clients_of is not UNSET:
            self._clients_of = message.clients_of
        self.wants_alone = False
        self.is_exact = message.sampling.exact
        self.rows_of_piece = EXACT_ROWS if self.is_exact else 0
        self.arrived_at = time.perf_counter()
        self._n_given = len(tokens)
        """The prompt, and what was generated elsewhere."""
        self._n_prompt = len(tokens) - message.n_generated
        n_max = min(self._n_prompt + message.sampling.max_tokens, n_ctx + 1)
        self._history = np.empty(max(n_max, len(tokens)), np.int32)
        """The prompt and the tokens generated so far."""
        self._history[: len(tokens)] = tokens
        self._n_history = len(tokens)
        self._engine = engine
        if self.is_exact:
            engine.set_apart(self.request_id, len(self._history))
        self._send = send
        self._decoding = Decoding(engine.vocabulary, message.sampling)
        self._decoding.resume(tokens[self._n_prompt :].tolist())
        self._position = 0
        self._has_begun = False
        self._n_running = 0
        self._n_cached = 0
        """Rows of the prompt that an earlier request had computed, also if some are computed again."""
        self._other_format = False
        """Some of them came from another node in another format."""
        self._prefill_s = 0.0
        self._decode_s = 0.0
        # What is guessed is checked in batches of other sizes.
        self._speculation = None if self.is_exact else speculation
        self._guesser: Guesser | None = None
        self._guesses: tuple[int, ...] = ()
        """To be checked in this step, behind the last token."""
        self._judged: _Judged | None = None
        """A step's result whose tokens are being sampled."""
        self._is_alone = False

    def _route(self) -> Route | None:
        return self._engine.known_route(self.request_id, *self.layers)

    def begin(self) -> None:
        self._decoding.check()
        if self._has_begun:
            return
        self._has_begun = True
        route, history = self._route(), self._history[: self._n_history]
        assert route is not None  # its turn has come
        self._position = self._engine.reuse(
            self.request_id, route, history, self._session, self._own_kv, self._clients_of
        )
        self._other_format = self._engine.prefixes.is_of_other_format(self.request_id)
        self._engine.prefixes.follow(self.request_id, route.segments, self._name)
        if self._n_history == self._n_given:
            self._n_cached = min(self._position, self._n_prompt)
            self._position = self._engine.begin_large_batch(
                self.request_id, route, self._position, self._n_history
            )

    @property
    def n_waiting(self) -> int:
        if self.is_exact:
            # Tokens that were generated before run one by one, as they did.
            is_prompt = self._position < self._n_prompt
            return self._n_prompt - self._position if is_prompt else 1
        return self._n_history + len(self._guesses) - self._position

    @property
    def is_decode(self) -> bool:
        return self._n_history - self._position == 1 and self._position >= self._n_given

    @property
    def goes_around(self) -> bool:
        return False

    def look_ahead(self, n_rows_max: int) -> None:
        self._guesses = ()
        self._is_alone = n_rows_max > 1
        if self._speculation is None or self._n_history - self._position != 1:
            return
        if self._guesser is None:
            slot = self._engine.take_slot(self.request_id)
            route = self._route()
            assert route is not None
            self._guesser = self._speculation.begin(route, slot, self._history[: self._n_prompt])
            if self._guesser is None:
                self._speculation = None
                return
        n_left = self._decoding.sampling.max_tokens - self._decoding.n_generated
        n_rows_max = min(n_rows_max, self._engine.settings.n_ctx - self._position)
        self._guesses = self._guesser.guess(self._history[: self._n_history], n_rows_max, n_left)

    def next_span(self, n_rows: int) -> Span:
        slot = self._engine.slots.take(self.request_id)
        data = self._history[self._position : min(self._position + n_rows, self._n_history)]
        self._n_running = len(data)
        if self._guesses:
            rows = np.concatenate([data, np.array(self._guesses, np.int32)])
            return Span(slot, self._position, rows, "rows")
        is_last = self._position + len(data) == self._n_history
        return Span(slot, self._position, data, "logits" if is_last else "none")

    def decode_step(self, route: Route) -> Span | None:
        self.look_ahead(self._engine.prefixes.n_free(route.segments))
        return self.next_span(self.n_waiting) if self.is_decode else None

    def _name(self) -> Name:
        return Name((), self._history[: self._position], self._session, self._clients_of)

    def accept(self, result: np.ndarray, compute_s: float) -> None:
        self._position += self._n_running
        guesses, self._guesses = self._guesses, ()
        is_prefill = self._n_history == self._n_given
        if self._position == self._n_history:
            self._judged = _Judged(np.atleast_2d(result), guesses, is_prefill, compute_s)
            self.go_on()
        elif is_prefill:
            self._prefill_s += compute_s
        else:
            self._decode_s += compute_s

    @property
    def is_parked(self) -> bool:
        return self._judged is not None

    def go_on(self) -> None:
        judged = self._judged
        if judged is None:
            return
        started = time.perf_counter()
        try:
            self._decode(judged)
        except GrammarPending:
            judged.keep()
            return
        finally:
            judged.compute_s += time.perf_counter() - started
        self._judged = None
        self._take(judged)

    def _decode(self, judged: _Judged) -> None:
        """Sample the token that follows the last one, and one more for every guess that was right. Raises
        GrammarPending, and goes on from there when it is called again."""
        n_before = self._n_history - self._n_prompt
        for i in range(len(judged.decoded), len(judged.logits)):
            one = self._decoding.decode(judged.logits[i], n_before + i)
            judged.decoded.append(one)
            if one.finish_reason is not None or judged.guesses[i : i + 1] != (one.token,):
                return

    def _take(self, judged: _Judged) -> None:
        decoded, compute_s = judged.decoded, judged.compute_s
        if self._guesser is not None:
            self._guesser.judged(len(judged.guesses), len(decoded) - 1)
        if judged.is_prefill:  # its last row may bring tokens along that were guessed
            self._prefill_s += compute_s / len(decoded)
            self._decode_s += compute_s - compute_s / len(decoded)
        else:
            self._decode_s += compute_s
        for i, one in enumerate(decoded):
            self._position += i > 0
            self._give(one, compute_s / len(decoded))
        if len(decoded) <= len(judged.guesses) and not self.is_finished:
            self._engine.empty(self.request_id, self._position)

    def _give(self, decoded: Decoded, compute_s: float) -> None:
        finish = decoded.finish_reason
        if finish is None and self._position >= self._engine.settings.n_ctx:
            finish = "length"
        self._send(token_message(self.call_id, self.request_id, decoded, compute_s, finish), decoded.text)
        if finish is not None:
            self._finish(finish)
            return
        self._history[self._n_history] = decoded.token
        self._n_history += 1

    def restart(self) -> None:
        self._position = 0
        self._has_begun = False
        self._guesses = ()
        self._judged = None

    def cancel(self) -> None:
        self._finish("cancelled")

    def _finish(self, reason: FinishReason) -> None:
        self.is_finished = True
        self._judged = None
        self._decoding.close()
        if self._guesser is not None:
            self._guesser.close()
        if self._position:
            self._engine.empty(self.request_id, self._position)
            rows = self._history[: self._position]
            self._engine.keep(self.request_id, rows, self._session, self._clients_of)
        self._send(
            GenerateDone(
                id=self.call_id,
                request_id=self.request_id,
                finish_reason=reason,
                n_prompt_tokens=self._n_prompt,
                n_cached_tokens=self._n_cached,
                n_generated=self._decoding.n_generated - (self._n_given - self._n_prompt),
                prefill_s=self._prefill_s,
                decode_s=self._decode_s,
                guesses=self._guesser.counts if self._guesser is not None else (),
                other_format=self._other_format or UNSET,
            )
        )
        if self._speculation is not None:
            self._speculation.answered(self._history[: self._n_prompt], self._decoding.tokens)
            route = self._route() if reason != "cancelled" else None
            if self._guesser is not None and self._is_alone and route is not None:
                self._speculation.try_out_after(
                    route, self._engine.take_slot(self.request_id), self._history[: self._position]
                )
        self._engine.release(self.request_id)
