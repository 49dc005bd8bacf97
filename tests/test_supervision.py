"""How tasks are started: what each policy does, what a scope contains, what outlives its waiter."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from swarmllm.errors import ConfigError, DeadlineExceeded, NodeUnreachable, SwarmLLMError
from swarmllm.log_filter import REQUEST_ID
from swarmllm.supervision import (
    EssentialTaskFailed,
    Outcome,
    Supervision,
    contained,
    detach,
    spawn,
    supervise,
    supervise_started,
)
from swarmllm.supervision.policy import FIRST_PAUSE_S, LONGEST_PAUSE_S, STEADY_S, Backoff, TaskRecord
from swarmllm.supervision.table import BY_NAME, OUTLIVING, SCOPE_NAMES, TASKS, reference

RESTARTED, GIVEN_UP, ESSENTIAL = "placement", "speed probe", "stop on signal"


class Defect(Exception):
    pass


async def fails() -> None:
    await trio.lowlevel.checkpoint()
    raise Defect("by design")


def leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [error]


# The pure core.


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff()
    pauses = [backoff.pause_s(0.0) for _ in range(12)]
    assert pauses[0] == FIRST_PAUSE_S
    assert all(later in (2 * earlier, LONGEST_PAUSE_S) for earlier, later in itertools.pairwise(pauses))
    assert pauses[-1] == LONGEST_PAUSE_S


def test_pauses_start_over_after_a_steady_time() -> None:
    backoff = Backoff()
    pauses = [backoff.pause_s(STEADY_S) for _ in range(5)]
    assert len(set(pauses)) == 5
    assert backoff.pause_s(STEADY_S + 1) == FIRST_PAUSE_S


def test_a_record_counts_all_tasks_of_its_name() -> None:
    record = TaskRecord(BY_NAME["bootstrap resolver"])
    record.started()
    record.started()
    record.failed("first", 5.0)
    assert record.status().state == "waiting"
    record.restarted()
    status = record.status()
    assert (status.state, status.n_failures, status.n_restarts) == ("running", 1, 1)
    assert (status.last_error, status.last_failed_at) == ("first", 5.0)
    record.ended()
    assert record.status().state == "running"
    record.ended()
    assert record.status().state == "ended"


def test_a_long_error_is_cut() -> None:
    record = TaskRecord(BY_NAME[RESTARTED])
    record.started()
    record.failed("x" * 10_000, 0.0)
    assert len(record.status().last_error) == 300


def test_names_of_the_table_are_unique() -> None:
    assert len(BY_NAME) == len(TASKS)


def test_the_page_names_every_task_with_its_policy() -> None:
    for task in TASKS:
        assert f"| {task.name} | {task.policy} | {task.does} | {task.meanwhile} |" in reference()


# Long-lived tasks.


async def test_a_restarted_task_begins_again_after_ever_longer_pauses(
    autojump_clock: trio.abc.Clock,
) -> None:
    begun_s: list[float] = []

    async def work() -> None:
        begun_s.append(trio.current_time())
        await fails()

    with Supervision().active() as supervision, trio.move_on_after(600):
        async with trio.open_nursery() as nursery:
            supervise(nursery, RESTARTED, work)
    pauses = [later - earlier for earlier, later in itertools.pairwise(begun_s)]
    assert pauses[0] == pytest.approx(FIRST_PAUSE_S)
    assert pauses == sorted(pauses)
    assert 10 < len(begun_s) < 60
    assert supervision.status(RESTARTED).n_failures == len(begun_s)


async def test_a_waiting_task_says_so_and_what_is_missing(autojump_clock: trio.abc.Clock) -> None:
    with Supervision().active() as supervision:
        async with trio.open_nursery() as nursery:
            supervise(nursery, RESTARTED, fails)
            await trio.sleep(FIRST_PAUSE_S / 2)
            status = supervision.status(RESTARTED)
            assert status.is_down
            assert status.last_error == "Defect: by design"
            assert status.meanwhile == BY_NAME[RESTARTED].meanwhile
            nursery.cancel_scope.cancel()
    assert not supervision.status(RESTARTED).is_down


async def test_a_task_that_gives_up_is_told_once_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with Supervision().active() as supervision:
        async with trio.open_nursery() as nursery:
            supervise(nursery, GIVEN_UP, fails)
    assert supervision.status(GIVEN_UP).state == "given up"
    assert len([r for r in caplog.records if GIVEN_UP in r.getMessage()]) == 1


async def test_an_essential_task_ends_everything_with_a_sentence() -> None:
    async def daemon() -> None:
        async with trio.open_nursery() as nursery:
            supervise(nursery, ESSENTIAL, fails)
            supervise(nursery, RESTARTED, trio.sleep_forever)

    with Supervision().active(), pytest.raises(BaseExceptionGroup) as raised:
        await daemon()
    (error,) = leaves(raised.value)
    assert isinstance(error, EssentialTaskFailed)
    assert ESSENTIAL in error.message
    assert "Defect: by design" in error.message


async def test_a_wrong_setting_ends_the_daemon_also_where_a_task_gives_up() -> None:
    async def work() -> None:
        raise ConfigError("no such model", field="model.load")

    with Supervision().active(), pytest.raises(BaseExceptionGroup) as raised:
        async with trio.open_nursery() as nursery:
            supervise(nursery, GIVEN_UP, work)
    (error,) = leaves(raised.value)
    assert isinstance(error, ConfigError)


async def test_what_keeps_a_task_from_beginning_is_raised() -> None:
    async def work(*, task_status: Any) -> None:
        raise ConfigError("port taken")

    with Supervision().active(), pytest.raises(BaseExceptionGroup) as raised:
        async with trio.open_nursery() as nursery:
            await supervise_started(nursery, "libp2p", work)
    assert [type(leaf) for leaf in leaves(raised.value)] == [ConfigError]


async def test_a_task_that_began_once_is_restarted_though_it_cannot_begin_again(
    autojump_clock: trio.abc.Clock,
) -> None:
    n_lives = 0

    async def work(*, task_status: Any) -> None:
        nonlocal n_lives
        n_lives += 1
        if n_lives == 1 or n_lives == 4:
            task_status.started()
        if n_lives == 4:
            await trio.sleep_forever()
        raise ConfigError("port taken")

    with Supervision().active() as supervision:
        async with trio.open_nursery() as nursery:
            await supervise_started(nursery, "libp2p", work)
            await trio.sleep(10)
            status = supervision.status("libp2p")
            assert (status.state, status.n_restarts) == ("running", 3)
            nursery.cancel_scope.cancel()


async def test_cancellation_is_no_failure() -> None:
    with Supervision().active() as supervision, trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            supervise(nursery, RESTARTED, trio.sleep_forever)
            await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    assert not scope.cancelled_caught
    assert supervision.status(RESTARTED).n_failures == 0
    assert supervision.status(RESTARTED).state == "ended"


async def test_a_failure_during_cancellation_is_no_reason_to_restart() -> None:
    async def fails_when_cancelled() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            try:
                await trio.sleep_forever()
            finally:
                raise Defect("while it was cancelled")

    supervision = Supervision()
    with supervision.active(), trio.CancelScope() as scope, contained("peer", "a daemon"):
        async with trio.open_nursery() as nursery:
            supervise(nursery, RESTARTED, fails_when_cancelled)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    assert supervision.status(RESTARTED).n_failures == 0


async def test_a_fault_is_raised_in_the_running_task() -> None:
    with Supervision().active() as supervision:
        async with trio.open_nursery() as nursery:
            supervise(nursery, GIVEN_UP, trio.sleep_forever)
            await trio.testing.wait_all_tasks_blocked()
            supervision.fail(GIVEN_UP, Defect("injected"))
    assert supervision.status(GIVEN_UP).last_error == "Defect: injected"


async def test_an_unknown_name_is_refused_at_once() -> None:
    async with trio.open_nursery() as nursery:
        with pytest.raises(LookupError):
            supervise(nursery, "something", fails)
        with pytest.raises(LookupError, match="'something' is not in the table"):
            await supervise_started(nursery, "something", fails)
        with pytest.raises(LookupError):
            spawn(nursery, "something", fails)


# Short-lived tasks.


async def test_lines_of_tasks_that_outlive_a_request_are_not_taken_for_its_own() -> None:
    seen: dict[str, str] = {}

    async def look(scope: str) -> None:
        seen[scope] = REQUEST_ID.get()

    before = REQUEST_ID.set("req_1")
    try:
        async with trio.open_nursery() as nursery:
            for scope in SCOPE_NAMES:
                spawn(nursery, scope, look, scope)
            await detach(nursery, "worker", look, "its outcome is waited for").wait()
            assert REQUEST_ID.get() == "req_1"
    finally:
        REQUEST_ID.reset(before)
    assert {scope for scope, request_id in seen.items() if not request_id} == OUTLIVING
    assert seen["its outcome is waited for"] == "req_1"


async def test_a_failing_task_ends_its_owner_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[Exception] = []
    with Supervision().active() as supervision:
        async with trio.open_nursery() as nursery:
            spawn(nursery, "peer", fails, failed=ended.append)
            for _ in range(5):
                await trio.lowlevel.checkpoint()
    assert [type(error) for error in ended] == [Defect]
    assert supervision.scope_failures()["peer"] == 1
    (record,) = [r for r in caplog.records if r.name == "swarmllm.supervision"]
    assert record.levelno == logging.ERROR
    assert record.exc_info
    assert "test_supervision.fails" in record.getMessage()


async def test_a_cause_is_logged_once_and_counted_always(caplog: pytest.LogCaptureFixture) -> None:
    with Supervision().active() as supervision:
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                spawn(nursery, "peer", fails)
    assert supervision.scope_failures()["peer"] == 50
    assert len([r for r in caplog.records if r.name == "swarmllm.supervision"]) == 1


async def test_an_expected_kind_of_error_is_logged_without_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    with Supervision().active(), contained("peer", "a greeting"):
        raise NodeUnreachable("gone")
    (record,) = [r for r in caplog.records if r.name == "swarmllm.supervision"]
    assert record.levelno == logging.WARNING
    assert not record.exc_info


async def test_an_end_that_fails_itself_is_contained_too() -> None:
    def failed(error: Exception) -> None:
        raise Defect("again")

    with Supervision().active() as supervision, contained("peer", "a greeting", failed):
        raise Defect("once")
    assert supervision.scope_failures()["peer"] == 2


async def test_cancellation_passes_a_contained_block() -> None:
    with Supervision().active() as supervision:
        with trio.CancelScope() as scope:
            scope.cancel()
            with contained("peer", "a wait"):
                await trio.sleep_forever()
        assert scope.cancelled_caught
    assert supervision.scope_failures()["peer"] == 0


async def test_from_a_group_the_failure_is_handled_and_the_cancellation_goes_on() -> None:
    async def fails_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise Defect("while it was cancelled")

    with Supervision().active() as supervision:
        with trio.CancelScope() as scope:
            with contained("peer", "a group"):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(fails_when_cancelled)
                    nursery.start_soon(trio.sleep_forever)
                    await trio.testing.wait_all_tasks_blocked()
                    scope.cancel()
                    await trio.sleep_forever()
            pytest.fail("the block went on in a cancelled scope")
        assert scope.cancelled_caught
    assert supervision.scope_failures()["peer"] == 1


async def test_keyboard_interrupt_is_nobodys_failure() -> None:
    supervision = Supervision()
    with supervision.active(), pytest.raises(KeyboardInterrupt), contained("peer", "a wait"):
        raise KeyboardInterrupt
    assert supervision.scope_failures()["peer"] == 0


def test_a_failure_that_repeats_is_logged_once_a_minute_with_the_number_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    supervision = Supervision()
    monkeypatch.setattr(supervision, "_now", lambda: now[0])
    for _ in range(4):
        supervision.scope_failed("peer", "a greeting", NodeUnreachable("gone"))
    assert [record.getMessage() for record in caplog.records] == ["a greeting of a peer failed: gone"]
    now[0] += 61.0
    supervision.scope_failed("peer", "a greeting", NodeUnreachable("gone"))
    assert caplog.records[-1].getMessage() == "a greeting of a peer failed: gone (3 more were not logged)"
    assert len(caplog.records) == 2
    assert supervision.scope_failures()["peer"] == 5


# Work that outlives its waiter.


async def test_the_work_goes_on_when_its_waiter_is_cancelled() -> None:
    go_on, done = trio.Event(), trio.Event()

    async def work() -> int:
        await go_on.wait()
        done.set()
        return 7

    async with trio.open_nursery() as nursery:
        outcome = detach(nursery, "question", work)
        with trio.move_on_after(0):
            await outcome.wait()
        assert not outcome.is_over
        go_on.set()
        assert await outcome.wait() == 7
        assert done.is_set()


async def test_a_deadline_names_what_did_not_come(autojump_clock: trio.abc.Clock) -> None:
    async with trio.open_nursery() as nursery:
        outcome = detach(nursery, "question", trio.sleep, 100)
        with pytest.raises(DeadlineExceeded, match="node a did not answer within 5 s"):
            await outcome.within(5, "node a did not answer")
        assert trio.current_time() < 100
        nursery.cancel_scope.cancel()


async def test_every_waiter_gets_the_error_of_our_tree() -> None:
    async def work() -> None:
        raise NodeUnreachable("gone")

    with Supervision().active() as supervision:
        async with trio.open_nursery() as nursery:
            outcome = detach(nursery, "question", work)
            for _ in range(2):
                with pytest.raises(NodeUnreachable, match="gone"):
                    await outcome.wait()
    assert supervision.scope_failures()["question"] == 0


async def test_a_defect_becomes_an_internal_error_and_is_counted() -> None:
    with Supervision().active() as supervision:
        async with trio.open_nursery() as nursery:
            outcome = detach(nursery, "question", fails)
            with pytest.raises(SwarmLLMError, match=r"internal error \(Defect\)"):
                await outcome.wait()
    assert supervision.scope_failures()["question"] == 1


async def test_a_value_that_nobody_waits_for_is_dropped() -> None:
    dropped: list[int] = []

    async def work() -> int:
        await trio.lowlevel.checkpoint()
        return 7

    async with trio.open_nursery() as nursery:
        outcome = detach(nursery, "question", work, dropped=dropped.append)
        outcome.abandon()
    assert dropped == [7]


async def test_a_value_that_was_taken_is_not_dropped() -> None:
    dropped: list[int] = []
    outcome: Outcome[int] = Outcome(dropped.append)
    outcome.succeed(7)
    assert await outcome.wait() == 7
    assert not dropped


async def test_who_waits_before_the_end_hears_of_it() -> None:
    outcome: Outcome[int] = Outcome()
    heard: list[int] = []

    async def wait() -> None:
        heard.append(await outcome.wait())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert heard == []
        outcome.succeed(7)
    assert heard == [7]


async def test_the_first_end_counts() -> None:
    outcome: Outcome[int] = Outcome()
    outcome.fail(NodeUnreachable("gone"))
    outcome.succeed(7)
    with pytest.raises(NodeUnreachable):
        await outcome.wait()
    other: Outcome[int] = Outcome()
    other.succeed(7)
    other.fail(NodeUnreachable("gone"))
    assert await other.wait() == 7


async def test_work_that_has_its_outcome_settles_it_and_cleans_up_afterwards() -> None:
    outcome: Outcome[int] = Outcome()
    is_clean, may_end = trio.Event(), trio.Event()

    async def work() -> int:
        outcome.succeed(7)
        await may_end.wait()
        is_clean.set()
        return 8

    async with trio.open_nursery() as nursery:
        assert detach(nursery, "question", work, outcome=outcome) is outcome
        assert await outcome.wait() == 7
        assert not is_clean.is_set()
        may_end.set()
    assert is_clean.is_set()
    assert await outcome.wait() == 7


async def test_the_end_of_the_nursery_is_the_end_of_the_waiting() -> None:
    async with trio.open_nursery() as nursery:
        outcome = detach(nursery, "worker", trio.sleep_forever, closed=NodeUnreachable("closed"))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    with pytest.raises(NodeUnreachable, match="closed"):
        await outcome.wait()
    late = detach(nursery, "worker", trio.sleep_forever, closed=NodeUnreachable("closed"))
    with pytest.raises(NodeUnreachable, match="closed"):
        await late.wait()


def test_the_page_is_drawn_from_the_table() -> None:
    page = Path(__file__).resolve().parent.parent / "docs" / "supervision.md"
    assert page.read_text() == reference(), (
        "write reference() of swarmllm.supervision.table to docs/supervision.md"
    )


async def test_a_wrong_setting_is_no_reason_not_to_restart_what_is_always_restarted(
    autojump_clock: trio.abc.Clock,
) -> None:
    """Such tasks work with what others set: models come and go while the daemon runs."""
    n_begun = 0

    async def work() -> None:
        nonlocal n_begun
        n_begun += 1
        raise ConfigError("no such model", field="model.load")

    with Supervision().active(), trio.move_on_after(60):
        async with trio.open_nursery() as nursery:
            supervise(nursery, RESTARTED, work)
    assert n_begun > 2
