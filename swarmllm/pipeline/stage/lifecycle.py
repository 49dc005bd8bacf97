"""The lifecycle of a request on a node that runs stages of it: one table of states and events.

A session passes every event through this table before it acts. Whether the slot in the worker is freed or
held for another pipeline is a state, not a flag: it is held after BREAKING and freed after everything else.
`python -m swarmllm.pipeline.stage.lifecycle` prints the diagram in docs/job-processor.md.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, Protocol, TypeVar

from swarmllm.state_table import StateTable

Session = TypeVar("Session", contravariant=True)


class SessionOwner(Protocol[Session]):
    """Keeps the sessions of a node."""

    def hold(self, session: Session) -> None:
        """It is over, and what it has here is held for another request."""

    def close(self, session: Session) -> None:
        """Nothing of it is left here."""

    def computed(self, session: Session, n_tokens: int) -> None:
        """The first of its stages here has computed so many rows of tokens after the prompt."""


class SessionState(StrEnum):
    ASSIGNED = "accepted; no job has come"
    RUNNING = "jobs come by way of the daemons"
    BY_LINK = "the workers pass jobs on by links, and one is under way here"
    FAILING = "the origin is being told of a failure; the slot is to be freed"
    BREAKING = "the pipeline broke elsewhere, or is checked; the slot is to be held"
    ENDING = "cancelled; the slot is to be freed"
    FREEING = "the slot is being freed"
    HOLDING = "the slot is being held"
    RELEASING = "the slot is being held, but nobody will go on with it"
    HELD = "another pipeline may go on with the slot, or a check read its rows"
    FREEING_HELD = "a slot that was held is being freed"
    ENDED = "nothing is left here"


class SessionEvent(StrEnum):
    """The text is the edge's label in the diagram."""

    JOB = "a job or a message to be sent on"
    LINK_RUNS = "jobs came by links, one is under way"
    LINK_RESTS = "jobs came by links, none is under way"
    FAILURE = "it cannot go on here"
    NODE_LOST = "another node is lost"
    END = "stop"
    HOLD = "stop and hold"
    RELEASE = "nobody will go on"
    CLEAN_UP = "work is over"
    CLEANED = "cleaned up"
    NOTHING_KEPT = "cleaned up, no stage is here"
    EXPIRED = "held long enough"
    TAKEN = "taken over"
    SHUT_DOWN = "the node stops"
    FREED = "freed"
    DEFECT = "the session's task failed"


_S, _E = SessionState, SessionEvent

FROM_OUTSIDE: Final = frozenset(
    {_E.JOB, _E.LINK_RUNS, _E.LINK_RESTS, _E.FAILURE, _E.NODE_LOST, _E.END, _E.HOLD, _E.RELEASE}
)
"""What other nodes, this node's worker and the origin's side may say at any time."""
_AT_WORK: Final = {
    _E.JOB: _S.RUNNING,
    _E.LINK_RUNS: _S.BY_LINK,
    _E.LINK_RESTS: _S.RUNNING,
    _E.FAILURE: _S.FAILING,
    _E.NODE_LOST: _S.BREAKING,
    _E.END: _S.ENDING,
    _E.HOLD: _S.BREAKING,
    _E.RELEASE: _S.ENDING,
    _E.CLEAN_UP: _S.FREEING,
}
_DEFECT: Final = {_E.DEFECT: _S.ENDED}
_ROWS: Final[dict[SessionState, dict[SessionEvent, SessionState]]] = {
    _S.ASSIGNED: _AT_WORK | _DEFECT,
    _S.RUNNING: _AT_WORK | _DEFECT,
    # A job that comes by way of a daemon says nothing of the one that is under way by a link.
    _S.BY_LINK: _AT_WORK | {_E.JOB: _S.BY_LINK} | _DEFECT,
    _S.FAILING: {
        _E.NODE_LOST: _S.BREAKING,
        _E.HOLD: _S.BREAKING,
        _E.END: _S.ENDING,
        _E.RELEASE: _S.ENDING,
        _E.CLEAN_UP: _S.FREEING,
        **_DEFECT,
    },
    _S.BREAKING: {_E.END: _S.ENDING, _E.RELEASE: _S.ENDING, _E.CLEAN_UP: _S.HOLDING, **_DEFECT},
    _S.ENDING: {_E.CLEAN_UP: _S.FREEING, **_DEFECT},
    _S.FREEING: {_E.CLEANED: _S.ENDED, _E.NOTHING_KEPT: _S.ENDED, **_DEFECT},
    _S.HOLDING: {_E.RELEASE: _S.RELEASING, _E.CLEANED: _S.HELD, _E.NOTHING_KEPT: _S.ENDED, **_DEFECT},
    _S.RELEASING: {_E.CLEANED: _S.FREEING_HELD, _E.NOTHING_KEPT: _S.ENDED, **_DEFECT},
    _S.HELD: {
        _E.RELEASE: _S.FREEING_HELD,
        _E.EXPIRED: _S.FREEING_HELD,
        _E.TAKEN: _S.ENDED,
        _E.SHUT_DOWN: _S.ENDED,
        **_DEFECT,
    },
    _S.FREEING_HELD: {_E.FREED: _S.ENDED, **_DEFECT},
    _S.ENDED: {},
}
_TOO_LATE: Final[dict[SessionState, frozenset[SessionEvent]]] = {
    # A pipeline that was being given what is held finds that the time was over.
    _S.FREEING_HELD: frozenset({_E.TAKEN}),
    _S.ENDED: frozenset({_E.TAKEN, _E.DEFECT}),
}
LIFECYCLE: Final = StateTable(
    _S.ASSIGNED,
    _ROWS,
    {state: (FROM_OUTSIDE | _TOO_LATE.get(state, frozenset())) - row.keys() for state, row in _ROWS.items()},
)
AT_WORK: Final = frozenset({_S.ASSIGNED, _S.RUNNING, _S.BY_LINK})
"""What other nodes send has an effect."""
OVER: Final = frozenset({_S.FREEING_HELD, _S.ENDED})
"""The request is gone from the node's books."""


def diagram() -> str:
    """Without DEFECT, which leads from every state to ENDED."""
    return LIFECYCLE.diagram(without=(SessionEvent.DEFECT,))


if __name__ == "__main__":
    print(diagram())
