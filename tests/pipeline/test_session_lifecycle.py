"""The table of a session's states, and that no order of events frees a slot twice or forgets one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from node_ids import A, B, O
from trio.testing import MockClock, wait_all_tasks_blocked

from bench.common.arithmetic import FakePool
from swarmllm.errors import SwarmLLMError
from swarmllm.pipeline.stage.lifecycle import (
    FROM_OUTSIDE,
    LIFECYCLE,
    OVER,
    SessionEvent,
    SessionState,
    diagram,
)
from swarmllm.pipeline.stage.session import Session
from swarmllm.state_table import StateTable, UnknownTransition
from swarmllm.swarm.in_memory.network import InMemoryNetwork

from .test_links import context

DOCUMENT = Path(__file__).parents[2] / "docs" / "job-processor.md"
HOLD_S = 60.0
SILENCE_S = 10.0


class CountingPool(FakePool):
    def __init__(self) -> None:
        super().__init__("0:1")
        self.n_freed = 0

    async def cancel(self, model_id: str, request_id: str) -> None:
        self.n_freed += 1
        await super().cancel(model_id, request_id)


class Parts:
    """A session of node a, the first of two stages, and its owner, who counts."""

    def __init__(self, network: InMemoryNetwork) -> None:
        for name in (O, B):
            network.add(name)
        self.pool = CountingPool()
        self.n_ends = self.n_holds = 0
        self.was_taken = False
        self.session = Session(
            context(A, B),
            self.pool,
            network.add(A),
            silence_timeout_s=SILENCE_S,
            hold_s=HOLD_S,
            owner=self,
        )

    def hold(self, session: Session) -> None:
        self.n_holds += 1

    def computed(self, session: Session, n_tokens: int) -> None:
        pass

    def close(self, session: Session) -> None:
        self.n_ends += 1

    def take(self) -> None:
        """As another pipeline does: not before the work is over."""
        if self.session.done.is_set():
            self.was_taken |= self.session.state is SessionState.HELD
            self.session.taken_over()


OUTSIDE: Final[dict[str, Callable[[Parts], object]]] = {
    "relay": lambda parts: parts.session.relay(O, b"header", b""),
    "overrun": lambda parts: [parts.session.relay(O, b"header", b"") for _ in range(5000)],
    "turns": lambda parts: parts.session.ran_by_link(0, 3, 3, running=True),
    "rests": lambda parts: parts.session.ran_by_link(0, 0, 0, running=False),
    "failure": lambda parts: parts.session.report(SwarmLLMError("no")),
    "neighbour lost": lambda parts: parts.session.lost(B),
    "origin lost": lambda parts: parts.session.lost(O),
    "stop": lambda parts: parts.session.stop(),
    "hold": lambda parts: parts.session.stop(hold=True),
    "release": lambda parts: parts.session.release(),
    "take": Parts.take,
}


@given(st.lists(st.tuples(st.sampled_from(sorted(OUTSIDE)), st.sampled_from((None, 0.0, 1.0, 70.0)))))
@settings(max_examples=150, deadline=None)
def test_whatever_happens_a_slot_is_freed_once_and_the_end_told_once(
    events: list[tuple[str, float | None]],
) -> None:
    async def main() -> None:
        async with InMemoryNetwork() as network, trio.open_nursery() as nursery:
            parts = Parts(network)
            nursery.start_soon(parts.session.run)
            for name, wait_s in events:
                OUTSIDE[name](parts)
                if wait_s == 0:
                    await trio.lowlevel.checkpoint()
                elif wait_s is not None:
                    await trio.sleep(wait_s)
                assert (parts.n_ends == 1) == (parts.session.state in OVER)
                assert parts.n_ends <= 1
            parts.session.release()
            await trio.sleep(1)
            assert parts.session.state is SessionState.ENDED
            assert parts.session.done.is_set()
            assert (parts.n_ends, parts.n_holds <= 1) == (1, True)
            assert parts.pool.n_freed == (0 if parts.was_taken else 1)
            assert parts.n_holds or not parts.was_taken
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("state", list(SessionState))
def test_what_comes_from_outside_is_possible_in_every_state(state: SessionState) -> None:
    for event in FROM_OUTSIDE:
        assert LIFECYCLE.after(state, event) in SessionState


def test_every_state_is_reached_and_leads_to_the_end() -> None:
    pairs = [(state, after) for state, row in LIFECYCLE.rows.items() for after in row.values()]
    reaching_end = {SessionState.ENDED}
    reached = {LIFECYCLE.first}
    for _ in SessionState:
        reaching_end |= {state for state, after in pairs if after in reaching_end}
        reached |= {after for state, after in pairs if state in reached}
    assert reaching_end == reached == set(SessionState)
    assert {event for row in LIFECYCLE.rows.values() for event in row} == set(SessionEvent)
    assert set(LIFECYCLE.rows[SessionState.ENDED].values()) == {SessionState.ENDED}


def test_nothing_works_on_after_the_clean_up() -> None:
    """A state from which the slot is freed or held is left by clean-up's own events."""
    late = {SessionState.FREEING, SessionState.HELD, SessionState.FREEING_HELD, SessionState.ENDED}
    for state in late:
        assert LIFECYCLE.rows[state][SessionEvent.JOB] is state
        with pytest.raises(UnknownTransition):
            LIFECYCLE.after(state, SessionEvent.CLEAN_UP)


