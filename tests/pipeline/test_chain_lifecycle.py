"""The table of an attempt's states on the origin, and what a stage may say in which of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from node_ids import A, B
from trio.testing import MockClock

from swarmllm.errors import DeadlineExceeded, NodeUnreachable, RemoteError
from swarmllm.pipeline.job import RequestView
from swarmllm.pipeline.origin.chain import Chain, StallHandler
from swarmllm.pipeline.origin.lifecycle import (
    LIFECYCLE,
    OF_STAGES,
    OVER,
    ChainEvent,
    ChainState,
    diagram,
    request_diagram,
)
from swarmllm.pipeline.request import OriginMessage, RequestContext
from swarmllm.pipeline.stage.failure_reports import damage_report
from swarmllm.state_table import UnknownTransition
from swarmllm.workerpool import ModelFile
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import PipelineError, PrefillProgress, Stage, StreamingToken

DOCUMENT = Path(__file__).parents[2] / "docs" / "job-processor.md"
SAYS: dict[str, OriginMessage] = {
    "progress": PrefillProgress(request_id="r", position=0),
    "token": StreamingToken(request_id="r", index=0, token=7),
    "last token": StreamingToken(request_id="r", index=0, token=7, finish_reason="stop"),
    "damage": damage_report("r", "b", 0),
}


class Session:
    """Counts what a chain wants of its session."""

    def __init__(self) -> None:
        self.n_stops = self.n_offers = 0

    def stop(self) -> None:
        self.n_stops += 1

    def offer(self, job: object) -> None:
        self.n_offers += 1


class NobodyWaits:
    async def investigate(self, chain: Chain) -> None:
        raise AssertionError("nobody waits for this chain")

    def repeats(self, chain: Chain, position: int) -> None:
        pass


def a_chain(watch: StallHandler | None = None, silence_timeout_s: float = 1) -> Chain:
    stages = (Stage(node_id=A, start=0, end=6), Stage(node_id=B, start=6, end=12))
    context = RequestContext(
        "r", ModelFile("m", Path("/nowhere")), 4, 997, 8, Sampling(), RequestView(A, A, stages, True)
    )
    return Chain(
        context,
        np.ones(8, np.int32),
        chunk_tokens=4,
        silence_timeout_s=silence_timeout_s,
        look_after_s=5,
        stall_handler=watch or NobodyWaits(),
        nicknames={A: "", B: ""},
    )


async def test_a_silence_that_lasts_too_long_fails_the_request(autojump_clock: MockClock) -> None:
    chain = a_chain()
    await trio.sleep(1.5)
    await chain._silent()
    assert isinstance(chain.failure, DeadlineExceeded)
    assert "was silent for 1 s" in chain.failure.message


@pytest.mark.parametrize(
    ("silent_s", "is_looked_for"), [(0.0, True), (0.75, True), (1.0, False), (1.5, False)]
)
async def test_a_silence_is_looked_into_until_it_has_lasted_too_long(
    silent_s: float, is_looked_for: bool, autojump_clock: MockClock
) -> None:
    looked_for: list[Chain] = []

    class Looking(NobodyWaits):
        async def investigate(self, chain: Chain) -> None:
            looked_for.append(chain)

    chain = a_chain(Looking())
    chain.start(Session())  # type: ignore[arg-type]
    await trio.sleep(silent_s)
    await chain._silent()
    assert looked_for == [chain] * is_looked_for
    assert (chain.failure is None) is is_looked_for
    chain.close()


async def test_rows_of_the_prompt_that_were_computed_are_a_sign_of_life(autojump_clock: MockClock) -> None:
    """Before the first token nothing else comes: its reader looks after the pipeline only where they stay
    away."""
    looked_s: list[float] = []

    class Looking(NobodyWaits):
        async def investigate(self, chain: Chain) -> None:
            looked_s.append(trio.current_time())

    chain = a_chain(Looking(), silence_timeout_s=60.0)
    chain.start(Session())  # type: ignore[arg-type]
    began_s = trio.current_time()
    assert chain.began_s == began_s
    while chain.next_chunk() is not None:
        pass
    async with trio.open_nursery() as nursery:
        nursery.start_soon(chain.next)
        for position in (4, 8):
            await trio.sleep(4.0)
            chain.receive(B, PrefillProgress(request_id="r", position=position), b"")
        assert (chain.silent_s, chain.began_s, looked_s) == (0.0, began_s, [])
        await trio.sleep(11.0)
        assert looked_s == [began_s + 13.0, began_s + 18.0]
        nursery.cancel_scope.cancel()
    chain.close()


@pytest.mark.parametrize("kind", ["worker_died", "bad_rows"])
async def test_only_who_complains_of_rows_needs_to_have_been_sent_some(kind: str) -> None:
    """A stage may report any failure, but of bad rows only those of the stage before."""
    chain = a_chain()
    chain.start(Session())  # type: ignore[arg-type]
    chain.receive(B, PipelineError(request_id="r", node_id=B, kind=kind, message="it broke"), b"")
    assert isinstance(chain.failure, RemoteError)
    assert ("it gets no rows from" in chain.failure.message) is (kind == "bad_rows")
    assert ("it broke" in chain.failure.message) is (kind == "worker_died")


@pytest.mark.parametrize("says", SAYS)
async def test_a_stage_that_answers_before_it_is_asked_breaks_the_protocol(says: str) -> None:
    chain = a_chain()
    chain.receive(B, SAYS[says], b"")
    assert isinstance(chain.failure, RemoteError)
    assert "while stages are asked to take part" in chain.failure.message
    assert chain.blamed.culprit == B
    assert not chain.may_be_resumed


@pytest.mark.parametrize("says", SAYS)
async def test_the_same_is_no_fault_once_the_chain_has_started(says: str) -> None:
    chain, session = a_chain(), Session()
    chain.start(session)  # type: ignore[arg-type]
    chain.next_chunk()
    chain.receive(B, SAYS[says], b"")
    assert chain.failure is None
    assert session.n_stops == (says == "last token")


ACTIONS = [*SAYS, "lost", "give up"]


@given(st.lists(st.sampled_from(ACTIONS), max_size=12))
async def test_a_session_is_stopped_once_and_the_first_failure_stays(actions: list[str]) -> None:
    chain, session = a_chain(), Session()
    chain.start(session)  # type: ignore[arg-type]
    chain.next_chunk()
    failures = []
    for action in actions:
        was_over = chain.state in OVER
        before = chain.n_generated, session.n_offers
        if action == "lost":
            chain.lost(B)
        elif action == "give up":
            if chain.state not in (ChainState.GIVEN_UP, ChainState.FINISHED):
                chain.give_up()
        else:
            chain.receive(B, SAYS[action], b"")
        if was_over:
            assert (chain.n_generated, session.n_offers) == before
        failures.append(chain.failure)
        is_broken = chain.state in (ChainState.FAILED, ChainState.GIVEN_UP)
        assert chain.may_be_resumed == (is_broken and chain.n_generated > 0)
        assert chain.is_complete == (chain.state is ChainState.FINISHED)
    reported = [failure for failure in failures if failure is not None]
    assert not reported or set(map(id, reported)) == {id(reported[0])}
    assert session.n_stops == (chain.failure is not None or chain.is_complete)
    chain.close()
    chain.fail(NodeUnreachable("too late"))
    assert chain.failure is (reported[0] if reported else None)


async def test_what_this_node_cannot_do_raises_before_any_effect() -> None:
    chain, session = a_chain(), Session()
    chain.start(session)  # type: ignore[arg-type]
    window = chain.window
    with pytest.raises(UnknownTransition, match="START is impossible in PREFILL"):
        chain.start(session)  # type: ignore[arg-type]
    assert chain.window is window
    assert session.n_offers == 1
    chain.close()
    with pytest.raises(UnknownTransition, match="CLOSE is impossible in CLOSED"):
        chain.close()


@pytest.mark.parametrize("state", list(ChainState))
def test_what_stages_say_is_impossible_only_while_they_are_asked(state: ChainState) -> None:
    possible = LIFECYCLE.rows[state].keys() & OF_STAGES
    assert possible == (frozenset() if state is ChainState.ASSIGNING else OF_STAGES)


def test_every_state_is_reached_and_leads_to_the_end() -> None:
    pairs = [(state, after) for state, row in LIFECYCLE.rows.items() for after in row.values()]
    reaching_end, reached = {ChainState.CLOSED}, {LIFECYCLE.first}
    for _ in ChainState:
        reaching_end |= {state for state, after in pairs if after in reaching_end}
        reached |= {after for state, after in pairs if state in reached}
    assert reaching_end == reached == set(ChainState)
    assert {event for row in LIFECYCLE.rows.values() for event in row} == set(ChainEvent)
    for state in OVER:
        assert LIFECYCLE.rows[state][ChainEvent.FAILURE] is state


@pytest.mark.parametrize("drawn", [diagram(), request_diagram()], ids=["attempt", "request"])
def test_the_documented_diagram_is_the_table(drawn: str) -> None:
    assert f"```mermaid\n{drawn}\n```" in DOCUMENT.read_text(), (
        "docs/job-processor.md: paste what `python -m swarmllm.pipeline.origin.lifecycle` prints"
    )
