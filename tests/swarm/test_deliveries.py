"""Acknowledgements by count, whatever order things happen in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.swarm.data.keepalive import RR_ACK_TIMEOUT_S, Deliveries
from swarmllm_proto.errors import BadMessage


def test_silence_counts_from_the_first_message_that_waits_and_ends_with_every_word_of_progress() -> None:
    sender = Deliveries()
    assert not sender.is_overdue(1e9)
    sender.sent(now=100.0)
    sender.sent(now=105.0)
    assert not sender.is_overdue(99.9 + RR_ACK_TIMEOUT_S)
    assert sender.is_overdue(100.0 + RR_ACK_TIMEOUT_S)
    sender.acknowledged(1, now=109.0)
    assert not sender.is_overdue(118.9)
    sender.acknowledged(1, now=118.0)
    assert not sender.is_overdue(127.9)
    sender.excuse(now=127.0)
    assert sender.is_overdue(127.0 + RR_ACK_TIMEOUT_S)
    sender.acknowledged(2, now=140.0)
    assert not sender.is_overdue(1e9)


def test_a_receiver_says_what_is_new_and_that_it_is_at_work() -> None:
    receiver = Deliveries()
    assert receiver.to_tell(is_at_work=False) is None
    receiver.taken()
    receiver.taken()
    assert receiver.to_tell(is_at_work=False) == 2
    assert receiver.to_tell(is_at_work=False) is None
    assert receiver.to_tell(is_at_work=True) == 2


@given(st.lists(st.sampled_from(["send", "take", "tell", "hear"]), max_size=60))
def test_two_honest_ends_never_disagree(events: list[str]) -> None:
    sender, receiver = Deliveries(), Deliveries()
    on_the_way, said = 0, [0]
    n_heard = 0
    for now, event in enumerate(events):
        if event == "send":
            sender.sent(now)
            on_the_way += 1
        elif event == "take" and on_the_way:
            on_the_way -= 1
            receiver.taken()
        elif event == "tell" and (told := receiver.to_tell(is_at_work=False)) is not None:
            said.append(told)
        elif event == "hear" and n_heard + 1 < len(said):
            n_heard += 1
            sender.acknowledged(said[n_heard], now)
    assert sender.n_acknowledged == said[n_heard] <= sender.n_sent


@pytest.mark.parametrize("n_messages", [-1, 0, 3])
def test_nothing_is_taken_back_and_nothing_acknowledged_that_was_not_sent(n_messages: int) -> None:
    sender = Deliveries()
    sender.sent(0.0)
    sender.sent(0.0)
    sender.acknowledged(1, 0.0)
    with pytest.raises(BadMessage, match="ack"):
        sender.acknowledged(n_messages, 0.0)


def test_a_mark_that_is_passed_tells_of_earlier_ones_and_not_of_later_ones() -> None:
    sender = Deliveries()
    marks = [sender.mark() for _ in range(3)]
    sender.passed(marks[1])
    assert [sender.has_passed(each) for each in marks] == [True, True, False]
    sender.passed(marks[0])
    assert sender.has_passed(marks[1])
    sender.passed(marks[2] + 1)
    assert not sender.has_passed(marks[2])
    sender.passed(marks[2])
    assert sender.has_passed(marks[2])
