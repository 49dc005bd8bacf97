"""The channel over a socket pair, the far end read by hand."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import trio
import trio.testing
from deadlines import DEADLINE_S

from swarmllm.workerpool import channel as channel_module
from swarmllm.workerpool.channel import Channel, ChannelClosed
from swarmllm_proto.codec import decode_daemon_message, encode_ipc
from swarmllm_proto.frames import FrameDecoder
from swarmllm_proto.ipc import AnyWorkerMessage, Done, Embed, Token

MIB = 2**20


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    with near, far:
        yield near, far


def ignore(message: AnyWorkerMessage, payload: memoryview) -> None:
    raise AssertionError(message)


async def read_frames(far: socket.socket, n_frames: int) -> list[tuple[int, bytes]]:
    decoder = FrameDecoder()
    frames: list[tuple[int, bytes]] = []
    while len(frames) < n_frames:
        await trio.lowlevel.wait_readable(far.fileno())
        frames += [
            (decode_daemon_message(frame).id, bytes(frame.payload)) for frame in decoder.feed(far.recv(MIB))
        ]
    return frames


async def test_frames_larger_than_the_socket_buffer_arrive_whole_and_in_order(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    channel = Channel(near, ignore)
    payloads = [bytes([i]) * size for i, size in enumerate((10, 3 * MIB, 0, 200_000, 1, 2 * MIB))]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.flush)
        for call_id, payload in enumerate(payloads):
            channel.send(encode_ipc(Embed(id=call_id), payload))
        with trio.fail_after(DEADLINE_S):
            assert await read_frames(far, len(payloads)) == list(enumerate(payloads))
        nursery.cancel_scope.cancel()


async def test_a_full_backlog_makes_callers_wait_until_the_worker_reads(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "BACKLOG_BYTES_MAX", MIB)
    near, far = pair
    channel = Channel(near, ignore)
    there_is_room = trio.Event()

    async def wait_for_room() -> None:
        await channel.room()
        there_is_room.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.flush)
        channel.send(encode_ipc(Embed(id=1), bytes(4 * MIB)))
        nursery.start_soon(wait_for_room)
        await trio.testing.wait_all_tasks_blocked()
        assert not there_is_room.is_set()
        with trio.fail_after(DEADLINE_S):
            await read_frames(far, 1)
            await there_is_room.wait()
        nursery.cancel_scope.cancel()


async def test_nobody_waits_for_room_in_a_channel_that_is_given_up(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "BACKLOG_BYTES_MAX", MIB)
    channel = Channel(pair[0], ignore)
    channel.send(encode_ipc(Embed(id=1), bytes(4 * MIB)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(channel.room)
        await trio.testing.wait_all_tasks_blocked()
        channel.abandon()
        nursery.cancel_scope.deadline = trio.current_time() + DEADLINE_S
    assert not nursery.cancel_scope.cancelled_caught


async def test_messages_before_the_end_are_delivered(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    received: list[tuple[AnyWorkerMessage, bytes]] = []
    channel = Channel(near, lambda message, payload: received.append((message, bytes(payload))))
    token = Token(id=3, request_id="r", index=0, token=5)
    far.send(b"".join([*encode_ipc(token, b"five"), *encode_ipc(Done(id=4))]))
    far.close()
    with pytest.raises(ChannelClosed) as caught, trio.fail_after(DEADLINE_S):
        await channel.receive()
    assert str(caught.value) == ""
    assert received == [(token, b"five"), (Done(id=4), b"")]


@pytest.mark.parametrize(
    ("sent", "complaint"),
    [
        (b"\xff\xff\xff\xff", "header: 4294967295 bytes"),
        (b"\2\0\0\0{}\xff\xff\xff\xff", "payload: 4294967295 bytes"),
        (b"\2\0\0\0{}\0\0\0\0", "type"),
        (b"\2\0\0\0{}\0\0", "stream ended"),
    ],
)
async def test_broken_frames_end_the_connection_with_the_reason(
    pair: tuple[socket.socket, socket.socket], sent: bytes, complaint: str
) -> None:
    near, far = pair
    far.send(sent)
    far.close()
    with pytest.raises(ChannelClosed, match=complaint), trio.fail_after(DEADLINE_S):
        await Channel(near, ignore).receive()


async def test_writing_to_a_worker_that_is_gone_is_no_error_of_the_writer(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    channel = Channel(near, ignore)
    far.close()
    channel.send(encode_ipc(Embed(id=1)))
    channel.send(encode_ipc(Embed(id=2)))
    with pytest.raises(ChannelClosed), trio.fail_after(DEADLINE_S):
        await channel.flush()
