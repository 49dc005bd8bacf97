"""One request to another node, under way: its caller waits here, and whoever learns its end says so."""

from __future__ import annotations

import trio

from swarmllm.errors import DeadlineExceeded, SwarmLLMError
from swarmllm_proto.identifiers import NodeId


class Exchange:
    def __init__(self) -> None:
        self.done = trio.Event()
        self._response = b""
        self._failure: SwarmLLMError | None = None

    def finish(self, response: bytes = b"", failure: SwarmLLMError | None = None) -> None:
        """The first end counts."""
        if not self.done.is_set():
            self._response, self._failure = response, failure
            self.done.set()

    async def response(self, node_id: NodeId, timeout_s: float) -> bytes:
        """Raises DeadlineExceeded, and what it failed with."""
        with trio.move_on_after(timeout_s):
            await self.done.wait()
        if not self.done.is_set():
            raise DeadlineExceeded(f"node {node_id} did not answer within {timeout_s:g} s")
        if self._failure is not None:
            raise self._failure
        return self._response
