"""What nodes earn with their part in requests: from the origin, and from the neighbour they send to."""

from __future__ import annotations

import numpy as np
import pytest
import trio
from deadlines import DEADLINE_S
from node_ids import A, B, C, M
from trio.testing import wait_all_tasks_blocked

from bench.common.arithmetic import N_EMBD, FakePool, uncut
from swarmllm.errors import NodeBusy, NoPipeline, RemoteError, WorkerError
from swarmllm.pipeline import Prompt
from swarmllm.swarm.byte_budget import BudgetKind, ByteBudget, Limit
from swarmllm.swarm.peers.trust import TrustEvent
from swarmllm_proto.codec import decode_job, encode_job
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import LayerForward
from swarmllm_proto.tensors import tensor_bytes

from .fakes import Swarm, computes, open_swarm

PROMPT = "who may be trusted?"


async def ask(swarm: Swarm) -> str:
    with trio.fail_after(DEADLINE_S):
        async with swarm[A].pipelines.generate(
            Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=6)
        ) as generation:
            return "".join([piece.text async for piece in generation])


def events(swarm: Swarm, here: str, there: str) -> dict[str, int]:
    return dict(swarm[here].trust.explain(there).counts)


async def test_whoever_took_part_in_an_answer_has_served() -> None:
    async with open_swarm({A: FakePool("0:4"), B: FakePool("4:8"), C: FakePool("8:12")}) as swarm:
        assert await ask(swarm) == await uncut(PROMPT, 6)
        assert events(swarm, A, B) == events(swarm, A, C) == {"served": 1}
        assert swarm[A].trust.explain(A).counts == {}


async def test_the_node_that_failed_is_held_to_it_and_nobody_else() -> None:
    pools = {A: FakePool("0:4"), B: FakePool("4:8"), C: FakePool("8:12")}
    async with open_swarm(pools) as swarm:

        async def fail(*arguments: object, **named: object) -> None:
            raise WorkerError("out of order")

        pools[C].forward = fail  # type: ignore[method-assign, assignment]
        with pytest.raises(RemoteError):
            await ask(swarm)
        assert set(events(swarm, A, C)) == {"failed"}
        assert events(swarm, A, B) == {}


async def test_numbers_that_are_not_finite_are_laid_to_their_sender() -> None:
    async with open_swarm({A: FakePool("0:6"), B: FakePool("6:12")}) as swarm:
        router, send = swarm[A].router, swarm[A].router.send

        async def poison(node_id: str, header: bytes, payload: bytes | memoryview = b"") -> None:
            message = decode_job(header, payload)
            if isinstance(message, LayerForward) and payload:
                rows = np.full((message.n_tokens, N_EMBD), np.nan, np.float32)
                header, payload = encode_job(message, tensor_bytes(rows))
            await send(node_id, header, payload)

        router.send = poison  # type: ignore[method-assign]
        with pytest.raises(RemoteError, match="not finite"):
            await ask(swarm)
        assert events(swarm, B, A)["bad numbers"] >= 1


async def test_nonsense_and_damage_are_noted() -> None:
    async with open_swarm({A: FakePool("0:6"), B: FakePool("6:12")}) as swarm:
        await swarm[A].router.send(B, b"\xc1 no message at all", b"")
        message = LayerForward(request_id="x", step="layer", stage=1, position=0, n_tokens=1)
        header, _ = encode_job(message, b"row")
        await swarm[A].router.send(B, header, b"row, damaged")
        await wait_all_tasks_blocked(0.01)
        assert events(swarm, B, A) == {"broke protocol": 1, "damaged": 1}


async def test_a_distrusted_node_gets_no_work() -> None:
    async with open_swarm({A: FakePool("0:6"), B: FakePool("6:12")}) as swarm:
        assert await ask(swarm) == await uncut(PROMPT, 6)
        swarm[A].trust.note(B, TrustEvent.WRONG_BYTES)
        with pytest.raises(NoPipeline):
            await ask(swarm)


@pytest.mark.parametrize(
    ("full", "other", "pools"),
    [
        (B, M, {A: "0:4", B: "4:8", M: "4:8", C: "8:12"}),
        (C, M, {A: "0:4", B: "4:8", C: "8:12", M: "8:12"}),
        (B, M, {A: "0:0", B: "0:12", M: "0:12"}),
    ],
    ids=["middle", "last", "whole"],
)
async def test_a_stage_whose_room_others_used_up_is_busy_and_nobody_is_blamed(
    full: str, other: str, pools: dict[str, str]
) -> None:
    """Another node answers instead, and no trust is lost anywhere."""
    async with open_swarm({n: FakePool(*([r] if r != "0:0" else [])) for n, r in pools.items()}) as swarm:
        budget = ByteBudget({kind: Limit(1000, 1000) for kind in BudgetKind})
        assert budget.reserve("others", BudgetKind.JOBS, 750)
        swarm[full].pipelines._sessions.budget = budget
        said = {full: computes(swarm.entry.model_id, 1e-6), other: computes(swarm.entry.model_id, 1.0)}
        for _ in range(3):
            await swarm.tell(A, said)
            assert await ask(swarm) == await uncut(PROMPT, 6)
        await swarm.quiet()
        assert budget.n_refused
        for here in pools:
            for there in pools:
                assert set(events(swarm, here, there)) <= {"served"}
        assert not swarm[A].pipelines._suspects.ordered(trio.current_time())
        for node_id in pools:
            assert full not in swarm[node_id].pipelines._suspects.ordered(trio.current_time())
        assert budget.n_bytes == 750


async def test_an_origin_whose_room_others_used_up_doubts_nobody() -> None:
    async with open_swarm({B: FakePool("0:4"), A: FakePool("4:8"), C: FakePool("8:12")}) as swarm:
        budget = swarm[A].pipelines._sessions.budget = ByteBudget({kind: Limit(0, 0) for kind in BudgetKind})
        with pytest.raises(NodeBusy):
            await ask(swarm)
        assert budget.n_refused
        assert events(swarm, A, B) == events(swarm, A, C) == {}
        assert not swarm[A].pipelines._suspects.ordered(trio.current_time())
        await swarm.quiet()
