"""What a connection costs, and that sparing it breaks nothing."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.host.basic_host import BasicHost
from libp2p.io.trio import TrioTCPStream
from libp2p.network.stream.exceptions import StreamReset
from libp2p.network.stream.net_stream import StreamState
from libp2p.peer.id import ID
from libp2p.stream_muxer.yamux.yamux import DEFAULT_WINDOW_SIZE, Yamux
from libp2p.tools.anyio_service import Service, background_trio_service
from trio_typing import TaskStatus

from swarmllm.swarm.discovery.addresses import Address, own_addresses
from swarmllm.swarm.libp2p import fast_paths
from swarmllm.swarm.libp2p import guards as host_guards
from swarmllm.swarm.libp2p.fast_paths import PromptLock
from swarmllm.swarm.libp2p.host import Host, Stream, run_libp2p
from swarmllm.swarm.membership.connection_gater import ConnectionGater
from swarmllm.swarm.membership.identity import load_or_create_identity

from .conftest import DEADLINE_S

ECHO = "/echo/1"


async def echo(_sender: str, stream: Stream) -> None:
    await stream.write(await stream.read(100))
    await stream.close()


@asynccontextmanager
async def two_hosts(folder: Path) -> AsyncIterator[tuple[Host, Host]]:
    """The first has a connection with the second, which echoes."""
    hosts: list[Host] = []
    async with trio.open_nursery() as nursery:

        async def run(name: str, *, task_status: TaskStatus[None]) -> None:
            await trio.Path(folder / name).mkdir()
            host = Host(load_or_create_identity(folder / name), ConnectionGater())
            host.serve(ECHO, echo)
            async with run_libp2p(host, own_addresses("127.0.0.1"), 0):
                hosts.append(host)
                task_status.started()
                await trio.sleep_forever()

        for name in ("one", "other"):
            await nursery.start(run, name)
        with trio.fail_after(DEADLINE_S):
            await hosts[0].dial(hosts[1].node_id, [Address("127.0.0.1", hosts[1].port)])
        yield hosts[0], hosts[1]
        nursery.cancel_scope.cancel()


async def ask(host: Host, other: Host, words: bytes) -> bytes:
    with trio.fail_after(DEADLINE_S):
        stream = await host.open_stream(other.node_id, ECHO, words)
        answer = b""
        while len(answer) < len(words):
            answer += await stream.read(100)
        await stream.close()
        return answer


def muxer(host: Host, other: Host) -> Any:
    (connection,) = host._connections(other.node_id)
    return connection.muxed_conn


@pytest.mark.slow
async def test_a_question_and_its_answer_are_five_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question with all that opens its stream, the agreement, the answer, and an end from each."""
    async with two_hosts(tmp_path) as (one, other):
        await ask(one, other, b"before")
        written: list[bytes] = []
        transport = type(muxer(one, other).secured_conn.conn)
        encrypt = transport.encrypt

        def record(self: Any, data: bytes) -> bytes:
            if data[1] != 2:  # yamux pings by itself
                written.append(data)
            return bytes(encrypt(self, data))

        monkeypatch.setattr(transport, "encrypt", record)
        assert await ask(one, other, b"words") == b"words"
        with trio.fail_after(DEADLINE_S):
            while muxer(one, other).streams or muxer(other, one).streams:  # noqa: ASYNC110
                await trio.sleep(0.01)
        assert len(written) == 5


