"""Two ways to run a swarm in one process, behind one face: the in-memory one, and real libp2p hosts over
loopback TCP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
import trio

from swarmllm.swarm.memory import InMemoryNetwork
from swarmllm.swarm.router import Router

if TYPE_CHECKING:
    from trio_typing import TaskStatus

    from swarmllm.swarm.libp2p_router import Libp2pRouter


DEADLINE_S = 15.0


class Swarm(Protocol):
    async def start(self, name: str) -> Router:
        """A node that finds the others by itself; the same name again is the same node."""
        ...

    async def stop(self, name: str) -> None: ...


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
