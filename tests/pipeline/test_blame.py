"""Blame hits whoever did it: the sender of bad rows, not the stage that refuses them; and where nobody can
know, the next route does without all who may have done it, as far as there are others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import trio
from deadlines import DEADLINE_S
from node_ids import LAST, LIAR, A, B, C, H, I, M
from trio.testing import MockClock

from bench.common.arithmetic import N_EMBD, FakePool, uncut
from swarmllm.errors import RemoteError, SwarmLLMError
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.job import RequestView
from swarmllm.pipeline.repair.rebuild import left_of
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.swarm.peers.trust import NEUTRAL
from swarmllm_proto.codec import decode_job, decode_request, encode_job, encode_response
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import (
    LayerForward,
    PipelineError,
    PrefillProgress,
    ProbeStage,
    Stage,
    StageRows,
    StageState,
    StreamingToken,
)
from swarmllm_proto.tensors import decode_tensor, tensor_bytes

from .fakes import Swarm, computes, open_swarm
from .twenty import twenty_requests

PROMPT = "who is to blame?"
Changed = Callable[[LayerForward, bytes], tuple[bytes, bytes | memoryview]]


async def ask(swarm: Swarm, n_tokens: int = 6) -> str:
    async with swarm[A].pipelines.generate(
        Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=n_tokens)
    ) as generation:
        return "".join([piece.text async for piece in generation])


def change_rows(swarm: Swarm, node_id: str, change: Changed) -> None:
    """Of every job that a node sends on."""
    router, send = swarm[node_id].router, swarm[node_id].router.send

    async def lie(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
        message = decode_job(header, payload)
        if isinstance(message, LayerForward) and payload:
            header, payload = change(message, bytes(payload))
        await send(receiver, header, payload)

    router.send = lie  # type: ignore[method-assign]


def not_numbers(message: LayerForward, payload: bytes) -> tuple[bytes, bytes | memoryview]:
    return encode_job(message, tensor_bytes(np.full((message.n_tokens, N_EMBD), np.nan, np.float32)))


def too_wide(message: LayerForward, payload: bytes) -> tuple[bytes, bytes | memoryview]:
    return encode_job(message, tensor_bytes(np.zeros((message.n_tokens, N_EMBD + 1), np.float32)))


async def prefer(swarm: Swarm, liked: str, *others: str) -> None:
    """Routes lead through one node, the others being slow."""
    said = {liked: computes(swarm.entry.model_id, 1e-6)}
    said |= {other: computes(swarm.entry.model_id, 1.0) for other in others}
    await swarm.tell(A, said)


def more_rows(message: LayerForward, payload: bytes) -> tuple[bytes, bytes | memoryview]:
    """Of a prompt, while more of it is to come."""
    if not message.prefill_left:
        return encode_job(message, payload)
    rows = np.concatenate([decode_tensor(payload), np.zeros((20, N_EMBD), np.float32)])
    return encode_job(msgspec.structs.replace(message, n_tokens=message.n_tokens + 20), tensor_bytes(rows))


async def test_rows_that_a_stage_adds_cost_the_next_one_no_trust() -> None:
    """It says that more rows are done than have left the origin, which is true."""
    pools = {A: FakePool("0:4"), LIAR: FakePool("4:8"), M: FakePool("4:8"), H: FakePool("8:12")}
    async with open_swarm(pools, settings=PipelineSettings(prefill_chunk_tokens=2)) as swarm:
        change_rows(swarm, LIAR, more_rows)
        await prefer(swarm, LIAR, M)
        await twenty_requests(swarm, LIAR, (M, H))
        await swarm.quiet()


@pytest.mark.parametrize("change", [not_numbers, too_wide])
async def test_the_stage_that_refuses_bad_rows_keeps_its_trust_and_the_request_is_answered(
    change: Changed,
) -> None:
    pools = {A: FakePool("0:4"), LIAR: FakePool("4:8"), M: FakePool("4:8"), H: FakePool("8:12")}
    async with open_swarm(pools) as swarm:
        change_rows(swarm, LIAR, change)
        await prefer(swarm, LIAR, M)
        for _ in range(20):
            with trio.fail_after(DEADLINE_S):
                assert await ask(swarm) == await uncut(PROMPT, 6)
            assert swarm[A].trust.score(H) >= NEUTRAL
            assert swarm[A].trust.score(M) >= NEUTRAL
        swarm.kill(LIAR)
        assert await ask(swarm) == await uncut(PROMPT, 6)
        await swarm.quiet()


def no_token(message: LayerForward, payload: bytes) -> tuple[bytes, bytes | memoryview]:
    if message.step == "embed" and message.position > len(PROMPT) + 2:
        message = msgspec.structs.replace(message, token=2**31 - 1)
    return encode_job(message, payload)


@pytest.mark.parametrize("first", [A, H])
async def test_a_token_outside_the_vocabulary_ends_only_the_attempt(first: str) -> None:
    """The last stage gives it to the first one in the midst of an answer. The stream goes on elsewhere."""
    pools = {first: FakePool("0:6"), LIAR: FakePool("6:12"), M: FakePool("6:12"), I: FakePool("0:6")}
    async with open_swarm({A: FakePool()} | pools) as swarm:
        router, send = swarm[LIAR].router, swarm[LIAR].router.send

        async def lie(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
            message = decode_job(header, payload)
            if isinstance(message, LayerForward):
                header, payload = no_token(message, bytes(payload))
            await send(receiver, header, payload)

        router.send = lie  # type: ignore[method-assign]
        await prefer(swarm, LIAR, M)
        with trio.fail_after(DEADLINE_S):
            assert await ask(swarm) == await uncut(PROMPT, 6)
        assert swarm[first].trust.score(LIAR) < NEUTRAL
        assert swarm[A].trust.score(M) >= NEUTRAL
        assert swarm[A].trust.score(first) >= NEUTRAL
        assert swarm[A].pipelines.statistics().recoveries == 1
        # Whoever comes next is served too, by the same workers.
        assert await ask(swarm) == await uncut(PROMPT, 6)
        await swarm.quiet()


@pytest.mark.parametrize("part", [False, True], ids=["no part", "another stage"])
async def test_a_token_for_a_request_of_others_costs_its_sender_only(part: bool) -> None:
    pools = {A: FakePool("0:4"), LIAR: FakePool("4:8") if part else FakePool(), H: FakePool("8:12")}
    if not part:
        pools[M] = FakePool("4:8")
    async with open_swarm(pools) as swarm:

        async def intrude(position: int, layers: object) -> None:
            for chain in swarm[A].pipelines._requests.chains():
                token = StreamingToken(request_id=chain.context.request_id, index=0, token=1)
                await swarm[LIAR].router.send(A, *encode_job(token, b"no "))

        pools[H].before_forward = intrude
        with trio.fail_after(DEADLINE_S):
            assert await ask(swarm) == await uncut(PROMPT, 6)
        await swarm.quiet()
        assert swarm[A].trust.explain(LIAR).counts["broke protocol"] >= 1
        for here in pools:
            for there in pools.keys() - {LIAR}:
                assert set(swarm[here].trust.explain(there).counts) <= {"served"}


async def test_without_another_holder_bad_rows_cost_the_honest_stage_nothing() -> None:
    pools = {A: FakePool("0:4"), LIAR: FakePool("4:8"), H: FakePool("8:12")}
    async with open_swarm(pools) as swarm:
        change_rows(swarm, LIAR, not_numbers)
        for _ in range(6):
            with pytest.raises(SwarmLLMError), trio.fail_after(DEADLINE_S):
                await ask(swarm)
        assert swarm[A].trust.score(H) >= NEUTRAL
        assert swarm[H].trust.score(LIAR) < NEUTRAL
        swarm.kill(LIAR)
        await swarm.start(M, FakePool("4:8"))
        with trio.fail_after(DEADLINE_S):
            while M not in swarm[A].registry.nodes():
                await trio.lowlevel.checkpoint()
            assert await ask(swarm) == await uncut(PROMPT, 6)


@pytest.mark.parametrize("accused", [A, M, H, "nobody"])
async def test_a_stage_that_accuses_others_gains_nothing(accused: str) -> None:
    """It says that rows came to it broken; whoever it names is not held to it."""
    pools = {A: FakePool("0:4"), LIAR: FakePool("4:8"), M: FakePool("4:8"), H: FakePool("8:12")}
    async with open_swarm(pools) as swarm:
        node = swarm[LIAR]

        async def accuse(sender: str, header: bytes, payload: memoryview) -> None:
            message = decode_job(header, payload)
            if isinstance(message, LayerForward):
                error = PipelineError(request_id=message.request_id, node_id=accused, kind="bad_rows")
                await node.router.send(A, *encode_job(error))

        node.router.serve(node.pipelines.on_request, accuse)
        await prefer(swarm, LIAR, M)
        await twenty_requests(swarm, LIAR, (M, H))


@pytest.mark.parametrize("alone", [True, False])
async def test_the_origin_knows_that_its_own_rows_were_good(alone: bool) -> None:
    pools = {A: FakePool("0:4"), LIAR: FakePool("4:12")}
    if not alone:
        pools |= {M: FakePool("4:8"), H: FakePool("8:12")}
    async with open_swarm(pools) as swarm:
        node = swarm[LIAR]

        async def accuse(sender: str, header: bytes, payload: memoryview) -> None:
            message = decode_job(header, payload)
            if isinstance(message, LayerForward):
                error = PipelineError(request_id=message.request_id, node_id=A, kind="bad_rows")
                await node.router.send(A, *encode_job(error))

        node.router.serve(node.pipelines.on_request, accuse)
        if not alone:
            await prefer(swarm, LIAR, M, H)
            await twenty_requests(swarm, LIAR, (M, H))
            return
        with pytest.raises(RemoteError), trio.fail_after(DEADLINE_S):
            await ask(swarm)
        assert swarm[A].trust.score(LIAR) < NEUTRAL


@pytest.mark.parametrize("layers", ["4:8", "0:12"])
@pytest.mark.parametrize("busy", [True, False])
async def test_a_stage_that_stays_silent_is_not_asked_again_while_there_are_others(
    busy: bool, layers: str, patient_clock: MockClock
) -> None:
    pools = {A: FakePool("0:4"), LIAR: FakePool(layers), M: FakePool("4:8"), H: FakePool("8:12")}
    async with open_swarm(pools) as swarm:
        node, n_asked = swarm[LIAR], 0
        real = node.pipelines.on_request

        async def seem_busy(sender: str, body: bytes) -> bytes:
            nonlocal n_asked
            request = decode_request(body)
            if isinstance(request, ProbeStage):
                return encode_response(StageState(request_id=request.request_id, known=True, busy=busy))
            n_asked += 1
            return await real(sender, body)

        async def nothing(sender: str, header: bytes, payload: memoryview) -> None:
            pass

        node.router.serve(seem_busy, nothing)
        await prefer(swarm, LIAR, M)
        for _ in range(3):
            assert await ask(swarm) == await uncut(PROMPT, 6)
        assert n_asked == 1
        assert all(swarm[A].trust.score(other) >= NEUTRAL for other in (M, H))


async def test_a_retry_does_without_the_nodes_of_this_requests_pipeline_before_others_that_are_doubted(
    patient_clock: MockClock,
) -> None:
    """Nobody can know which of the two other stages is to blame. The honest holder of the same layers is
    doubted more, because of earlier pipelines: without it the retry would have the liar again."""
    pools = {LIAR: FakePool("0:4"), M: FakePool("0:4"), A: FakePool("4:8"), H: FakePool("8:12")}
    async with open_swarm(pools, settings=PipelineSettings(hedge=0.0)) as swarm:
        node = swarm[LIAR]
        real = node.pipelines.on_request

        async def seem_idle(sender: str, body: bytes) -> bytes:
            request = decode_request(body)
            if isinstance(request, ProbeStage):
                return encode_response(StageState(request_id=request.request_id, known=True, busy=False))
            return await real(sender, body)

        async def nothing(sender: str, header: bytes, payload: memoryview) -> None:
            pass

        node.router.serve(seem_idle, nothing)
        for _ in range(2):
            swarm[A].pipelines._suspects.doubt([M], trio.current_time())
        assert await ask(swarm) == await uncut(PROMPT, 6)
        assert swarm[A].pipelines.statistics().retries == 1


async def test_progress_that_is_none_resets_no_deadline(patient_clock: MockClock) -> None:
    pools = {A: FakePool("0:4"), LIAR: FakePool("4:12"), M: FakePool("4:12")}
    async with open_swarm(pools) as swarm:
        node = swarm[LIAR]

        async def again_and_again(request_id: str) -> None:
            while True:
                await node.router.send(A, *encode_job(PrefillProgress(request_id=request_id, position=1)))
                await trio.sleep(2)

        async def repeat(sender: str, header: bytes, payload: memoryview) -> None:
            message = decode_job(header, payload)
            if isinstance(message, LayerForward):
                node.router.start(again_and_again, message.request_id)

        node.router.serve(node.pipelines.on_request, repeat)
        await prefer(swarm, LIAR, M)
        began_s = trio.current_time()
        assert await ask(swarm) == await uncut(PROMPT, 6)
        assert trio.current_time() - began_s < 150


async def test_a_token_that_the_model_does_not_have_is_the_last_stages_fault() -> None:
    pools = {A: FakePool("0:4"), LIAR: FakePool("4:12"), M: FakePool("4:12")}
    async with open_swarm(pools) as swarm:
        router, send = swarm[LIAR].router, swarm[LIAR].router.send

        async def no_token(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
            message = decode_job(header, payload)
            if isinstance(message, StreamingToken):
                reported = StreamingToken(request_id=message.request_id, index=message.index, token=2**31 - 1)
                header, payload = encode_job(reported, payload)
            await send(receiver, header, payload)

        router.send = no_token  # type: ignore[method-assign]
        await prefer(swarm, LIAR, M)
        with trio.fail_after(DEADLINE_S):
            assert await ask(swarm) == await uncut(PROMPT, 6)
        assert swarm[A].trust.score(LIAR) < NEUTRAL
        await twenty_requests(swarm, LIAR, (M,))


async def test_a_stage_that_does_not_end_at_the_last_token_asked_for_costs_nobody_else_anything() -> None:
    pools = {A: FakePool("0:4"), LIAR: FakePool("4:12"), M: FakePool("4:12")}
    async with open_swarm(pools) as swarm:
        router, send = swarm[LIAR].router, swarm[LIAR].router.send

        async def no_end(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
            message = decode_job(header, payload)
            if isinstance(message, StreamingToken) and message.finish_reason is not None:
                for more in (0, 1):
                    reported = StreamingToken(
                        request_id=message.request_id, index=message.index + more, token=message.token
                    )
                    await send(receiver, *encode_job(reported, payload))
                return
            await send(receiver, header, payload)

        router.send = no_end  # type: ignore[method-assign]
        await prefer(swarm, LIAR, M)
        for _ in range(3):
            with trio.fail_after(DEADLINE_S):
                assert await ask(swarm) == await uncut(PROMPT, 6)
        assert swarm[A].trust.score(M) >= NEUTRAL


async def test_a_report_of_the_last_stage_about_the_ring_is_no_breach() -> None:
    """The last stage hands the token to the first one."""
    stages = (Stage(node_id=B, start=0, end=4), Stage(node_id=C, start=4, end=12))
    view = RequestView(node_id=A, origin=A, stages=stages, prompt_here=True)
    assert view.hands_to(A, B)
    assert view.hands_to(B, C)
    assert view.hands_to(C, B)
    assert not view.hands_to(A, C)
    assert not view.hands_to(B, B)


@pytest.mark.parametrize("skip", ["a position", "to numbers that are none"])
async def test_rows_that_lead_nowhere_cost_no_honest_stage_its_trust(skip: str) -> None:
    pools = {A: FakePool("0:4"), LIAR: FakePool("4:6"), M: FakePool("4:6"), H: FakePool("6:9")}
    pools[LAST] = FakePool("9:12")

    def twist(message: LayerForward, payload: bytes) -> tuple[bytes, bytes | memoryview]:
        if skip == "a position":
            moved = msgspec.structs.replace(message, position=message.position + 3)
            return encode_job(moved, payload)
        return encode_job(message, tensor_bytes(np.full((message.n_tokens, N_EMBD), 1e30, np.float32)))

    async with open_swarm(pools) as swarm:
        run = pools[H]._run

        def overflow(slot: Any, layers: Any, position: int, rows: Any) -> Any:
            hidden = run(slot, layers, position, np.minimum(rows, 1e6))
            return hidden if rows.max() < 1e20 else np.full_like(hidden, np.inf)

        pools[H]._run = overflow  # type: ignore[method-assign]
        change_rows(swarm, LIAR, twist)
        await prefer(swarm, LIAR, M)
        for _ in range(3):
            with trio.fail_after(DEADLINE_S):
                assert await ask(swarm) == await uncut(PROMPT, 6)
        for here in (A, H, LAST, M):
            for there in (H, LAST, M):
                assert swarm[here].trust.score(there) >= NEUTRAL, (here, there)


@pytest.mark.parametrize("n_copies", [3, 60])
async def test_a_stage_that_is_sent_too_much_at_once_keeps_its_trust(n_copies: int) -> None:
    pools = {A: FakePool("0:4"), LIAR: FakePool("4:6"), M: FakePool("4:6"), H: FakePool("6:9")}
    pools[LAST] = FakePool("9:12")
    async with open_swarm(pools) as swarm:
        router, send = swarm[LIAR].router, swarm[LIAR].router.send

        async def again_and_again(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
            for _ in range(n_copies):
                await send(receiver, header, payload)

        router.send = again_and_again  # type: ignore[method-assign]
        await prefer(swarm, LIAR, M)
        for _ in range(3):
            with trio.fail_after(DEADLINE_S):
                assert await ask(swarm)
        for here in (A, H, LAST, M):
            for there in (H, LAST, M):
                assert swarm[here].trust.score(there) >= NEUTRAL, (here, there)


def test_what_a_node_says_of_stages_that_are_not_its_own_does_not_count() -> None:
    stages = (
        Stage(node_id=A, start=0, end=4),
        Stage(node_id=B, start=4, end=8),
        Stage(node_id=C, start=8, end=12),
    )
    said = {
        B: (StageRows(0, 9, 9), StageRows(1, 7, 7), StageRows(2, 9, 9), StageRows(255, 9, 9)),
        C: (StageRows(2, 5, 0),),
    }
    assert [(each.n_rows, each.n_journal) for each in left_of(stages, said)] == [(0, 0), (7, 7), (5, 0)]
