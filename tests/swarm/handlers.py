"""Handlers for routers under test, and two nodes that have met."""

from __future__ import annotations

import trio

from swarmllm.swarm.router import Router
from swarmllm_proto.envelope import Envelope
from swarmllm_proto.identifiers import NodeId

from .conftest import DEADLINE_S, Swarm, meet


async def no_request(sender: str, body: bytes) -> bytes:
    raise AssertionError("no request was expected")


async def no_message(sender: str, header: bytes, payload: memoryview) -> None:
    raise AssertionError("no message was expected")


class Inbox:
    """A message handler that keeps what came, as bytes."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes, bytes]] = []
        self._changed = trio.Event()

    async def __call__(self, sender: str, header: bytes, payload: memoryview) -> None:
        self.messages.append((sender, header, bytes(payload)))
        self._changed.set()
        self._changed = trio.Event()

    async def wait_for(self, n_messages: int) -> None:
        with trio.fail_after(DEADLINE_S):
            while len(self.messages) < n_messages:
                await self._changed.wait()


class HeldInbox(Inbox):
    """Takes nothing before it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = trio.Event()

    async def __call__(self, sender: str, header: bytes, payload: memoryview) -> None:
        await self.released.wait()
        await super().__call__(sender, header, payload)


class Listener:
    """Keeps the envelopes that a node has heard."""

    def __init__(self) -> None:
        self.envelopes: list[Envelope] = []

    def heard(self, envelope: Envelope) -> None:
        self.envelopes.append(envelope)

    def forgotten(self, node_id: NodeId) -> None: ...

    def is_lost(self, node_id: NodeId, heard_at_s: float) -> bool:
        return False


async def pair(swarm: Swarm) -> tuple[Router, Router]:
    a, b = await swarm.start("a"), await swarm.start("b")
    await meet(a, b)
    return a, b
