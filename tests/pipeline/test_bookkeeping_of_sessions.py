"""Which rows a stage counts as arrived, whom an origin doubts, and which requests of others count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

import numpy as np
import pytest
import trio
from node_ids import A, B, C
from trio.testing import MockClock

from bench.common.arithmetic import FakePool
from swarmllm.errors import RemoteError
from swarmllm.pipeline.job import RequestView
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.stage.compute import ForwardCall
from swarmllm.pipeline.stage.session import Session as StageSession
from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.workerpool.ring import NO_RING, RingHint
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.codec import decode_job
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import LayerForward, PipelineError, PrefillProgress, Stage
from swarmllm_proto.tensors import pack_rows, tensor_bytes

from .test_chain_lifecycle import NobodyWaits, Session
from .test_links import MODEL

N_EMBD = 4
N_PROMPT = 20


async def refuse(sender: str, body: bytes) -> bytes:
    raise AssertionError("nothing is asked for")


async def ignore(sender: str, header: bytes, payload: memoryview) -> None:
    pass


def context(here: str, *nodes: str) -> RequestContext:
    stages = tuple(Stage(node_id=node, start=index, end=index + 1) for index, node in enumerate(nodes))
    view = RequestView(node_id=here, origin=A, stages=stages, prompt_here=False)
    return RequestContext("r", MODEL, N_EMBD, 997, N_PROMPT, Sampling(max_tokens=7), view)


async def test_a_stage_drops_what_lies_behind_a_gap_and_nothing_else() -> None:
    """After damage: the origin repeats the damaged chunk and all that it sent behind it."""
    async with InMemoryNetwork() as network:
        for each in (A, C):
            network.add(each)
        session = StageSession(context(B, A, B, C), FakePool("1:2"), network.add(B), silence_timeout_s=10.0)

        def arrive(position: int) -> int:
            rows = tensor_bytes(np.ones((4, N_EMBD), np.float32))
            message = LayerForward(
                request_id="r",
                step="layer",
                stage=1,
                position=position,
                n_tokens=4,
                prefill_left=N_PROMPT - position - 4,
            )
            assert session.arrive(A, message, memoryview(rows))
            n_received = session.rows()[0]
            assert isinstance(n_received, int)
            return n_received

        assert arrive(0) == 4
        assert session.arrived_damaged(A, 4)
        assert arrive(8) == 4, "it left before the origin knew of the damage"
        assert arrive(4) == 8
        assert arrive(8) == 12
        assert arrive(16) == 12, "a gap again"
        assert arrive(12) == 16


async def test_who_sends_more_than_the_window_is_the_one_that_is_refused() -> None:
    async with InMemoryNetwork() as network:
        network.add(A)
        session = StageSession(context(B, A, B), FakePool("1:2"), network.add(B), silence_timeout_s=10.0)
        rows = tensor_bytes(np.ones((1, N_EMBD), np.float32))
        for position in range(N_PROMPT - 1):
            message = LayerForward(
                request_id="r",
                step="layer",
                stage=1,
                position=position,
                n_tokens=1,
                prefill_left=N_PROMPT - position - 1,
            )
            session.arrive(A, message, memoryview(rows))
        assert session._refused is not None
        assert session._refused[1] == A


async def test_packed_rows_count_as_what_they_become(monkeypatch: pytest.MonkeyPatch) -> None:
    width = 256
    async with InMemoryNetwork() as network:
        network.add(A)
        given = replace(context(B, A, B), n_embd=width, row_formats=("f32", "lossless"))
        session = StageSession(given, FakePool("1:2"), network.add(B), silence_timeout_s=10.0)
        counted: list[int] = []
        monkeypatch.setattr(session, "_enqueue", lambda _item, _sender, n_bytes=0: counted.append(n_bytes))
        rows = np.zeros((4, width), np.float32)
        message = LayerForward(
            request_id="r", step="layer", stage=1, position=0, n_tokens=4, prefill_left=N_PROMPT - 4
        )
        plain, packed = tensor_bytes(rows), pack_rows(rows, "lossless")
        for payload in (plain, packed):
            assert session.arrive(A, message, memoryview(payload))
        assert len(packed) < rows.nbytes
        assert counted == [len(plain), rows.nbytes]


@pytest.mark.parametrize("nodes", [(A, B, C), (A, C)], ids=["a stage between", "no stage between"])
async def test_rows_that_never_left_are_the_doing_of_any_stage_on_the_way(nodes: tuple[str, ...]) -> None:
    chain = Chain(
        context(A, *nodes),
        np.ones(N_PROMPT, np.int32),
        chunk_tokens=4,
        silence_timeout_s=1,
        look_after_s=5,
        stall_handler=NobodyWaits(),
        nicknames=dict.fromkeys(nodes, ""),
    )
    chain.start(Session())  # type: ignore[arg-type]
    chain.next_chunk()
    chain.receive(C, PrefillProgress(request_id="r", position=N_PROMPT), b"")
    assert isinstance(chain.failure, RemoteError)
    assert "broke the protocol" in chain.failure.message
    assert chain.blamed.doubted == (frozenset({B, C}) if B in nodes else frozenset())
    assert chain.blamed.culprit == (None if B in nodes else C)


class Owner:
    def __init__(self) -> None:
        self.n_tokens: list[int] = []

    def hold(self, session: StageSession) -> None:
        raise AssertionError("nothing of it is kept")

    def close(self, session: StageSession) -> None:
        pass

    def computed(self, session: StageSession, n_tokens: int) -> None:
        self.n_tokens.append(n_tokens)


class Hints(FakePool):
    """Remembers what the worker was told of links, by position."""

    def __init__(self, *ranges: str) -> None:
        super().__init__(*ranges)
        self.hints: dict[int, RingHint] = {}

    async def forward(self, model: ModelFile, **call: Unpack[ForwardCall]) -> Any:
        self.hints[call["position"]] = call.get("ring", NO_RING)
        return await super().forward(model, **call)


class Scored(FakePool):
    """Remembers what was to be scored, by position."""

    def __init__(self, *ranges: str) -> None:
        super().__init__(*ranges)
        self.scored: dict[int, tuple[str, tuple[int, ...]]] = {}

    async def forward(self, model: ModelFile, **call: Unpack[ForwardCall]) -> Any:
        self.scored[call["position"]] = call["want"], call.get("scored", ())
        return await super().forward(model, **call)


@pytest.mark.parametrize("nodes", [(A, B, C), (A, B)], ids=["in the middle", "the last"])
async def test_only_the_worker_of_the_last_stage_is_told_what_follows_each_row(
    autojump_clock: MockClock, nodes: tuple[str, ...]
) -> None:
    pool, tokens = Scored("1:2"), tuple(range(N_PROMPT))
    async with InMemoryNetwork() as network, trio.open_nursery() as nursery:
        for each in (A, C):
            network.add(each).serve(refuse, ignore)
        scoring = replace(context(B, *nodes), wants="normed", scored=tokens)
        session = StageSession(scoring, pool, network.add(B), silence_timeout_s=9.0)
        await trio.sleep(1)  # They meet.
        nursery.start_soon(session.run)
        assert session.arrive(A, *rows_for(0, 8))
        await trio.sleep(1)
        session.stop()
    assert pool.scored[0] == (("scores", tokens[:8]) if nodes[-1] == B else ("hidden", ()))


class Side:
    """The origin's side, which takes whatever a session says."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@pytest.mark.parametrize("is_of_this_node", [False, True])
