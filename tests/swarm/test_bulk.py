"""Transfers have connections of their own: their loss and their weight are not the decoder's."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from libp2p.custom_types import TProtocol

from bench.common.wan_proxy import Wan, relayed
from swarmllm.errors import NodeUnreachable, RemoteError
from swarmllm.swarm.data import bulk
from swarmllm.swarm.data.bulk import PENDING_MAX
from swarmllm.swarm.data.connection import Connection
from swarmllm.swarm.data.stream_fallback import BULK_PROTOCOL
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.settings import SwarmSettings
from swarmllm_proto.frames import Frame, FrameDecoder
from swarmllm_proto.limits import REQUEST_MAX

from .conftest import DEADLINE_S, meet
from .handlers import Inbox, no_request
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


async def test_both_ask_on_the_connection_that_one_of_them_has_dialled(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (a, b):
        a.serve(answer_largest, no_message)
        b.serve(answer_largest, no_message)
        with trio.fail_after(DEADLINE_S):
            assert bytes(await a.fetch(b.node_id, b"a")) == b"a".ljust(REQUEST_MAX, b".")
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(a.fetch, b.node_id, b"a")
                    nursery.start_soon(b.fetch, a.node_id, b"b")
            assert bytes(await b.fetch(a.node_id, b"b")) == b"b".ljust(REQUEST_MAX, b".")
        assert bulk_connections(a, b.node_id) == bulk_connections(b, a.node_id) == 1


async def test_the_first_question_does_not_wait_for_the_peers_hello(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (a, b):
        asked = trio.Event()

        async def serve(sender: str, body: bytes) -> bytes:
            asked.set()
            return await answer_largest(sender, body)

        b.serve(serve, no_message)
        dial = a.plane.dial_bulk

        async def dial_and_read_nothing_until_asked(node_id: str) -> Connection | None:
            connection = await dial(node_id)
            assert connection is not None
            read = connection.wire.receive_frames

            async def read_later(decoder: FrameDecoder) -> tuple[int, list[Frame]]:
                await asked.wait()
                return await read(decoder)

            connection.wire.receive_frames = read_later  # type: ignore[method-assign]
            return connection

        a.plane.dial_bulk = dial_and_read_nothing_until_asked  # type: ignore[method-assign]
        with trio.fail_after(DEADLINE_S):
            assert bytes(await a.fetch(b.node_id, b"piece")) == b"piece".ljust(REQUEST_MAX, b".")
        assert kinds_of_bulk(a, b.node_id) == ["direct"]


async def test_a_peer_that_ends_the_dialled_connection_before_its_hello_is_asked_over_a_stream(
    tmp_path: Path,
) -> None:
    async with two_nodes(tmp_path) as (a, b):
        await exchange(a, b, [b"so that they have a connection for messages"])
        b.serve(answer_largest, no_message)
        dial, may_come, n_dialled = a.plane.dial_bulk, b.plane._may_come, 0

        async def dial_to_be_refused(node_id: str) -> Connection | None:
            nonlocal n_dialled
            n_dialled += 1
            b.plane._may_come = refuse  # type: ignore[method-assign]
            return await dial(node_id)

        def refuse(node_id: str) -> bool:
            b.plane._may_come = may_come  # type: ignore[method-assign]
            return False

        a.plane.dial_bulk = dial_to_be_refused  # type: ignore[method-assign]
        with trio.fail_after(DEADLINE_S):
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(a.fetch, b.node_id, b"piece")
            assert bytes(await a.fetch(b.node_id, b"more")) == b"more".ljust(REQUEST_MAX, b".")
        assert n_dialled == 1
        assert kinds_of_bulk(a, b.node_id) == kinds_of_bulk(b, a.node_id) == ["libp2p"]


def delay_dial(router: Libp2pRouter, begun: trio.Event, go_on: trio.Event) -> None:
    dial = router.plane.dial_bulk

    async def wait_first(node_id: str) -> Connection | None:
        begun.set()
        await go_on.wait()
        return await dial(node_id)

    router.plane.dial_bulk = wait_first


@pytest.mark.parametrize("later", ["smaller", "larger"])
async def test_of_two_that_were_dialled_at_once_one_remains_and_no_answer_is_lost(
    tmp_path: Path, later: str
) -> None:
    async with two_nodes(tmp_path) as (a, b):
        smaller, larger = sorted((a, b), key=lambda router: router.node_id)
        second, first = (smaller, larger) if later == "smaller" else (larger, smaller)
        both_dial, is_asked, may_answer = trio.Event(), trio.Event(), trio.Event()
        delay_dial(second, both_dial, is_asked)
        delay_dial(first, trio.Event(), both_dial)

        async def answer_late(sender: str, body: bytes) -> bytes:
            is_asked.set()
            await may_answer.wait()
            return await answer_largest(sender, body)

        second.serve(answer_late, no_message)
        first.serve(answer_largest, no_message)
        answers: list[bytes] = []

        async def fetch_first() -> None:
            answers.append(bytes(await first.fetch(second.node_id, b"first")))

        with trio.fail_after(DEADLINE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fetch_first)
                answers.append(bytes(await second.fetch(first.node_id, b"second")))
                may_answer.set()
            assert answers == [word.ljust(REQUEST_MAX, b".") for word in (b"second", b"first")]
            while (bulk_connections(a, b.node_id), bulk_connections(b, a.node_id)) != (1, 1):  # noqa: ASYNC110
                await trio.sleep(0.01)
            (kept,) = (c for c in smaller.plane.all_connections(larger.node_id) if c.bulk)
            assert kept.dialled
            for here, there in ((a, b), (b, a)):
                assert bytes(await here.fetch(there.node_id, b"more")) == b"more".ljust(REQUEST_MAX, b".")
        assert kept.alive
        assert bulk_connections(a, b.node_id) == bulk_connections(b, a.node_id) == 1


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


def kinds_of_bulk(router: Libp2pRouter, node_id: str) -> list[str]:
    return [c.wire_kind for c in router.plane.all_connections(node_id) if c.bulk and c.alive]


def n_bytes_of_bulk(router: Libp2pRouter, node_id: str) -> int:
    return sum(c.n_bytes_received for c in router.plane.all_connections(node_id) if c.bulk)


async def answer_largest(sender: str, body: bytes) -> bytes:
    return body.ljust(REQUEST_MAX, b".")


async def test_without_a_data_port_a_fetch_takes_a_libp2p_stream_of_its_own(tmp_path: Path) -> None:
    async with two_nodes(tmp_path, announce=(ELSEWHERE,)) as (a, b):
        b.serve(answer_largest, no_message)
        with trio.fail_after(DEADLINE_S):
            for number in range(3):
                answered = await a.fetch(b.node_id, b"%d" % number)
                assert bytes(answered) == (b"%d" % number).ljust(REQUEST_MAX, b".")
        assert kinds_of_bulk(a, b.node_id) == kinds_of_bulk(b, a.node_id) == ["libp2p"]
        assert all(not c.bulk for c in a.plane.connections(b.node_id))


async def test_a_peer_that_does_not_know_the_protocol_is_asked_as_ever(tmp_path: Path) -> None:
    async with two_nodes(tmp_path, announce=(ELSEWHERE,)) as (a, b):
        b.host.libp2p_host.remove_stream_handler(TProtocol(BULK_PROTOCOL))
        b.serve(answer_largest, no_message)
        with trio.fail_after(DEADLINE_S):
            assert bytes(await a.fetch(b.node_id, b"piece")) == b"piece".ljust(REQUEST_MAX, b".")
        assert bulk_connections(a, b.node_id) == 0


async def test_transfers_turn_to_a_direct_way_while_they_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "_NO_WAY_S", 0.0)
    async with two_nodes(tmp_path, announce=(ELSEWHERE,)) as (a, b):
        b.serve(answer_largest, no_message)
        with trio.fail_after(DEADLINE_S):
            await a.fetch(b.node_id, b"first")
            assert kinds_of_bulk(a, b.node_id) == ["libp2p"]
            # The port is reachable after all: as if it had been opened.
            port = b.plane.port
            a.plane.addresses_of = lambda node_id: [Address("127.0.0.1", port)]
            while kinds_of_bulk(a, b.node_id) != ["direct"]:
                async with trio.open_nursery() as nursery:
                    for _ in range(3):
                        nursery.start_soon(a.fetch, b.node_id, b"more")
        assert a.connected() == {b.node_id}


async def test_where_both_are_streams_a_message_does_not_wait_behind_a_transfer(tmp_path: Path) -> None:
    wan = Wan(rtt_s=0.02, bytes_per_s=2e6, loss=0.0)
    async with AsyncExitStack() as stack:
        nodes: list[Libp2pRouter] = []
        for name, ip in (("b", "127.0.9.4"), ("a", "127.0.9.3")):
            bootstrap = tuple(address for router in nodes for address in router.addresses)
            settings = SwarmSettings(
                tmp_path / name, "127.0.0.1", 0, 0, bootstrap=bootstrap, mdns=False, announce=(ip,)
            )
            nodes.append(await stack.enter_async_context(open_libp2p_router(settings)))
            await stack.enter_async_context(relayed([nodes[-1].host.port], ip, wan))
        b, a = nodes
        await meet(a, b)
        inbox = Inbox()

        async def echo(sender: str, header: bytes, payload: memoryview) -> None:
            await b.send(sender, header)

        a.serve(no_request, inbox)
        b.serve(answer_largest, echo)

        async def keep_fetching() -> None:
            while True:
                await a.fetch(b.node_id, b"piece", timeout_s=10 * DEADLINE_S)

        with trio.fail_after(DEADLINE_S):
            await a.send(b.node_id, b"first")
            await inbox.wait_for(1)
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(keep_fetching)
                while n_bytes_of_bulk(a, b.node_id) < 10**6:  # noqa: ASYNC110 (nobody announces it)
                    await trio.sleep(0.01)
                assert kinds_of_bulk(a, b.node_id) == ["libp2p"]
                assert a.plane.status(b.node_id).kind == "libp2p"
                for number in range(3):
                    n_before = n_bytes_of_bulk(a, b.node_id)
                    await a.send(b.node_id, b"%d" % number)
                    await inbox.wait_for(number + 2)
                    # Not counted in seconds, so on a machine of any speed: four answers are always under way.
                    assert n_bytes_of_bulk(a, b.node_id) - n_before < REQUEST_MAX
                nursery.cancel_scope.cancel()


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
