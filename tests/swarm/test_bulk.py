"""Transfers have connections of their own: their loss and their weight are not the decoder's."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from swarmllm.errors import NodeUnreachable, RemoteError
from swarmllm.swarm.bulk import PENDING_MAX
from swarmllm.swarm.libp2p_router import Libp2pRouter
from swarmllm_proto.limits import REQUEST_MAX

from .conftest import DEADLINE_S
from .test_data_plane import ELSEWHERE, exchange, two_nodes

pytestmark = pytest.mark.slow


async def no_message(sender: str, header: bytes, payload: memoryview) -> None:
    raise AssertionError


def bulk_connections(router: Libp2pRouter, node_id: str) -> int:
    return sum(c.bulk and c.alive for c in router.plane.all_connections(node_id))


async def test_a_fetch_takes_a_connection_of_its_own_and_messages_theirs(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (a, b):
        served: list[str] = []

        async def serve(sender: str, body: bytes) -> bytes:
            served.append(sender)
            return bytes(REQUEST_MAX)

        b.serve(serve, no_message)
        with trio.fail_after(DEADLINE_S):
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(a.fetch, b.node_id, b"piece")
        assert served == [a.node_id] * 4
        assert bulk_connections(a, b.node_id) == bulk_connections(b, a.node_id) == 1
        await exchange(a, b, [b"one", bytes(1_000_000)])
        assert all(not c.bulk for c in a.plane.connections(b.node_id))


async def test_the_loss_of_a_bulk_connection_fails_its_questions_and_nobody_else(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (a, b):
        asked = trio.Event()

        async def never(sender: str, body: bytes) -> bytes:
            if body == b"again":
                return b"here"
            asked.set()
            await trio.sleep_forever()
            raise AssertionError

        b.serve(never, no_message)
        async with a.changes() as changes, trio.open_nursery() as nursery:

            async def fetch() -> None:
                with pytest.raises(NodeUnreachable):
                    await a.fetch(b.node_id, b"piece", timeout_s=60)

            nursery.start_soon(fetch)
            with trio.fail_after(DEADLINE_S):
                await asked.wait()
                for connection in a.plane.all_connections(b.node_id):
                    if connection.bulk:
                        connection.end("cut for the test")
        with trio.fail_after(DEADLINE_S):
            assert await a.fetch(b.node_id, b"again") == b"here"
        assert a.connected() == {b.node_id}
        with trio.move_on_after(0.05):
            while (await anext(changes)).kind == "record":
                continue
            pytest.fail("the peer was taken for lost")


async def test_without_a_data_port_a_fetch_goes_as_a_request(tmp_path: Path) -> None:
    async with two_nodes(tmp_path, announce=(ELSEWHERE,)) as (a, b):

        async def serve(sender: str, body: bytes) -> bytes:
            return body + b"!"

        b.serve(serve, no_message)
        with trio.fail_after(DEADLINE_S):
            assert await a.fetch(b.node_id, b"piece") == b"piece!"
        assert bulk_connections(a, b.node_id) == 0


async def test_a_peer_may_not_ask_for_more_at_once_than_is_allowed(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (a, b):
        released, n_asked = trio.Event(), 0

        async def wait(sender: str, body: bytes) -> bytes:
            nonlocal n_asked
            n_asked += 1
            await released.wait()
            return b""

        b.serve(wait, no_message)
        refused = 0

        async def fetch() -> None:
            nonlocal refused
            try:
                await a.fetch(b.node_id, b"")
            except RemoteError as error:
                refused += "busy" in str(error)
                if refused == 3:
                    released.set()

        with trio.fail_after(DEADLINE_S):
            async with trio.open_nursery() as nursery:
                for _ in range(PENDING_MAX + 3):
                    nursery.start_soon(fetch)
        assert (n_asked, refused) == (PENDING_MAX, 3)
