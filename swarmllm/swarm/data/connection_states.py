"""The lifecycle of a data-plane connection: one table of states and events.

A connection passes its peer's frames and this node's decisions through this table before it acts. A frame
that the table does not allow in that state ends the connection. An event of this node that it does not allow
is a defect. `python -m swarmllm.swarm.data.connection_states` prints the diagram in docs/swarm.md.

Each side says by itself that it has turned to another connection (`last`), so there are two ways to PARTED.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from swarmllm.state_table import StateTable


class ConnectionState(StrEnum):
    GREETING = "the peer has not said hello"
    OPEN = "messages go both ways"
    LEAVING = "this node's last message is queued"
    LEFT = "this node has sent its last message"
    PEER_LEFT = "the peer has sent its last message"
    PARTING = "the peer has sent its last message, this node's is queued"
    PARTED = "both have sent their last message"
    LINK_ASKED = "the peer wants a link"
    LINK = "the wire is a link's"
    ENDED = "ended; messages of the peer may be lost with it"
    ENDED_AFTER_LAST = "ended after the peer's last message"


class ConnectionEvent(StrEnum):
    """The text is the edge's label in the diagram."""

    HELLO = "hello"
    LINK_HELLO = "hello that asks for a link"
    FRAME = "another frame"
    LAST = "last from the peer"
    LEAVE = "this node turns to another connection"
    LAST_WRITTEN = "last is written"
    BECOME_LINK = "the wire is free"
    END = "end"


_S, _E = ConnectionState, ConnectionEvent

_ENDS: Final = {_E.END: _S.ENDED}
_ENDS_WELL: Final = {_E.END: _S.ENDED_AFTER_LAST}
LIFECYCLE: Final = StateTable(
    _S.GREETING,
    {
        _S.GREETING: {_E.HELLO: _S.OPEN, _E.LINK_HELLO: _S.LINK_ASKED, **_ENDS},
        _S.OPEN: {_E.LEAVE: _S.LEAVING, _E.LAST: _S.PEER_LEFT, **_ENDS},
        _S.LEAVING: {_E.LAST_WRITTEN: _S.LEFT, _E.LAST: _S.PARTING, **_ENDS},
        _S.LEFT: {_E.LAST: _S.PARTED, **_ENDS},
        _S.PEER_LEFT: {_E.LEAVE: _S.PARTING, **_ENDS_WELL},
        _S.PARTING: {_E.LAST_WRITTEN: _S.PARTED, **_ENDS_WELL},
        _S.PARTED: _ENDS_WELL,
        _S.LINK_ASKED: {_E.BECOME_LINK: _S.LINK, **_ENDS},
        _S.LINK: {},
        _S.ENDED: {_E.LAST: _S.ENDED_AFTER_LAST},
        _S.ENDED_AFTER_LAST: {},
    },
    {
        # A later version may add kinds of frames and say more in a second hello.
        _S.OPEN: {_E.HELLO, _E.FRAME},
        _S.LEAVING: {_E.HELLO, _E.FRAME, _E.LEAVE},
        _S.LEFT: {_E.HELLO, _E.FRAME, _E.LEAVE},
        _S.PEER_LEFT: {_E.HELLO, _E.FRAME, _E.LAST},
        _S.PARTING: {_E.HELLO, _E.FRAME, _E.LAST, _E.LEAVE},
        _S.PARTED: {_E.HELLO, _E.FRAME, _E.LAST, _E.LEAVE},
        _S.LINK_ASKED: {_E.LAST_WRITTEN},
        # Its wire is ended by those who have it.
        _S.LINK: {_E.END},
        # What was read together with the frame whose handler ended it.
        _S.ENDED: {_E.HELLO, _E.FRAME, _E.LEAVE, _E.LAST_WRITTEN, _E.END},
        _S.ENDED_AFTER_LAST: {_E.HELLO, _E.FRAME, _E.LAST, _E.LEAVE, _E.LAST_WRITTEN, _E.END},
    },
)
ALIVE: Final = frozenset(
    {_S.GREETING, _S.OPEN, _S.LEAVING, _S.LEFT, _S.PEER_LEFT, _S.PARTING, _S.PARTED, _S.LINK_ASKED}
)
TAKES_FRAMES: Final = frozenset(state for state, row in LIFECYCLE.rows.items() if _E.FRAME in row)
"""In the others a hello is due, or nothing."""
LEFT_HERE: Final = frozenset({_S.LEAVING, _S.LEFT, _S.PARTING, _S.PARTED})
"""This node sends no more messages."""
LEFT_BY_PEER: Final = frozenset({_S.PEER_LEFT, _S.PARTING, _S.PARTED, _S.ENDED_AFTER_LAST})


def diagram() -> str:
    return LIFECYCLE.diagram()


if __name__ == "__main__":
    print(diagram())
