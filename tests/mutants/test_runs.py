"""How a run over a changed line ends that hangs, computes without end, is slowed by other programs, or leaves
a process behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from bench.mutation.runs import DEADLINE_S, PROCESSOR_MAX_S, WALL_FACTOR, limits_of, processor_delay_s

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
NEVER = 1e9
CASES: dict[str, dict[str, Any]] = {
    "passes": {"test": "pass"},
    "fails": {"test": "assert False"},
    "hangs": {"test": "time.sleep(1e6)", "deadline_s": 1.0},
    "computes": {"test": "\n    while True: pass", "processor_s": 1},
    "is slowed": {"test": "pass", "deadline_s": 0.01, "delayed_s": NEVER},
    "is slowed for too long": {
        "test": "time.sleep(1e6)",
        "deadline_s": 0.01,
        "wall_s": 1.0,
        "delayed_s": NEVER,
    },
    "leaves a process": {"test": "open('pid', 'w').write(str(subprocess.Popen(['sleep', '1000']).pid))"},
}
SCRIPT = """
import json, sys
from pathlib import Path
import pytest
from bench.mutation import runs

work, outcomes = Path(sys.argv[1]), {}
real = runs.processor_delay_s
for number, (name, case) in enumerate(json.loads(sys.argv[2]).items()):
    copy = work / str(number)
    copy.mkdir()
    (copy / "test_it.py").write_text(f"import subprocess, time\\ndef test(): {case['test']}\\n")
    limits = runs.Limits(case.get("processor_s"), case.get("deadline_s", 1e9), case.get("wall_s", 1e9))
    runs.processor_delay_s = (lambda pid, by=case["delayed_s"]: by) if "delayed_s" in case else real
    run = runs._run(copy, ["test_it.py"], limits, work)
    outcomes[name] = run.status, run.first_failure
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By case. In a process of its own, which runs are forked from as from the tool."""
    work = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(work), json.dumps(CASES)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert said.returncode == 0, said.stderr
    ended: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    ended["process"] = int((work / str([*CASES].index("leaves a process")) / "pid").read_text())
    return ended


@pytest.mark.parametrize(
    ("case", "status", "first_failure"),
    [
        ("passes", "passed", ""),
        ("fails", "failed", "test_it.py::test"),
        ("hangs", "timed out", ""),
        ("computes", "timed out", ""),
        ("is slowed", "passed", ""),
        ("is slowed for too long", "not judged", ""),
        ("leaves a process", "passed", ""),
    ],
)
def test_a_run_ends_as_it_should(
    case: str, status: str, first_failure: str, outcomes: dict[str, Any]
) -> None:
    assert outcomes[case] == [status, first_failure]


def is_alive(process: int) -> bool:
    """A zombie is not."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_what_the_tests_of_a_run_started_ends_with_it(outcomes: dict[str, Any]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while is_alive(outcomes["process"]):
        assert time.monotonic() < until_s, "it is still there"
        time.sleep(0.01)


@pytest.mark.parametrize("unchanged_s", [0.0, 3.0, 1000.0])
def test_a_run_may_take_longer_than_its_tests_took_unchanged(unchanged_s: float) -> None:
    limits = limits_of(unchanged_s)
    assert limits.processor_s is not None
    assert limits.processor_s >= max(PROCESSOR_MAX_S, 2 * unchanged_s)
    assert limits.deadline_s == DEADLINE_S + 4 * unchanged_s
    assert limits.wall_s == WALL_FACTOR * limits.deadline_s


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processors cannot be chosen here")
def test_waiting_for_the_processor_is_told_from_other_waiting() -> None:
    """Two programs compute on one processor; a third one sleeps."""
    processor = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, {{{processor}}})\nwhile True: pass"
    commands = [[sys.executable, "-c", spin]] * 2 + [["sleep", "1000"]]
    started = [subprocess.Popen(command) for command in commands]
    *computing, sleeping = (each.pid for each in started)
    try:
        until_s = time.monotonic() + PATIENCE_S
        while min(map(processor_delay_s, computing)) < 0.2 + 2 * processor_delay_s(sleeping):
            assert time.monotonic() < until_s, "they wait alike"
            time.sleep(0.01)
    finally:
        for each in started:
            each.kill()
            each.wait()
    assert processor_delay_s(sleeping) == 0.0, "it has ended"
