"""What comes of addresses: from which source, how long they are tried, and for whom."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import trio
from node_ids import A, B, C
from trio.testing import MockClock

from swarmllm.errors import DeadlineExceeded, InvalidRequest, NodeUnreachable
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.discovery.address_sources import (
    _RESOLVE_AGAIN_S,
    _RESOLVE_RETRY_S,
    REMEMBERED_FAILURES_MAX,
    SUGGESTED_FAILURES_MAX,
    AddressSources,
    usable,
)
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.dialler import ADDRESSES_PER_NODE, DialCandidate, Dialler
from swarmllm.swarm.peers.connection_limits import Standing
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.router import Change
from swarmllm_proto.envelope import Envelope
from swarmllm_proto.identifiers import NodeId

TEXT = "/ip4/192.0.2.1/tcp/8810"
HERE = Address("192.0.2.1", 8810)


class AdmitAll:
    """But one."""

    def lets_in(self, node_id: NodeId) -> bool:
        return node_id != C

    def standing(self, node_id: NodeId) -> Standing:
        return Standing.STRANGER


class Node:
    """One whose dials succeed when the test says so."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.node_id = B
        self.candidates: Parts[DialCandidate] = Parts.alone()
        self.dialler = Dialler(B, random.Random(0), peers=self.candidates)
        self.feed = ChangeFeed()
        self.counted: set[NodeId] = set()
        self.dialled: list[tuple[NodeId, list[Address]]] = []
        self.answers = True
        host: Any = self
        self.sources = AddressSources(host, nursery, self.dialler, AdmitAll())

    def connected(self) -> set[NodeId]:
        return self.counted

    async def dial(self, node_id: NodeId, addresses: list[Address]) -> None:
        self.dialled.append((node_id, addresses))
        if not self.answers:
            raise NodeUnreachable("nothing answers")
        # It counts a moment later, once records have been exchanged.
        await trio.sleep(1.0)
        self.feed.announce(Change("record", A))
        await trio.sleep(1.0)
        self.counted.add(node_id)
        self.feed.announce(Change("connected", node_id))

    def max_failures(self, node_id: NodeId) -> float | None:
        found = self.candidates.get(node_id)
        return None if found is None else found.max_failures

    async def meet(self, node_id: NodeId, addresses: list[Address], timeout_s: float) -> NodeId:
        return await self.sources.meet(self.feed, self.connected, node_id, addresses, timeout_s)


@asynccontextmanager
async def node() -> AsyncIterator[Node]:
    async with trio.open_nursery() as nursery:
        yield Node(nursery)
        nursery.cancel_scope.cancel()


async def test_what_nothing_proves_is_tried_for_less_long() -> None:
    async with node() as it:
        it.sources.add_suggested(A, [HERE])
        assert it.max_failures(A) == SUGGESTED_FAILURES_MAX
    async with node() as it:
        it.sources.remembered([(A, (TEXT,))])
        assert it.max_failures(A) == REMEMBERED_FAILURES_MAX
    async with node() as it:
        it.sources.found_by_mdns(A, [HERE])
        assert it.max_failures(A) == float("inf")


async def test_hearsay_without_an_address_is_nothing() -> None:
    async with node() as it:
        it.sources.add_suggested(A, [])
        assert it.max_failures(A) is None


async def test_who_is_not_let_in_is_not_looked_for() -> None:
    async with node() as it:
        it.sources.add_suggested(C, [HERE])
        it.sources.found_by_mdns(C, [HERE])
        it.sources.remembered([(C, (TEXT,))])
        assert it.max_failures(C) is None
        with pytest.raises(NodeUnreachable, match="not let in"):
            await it.meet(C, [HERE], 5.0)
        assert it.dialled == []


async def test_the_addresses_in_a_record_are_those_that_can_be_dialled() -> None:
    async with node() as it:
        record = Envelope(node_id=A, started_at_ms=1, sequence=1, addresses=(TEXT, "/dns4/example.org/tcp/1"))
        it.sources.heard(record)
        found = it.candidates.get(A)
        assert found is not None
        assert found.addresses == [HERE]
    assert usable(["nonsense", TEXT]) == [HERE]


async def test_meeting_a_node_returns_once_it_counts(autojump_clock: MockClock) -> None:
    async with node() as it:
        began_s = trio.current_time()
        many = [Address("192.0.2.1", port) for port in range(1, ADDRESSES_PER_NODE + 2)]
        assert await it.meet(A, many, 5.0) == A
        assert trio.current_time() - began_s == pytest.approx(2.0)
        assert it.dialled == [(A, many[:ADDRESSES_PER_NODE])]
        assert it.max_failures(A) == SUGGESTED_FAILURES_MAX
        assert await it.sources.connect(f"{TEXT}/p2p/{A}", it.feed, it.connected, 5.0) == A
        assert it.dialled[1] == (A, [HERE])


async def test_meeting_oneself_takes_no_dial() -> None:
    async with node() as it:
        assert await it.meet(B, [HERE], 5.0) == B
        assert it.dialled == []


async def test_meeting_a_node_fails_as_its_dial_does_or_when_the_time_is_over(
    autojump_clock: MockClock,
) -> None:
    async with node() as it:
        with pytest.raises(DeadlineExceeded, match=r"within 1\.5 s"):
            await it.meet(A, [HERE], 1.5)
        await trio.sleep(1.0)
        assert it.counted == {A}, "its dial went on"
        it.answers = False
        with pytest.raises(NodeUnreachable, match="nothing answers"):
            await it.meet(NodeId("d"), [HERE], 5.0)
        with pytest.raises(InvalidRequest):
            await it.sources.connect("nonsense", it.feed, it.connected, 5.0)


async def test_a_name_that_does_not_resolve_is_tried_again_sooner(autojump_clock: MockClock) -> None:
    resolved_at_s: list[float] = []

    class Name:
        """Resolves from the third time on."""

        host = "there.invalid"
        node_id = A

        async def resolve(self) -> list[Address]:
            resolved_at_s.append(trio.current_time())
            return [HERE] if len(resolved_at_s) > 2 else []

    async with node() as it:
        where: Any = Name()
        it.sources.begin([where], it.dial)
        await trio.sleep(2.5 * _RESOLVE_RETRY_S)
        found = it.candidates.get(A)
        assert found is not None
        assert found.is_permanent, "the settings name it"
        await trio.sleep(2 * _RESOLVE_AGAIN_S)
    waits_s = [b - a for a, b in pairwise(resolved_at_s)]
    assert waits_s == pytest.approx([_RESOLVE_RETRY_S] * 2 + [_RESOLVE_AGAIN_S] * 2)
    assert it.dialled, "the dialler runs"
