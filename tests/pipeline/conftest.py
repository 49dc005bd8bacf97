"""Workers of these tests are forks of a process that has imported what a worker imports."""

from __future__ import annotations

import pytest
from forked_worker import fork_workers


@pytest.fixture(autouse=True)
def _forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_workers(monkeypatch.setattr)