async def test_an_impossible_event_ends_its_request_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with InMemoryNetwork() as network, trio.open_nursery() as nursery:
        parts = Parts(network)
        nursery.start_soon(parts.session.run)
        await wait_all_tasks_blocked()
        parts.session.taken_over()
        parts.session.taken_over()
        await wait_all_tasks_blocked()
        assert parts.session.state is SessionState.ENDED
        assert (parts.n_ends, parts.n_holds, parts.pool.n_freed) == (1, 0, 1)
    (record,) = [record for record in caplog.records if "is ended" in record.getMessage()]
    assert record.levelname == "ERROR"
    assert "UnknownTransition" in caplog.text


async def test_a_request_whose_jobs_come_by_links_alone_has_begun() -> None:
    """It must not lose its place to others for having had no job by way of the daemons."""
    async with InMemoryNetwork() as network:
        session = Parts(network).session
        assert not session.has_begun
        session.ran_by_link(0, 3, 3, running=True)
        assert session.has_begun


async def test_what_is_held_is_gone_from_the_books_when_the_node_stops() -> None:
    async with InMemoryNetwork() as network, trio.open_nursery() as nursery:
        parts = Parts(network)
        nursery.start_soon(parts.session.run)
        parts.session.stop(hold=True)
        await parts.session.done.wait()
        assert (parts.session.state, parts.n_ends) == (SessionState.HELD, 0)
        nursery.cancel_scope.cancel()
    assert (parts.session.state, parts.n_ends) == (SessionState.ENDED, 1)


async def test_what_is_held_is_freed_when_nobody_comes(autojump_clock: MockClock) -> None:
    async with InMemoryNetwork() as network, trio.open_nursery() as nursery:
        parts = Parts(network)
        nursery.start_soon(parts.session.run)
        parts.session.stop(hold=True)
        await trio.sleep(HOLD_S - 1)
        assert (parts.session.state, parts.pool.n_freed) == (SessionState.HELD, 0)
        await trio.sleep(2)
        assert (parts.session.state, parts.pool.n_freed) == (SessionState.ENDED, 1)


def test_a_table_refuses_a_pair_that_is_given_twice() -> None:
    row = {SessionEvent.END: SessionState.ENDED}
    table = partial(StateTable, SessionState.ASSIGNED, {SessionState.ASSIGNED: row})
    with pytest.raises(ValueError, match="ASSIGNED has END twice"):
        table({SessionState.ASSIGNED: [SessionEvent.END]})


def test_the_documented_diagram_is_the_table() -> None:
    assert f"```mermaid\n{diagram()}\n```" in DOCUMENT.read_text(), (
        "docs/job-processor.md: paste what `python -m swarmllm.pipeline.stage.lifecycle` prints"
    )
