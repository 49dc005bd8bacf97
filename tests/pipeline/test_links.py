"""When links are opened, forgotten and tried again; and what workers' notices do to a request."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import trio
import trio.lowlevel
from deadlines import DEADLINE_S
from node_ids import A, B, C, O
from trio.testing import MockClock, wait_all_tasks_blocked

from bench.common.arithmetic import FakePool, uncut
from swarmllm.errors import NodeUnreachable, WorkerDied
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.job import RequestView
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.links import RETRY_S, LinkNotices, NoStageLinks, StageLinks
from swarmllm.pipeline.stage.session import Session
from swarmllm.scheduling.speeds import Observations
from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.swarm.router import LinkEnd, LinkHandler
from swarmllm.workerpool.ring import RingCalls
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.codec import decode_job
from swarmllm_proto.ipc import Sampling, Turned
from swarmllm_proto.swarm import Stage, StreamingToken

from .fakes import open_swarm

MODEL = ModelFile("0" * 64, Path("/nowhere"))


def context(*nodes: str, here: str = A, wants: Any = "tokens") -> RequestContext:
    stages = tuple(Stage(node_id=node, start=index, end=index + 1) for index, node in enumerate(nodes))
    view = RequestView(node_id=here, origin=O, stages=stages, prompt_here=False)
    return RequestContext("r", MODEL, 4, 997, 3, Sampling(max_tokens=7), view, wants=wants)


class Maker:
    """A router that opens links at once, or not at all."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.is_reachable = True
        self.handler: LinkHandler | None = None

    async def open_link(self, node_id: str, purpose: str) -> LinkEnd:
        await trio.lowlevel.checkpoint()
        self.opened.append(node_id)
        if not self.is_reachable:
            raise NodeUnreachable("no")
        return LinkEnd(socket.socket(), bytes(32), 1)

    def serve_links(self, on_link: LinkHandler) -> None:
        self.handler = on_link


class Workers:
    """One worker, which remembers what it is told."""

    def __init__(self) -> None:
        self.process: int | None = 1
        self.reported: list[tuple[Any, ...]] = []
        self.is_dying = False
        self.is_stuck = False

    def pid(self, model_id: str) -> int | None:
        return self.process

    async def take_seat(self, model_id: str, **seat: Any) -> None:
        await trio.lowlevel.checkpoint()
        if self.is_stuck:
            await trio.sleep_forever()
        if self.is_dying:
            raise WorkerDied("gone")
        self.reported.append(("seat", seat["stage"], seat["before"], seat["after"], seat["sampling"]))

    async def take_prompt(self, model_id: str, *, begins: bool, **told: Any) -> None:
        await trio.lowlevel.checkpoint()
        self.reported.append(("prompt", told["stage"], begins))

    async def take_link(
        self, model_id: str, peer: str, direction: str, descriptor: int, key: bytes, nonce: int
    ) -> int | None:
        await trio.lowlevel.checkpoint()
        self.reported.append((direction, peer))
        return self.process

    async def close_links(self, model_id: str, peer: str) -> None:
        await trio.lowlevel.checkpoint()
        self.reported.append(("close", peer))


class Parts:
    def __init__(self) -> None:
        self.maker, self.workers = Maker(), Workers()
        self.links = StageLinks(A, self.maker, cast(RingCalls, self.workers))

    async def join(self, context: RequestContext) -> None:
        self.links.join(context)
        await wait_all_tasks_blocked()


@asynccontextmanager
async def running() -> AsyncIterator[Parts]:
    parts = Parts()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(parts.links.run)
        await wait_all_tasks_blocked()
        yield parts
        nursery.cancel_scope.cancel()


async def test_a_request_brings_a_seat_for_each_stage_here_and_opens_the_link_ahead() -> None:
    async with running() as parts:
        await parts.join(context(A, B, C))
        assert parts.workers.reported == [("seat", 0, C, B, None), ("sending", B)]
        assert parts.maker.opened == [B]


async def test_whether_there_is_a_seat_is_known_when_the_worker_has_answered(
    autojump_clock: MockClock,
) -> None:
    request_id = context(A, B).request_id
    async with running() as parts:
        parts.links.join(context(A, B))
        assert await parts.links.is_seated(request_id, 0, 1.0)
        assert not parts.links.lacks_seat(request_id, 0)
        parts.workers.is_dying = True
        parts.links.join(context(A, B))
        parts.links.join(context(A, B))
        assert not await parts.links.is_seated(request_id, 0, 1.0)
        assert parts.links.lacks_seat(request_id, 0)
        assert not parts.links._seats_due
        parts.workers.is_stuck = True
        parts.links._without_seat.clear()
        parts.links.join(context(A, B))
        started = trio.current_time()
        assert not await parts.links.is_seated(request_id, 0, 1.0)
        assert trio.current_time() - started == 1.0
    assert not await parts.links.is_seated(request_id, 0, 1.0), "without links nobody has one"


