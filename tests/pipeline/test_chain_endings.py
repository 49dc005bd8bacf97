"""How a pipeline ends before its text does: its client leaves, a node is lost, a stage fails or is silent."""

from __future__ import annotations

import pytest
import trio
from deadlines import DEADLINE_S
from node_ids import A, B, C
from trio.testing import MockClock, wait_all_tasks_blocked

from bench.common.arithmetic import FakePool, uncut
from swarmllm.errors import (
    DeadlineExceeded,
    NodeBusy,
    NodeUnreachable,
    RemoteError,
    WorkerError,
)
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm_proto.ipc import Sampling

from .fakes import open_swarm
from .test_chain import PROMPT, SMALL_CHUNKS, ask

MORTAL = PipelineSettings(prefill_chunk_tokens=4, failover_timeout_s=0)
"""A stream ends with its pipeline."""


async def test_leaving_early_frees_every_node() -> None:
    pools = {A: FakePool("0:4"), B: FakePool("4:8"), C: FakePool("8:12")}
    async with open_swarm(pools, settings=SMALL_CHUNKS) as swarm:
        async with swarm[A].pipelines.generate(
            Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=4000)
        ) as generation:
            async for piece in generation:
                if piece.index == 3:
                    break
            assert all(pool.slots for pool in pools.values())
        await swarm.quiet()
        assert not any(pool.slots for pool in pools.values())


@pytest.mark.parametrize("phase", ["assigning", "prefill", "decode"])
async def test_a_cancelled_client_frees_every_node(phase: str) -> None:
    pools = {A: FakePool("0:4"), B: FakePool("4:8"), C: FakePool("8:12")}
    reached, never = trio.Event(), trio.Event()

    async def stop_at(position: int, layers: LayerRange) -> None:
        if position >= (len(PROMPT) + 3 if phase == "decode" else 4):
            reached.set()
            await never.wait()

    async with open_swarm(pools, settings=SMALL_CHUNKS) as swarm:
        if phase == "assigning":
            inner = swarm[B].pipelines.on_request

            async def slowly(sender: str, body: bytes) -> bytes:
                reached.set()
                await wait_all_tasks_blocked()
                return await inner(sender, body)

            swarm[B].router.serve(slowly, swarm[B].pipelines.on_message)
        else:
            pools[B].before_forward = stop_at
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, swarm, A)
            with trio.fail_after(DEADLINE_S):
                await reached.wait()
            nursery.cancel_scope.cancel()
        await wait_all_tasks_blocked(0.01)
        await swarm.quiet()


async def test_a_lost_node_fails_the_stream_at_once_and_the_others_are_freed() -> None:
    pools = {A: FakePool("0:4"), B: FakePool("4:8"), C: FakePool("8:12")}
    async with open_swarm(pools, settings=MORTAL) as swarm:
        texts: list[str] = []

        async def read() -> None:
            async with swarm[A].pipelines.generate(
                Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=4000)
            ) as generation:
                async for piece in generation:
                    texts.append(piece.text)
                    if piece.index == 5:
                        swarm.kill(B)

        with pytest.raises(NodeUnreachable, match="nick-b"), trio.fail_after(DEADLINE_S):
            await read()
        assert len(texts) >= 6
        await swarm.quiet()
        assert "".join(texts) == (await uncut(PROMPT, len(texts)))


async def test_a_lost_origin_frees_the_stages() -> None:
    pools = {A: FakePool("0:4"), B: FakePool("4:8"), C: FakePool("8:12")}
    async with open_swarm(pools, settings=SMALL_CHUNKS) as swarm, trio.open_nursery() as nursery:

        async def client() -> None:
            with pytest.raises(BaseException):  # noqa: B017, PT011 - it dies with its node
                await ask(swarm, A, n_tokens=4000)

        nursery.start_soon(client)
        with trio.fail_after(DEADLINE_S):
            while not pools[C].slots:
                await trio.lowlevel.checkpoint()
        swarm.kill(A)
        await swarm.quiet()
        nursery.cancel_scope.cancel()


async def test_a_node_lost_before_the_first_token_is_replaced_by_another_holder() -> None:
    pools = {A: FakePool("0:4"), B: FakePool("4:12"), C: FakePool("4:12")}
    async with open_swarm(pools, settings=SMALL_CHUNKS) as swarm:
        chosen = (await swarm[A].pipelines.stages_for(swarm.entry))[1].node_id

        async def die(position: int, layers: LayerRange) -> None:
            swarm.kill(chosen)
            await trio.sleep_forever()

        pools[chosen].before_forward = die
        with trio.fail_after(DEADLINE_S):
            assert await ask(swarm, A) == await uncut(PROMPT, 12)
        assert swarm[A].pipelines.statistics().retries == 1
        await swarm.quiet()


