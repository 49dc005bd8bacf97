"""Two connections between the same two nodes: one goes, the same at both ends, and nothing else notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from libp2p.network.connection.swarm_connection import Direction
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmllm.swarm.libp2p_router import Libp2pRouter

from .conftest import DEADLINE_S, until
from .test_data_plane import two_nodes

pytestmark = pytest.mark.slow

LOOK_EVERY_S = 0.02


def connections(router: Libp2pRouter, peer: Libp2pRouter) -> list[Any]:
    found: list[Any] = router.host.libp2p_host.get_network().connections.get(ID.from_base58(peer.node_id), [])
    return [c for c in found if not c.event_closed.is_set()]


async def dial_once_more(router: Libp2pRouter, peer: Libp2pRouter) -> None:
    where = Multiaddr(f"/ip4/127.0.0.1/tcp/{peer.host.port}")
    await router.host.libp2p_host.get_network().dial_addr(where, ID.from_base58(peer.node_id))


async def has_one_each(a: Libp2pRouter, b: Libp2pRouter) -> None:
    with trio.fail_after(DEADLINE_S):
        while len(connections(a, b)) != 1 or len(connections(b, a)) != 1:  # noqa: ASYNC110 (the library tells nobody)
            await trio.sleep(LOOK_EVERY_S)


@pytest.mark.parametrize("dialler", ["smaller", "larger", "both"])
async def test_of_two_connections_one_is_left_and_everything_goes_on(tmp_path: Path, dialler: str) -> None:
    async with two_nodes(tmp_path) as (a, b):
        smaller, larger = sorted((a, b), key=lambda router: router.node_id)
        async with trio.open_nursery() as nursery:
            if dialler != "larger":
                nursery.start_soon(dial_once_more, smaller, larger)
            if dialler != "smaller":
                nursery.start_soon(dial_once_more, larger, smaller)
        # Who accepts it may have it a moment later.
        assert max(len(connections(a, b)), len(connections(b, a))) > 1
        await has_one_each(a, b)
        (kept,) = connections(smaller, larger)
        if dialler != "larger":
            assert kept.direction == Direction.OUTBOUND
        assert a.connected() == {b.node_id}
        assert b.connected() == {a.node_id}

        async def answer(sender: str, body: bytes) -> bytes:
            return body

        async def ignore(sender: str, header: bytes, payload: memoryview) -> None: ...

        b.serve(answer, ignore)
        assert await a.request(b.node_id, b"still there?") == b"still there?"
        await a.publish(b"news")
        await until(b, lambda: b.records().get(a.node_id) == b"news")
