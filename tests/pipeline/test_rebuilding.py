"""A stream goes on with what its broken pipeline left: only lost stages compute again, wherever it breaks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import trio
from deadlines import DEADLINE_S
from node_ids import A, B, C, D, E, F, X, node_id_named
from trio.testing import MockClock

from bench.common.arithmetic import FakePool, _Slot, uncut
from swarmllm.errors import WorkerError
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.lifecycle import SessionState
from swarmllm_proto.codec import decode_job, decode_request, encode_response
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import LayerForward, PipelineAck, PipelineAssignment, ReplayRows

from .fakes import open_swarm
from .test_damage import damage_on_arrival
from .test_survival import N_TOKENS, PROMPT, SETTINGS, kills, pools_by_id, pools_of, read

AT = 5
"""The token after which something breaks."""


def n_prefill_rows(pool: FakePool) -> int:
    """Rows that came in pieces of several or in the middle of a prompt, as those of a prompt do."""
    return sum(call[3] for call in pool.calls if call[0] == "forward" and call[2] < len(PROMPT))


def straddling(pool: FakePool) -> list[Any]:
    """Pieces with rows of the prompt and of what came of it."""
    forwards = [call for call in pool.calls if call[0] == "forward"]
    return [call for call in forwards if call[2] < len(PROMPT) < call[2] + call[3]]


@pytest.mark.parametrize("at", [0, 1, 7, N_TOKENS - 2])
@pytest.mark.parametrize(
    ("holdings", "victims", "spares"),
    [
        ({A: "0:4", B: "4:8", C: "8:12", D: "4:8"}, (B,), (D,)),
        ({A: "0:4", B: "4:8", C: "8:12", D: "8:12"}, (C,), (D,)),
        ({A: "", B: "0:4", C: "4:12", D: "0:4"}, (B,), (D,)),
        ({A: "0:3", B: "3:6", C: "6:9", D: "9:12", E: "3:6", F: "6:9"}, (B, C), (E, F)),
        ({A: "0:3", B: "3:6", C: "6:9", D: "9:12", E: "3:6", F: "9:12"}, (B, D), (E, F)),
        ({A: "", B: "0:4", C: "4:8", D: "8:12", E: "0:4", F: "4:8"}, (B, C), (E, F)),
    ],
)
async def test_only_the_lost_stages_compute_again(
    holdings: dict[str, str], victims: tuple[NodeId, ...], spares: tuple[NodeId, ...], at: int
) -> None:
    # The last piece of the prompt is shorter than the others.
    settings = PipelineSettings(prefill_chunk_tokens=5)
    async with open_swarm(pools_by_id(holdings), settings=settings) as swarm:
        pools = {node_id: node.pool for node_id, node in swarm.nodes.items()}
        expected = await uncut(PROMPT, N_TOKENS)
        route = await swarm[A].pipelines.stages_for(swarm.entry)
        with trio.fail_after(DEADLINE_S):
            text, generation = await read(swarm, A, kills(swarm, *victims, at=at))
        assert text == expected
        assert (generation.n_recoveries, generation.n_rebuilt) == (1, 1)
        assert swarm[A].pipelines.statistics().rebuilt == 1
        repaired = [stage.node_id for stage in generation.route]
        replaced = iter(spares)
        assert repaired == [next(replaced) if s.node_id in victims else s.node_id for s in route]
        for stage in route:
            if stage.node_id not in victims and stage.node_id not in spares:
                assert n_prefill_rows(pools[stage.node_id]) == len(PROMPT), stage.node_id
        for node_id in spares:
            assert not straddling(pools[node_id]), "rows of the prompt are computed in other batches"
        await swarm.quiet()


@pytest.mark.parametrize(
    ("victim", "spare", "ranges"), [(B, C, "4:8 8:12"), (B, A, "0:4 4:8"), (C, A, "0:4 8:12")]
)
async def test_a_stage_that_stays_takes_the_lost_ones_place_beside_its_own(
    victim: str, spare: str, ranges: str
) -> None:
    async with open_swarm(pools_of(a="0:4", b="4:8", c="8:12"), settings=SETTINGS) as swarm:
        pool = swarm[spare].pool

        async def act(index: int) -> None:
            if index == AT:
                pool.ranges = FakePool(*ranges.split()).ranges
                await swarm[spare].announce(swarm.entry, pool.ranges)
                while len(swarm[A].registry.holders(swarm.entry.model_id)) < 4 and spare != A:
                    await trio.lowlevel.checkpoint()
                swarm.kill(victim)

        with trio.fail_after(DEADLINE_S):
            text, generation = await read(swarm, A, act)
        assert text == await uncut(PROMPT, N_TOKENS)
        assert generation.n_rebuilt == 1
        order = {B: [A, spare, C], C: [A, B, spare]}[victim]
        assert [stage.node_id for stage in generation.route] == order
        await swarm.quiet()


async def test_without_a_journal_the_stages_above_compute_again_and_those_below_do_not() -> None:
    pools = pools_of(a="0:3", b="3:6", c="6:9", d="9:12", e="6:9")
    pools[B].keeps_journals = False
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        with trio.fail_after(DEADLINE_S):
            text, generation = await read(swarm, A, kills(swarm, C))
        assert text == await uncut(PROMPT, N_TOKENS)
        assert generation.n_rebuilt == 1
        # "b" is built from the journal of "a", which computes nothing.
        assert [n_prefill_rows(pools[node_id]) // len(PROMPT) for node_id in (A, B, D, E)] == [1, 2, 1, 1]
        await swarm.quiet()


async def test_with_no_journal_anywhere_the_origin_embeds_the_tokens_again() -> None:
    pools = pools_of(a="0:4", b="4:8", c="8:12", d="4:8")
    pools[A].keeps_journals = False
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        with trio.fail_after(DEADLINE_S):
            text, generation = await read(swarm, A, kills(swarm, B))
        assert text == await uncut(PROMPT, N_TOKENS)
        assert generation.n_rebuilt == 1
        assert [n_prefill_rows(pools[node_id]) // len(PROMPT) for node_id in (A, C, D)] == [2, 1, 1]
        await swarm.quiet()


async def test_the_spare_dies_too_and_then_another_one_goes_on() -> None:
    pools = pools_of(a="0:4", b="4:8", c="8:12", d="4:8", e="4:8")
    async with open_swarm(pools, settings=SETTINGS) as swarm:

        async def die(position: int, layers: LayerRange) -> None:
            if position == 8 and D in swarm.nodes:
                swarm.kill(D)
                await trio.sleep_forever()

        pools[D].before_forward = die
        with trio.fail_after(DEADLINE_S):
            text, generation = await read(swarm, A, kills(swarm, B))
        assert text == await uncut(PROMPT, N_TOKENS)
        assert (generation.n_recoveries, generation.n_rebuilt) == (1, 1)
        assert [n_prefill_rows(pools[node_id]) // len(PROMPT) for node_id in (A, C, E)] == [1, 1, 1]
        await swarm.quiet()


async def test_a_spare_that_is_lost_while_it_is_asked_costs_nobody_what_he_has() -> None:
    pools = pools_of(a="0:4", b="4:8", c="8:12", d="4:8", e="4:8")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        pipelines = swarm[D].pipelines

        async def die(sender: str, body: bytes) -> bytes:
            swarm.kill(D)
            await trio.sleep_forever()
            raise AssertionError

        async def busy(sender: str, body: bytes) -> bytes:
            """Has not been reached when the other is lost."""
            while D in swarm.nodes:
                await trio.lowlevel.checkpoint()
            return await serving(sender, body)

        serving = swarm[C].pipelines.on_request

        async def act(index: int) -> None:
            if index == AT:
                swarm[D].router.serve(die, pipelines.on_message)
                swarm[C].router.serve(busy, swarm[C].pipelines.on_message)
                swarm.kill(B)

        with trio.fail_after(DEADLINE_S):
            text, generation = await read(swarm, A, act)
        assert text == await uncut(PROMPT, N_TOKENS)
        assert [stage.node_id for stage in generation.route] == [A, E, C]
        assert [n_prefill_rows(pools[node_id]) // len(PROMPT) for node_id in (A, C, E)] == [1, 1, 1]
        await swarm.quiet()


async def test_a_spare_that_refuses_is_passed_over() -> None:
    pools = pools_of(a="0:4", b="4:8", c="8:12", d="4:8", e="4:8")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        pipelines = swarm[D].pipelines

        async def refuse(sender: str, body: bytes) -> bytes:
            request = decode_request(body)
            assert isinstance(request, PipelineAssignment)
            return encode_response(PipelineAck(request_id=request.request_id, accepted=False, reason="no"))

        swarm[D].router.serve(refuse, pipelines.on_message)
        with trio.fail_after(DEADLINE_S):
            text, generation = await read(swarm, A, kills(swarm, B))
        assert text == await uncut(PROMPT, N_TOKENS)
        assert [stage.node_id for stage in generation.route] == [A, E, C]
        await swarm.quiet()


async def test_where_a_journal_cannot_be_read_after_all_everything_is_computed_again() -> None:
    pools = pools_of(a="0:4", b="4:8", c="8:12", d="8:12", e="4:8")

    async def unreadable(*arguments: Any, **more: Any) -> Any:
        raise WorkerError("rows 0:4 of a journal that has 0", kind="position_gap")

    pools[B].read_journal = unreadable  # type: ignore[method-assign]
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        with trio.fail_after(DEADLINE_S):
            text, generation = await read(swarm, A, kills(swarm, C))
        assert text == await uncut(PROMPT, N_TOKENS)
        assert generation.n_recoveries == 1
        await swarm.quiet()


@pytest.mark.parametrize("position", [0, 8, 20])
async def test_a_row_that_is_damaged_while_a_stage_is_built_again_is_sent_again(position: int) -> None:
    pools = pools_of(a="0:4", b="4:8", c="8:12", d="8:12")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        positions = damage_on_arrival(swarm, D, lambda job: job.position == position)
        with trio.fail_after(DEADLINE_S):
            text, generation = await read(swarm, A, kills(swarm, C))
        assert positions == [position]
        assert text == await uncut(PROMPT, N_TOKENS)
        assert swarm[A].pipelines.statistics().repeats == 1
        assert generation.n_rebuilt == 1
        await swarm.quiet()


async def test_a_job_that_is_lost_costs_no_stage_anything(
    patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody is there and has everything: the newest token walks once more."""
    pools = pools_of(a="0:4", b="4:8", c="8:12")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        router = swarm[B].router
        send, lost = router.send, []

        async def lossy(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
            message = decode_job(header, payload)
            if isinstance(message, LayerForward) and message.position == len(PROMPT) + AT and not lost:
                lost.append(message)
                return
            await send(receiver, header, payload)

        monkeypatch.setattr(router, "send", lossy)
        text, generation = await read(swarm, A, kills(swarm))
        assert text == await uncut(PROMPT, N_TOKENS)
        assert (len(lost), generation.n_rebuilt) == (1, 1)
        assert [n_prefill_rows(pool) for pool in pools.values()] == [len(PROMPT)] * 3
        await swarm.quiet()


async def test_a_client_that_leaves_while_a_stage_is_built_again_leaves_nothing_behind() -> None:
    pools = pools_of(a="0:4", b="4:8", c="8:12", d="4:8")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        with trio.CancelScope() as client:

            async def leave(position: int, layers: LayerRange) -> None:
                if position == 8:
                    client.cancel()
                    await trio.lowlevel.checkpoint()

            pools[D].before_forward = leave
            await read(swarm, A, kills(swarm, B))
        assert client.cancelled_caught
        await swarm.quiet()


async def test_what_is_held_of_a_lost_origin_is_let_go() -> None:
    async with open_swarm(pools_of(a="0:4", b="4:8", c="8:12"), settings=SETTINGS) as swarm:
        reading = trio.CancelScope()

        async def both(index: int) -> None:
            if index == AT:
                swarm.kill(B)
                await swarm_holds(swarm[C])
                swarm.kill(A)
                reading.cancel()

        with reading, trio.fail_after(DEADLINE_S):
            await read(swarm, A, both)
        await swarm.quiet()


async def swarm_holds(node: Any) -> None:
    while not node.pool.held:
        await trio.lowlevel.checkpoint()


async def test_what_nobody_resumes_is_let_go_in_time(patient_clock: MockClock) -> None:
    settings = PipelineSettings(prefill_chunk_tokens=4, failover_timeout_s=3)
    async with open_swarm(pools_of(a="0:4", b="4:8", c="8:12"), settings=settings) as swarm:
        # The origin does not say so: to "c" its messages are lost.
        send = swarm[A].router.send

        async def deaf(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
            if receiver != C:
                await send(receiver, header, payload)

        swarm[A].router.send = deaf  # type: ignore[method-assign]
        with pytest.raises(Exception, match="nobody could go on"):
            await read(swarm, A, kills(swarm, B))
        await trio.sleep(4)
        await swarm.quiet()


async def test_no_more_is_held_than_could_run() -> None:
    settings = PipelineSettings(prefill_chunk_tokens=4, max_stage_requests=2)
    async with open_swarm(pools_of(a="0:4", b="4:12"), settings=settings) as swarm:
        sessions, pool = swarm[B].pipelines._sessions, swarm[B].pool
        for i in range(5):
            assignment = PipelineAssignment(
                request_id=f"r{i}",
                model_id=swarm.entry.model_id,
                origin=A,
                stages=await swarm[A].pipelines.stages_for(swarm.entry),
                n_prompt_tokens=len(PROMPT),
                sampling=Sampling(),
            )
            assert (await sessions.acknowledge(A, assignment)).accepted
            pool.slots[f"r{i}"] = _Slot()
            session = sessions.by_request[f"r{i}"]
            assert sessions.cancel(A, f"r{i}", hold=True)
            await session.done.wait()
        with trio.fail_after(DEADLINE_S):
            while len(pool.slots) > 2:
                await trio.lowlevel.checkpoint()
        assert {each.context.request_id for each in sessions.held()} == set(pool.slots) == {"r3", "r4"}
        for request_id in ("r3", "r4"):
            sessions.cancel(A, request_id)
        await swarm.quiet()


async def test_an_id_is_of_one_request_whether_it_runs_or_is_held() -> None:
    async with open_swarm(pools_of(a="0:4", b="4:12"), settings=SETTINGS) as swarm:
        sessions = swarm[B].pipelines._sessions
        assignment = PipelineAssignment(
            request_id="r",
            model_id=swarm.entry.model_id,
            origin=A,
            stages=await swarm[A].pipelines.stages_for(swarm.entry),
            n_prompt_tokens=len(PROMPT),
            sampling=Sampling(),
        )
        assert (await sessions.acknowledge(A, assignment)).accepted
        first = sessions.by_request["r"]
        # As one that gives its place up before a neighbour is lost.
        sessions.close(first)
        assert (await sessions.acknowledge(A, assignment)).accepted
        second = sessions.by_request["r"]
        assert second is not first
        first.stop(hold=True)
        await first.done.wait()
        assert first.state is not SessionState.HELD, "nobody could find it"
        assert sessions.running("r") is second
        assert not sessions.held()
        with trio.fail_after(DEADLINE_S):
            while first.state is not SessionState.ENDED:
                await trio.lowlevel.checkpoint()
        second.stop(hold=True)
        await second.done.wait()
        assert sessions.running("r") is None
        assert sessions.held() == [second]
        refused = await sessions.acknowledge(A, assignment)
        assert refused.reason == "the request id is in use"
        assert sessions.cancel(A, "r")
        await swarm.quiet()


async def test_a_stranger_gets_nothing_of_what_is_held_and_has_nothing_sent() -> None:
    """Another node names the request as if it resumed it, and asks for rows."""
    pools = pools_of(a="0:4", b="4:8", c="8:12", x="0:4")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        acks: list[PipelineAck] = []

        async def steal(index: int) -> None:
            if index != AT:
                return
            (request_id,) = swarm[B].pipelines._sessions.by_request
            session = swarm[B].pipelines._sessions.by_request[request_id]
            rows = ReplayRows(request_id=request_id, stage=1, position=0, n_tokens=4, until=2)
            assert not session.arrive_replay(X, rows)
            beyond = ReplayRows(request_id=request_id, stage=1, position=0, n_tokens=4, until=3)
            assert not session.arrive_replay(A, beyond)
            elsewhere = ReplayRows(request_id=request_id, stage=0, position=0, n_tokens=4, until=1)
            assert not session.arrive_replay(A, elsewhere)
            assignment = PipelineAssignment(
                request_id="stolen",
                model_id=swarm.entry.model_id,
                origin=X,
                stages=session.view.stages,
                n_prompt_tokens=len(PROMPT),
                sampling=session.context.sampling,
                resumes=(request_id,),
            )
            acks.append(await swarm[B].pipelines._sessions.acknowledge(X, assignment))
            swarm[B].pipelines._sessions.cancel(X, "stolen")

        with trio.fail_after(DEADLINE_S):
            text, generation = await read(swarm, A, steal)
        assert text == await uncut(PROMPT, N_TOKENS)
        assert (acks[0].accepted, acks[0].kept, generation.n_recoveries) == (True, (), 0)
        await swarm.quiet()


@pytest.mark.parametrize("seed", range(12))
async def test_wherever_and_whenever_one_node_dies_no_token_is_lost_or_repeated(
    seed: int, patient_clock: MockClock
) -> None:
    """A node dies in the middle of some forward, not between two tokens."""
    random = Random(seed)
    n_cuts = random.randrange(1, 5)
    bounds = [0, *sorted(random.sample(range(1, 12), n_cuts)), 12]
    ranges = [f"{start}:{end}" for start, end in pairwise(bounds)]
    holdings = {A: random.choice(["", ranges[0]])}
    holdings |= {node_id_named(f"n{i}"): text for i, text in enumerate(ranges)}
    holdings |= {node_id_named(f"s{i}"): text for i, text in enumerate(ranges)}
    pools = pools_by_id(holdings)
    victim = random.choice([node_id for node_id in pools if node_id != A])
    when = random.randrange(len(PROMPT) + 1, len(PROMPT) + N_TOKENS - 1)
    async with open_swarm(pools, settings=SETTINGS) as swarm:

        def at(when: int) -> Callable[[int, LayerRange], Any]:
            async def die(position: int, layers: LayerRange) -> None:
                if position == when and victim in swarm.nodes:
                    swarm.kill(victim)
                    await trio.sleep_forever()

            return die

        used = {stage.node_id for stage in (await swarm[A].pipelines.stages_for(swarm.entry))}
        pools[victim].before_forward = at(when)
        text, generation = await read(swarm, A, kills(swarm))
        assert text == await uncut(PROMPT, N_TOKENS)
        assert generation.n_rebuilt == generation.n_recoveries == (victim in used)
        await swarm.quiet()
