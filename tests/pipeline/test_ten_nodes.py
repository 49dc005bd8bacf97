"""Ten nodes, three of them liars of different kinds: as soon as they are known, every answer is right."""

from __future__ import annotations

import itertools
import os
import random
from functools import partial

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from bench.common.arithmetic import FakePool, uncut
from swarmllm.errors import SwarmLLMError
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers.trust import NEUTRAL, WORK_MIN
from swarmllm_proto.codec import decode_job
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import LayerForward
from swarmllm_proto.tensors import Tensor

from .fakes import Swarm, computes, open_swarm

pytestmark = pytest.mark.long

A, B, C, D, E, F, G, OMITS, SILENT, NUMBS = (
    node_id_named(name) for name in ("a", "b", "c", "d", "e", "f", "g", "omits", "silent", "numbs")
)
LIARS = (OMITS, SILENT, NUMBS)
N_REQUESTS = int(os.environ.get("SWARMLLM_TEN_NODES_REQUESTS", "120"))
N_TOKENS = 36
"""A stretch that is checked has 32 rows."""
SETTINGS = PipelineSettings(check_rate=1 / 16)
_numbers = itertools.count()


class OmitsALayer(FakePool):
    def _run(self, slot: object, layers: LayerRange, position: int, rows: Tensor) -> Tensor:
        return super()._run(slot, LayerRange(layers.start, layers.end - 1), position, rows)  # type: ignore[arg-type]


def answers_no_job(swarm: Swarm) -> None:
    """It accepts what it is asked to take part in, and drops every job."""
    node = swarm[SILENT]

    async def nothing(sender: str, header: bytes, payload: memoryview) -> None:
        if not isinstance(decode_job(header, payload), LayerForward):
            await node.pipelines.on_message(sender, header, payload)

    node.router.serve(node.pipelines.on_request, nothing)


class SendsNoNumbers(FakePool):
    def _run(self, slot: object, layers: LayerRange, position: int, rows: Tensor) -> Tensor:
        return np.full_like(super()._run(slot, layers, position, rows), np.nan)  # type: ignore[arg-type]


async def ask(swarm: Swarm, origin: str) -> bool | None:
    """Whether the answer is that of the uncut model; None: it broke off with an error."""
    prompt = f"{next(_numbers)} which of us tell the truth?"
    try:
        with trio.fail_after(600):
            async with swarm[origin].pipelines.generate(
                Prompt(text=prompt), swarm.entry, Sampling(max_tokens=N_TOKENS)
            ) as generation:
                text = "".join([piece.text async for piece in generation])
    except SwarmLLMError:
        return None
    return text == await uncut(prompt, N_TOKENS)


@pytest.mark.slow
async def test_requests_of_seven_origins_among_three_liars(
    patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "SystemRandom", partial(random.Random, 7))  # draws what is checked
    pools = {A: FakePool("0:4"), OMITS: OmitsALayer("4:8"), NUMBS: SendsNoNumbers("4:8")}
    pools |= {node_id: FakePool("4:8") for node_id in (B, C, D)}
    pools |= {SILENT: FakePool("8:12")} | {node_id: FakePool("8:12") for node_id in (E, F, G)}
    origins = (A, B, C, D, E, F, G)
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        answers_no_job(swarm)
        said = {liar: computes(swarm.entry.model_id, 1e-6) for liar in LIARS}
        said |= {node_id: computes(swarm.entry.model_id, 1e-3) for node_id in origins[1:]}
        for origin in origins:
            await swarm.tell(origin, said)
        answers: list[tuple[bool, bool | None]] = []
        """Of each request: whether its origin knew the one whose answers are wrong, and what came of it."""
        for number in range(N_REQUESTS):
            origin = origins[number % len(origins)]
            is_known = swarm[origin].trust.score(OMITS) < WORK_MIN
            answers.append((is_known, await ask(swarm, origin)))
        await swarm.quiet()
        wrong = [number for number, (_, answer) in enumerate(answers) if answer is False]
        broken = [number for number, (_, answer) in enumerate(answers) if answer is None]
        print(f"{N_REQUESTS} requests: {len(wrong)} wrong, the last {wrong[-1:]}; {len(broken)} broken off")
        assert not any(is_known and answer is not True for is_known, answer in answers)
        # The one who omits a layer was the first choice of some origins, and each of them has found it out.
        assert wrong
        assert all(answer is True for _, answer in answers[N_REQUESTS * 2 // 3 :])
        assert all(swarm[one].trust.score(other) >= NEUTRAL for one in origins for other in origins)
