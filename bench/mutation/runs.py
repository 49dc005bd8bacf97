"""Runs the tests that run a changed line over a private copy of the tree, in forked processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import queue
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from bench.mutation.changes import Mutation
from bench.mutation.coverage import LineRecorder, TestRun, recorded
from bench.mutation.nearest_tests import PRODUCT, test_map

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
MEASURE_S = 60.0
"""Of processor time for one test file, with the processes it starts. Tests that have not begun by then are
not run for any change."""
MEASURE_WALL_S = 300.0
"""Of one test file that waits or gets no processor."""
RUN_S = 30.0
"""So much of tests is run for a change, by what they took unchanged, while their lines were recorded."""
NEAREST_S = 15.0
"""Of these, of the nearest files that have any; the rest is for the quickest tests of all files."""
FILE_S = 5.0
"""Of these, of one file."""
PROCESSOR_MAX_S = 45
"""Of a run, or twice what its tests took unchanged if that is more: an endless loop ends here."""
DEADLINE_S = 40.0
"""Of a run, and four times what its tests took unchanged. Time in which the run was ready to go on but other
programs had the processor does not count."""
WALL_FACTOR = 4
"""A run that has not ended after so many times its deadline, whoever had the processor, is not judged."""
NEAREST_FILES = 5
"""The tests of so many files are tried before the lines of all the other files are recorded."""
MEMORY_MAX_BYTES = 12 * 2**30
"""Of a run: a change may well remove a limit."""


@dataclass(frozen=True)
class Limits:
    """When a run is ended."""

    processor_s: int | None
    """Of processor time."""
    deadline_s: float
    """Of the time that it computed or waited for something other than the processor."""
    wall_s: float
    """Of all the time that went by."""


def limits_of(unchanged_s: float) -> Limits:
    """Of a run whose tests took so long unchanged."""
    deadline_s = DEADLINE_S + 4 * unchanged_s
    return Limits(math.ceil(max(PROCESSOR_MAX_S, 2 * unchanged_s)), deadline_s, WALL_FACTOR * deadline_s)


@dataclass(frozen=True)
class Run:
    """How a run of some test files ended."""

    status: str
    """`passed`, `failed`, `timed out`, or `not judged` where other programs may have slowed it."""
    took_s: float
    """Of the processor, since other programs may run beside it."""
    first_failure: str = ""


class MutantRuns:
    """A pool of private copies under `work`; `judge` may be called by as many threads as there are copies."""

    def __init__(self, source: Path, work: Path, n_copies: int) -> None:
        self._work = work
        self._measured: dict[str, list[TestRun]] = {}
        self._copies = queue.SimpleQueue[Path]()
        for i in range(n_copies):
            copy = work / f"copy-{i}"
            shutil.rmtree(copy, ignore_errors=True)
            copy.mkdir(parents=True)
            for name in TREE:
                _copy(source / name, copy / name)
            self._copies.put(copy)
        self._tests = test_map(source)
        self._paths = [
            str(path.relative_to(source))
            for package, folder in PRODUCT.items()
            for path in sorted((source / folder / package).rglob("*.py"))
        ]
        self._digests = {x: _digest((source / x).read_bytes()) for x in self._paths}
        self._known = Path(tempfile.gettempdir()) / "swarmllm-mutants-known"
        """What test files run, by the content of the test file."""
        self._known.mkdir(mode=0o700, exist_ok=True)
        for name in IMPORTED_BEFORE:
            import_module(name)

    def judge(self, path: str, module: str, mutation: Mutation, *, nearest_only: bool = False) -> Run:
        """Runs tests that run the changed line of the module (at `path` in the tree) until one fails.
        `passed` also where no test runs the line. `nearest_only`: those of NEAREST_FILES."""
        copy = self._copies.get()
        try:
            last = mutation.line + (copy / path).read_bytes()[mutation.start : mutation.end].count(b"\n")
            tests = self._tests.nearest(module)

            def chosen_of(files: Sequence[str]) -> list[TestRun]:
                runs = [self._runs_of(file, copy) for file in files]
                return choice([[x for x in each if x.runs(path, mutation.line, last)] for each in runs])

            nearest = chosen_of(tests[:NEAREST_FILES])
            run = self._run_changed(copy, path, mutation, nearest) if nearest else Run("passed", 0)
            if nearest_only or run.status != "passed":
                return run
            passed = {x.test for x in nearest}
            left = [x for x in chosen_of(tests) if x.test not in passed]
            return self._run_changed(copy, path, mutation, left) if left else run
        finally:
            self._copies.put(copy)

    def _run_changed(self, copy: Path, path: str, mutation: Mutation, chosen: list[TestRun]) -> Run:
        file = copy / path
        source, times = file.read_text(), file.stat()
        file.write_text(mutation.applied(source))
        # Else bytecode of the unchanged file of the same second would be run.
        os.utime(file, (times.st_atime, times.st_mtime + 10))
        try:
            limits = limits_of(sum(x.took_s for x in chosen))
            return _run(copy, [x.test for x in chosen], limits, self._work)
        finally:
            file.write_text(source)
            os.utime(file, (times.st_atime, times.st_mtime))

    def _runs_of(self, test: str, copy: Path) -> list[TestRun]:
        """What the tests of a file that pass over the unchanged tree run. Recorded again once a product file
        that they run has changed."""
        if test not in self._measured:
            output = self._known / f"{_digest(test.encode() + (copy / test).read_bytes())}.jsonl"
            seen = output.with_suffix(".json")
            if not seen.exists() or any(
                self._digests.get(x) != of for x, of in json.loads(seen.read_text()).items()
            ):
                unfinished = self._work / f"{copy.name}.lines"
                unfinished.unlink(missing_ok=True)
                unfinished.touch()
                recorder = LineRecorder(copy, self._paths, unfinished, MEASURE_S, MEASURE_WALL_S)
                limits = Limits(None, 2 * MEASURE_WALL_S, 2 * MEASURE_WALL_S)
                run = _run(copy, [test], limits, self._work, recorder)
                print(f"{test}: {run.status} in {run.took_s:.0f} s", flush=True)
                shutil.move(unfinished, output)
                files = sorted({path for each in recorded(output) for path in each.lines})
                seen.write_text(json.dumps({x: self._digests[x] for x in files}))
            self._measured[test] = recorded(output)
        return self._measured[test]


def choice(files: Sequence[Sequence[TestRun]]) -> list[TestRun]:
    """Which of the tests that run a line are run, file by file: of the nearest files, which come first, the
    quickest ones, and then the quickest of all that are left. At least one, however long it takes."""
    quickest = [sorted(file, key=lambda x: x.took_s) for file in files]
    chosen, sum_s = set[str](), 0.0
    for file in quickest:
        file_s = 0.0
        for each in file:
            if sum_s + each.took_s <= NEAREST_S and file_s + each.took_s <= FILE_S:
                chosen.add(each.test)
                sum_s, file_s = sum_s + each.took_s, file_s + each.took_s
    left = sorted((x for file in quickest for x in file if x.test not in chosen), key=lambda x: x.took_s)
    for each in left:
        if sum_s + each.took_s <= RUN_S or not chosen:
            chosen.add(each.test)
            sum_s += each.took_s
    return [x for file in quickest for x in file if x.test in chosen]


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _run(
    copy: Path, tests: list[str], limits: Limits, work: Path, recorder: LineRecorder | None = None
) -> Run:
    """Until the first failure, or with a recorder all tests."""
    output, scratch = work / f"{copy.name}.out", work / f"{copy.name}.tmp"
    started_s = time.monotonic()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _become_pytest(copy, tests, output, scratch, limits.processor_s, recorder)
    ended, code, wall_s, delayed_s = 0, 0, 0.0, 0.0
    while not ended and wall_s < limits.wall_s and wall_s - delayed_s < limits.deadline_s:
        time.sleep(0.02)
        wall_s, delayed_s = time.monotonic() - started_s, processor_delay_s(child)
        ended, code, usage = os.wait4(child, os.WNOHANG)
    # What the tests started ends with them, also when they leave something behind.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    shutil.rmtree(scratch, ignore_errors=True)
    if not ended:
        return Run("timed out" if wall_s - delayed_s >= limits.deadline_s else "not judged", wall_s)
    took_s = usage.ru_utime + usage.ru_stime
    if os.waitstatus_to_exitcode(code) == -signal.SIGXCPU:
        return Run("timed out", took_s)
    return Run("failed", took_s, _first_failure(output)) if code else Run("passed", took_s)


def processor_delay_s(process: int) -> float:
    """For how long the main thread of a process was ready to run while others had the processor (the second
    field of Linux's schedstat). 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def _become_pytest(
    copy: Path,
    tests: list[str],
    output: Path,
    scratch: Path,
    processor_s: int | None,
    recorder: LineRecorder | None,
) -> None:
    """In the forked process: never returns."""
    code = 70
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX_BYTES, MEMORY_MAX_BYTES))
        # At the hard limit it would be killed, which looks like any failure.
        if processor_s is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (processor_s, processor_s + 5))
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
        sys.dont_write_bytecode = recorder is None
        import pytest

        options = ["-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", f"--basetemp={scratch}"]
        # pytest would like to rewrite its plugins, some of which are there already.
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        from hypothesis import HealthCheck, Phase, settings

        # As in tests/conftest.py, but one example is enough to notice a change.
        settings.register_profile(
            "mutants",
            derandomize=True,
            deadline=None,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=[HealthCheck.too_slow],
        )
        options.append("--hypothesis-profile=mutants")
        if recorder is None:
            options.append("-x")
        code = int(pytest.main([*options, *tests], plugins=[recorder] if recorder else []))
    except BaseException:  # The process ends here, and its output is all that is left of it.
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _first_failure(output: Path) -> str:
    lines = output.read_text(errors="replace").splitlines()
    # A captured log line has more spaces behind its level.
    failed = [line for line in lines if re.match(r"(FAILED|ERROR) \S", line)]
    return failed[0].split(" ", 1)[1].split(" - ")[0] if failed else "".join(lines[-1:])


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__", "node_modules", "results")
        shutil.copytree(source, target, ignore=ignored)
    else:
        shutil.copy2(source, target)
