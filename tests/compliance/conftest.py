"""Foreign programs against ours: not part of `make test`, because they come from other package registries.
`make compliance` installs and runs them."""

from __future__ import annotations

import os

import pytest

collect_ignore_glob = [] if os.environ.get("SWARMLLM_COMPLIANCE") else ["*"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The figures that tests have recorded, each beside its bound: what passes says how well, too."""
    figures: dict[str, object] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            figures.update(getattr(report, "user_properties", ()))
    if figures:
        terminalreporter.section("figures")
    for name, value in figures.items():
        terminalreporter.write_line(f"{name}: {value}")
