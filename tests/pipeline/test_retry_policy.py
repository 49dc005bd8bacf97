"""When a broken request tries again: pure decisions over errors and times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_ids import B

from swarmllm.errors import (
    ContextFull,
    DeadlineExceeded,
    InvalidRequest,
    NodeBusy,
    NodeRefused,
    NodeUnreachable,
    NoPipeline,
    RemoteError,
    SwarmLLMError,
    WorkerDied,
)
from swarmllm.pipeline.repair.retry_policy import (
    FIRST_REFUSALS,
    LONGEST_PAUSE_S,
    MAX_FAULTS,
    MAX_RECOVERIES,
    RetryPolicy,
)

LOST = NodeUnreachable("lost")
NOBODY = NoPipeline("nobody")


def begun(timeout_s: float = 60.0) -> RetryPolicy:
    recovery = RetryPolicy(timeout_s)
    recovery.token()
    return recovery


def test_before_the_first_token_a_remote_failure_is_retried_once() -> None:
    recovery = RetryPolicy(60.0)
    assert recovery.failed(RemoteError("refused"), 1.0) == 1.0
    with pytest.raises(RemoteError, match="again"):
        recovery.failed(RemoteError("again"), 1.0)


@pytest.mark.parametrize("error", [NOBODY, ContextFull("full"), InvalidRequest("no")])
def test_before_the_first_token_other_failures_are_final(error: SwarmLLMError) -> None:
    with pytest.raises(type(error)):
        RetryPolicy(60.0).failed(error, 0.0)


def test_lateness_before_the_first_token_is_retried_once_and_known_as_such() -> None:
    recovery = RetryPolicy(60.0)
    assert not recovery.is_late
    assert recovery.failed(DeadlineExceeded("late"), 120.0) == 120.0
    assert recovery.is_late
    with pytest.raises(DeadlineExceeded, match="late"):
        recovery.failed(NOBODY, 120.0)


def test_a_failure_before_the_first_token_is_told_rather_than_the_lack_of_an_alternative() -> None:
    recovery = RetryPolicy(60.0)
    recovery.failed(LOST, 0.0)
    recovery.avoid.add(B)
    with pytest.raises(NodeUnreachable, match="lost"):
        recovery.failed(NOBODY, 0.0)


def test_a_node_that_failed_is_asked_again_where_there_is_no_other() -> None:
    recovery = RetryPolicy(60.0)
    recovery.failed(WorkerDied("died"), 0.0)
    recovery.avoid.add(B)
    assert recovery.failed(NOBODY, 0.0) == 0.0
    assert not recovery.avoid


def test_a_token_ends_the_trouble() -> None:
    recovery = begun()
    for round_s in (0.0, 100.0, 200.0):
        for _ in range(MAX_FAULTS - 1):
            recovery.failed(WorkerDied("died"), round_s)
        recovery.token()
    assert recovery.n_recoveries == 3


def test_a_request_that_breaks_again_and_again_ends() -> None:
    recovery = begun()
    for n in range(MAX_RECOVERIES):
        recovery.failed(WorkerDied("died"), float(n))
        recovery.token()
    with pytest.raises(WorkerDied, match="once more"):
        recovery.failed(WorkerDied("once more"), float(MAX_RECOVERIES))


def test_refusals_before_the_first_token_are_asked_around_a_few_times() -> None:
    recovery = RetryPolicy(5.0)
    for n in range(FIRST_REFUSALS - 1):
        assert recovery.failed(NodeRefused("no"), float(n)) == n
    with pytest.raises(NodeRefused):
        recovery.failed(NodeRefused("no"), 9.0)


def test_a_failure_after_refusals_ends_the_request() -> None:
    recovery = RetryPolicy(5.0)
    recovery.failed(NodeRefused("no"), 0.0)
    with pytest.raises(WorkerDied):
        recovery.failed(WorkerDied("died"), 0.0)


def test_what_is_given_up_names_the_cause_and_the_last_obstacle() -> None:
    recovery = begun(5.0)
    recovery.failed(LOST, 0.0)
    with pytest.raises(NoPipeline, match=r"lost.*within 5 s: nobody"):
        recovery.failed(NOBODY, 5.0)


@given(
    st.floats(0.1, 100),
    st.lists(
        st.tuples(
            st.sampled_from([LOST, NOBODY, NodeBusy("busy"), NodeRefused("no"), DeadlineExceeded("late")]),
            st.booleans(),
            st.floats(0, 1),
        ),
        max_size=60,
    ),
)
def test_waits_end_within_patience_and_never_lie_in_the_past(
    timeout_s: float, failures: list[tuple[SwarmLLMError, bool, float]]
) -> None:
    recovery = begun(timeout_s)
    now_s, n_immediate = 0.0, 0
    for error, somebody_is_to_blame, wake_early in failures:
        if somebody_is_to_blame and error is not NOBODY:
            recovery.avoid.add(B)
        try:
            again_s = recovery.failed(error, now_s)
        except SwarmLLMError:
            assert now_s >= timeout_s
            return
        assert now_s <= again_s <= max(now_s, min(timeout_s, now_s + LONGEST_PAUSE_S))
        # It may not turn in circles without the clock going on.
        n_immediate = n_immediate + 1 if again_s == now_s else 0
        assert n_immediate <= 2
        now_s += (again_s - now_s) * max(wake_early, 0.01)
