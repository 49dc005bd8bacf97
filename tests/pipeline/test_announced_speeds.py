"""A node that announces more speed than it has gets one request for it; honest nodes keep their trust and
their work."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from bench.common.arithmetic import FakePool, uncut
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.repair.retry_policy import SLOW_TOKEN_S
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers.trust import NEUTRAL, TrustEvent
from swarmllm_proto.ipc import Sampling

from .fakes import Swarm, computes, open_swarm

PROMPT = "who is fast?"
N_TOKENS = 8
A, H, LIAR, M = (node_id_named(name) for name in ("a", "h", "liar", "m"))


async def ask(swarm: Swarm) -> float:
    """How long it took, by the mock clock."""
    began_s = trio.current_time()
    async with swarm[A].pipelines.generate(
        Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=N_TOKENS)
    ) as generation:
        text = "".join([piece.text async for piece in generation])
    assert text == await uncut(PROMPT, N_TOKENS)
    return trio.current_time() - began_s


def takes(pool: FakePool, forward_s: float) -> None:
    async def wait(position: int, layers: LayerRange) -> None:
        await trio.sleep(forward_s)

    pool.before_forward = wait


async def boast(swarm: Swarm, *honest: str) -> None:
    model_id = swarm.entry.model_id
    said = {LIAR: computes(model_id, 1e-9)} | {node_id: computes(model_id, 1e-3) for node_id in honest}
    await swarm.tell(A, said)


async def test_a_boaster_among_several_is_asked_once(patient_clock: MockClock) -> None:
    pools = {A: FakePool("0:4"), LIAR: FakePool("4:8"), M: FakePool("4:8"), H: FakePool("8:12")}
    takes(pools[LIAR], SLOW_TOKEN_S * 0.9)
    async with open_swarm(pools) as swarm:
        await boast(swarm, M, H)
        assert await ask(swarm) > N_TOKENS * SLOW_TOKEN_S / 2
        for _ in range(20):
            assert await ask(swarm) < 1
        trust = swarm[A].trust
        assert trust.score(M) > NEUTRAL
        assert trust.score(H) > NEUTRAL
        # Which of two nodes took the time cannot be known.
        assert trust.score(LIAR) >= NEUTRAL
        swarm.kill(LIAR)
        assert await ask(swarm) < 1
        await swarm.quiet()


async def test_a_boaster_without_a_rival_earns_less_and_stays_in_work(patient_clock: MockClock) -> None:
    pools = {A: FakePool("0:4"), LIAR: FakePool("4:12")}
    takes(pools[LIAR], SLOW_TOKEN_S / 2)
    async with open_swarm(pools) as swarm:
        await boast(swarm)
        for _ in range(12):
            await ask(swarm)
        trust = swarm[A].trust
        assert trust.count(LIAR, TrustEvent.OVERSTATED) == 4
        assert NEUTRAL <= trust.score(LIAR) < NEUTRAL + 0.02


@pytest.mark.parametrize("alone", [True, False])
async def test_a_busy_machine_that_says_so_loses_nothing(alone: bool, patient_clock: MockClock) -> None:
    """It becomes a hundred times slower than it was, and announces that after a while, as nodes do."""
    pools = {A: FakePool("0:4"), M: FakePool("4:12" if alone else "4:8")}
    if not alone:
        pools[H] = FakePool("8:12")
    async with open_swarm(pools) as swarm:
        model_id, forward_s = swarm.entry.model_id, 0.004
        others = {} if alone else {H: computes(model_id, 1e-3)}
        await swarm.tell(A, {M: computes(model_id, 1e-3)} | others)
        for _ in range(5):
            takes(pools[M], forward_s)
            await ask(swarm)
        takes(pools[M], 100 * forward_s)
        for _ in range(2):
            await ask(swarm)
        await swarm.tell(A, {M: computes(model_id, 0.1)})
        for _ in range(10):
            await ask(swarm)
        for node_id in pools.keys() - {A}:
            assert swarm[A].trust.count(node_id, TrustEvent.OVERSTATED) == 0
            assert swarm[A].trust.score(node_id) > NEUTRAL


async def test_who_was_slow_once_is_asked_again_later(patient_clock: MockClock) -> None:
    pools = {A: FakePool("0:4"), M: FakePool("4:12"), H: FakePool("4:12")}
    async with open_swarm(pools) as swarm:
        model_id = swarm.entry.model_id
        await swarm.tell(A, {M: computes(model_id, 1e-3), H: computes(model_id, 0.05)})
        takes(pools[M], SLOW_TOKEN_S * 0.9)
        await ask(swarm)
        takes(pools[M], 0.004)
        takes(pools[H], 0.2)
        assert await ask(swarm) > 0.2 * N_TOKENS / 2
        await trio.sleep(601)
        assert await ask(swarm) < 0.2