@pytest.mark.slow
async def test_streams_that_are_opened_and_left_leave_nothing(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (one, other):
        for _ in range(20):
            stream = await muxer(one, other).open_stream()
            await stream.reset()
            stream = await muxer(one, other).open_stream()
            await stream.write(b"")
            await stream.reset()
        assert await ask(one, other, b"still") == b"still"
        with trio.fail_after(DEADLINE_S):
            while muxer(one, other).streams or muxer(other, one).streams:  # noqa: ASYNC110
                await trio.sleep(0.01)


@pytest.mark.slow
async def test_who_is_cancelled_before_it_writes_does_not_garble_the_connection(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (one, other):
        stream = await one.open_stream(other.node_id, ECHO)
        with trio.CancelScope() as scope:
            scope.cancel()
            await stream.write(b"never said")
        assert scope.cancelled_caught
        await stream.write(b"said")
        assert await stream.read(100) == b"said"
        assert await ask(one, other, b"and again") == b"and again"


@pytest.mark.slow
async def test_nobody_asks_who_it_is_connected_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    async def identify(self: Any, peer_id: Any, *, reason: str) -> None:
        asked.append(peer_id)

    monkeypatch.setattr(BasicHost, "_identify_peer", identify)
    async with two_hosts(tmp_path) as (one, other):
        assert await ask(one, other, b"words") == b"words"
    assert asked == []


async def test_a_task_of_a_service_is_the_parent_of_those_it_starts() -> None:
    host_guards.find_parents_of_tasks_at_once()
    parents: dict[str, Any] = {}

    class Parent(Service):
        async def run(self) -> None:
            self.manager.run_task(self.start_child, name="child")
            await self.manager.wait_finished()

        async def start_child(self) -> None:
            self.manager.run_task(self.look, name="grandchild")
            await self.look()

        async def look(self) -> None:
            manager: Any = self.manager
            task = manager._find_parent_task(trio.lowlevel.current_task())
            parents[task.name] = task.parent and task.parent.name

    async with background_trio_service(Parent()) as manager:
        stranger = manager._find_parent_task(trio.lowlevel.current_task())  # type: ignore[attr-defined]
        with trio.fail_after(DEADLINE_S):
            while len(parents) < 2:
                await trio.lowlevel.checkpoint()
    assert stranger is None
    assert parents["grandchild"] == "child"


async def test_a_free_lock_makes_nobody_wait_and_a_taken_one_does() -> None:
    lock, order = PromptLock(), []

    async def second() -> None:
        async with lock:
            order.append("second")

    async with trio.open_nursery() as nursery:
        with trio.testing.assert_no_checkpoints():
            await lock.__aenter__()
        nursery.start_soon(second)
        await trio.testing.wait_all_tasks_blocked()
        order.append("first")
        await lock.__aexit__()
    assert order == ["first", "second"]


async def test_nobody_overtakes_who_waits_for_a_lock_and_who_gives_up_holds_up_nobody() -> None:
    lock, order = PromptLock(), []

    async def take(name: str) -> None:
        async with lock:
            order.append(name)

    async with trio.open_nursery() as nursery:
        await lock.__aenter__()
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as impatient:
                impatient.start_soon(take, "impatient")
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        nursery.start_soon(take, "waiting")
        await trio.testing.wait_all_tasks_blocked()
        await lock.__aexit__()
        # The other one has not run since.
        await take("late")
    assert order == ["waiting", "late"]
    with trio.testing.assert_no_checkpoints():
        await lock.__aenter__()


async def test_a_lock_is_free_again_after_a_failure() -> None:
    lock = PromptLock()
    for _ in range(2):
        with pytest.raises(KeyError):
            async with lock:
                raise KeyError


@pytest.mark.parametrize("belongs_to_yamux", [False, True])
async def test_what_is_read_comes_in_order_and_before_the_end(belongs_to_yamux: bool) -> None:
    fast_paths.take_shortcuts()
    ours, theirs = (trio.SocketStream(trio.socket.from_stdlib_socket(s)) for s in socket.socketpair())
    stream = TrioTCPStream(ours)
    under: Any = SimpleNamespace(
        read_writer=SimpleNamespace(read_write_closer=SimpleNamespace(stream=stream))
    )
    if belongs_to_yamux:
        Yamux(SimpleNamespace(conn=under, is_initiator=True), ID(b"peer"), is_initiator=True)  # type: ignore[arg-type]
    async with ours, theirs:
        await theirs.send_all(b"12345678")
        assert await stream.read(2) == b"12"
        await theirs.send_all(b"9")
        await theirs.send_eof()
        # A connection whose socket somebody else takes over (the data plane's) must leave there what it was
        # not asked for.
        assert (await ours.receive_some(1) == b"3") is not belongs_to_yamux
        rest = b""
        while piece := await stream.read(3):
            rest += piece
        assert (rest, await stream.read(0)) == (b"345678" if belongs_to_yamux else b"456789", b"")


def test_the_id_of_a_peer_is_decoded_once() -> None:
    text = str(ID(b"\x00\x24\x08\x01\x12\x20" + bytes(range(32))))
    assert ID.from_base58(text) is ID.from_base58(text)
    assert ID.from_base58(text) == ID(b"\x00\x24\x08\x01\x12\x20" + bytes(range(32)))
    for _ in range(2):
        with pytest.raises(ValueError, match="character"):
            ID.from_base58("0")


@pytest.mark.slow
async def test_only_who_reads_what_has_come_already_gives_others_a_turn_first(tmp_path: Path) -> None:
    async with two_hosts(tmp_path) as (one, other):
        stream: Any = await one.open_stream(other.node_id, ECHO, b"words")
        with trio.fail_after(DEADLINE_S):
            # Nothing has come yet: whoever waits gives way anyway, and once.
            assert await stream.read(1) == b"w"
        assert isinstance(stream._state_lock, PromptLock)
        order: list[str] = []

        async def another() -> None:
            order.append("another")
            await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(another)
            order.extend([(await stream.read(1)).decode() for _ in range(4)])
        assert order[0] == "another", order
        await stream.close()


@pytest.mark.slow
async def test_a_stream_that_is_read_in_pieces_goes_on_beyond_its_window(tmp_path: Path) -> None:
    n_bytes = 3 * DEFAULT_WINDOW_SIZE

    async def pour(_sender: str, stream: Stream) -> None:
        await stream.write(bytes(n_bytes))
        await stream.close()

    async with two_hosts(tmp_path) as (one, other):
        other.serve("/pour/1", pour)
        stream: Any = await one.open_stream(other.node_id, "/pour/1")
        n_read = 0
        with trio.fail_after(DEADLINE_S):
            while n_read < n_bytes:
                await wait_until_something_has_come(stream)
                n_read += len(await stream.read(10_000))


async def wait_until_something_has_come(stream: Any) -> None:
    while not fast_paths.unread_bytes(stream):
        await trio.lowlevel.checkpoint()


@pytest.mark.slow
async def test_what_has_come_before_a_stream_was_reset_is_not_read(tmp_path: Path) -> None:

    async def say(_sender: str, stream: Stream) -> None:
        await stream.write(b"words")
        await trio.sleep_forever()

    async with two_hosts(tmp_path) as (one, other):
        other.serve("/say/1", say)
        stream: Any = await one.open_stream(other.node_id, "/say/1")
        with trio.fail_after(DEADLINE_S):
            await wait_until_something_has_come(stream)
        stream._state = StreamState.RESET
        with pytest.raises(StreamReset):
            await stream.read(1)


def test_the_librarys_yamux_is_still_what_the_shortcuts_expect() -> None:
    fast_paths.take_shortcuts()
    assert Yamux._write_frame is fast_paths._write_frame
