"""The one exception that becomes an `Error` message. Whatever else escapes a handler is a fault of ours and
is answered as kind "engine"."""

from __future__ import annotations

from swarmllm_proto.ipc.base import ErrorKind


class CallError(Exception):
    """A call that cannot be served. `kind` is for machines, `field` names the offending field of the call."""

    def __init__(self, kind: ErrorKind, message: str, field: str = "") -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.message = message
        self.field = field


class Interrupted(CallError):
    """A batch was ended before its end because nobody waits for it any more. Its rows were removed again."""

    def __init__(self) -> None:
        super().__init__("engine", "the request was cancelled", "request_id")


class Stopped(Exception):
    """The process is ending, so nobody needs the result of the current work."""
