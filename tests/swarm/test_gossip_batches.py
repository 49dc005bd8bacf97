"""Messages of gossip that go together, and how they are told apart again."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from libp2p.exceptions import ParseError
from libp2p.io.exceptions import MessageTooLarge
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.rpc_queue import RpcQueue
from libp2p.utils import encode_varint_prefixed
from trio.testing import MockClock

from swarmllm.swarm.libp2p.gossip_batches import (
    BATCH_MAX_BYTES,
    PAUSE_S,
    QUEUE_MAX,
    ReadAhead,
    read_rpc,
    send_batches,
)


def message(data: bytes) -> rpc_pb2.RPC:
    return rpc_pb2.RPC(publish=[rpc_pb2.Message(data=data, topicIDs=["t"])])


class Sent:
    """What is written to one peer, and when."""

    def __init__(self, *, n_before_it_ends: int = 1000) -> None:
        self.batches: list[list[bytes]] = []
        self.at_s: list[float] = []
        self._n_left = n_before_it_ends

    async def write(self, rpc: rpc_pb2.RPC) -> bool:
        self.batches.append([each.data for each in rpc.publish])
        self.at_s.append(trio.current_time())
        self._n_left -= 1
        await trio.lowlevel.checkpoint()
        return self._n_left > 0


async def test_what_waits_for_a_peer_goes_together_and_in_order(autojump_clock: MockClock) -> None:
    queue, sent = RpcQueue(), Sent()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_batches, queue, sent.write)
        await trio.testing.wait_all_tasks_blocked()
        queue.push(message(b"alone"))
        await trio.testing.wait_all_tasks_blocked()
        texts = [b"%d" % number for number in range(QUEUE_MAX)]
        assert all(queue.push(message(text)) for text in texts)
        assert not queue.push(message(b"one too many"))
        await trio.sleep(2 * PAUSE_S)
        queue.close()
    assert sent.batches == [[b"alone"], texts]
    assert sent.at_s[1] - sent.at_s[0] >= PAUSE_S


async def test_control_messages_of_several_go_together_too(autojump_clock: MockClock) -> None:
    queue = RpcQueue()
    written: list[rpc_pb2.RPC] = []

    async def write(rpc: rpc_pb2.RPC) -> bool:
        await trio.lowlevel.checkpoint()
        written.append(rpc)
        return False

    for topic in ("a", "b"):
        graft = rpc_pb2.ControlMessage(graft=[rpc_pb2.ControlGraft(topicID=topic)])
        queue.push(rpc_pb2.RPC(control=graft), priority=True)
    await send_batches(queue, write)
    (together,) = written
    assert [each.topicID for each in together.control.graft] == ["a", "b"]


async def test_a_batch_is_bounded_and_what_is_too_large_for_it_comes_next(autojump_clock: MockClock) -> None:
    queue, sent = RpcQueue(), Sent(n_before_it_ends=3)
    half = bytes(BATCH_MAX_BYTES // 2)
    for data in (b"first", half, half + b"!", b"last"):
        queue.push(message(data))
    queue.push(message(b"never"))
    await send_batches(queue, sent.write)
    assert sent.batches[:2] == [[b"first", half], [half + b"!"]]
    assert sent.batches[2] == [b"last", b"never"]
    queue.close()


class Pieces:
    """A stream whose bytes come in pieces of so many."""

    def __init__(self, content: bytes, size: int) -> None:
        self._content, self._size = content, size
        self.n_reads = 0

    async def read(self, n: int | None = None) -> bytes:
        await trio.lowlevel.checkpoint()
        self.n_reads += 1
        most = self._size if n is None else min(n, self._size)
        piece, self._content = self._content[:most], self._content[most:]
        return piece


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_messages_are_told_apart_however_their_bytes_come(size: int) -> None:
    texts = [b"a", b"", b"b" * 300, b"c" * 40_000]
    stream: Any = Pieces(
        b"".join(encode_varint_prefixed(message(text).SerializeToString()) for text in texts), size
    )
    ahead = ReadAhead(stream)
    assert [(await read_rpc(ahead, 50_000)).publish[0].data for _ in texts] == texts
    if size == 100_000:
        assert stream.n_reads <= 4


async def test_what_is_too_large_or_no_rpc_is_refused() -> None:
    large: Any = Pieces(encode_varint_prefixed(bytes(101)), 1000)
    with pytest.raises(MessageTooLarge):
        await read_rpc(ReadAhead(large), 100)
    nonsense: Any = Pieces(encode_varint_prefixed(b"\xff" * 9), 1000)
    with pytest.raises(ParseError):
        await read_rpc(ReadAhead(nonsense), 100)
