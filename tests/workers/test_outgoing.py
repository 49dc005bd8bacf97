"""What the worker sends to the daemon while the daemon does not read."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from node_ids import A

from swarmllm_proto import ipc
from swarmllm_proto.codec import encode_ipc
from swarmllm_proto.frames import FrameDecoder
from swarmllm_proto.tensors import encode_tensor
from swarmllm_workers.server.loop import UNWRITTEN_MAX, OutgoingFrames

from .client import DEADLINE_S
from .conftest import MakeModel, StartWorker
from .ring_of_two import SECRET

MIB = 2**20


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def drain(sending: OutgoingFrames, receiving: socket.socket) -> bytes:
    received = bytearray()
    while True:
        sending.write()
        try:
            received += receiving.recv(MIB, socket.MSG_DONTWAIT)
        except BlockingIOError:
            if not sending.n_bytes:
                return bytes(received)


def test_what_waits_arrives_in_order_and_as_it_was_when_it_was_sent(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    outgoing = OutgoingFrames(pair[0])
    expected = b""
    rng = np.random.default_rng(0)
    for n in range(200):
        rows = rng.integers(0, 256, 10_000 + n, np.uint8)
        expected += b"head" + rows.tobytes()
        outgoing.send([b"head", b"", rows.data])
        rows[:] = 0  # the next step overwrites its results
    assert outgoing.n_bytes > 0
    assert drain(outgoing, pair[1]) == expected
    assert outgoing.n_bytes == 0


def test_what_waits_is_copied_once(pair: tuple[socket.socket, socket.socket]) -> None:
    outgoing = OutgoingFrames(pair[0])
    outgoing.send([np.zeros(8 * MIB, np.uint8).data])
    waiting = [id(piece.obj) for piece in outgoing._pieces]
    for _ in range(100):
        outgoing.send([b"small", np.ones(3, np.uint8).data])
    assert [id(piece.obj) for piece in outgoing._pieces][: len(waiting)] == waiting
    copies = [piece.obj for piece in outgoing._pieces]
    assert all(isinstance(copy, bytes) for copy in copies)


def test_what_nobody_changes_is_not_copied_at_all(pair: tuple[socket.socket, socket.socket]) -> None:
    outgoing = OutgoingFrames(pair[0])
    rows = np.zeros(8 * MIB, np.uint8)
    outgoing.send([b"head", rows.data.toreadonly()])
    assert outgoing._pieces[-1].obj is rows


def test_a_worker_whose_answers_nobody_takes_reads_no_further_calls(
    start_worker: StartWorker, make_model: MakeModel
) -> None:
    worker = start_worker()
    worker.open(make_model("llama"))
    tokens = b"".join(encode_tensor(np.zeros(30_000, np.int32)))
    call = b"".join(encode_ipc(ipc.Embed(id=1), tokens))  # 117 KiB, and 7.3 MiB of rows come back
    n_calls, n_sent = 4 * UNWRITTEN_MAX // (30_000 * 64 * 4), 0
    unsent = memoryview(call * n_calls)
    worker.socket.setblocking(False)
    while n_sent < len(unsent) and select.select([], [worker.socket], [], 1.0)[1]:
        n_sent += worker.socket.send(unsent[n_sent:])
    assert n_sent < len(unsent), "every call was read"
    n_answers, decoder = 0, FrameDecoder()
    while n_answers < n_calls:
        can_read, can_write, _ = select.select(
            [worker.socket], [worker.socket] if n_sent < len(unsent) else [], [], DEADLINE_S
        )
        assert can_read or can_write
        if can_write:
            n_sent += worker.socket.send(unsent[n_sent:])
        if can_read:
            n_answers += len(decoder.feed(worker.socket.recv(MIB)))
    worker.socket.settimeout(DEADLINE_S)


def test_what_came_with_a_refused_message_is_not_given_to_the_next(start_worker: StartWorker) -> None:
    worker = start_worker()
    before = n_descriptors(worker.process.pid)
    wrong, wrong_end = socket.socketpair()
    refused = b"".join(encode_ipc(ipc.TakeLink(id=1, peer=A, direction="sideways"), SECRET))  # type: ignore[arg-type]
    socket.send_fds(worker.socket, [refused], [wrong_end.fileno()])
    assert worker.receive(ipc.Error).kind == "bad_message"
    wrong_end.close()
    wrong.settimeout(DEADLINE_S)
    assert wrong.recv(1) == b""  # nobody has the other end any more
    right, right_end = socket.socketpair()
    link = b"".join(encode_ipc(ipc.TakeLink(id=2, peer=A, direction="sending"), SECRET))
    socket.send_fds(worker.socket, [link], [right_end.fileno()])
    worker.receive(ipc.Done)
    right_end.close()
    worker.call(ipc.CloseLinks, peer=A)
    right.settimeout(DEADLINE_S)
    assert right.recv(1) == b""  # the link that was closed is the one that was given
    assert n_descriptors(worker.process.pid) == before
    wrong.close()
    right.close()


def n_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