@pytest.mark.parametrize("generated", [(), (5,)])
async def test_an_answer_that_has_begun_is_not_sent_again_from_its_start(generated: tuple[int, ...]) -> None:
    async with running() as parts:
        resumed = replace(context(B, A), generated=generated)
        parts.links.join(resumed)
        parts.links.tell_prompt(resumed, np.zeros(3, np.int32))
        await wait_all_tasks_blocked()
        told = [each for each in parts.workers.reported if each[0] in ("seat", "prompt")]
        assert [each[0] for each in told] == ["seat", "prompt"], "a prompt comes to a seat"
        assert told[1] == ("prompt", 1, not generated)


async def test_the_last_stage_is_told_how_to_sample() -> None:
    async with running() as parts:
        await parts.join(context(B, A))
        assert parts.workers.reported[0] == ("seat", 1, B, B, Sampling(max_tokens=7))


async def test_two_stages_in_a_row_need_no_link_between_them() -> None:
    async with running() as parts:
        await parts.join(context(A, A, B))
        assert sorted(reported for reported in parts.workers.reported if reported[0] == "seat") == [
            ("seat", 0, B, A, None),
            ("seat", 1, A, B, None),
        ]
        assert parts.maker.opened == [B]


@pytest.mark.parametrize("alone", [context(A), context(B, A, wants="normed")])
async def test_who_decodes_with_nobody_needs_none(alone: RequestContext) -> None:
    async with running() as parts:
        await parts.join(alone)
        assert parts.workers.reported == []


async def test_requests_share_a_link() -> None:
    async with running() as parts:
        for _ in range(3):
            await parts.join(context(A, B))
        parts.links.join(context(A, B))
        parts.links.join(context(A, B))
        await wait_all_tasks_blocked()
        assert parts.maker.opened == [B]


async def test_a_new_worker_needs_a_new_link() -> None:
    async with running() as parts:
        await parts.join(context(A, B))
        parts.workers.process = 2
        await trio.lowlevel.checkpoint()
        parts.links.ended(MODEL.model_id, B, "sending", "the worker died")
        await parts.join(context(A, B))
        assert parts.maker.opened == [B, B]


async def test_a_link_that_cannot_be_had_is_tried_again_later(autojump_clock: MockClock) -> None:
    async with running() as parts:
        parts.maker.is_reachable = False
        await parts.join(context(A, B))
        await parts.join(context(A, B))
        assert parts.maker.opened == [B]
        await trio.sleep(RETRY_S)
        parts.maker.is_reachable = True
        await parts.join(context(A, B))
        assert parts.maker.opened == [B, B]
        assert ("sending", B) in parts.workers.reported


async def test_a_lost_node_loses_its_links() -> None:
    async with running() as parts:
        await parts.join(context(A, B))
        parts.links.lost(B)
        await wait_all_tasks_blocked()
        assert parts.workers.reported[-1] == ("close", B)
        await parts.join(context(A, B))
        assert parts.maker.opened == [B, B]


async def test_a_link_from_a_neighbour_is_taken_where_there_is_a_worker() -> None:
    async with running() as parts:
        assert parts.maker.handler is not None
        with socket.socket() as connection:
            end = LinkEnd(connection, bytes(32), 1)
            assert await parts.maker.handler(B, MODEL.model_id, end)
            parts.workers.process = None
            assert not await parts.maker.handler(B, MODEL.model_id, end)
        parts.links.lost(B)
        await wait_all_tasks_blocked()
        assert parts.workers.reported[-1] == ("close", B)


async def test_a_request_without_a_seat_goes_on_without_links() -> None:
    async with running() as parts:
        parts.workers.is_dying = True
        await parts.join(context(A, B))
        assert parts.maker.opened == []


async def test_a_request_whose_jobs_come_by_links_is_not_silent(autojump_clock: MockClock) -> None:
    silence_s = 10.0
    async with InMemoryNetwork() as network, trio.open_nursery() as nursery:
        network.add(O)
        session = Session(
            context(A, B),
            FakePool("0:1"),
            network.add(A),
            silence_timeout_s=PipelineSettings(silence_timeout_s=silence_s).silence_timeout_s,
        )
        nursery.start_soon(session.run)
        for _ in range(5):
            await trio.sleep(silence_s * 0.9)
            session.ran_by_link(0, 30, 30, running=True)
            assert session.is_busy()
        assert session.n_jobs == 150
        session.ran_by_link(0, 0, 0, running=False)
        with trio.fail_after(3 * silence_s):
            await session.done.wait()


