"""How much of a long study a test does. `make test` does a part of it, `make test-long` the whole."""

from __future__ import annotations

import os
from typing import Final, TypeVar

Amount = TypeVar("Amount")

IS_LONG: Final = "SWARMLLM_TEST_LONG" in os.environ


def part_or_whole(part: Amount, whole: Amount) -> Amount:
    """A number of cases, or the cases themselves."""
    return whole if IS_LONG else part
