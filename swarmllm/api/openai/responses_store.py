"""Responses that a later one may go on from: in memory only, as many as fit, the latest.

A node is not a place where conversations are kept: they are gone when it stops, and before that when others
need their room. Whoever has another key than the one that asked sees none of them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from swarmllm.api.openai.schema import Json, Message
from swarmllm.errors import InvalidRequest

RESPONSES_MAX = 1024
BYTES_MAX = 64 * 2**20
"""Of all conversations together, as JSON."""


class ResponseNotFound(InvalidRequest):
    http_status = 404
    code = "response_not_found"


@dataclass(frozen=True, slots=True)
class Stored:
    response: Json
    messages: list[Message]
    """The whole conversation, the answer included."""
    owner: str
    """Id of the key that asked, "" where none is needed."""
    n_bytes: int


class ResponseStore:
    def __init__(self, responses_max: int = RESPONSES_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._responses_max = responses_max
        self._bytes_max = bytes_max
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def keep(self, response: Json, messages: list[Message], owner: str) -> None:
        n_bytes = len(msgspec.json.encode([response, messages]))
        if n_bytes > self._bytes_max:
            return
        self._stored[str(response["id"])] = Stored(response, messages, owner, n_bytes)
        self.n_bytes += n_bytes
        while self.n_bytes > self._bytes_max or len(self._stored) > self._responses_max:
            _, oldest = self._stored.popitem(last=False)
            self.n_bytes -= oldest.n_bytes

    def find(self, response_id: str, owner: str, *, field: str) -> Stored:
        """Raises ResponseNotFound naming the field."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            raise ResponseNotFound(
                f"no response {response_id[:80]!r} is kept here (any more): send the conversation itself.",
                field=field,
            )
        return stored

    def delete(self, response_id: str, owner: str, *, field: str) -> None:
        """Raises ResponseNotFound naming the field."""
        self.n_bytes -= self.find(response_id, owner, field=field).n_bytes
        del self._stored[response_id]
