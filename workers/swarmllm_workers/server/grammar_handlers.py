"""Check grammars and JSON schemas before a request begins, without waiting for any of them."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any, Final

from swarmllm_proto import ipc
from swarmllm_workers.decode.grammar import spec_of
from swarmllm_workers.errors import CallError
from swarmllm_workers.grammars.sessions import COMPILE_S, GrammarSessions, Session

LOOK_MS: Final = 100
"""How often it is seen whether a check is late."""


class GrammarHandlers:
    def __init__(
        self,
        sessions: Callable[[], GrammarSessions],
        send: Callable[..., None],
        fail: Callable[[int, Exception], None],
        watch: Callable[[int, int], None],
    ) -> None:
        """`sessions` raises CallError while no model is open. `fail`: answer a call with an error."""
        self._sessions = sessions
        self._send = send
        self._fail = fail
        self._watch = watch
        self._checks: dict[int, Session] = {}
        """By call."""
        self.by_type: dict[type, Callable[[Any, memoryview], None]] = {ipc.CheckGrammar: self._check}
        self.descriptor = -1
        """Readable when the grammar process has said something; to be answered by `receive`."""

    def open(self, n_vocab: int) -> None:
        """A model of so many tokens is open."""
        self._sessions().prepare(n_vocab)
        self.descriptor = self._sessions().fileno()
        self._watch(self.descriptor, select.POLLIN)

    def receive(self) -> None:
        self._sessions().receive()
        self._settle()

    def pause_ms(self) -> int | None:
        """How long nothing has to be looked at here; None: there is nothing."""
        if not self._checks:
            return None
        self._settle()
        return LOOK_MS if self._checks else None

    def _check(self, message: ipc.CheckGrammar, _payload: memoryview) -> None:
        spec = spec_of(message.sampling)
        if spec is None:
            self._send(ipc.Done(id=message.id))
            return
        self._checks[message.id] = self._sessions().open(spec, COMPILE_S)

    def _settle(self) -> None:
        for call_id, session in list(self._checks.items()):
            try:
                session.check()
            except CallError as error:
                del self._checks[call_id]
                self._fail(call_id, error)
            else:
                if session.is_compiled:
                    del self._checks[call_id]
                    session.close()
                    self._send(ipc.Done(id=call_id))
