"""The exchange of one request and its answer, from both ends, over memory."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from node_ids import A, B
from trio.testing import MockClock, wait_all_tasks_blocked

from swarmllm.errors import DeadlineExceeded, NodeBusy, NodeUnreachable, RemoteError
from swarmllm.swarm.byte_budget import BudgetKind, ByteBudget, Limit
from swarmllm.swarm.libp2p.negotiation import FIRST_MAX_BYTES
from swarmllm.swarm.libp2p.request_protocol import (
    _BODY_MAX,
    _RESPOND_S,
    _STUCK_S,
    EXCHANGES_PER_PEER,
    PROTOCOL,
    PeerRequests,
    RequestProtocol,
)
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.trust import TrustEvent
from swarmllm.swarm.router import RequestRefused, UnreadableRequest
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import MIB

from .memory_hosts import MemoryNetwork, MemoryStream

HEADER_BYTES = 5
TIMEOUT_S = 5.0
KIND = 7


class End:
    """One node with the protocol. What it answers is what it was sent, backwards."""

    def __init__(self, network: MemoryNetwork, node_id: NodeId, budget: ByteBudget | None = None) -> None:
        self.host = network.host(node_id)
        self.parts: Parts[PeerRequests] = Parts.alone()
        self.budget = budget or ByteBudget()
        self.events: list[tuple[NodeId, TrustEvent]] = []
        self.asked: list[tuple[NodeId, int]] = []
        self.refusal: Exception | None = None
        self.may_answer = trio.Event()
        self.may_answer.set()
        host: Any = self.host
        self.requests = RequestProtocol(
            host, network.nursery, self._answer, budget=self.budget, note=self._note, peers=self.parts
        )

    def _note(self, node_id: NodeId, event: TrustEvent, detail: str = "") -> None:
        self.events.append((node_id, event))

    async def _answer(self, sender: NodeId, kind: int, body: bytes) -> bytes:
        self.asked.append((sender, kind))
        await self.may_answer.wait()
        if self.refusal is not None:
            raise self.refusal
        return body[::-1]

    async def ask(self, body: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
        return await self.requests.request(B, KIND, body, timeout_s=timeout_s)

    def keeps_nothing(self) -> bool:
        return not list(self.parts) and self.budget.n_bytes == 0


@asynccontextmanager
async def ends(
    budget: ByteBudget | None = None, budget_there: ByteBudget | None = None
) -> AsyncIterator[tuple[End, End]]:
    """They are connected; A asks B."""
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery)
        here, there = End(network, A, budget), End(network, B, budget_there)
        await here.host.dial(B, [])
        yield here, there
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("more", [-1, 0, 1])
async def test_a_request_goes_with_the_proposal_of_its_stream_where_it_is_short_enough(more: int) -> None:
    async with ends() as (here, there):
        body = bytes(range(256)) * (FIRST_MAX_BYTES // 256)
        body = (body + b"x")[: FIRST_MAX_BYTES - HEADER_BYTES + more]
        assert await here.ask(body) == body[::-1]
        ((stream, first),) = here.host.opened
        sizes = (len(first), stream.writes)
        assert sizes == ((HEADER_BYTES + len(body), []) if more <= 0 else (0, [HEADER_BYTES + len(body)]))
        await wait_all_tasks_blocked()
        assert stream.ended == "closed"
        assert there.asked == [(A, KIND)]
        assert here.keeps_nothing()
        assert there.keeps_nothing()


async def test_an_empty_request_and_an_empty_answer_are_some() -> None:
    async with ends() as (here, _):
        assert await here.ask(b"") == b""


@pytest.mark.parametrize(
    ("refusal", "events"),
    [(RequestRefused("not that"), []), (UnreadableRequest("not that"), [(A, TrustEvent.BROKE_PROTOCOL)])],
)
async def test_a_refusal_comes_with_its_reason_and_what_is_unreadable_costs_trust(
    refusal: Exception, events: list[tuple[str, TrustEvent]]
) -> None:
    async with ends() as (here, there):
        there.refusal = refusal
        with pytest.raises(RemoteError, match=f"node {B}: not that"):
            await here.ask(b"x")
        assert there.events == events
        await wait_all_tasks_blocked()
        assert here.keeps_nothing()
        assert there.keeps_nothing()


async def test_an_error_of_the_other_node_is_the_end_of_its_stream() -> None:
    async with ends() as (here, there):
        there.refusal = KeyError("a defect")
        with pytest.raises(RemoteError, match="ended early"):
            await here.ask(b"x")
        await wait_all_tasks_blocked()
        assert here.host.opened[0][0].ended == "reset"
        assert here.keeps_nothing()
        assert there.keeps_nothing()


async def test_a_node_without_the_protocol_is_unreachable() -> None:
    async with ends() as (here, there):
        del there.host.handlers[PROTOCOL]
        with pytest.raises(NodeUnreachable):
            await here.ask(b"x")
        await wait_all_tasks_blocked()
        assert here.keeps_nothing()


async def test_an_answer_that_takes_too_long_is_not_read_any_more(autojump_clock: MockClock) -> None:
    async with ends() as (here, there):
        there.may_answer = trio.Event()
        with pytest.raises(DeadlineExceeded, match="did not answer"):
            await here.ask(b"x")
        await wait_all_tasks_blocked()
        assert here.keeps_nothing()
        assert here.host.opened[0][0].ended == "reset"
        there.may_answer.set()
        await trio.sleep(_STUCK_S + TIMEOUT_S + 1.0)
        assert here.host.closed == [], "slow is not stuck"
        assert there.keeps_nothing()


@pytest.mark.parametrize("refusal", [None, RequestRefused("not that")])
async def test_the_caller_hears_the_answer_while_the_stream_is_still_being_closed(
    autojump_clock: MockClock, refusal: Exception | None
) -> None:
    async with ends() as (here, there), trio.open_nursery() as nursery:
        there.may_answer, there.refusal = trio.Event(), refusal
        heard_s: list[float] = []

        async def ask() -> None:
            with contextlib.suppress(RemoteError):
                await here.ask(b"x")
            heard_s.append(trio.current_time())

        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        ((stream, _),) = here.host.opened
        stream.closes = False
        there.may_answer.set()
        since_s = trio.current_time()
        await trio.sleep(TIMEOUT_S - 1)
        assert heard_s == [since_s]
        assert not here.keeps_nothing(), "the exchange is not over"


async def test_a_request_for_which_nobody_waits_any_more_is_not_sent(autojump_clock: MockClock) -> None:
    async with ends() as (here, there), trio.open_nursery() as nursery:
        there.may_answer = trio.Event()
        for _ in range(EXCHANGES_PER_PEER):
            nursery.start_soon(here.ask, b"first", 2 * TIMEOUT_S)
        await wait_all_tasks_blocked()
        with pytest.raises(DeadlineExceeded):
            await here.ask(b"late", 1.0)
        there.may_answer.set()
        await trio.sleep(TIMEOUT_S)
        assert len(there.asked) == EXCHANGES_PER_PEER
        assert here.keeps_nothing()


async def test_a_task_that_waits_for_a_node_that_is_lost_hears_so_at_once() -> None:
    async with ends() as (here, there):
        there.may_answer = trio.Event()
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                with pytest.raises(NodeUnreachable, match="was lost while"):
                    await here.ask(b"x")

            for _ in range(3):
                nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            here.requests.lose(NodeId("somebody else"))
            await wait_all_tasks_blocked()
            assert len(nursery.child_tasks) == 3
            here.requests.lose(B)
        await wait_all_tasks_blocked()
        assert here.keeps_nothing()


async def test_so_many_are_under_way_with_a_node_and_the_next_waits_for_its_turn() -> None:
    async with ends() as (here, there):
        there.may_answer = trio.Event()
        answers: list[bytes] = []

        async def ask() -> None:
            answers.append(await here.ask(b"ab"))

        async with trio.open_nursery() as nursery:
            for _ in range(EXCHANGES_PER_PEER + 1):
                nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            assert len(there.asked) == EXCHANGES_PER_PEER
            there.may_answer.set()
        assert answers == [b"ba"] * (EXCHANGES_PER_PEER + 1)


@pytest.mark.parametrize(
    ("n_bytes", "error"), [(2, NodeBusy), (64 * 1024 - 1, NodeBusy), (64 * 1024, RemoteError)]
)
async def test_a_node_that_is_asked_too_much_at_once_says_so_to_short_requests(
    n_bytes: int, error: type[Exception]
) -> None:
    """Whatever the sender believes of its own number."""
    async with ends() as (here, there):
        there.may_answer = trio.Event()
        peer = there.parts.put(A, PeerRequests())
        peer.n_incoming = EXCHANGES_PER_PEER
        with pytest.raises(error) as raised:
            await here.ask(bytes(n_bytes))
        assert type(raised.value) is error
        assert peer.n_incoming == EXCHANGES_PER_PEER
        peer.n_incoming -= 1
        there.may_answer.set()
        assert await here.ask(b"ab") == b"ba"


@pytest.mark.parametrize(("size", "is_read"), [(0, False), (1, True), (_BODY_MAX + 1, False)])
async def test_a_length_is_one_to_the_largest_request(size: int, is_read: bool) -> None:
    async with ends() as (here, there):
        message = size.to_bytes(4, "little") + b"\x07"
        stream: MemoryStream = await here.host.open_stream(B, PROTOCOL, message)
        await wait_all_tasks_blocked()
        assert there.asked == ([(A, 7)] if is_read else [])
        assert there.events == ([] if is_read else [(A, TrustEvent.BROKE_PROTOCOL)])
        assert await stream.read(100) == (b"\x01\x00\x00\x00\x00" if is_read else b"")
        assert there.keeps_nothing()


def full(kind: BudgetKind) -> ByteBudget:
    return ByteBudget({each: Limit(0 if each is kind else 9 * MIB, 9 * MIB) for each in BudgetKind})


async def test_an_answer_without_room_here_is_not_read(autojump_clock: MockClock) -> None:
    async with ends(budget=full(BudgetKind.ANSWERS)) as (here, _):
        with pytest.raises(NodeBusy, match="no room here"):
            await here.ask(bytes(2 * MIB), timeout_s=100.0)
        await wait_all_tasks_blocked()
        assert here.keeps_nothing()


async def test_an_answer_without_room_there_is_said_to_be_too_much(autojump_clock: MockClock) -> None:
    async with ends(budget_there=full(BudgetKind.RESPONSES)) as (here, there):
        with pytest.raises(NodeBusy, match="it is busy"):
            await here.ask(bytes(2 * MIB))
        await wait_all_tasks_blocked()
        assert here.keeps_nothing()
        assert there.keeps_nothing()


def test_a_peer_with_which_anything_is_under_way_is_kept() -> None:
    assert PeerRequests().is_empty
    exchange: Any = object()
    assert not PeerRequests(waited_for={exchange}).is_empty
    assert not PeerRequests(outgoing={exchange}).is_empty
    assert not PeerRequests(n_incoming=1).is_empty


async def test_a_request_that_finds_no_room_there_is_read_to_its_end_and_answered_busy(
    autojump_clock: MockClock,
) -> None:
    async with ends(budget_there=full(BudgetKind.REQUESTS)) as (here, there):
        with pytest.raises(NodeBusy, match="it is busy"):
            await here.ask(bytes(2 * MIB))
        assert there.asked == []
        await wait_all_tasks_blocked()
        assert here.host.answered[0].ended == "closed"
        assert there.events == []
        assert there.keeps_nothing()


@pytest.mark.parametrize("breaks", [False, True])
async def test_the_answering_end_closes_its_stream_and_resets_a_broken_one(breaks: bool) -> None:
    async with ends() as (here, there):
        there.refusal = KeyError("a defect") if breaks else None
        with contextlib.suppress(RemoteError):
            await here.ask(b"x")
        await wait_all_tasks_blocked()
        assert here.host.answered[0].ended == ("reset" if breaks else "closed")


async def test_a_stream_that_never_opens_takes_its_connection_with_it_in_the_end(
    autojump_clock: MockClock,
) -> None:
    async with ends() as (here, _):
        here.host.opens_streams = False
        began_s = trio.current_time()
        with pytest.raises(DeadlineExceeded):
            await here.ask(b"x")
        assert trio.current_time() - began_s == pytest.approx(TIMEOUT_S)
        await trio.sleep(_STUCK_S - 1.0)
        assert here.host.closed == []
        await trio.sleep(2.0)
        assert here.host.closed == [B]
        assert here.keeps_nothing()


async def test_an_answer_that_nobody_takes_ends_the_connection(autojump_clock: MockClock) -> None:
    async with ends() as (here, there):
        message = (1 + 2**20).to_bytes(4, "little") + bytes((KIND,)) + bytes(2**20)
        stream: MemoryStream = await here.host.open_stream(B, PROTOCOL, message)
        here.host.answered[0].takes_writes = False
        await trio.sleep(_RESPOND_S - 1.0)
        assert there.host.closed == []
        assert there.budget.n_bytes == 2**20
        await trio.sleep(2.0)
        assert there.host.closed == [A]
        assert there.keeps_nothing()
        assert stream.ended == ""


async def test_a_node_of_which_all_was_forgotten_meanwhile_is_answered_all_the_same() -> None:
    async with ends() as (here, there):
        there.may_answer = trio.Event()
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                assert await here.ask(b"ab") == b"ba"

            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            for each in (here, there):
                for node_id in list(each.parts):
                    each.parts.drop(node_id)
            there.may_answer.set()
        assert here.keeps_nothing()
        assert there.keeps_nothing()


async def test_what_follows_a_request_is_no_part_of_it() -> None:
    async with ends() as (here, _):
        size = 100 * 1024
        message = size.to_bytes(4, "little") + bytes((KIND,)) + bytes(size - 1)
        stream: MemoryStream = await here.host.open_stream(B, PROTOCOL, message + b"more")
        assert await stream.read(5) == size.to_bytes(4, "little") + b"\x00"
        n_read = 0
        while piece := await stream.read(2**20):
            n_read += len(piece)
        assert n_read == size - 1
