"""What every Router promises of messages, proven for each implementation with the same tests."""

from __future__ import annotations

import random

import pytest
import trio

from swarmllm_proto.limits import SWARM_HEADER_MAX

from .conftest import DEADLINE_S, Swarm
from .handlers import HeldInbox, Inbox, no_request, pair


async def test_messages_of_many_sizes_arrive_whole_and_in_order(swarm: Swarm) -> None:
    a, b = await pair(swarm)
    inbox = Inbox()
    b.serve(no_request, inbox)
    source = random.Random(3)
    sizes = [0, 1, 100, 14_336, 65_519, 65_520, 70_000, 262_144, 262_145, 1_000_000, 8 * 1024 * 1024, 0, 3]
    sent = [(b"header %d" % n, source.randbytes(size)) for n, size in enumerate(sizes)]
    sent.append((source.randbytes(SWARM_HEADER_MAX), b"after the largest header"))
    sent.append((b"", b""))
    for header, payload in sent:
        await a.send(b.node_id, header, memoryview(payload))
    await inbox.wait_for(len(sent))
    assert [(header, payload) for _, header, payload in inbox.messages] == sent
    assert {sender for sender, _, _ in inbox.messages} == {a.node_id}


async def test_messages_sent_at_once_by_many_tasks_arrive_whole(swarm: Swarm) -> None:
    a, b = await pair(swarm)
    inbox = Inbox()
    b.serve(no_request, inbox)
    async with trio.open_nursery() as nursery:
        for number in range(64):
            nursery.start_soon(a.send, b.node_id, b"%d" % number, bytes([number]) * (number * 9_999))
    await inbox.wait_for(64)
    assert {header: payload for _, header, payload in inbox.messages} == {
        b"%d" % number: bytes([number]) * (number * 9_999) for number in range(64)
    }


async def test_a_buffer_may_be_reused_when_send_has_returned(swarm: Swarm) -> None:
    a, b = await pair(swarm)
    inbox = Inbox()
    b.serve(no_request, inbox)
    buffer = bytearray(300_000)
    for number in range(6):
        buffer[:] = bytes([number]) * len(buffer)
        await a.send(b.node_id, b"", memoryview(buffer))
    await inbox.wait_for(6)
    assert [set(payload) for _, _, payload in inbox.messages] == [{number} for number in range(6)]


async def test_a_message_to_oneself_is_delivered(swarm: Swarm) -> None:
    a = await swarm.start("a")
    inbox = Inbox()
    a.serve(no_request, inbox)
    for number in range(3):
        await a.send(a.node_id, b"%d" % number, b"payload")
    await inbox.wait_for(3)
    assert inbox.messages == [(a.node_id, b"%d" % number, b"payload") for number in range(3)]


async def test_handlers_may_send_while_they_handle(swarm: Swarm) -> None:
    a, b = await pair(swarm)
    inbox = Inbox()

    async def echo(sender: str, header: bytes, payload: memoryview) -> None:
        await b.send(sender, header + b" back", payload)

    a.serve(no_request, inbox)
    b.serve(no_request, echo)
    for number in range(20):
        await a.send(b.node_id, b"%d" % number, bytes(14_336))
    await inbox.wait_for(20)
    assert [header for _, header, _ in inbox.messages] == [b"%d back" % number for number in range(20)]


async def test_a_failing_message_handler_does_not_stop_the_next_message(swarm: Swarm) -> None:
    a, b = await pair(swarm)
    inbox = Inbox()

    async def handle(sender: str, header: bytes, payload: memoryview) -> None:
        if header == b"bad":
            raise KeyError("what a handler does not expect")
        await inbox(sender, header, payload)

    b.serve(no_request, handle)
    await a.send(b.node_id, b"bad")
    await a.send(b.node_id, b"good")
    await inbox.wait_for(1)
    assert inbox.messages == [(a.node_id, b"good", b"")]


async def test_a_sender_waits_for_a_slow_reader_and_nothing_is_lost(swarm: Swarm) -> None:
    a, b = await pair(swarm)
    inbox = HeldInbox()
    b.serve(no_request, inbox)
    n_messages = 40
    n_sent = 0

    async def send_all() -> None:
        nonlocal n_sent
        for number in range(n_messages):
            await a.send(b.node_id, b"%d" % number, bytes(1024 * 1024))
            n_sent += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_all)
        with trio.move_on_after(0.5):
            await inbox.wait_for(1)
        assert n_sent < n_messages
        assert a.connected() == {b.node_id}
        inbox.released.set()
    await inbox.wait_for(n_messages)
    assert [header for _, header, _ in inbox.messages] == [b"%d" % number for number in range(n_messages)]


async def test_a_cancelled_send_leaves_the_stream_in_order(swarm: Swarm) -> None:
    a, b = await pair(swarm)
    inbox = HeldInbox()
    b.serve(no_request, inbox)
    for number in range(40):
        with trio.move_on_after(0.02):
            await a.send(b.node_id, b"%d" % number, bytes([number]) * 1024 * 1024)
    inbox.released.set()
    await a.send(b.node_id, b"last", b"after all the cancelled ones")
    with trio.fail_after(DEADLINE_S):
        while not inbox.messages or inbox.messages[-1][1] != b"last":
            await inbox.wait_for(len(inbox.messages) + 1)
    numbers = [int(header) for _, header, _ in inbox.messages[:-1]]
    assert numbers == sorted(set(numbers))
    for _, header, payload in inbox.messages[:-1]:
        assert payload == bytes([int(header)]) * 1024 * 1024


async def test_an_oversize_header_is_refused_at_the_sender(swarm: Swarm) -> None:
    a, b = await pair(swarm)
    inbox = Inbox()
    b.serve(no_request, inbox)
    with pytest.raises(ValueError, match="header"):
        await a.send(b.node_id, bytes(SWARM_HEADER_MAX + 1))
    await a.send(b.node_id, b"still works")
    await inbox.wait_for(1)
