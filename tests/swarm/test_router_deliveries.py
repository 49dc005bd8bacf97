"""What becomes of messages under way when something happens to whoever should acknowledge them: the same for
every Router.

In memory under a clock that jumps, with the real time limits, over links of several qualities; over libp2p
with limits short enough to wait for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest
import trio
from trio.testing import MockClock

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.data import keepalive
from swarmllm.swarm.in_memory import link as memory_link
from swarmllm.swarm.in_memory.link import LinkQuality
from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.swarm.router import Router

from .conftest import DEADLINE_S, Libp2pSwarm, MemorySwarm, Swarm, until
from .handlers import HeldInbox, Inbox, no_request, pair


@dataclass(frozen=True)
class Limits:
    acknowledged_s: float
    silence_s: float


async def all_acknowledged(swarm: Swarm, sender: Router, receiver: Router) -> None:
    with trio.fail_after(DEADLINE_S):
        while not swarm.all_is_acknowledged(sender, receiver):  # noqa: ASYNC110 (nobody announces it)
            await trio.sleep(0.05)


async def send_until_lost(sender: Router, receiver: Router) -> None:
    try:
        while True:
            await sender.send(receiver.node_id, b"lost", bytes(1024 * 1024))
    except NodeUnreachable:
        return


async def send_until_it_arrives(sender: Router, receiver: Router, inbox: Inbox, header: bytes) -> None:
    """Two nodes notice each at its own time that they have lost each other, and the later of them ends what
    the earlier has begun anew."""
    with trio.fail_after(DEADLINE_S):
        while inbox.messages[-1][1] != header:
            await until(sender, lambda: receiver.node_id in sender.connected())
            with suppress(NodeUnreachable):
                await sender.send(receiver.node_id, header)
                with trio.move_on_after(2.0):
                    await inbox.wait_for(len(inbox.messages) + 1)


async def acknowledged(swarm: Swarm, limits: Limits) -> None:
    a, b = await pair(swarm)
    inbox = Inbox()
    b.serve(no_request, inbox)
    for number in range(20):
        await a.send(b.node_id, b"%d" % number)
    await inbox.wait_for(20)
    await all_acknowledged(swarm, a, b)


async def acknowledgements_that_are_lost(swarm: Swarm, limits: Limits) -> None:
    a, b = await pair(swarm)
    inbox = Inbox()
    b.serve(no_request, inbox)
    await a.send(b.node_id, b"0")
    await inbox.wait_for(1)
    swarm.lose_acknowledgements(a, b)
    async with a.changes() as at_a, b.changes() as at_b:
        await a.send(b.node_id, b"1")
        for changes in (at_a, at_b):
            with trio.fail_after(DEADLINE_S):
                while (await anext(changes)).kind != "disconnected":
                    continue
    await send_until_it_arrives(a, b, inbox, b"2")
    headers = [header for _, header, _ in inbox.messages]
    assert headers[:2] == [b"0", b"1"]
    assert set(headers[2:]) == {b"2"}
    await all_acknowledged(swarm, a, b)


async def a_reader_that_takes_longer_than_anybody_waits(swarm: Swarm, limits: Limits) -> None:
    a, b = await pair(swarm)
    inbox = HeldInbox()
    b.serve(no_request, inbox)
    for number in range(5):
        await a.send(b.node_id, b"%d" % number)
    async with a.changes() as changes:
        with trio.move_on_after(1.5 * limits.acknowledged_s):
            while True:
                assert (await anext(changes)).kind != "disconnected"
    assert not swarm.all_is_acknowledged(a, b)
    inbox.released.set()
    await inbox.wait_for(5)
    assert [header for _, header, _ in inbox.messages] == [b"%d" % number for number in range(5)]


async def a_receiver_that_restarts(swarm: Swarm, limits: Limits) -> None:
    a, b = await pair(swarm)
    busy = trio.Event()

    async def never(sender: str, header: bytes, payload: memoryview) -> None:
        busy.set()
        await trio.sleep_forever()

    b.serve(no_request, never)
    await a.send(b.node_id, b"taken by nobody")
    with trio.fail_after(DEADLINE_S):
        await busy.wait()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_until_lost, a, b)
            await swarm.stop("b")
    inbox = Inbox()
    b = await swarm.start("b")
    b.serve(no_request, inbox)
    await until(a, lambda: b.node_id in a.connected())
    for number in range(3):
        await a.send(b.node_id, b"%d" % number)
    await inbox.wait_for(3)
    assert [header for _, header, _ in inbox.messages] == [b"0", b"1", b"2"]
    await all_acknowledged(swarm, a, b)


async def a_line_that_falls_silent_while_a_sender_waits(swarm: Swarm, limits: Limits) -> None:
    a, b = await pair(swarm)
    inbox = Inbox()
    b.serve(no_request, inbox)
    await a.send(b.node_id, b"before")
    await inbox.wait_for(1)
    heal = swarm.silence(a, b)
    with trio.fail_after(limits.silence_s + limits.acknowledged_s + 60):
        await send_until_lost(a, b)
    heal()
    await send_until_it_arrives(a, b, inbox, b"after")
    headers = [header for _, header, _ in inbox.messages]
    assert headers == sorted(headers, key=[b"before", b"lost", b"after"].index)
    assert headers.count(b"before") == 1


async def a_line_that_speaks_again_in_time(swarm: Swarm, limits: Limits) -> None:
    a, b = await pair(swarm)
    inbox = Inbox()
    b.serve(no_request, inbox)
    await a.send(b.node_id, b"0")
    await inbox.wait_for(1)
    async with a.changes() as changes:
        heal = swarm.silence(a, b)
        for number in range(1, 5):
            await a.send(b.node_id, b"%d" % number)
        with trio.move_on_after(0.3 * limits.silence_s):
            while True:
                assert (await anext(changes)).kind != "disconnected"
        heal()
        await inbox.wait_for(5)
        await all_acknowledged(swarm, a, b)
    assert [header for _, header, _ in inbox.messages] == [b"%d" % number for number in range(5)]
    assert a.connected() == {b.node_id}


Scenario = Callable[[Swarm, Limits], Awaitable[None]]
SCENARIOS: list[Scenario] = [
    acknowledged,
    acknowledgements_that_are_lost,
    a_reader_that_takes_longer_than_anybody_waits,
    a_receiver_that_restarts,
    a_line_that_falls_silent_while_a_sender_waits,
    a_line_that_speaks_again_in_time,
]
QUALITIES = [
    LinkQuality(),
    LinkQuality(latency_s=0.05),
    LinkQuality(latency_s=0.2, bytes_per_s=1e6),
    LinkQuality(latency_s=0.02, loss=0.2),
]


@pytest.mark.parametrize("quality", QUALITIES, ids=["at once", "far", "far and slow", "lossy"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_in_memory(scenario: Scenario, quality: LinkQuality, autojump_clock: MockClock) -> None:
    async with InMemoryNetwork(quality) as network:
        await scenario(MemorySwarm(network), Limits(keepalive.RR_ACK_TIMEOUT_S, keepalive.SILENCE_S))


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    short = Limits(acknowledged_s=2.0, silence_s=2.0)
    monkeypatch.setattr(keepalive, "RR_ACK_TIMEOUT_S", short.acknowledged_s)
    monkeypatch.setattr(keepalive, "SILENCE_S", short.silence_s)
    monkeypatch.setattr(keepalive, "PING_S", 0.2)
    monkeypatch.setattr(keepalive, "CHECK_S", 0.2)
    return short


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_over_libp2p(scenario: Scenario, libp2p_swarm: Libp2pSwarm, limits: Limits) -> None:
    await scenario(libp2p_swarm, limits)


async def test_an_idle_link_in_memory_keeps_nothing_running(autojump_clock: MockClock) -> None:
    async with InMemoryNetwork() as network:
        await acknowledged(MemorySwarm(network), Limits(keepalive.RR_ACK_TIMEOUT_S, keepalive.SILENCE_S))
        await trio.sleep(2 * memory_link.ACKNOWLEDGE_EVERY_S)
        assert not network.router("a").link("b").is_acknowledging
