"""What a node notices of another one's end, with real processes and real signals: it plans without it. How
soon is promised too, and held by a clock that no other process disturbs (test_keepalive.py,
bench/forgetting.py).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.data.connection import Connection
from swarmllm.swarm.libp2p_router import open_libp2p_router
from swarmllm.swarm.records.registry import Registry, follow_router
from swarmllm.swarm.router import Router
from swarmllm.swarm.settings import SwarmSettings

from .conftest import DEADLINE_S, Libp2pSwarm, until
from .handlers import Inbox, no_request
from .node_process import MODEL_ID, record

UNNOTICED_S = 40.0
"""Less than libp2p takes to notice by itself that a peer has frozen."""

NODE = Path(__file__).with_name("node_process.py")


@asynccontextmanager
async def node_process(data_dir: Path, *bootstrap: str) -> AsyncIterator[tuple[trio.Process, str]]:
    """(the process, its node id), once it runs; gone at the end, whatever the test did to it."""
    process = await trio.lowlevel.open_process(
        [sys.executable, str(NODE), str(data_dir), *bootstrap], stdin=-1, stdout=-1
    )
    try:
        assert process.stdout is not None
        with trio.fail_after(DEADLINE_S):
            address = b""
            while not address.endswith(b"\n"):
                address += await process.stdout.receive_some(1024)
        yield process, address.decode().strip().rpartition("/")[2]
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            assert process.stdin is not None
            await process.stdin.aclose()
            await process.stdout.aclose()


@asynccontextmanager
async def known_to_plans(router: Router) -> AsyncIterator[Registry]:
    """What this node's routes are planned from."""
    registry = Registry(router.node_id)
    async with trio.open_nursery() as nursery:
        await nursery.start(follow_router, registry, router)
        yield registry
        nursery.cancel_scope.cancel()


async def counted_on(registry: Registry, node_ids: list[str], *, within_s: float = DEADLINE_S) -> None:
    """Returns when routes may lead through these nodes, and through no others."""
    with trio.fail_after(within_s):
        while [holder.node_id for holder in registry.holders(MODEL_ID)] != node_ids:  # noqa: ASYNC110
            await trio.sleep(0.01)


@pytest.mark.slow
async def test_a_killed_node_is_out_of_the_routes_and_its_record_stays(
    libp2p_swarm: Libp2pSwarm, tmp_path: Path
) -> None:
    a = await libp2p_swarm.start("a")
    async with (
        known_to_plans(a) as registry,
        node_process(tmp_path / "other", *a.addresses) as (process, node_id),
    ):
        await counted_on(registry, [node_id])
        process.send_signal(signal.SIGKILL)
        await counted_on(registry, [])
        assert not a.connected()
        assert a.records()[node_id] == record(node_id)


@pytest.mark.slow
async def test_a_node_that_leaves_is_out_of_the_routes_at_once(
    libp2p_swarm: Libp2pSwarm, tmp_path: Path
) -> None:
    a = await libp2p_swarm.start("a")
    async with (
        known_to_plans(a) as registry,
        node_process(tmp_path / "other", *a.addresses) as (process, node_id),
    ):
        await counted_on(registry, [node_id])
        assert process.stdin is not None
        await process.stdin.aclose()
        await counted_on(registry, [])


@pytest.mark.slow
async def test_a_frozen_node_is_out_of_the_routes_and_found_again_when_it_thaws(
    libp2p_swarm: Libp2pSwarm, tmp_path: Path
) -> None:
    a = await libp2p_swarm.start("a")
    inbox = Inbox()
    a.serve(no_request, inbox)
    async with (
        known_to_plans(a) as registry,
        node_process(tmp_path / "other", *a.addresses) as (process, node_id),
    ):
        await counted_on(registry, [node_id])
        await a.send(node_id, b"before")
        await inbox.wait_for(1)
        process.send_signal(signal.SIGSTOP)
        await counted_on(registry, [])
        process.send_signal(signal.SIGCONT)
        await counted_on(registry, [node_id])
        await a.send(node_id, b"after")
        await inbox.wait_for(2)
    assert [header for _, header, _ in inbox.messages] == [b"before", b"after"]


@pytest.mark.slow
async def test_a_node_that_froze_before_the_first_data_connection_is_out_of_the_routes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How soon: see test_libp2p_keepalive. Without the DHT, which may have asked it something."""

    async def reach(node_id: str) -> Connection:
        raise NodeUnreachable("held up for the test")

    settings = SwarmSettings(tmp_path / "a", "127.0.0.1", 0, 0, mdns=False, dht="off")
    async with open_libp2p_router(settings) as a:
        monkeypatch.setattr(a.plane, "_may_come", lambda node_id: False)
        monkeypatch.setattr(a.plane, "reach", reach)
        async with (
            known_to_plans(a) as registry,
            node_process(tmp_path / "other", *a.addresses) as (process, node_id),
        ):
            await counted_on(registry, [node_id])
            process.send_signal(signal.SIGSTOP)
            assert not a.plane.has_connection(node_id)
            await counted_on(registry, [], within_s=UNNOTICED_S)
            process.send_signal(signal.SIGCONT)
            await counted_on(registry, [node_id], within_s=UNNOTICED_S)


@pytest.mark.slow
async def test_a_frozen_node_does_not_hold_up_the_end_of_another(
    libp2p_swarm: Libp2pSwarm, tmp_path: Path
) -> None:
    a = await libp2p_swarm.start("a")
    async with node_process(tmp_path / "other", *a.addresses) as (process, node_id):
        await until(a, lambda: a.connected() == {node_id})
        process.send_signal(signal.SIGSTOP)
        async with trio.open_nursery() as nursery:
            # More than the kernel takes, so that a writer is stuck when the end comes.
            nursery.start_soon(a.send, node_id, b"", bytes(32 * 1024 * 1024))
            with trio.move_on_after(0.2):
                await trio.sleep_forever()
            nursery.cancel_scope.cancel()
        with trio.fail_after(DEADLINE_S):
            await libp2p_swarm.stop("a")
