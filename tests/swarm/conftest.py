"""Two ways to run a swarm in one process, behind one face: the in-memory one, and real libp2p hosts over
loopback TCP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import trio
from deadlines import DEADLINE_S as DEADLINE_S

from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.swarm.in_memory.router import InMemoryRouter
from swarmllm.swarm.router import Router

if TYPE_CHECKING:
    from trio_typing import TaskStatus

    from swarmllm.swarm.libp2p_router import Libp2pRouter


class Swarm(Protocol):
    async def start(self, name: str) -> Router:
        """A node that finds the others by itself; the same name again is the same node."""
        ...

    async def stop(self, name: str) -> None: ...

    def lose_acknowledgements(self, sender: Router, receiver: Router) -> None:
        """Of what is sent on the connection that they have."""
        ...

    def silence(self, sender: Router, receiver: Router) -> Callable[[], None]:
        """On the connection that they have, nothing arrives and nothing ends, until what this returns is
        called."""
        ...

    def all_is_acknowledged(self, sender: Router, receiver: Router) -> bool: ...


async def until(router: Router, condition: Callable[[], bool]) -> None:
    """Wait for changes at `router` until the condition holds."""
    async with router.changes() as changes:
        with trio.fail_after(DEADLINE_S):
            while not condition():
                await anext(changes)


async def meet(*routers: Router) -> None:
    """Wait until each sees all the others connected."""
    ids = {router.node_id for router in routers}
    for router in routers:
        wanted = ids - {router.node_id}
        await until(router, lambda r=router, w=wanted: r.connected() >= w)  # type: ignore[misc]


class MemorySwarm:
    def __init__(self, network: InMemoryNetwork) -> None:
        self._network = network

    async def start(self, name: str) -> Router:
        return self._network.add(name)

    async def stop(self, name: str) -> None:
        self._network.kill(name)

    def lose_acknowledgements(self, sender: Router, receiver: Router) -> None:
        self._network.lose_acknowledgements(sender.node_id, receiver.node_id)

    def silence(self, sender: Router, receiver: Router) -> Callable[[], None]:
        self._network.silence(sender.node_id, receiver.node_id)
        return lambda: self._network.heal(sender.node_id, receiver.node_id)

    def all_is_acknowledged(self, sender: Router, receiver: Router) -> bool:
        assert isinstance(sender, InMemoryRouter)
        deliveries = sender.link(receiver.node_id).outgoing
        return deliveries.n_acknowledged == deliveries.n_sent


class Libp2pSwarm:
    """Every node bootstraps from the one started first and must find the rest by itself."""

    def __init__(self, nursery: trio.Nursery, folder: Path) -> None:
        self._nursery = nursery
        self._folder = folder
        self._first: tuple[str, ...] = ()
        self._running: dict[str, tuple[trio.CancelScope, trio.Event]] = {}

    async def start(self, name: str) -> Libp2pRouter:
        router: Libp2pRouter = await self._nursery.start(self._run, name)
        self._first = self._first or router.addresses
        return router

    def forget_bootstrap(self) -> None:
        """The next node to start is told of nobody."""
        self._first = ()

    async def stop(self, name: str) -> None:
        scope, stopped = self._running.pop(name)
        scope.cancel()
        await stopped.wait()

    def lose_acknowledgements(self, sender: Router, receiver: Router) -> None:
        for connection in self._connections(receiver, sender):
            connection.deliveries.to_tell = lambda *, is_at_work: None  # type: ignore[method-assign]

    def silence(self, sender: Router, receiver: Router) -> Callable[[], None]:
        healed = trio.Event()
        for connection in self._connections(receiver, sender):
            receive_frames = connection.wire.receive_frames

            async def wait_first(decoder: Any, receive_frames: Any = receive_frames) -> Any:
                await healed.wait()
                return await receive_frames(decoder)

            connection.wire.receive_frames = wait_first  # type: ignore[method-assign]
        return healed.set

    def all_is_acknowledged(self, sender: Router, receiver: Router) -> bool:
        connections = self._connections(sender, receiver)
        return all(c.deliveries.n_acknowledged == c.deliveries.n_sent for c in connections)

    def _connections(self, here: Router, there: Router) -> list[Any]:
        from swarmllm.swarm.libp2p_router import Libp2pRouter

        assert isinstance(here, Libp2pRouter)
        return here.plane.connections(there.node_id)

    async def _run(self, name: str, *, task_status: TaskStatus[Libp2pRouter]) -> None:
        from swarmllm.swarm.libp2p_router import open_libp2p_router
        from swarmllm.swarm.settings import SwarmSettings

        settings = SwarmSettings(self._folder / name, "127.0.0.1", 0, 0, bootstrap=self._first, mdns=False)
        with trio.CancelScope() as scope:
            self._running[name] = scope, trio.Event()
            stopped = self._running[name][1]
            try:
                async with open_libp2p_router(settings) as router:
                    task_status.started(router)
                    await trio.sleep_forever()
            finally:
                stopped.set()


@pytest.fixture(params=["memory", pytest.param("libp2p", marks=pytest.mark.slow)])
async def swarm(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Swarm]:
    if request.param == "memory":
        async with InMemoryNetwork() as network:
            yield MemorySwarm(network)
    else:
        async with trio.open_nursery() as nursery:
            yield Libp2pSwarm(nursery, tmp_path)
            nursery.cancel_scope.cancel()


@pytest.fixture
async def libp2p_swarm(tmp_path: Path) -> AsyncIterator[Libp2pSwarm]:
    async with trio.open_nursery() as nursery:
        yield Libp2pSwarm(nursery, tmp_path)
        nursery.cancel_scope.cancel()


@pytest.fixture(params=["request", "fetch"])
def verb(request: pytest.FixtureRequest) -> str:
    """Two ways to ask, one promise."""
    return str(request.param)
