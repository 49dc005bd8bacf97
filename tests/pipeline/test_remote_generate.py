"""One stage on another node: the decode loop runs there, tokens stream back, and nothing else changes."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
import pytest
import trio
from deadlines import DEADLINE_S
from node_ids import A, B, M
from trio.testing import wait_all_tasks_blocked

from bench.common.arithmetic import FakePool, uncut
from swarmllm.errors import NoPipeline, WorkerDied
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.compute import GenerateCall
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.codec import encode_job, encode_request
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import PipelineAssignment, RemoteGenerateRequest, Stage
from swarmllm_proto.tensors import tensor_bytes

from .fakes import Swarm, open_swarm
from .test_survival import N_TOKENS, PROMPT, SETTINGS, dies_at, kills, pools_of, read


async def test_the_whole_loop_runs_there() -> None:
    pools = pools_of(a="", b="0:12")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        text, generation = await read(swarm, A, kills(swarm))
        assert text == await uncut(PROMPT, N_TOKENS)
        assert (generation.shape, generation.is_local) == ("remote-generate", False)
        assert [(stage.node_id, str(stage.layers)) for stage in generation.route] == [(B, "0:12")]
        assert not pools[A].calls
        # Nobody sent rows, and each token was computed once.
        assert [call[0] for call in pools[B].calls] == ["forward"] * N_TOKENS
        await swarm.quiet()


async def test_the_worker_is_told_whose_client_asks() -> None:
    """Clients of one node share KV to the token, those of others whole blocks."""
    asked: list[tuple[str | None, bool | None]] = []

    class Pool(FakePool):
        def generate(self, model: ModelFile, **call: Unpack[GenerateCall]) -> Any:
            asked.append((call.get("clients_of"), call.get("own_kv")))
            return super().generate(model, **call)

    async with open_swarm({A: FakePool(), B: Pool("0:12")}, settings=SETTINGS) as swarm:
        for node_id in (A, B):
            await read(swarm, node_id, kills(swarm))
    assert asked == [(A, True), (None, None)]


async def test_it_is_chosen_by_cost() -> None:
    """One hop less per token beats two stages of which one is at home."""
    async with open_swarm(pools_of(a="0:6", b="0:12", c="6:12"), settings=SETTINGS) as swarm:
        assert (await read(swarm, A, kills(swarm)))[1].shape == "remote-generate"


async def test_with_local_embedding_privacy_rows_go_there_instead_of_tokens() -> None:
    pools = pools_of(a="", b="0:12")
    settings = PipelineSettings(local_embedding_privacy=True)
    async with open_swarm(pools, settings=settings) as swarm:
        text, generation = await read(swarm, A, kills(swarm))
        assert text == await uncut(PROMPT, N_TOKENS)
        assert generation.shape == "chain"
        assert [call[0] for call in pools[A].calls] == ["embed"]
        await swarm.quiet()


async def test_leaving_early_frees_the_other_node() -> None:
    pools = pools_of(a="", b="0:12")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        async with swarm[A].pipelines.generate(
            Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=4000)
        ) as generation:
            async for piece in generation:
                if piece.index == 3:
                    break
            assert pools[B].slots
        await swarm.quiet()
        n_calls = len(pools[B].calls)
        await wait_all_tasks_blocked(0.01)
        assert len(pools[B].calls) == n_calls < 4000


async def test_a_stream_survives_its_only_stage() -> None:
    async with open_swarm(pools_of(a="", b="0:12", c="0:12"), settings=SETTINGS) as swarm:
        victim = (await swarm[A].pipelines.stages_for(swarm.entry))[0].node_id
        with trio.fail_after(DEADLINE_S):
            text, generation = await read(swarm, A, kills(swarm, victim))
        assert text == await uncut(PROMPT, N_TOKENS)
        assert (generation.shape, generation.n_recoveries) == ("remote-generate", 1)
        await swarm.quiet()


async def test_a_stream_goes_on_as_a_chain_where_no_node_has_everything() -> None:
    async with open_swarm(pools_of(a="", b="0:12", c="0:6", d="6:12"), settings=SETTINGS) as swarm:
        with trio.fail_after(DEADLINE_S):
            text, generation = await read(swarm, A, kills(swarm, B))
        assert text == await uncut(PROMPT, N_TOKENS)
        assert generation.shape == "chain"
        await swarm.quiet()


async def test_a_worker_that_dies_there_is_asked_again() -> None:
    pools = pools_of(a="", b="0:12")
    pools[B].before_forward = dies_at({len(PROMPT) + 4})
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        with trio.fail_after(DEADLINE_S):
            text, generation = await read(swarm, A, kills(swarm))
        assert text == await uncut(PROMPT, N_TOKENS)
        assert generation.n_recoveries == 1
        await swarm.quiet()


async def test_a_failure_there_is_told() -> None:
    pools = pools_of(a="", b="0:12")

    async def dies(position: int, layers: LayerRange) -> None:
        raise WorkerDied("worker 4711 was killed by signal 11")

    pools[B].before_forward = dies
    async with open_swarm(pools, settings=PipelineSettings(failover_timeout_s=0)) as swarm:
        with pytest.raises(Exception, match=rf"node nick-b \({B}\): worker 4711"):
            await read(swarm, A, kills(swarm))
        await swarm.quiet()


async def assign(swarm: Swarm, *stages: Stage) -> None:
    assignment = PipelineAssignment(
        request_id="r",
        model_id=swarm.entry.model_id,
        origin=M,
        stages=stages,
        n_prompt_tokens=3,
        sampling=Sampling(max_tokens=5),
    )
    await swarm[M].router.request(B, encode_request(assignment))


@pytest.mark.parametrize(
    "payload",
    [
        tensor_bytes(np.zeros(2, np.int32)),
        tensor_bytes(np.zeros((3, 1), np.int32)),
        tensor_bytes(np.zeros(3, np.float32)),
        b"",
    ],
    ids=["short", "deep", "float", "empty"],
)
async def test_a_prompt_that_is_not_what_was_assigned_ends_the_request(payload: bytes) -> None:
    pools = pools_of(a="", m="", b="0:12")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        await assign(swarm, Stage(node_id=B, start=0, end=12))
        message = RemoteGenerateRequest(request_id="r", n_tokens=3)
        await swarm[M].router.send(B, *encode_job(message, payload))
        await swarm.quiet()
        assert not pools[B].calls


async def test_only_the_origin_may_have_a_request_generated_and_only_by_a_single_stage() -> None:
    pools = pools_of(a="0:6", m="", b="0:6 6:12")
    prompt = tensor_bytes(np.ones(3, np.int32))
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        message = encode_job(RemoteGenerateRequest(request_id="r", n_tokens=3), prompt)
        await swarm[M].router.send(B, *message)
        await assign(swarm, Stage(node_id=A, start=0, end=6), Stage(node_id=B, start=6, end=12))
        for sender in (A, M):
            await swarm[sender].router.send(B, *message)
        await wait_all_tasks_blocked(0.01)
        assert swarm[B].pipelines.statistics().messages_ignored == 3
        assert not pools[B].calls


async def test_no_holder_left_is_said_so() -> None:
    settings = PipelineSettings(failover_timeout_s=0.05)
    async with open_swarm(pools_of(a="", b="0:12"), settings=settings) as swarm:
        with pytest.raises(NoPipeline, match="holds layers 0:12"):
            await read(swarm, A, kills(swarm, B))
        await swarm.quiet()
