"""What Routers promise, whatever happens: random histories of sends, requests, publications, restarts,
partitions that are told of and that are not, acknowledgements that get lost, and readers that take their
time, over three nodes.

A failed history is repeated by its seed. Over libp2p, where each takes seconds, there are a few.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import pytest
import trio

from swarmllm.errors import DeadlineExceeded, NodeUnreachable, RemoteError
from swarmllm.swarm.in_memory.link import LinkQuality
from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.swarm.router import Router

from .conftest import DEADLINE_S, Libp2pSwarm, MemorySwarm, Swarm, meet, until

NAMES = ("a", "b", "c")
N_EVENTS = 30
N_TASKS_AT_ONCE = 8


class History:
    """One run. Whoever sends numbers its messages; a life is a node between its start and its stop."""

    def __init__(self, swarm: Swarm, network: InMemoryNetwork | None, rng: random.Random) -> None:
        self.swarm = swarm
        self.network = network
        self.rng = rng
        self.alive: dict[str, Router] = {}
        self.lives: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.published: dict[str, bytes] = {}
        self.cuts: set[tuple[str, str]] = set()
        self.received: dict[tuple[str, str], list[int]] = {}
        """Numbers by (sender's name and life, receiver's name and life)."""
        self.damaged: list[bytes] = []
        self.n_sent = 0
        self.events = [self.send, self.send, self.send, self.request, self.publish, self.restart]
        if network is not None:
            self.events += [self.cut, self.heal, self.silence, self.lose_acknowledgements]

    async def start(self, name: str) -> None:
        router = self.alive[name] = await self.swarm.start(name)
        self.lives[name] += 1
        me = f"{name}{self.lives[name]}"
        slow = self.rng.random() < 0.3

        async def take(sender: str, header: bytes, payload: memoryview) -> None:
            if slow:
                await trio.sleep(0.01)
            life, number = header.decode().split()
            if bytes(payload) != header * (len(payload) // len(header)):
                self.damaged.append(header)
            self.received.setdefault((life, me), []).append(int(number))

        async def answer(sender: str, body: bytes) -> bytes:
            return me.encode() + body

        router.serve(answer, take)
        await self.publish(name)

    def two(self) -> tuple[str, str]:
        here, there = self.rng.sample(NAMES, 2)
        return here, there

    async def send(self, name: str | None = None) -> None:
        here, there = self.two()
        self.n_sent += 1
        header = f"{here}{self.lives[here]} {self.n_sent}".encode()
        router, target = self.alive[here], self.alive[there].node_id
        try:
            await router.send(target, header, header * self.rng.choice([0, 1, 1000, 20_000]))
        except NodeUnreachable:
            return

    async def request(self, name: str | None = None) -> None:
        here, there = self.two()
        life = f"{there}{self.lives[there]}"
        try:
            answered = await self.alive[here].request(self.alive[there].node_id, b"?", timeout_s=DEADLINE_S)
        except (NodeUnreachable, RemoteError, DeadlineExceeded):
            return
        assert answered[-1:] == b"?"
        assert answered[:1].decode() == there
        assert int(answered[1:-1]) >= int(life[1:])

    async def publish(self, name: str | None = None) -> None:
        name = name or self.rng.choice(NAMES)
        self.published[name] = f"{name} {self.lives[name]} {self.rng.random()}".encode()
        await self.alive[name].publish(self.published[name])

    async def restart(self, name: str | None = None) -> None:
        if self.rng.random() < 0.7:
            return
        name = self.rng.choice(NAMES[1:])
        await self.swarm.stop(name)
        await self.start(name)

    async def cut(self, name: str | None = None) -> None:
        assert self.network is not None
        here, there = self.two()
        self.cuts.add((here, there))
        self.network.cut(here, there)

    async def silence(self, name: str | None = None) -> None:
        assert self.network is not None
        here, there = self.two()
        self.cuts.add((here, there))
        self.network.silence(here, there)

    async def lose_acknowledgements(self, name: str | None = None) -> None:
        assert self.network is not None
        here, there = self.two()
        if there in self.alive[here].connected():
            self.network.lose_acknowledgements(here, there)

    async def heal(self, name: str | None = None) -> None:
        assert self.network is not None
        while self.cuts:
            self.network.heal(*self.cuts.pop())

    async def run(self) -> None:
        for name in NAMES:
            await self.start(name)
        await meet(*self.alive.values())
        at_once: list[Callable[[], Awaitable[None]]] = []
        for _ in range(N_EVENTS):
            event = self.rng.choice(self.events)
            # Sends of one node to one other are ordered by who called first, so they are made in turn.
            if event == self.request and len(at_once) < N_TASKS_AT_ONCE:
                at_once.append(event)
                continue
            async with trio.open_nursery() as nursery:
                for request in at_once:
                    nursery.start_soon(request)
                at_once.clear()
                with trio.fail_after(DEADLINE_S):
                    await event()
        if self.network is not None:
            await self.heal()

    async def check(self) -> None:
        await meet(*self.alive.values())
        newest = {self.alive[name].node_id: record for name, record in self.published.items()}
        for router in self.alive.values():
            await until(router, lambda r=router: dict(r.records()) == newest)  # type: ignore[misc]
        assert self.damaged == []
        for (sender, receiver), numbers in self.received.items():
            assert numbers == sorted(set(numbers)), f"{sender} to {receiver}"


@pytest.mark.parametrize("seed", range(200))
async def test_in_memory_every_history_keeps_the_promises(seed: int, autojump_clock: trio.abc.Clock) -> None:
    rng = random.Random(seed)
    quality = LinkQuality(latency_s=rng.choice([0.0, 0.01, 0.2]), loss=rng.choice([0.0, 0.1, 0.5]))
    async with InMemoryNetwork(quality, seed=seed) as network:
        history = History(MemorySwarm(network), network, rng)
        await history.run()
        await history.check()
        assert history.n_sent


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_over_libp2p_every_history_keeps_the_promises(seed: int, libp2p_swarm: Libp2pSwarm) -> None:
    history = History(libp2p_swarm, None, random.Random(seed))
    await history.run()
    await history.check()
    assert history.received
