"""What every Router promises, proven for each implementation with the same tests."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from swarmllm.errors import DeadlineExceeded, InvalidRequest, NodeUnreachable, RemoteError
from swarmllm_proto.limits import RECORD_MAX, REQUEST_MAX

from .conftest import DEADLINE_S, Swarm, meet, until
from .handlers import Inbox, no_message, no_request, pair


async def test_every_node_sees_every_record_and_all_are_connected(swarm: Swarm) -> None:
    before_s = trio.current_time()
    routers = [await swarm.start(name) for name in ("a", "b", "c")]
    for index, router in enumerate(routers):
        await router.publish(b"record %d" % index)
    await meet(*routers)
    expected = {router.node_id: b"record %d" % index for index, router in enumerate(routers)}
    for router in routers:
        await until(router, lambda r=router: dict(r.records()) == expected)  # type: ignore[misc]
        assert router.connected() == expected.keys() - {router.node_id}
        assert {peer.node_id for peer in router.peers()} == router.connected()
        for peer in router.peers():
            assert before_s <= peer.connected_since <= trio.current_time()


async def test_node_ids_are_unique_and_addresses_carry_them(swarm: Swarm) -> None:
    a, b = await pair(swarm)
    assert a.node_id != b.node_id
    for router in (a, b):
        assert router.addresses
        assert all(address.endswith(f"/p2p/{router.node_id}") for address in router.addresses)


async def test_a_node_writes_its_own_record_only_and_the_last_one_wins(swarm: Swarm) -> None:
    a, b = await pair(swarm)
    await a.publish(b"a's")
    for version in range(5):
        await b.publish(b"b's %d" % version)
    await until(a, lambda: a.records().get(b.node_id) == b"b's 4")
    await until(b, lambda: b.records().get(a.node_id) == b"a's")
    assert dict(a.records()) == dict(b.records()) == {a.node_id: b"a's", b.node_id: b"b's 4"}


async def test_a_late_joiner_sees_what_was_said_before_it_came(swarm: Swarm) -> None:
    a, b = await pair(swarm)
    await a.publish(b"early a")
    await b.publish(b"early b")
    await until(a, lambda: b.node_id in a.records())
    c = await swarm.start("c")
    await until(c, lambda: {a.node_id, b.node_id} <= c.records().keys())
    assert c.records()[a.node_id] == b"early a"
    assert c.records()[b.node_id] == b"early b"


async def test_whoever_counts_as_connected_has_its_record_known(swarm: Swarm) -> None:
    a = await swarm.start("a")
    await a.publish(b"known")
    b = await swarm.start("b")
    await until(b, lambda: a.node_id in b.connected())
    assert b.records()[a.node_id] == b"known"


async def test_changes_name_what_happened(swarm: Swarm) -> None:
    a = await swarm.start("a")
    async with a.changes() as changes:
        b = await swarm.start("b")
        await b.publish(b"record")
        seen = set()
        with trio.fail_after(DEADLINE_S):
            while not {("connected", b.node_id), ("record", b.node_id)} <= seen:
                change = await anext(changes)
                seen.add((change.kind, change.node_id))
        await swarm.stop("b")
        with trio.fail_after(DEADLINE_S):
            while (change := await anext(changes)).kind != "disconnected":
                pass
        assert change.node_id == b.node_id


async def test_a_record_that_is_empty_or_too_large_is_refused(swarm: Swarm) -> None:
    a = await swarm.start("a")
    for record in (b"", bytes(RECORD_MAX + 1)):
        with pytest.raises(ValueError, match="record"):
            await a.publish(record)
    await a.publish(bytes(RECORD_MAX))
    assert len(a.records()[a.node_id]) == RECORD_MAX


async def test_the_largest_record_reaches_others(swarm: Swarm) -> None:
    a, b = await pair(swarm)
    record = random.Random(1).randbytes(RECORD_MAX)
    await a.publish(record)
    await until(b, lambda: b.records().get(a.node_id) == record)


async def test_requests_are_answered_with_the_senders_id(swarm: Swarm, verb: str) -> None:
    a, b = await pair(swarm)

    async def answer(sender: str, body: bytes) -> bytes:
        return sender.encode() + b" said " + body

    b.serve(answer, no_message)
    a.serve(answer, no_message)
    assert await getattr(a, verb)(b.node_id, b"hello") == a.node_id.encode() + b" said hello"
    assert await getattr(b, verb)(a.node_id, b"") == b.node_id.encode() + b" said "
    assert await getattr(a, verb)(a.node_id, b"me") == a.node_id.encode() + b" said me"


async def test_many_requests_at_once_get_each_their_own_answer(swarm: Swarm, verb: str) -> None:
    a, b = await pair(swarm)

    async def answer(sender: str, body: bytes) -> bytes:
        return body[::-1]

    b.serve(answer, no_message)
    answers: dict[int, bytes] = {}

    async def ask(number: int) -> None:
        answers[number] = await getattr(a, verb)(b.node_id, b"%d!" % number)

    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(ask, number)
    assert answers == {number: (b"%d!" % number)[::-1] for number in range(50)}


async def test_requests_and_responses_of_the_largest_size_arrive_whole(swarm: Swarm, verb: str) -> None:
    a, b = await pair(swarm)
    body = random.Random(2).randbytes(REQUEST_MAX)

    async def answer(sender: str, received: bytes) -> bytes:
        assert received == body
        return received

    b.serve(answer, no_message)
    assert await getattr(a, verb)(b.node_id, body) == body
    with pytest.raises(ValueError, match="request"):
        await getattr(a, verb)(b.node_id, body + b"!")


async def test_a_response_that_is_too_large_is_an_error_at_the_caller(swarm: Swarm, verb: str) -> None:
    a, b = await pair(swarm)

    async def answer(sender: str, body: bytes) -> bytes:
        return bytes(REQUEST_MAX + 1)

    b.serve(answer, no_message)
    with pytest.raises(RemoteError, match="response"):
        await getattr(a, verb)(b.node_id, b"")


async def test_a_failing_handler_fails_its_request_only_without_foreign_text(swarm: Swarm, verb: str) -> None:
    a, b = await pair(swarm)

    async def answer(sender: str, body: bytes) -> bytes:
        if body == b"ours":
            raise InvalidRequest("temperature must be positive")
        if body == b"foreign":
            raise KeyError("a secret")
        return body

    b.serve(answer, no_message)
    with pytest.raises(RemoteError, match="temperature must be positive"):
        await getattr(a, verb)(b.node_id, b"ours")
    with pytest.raises(RemoteError, match="KeyError") as refused:
        await getattr(a, verb)(b.node_id, b"foreign")
    assert "secret" not in refused.value.message
    assert await getattr(a, verb)(b.node_id, b"fine") == b"fine"


async def test_before_anything_is_served_requests_and_messages_find_nobody(swarm: Swarm, verb: str) -> None:
    a, b = await pair(swarm)
    with pytest.raises(RemoteError):
        await getattr(a, verb)(b.node_id, b"hello")
    await a.send(b.node_id, b"lost")
    await trio.testing.wait_all_tasks_blocked(0.05)
    inbox = Inbox()
    b.serve(no_request, inbox)
    await a.send(b.node_id, b"kept")
    await inbox.wait_for(1)
    assert inbox.messages == [(a.node_id, b"kept", b"")]


async def test_an_answer_that_is_late_fails_and_later_ones_come(swarm: Swarm, verb: str) -> None:
    a, b = await pair(swarm)
    released = trio.Event()

    async def answer(sender: str, body: bytes) -> bytes:
        if body == b"slow":
            await released.wait()
        return body

    b.serve(answer, no_message)
    with pytest.raises(DeadlineExceeded):
        await getattr(a, verb)(b.node_id, b"slow", timeout_s=0.2)
    assert await getattr(a, verb)(b.node_id, b"fast") == b"fast"
    released.set()


async def test_unknown_nodes_are_unreachable(swarm: Swarm, verb: str) -> None:
    a = await swarm.start("a")
    nobody = "12D3KooWGRUaF8WMKwFDBR5rXKZVWtVrZ9bVHfPXcJ6FvD1fRkfg"
    with pytest.raises(NodeUnreachable):
        await getattr(a, verb)(nobody, b"")
    with pytest.raises(NodeUnreachable):
        await a.send(nobody, b"")


async def test_who_leaves_is_disconnected_and_fails_what_waits_for_it(swarm: Swarm, verb: str) -> None:
    a, b = await pair(swarm)
    asked = trio.Event()

    async def never(sender: str, body: bytes) -> bytes:
        asked.set()
        await trio.sleep_forever()
        raise AssertionError

    b.serve(never, no_message)
    failures: list[NodeUnreachable] = []

    async def ask() -> None:
        with pytest.raises(NodeUnreachable) as failure:
            await getattr(a, verb)(b.node_id, b"", timeout_s=60)
        failures.append(failure.value)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await asked.wait()
        await swarm.stop("b")
        await until(a, lambda: not a.connected())
    assert len(failures) == 1
    with pytest.raises(NodeUnreachable):
        await a.send(b.node_id, b"")
    with pytest.raises(NodeUnreachable):
        await getattr(a, verb)(b.node_id, b"")


async def test_a_node_that_comes_back_is_the_same_node_with_its_newest_record(swarm: Swarm) -> None:
    a, b = await pair(swarm)
    await b.publish(b"first life")
    await b.publish(b"first life, again")
    await until(a, lambda: a.records().get(b.node_id) == b"first life, again")
    await swarm.stop("b")
    await until(a, lambda: not a.connected())
    again = await swarm.start("b")
    assert again.node_id == b.node_id
    await again.publish(b"second life")
    await meet(a, again)
    await until(a, lambda: a.records()[b.node_id] == b"second life")
    inbox = Inbox()
    again.serve(no_request, inbox)
    await a.send(again.node_id, b"welcome back")
    await inbox.wait_for(1)


async def test_connecting_by_address_gives_the_node_id(swarm: Swarm) -> None:
    a, b = await pair(swarm)
    assert await a.connect(b.addresses[0]) == b.node_id
    assert await a.connect(a.addresses[0]) == a.node_id
