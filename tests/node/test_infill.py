"""The prompt for what stands between two texts."""

from __future__ import annotations

import pytest

from swarmllm.node.infill import InfillTexts, infill_prompt
from swarmllm_proto.ipc import InfillTokens

TOKENS = InfillTokens(prefix=90, suffix=91, middle=92)
BEGIN = 99


def texts(n_prefix: int, n_suffix: int, n_prompt: int = 0, n_others: int = 0) -> InfillTexts:
    """Of tokens that tell where they stood: 100 to 199 before the gap, 200 to 299 behind it ..."""
    lengths = (n_prefix, n_suffix, n_prompt, n_others)
    return InfillTexts(*(range(100 * i, 100 * i + n) for i, n in enumerate(lengths, 1)))


def test_all_is_there_in_its_order() -> None:
    found = infill_prompt(TOKENS, texts(3, 2, 1, 2), first=[BEGIN], n_max=100)
    assert found == [BEGIN, 400, 401, 90, 100, 101, 102, 300, 91, 200, 201, 92]


def test_of_what_is_too_long_the_nearest_stays() -> None:
    found = infill_prompt(TOKENS, texts(50, 50, 1, 50), first=[BEGIN], n_max=25)
    # 20 tokens are left for the texts: 15 before the gap, 5 behind it.
    assert found == [BEGIN, 90, *range(135, 150), 300, 91, *range(200, 205), 92]
    assert len(found) == 25


def test_other_files_get_what_is_left() -> None:
    found = infill_prompt(TOKENS, texts(4, 2, 0, 50), first=[], n_max=15)
    assert found == [*range(444, 450), 90, 100, 101, 102, 103, 91, 200, 201, 92]


@pytest.mark.parametrize("n_max", range(30))
def test_it_is_never_longer_than_there_is_room_for(n_max: int) -> None:
    found = infill_prompt(TOKENS, texts(20, 20, 2, 20), first=[BEGIN], n_max=n_max)
    assert len(found) <= max(n_max, 6)
    assert [token for token in found if token >= 90 and token < 100] == [BEGIN, 90, 91, 92]
