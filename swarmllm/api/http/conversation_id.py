"""Which conversation a request belongs to, whatever its client calls that."""

from __future__ import annotations

from quart import request

from swarmllm.errors import InvalidRequest

HEADER = "x-session-id"
SESSION_MAX = 256
"""Characters; the wire's limit."""


def session_of(*fields: str | None) -> str:
    """The first field of the body that says something, then the header, then the other fields; "" for no
    session."""
    session_id, *others = (*fields, None)
    header = request.headers.get(HEADER, "")
    named = next((name for name in (session_id, header, *others) if name), "")
    if len(named) > SESSION_MAX:
        raise InvalidRequest(f"a session's name has at most {SESSION_MAX} characters.", field="session_id")
    return named
