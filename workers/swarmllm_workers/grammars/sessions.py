"""A worker's side of its grammar process: start it, have a child per request, ask and take answers.

Nothing here waits for long: an answer that is not there yet is asked for again later. `fileno` is readable
when an answer has come, for a thread that has nothing else to do.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from swarmllm_proto.ipc.base import ErrorKind
from swarmllm_workers.errors import CallError
from swarmllm_workers.grammars.messages import (
    MESSAGE_MAX,
    Answer,
    Ask,
    Compile,
    GrammarRefused,
    GrammarSpec,
    decode_answer,
    encode,
)

COMPILE_S: Final = 0.4
"""Processor time in which a grammar that is checked has to compile and to give its first mask."""
STEP_S: Final = 0.5
"""Processor time for one token. libllama takes a third of it for a mask of 150,000 tokens."""
TOKEN_S: Final = 0.005
"""And for every token beyond the first that is followed at once, as where a request is taken over."""
STEP_MAX_S: Final = 5.0
WALL_TIME_FACTOR: Final = 20.0
"""Times its processor time that an answer may take on a busy machine."""
START_S: Final = 60.0
"""Until the grammar process has read the vocabulary."""
PREPARED_FROM: Final = 32_768
"""Tokens of a vocabulary that takes so long to read that it is not left to the first request."""
SESSIONS_MAX: Final = 64
COMMAND: Final = (sys.executable, "-P", "-m", "swarmllm_workers.grammars.process")


def step_budget_s(n_tokens: int) -> float:
    return min(STEP_S + TOKEN_S * max(0, n_tokens - 1), STEP_MAX_S)


class GrammarSession:
    """The grammar of one request, in a child process of its own. It answers one question at a time."""

    def __init__(
        self, sessions: GrammarSessions, spec: GrammarSpec, own: socket.socket, compile_s: float
    ) -> None:
        self._sessions = sessions
        self._spec = spec
        self._connection = Connection(own.detach())
        self._waiting: deque[Ask] = deque([Compile(spec, compile_s)])
        """Not sent yet: the child takes nothing before it has said that it is there."""
        self._answers: deque[Answer] = deque()
        self._is_here = False
        self.is_compiled = False
        self._due_s = time.monotonic() + START_S
        self._budget_s = START_S
        self._is_asking = True
        self._error: CallError | None = None

    def __repr__(self) -> str:
        return f"<Session {self._spec.field} compiled={self.is_compiled}>"

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def is_closed(self) -> bool:
        return self._connection.closed

    def ask(self, ask: Ask) -> None:
        """Send a question. Raises CallError if the child has ended."""
        if self._error is not None:
            raise self._error
        self._waiting.append(ask)
        self._send_next()

    def take(self, wait_s: float = 0.0) -> Answer | None:
        """The answer to what was asked, Compiled being the first; None where it is not there yet. Raises
        CallError bad_message where the grammar is refused or exceeds its budget, engine where nobody can
        tell."""
        if not self._answers:
            self.receive(wait_s)
        if self._answers:
            return self._answers.popleft()
        if self._error is not None:
            raise self._error
        return None

    def check(self) -> None:
        """Go on with starting and compiling. Raises CallError as `take` does."""
        self.receive()
        if self._error is not None:
            raise self._error

    def wait(self, timeout_s: float) -> None:
        """Wait until an answer has come, or for the time."""
        if not self._connection.closed:
            self._connection.poll(timeout_s)

    def receive(self, wait_s: float = 0.0) -> None:
        """Read what has come, for `take`."""
        try:
            while self._error is None and self._connection.poll(wait_s):
                data = self._connection.recv_bytes(MESSAGE_MAX)
                self._is_asking = False
                if not self._is_here:
                    self._is_here = True
                else:
                    answer = decode_answer(data)
                    if isinstance(answer, GrammarRefused):
                        self._fail(answer.reason)
                        return
                    self._answers.append(answer)
                    self.is_compiled = True
                    wait_s = 0.0
                self._send_next()
        except (EOFError, OSError):
            self._give_up()
        if self._error is None and self._is_asking and time.monotonic() > self._due_s:
            self._give_up()

    def _send_next(self) -> None:
        if not self._is_here or self._is_asking or not self._waiting:
            return
        ask = self._waiting.popleft()
        self._budget_s = ask.budget_s
        self._due_s = time.monotonic() + WALL_TIME_FACTOR * ask.budget_s
        self._is_asking = True
        try:
            self._connection.send_bytes(encode(ask))
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        if not self._is_here:
            self._fail("the process that follows grammars could not be started", "engine")
            return
        what = "to follow at this token" if self.is_compiled else "to compile"
        self._fail(
            f"too complex: it takes over {self._budget_s:g} s of processor time or too much memory {what}",
            "too_complex" if self.is_compiled else "bad_message",
        )

    def _fail(self, reason: str, kind: ErrorKind = "bad_message") -> None:
        self._error = CallError(kind, reason, self._spec.field)
        self.close()

    def close(self) -> None:
        """Close the connection. The child ends when it reads next, at the latest when its budget is spent."""
        if not self._connection.closed:
            self._sessions.forget(self)
            self._connection.close()


class GrammarSessions:
    """All grammar sessions of one worker. The process is started by the first request that needs it, or
    before."""

    def __init__(self, path: Path) -> None:
        """`path`: of the model, for its vocabulary."""
        self._path = path
        self._poll = selectors.DefaultSelector()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._sessions: dict[int, GrammarSession] = {}
        """By descriptor."""

    def fileno(self) -> int:
        return self._poll.fileno()

    def prepare(self, n_vocab: int) -> None:
        """Start the process now if its start takes long."""
        if n_vocab >= PREPARED_FROM:
            self._started()

    def open(self, spec: GrammarSpec, compile_s: float = 2 * COMPILE_S) -> GrammarSession:
        """`compile_s`: of processor time; what has passed a check, maybe on a faster machine, gets more than
        a check does. Raises CallError no_room, engine."""
        if len(self._sessions) >= SESSIONS_MAX:
            raise CallError("no_room", f"{SESSIONS_MAX} grammars are being followed", spec.field)
        own, others = socket.socketpair()
        with others:
            try:
                socket.send_fds(self._started(), [b"+"], [others.fileno()])
            except OSError:
                self._stop()
                own.close()
                raise CallError("engine", "the process that follows grammars has ended", spec.field) from None
        session = GrammarSession(self, spec, own, compile_s)
        self._poll.register(session.fileno(), selectors.EVENT_READ)
        self._sessions[session.fileno()] = session
        return session

    def _started(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            self._stop()
        if self._control is None:
            self._control, others = socket.socketpair()
            with others:
                # One thread is enough, and none survives a fork; there is nothing here for a GPU to do.
                environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
                self._process = subprocess.Popen(
                    [*COMMAND, str(others.fileno()), str(self._path)],
                    pass_fds=[others.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=environment,
                )
        return self._control

    def forget(self, session: GrammarSession) -> None:
        self._poll.unregister(session.fileno())
        del self._sessions[session.fileno()]

    def receive(self) -> None:
        """Read what has come for any session, so that `fileno` is not readable any more."""
        for key, _ in self._poll.select(0):
            if key.fd in self._sessions:
                self._sessions[key.fd].receive()

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        for session in list(self._sessions.values()):
            session.close()
        self._stop()
        self._poll.close()
