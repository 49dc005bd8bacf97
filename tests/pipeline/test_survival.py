"""Streams that outlive their nodes: whatever breaks, the text goes on where it was."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from random import Random

import pytest
import trio
from deadlines import DEADLINE_S
from node_ids import A, B, C, D, E, M, node_id_named
from trio.testing import MockClock

from bench.common.arithmetic import FakePool, uncut
from swarmllm.errors import NodeUnreachable, NoPipeline, RemoteError, SwarmLLMError, WorkerDied
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.origin.generation import Generation
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.swarm.peers.trust import NEUTRAL
from swarmllm_proto.codec import decode_request
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import PipelineAssignment

from .fakes import Swarm, open_swarm

SETTINGS = PipelineSettings(prefill_chunk_tokens=4)
PROMPT = "what outlives its nodes?"
N_TOKENS = 24
Act = Callable[[int], Awaitable[None]]


async def read(swarm: Swarm, node_id: str, act: Act) -> tuple[str, Generation]:
    """The text, with `act` called after each token with its index."""
    text = ""
    async with swarm[node_id].pipelines.generate(
        Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=N_TOKENS)
    ) as generation:
        indices = []
        async for piece in generation:
            text += piece.text
            indices.append(piece.index)
            await act(piece.index)
    assert indices == list(range(N_TOKENS))
    return text, generation


def pools_by_id(holdings: Mapping[NodeId, str]) -> dict[NodeId, FakePool]:
    return {node_id: FakePool(*ranges.split()) for node_id, ranges in holdings.items()}


def pools_of(**holdings: str) -> dict[str, FakePool]:
    """By letter of the node."""
    return pools_by_id({node_id_named(letter): ranges for letter, ranges in holdings.items()})


def kills(swarm: Swarm, *node_ids: str, at: int = 5) -> Act:
    async def act(index: int) -> None:
        if index == at:
            for node_id in node_ids:
                swarm.kill(node_id)

    return act


@pytest.mark.parametrize(("victim", "spare"), [(B, "4:8"), (C, "8:12")])
async def test_a_dead_node_is_replaced_by_another_holder(victim: str, spare: str) -> None:
    async with open_swarm(pools_of(a="0:4", b="4:8", c="8:12", d=spare), settings=SETTINGS) as swarm:
        with trio.fail_after(DEADLINE_S):
            text, generation = await read(swarm, A, kills(swarm, victim))
        assert text == await uncut(PROMPT, N_TOKENS)
        assert D in {stage.node_id for stage in generation.route}
        assert (generation.n_recoveries, generation.n_generated) == (1, N_TOKENS)
        assert generation.timings.decode_s > 0
        statistics = swarm[A].pipelines.statistics()
        assert (statistics.recoveries, statistics.retries) == (1, 0)
        await swarm.quiet()


async def test_two_nodes_that_die_together_are_replaced() -> None:
    pools = pools_of(a="0:4", b="4:8", c="8:12", d="4:8", e="8:12")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        with trio.fail_after(DEADLINE_S):
            text, generation = await read(swarm, A, kills(swarm, B, C))
        assert text == await uncut(PROMPT, N_TOKENS)
        assert [stage.node_id for stage in generation.route] == [A, D, E]
        await swarm.quiet()


async def test_one_node_dies_after_the_other() -> None:
    pools = pools_of(a="", b="0:12", c="0:6", d="6:12", e="0:12")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        order = iter([B, E])

        async def act(index: int) -> None:
            if index in (3, 11):
                swarm.kill(next(order))

        with trio.fail_after(DEADLINE_S):
            text, generation = await read(swarm, A, act)
        assert text == await uncut(PROMPT, N_TOKENS)
        assert generation.n_recoveries == 2
        assert [stage.node_id for stage in generation.route] == [C, D]
        await swarm.quiet()


async def test_the_stream_waits_for_the_dead_node_and_goes_on_when_it_is_back(
    patient_clock: MockClock,
) -> None:
    """Not only when it looks again by itself, which it does after 0.75 s and 1.25 s."""
    async with (
        open_swarm(pools_of(a="0:4", b="4:8", c="8:12"), settings=SETTINGS) as swarm,
        trio.open_nursery() as nursery,
    ):

        async def return_later() -> None:
            await trio.sleep(0.9)
            await swarm.start(B, FakePool("4:8"))

        async def act(index: int) -> None:
            if index == 5:
                swarm.kill(B)
                nursery.start_soon(return_later)

        started_s = trio.current_time()
        text, generation = await read(swarm, A, act)
        assert text == await uncut(PROMPT, N_TOKENS)
        assert generation.n_recoveries == 1
        assert 0.9 <= generation.timings.decode_s <= trio.current_time() - started_s < 1.2
        await swarm.quiet()


async def test_without_a_replacement_the_stream_ends_with_what_is_missing(patient_clock: MockClock) -> None:
    settings = PipelineSettings(failover_timeout_s=3)
    async with open_swarm(pools_of(a="0:4", b="4:8", c="8:12"), settings=settings) as swarm:
        started_s = trio.current_time()
        with pytest.raises(
            NoPipeline, match=r"b.* disconnected .*nobody could go on with it within 3 s.*holds layers 4:8"
        ):
            await read(swarm, A, kills(swarm, B))
        assert trio.current_time() - started_s == pytest.approx(3, abs=0.6)
        await swarm.quiet()


async def test_a_client_that_leaves_during_the_pause_leaves_nothing_behind(patient_clock: MockClock) -> None:
    async with open_swarm(pools_of(a="0:4", b="4:8", c="8:12"), settings=SETTINGS) as swarm:
        with trio.move_on_after(1) as scope:
            await read(swarm, A, kills(swarm, B))
        assert scope.cancelled_caught
        await swarm.quiet()


def dies_at(positions: set[int]) -> Callable[[int, LayerRange], Awaitable[None]]:
    """A worker that dies when it gets to these positions, once each."""

    async def before_forward(position: int, layers: LayerRange) -> None:
        if position in positions:
            positions.discard(position)
            raise WorkerDied("worker 4711 was killed by signal 9")

    return before_forward


@pytest.mark.parametrize("where", [A, B, C])
async def test_a_worker_that_dies_is_asked_again_once_it_is_back(where: str) -> None:
    pools = pools_of(a="0:4", b="4:8", c="8:12")
    pools[where].before_forward = dies_at({len(PROMPT) + 3, len(PROMPT) + 9})
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        with trio.fail_after(DEADLINE_S):
            text, generation = await read(swarm, A, kills(swarm))
        assert text == await uncut(PROMPT, N_TOKENS)
        assert generation.n_recoveries == 2
        await swarm.quiet()


@pytest.mark.parametrize("position", [0, len(PROMPT) + 7])
async def test_a_worker_here_that_runs_the_whole_model_dies(position: int) -> None:
    pools = pools_of(a="0:12", b="")
    pools[A].before_forward = dies_at({position})
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        with trio.fail_after(DEADLINE_S):
            text, generation = await read(swarm, A, kills(swarm))
        assert text == await uncut(PROMPT, N_TOKENS)
        assert generation.is_local
        statistics = swarm[A].pipelines.statistics()
        assert (statistics.retries, statistics.recoveries) == ((1, 0) if position == 0 else (0, 1))
        await swarm.quiet()


async def test_a_request_that_kills_every_worker_is_given_up() -> None:
    pools = pools_of(a="0:4", b="4:12", c="4:12")
    n_deaths = 0

    async def always(position: int, layers: LayerRange) -> None:
        nonlocal n_deaths
        # Also as a prompt: a recovery comes here with everything that has been said.
        if position >= len(PROMPT) + 4:
            n_deaths += 1
            raise WorkerDied("worker 4711 was killed by signal 11")

    pools[B].before_forward = pools[C].before_forward = always
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        with pytest.raises(RemoteError, match="signal 11"), trio.fail_after(DEADLINE_S):
            await read(swarm, A, kills(swarm))
        assert n_deaths == 3
        await swarm.quiet()


async def test_only_the_last_stage_is_told_what_has_been_said() -> None:
    seen: list[tuple[str, PipelineAssignment]] = []
    pools = pools_of(a="0:3", b="3:6", c="6:9", d="9:12", e="3:6")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        for node_id in (B, C, D, E):
            pipelines = swarm[node_id].pipelines

            async def listen(
                sender: str, body: bytes, node_id: str = node_id, inner: object = pipelines.on_request
            ) -> bytes:
                assignment = decode_request(body)
                assert isinstance(assignment, PipelineAssignment)
                seen.append((node_id, assignment))
                return await inner(sender, body)  # type: ignore[operator, no-any-return]

            swarm[node_id].router.serve(listen, pipelines.on_message)
        await read(swarm, A, kills(swarm, B, at=6))
    later = [(node_id, assignment) for node_id, assignment in seen[3:]]
    assert {node_id for node_id, _ in later} == {E, C, D}
    assert {node_id for node_id, assignment in later if assignment.generated} == {D}
    assert len({assignment.request_id for _, assignment in seen}) == 2
    (last,) = [assignment for node_id, assignment in later if node_id == D]
    assert len(last.generated) >= 7
    assert last.sampling.seed is not None


@pytest.mark.parametrize("seed", range(10))
async def test_whatever_dies_and_returns_the_text_is_the_same(seed: int, patient_clock: MockClock) -> None:
    """Five nodes with random ranges; nodes die at random tokens, some together, and return after a while."""
    random = Random(seed)
    holdings = {A: random.choice(["", "0:4", "4:8"])} | {
        node_id: random.choice(["0:4", "4:8", "8:12", "0:4 4:8", "4:8 8:12", "0:12"])
        for node_id in (B, C, D, E)
    }
    for layers in ("0:4", "4:8", "8:12"):
        holdings[random.choice((B, C, D, E))] += f" {layers}"
    holdings = {node_id: " ".join(sorted(set(text.split()))) for node_id, text in holdings.items()}
    async with (
        open_swarm(pools_by_id(holdings), settings=SETTINGS) as swarm,
        trio.open_nursery() as nursery,
    ):

        async def return_later(node_id: str) -> None:
            await trio.sleep(random.uniform(0, 0.6))
            await swarm.start(node_id, FakePool(*holdings[node_id].split()))

        async def act(index: int) -> None:
            if random.random() < 0.2:
                for node_id in random.sample((B, C, D, E), random.randrange(1, 3)):
                    if node_id in swarm.nodes:
                        swarm.kill(node_id)
                        nursery.start_soon(return_later, node_id)

        text, _ = await read(swarm, A, act)
        assert text == await uncut(PROMPT, N_TOKENS)
        await swarm.quiet()


async def test_a_failure_that_no_other_pipeline_would_mend_ends_the_stream() -> None:
    pools = pools_of(a="0:12")

    async def fail(position: int, layers: LayerRange) -> None:
        if position > len(PROMPT):
            raise SwarmLLMError("something else")

    pools[A].before_forward = fail
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        with pytest.raises(SwarmLLMError, match="something else"):
            await read(swarm, A, kills(swarm))


async def test_with_no_patience_a_stream_ends_with_its_pipeline() -> None:
    mortal = PipelineSettings(failover_timeout_s=0)
    async with open_swarm(pools_of(a="0:4", b="4:12", c="4:12"), settings=mortal) as swarm:
        with pytest.raises(NodeUnreachable, match="disconnected"):
            await read(swarm, A, kills(swarm, B, C))


@pytest.mark.parametrize("cut_off", [(B,), (B, D), (B, D, E)])
async def test_who_is_cut_off_from_the_only_holder_of_a_stage_is_done_without(cut_off: tuple[NodeId]) -> None:
    """The only holder refuses, because it does not reach the first stage. It is the first stage that has to
    change."""
    firsts = {"b": "0:4", "d": "0:4", "e": "0:4", "f": "0:4"}
    async with open_swarm(pools_of(a="", c="4:8", m="8:12", **firsts), settings=SETTINGS) as swarm:
        for first in cut_off:
            swarm.network.cut(first, M)
        for _ in range(20):
            text, generation = await read(swarm, A, kills(swarm))
            assert text == await uncut(PROMPT, N_TOKENS)
            assert generation.route[0].node_id not in cut_off
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in swarm.nodes if node_id != A)
        await swarm.quiet()
