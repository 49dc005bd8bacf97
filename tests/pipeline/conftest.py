"""Shared by the pipeline's tests."""

from __future__ import annotations

import pytest
from trio.testing import MockClock


@pytest.fixture
def patient_clock() -> MockClock:
    """Jumps to the next deadline like `autojump_clock`, but not while a thread works: to trio that looks
    idle too, and a stage looks its model up in a thread."""
    return MockClock(autojump_threshold=0.2)
