"""The lifecycle of a request of this node's clients, and that of one attempt at it: two tables of states and
events.

A chain (see chain) passes every event through its table before it acts. If a stage sends an event that the
table does not allow in that state, it breaks the protocol: the stage is blamed, and the attempt fails. An
event of this node that it does not allow is a defect. `python -m swarmllm.pipeline.origin.lifecycle` prints
the diagrams in docs/job-processor.md.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from swarmllm.state_table import StateTable


class ChainState(StrEnum):
    ASSIGNING = "stages are asked to take part"
    PREFILL = "the prompt walks through the stages"
    REBUILDING = "stages that are new get the rows that they lack"
    DECODE = "tokens come"
    FINISHED = "everything has come"
    FAILED = "it broke; what came before is still read"
    GIVEN_UP = "it broke, and its reader knows"
    CLOSED = "over"


class ChainEvent(StrEnum):
    """The text is the edge's label in the diagram."""

    START = "all stages accept"
    RESUME = "all stages accept, some go on with what they hold"
    PROGRESS = "a chunk has passed"
    DAMAGE = "a job arrived damaged"
    TOKEN = "a token"
    LAST = "the last token or row"
    FAILURE = "a failure"
    GIVE_UP = "its reader is told"
    CLOSE = "closed"


_S, _E = ChainState, ChainEvent

OF_STAGES: Final = frozenset({_E.PROGRESS, _E.DAMAGE, _E.TOKEN, _E.LAST})
"""What stages send, rightly or not."""
_BROKEN: Final = {_E.FAILURE: _S.FAILED, _E.GIVE_UP: _S.GIVEN_UP, _E.CLOSE: _S.CLOSED}
_FED: Final = {_E.TOKEN: _S.DECODE, _E.LAST: _S.FINISHED, **_BROKEN}
LIFECYCLE: Final = StateTable(
    _S.ASSIGNING,
    {
        _S.ASSIGNING: {_E.START: _S.PREFILL, _E.RESUME: _S.REBUILDING, **_BROKEN},
        _S.PREFILL: _FED,
        _S.REBUILDING: _FED,
        _S.DECODE: {_E.LAST: _S.FINISHED, **_BROKEN},
        _S.FINISHED: {_E.CLOSE: _S.CLOSED},
        _S.FAILED: {_E.GIVE_UP: _S.GIVEN_UP, _E.CLOSE: _S.CLOSED},
        _S.GIVEN_UP: {_E.CLOSE: _S.CLOSED},
        _S.CLOSED: {},
    },
    {
        _S.PREFILL: {_E.PROGRESS, _E.DAMAGE},
        _S.REBUILDING: {_E.PROGRESS, _E.DAMAGE},
        _S.DECODE: {_E.TOKEN, _E.PROGRESS, _E.DAMAGE},
        _S.FINISHED: OF_STAGES | {_E.FAILURE, _E.GIVE_UP},
        _S.FAILED: OF_STAGES | {_E.FAILURE},
        _S.GIVEN_UP: OF_STAGES | {_E.FAILURE},
        _S.CLOSED: OF_STAGES | {_E.FAILURE},
    },
)
OVER: Final = frozenset({_S.FINISHED, _S.FAILED, _S.GIVEN_UP, _S.CLOSED})
"""What stages still send is of no interest."""


class RequestState(StrEnum):
    """The states of a request; `ChainState` has those of one attempt at it."""

    ROUTING = "no token has come, and no pipeline is there"
    PREFILL = "a pipeline is there; no token has come"
    DECODE = "tokens come"
    BROKEN = "a pipeline broke after a token"
    RESUMING = "another pipeline is there; it has given no token"
    ENDED = "over"


class RequestEvent(StrEnum):
    """The text is the edge's label in the diagram."""

    OPENED = "a pipeline is opened"
    TOKEN = "a token"
    BROKE = "there is no pipeline, or it broke"
    END = "its reader leaves"


_R, _Q = RequestState, RequestEvent

REQUEST_LIFECYCLE: Final = StateTable(
    _R.ROUTING,
    {
        _R.ROUTING: {_Q.OPENED: _R.PREFILL, _Q.END: _R.ENDED},
        _R.PREFILL: {_Q.TOKEN: _R.DECODE, _Q.BROKE: _R.ROUTING, _Q.END: _R.ENDED},
        _R.DECODE: {_Q.BROKE: _R.BROKEN, _Q.END: _R.ENDED},
        _R.BROKEN: {_Q.OPENED: _R.RESUMING, _Q.END: _R.ENDED},
        _R.RESUMING: {_Q.TOKEN: _R.DECODE, _Q.BROKE: _R.BROKEN, _Q.END: _R.ENDED},
        _R.ENDED: {},
    },
    {_R.ROUTING: {_Q.BROKE}, _R.DECODE: {_Q.TOKEN}, _R.BROKEN: {_Q.BROKE}, _R.ENDED: {_Q.END}},
)
WITHOUT_PIPELINE: Final = frozenset({_R.ROUTING, _R.BROKEN})


def diagram() -> str:
    return LIFECYCLE.diagram()


def request_diagram() -> str:
    return REQUEST_LIFECYCLE.diagram()


if __name__ == "__main__":
    print(request_diagram(), diagram(), sep="\n\n")
