"""Ten nodes, three of which lie in different ways: once they are known, all answers are the uncut model's."""

from __future__ import annotations

import random

from trio.testing import MockClock

from bench.common.arithmetic import FakePool, fake_entry, uncut
from bench.three_liars import N_TOKENS, ORIGIN, open_nodes, play
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers.trust import NEUTRAL, TrustEvent
from swarmllm_proto.ipc import Sampling

from .test_checks import LyingHead, LyingPool, noisy

N_REQUESTS = 120


async def test_all_answers_are_right_when_three_liars_are_known(patient_clock: MockClock) -> None:
    honest = {name: FakePool("4:8") for name in "bcd"} | {name: FakePool("8:12") for name in "efg"}
    lying = {"x": LyingPool("4:8", left_out=1), "y": LyingPool("4:8", noisy(0.2)), "z": LyingHead("8:12")}
    pools = {node_id_named(name): pool for name, pool in (honest | lying).items()}
    liars = {node_id_named(name) for name in lying}

    async def whole(text: str, sampling: Sampling) -> str:
        return await uncut(text, N_TOKENS)

    async with open_nodes({ORIGIN: FakePool("0:4"), **pools}, liars, fake_entry()) as nodes:
        pipelines, trust = nodes[ORIGIN].pipelines, nodes[ORIGIN].trust
        pipelines._checker.chance = random.Random(1).random
        outcome = await play(pipelines, trust, fake_entry(), liars, whole, N_REQUESTS)
        assert outcome.known_after.keys() == liars
        assert max(outcome.known_after.values()) < N_REQUESTS / 2
        assert outcome.wrong
        assert outcome.wrong_after(len(liars)) == outcome.unanswered == []
        for node_id in pools.keys() - liars:
            assert trust.score(node_id) >= NEUTRAL
            assert TrustEvent.WRONG_RESULT not in trust.explain(node_id).counts
