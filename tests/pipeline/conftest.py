"""Workers of these tests are forks of a process that has imported what a worker imports."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
from forked_worker import ForkedWorker

from swarmllm.workerpool import process


@pytest.fixture(autouse=True)
def _forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    started_by = SimpleNamespace(
        Popen=ForkedWorker,
        PIPE=subprocess.PIPE,
        DEVNULL=subprocess.DEVNULL,
        TimeoutExpired=subprocess.TimeoutExpired,
    )
    monkeypatch.setattr(process, "subprocess", started_by)
