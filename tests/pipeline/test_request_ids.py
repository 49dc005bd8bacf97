"""One id follows a request: to every node, through every attempt, and into what each side logs."""

from __future__ import annotations

import logging

import pytest
import trio
from deadlines import DEADLINE_S
from node_ids import A, B, C, D

from bench.common.arithmetic import FakePool, uncut
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.origin.generation import Prompt
from swarmllm.pipeline.request import first_id, further_id, new_request_id
from swarmllm_proto.ipc import Sampling

from .fakes import open_swarm

PROMPT = "whose request is this?"
N_TOKENS = 8


def test_an_id_of_a_further_attempt_begins_with_the_clients_and_cannot_be_guessed() -> None:
    request_id = new_request_id()
    further = {further_id(request_id) for _ in range(100)}
    assert len(further) == 100
    assert {first_id(each) for each in further} == {request_id}
    assert {first_id(further_id(each)) for each in further} == {request_id}


async def test_every_node_knows_and_logs_each_attempt_by_an_id_that_begins_with_the_clients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "swarmllm")
    request_id = "req_" + "0123456789ab" * 2
    known: dict[str, set[str]] = {B: set(), C: set(), D: set()}
    pools = {A: FakePool("0:4"), B: FakePool("4:8"), C: FakePool("8:12"), D: FakePool("4:8")}
    async with open_swarm(pools) as swarm:
        for node_id in known:

            async def note(position: int, layers: LayerRange, node_id: str = node_id) -> None:
                known[node_id] |= set(pools[node_id].slots)
                if node_id == B and position > len(PROMPT) + 2:
                    swarm.kill(B)

            pools[node_id].before_forward = note
        with trio.fail_after(DEADLINE_S):
            async with swarm[A].pipelines.generate(
                Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=N_TOKENS), request_id=request_id
            ) as generation:
                text = "".join([piece.text async for piece in generation])
        assert generation.n_recoveries == 1
        await swarm.quiet()
    assert text == await uncut(PROMPT, N_TOKENS)
    assert known[B] == {request_id}
    assert len(known[C] | known[D]) == 2
    assert {first_id(each) for ids in known.values() for each in ids} == {request_id}
    for each in known[C] | known[D]:
        said = [record.getMessage() for record in caplog.records if f"request {each} " in record.getMessage()]
        assert any("ended here after" in message for message in said), each
