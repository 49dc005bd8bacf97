"""Names requests: one id from the HTTP header `x-request-id` to the log line of the last worker.

A client's request keeps its id on every node. Further attempts at it, and further answers to one prompt, get
ids that begin with it: `req_2f6c...` and `req_2f6c....9d41c0aa`. Their ends are random, so that a member that
has seen the first cannot take the next one's place on another node.
"""

from __future__ import annotations

import secrets
from typing import Final

PREFIX: Final = "req_"
_SEPARATOR: Final = "."


def new_request_id() -> str:
    """28 characters, 96 random bits."""
    return PREFIX + secrets.token_hex(12)


def further_id(request_id: str) -> str:
    """Of one more attempt at the same request, or of one more answer to it."""
    return first_id(request_id) + _SEPARATOR + secrets.token_hex(4)


def first_id(request_id: str) -> str:
    """The id that the client saw."""
    return request_id.partition(_SEPARATOR)[0]
