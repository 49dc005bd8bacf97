"""Runs test files over a private copy of the tree in which one line is changed, each in a forked process."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import shutil
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from bench.mutant_tests import PRODUCT, test_map
from bench.mutations import Mutation

TREE = ("swarmllm", "workers", "proto", "bench", "tests", "docs", "pyproject.toml", "README.md")
IMPORTED_BEFORE = (
    "cryptography",
    "httpx",
    "hypercorn.trio",
    "hypothesis",
    "libp2p",
    "msgspec",
    "numpy",
    "pytest_trio",
    "trio.testing",
)
"""By the process that each run is forked from: they take longer than many tests."""
OURS = (*PRODUCT, "bench", "tests")
SLOW_S = 6.0
"""A test file that takes longer unchanged, of the processor, is left out."""
RUN_S = 12.0
"""So much of test files is run for a change, by what they took unchanged; the nearest first."""
FILES_MAX = 5
PROCESSOR_MAX_S = int(4 * RUN_S)
"""Of a run: an endless loop need not wait for the deadline, which leaves room for other programs."""
MEMORY_MAX_BYTES = 12 * 2**30
"""Of a run: a change may well remove a limit."""


@dataclass(frozen=True)
class Run:
    """How a run of some test files ended."""

    status: str
    """`passed`, `failed` or `timed out`."""
    took_s: float
    """Of the processor, since other programs may run beside it."""
    first_failure: str = ""


class MutantRuns:
    """A pool of private copies under `work`; `judge` may be called by as many threads as there are copies."""

    def __init__(self, source: Path, work: Path, n_copies: int) -> None:
        self._work = work
        self._took_s: dict[str, float | None] = {}
        self._copies = queue.SimpleQueue[Path]()
        for i in range(n_copies):
            copy = work / f"copy-{i}"
            shutil.rmtree(copy, ignore_errors=True)
            copy.mkdir(parents=True)
            for name in TREE:
                _copy(source / name, copy / name)
            self._copies.put(copy)
        self._tests = test_map(source)
        for name in IMPORTED_BEFORE:
            import_module(name)

    def judge(self, path: str, module: str, mutation: Mutation) -> Run:
        """Runs the tests nearest to the module (at `path` in the tree) until one fails, or `passed`.

        Raises ValueError where no test file is near.
        """
        copy = self._copies.get()
        try:
            chosen = self._chosen(module, copy)
            if not chosen:
                raise ValueError(f"no test file imports {module}")
            file = copy / path
            source, times = file.read_text(), file.stat()
            file.write_text(mutation.applied(source))
            # Else bytecode of the unchanged file of the same second would be run.
            os.utime(file, (times.st_atime, times.st_mtime + 10))
            try:
                deadline_s = 60 + 10 * sum(self._took_s[x] or 0.0 for x in chosen)
                return _run(copy, chosen, deadline_s, self._work)
            finally:
                file.write_text(source)
                os.utime(file, (times.st_atime, times.st_mtime))
        finally:
            self._copies.put(copy)

    def _chosen(self, module: str, copy: Path) -> list[str]:
        chosen, sum_s = [], 0.0
        for test in self._tests.nearest(module):
            took_s = self._unchanged(test, copy)
            if took_s is not None and sum_s + took_s <= RUN_S:
                chosen.append(test)
                sum_s += took_s
            if len(chosen) == FILES_MAX or sum_s > 0.7 * RUN_S:
                break
        return chosen

    def _unchanged(self, test: str, copy: Path) -> float | None:
        """How long a test file takes over the unchanged tree; None if it fails there or takes too long."""
        if test not in self._took_s:
            run = _run(copy, [test], 10 * SLOW_S, self._work, writes_bytecode=True)
            is_fit = run.status == "passed" and run.took_s <= SLOW_S
            self._took_s[test] = run.took_s if is_fit else None
            if not is_fit:
                print(f"left out: {test}: {run.status} in {run.took_s:.0f} s {run.first_failure}", flush=True)
        return self._took_s[test]


def _run(copy: Path, tests: list[str], deadline_s: float, work: Path, writes_bytecode: bool = False) -> Run:
    output, scratch = work / f"{copy.name}.out", work / f"{copy.name}.tmp"
    started_s = time.monotonic()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _become_pytest(copy, tests, output, scratch, writes_bytecode)
    ended, code = 0, 0
    while not ended and time.monotonic() < started_s + deadline_s:
        time.sleep(0.02)
        ended, code, usage = os.wait4(child, os.WNOHANG)
    # What the tests started ends with them, also when they leave something behind.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    shutil.rmtree(scratch, ignore_errors=True)
    if not ended or os.waitstatus_to_exitcode(code) == -signal.SIGXCPU:
        return Run("timed out", deadline_s)
    took_s = usage.ru_utime + usage.ru_stime
    return Run("failed", took_s, _first_failure(output)) if code else Run("passed", took_s)


def _become_pytest(copy: Path, tests: list[str], output: Path, scratch: Path, writes_bytecode: bool) -> None:
    """In the forked process: never returns."""
    code = 70
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX_BYTES, MEMORY_MAX_BYTES))
        # At the hard limit it would be killed, which looks like any failure.
        resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_MAX_S, PROCESSOR_MAX_S + 5))
        file = os.open(output, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(copy)
        for name in [x for x in sys.modules if x.split(".")[0] in OURS]:
            del sys.modules[name]
        ours = [str(copy / folder) for folder in PRODUCT.values()]
        sys.path[:] = [*ours, *(x for x in sys.path if "site-packages" in x or "lib/python" in x)]
        # For the processes that tests start.
        os.environ["PYTHONPATH"] = os.pathsep.join(ours)
        sys.dont_write_bytecode = not writes_bytecode
        import pytest

        options = ["-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", f"--basetemp={scratch}"]
        # pytest would like to rewrite its plugins, some of which are there already.
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = int(pytest.main([*options, *tests]))
    except BaseException:  # The process ends here, and its output is all that is left of it.
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _first_failure(output: Path) -> str:
    lines = output.read_text(errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" ", 1)[1].split(" - ")[0] if failed else "".join(lines[-1:])


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__", "node_modules", "results")
        shutil.copytree(source, target, ignore=ignored)
    else:
        shutil.copy2(source, target)
