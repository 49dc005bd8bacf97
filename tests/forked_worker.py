"""Start workers without importing numpy and libllama again for each one.

What a worker imports takes most of a second of processor time, and a test of several nodes starts a handful
of workers. As for daemons (see `forked_process`), a server process imports it once, and every worker is a
fork of that process, which has computed nothing. Tests of how a worker starts, of its memory and of its end
start real ones.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import reduction
from multiprocessing.context import ForkServerContext
from types import SimpleNamespace
from typing import Any

from forked_process import LAST, PRELOADED, ForkedProcess


class ForkedWorker(ForkedProcess):
    """As much of `subprocess.Popen` as tests and pools use. The fork has a session of its own."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], stderr: int = subprocess.DEVNULL, **_: Any
    ) -> None:
        """`command`: a Python, its options, and a script or `-m` and a module. `stderr`: PIPE or DEVNULL.

        Raises OSError where the server process can't be reached."""
        start_server()
        self.stderr: Any = None
        errors, its_errors = os.pipe()
        begun, its_begin = os.pipe()
        try:
            self._process = forks().Process(
                target=run_worker,
                args=(list(command), dict(env), Passed(its_errors), Passed(its_begin)),
                daemon=True,
            )
            self._process.start()
        finally:
            os.close(its_errors)
            os.close(its_begin)
        assert self._process.pid is not None
        self.pid = self._process.pid
        os.read(begun, 1)  # From here on its process group is its own.
        os.close(begun)
        if stderr == subprocess.PIPE:
            self.stderr = os.fdopen(errors, "rb", buffering=0)
        else:
            os.close(errors)


def fork_workers(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Workers that this process starts are forks from now on. `set_attribute`: a test's, which undoes it."""
    from swarmllm.workerpool import process

    kept = ("PIPE", "DEVNULL", "TimeoutExpired")
    popen = {name: getattr(subprocess, name) for name in kept} | {"Popen": ForkedWorker}
    set_attribute(process, "subprocess", SimpleNamespace(**popen))


class Passed:
    """A descriptor for the fork."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> Any:
        return received, (reduction.DupFd(self._descriptor),)


def received(passed: Any) -> int:
    return int(passed.detach())


def forks() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    assert isinstance(context, ForkServerContext)
    context.set_forkserver_preload([*PRELOADED, LAST])
    return context


@cache
def start_server() -> None:
    """Wait until the server process has imported everything: a test has its deadlines."""
    process = forks().Process(target=int)
    process.start()
    process.join()


def die_with_parent() -> None:
    """As the kernel does with a worker that is a child of its daemon, and not of the server process."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    select.select([parent.sentinel], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def run_worker(command: list[str], environment: dict[str, str], errors: int, begin: int) -> None:
    """In the forked process."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for opened, standard in ((nothing, 0), (nothing, 1), (errors, 2)):
        os.dup2(opened, standard)
    os.close(errors)
    os.write(begin, b".")
    os.close(begin)
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=die_with_parent, daemon=True).start()
    program = [each for each in command[1:] if each != "-P"]
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")
