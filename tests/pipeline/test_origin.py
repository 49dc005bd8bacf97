"""The origin's books: every row leaves once in order, unless it has to leave again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.pipeline.origin.output import (
    InvalidReport,
    PrematureEnd,
    PromptWindow,
    TokenLog,
    require_end,
    require_stop_string,
)
from swarmllm_proto.ipc import FinishReason, Sampling
from swarmllm_proto.swarm import StreamingToken


@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 4), st.data())
def test_every_row_leaves_within_the_window_and_in_order(
    n_tokens: int, chunk: int, size: int, data: st.DataObject
) -> None:
    """Whatever the order of sending, notes from the last stage, and damage."""
    window = PromptWindow(n_tokens, chunk, size)
    received = 0
    n_damages = 0
    for _ in range(400):
        under_way = range(window.n_passed, window.n_sent, chunk)
        can = ["send"] * window.may_send() + ["pass"] * bool(under_way) + ["damage"] * bool(under_way)
        if not can:
            break
        what = data.draw(st.sampled_from(can if n_damages < 5 else [c for c in can if c != "damage"]))
        if what == "send":
            chunk_sent = window.next_chunk()
            assert chunk_sent is not None
            assert chunk_sent.position == received
            assert chunk_sent.left == n_tokens - received - chunk_sent.n_tokens
            received += chunk_sent.n_tokens
        elif what == "pass":
            window.passed(min(window.n_passed + chunk, window.n_sent))
        else:
            received = data.draw(st.sampled_from(list(under_way)))
            window.rewind(received)
            n_damages += 1
        assert window.n_sent - window.n_passed <= size * chunk
    assert window.n_passed == window.n_sent == n_tokens
    assert window.next_chunk() is None


@pytest.mark.parametrize("position", [0, 3, 12, 16])
def test_only_a_chunk_under_way_can_be_repeated(position: int) -> None:
    window = PromptWindow(20, 4, 3)
    while window.next_chunk():
        pass
    window.passed(4)
    with pytest.raises(InvalidReport):
        window.rewind(position)


def test_rows_that_have_not_left_cannot_have_passed() -> None:
    window = PromptWindow(20, 4, 3)
    window.next_chunk()
    with pytest.raises(InvalidReport, match="up to 5 are said to be done, 4 have been sent"):
        window.passed(5)


def test_late_and_repeated_notes_change_nothing() -> None:
    window = PromptWindow(20, 4, 3)
    window.next_chunk()
    window.next_chunk()
    window.passed(8)
    window.passed(4)
    assert window.n_passed == 8


def test_tokens_come_one_after_the_other() -> None:
    tokens = TokenLog(n_prompt_tokens=10, max_tokens=2)
    assert tokens.receive(0, 7)
    assert not tokens.receive(0, 7)
    with pytest.raises(InvalidReport, match="token 2 came where 1 was next"):
        tokens.receive(2, 7)
    assert tokens.receive(1, 8)
    assert (tokens.position(), tokens.last_token) == (11, 8)
    with pytest.raises(InvalidReport, match="more than the 2 tokens"):
        tokens.receive(2, 9)


@pytest.mark.parametrize(
    ("stopped_by", "finish_reason", "n_stop"),
    [(1, "stop", 1), (0, "stop", 0), (0, "length", 1), (0, None, 1)],
)
def test_only_a_stop_string_that_was_asked_for_can_end_a_text(
    stopped_by: int, finish_reason: FinishReason | None, n_stop: int
) -> None:
    token = StreamingToken(
        request_id="r", index=0, token=1, finish_reason=finish_reason, stopped_by=stopped_by
    )
    with pytest.raises(InvalidReport, match=f"stop string {stopped_by} of {n_stop}"):
        require_stop_string(token, n_stop)


def test_a_token_is_repeated_now_or_when_it_arrives() -> None:
    tokens = TokenLog(n_prompt_tokens=10, max_tokens=5)
    tokens.receive(0, 7)
    assert tokens.repeats_now(10)
    assert not tokens.awaited
    # The report has overtaken the token it is about.
    assert not tokens.repeats_now(11)
    assert tokens.awaited
    for position in (9, 12):
        with pytest.raises(InvalidReport, match="no job is under way"):
            tokens.repeats_now(position)


@pytest.mark.parametrize(
    ("sampling", "finish_reason", "stopped_by", "is_full"),
    [
        (Sampling(), "length", None, False),
        (Sampling(ignore_eos=True), "stop", None, False),
        (Sampling(ignore_eos=True), "stop", None, True),
    ],
)
def test_an_end_that_cannot_be_is_a_lie(
    sampling: Sampling, finish_reason: FinishReason, stopped_by: int | None, is_full: bool
) -> None:
    token = StreamingToken(
        request_id="r", index=0, token=1, finish_reason=finish_reason, stopped_by=stopped_by
    )
    with pytest.raises(PrematureEnd):
        require_end(token, sampling, is_full=is_full)


@pytest.mark.parametrize(
    ("sampling", "finish_reason", "stopped_by", "is_full"),
    [
        (Sampling(), "length", None, True),
        (Sampling(), "stop", None, False),
        (Sampling(ignore_eos=True, stop=("x",)), "stop", 0, False),
        (Sampling(ignore_eos=True), None, None, False),
    ],
)
def test_other_ends_are_not(
    sampling: Sampling, finish_reason: FinishReason | None, stopped_by: int | None, is_full: bool
) -> None:
    token = StreamingToken(
        request_id="r", index=0, token=1, finish_reason=finish_reason, stopped_by=stopped_by
    )
    require_end(token, sampling, is_full=is_full)
