"""What a node notices of another one's end, with real processes and real signals."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from .conftest import DEADLINE_S, Libp2pSwarm, until

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


@pytest.mark.slow
async def test_a_killed_node_is_dropped_and_its_record_stays(
    libp2p_swarm: Libp2pSwarm, tmp_path: Path
) -> None:
    a = await libp2p_swarm.start("a")
    async with node_process(tmp_path / "other", *a.addresses) as (process, node_id):
        await until(a, lambda: a.connected() == {node_id})
        process.send_signal(signal.SIGKILL)
        with trio.fail_after(10):
            await until(a, lambda: not a.connected())
    assert a.records()[node_id] == b"a process"


@pytest.mark.slow
async def test_a_frozen_node_is_dropped_and_found_again_when_it_thaws(
    libp2p_swarm: Libp2pSwarm, tmp_path: Path
) -> None:
    a = await libp2p_swarm.start("a")
    echoes: list[bytes] = []
    echoed = trio.Event()

    async def refuse(sender: str, body: bytes) -> bytes:
        raise AssertionError

    async def keep(sender: str, header: bytes, payload: memoryview) -> None:
        echoes.append(header)
        echoed.set()

    a.serve(refuse, keep)
    async with node_process(tmp_path / "other", *a.addresses) as (process, node_id):
        await until(a, lambda: a.connected() == {node_id})
        await a.send(node_id, b"before")
        with trio.fail_after(DEADLINE_S):
            await echoed.wait()
        process.send_signal(signal.SIGSTOP)
        await until(a, lambda: not a.connected())
        process.send_signal(signal.SIGCONT)
        await until(a, lambda: a.connected() == {node_id})
        echoed = trio.Event()
        with trio.fail_after(DEADLINE_S):
            await a.send(node_id, b"after")
            await echoed.wait()
    assert echoes == [b"before", b"after"]


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