async def test_what_jobs_by_links_took_counts_as_this_nodes_speed() -> None:
    async with InMemoryNetwork() as network:
        session = Session(context(A, B), FakePool("0:1"), network.add(A), silence_timeout_s=10)
        sessions: Any = SimpleNamespace(running={"r": session}.get)
        links, observations = NoStageLinks(), Observations()
        tell = LinkNotices(links, sessions, observations, lambda *_: None)

        def turned(request_id: str, stage: int, n_jobs: int) -> float | None:
            message = Turned(request_id=request_id, stage=stage, n_jobs=n_jobs, compute_s=0.6, running=True)
            tell(MODEL.model_id, message, memoryview(b""))
            return observations.latency(MODEL.model_id).decode_s

        assert turned("another", 0, 30) is None
        assert turned("r", 2, 30) is None, "there is no such stage"
        assert turned("r", 0, 0) is None
        assert turned("r", 0, 30) == pytest.approx(0.02)
        assert (session.n_jobs, links.n_jobs) == (30, 90)

        # How long windows took is not known by the row: they change nothing.
        windows = Turned(
            request_id="r", stage=0, n_jobs=5, compute_s=0.0, running=True, n_windows=5, n_window_rows=30
        )
        tell(MODEL.model_id, windows, memoryview(b""))
        assert observations.latency(MODEL.model_id).decode_s == pytest.approx(0.02)
        assert (session.n_jobs, links.n_jobs) == (35, 95)


async def test_what_a_worker_says_takes_no_turn_unless_something_is_to_be_sent_before_it(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with InMemoryNetwork() as network, trio.open_nursery() as nursery:
        network.add(O)
        router, sent, may_pass = network.add(A), list[bytes](), trio.Event()

        def now(receiver: str, header: bytes, payload: bytes = b"") -> bool:
            if header == b"in turn":
                return False
            sent.append(header)
            return True

        async def in_turn(receiver: str, header: bytes, payload: bytes = b"") -> None:
            await may_pass.wait()
            sent.append(header)

        monkeypatch.setattr(router, "send_now", now)
        monkeypatch.setattr(router, "send", in_turn)
        session = Session(context(A, B), FakePool("0:1"), router, silence_timeout_s=10)
        for header in (b"in turn", b"behind it"):
            session.relay(O, header, b"")
        assert sent == [], "the session's task has not begun"
        nursery.start_soon(session.run)
        may_pass.set()
        await wait_all_tasks_blocked()
        assert sent == [b"in turn", b"behind it"]
        sent.clear()
        may_pass = trio.Event()
        for header in (b"first", b"in turn"):
            assert session.relay(O, header, b"")
        await wait_all_tasks_blocked()
        session.relay(O, b"queued", b"")
        assert sent == [b"first"], "the session's task still sends what came before"
        session.relay(O, b"queued too", b"")
        assert sent == [b"first"], "it waits in the queue"
        may_pass.set()
        await wait_all_tasks_blocked()
        session.relay(O, b"last", b"")
        assert sent == [b"first", b"in turn", b"queued", b"queued too", b"last"]
        session.stop()
        session.relay(O, b"after the end", b"")
        assert sent[-1] == b"last"


async def test_only_nodes_of_the_request_are_sent_what_a_worker_says() -> None:
    async with InMemoryNetwork() as network, trio.open_nursery() as nursery:
        network.add(O), network.add("stranger")
        session = Session(context(A, B), FakePool("0:1"), network.add(A), silence_timeout_s=10)
        nursery.start_soon(session.run)
        assert not session.relay("stranger", b"header", b"")
        assert session.relay(O, b"header", b"")
        session.stop()


async def test_two_tokens_that_come_the_wrong_way_round_are_put_right() -> None:
    async with open_swarm({A: FakePool("0:6"), B: FakePool("6:12")}) as swarm:
        pipelines = swarm[A].pipelines
        held: list[tuple[str, bytes, memoryview]] = []
        n_swapped = 0

        async def deliver(sender: str, header: bytes, payload: memoryview) -> None:
            nonlocal n_swapped
            message = decode_job(header, payload)
            if isinstance(message, StreamingToken) and message.index % 3 == 1:
                held.append((sender, header, payload))
                return
            await pipelines.on_message(sender, header, payload)
            if isinstance(message, StreamingToken) and held:
                n_swapped += 1
                await pipelines.on_message(*held.pop())

        swarm[A].router.serve(pipelines.on_request, deliver)
        prompt = "where do the layers live?"
        text = ""
        with trio.fail_after(DEADLINE_S):
            async with pipelines.generate(
                Prompt(text=prompt), swarm.entry, Sampling(max_tokens=12)
            ) as generation:
                async for piece in generation:
                    text += piece.text
        assert n_swapped == 4
        assert text == await uncut(prompt, 12)
