"""Which rows a stage counts as arrived, whom an origin doubts, and which requests of others count."""

from __future__ import annotations

import numpy as np
import pytest
from node_ids import A, B, C

from bench.arithmetic import FakePool
from swarmllm.errors import RemoteError
from swarmllm.pipeline.job import RequestView
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.stage.session import Session as StageSession
from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import LayerForward, PrefillProgress, Stage
from swarmllm_proto.tensors import tensor_bytes

from .test_chain_lifecycle import NobodyWaits, Session
from .test_links import MODEL

N_EMBD = 4
N_PROMPT = 20


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


@pytest.mark.parametrize("nodes", [(A, B, C), (A, C)], ids=["a stage between", "no stage between"])
async def test_rows_that_never_left_are_the_doing_of_any_stage_on_the_way(nodes: tuple[str, ...]) -> None:
    chain = Chain(
        context(A, *nodes),
        np.ones(N_PROMPT, np.int32),
        chunk_tokens=4,
        silence_timeout_s=1,
        look_after_s=5,
        watch=NobodyWaits(),
        nicknames=dict.fromkeys(nodes, ""),
    )
    chain.start(Session())  # type: ignore[arg-type]
    chain.next_chunk()
    chain.receive(C, PrefillProgress(request_id="r", position=N_PROMPT), b"")
    assert isinstance(chain.failure, RemoteError)
    assert "broke the protocol" in chain.failure.message
    assert chain.blamed.doubted == (frozenset({B, C}) if B in nodes else frozenset())
    assert chain.blamed.culprit == (None if B in nodes else C)
