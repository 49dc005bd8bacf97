"""Nodes that find each other by multicast, here on the loopback interface, with real zeroconf."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from zeroconf import EventLoopBlocked, NotRunningException, ServiceInfo

from swarmllm.swarm.discovery import mdns
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.in_memory.network import node_id_named

from .conftest import DEADLINE_S

LOOPBACK = "127.0.0.1"
PRIVATE = "ab" * 16


class Finder:
    """What a node has been told by multicast."""

    def __init__(self) -> None:
        self.found: dict[str, list[Address]] = {}
        self._changed = trio.lowlevel.ParkingLot()

    def take(self, node_id: str, addresses: list[Address]) -> None:
        self.found[node_id] = addresses
        self._changed.unpark_all()

    async def finds(self, node_id: str) -> list[Address]:
        with trio.fail_after(DEADLINE_S):
            while node_id not in self.found:
                await self._changed.park()
        return self.found[node_id]


A, B, C, X = (node_id_named(name) for name in "abcx")


@asynccontextmanager
async def node(name: str, network_id: str, port: int) -> AsyncIterator[Finder]:
    finder = Finder()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mdns.run_mdns, name, network_id, [LOOPBACK], port, finder.take)
        yield finder
        nursery.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def loopback_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left out otherwise: nobody else is there."""
    monkeypatch.setattr(mdns, "is_loopback", lambda _ip: False)


# The library leaves a socket to the garbage collector where it fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_an_address_that_has_gone_leaves_those_of_ipv4() -> None:
    zeroconf = mdns._listening_at([LOOPBACK, "2001:db8::1"])
    assert zeroconf is not None
    await trio.to_thread.run_sync(zeroconf.close)
    assert mdns._listening_at(["2001:db8::1"]) is None


@pytest.mark.slow
async def test_nodes_of_one_network_find_each_other_and_nobody_else() -> None:
    async with node(A, PRIVATE, 1001) as a, node(B, PRIVATE, 1002) as b, node(C, "", 1003) as c:
        assert await a.finds(B) == [Address(LOOPBACK, 1002)]
        assert await b.finds(A) == [Address(LOOPBACK, 1001)]
        # Whoever is new is answered, so by now each has heard everybody.
        await c.finds(C)
        assert C not in a.found | b.found
        assert c.found.keys() == {C}


def announced(name: str, **what: object) -> ServiceInfo:
    where = [socket.inet_aton(LOOPBACK)]
    given: dict[str, object] = {"port": 1, "addresses": where, "properties": {"id": name}}
    return ServiceInfo(mdns.SERVICE, f"{name}.{mdns.SERVICE}", **(given | what))  # type: ignore[arg-type]


JUNK = {
    "no id": announced(X, properties={}),
    "no address": announced(X, addresses=[]),
    "no port": announced(X, port=0),
    "no node id": announced(X, properties={"id": "0OIl0OIl0OIl0OIl"}),
    "another network": announced(X, properties={"id": X, "net": b"\xff" * 200}),
}


class Answering:
    """In the place of a Zeroconf that has the announcement."""

    def __init__(self, info: ServiceInfo | None) -> None:
        self._info = info

    def get_service_info(self, _kind: str, _name: str, timeout: float) -> ServiceInfo | None:
        return self._info


class Failing:
    """In the place of a Zeroconf that is being closed, or whose machine is overloaded."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def get_service_info(self, _kind: str, _name: str, timeout: float) -> ServiceInfo | None:
        raise self._error


@pytest.mark.parametrize("junk", [*JUNK, "no answer", "nothing wrong"])
async def test_what_is_no_announcement_is_passed_over(junk: str) -> None:
    finder = Finder()
    listener = mdns._Listener(trio.lowlevel.current_trio_token(), b"", finder.take)
    info = announced(X) if junk == "nothing wrong" else JUNK.get(junk)
    listener.add_service(Answering(info), mdns.SERVICE, X)  # type: ignore[arg-type]
    await trio.testing.wait_all_tasks_blocked()
    assert set(finder.found) == ({X} if junk == "nothing wrong" else set())


@pytest.mark.parametrize(
    "error",
    [
        EventLoopBlocked(),
        NotRunningException(),
        RuntimeError("loop closed"),
        AssertionError("Zeroconf instance loop must be running, was it already stopped?"),
    ],
)
async def test_what_cannot_be_looked_up_is_passed_over(error: Exception) -> None:
    listener = mdns._Listener(trio.lowlevel.current_trio_token(), b"", Finder().take)
    listener.add_service(Failing(error), mdns.SERVICE, X)  # type: ignore[arg-type]


async def test_a_node_that_announces_a_new_address_is_found_there() -> None:
    finder = Finder()
    listener = mdns._Listener(trio.lowlevel.current_trio_token(), b"", finder.take)
    for port in (1, 2):
        told = listener.add_service if port == 1 else listener.update_service
        told(Answering(announced(X, port=port)), mdns.SERVICE, X)  # type: ignore[arg-type]
        await trio.testing.wait_all_tasks_blocked()
        assert finder.found == {X: [Address(LOOPBACK, port)]}
