"""The log limit: what is written, what is counted, and that neither can grow."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.log_filter import LINE_MAX, LogLimitFilter, provoked_by
from swarmllm.log_limit import FORGOTTEN_MAX, SUMMARY_S, LogLimit, Rate


def test_a_burst_is_written_and_the_rest_is_counted() -> None:
    limit = LogLimit(provoked=Rate(3, 0.1))
    verdicts = [limit.admit("peer", 0.0, is_provoked=True) for _ in range(100)]
    assert verdicts == [0, 0, 0, *[None] * 97]
    assert limit.admit("peer", 10.0, is_provoked=True) == 97
    assert limit.admit("peer", 20.0, is_provoked=True) == 0
    assert limit.n_left_out == 97


def test_the_key_that_was_silent_longest_makes_room() -> None:
    limit = LogLimit(own=Rate(1, 0.01), keys_max=2)
    assert [limit.admit(key, 0.0, is_provoked=False) for key in ("a", "b", "c")] == [0, 0, 0]
    assert limit.admit("b", 1.0, is_provoked=False) is None
    assert limit.admit("a", 1.0, is_provoked=False) == 0


def test_what_a_forgotten_key_left_out_is_told_and_nothing_of_one_that_left_out_nothing() -> None:
    limit = LogLimit(own=Rate(1, 0.01), keys_max=2)
    for key, n_lines in (("a", 5), ("b", 1), ("c", 1), ("d", 1)):
        for _ in range(n_lines):
            limit.admit(key, 0.0, is_provoked=False)
    assert [(each.key, each.n_lines) for each in limit.due(0.0)] == [("a", 4)]


def test_of_too_many_forgotten_keys_the_latest_are_told() -> None:
    limit = LogLimit(own=Rate(1, 0.01), keys_max=1)
    for n in range(FORGOTTEN_MAX + 3):
        for _ in range(2):
            limit.admit(n, 0.0, is_provoked=False)
    assert [each.key for each in limit.due(0.0)] == list(range(2, FORGOTTEN_MAX + 2))


def test_one_peer_leaves_the_lines_of_another_alone() -> None:
    limit = LogLimit(provoked=Rate(3, 0.1))
    for _ in range(1000):
        limit.admit("loud", 0.0, is_provoked=True)
    assert limit.admit("quiet", 0.0, is_provoked=True) == 0


def test_many_names_share_one_limit() -> None:
    limit = LogLimit(provoked=Rate(5, 1.0), in_all=Rate(50, 1.0))
    written = sum(limit.admit(f"peer{n}", 0.0, is_provoked=True) is not None for n in range(10_000))
    assert written == 50
    assert limit.admit("this node", 0.0, is_provoked=False) == 0


def test_what_a_silent_key_left_out_is_told_once() -> None:
    limit, now = LogLimit(provoked=Rate(1, 0.001)), 10 * SUMMARY_S
    for _ in range(8):
        limit.admit("peer", now, is_provoked=True)
    assert limit.due(now + SUMMARY_S / 2) == []
    assert [each.n_lines for each in limit.due(now + SUMMARY_S)] == [7]
    assert limit.due(now + 2 * SUMMARY_S) == []
    assert len(limit) == 0


@given(
    st.lists(st.tuples(st.integers(0, 20), st.floats(0, 3), st.booleans()), max_size=200),
    st.integers(1, 8),
)
def test_keys_are_bounded_and_every_line_is_written_or_counted(
    lines: list[tuple[int, float, bool]], keys_max: int
) -> None:
    limit = LogLimit(provoked=Rate(2, 0.5), in_all=Rate(4, 1.0), own=Rate(3, 1.0), keys_max=keys_max)
    now, n_written, n_told, n_provoked = 0.0, 0, 0, 0
    for key, passed_s, is_provoked in lines:
        now += passed_s
        verdict = limit.admit((key, is_provoked), now, is_provoked=is_provoked)
        n_written += verdict is not None
        n_provoked += is_provoked and verdict is not None
        n_told += verdict or 0
        assert len(limit) <= keys_max
    due = limit.due(now + 10 * SUMMARY_S)
    assert all(each.n_lines > 0 for each in due)
    n_told += sum(each.n_lines for each in due)
    assert n_written + limit.n_left_out == len(lines)
    assert n_told <= limit.n_left_out
    assert n_provoked <= 4 + now * 1.0 + 1e-6


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def output(clock: Clock) -> Iterator[io.StringIO]:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.addFilter(LogLimitFilter(clock=clock))
    root = logging.getLogger("limited")
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
    yield text
    root.removeHandler(handler)


def test_a_flood_of_one_peer_leaves_a_few_lines_and_their_number(output: io.StringIO, clock: Clock) -> None:
    log = logging.getLogger("limited.pipeline")
    for n in range(95_332 // 100):
        for sender in ("hostile", "other")[: 1 + (n % 100 == 0)]:
            provoked_by(log, sender).warning("message from %s refused: %d", sender, n)
    flooded = output.getvalue().splitlines()
    assert len(flooded) <= 10
    clock.now += 60.0
    for sender in ("hostile", "hostile"):
        provoked_by(log, sender).warning("message from %s refused: %s", sender, "again")
    # Each call site has a count of its own: this is another line of code.
    provoked_by(log, "hostile").info("%s is gone", "hostile")
    assert "left out since the last: " in output.getvalue()


def test_what_a_library_words_itself_is_limited_by_its_place(output: io.StringIO) -> None:
    log = logging.getLogger("limited.library")
    for n in range(100_000):
        log.warning(f"bad header {n}")
    assert len(output.getvalue().splitlines()) < 600


def test_a_strangers_text_stays_in_one_line_without_a_traceback(output: io.StringIO) -> None:
    log = provoked_by(logging.getLogger("limited.swarm"), "hostile")
    try:
        {}["no such key\n"]
    except KeyError:
        log.exception("request failed: %s", "a\nERROR swarmllm: all keys are public\x1b[2J" + "x" * 10_000)
    lines = output.getvalue().splitlines()
    assert len(lines) == 1
    assert len(lines[0]) <= LINE_MAX + 2
    assert "\\n" in lines[0]
    assert "\x1b" not in lines[0]
    assert "Traceback" not in lines[0]


def test_a_provoked_error_says_its_type_and_place(output: io.StringIO) -> None:
    try:
        {}["secret"]
    except KeyError:
        provoked_by(logging.getLogger("limited.swarm"), "hostile").exception("request failed")
    assert "KeyError in test_log_limit.py:" in output.getvalue()
    assert "secret" not in output.getvalue()


def test_an_error_of_this_node_keeps_its_traceback(output: io.StringIO) -> None:
    try:
        {}["x"]
    except KeyError:
        logging.getLogger("limited.node").exception("saving failed")
    assert "Traceback" in output.getvalue()


def test_a_token_comes_once_for_the_time_that_has_passed() -> None:
    limit = LogLimit(own=Rate(1, 0.1))
    times_s = (0.0, 10.0, 10.0, 15.0, 20.0, 20.0)
    assert [limit.admit("key", s, is_provoked=False) for s in times_s] == [0, 0, None, None, 2, None]


def test_a_silent_key_stays_a_minute_and_those_that_spoke_later_stay() -> None:
    limit = LogLimit(own=Rate(1, 0.001))
    for key, at_s in (("a", 0.0), ("b", 10.0)):
        for _ in range(2):
            limit.admit(key, at_s, is_provoked=False)
    assert limit.due(SUMMARY_S - 0.1) == []
    assert [each.key for each in limit.due(SUMMARY_S)] == ["a"]
    assert len(limit) == 1
    assert limit.due(SUMMARY_S + 9.9) == []
    assert [each.key for each in limit.due(SUMMARY_S + 10.0)] == ["b"]


def test_the_key_that_was_used_longest_ago_makes_room_and_not_the_oldest() -> None:
    limit = LogLimit(own=Rate(1, 0.001), keys_max=2)
    for key in ("a", "b", "a", "c"):
        limit.admit(key, 0.0, is_provoked=False)
    assert limit.admit("a", 0.0, is_provoked=False) is None, "it is still known"
    assert limit.admit("b", 0.0, is_provoked=False) == 0


def test_what_a_forgotten_key_left_out_is_told_once() -> None:
    limit = LogLimit(own=Rate(1, 0.001), keys_max=1)
    for key in ("a", "a", "b"):
        limit.admit(key, 0.0, is_provoked=False)
    assert [each.key for each in limit.due(0.0)] == ["a"]
    assert limit.due(0.0) == []
