"""A pytest plugin that records which lines of some files each test runs, and how long the test takes."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Collection, Generator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

WALL_WEIGHT = 1 / 3
"""Other programs may run beside a test, but one that sleeps costs its time, too."""


@dataclass(frozen=True)
class TestRun:
    """What one test did over the unchanged tree."""

    test: str
    """Its node id in pytest."""
    took_s: float
    """Of the processor, or a third of the time that went by if that is more."""
    lines: dict[str, frozenset[int]]
    """By path in the tree."""

    def runs(self, path: str, first: int, last: int) -> bool:
        """Whether it runs one of the lines `first` to `last` of the file."""
        return any(first <= line <= last for line in self.lines.get(path, ()))


class LineRecorder:
    """Appends a line of JSON to `output` for each test that has passed. No other test begins after `wall_s`,
    or after `processor_s` of processor time of this process and those that it started. `paths` are those of
    the files in `tree`."""

    def __init__(
        self, tree: Path, paths: Collection[str], output: Path, processor_s: float, wall_s: float
    ) -> None:
        self._names = {str(tree / path): path for path in paths}
        self._output = output
        self._processor_end_s = _processor_s() + processor_s
        self._wall_end_s = time.monotonic() + wall_s
        self._lines = set[tuple[str, int]]()
        self._failed = set[str]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._lines = set()
        began_s, wall_s = _processor_s(), time.monotonic()
        threading.settrace(self._call)
        sys.settrace(self._call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            took_s = max(_processor_s() - began_s, WALL_WEIGHT * (time.monotonic() - wall_s))
            if item.nodeid not in self._failed:
                lines: dict[str, list[int]] = {}
                for path, line in sorted(self._lines):
                    lines.setdefault(self._names[path], []).append(line)
                with self._output.open("a") as output:
                    print(json.dumps({"test": item.nodeid, "took_s": took_s, "lines": lines}), file=output)
            if _processor_s() > self._processor_end_s or time.monotonic() > self._wall_end_s:
                item.session.shouldstop = "enough tests were run"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._failed.add(report.nodeid)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename in self._names else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


def _processor_s() -> float:
    """Of this process and of its children that have ended."""
    return sum(os.times()[:4])


def recorded(output: Path) -> list[TestRun]:
    """What a LineRecorder wrote; nothing where no test has passed."""
    if not output.exists():
        return []
    return [
        TestRun(x["test"], x["took_s"], {path: frozenset(lines) for path, lines in x["lines"].items()})
        for x in map(json.loads, output.read_text().splitlines())
    ]
