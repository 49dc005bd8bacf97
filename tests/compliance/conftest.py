"""Foreign programs against ours: not part of `make test`, because they come from other package registries.
`make compliance` installs and runs them."""

from __future__ import annotations

import os
from collections import Counter, defaultdict

import pytest

collect_ignore_glob = [] if os.environ.get("SWARMLLM_COMPLIANCE") else ["*"]


OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was run, what was not and why, and the figures that tests have recorded, each beside its bound:
    what passes says how well, too."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    skipped: defaultdict[str, Counter[str]] = defaultdict(Counter)
    figures: dict[str, object] = {}
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            if outcome not in OUTCOMES or not hasattr(report, "nodeid"):
                continue
            suite = report.nodeid.partition("::")[0]
            counts[suite][outcome] += 1
            if outcome == "skipped":
                skipped[suite][_reason(report.longrepr)] += 1
            figures.update(getattr(report, "user_properties", ()))
    if not counts:
        return
    terminalreporter.section("suites")
    for suite in sorted(counts):
        told = ", ".join(
            f"{counts[suite][outcome]} {outcome}" for outcome in OUTCOMES if counts[suite][outcome]
        )
        terminalreporter.write_line(f"{suite}: {told}")
        for reason, n in skipped[suite].items():
            terminalreporter.write_line(f"    {n} skipped: {reason}")
    if figures:
        terminalreporter.section("figures")
    for name, value in figures.items():
        terminalreporter.write_line(f"{name}: {value}")


def _reason(longrepr: object) -> str:
    """Of a skipped test: pytest gives file, line and text."""
    text = longrepr[-1] if isinstance(longrepr, tuple) else longrepr
    return str(text).removeprefix("Skipped: ")