async def test_the_end_of_a_stage_is_logged_where_the_request_is_another_nodes(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, is_of_this_node: bool
) -> None:
    caplog.set_level("INFO")
    origin_side: Any = Side() if is_of_this_node else None
    async with InMemoryNetwork() as network, trio.open_nursery() as nursery:
        network.add(A).serve(refuse, ignore)
        session = StageSession(
            context(B, A, B), FakePool("1:2"), network.add(B), silence_timeout_s=9.0, origin_side=origin_side
        )
        nursery.start_soon(session.run)
        await trio.sleep(1)
        session.stop()
    said = [record.getMessage() for record in caplog.records]
    assert any(f"request r of {A} ended here" in each for each in said) is not is_of_this_node


def rows_for(position: int, n_tokens: int) -> tuple[LayerForward, memoryview]:
    left = max(0, N_PROMPT - position - n_tokens)
    message = LayerForward(
        request_id="r", step="layer", stage=1, position=position, n_tokens=n_tokens, prefill_left=left
    )
    return message, memoryview(tensor_bytes(np.ones((n_tokens, N_EMBD), np.float32)))


@pytest.mark.parametrize("nodes", [(A, B, C), (A, B)], ids=["in the middle", "the last"])
async def test_what_a_stage_computed_of_the_answer_is_counted_and_a_prompt_keeps_off_the_links(
    autojump_clock: MockClock, nodes: tuple[str, ...]
) -> None:
    """The last stage says the first token, and its worker may pass that on by a link."""
    owner, pool = Owner(), Hints("1:2")
    async with InMemoryNetwork() as network, trio.open_nursery() as nursery:
        for each in (A, C):
            network.add(each).serve(refuse, ignore)
        session = StageSession(context(B, *nodes), pool, network.add(B), silence_timeout_s=9.0, owner=owner)
        await trio.sleep(1)  # They meet.
        nursery.start_soon(session.run)
        for position, n_tokens in ((0, 12), (12, N_PROMPT - 12), (N_PROMPT, 1), (N_PROMPT + 1, 1)):
            assert session.arrive(A, *rows_for(position, n_tokens))
            await trio.sleep(1)
        session.stop()
    assert owner.n_tokens == [1, 1]
    is_last = nodes[-1] == B
    is_by_link = {position: hint != NO_RING for position, hint in pool.hints.items()}
    assert is_by_link == {0: False, 12: is_last, N_PROMPT: True, N_PROMPT + 1: True}


@pytest.mark.parametrize("lost", [C, A, "stranger"])
async def test_a_stage_tells_the_origin_which_neighbour_is_gone(autojump_clock: MockClock, lost: str) -> None:
    """And nobody, where it is the origin itself that is gone."""
    reported: list[PipelineError] = []

    async def listen(sender: str, header: bytes, payload: memoryview) -> None:
        message = decode_job(header, payload)
        assert isinstance(message, PipelineError)
        reported.append(message)

    async with InMemoryNetwork() as network, trio.open_nursery() as nursery:
        network.add(A).serve(refuse, listen)
        session = StageSession(context(B, A, B, C), FakePool("1:2"), network.add(B), silence_timeout_s=9.0)
        await trio.sleep(1)
        nursery.start_soon(session.run)
        session.lost(lost)
        await trio.sleep(1)
        assert session.done.is_set() is (lost != "stranger")
        session.stop()
    assert [f"node {C} disconnected" in each.message for each in reported] == [True] * (lost == C)
