"""Reads and writes gossip many messages at a time, where there are many.

Where a hundred nodes start together, each hears a hundred statements some times over within seconds. The
library sends each message as a frame of its own, and drops what is more than thirty-two of them for one peer;
it reads the length of each from the stream byte by byte, and makes a task for each. That was half of all that
such a swarm did. Here what waits for a peer goes out together, and what has come is worked off by the task
that reads it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio
from google.protobuf.message import DecodeError
from libp2p.exceptions import ParseError
from libp2p.pubsub.pb import rpc_pb2
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from swarmllm.log_filter import provoked_by

log = logging.getLogger(__name__)

QUEUE_MAX: Final = 128
"""Messages that wait for one peer, of the library's 32."""
BATCH_MAX_BYTES: Final = 128 * 1024
"""Half of what a stream carries before the other end has read anything. A larger message goes alone."""
PAUSE_S: Final = 0.05
"""Between two batches for a peer: what comes meanwhile goes together. A message that follows no other waits
for nothing."""
READ_BYTES: Final = 16 * 1024


class ReadAhead:
    """Reads from a stream as much as has come, and gives as little as it is asked for."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._unread = b""

    async def read(self, n: int | None = None) -> bytes:
        if not self._unread:
            self._unread = bytes(await self._stream.read(READ_BYTES))
        piece = self._unread[:n]
        self._unread = self._unread[len(piece) :]
        return piece


async def read_rpc(ahead: ReadAhead, size_max: int) -> rpc_pb2.RPC:
    """The next one. Raises ParseError, and what libp2p raises for a stream that ended or was reset."""
    received = await read_varint_prefixed_bytes_limited(ahead, size_max)
    rpc = rpc_pb2.RPC()
    try:
        rpc.ParseFromString(received)
    except DecodeError as error:
        raise ParseError("gossip is no RPC") from error
    return rpc


async def send_batches(queue: Any, write: Callable[[rpc_pb2.RPC], Awaitable[bool]]) -> None:
    """Until the queue is closed, or `write` says that the stream is."""
    queue._queue.max_size = QUEUE_MAX
    next_at_s = -math.inf
    while (rpc := await queue.pop()) is not None:
        # Only what follows another waits: in a quiet swarm a pause after each batch would be a wake-up each.
        if trio.current_time() < next_at_s:
            await trio.sleep_until(next_at_s)
        held_back = _merge_what_waits(queue, rpc)
        if not await write(rpc) or (held_back is not None and not await write(held_back)):
            return
        next_at_s = trio.current_time() + PAUSE_S


def _merge_what_waits(queue: Any, rpc: rpc_pb2.RPC) -> rpc_pb2.RPC | None:
    """What is too large for the same batch."""
    n_bytes = rpc.ByteSize()
    while len(queue):
        another: rpc_pb2.RPC = queue._queue.pop()
        n_bytes += another.ByteSize()
        if n_bytes > BATCH_MAX_BYTES:
            return another
        rpc.MergeFrom(another)
    return None


def note_failure(peer: str, error: Exception) -> None:
    """Of one message: those after it are read all the same."""
    provoked_by(log, peer).warning("a message of gossip failed: %s", type(error).__name__)
