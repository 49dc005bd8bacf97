"""What the in-memory network adds to the contract: time, distance and accidents."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from swarmllm.errors import DeadlineExceeded, NodeUnreachable
from swarmllm.swarm.in_memory.link import MESSAGES_MAX, LinkQuality
from swarmllm.swarm.in_memory.network import InMemoryNetwork


async def refuse(sender: str, body: bytes) -> bytes:
    raise AssertionError


async def ignore(sender: str, header: bytes, payload: memoryview) -> None: ...


async def test_a_message_takes_as_long_as_its_link_says(autojump_clock: MockClock) -> None:
    async with InMemoryNetwork(LinkQuality(latency_s=0.05, bytes_per_s=1000.0)) as network:
        a, b = network.add("a"), network.add("b")
        arrivals_s: list[float] = []

        async def note(sender: str, header: bytes, payload: memoryview) -> None:
            arrivals_s.append(trio.current_time())

        b.serve(refuse, note)
        started_s = trio.current_time()
        for _ in range(3):
            await a.send("b", b"", bytes(100))
        await trio.sleep(10)
        assert [s - started_s for s in arrivals_s] == pytest.approx([0.15, 0.25, 0.35])


async def test_a_request_takes_a_round_trip(autojump_clock: MockClock) -> None:
    async with InMemoryNetwork() as network:
        a, b = network.add("a"), network.add("b")
        network.set_link("a", "b", LinkQuality(latency_s=0.2))

        async def answer(sender: str, body: bytes) -> bytes:
            return body

        b.serve(answer, ignore)
        started_s = trio.current_time()
        assert await a.request("b", b"x") == b"x"
        assert trio.current_time() - started_s == pytest.approx(0.4)
        with pytest.raises(DeadlineExceeded):
            await a.request("b", b"x", timeout_s=0.3)


async def test_a_cut_link_separates_two_nodes_and_nobody_else(autojump_clock: MockClock) -> None:
    async with InMemoryNetwork() as network:
        a, b, c = (network.add(name) for name in "abc")
        network.cut("a", "b")
        assert a.connected() == {"c"}
        assert b.connected() == {"c"}
        assert c.connected() == {"a", "b"}
        with pytest.raises(NodeUnreachable):
            await a.send("b", b"")
        with pytest.raises(NodeUnreachable):
            await a.request("b", b"")
        await a.send("c", b"")


async def test_records_go_round_a_cut_and_cross_it_when_it_heals(autojump_clock: MockClock) -> None:
    async with InMemoryNetwork(LinkQuality(latency_s=0.1)) as network:
        a, b, c = (network.add(name) for name in "abc")
        network.cut("a", "b")
        await a.publish(b"round by c")
        await trio.sleep(1)
        assert b.records()["a"] == b"round by c"
        network.cut("a", "c")
        await a.publish(b"alone")
        await trio.sleep(1)
        assert b.records()["a"] == c.records()["a"] == b"round by c"
        network.heal("a", "b")
        await trio.sleep(1)
        assert b.records()["a"] == c.records()["a"] == b"alone"
        assert a.connected() == {"b"}


async def test_what_is_under_way_is_lost_with_the_link(autojump_clock: MockClock) -> None:
    async with InMemoryNetwork(LinkQuality(latency_s=1.0)) as network:
        a, b = network.add("a"), network.add("b")
        arrived: list[bytes] = []

        async def note(sender: str, header: bytes, payload: memoryview) -> None:
            arrived.append(header)

        b.serve(refuse, note)
        await a.send("b", b"lost")
        network.cut("a", "b")
        network.heal("a", "b")
        await a.send("b", b"after")
        await trio.sleep(5)
        assert arrived == [b"after"]


async def test_a_sender_that_waits_learns_of_the_cut(autojump_clock: MockClock) -> None:
    async with InMemoryNetwork(LinkQuality(latency_s=100.0)) as network, trio.open_nursery() as nursery:
        a = network.add("a")
        network.add("b")
        failures = 0

        async def send() -> None:
            nonlocal failures
            try:
                await a.send("b", b"")
            except NodeUnreachable:
                failures += 1

        for _ in range(MESSAGES_MAX + 10):
            nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        network.cut("a", "b")
        await trio.testing.wait_all_tasks_blocked()
        # One message has left the channel and is on its way; the channel holds its fill; the others wait.
        assert failures == 10 - 1


async def test_a_killed_nodes_handlers_stop_where_they_are(autojump_clock: MockClock) -> None:
    async with InMemoryNetwork() as network:
        a, b = network.add("a"), network.add("b")
        finished = False

        async def slow(sender: str, header: bytes, payload: memoryview) -> None:
            nonlocal finished
            await trio.sleep(1)
            finished = True

        b.serve(refuse, slow)
        await a.send("b", b"")
        await trio.testing.wait_all_tasks_blocked()
        network.kill("b")
        await trio.sleep(5)
        assert not finished
        with pytest.raises(NodeUnreachable):
            await b.send("a", b"")


async def test_three_hundred_nodes_see_each_others_records(autojump_clock: MockClock) -> None:
    async with InMemoryNetwork() as network:
        routers = [network.add(f"node {number}") for number in range(300)]
        for router in routers[:20]:
            await router.publish(router.node_id.encode())
        for router in routers:
            assert len(router.records()) == 20
            assert len(router.connected()) == 299


async def test_what_is_lost_on_the_way_comes_later_and_holds_up_what_is_behind(
    autojump_clock: MockClock,
) -> None:
    async with InMemoryNetwork(LinkQuality(latency_s=0.05, loss=0.1), seed=3) as network:
        a, b = network.add("a"), network.add("b")
        arrivals: list[tuple[bytes, float]] = []

        async def note(sender: str, header: bytes, payload: memoryview) -> None:
            arrivals.append((header, trio.current_time()))

        async def answer(sender: str, body: bytes) -> bytes:
            return body

        b.serve(answer, note)
        sent_s: list[float] = []
        for number in range(40):
            sent_s.append(trio.current_time())
            await a.send("b", b"%d" % number)
            await trio.sleep(0.01)
        await trio.sleep(1)
        assert [header for header, _ in arrivals] == [b"%d" % number for number in range(40)]
        waits_s = [arrived - sent for (_, arrived), sent in zip(arrivals, sent_s, strict=True)]
        assert min(waits_s) == pytest.approx(0.05)
        assert max(waits_s) == pytest.approx(0.15)
        assert len({round(wait, 3) for wait in waits_s}) > 2
        durations_s = set()
        for _ in range(30):
            started_s = trio.current_time()
            assert await a.request("b", b"x") == b"x"
            durations_s.add(round(trio.current_time() - started_s, 3))
        assert durations_s == {0.1, 0.2}
