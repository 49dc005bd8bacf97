"""libp2p may crash: what does not run on it goes on, and it comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from swarmllm.supervision import current
from swarmllm.swarm.libp2p_router import Libp2pRouter

from .conftest import DEADLINE_S, until
from .test_data_plane import exchange, two_nodes


class Crash(Exception):
    pass


def crash_libp2p(router: Libp2pRouter) -> None:
    async def fail() -> None:
        raise Crash

    # A failure of one of the library's main tasks, which no guard contains.
    router.host.libp2p_host.get_network().manager.run_daemon_task(fail)


@pytest.mark.slow
async def test_messages_pass_and_nobody_is_lost_while_libp2p_starts_again(tmp_path: Path) -> None:
    payloads = [bytes([number % 256]) * 1000 for number in range(3000)]
    async with two_nodes(tmp_path) as (a, b):
        await exchange(a, b, [b"before"])
        n_before = current().status("libp2p").n_restarts
        crashed, addresses = a.host.libp2p_host, a.addresses
        async with a.changes() as changes, trio.open_nursery() as nursery:
            nursery.start_soon(exchange, a, b, payloads)
            crash_libp2p(a)
            with trio.fail_after(DEADLINE_S):
                # Attributes of the host, which has no event for them.
                while a.host.libp2p_host in (None, crashed) or not a.host.is_connected(b.node_id):  # noqa: ASYNC110
                    await trio.sleep(0.02)
        assert current().status("libp2p").n_restarts == n_before + 1
        assert a.addresses == addresses
        assert a.connected() == {b.node_id}
        assert b.connected() == {a.node_id}
        with trio.move_on_after(0.05):
            while (await anext(changes)).kind != "disconnected":
                continue
            pytest.fail("a neighbour was given up")

        async def answer(sender: str, body: bytes) -> bytes:
            return body

        async def ignore(sender: str, header: bytes, payload: memoryview) -> None:
            return None

        a.serve(answer, ignore)
        with trio.fail_after(DEADLINE_S):
            assert await b.request(a.node_id, b"alive") == b"alive"
        # Gossip has come back too.
        await a.publish(b"news")
        await until(b, lambda: b.records().get(a.node_id) == b"news")
