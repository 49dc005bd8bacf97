"""Compile and follow grammars in processes that can be given up.

What a grammar costs is decided by the person who wrote it. So no grammar runs in a worker's own process. This
process reads the model's vocabulary once and then waits; for every request it forks a child, which shares the
vocabulary's memory, talks to the worker by a socket of its own, and ends itself when one answer takes more
processor time, or the child more memory, than it may have.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from swarmllm_workers import operating_system
from swarmllm_workers.engine.libllama import Model
from swarmllm_workers.grammars.gbnf_matcher import GbnfMatcher, NotFollowed
from swarmllm_workers.grammars.json_matcher import JsonMatcher, tokenizer_of
from swarmllm_workers.grammars.messages import (
    MESSAGE_MAX,
    Answer,
    Ask,
    CheckToken,
    Compile,
    Compiled,
    GrammarRefused,
    GrammarVerdict,
    Mask,
    decode_ask,
    encode,
)

MEMORY_MAX: Final = 256 * 2**20
"""Bytes of address space that a child may add."""
NICENESS: Final = 5
"""The worker's own threads come first."""


class Child:
    """Follows the grammar of one request."""

    def __init__(self, model: Model, connection: Connection) -> None:
        self._model = model
        self._connection = connection
        self._matcher: GbnfMatcher | JsonMatcher | None = None

    def serve(self, prepare: Preparation) -> None:
        """Answer questions until the worker hangs up or a budget is spent."""
        self._connection.send_bytes(b"")
        while True:
            try:
                ask = decode_ask(self._connection.recv_bytes(MESSAGE_MAX))
            except (EOFError, OSError):
                return
            signal.setitimer(signal.ITIMER_PROF, ask.budget_s)
            answer = self._answer(ask, prepare)
            signal.setitimer(signal.ITIMER_PROF, 0)
            try:
                self._connection.send_bytes(encode(answer))
            except OSError:
                return

    def _answer(self, ask: Ask, prepare: Preparation) -> Answer:
        try:
            if isinstance(ask, Compile):
                self._matcher = prepare.matcher(ask)
                return Compiled()
            if self._matcher is None:
                return GrammarRefused("there is no grammar yet")
            self._matcher.follow(ask.n_kept, ask.tokens)
            if isinstance(ask, CheckToken):
                return GrammarVerdict(self._matcher.allows(ask.candidate))
            return Mask(self._matcher.mask())
        except NotFollowed as error:
            return GrammarRefused(str(error))


class Preparation:
    """The data that is read once and shared by all children."""

    def __init__(self, path: Path) -> None:
        self.model = Model(path, vocab_only=True)
        self._tokenizer = tokenizer_of(self.model.vocabulary, self.model.n_vocab)

    def matcher(self, ask: Compile) -> GbnfMatcher | JsonMatcher:
        """Raises NotFollowed."""
        if ask.spec.grammar:
            return GbnfMatcher(self.model.vocabulary, self.model.n_vocab, ask.spec)
        return JsonMatcher(self.model.vocabulary, self._tokenizer, ask.spec)


def run_child(descriptor: int, prepare: Preparation) -> None:
    used = operating_system.address_space_bytes()
    if used is not None:
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_MAX, used + MEMORY_MAX))
    Child(prepare.model, Connection(descriptor)).serve(prepare)


def main() -> None:
    """Arguments: the descriptor of a socket by which children's sockets come, and the model's path."""
    control, path = socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    prepare = Preparation(path)
    # libllama and Rust print what they dislike, which would end in the daemon's log.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    gc.collect()
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 8)
        if not data:
            return
        for descriptor in descriptors:
            if os.fork() == 0:
                control.close()
                try:
                    run_child(descriptor, prepare)
                finally:
                    os._exit(0)
            os.close(descriptor)


if __name__ == "__main__":
    main()