async def test_a_stage_that_refuses_is_avoided_if_it_can_be() -> None:
    pools = {A: FakePool("0:4"), B: FakePool("4:12"), C: FakePool("4:12")}
    async with open_swarm(pools) as swarm:
        pools[B].ranges = ()
        assert await ask(swarm, A) == await uncut(PROMPT, 12)
        pools[C].ranges = ()
        with pytest.raises(RemoteError, match=rf"node ({B}|{C}) refused: layers 4:12 are not loaded here"):
            await ask(swarm, A)
        await swarm.quiet()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (PipelineSettings(max_requests_per_model=1), "the model has 1 requests here already"),
        (PipelineSettings(max_stage_requests=1), "this node takes part in 1 requests already"),
    ],
)
async def test_a_stage_refuses_more_requests_than_it_may_take(
    settings: PipelineSettings, reason: str
) -> None:
    pools = {A: FakePool("0:4"), B: FakePool("4:12")}
    endless = Sampling(max_tokens=2000)
    async with open_swarm(pools, settings=settings) as swarm:
        async with swarm[A].pipelines.generate(Prompt(text=PROMPT), swarm.entry, endless):
            with pytest.raises(NodeBusy, match=reason):
                await ask(swarm, A)
        await swarm.quiet()
        assert await ask(swarm, A) == await uncut(PROMPT, 12)


async def test_a_missing_acknowledgement_fails_within_its_deadline(
    patient_clock: MockClock,
) -> None:
    pools = {A: FakePool("0:4"), B: FakePool("4:12")}
    async with open_swarm(pools) as swarm:

        async def silent(sender: str, body: bytes) -> bytes:
            await trio.sleep_forever()
            raise AssertionError

        swarm[B].router.serve(silent, swarm[B].pipelines.on_message)
        started_s = trio.current_time()
        with pytest.raises(NodeUnreachable, match="did not acknowledge within 10 s"):
            await ask(swarm, A)
        assert trio.current_time() - started_s == pytest.approx(10, abs=0.1)


async def test_a_silent_pipeline_fails_within_its_deadline(
    patient_clock: MockClock,
) -> None:
    pools = {A: FakePool("0:4"), B: FakePool("4:12")}

    async def hang(position: int, layers: LayerRange) -> None:
        await trio.sleep_forever()

    pools[B].before_forward = hang
    async with open_swarm(pools) as swarm:
        with pytest.raises(DeadlineExceeded, match="silent for 120 s"):
            await ask(swarm, A)
        await swarm.quiet()


async def test_a_stage_frees_a_request_of_which_nothing_more_is_heard(
    patient_clock: MockClock,
) -> None:
    pools = {A: FakePool("0:4"), B: FakePool("4:12")}
    settings = {A: MORTAL, B: PipelineSettings(silence_timeout_s=30)}
    async with open_swarm(pools, settings=settings) as swarm:

        async def stuck(position: int, layers: LayerRange) -> None:
            if position > len(PROMPT):
                await trio.sleep_forever()

        pools[A].before_forward = stuck
        with pytest.raises(DeadlineExceeded, match=rf"node nick-b \({B}\): nothing arrived for 30 s"):
            await ask(swarm, A)
        await swarm.quiet()


async def test_a_failing_stage_names_itself_to_the_client() -> None:
    pools = {A: FakePool("0:4"), B: FakePool("4:12")}

    async def fail(position: int, layers: LayerRange) -> None:
        raise WorkerError("out of luck", kind="engine")

    pools[B].before_forward = fail
    async with open_swarm(pools) as swarm:
        with pytest.raises(RemoteError, match=rf"node nick-b \({B}\): out of luck"):
            await ask(swarm, A)
        await swarm.quiet()


async def test_a_failing_stage_here_keeps_its_own_error() -> None:
    pools = {A: FakePool("0:4"), B: FakePool("4:12")}

    async def fail(position: int, layers: LayerRange) -> None:
        raise WorkerError("out of luck", kind="engine")

    pools[A].before_forward = fail
    async with open_swarm(pools) as swarm:
        with pytest.raises(WorkerError, match="out of luck"):
            await ask(swarm, A)
        await swarm.quiet()


async def test_a_defect_in_a_stage_costs_its_request_only(caplog: pytest.LogCaptureFixture) -> None:
    pools = {A: FakePool("0:4"), B: FakePool("4:12")}

    async def broken(position: int, layers: LayerRange) -> None:
        raise ZeroDivisionError("secret words")

    pools[B].before_forward = broken
    async with open_swarm(pools) as swarm:
        with pytest.raises(RemoteError, match="internal error") as failure:
            await ask(swarm, A)
        assert "secret" not in str(failure.value)
        pools[B].before_forward = None
        await swarm.quiet()
        assert await ask(swarm, A) == await uncut(PROMPT, 12)
