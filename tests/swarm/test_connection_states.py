"""The table of a data connection's states, and what a connection does with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from swarmllm.state_table import UnknownTransition
from swarmllm.swarm.data.connection_states import (
    ALIVE,
    LEFT_BY_PEER,
    LEFT_HERE,
    LIFECYCLE,
    TAKES_FRAMES,
    ConnectionEvent,
    ConnectionState,
    diagram,
)
from swarmllm.swarm.data.wire import FrameKind
from swarmllm_proto.frames import encode_frame

from .test_connection import PIECES_UNDER_WAY, End, MemoryWire, joined

DOCUMENT = Path(__file__).parents[2] / "docs" / "swarm.md"
_E = ConnectionEvent


@given(st.lists(st.sampled_from([_E.HELLO, _E.FRAME, _E.LAST, _E.LEAVE, _E.LAST_WRITTEN, _E.END])))
def test_the_states_say_what_both_sides_have_said(events: list[ConnectionEvent]) -> None:
    """Against the same kept as one flag each."""
    state = LIFECYCLE.first
    greeted = left_here = written = left_by_peer = ended = False
    for event in events:
        is_early = state is ConnectionState.GREETING and event not in (_E.HELLO, _E.END)
        if is_early or (event is _E.LAST_WRITTEN and not (left_here and not written) and not ended):
            with pytest.raises(UnknownTransition):
                LIFECYCLE.after(state, event)
            continue
        state = LIFECYCLE.after(state, event)
        greeted |= event is _E.HELLO
        left_here |= event is _E.LEAVE
        written |= event is _E.LAST_WRITTEN
        left_by_peer |= event is _E.LAST
        ended |= event is _E.END
        assert (state in ALIVE) == (not ended)
        assert (state in LEFT_BY_PEER) == left_by_peer
        assert (state in TAKES_FRAMES) == (greeted or ended)
        if not ended:
            assert (state in LEFT_HERE) == left_here
            assert (state is ConnectionState.PARTED) == (left_here and written and left_by_peer)


def test_every_state_is_reached_and_leads_to_the_end() -> None:
    pairs = [(state, after) for state, row in LIFECYCLE.rows.items() for after in row.values()]
    ends = {ConnectionState.LINK, ConnectionState.ENDED, ConnectionState.ENDED_AFTER_LAST}
    assert ends == set(ConnectionState) - ALIVE
    reaching_end, reached = set(ends), {LIFECYCLE.first}
    for _ in ConnectionState:
        reaching_end |= {state for state, after in pairs if after in reaching_end}
        reached |= {after for state, after in pairs if state in reached}
    assert reaching_end == reached == set(ConnectionState)
    assert {event for row in LIFECYCLE.rows.values() for event in row} == set(ConnectionEvent)
    for state in ConnectionState:
        assert LIFECYCLE.after(state, _E.END) not in ALIVE


async def test_a_connection_that_both_have_left_ends_and_nothing_is_lost(autojump_clock: MockClock) -> None:
    async with joined() as (a, b, _):
        a.connection.leave()
        a.connection.leave()
        await trio.sleep(1)
        assert (a.connection.state, b.connection.state) == (ConnectionState.LEFT, ConnectionState.PEER_LEFT)
        assert (a.connection.has_left, b.connection.peer_has_left) == (True, True)
        assert (a.connection.is_over, b.connection.is_over) == (False, False)
        await b.connection.send(b"still", b"")
        await trio.sleep(1)
        assert a.arrived == [(b"still", b"")]
        b.connection.leave()
        await a.ended.wait()
        assert a.connection.ending == "no longer needed"
        assert a.connection.state is ConnectionState.ENDED_AFTER_LAST
        await b.ended.wait()
        assert b.connection.peer_has_left


async def test_an_end_without_the_peers_last_word_may_have_lost_something(autojump_clock: MockClock) -> None:
    async with joined() as (a, b, _):
        a.connection.leave()
        await trio.sleep(1)
        a.connection.end("now")
        await b.ended.wait()
        assert (a.connection.state, a.connection.peer_has_left) == (ConnectionState.ENDED, False)
        assert (b.connection.state, b.connection.peer_has_left) == (ConnectionState.ENDED_AFTER_LAST, True)
        a.connection.end("again")
        assert a.connection.ending == "now"


async def test_what_cannot_be_before_the_hello_has_no_effect() -> None:
    out, into = trio.open_memory_channel[bytes](PIECES_UNDER_WAY)
    connection = End("a", MemoryWire(out, into)).connection
    with pytest.raises(UnknownTransition, match="LEAVE is impossible in GREETING"):
        connection.leave()
    assert not connection.has_left
    assert not connection._queue


@pytest.mark.parametrize("kind", [kind for kind in FrameKind if kind is not FrameKind.HELLO])
async def test_a_peer_that_says_anything_before_hello_is_left(kind: FrameKind) -> None:
    there, into = trio.open_memory_channel[bytes](PIECES_UNDER_WAY)
    out, back = trio.open_memory_channel[bytes](PIECES_UNDER_WAY)
    end = End("a", MemoryWire(out, into))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end.run)
        await wait_all_tasks_blocked()
        await there.send(b"".join(encode_frame(bytes((kind,)))))
        await wait_all_tasks_blocked()
        assert end.connection.ending == "the peer did not say hello"
        assert end.arrived == []
        nursery.cancel_scope.cancel()
    back.close()


def test_the_documented_diagram_is_the_table() -> None:
    assert f"```mermaid\n{diagram()}\n```" in DOCUMENT.read_text(), (
        "docs/swarm.md: paste what `python -m swarmllm.swarm.data.connection_states` prints"
    )
