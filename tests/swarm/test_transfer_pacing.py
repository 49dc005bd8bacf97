"""Transfers and messages on one processor: who waits for whom, and for how long at most."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.swarm.data.transfer_pacing import STILL_S, WAIT_MAX_S, TransferPacing


def turn_s(pacing: TransferPacing, since_s: float, messages_s: list[float]) -> float:
    """When a transfer that waits from `since_s` on has its turn, if messages pass at these times."""
    now, messages_s = since_s, sorted(messages_s)
    while True:
        while messages_s and messages_s[0] <= now:
            pacing.message(messages_s.pop(0))
        wait_s = pacing.wait_s(since_s, now)
        if wait_s == 0:
            return now
        now += wait_s


def test_where_no_messages_pass_transfers_never_wait() -> None:
    assert TransferPacing().wait_s(5.0, 5.0) == 0


def test_a_transfer_is_still_after_a_message_and_until_the_last_of_several() -> None:
    assert turn_s(TransferPacing(), 1.0, [1.0]) == pytest.approx(1.0 + STILL_S)
    assert turn_s(TransferPacing(), 1.0, [1.0, 1.0 + 0.9 * STILL_S]) == pytest.approx(1.0 + 1.9 * STILL_S)


def test_messages_without_a_pause_let_a_slice_through_all_the_same() -> None:
    messages_s = [1.0 + 0.0001 * n for n in range(1000)]
    assert turn_s(TransferPacing(), 1.0, messages_s) == pytest.approx(1.0 + WAIT_MAX_S)


@given(st.lists(st.floats(0.0, 0.02), max_size=50))
def test_a_turn_comes_in_stillness_or_when_patience_ends(messages_s: list[float]) -> None:
    turn = turn_s(TransferPacing(), 0.0, messages_s)
    assert turn <= WAIT_MAX_S + 1e-9
    is_still = all(not turn - STILL_S + 1e-9 < at_s <= turn for at_s in messages_s)
    assert is_still or turn >= WAIT_MAX_S - 1e-9
