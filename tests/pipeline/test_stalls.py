"""A stage that takes work and does none, or does it far too slowly, costs a client seconds, not minutes, and
itself its trust where it was idle; honest stages keep theirs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
import trio
from msgspec import UNSET, UnsetType
from node_ids import LIAR, A, B, C, D, H, M, node_id_named
from trio.testing import MockClock

from bench.common.arithmetic import FakePool, fake_entry, uncut
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.repair.probing import judge_states
from swarmllm.pipeline.repair.retry_policy import PipelineSpeed
from swarmllm.pipeline.route.inputs import (
    FASTEST_BYTES_PER_S,
    NetworkDistances,
    OwnLoad,
    route_inputs,
    workload,
)
from swarmllm.scheduling.speeds import PREFILL_ROWS, Observations
from swarmllm.swarm.peers.trust import NEUTRAL, WORK_MIN
from swarmllm_proto.codec import decode_job, decode_request, encode_job, encode_response
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import (
    LayerForward,
    PipelineError,
    PrefillProgress,
    ProbeStage,
    Stage,
    StageState,
    StreamingToken,
)

from .fakes import Swarm, computes, open_swarm
from .twenty import twenty_requests

PROMPT = "who is at work?"
N_TOKENS = 8


async def ask(swarm: Swarm) -> float:
    """How long it took, by the mock clock."""
    began_s = trio.current_time()
    async with swarm[A].pipelines.generate(
        Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=N_TOKENS)
    ) as generation:
        text = "".join([piece.text async for piece in generation])
    assert text == await uncut(PROMPT, N_TOKENS)
    return trio.current_time() - began_s


def three_stages() -> dict[str, FakePool]:
    return {A: FakePool("0:4"), LIAR: FakePool("4:8"), M: FakePool("4:8"), H: FakePool("8:12")}


async def boast(swarm: Swarm) -> None:
    """The liar announces that it computes for nothing."""
    model_id = swarm.entry.model_id
    await swarm.tell(A, {LIAR: computes(model_id, 1e-12), M: computes(model_id, 1e-3)})


def be_silent(swarm: Swarm, *, busy: bool, rows: tuple[int | UnsetType, int | UnsetType]) -> list[str]:
    """The liar acknowledges and does nothing; it says of itself that it is so far. Returns the ids of the
    assignments that it gets."""
    node, asked = swarm[LIAR], []
    real = node.pipelines.on_request

    async def answer(sender: str, body: bytes) -> bytes:
        request = decode_request(body)
        if isinstance(request, ProbeStage):
            state = StageState(
                request_id=request.request_id, known=True, busy=busy, n_received=rows[0], n_sent=rows[1]
            )
            return encode_response(state)
        asked.append(request.request_id)
        return await real(sender, body)

    async def nothing(sender: str, header: bytes, payload: memoryview) -> None:
        pass

    node.router.serve(answer, nothing)
    return asked


ADMITS, DENIES, CLAIMS_DONE, SILENT = (1000, 0), (0, 0), (1000, 1000), (UNSET, UNSET)


@pytest.mark.parametrize("rows", [ADMITS, DENIES, CLAIMS_DONE, SILENT])
@pytest.mark.parametrize("busy", [True, False])
async def test_a_silent_stage_is_left_for_its_rival_within_seconds(
    busy: bool, rows: tuple[int | UnsetType, int | UnsetType], patient_clock: MockClock
) -> None:
    async with open_swarm(three_stages()) as swarm:
        asked = be_silent(swarm, busy=busy, rows=rows)
        await boast(swarm)
        assert await ask(swarm) < 30
        for _ in range(19):
            assert await ask(swarm) < 1
        assert len(asked) == 1
        # A standby was earlier; the silent stage is asked behind the client's back.
        await trio.sleep(20)
        trust = swarm[A].trust
        assert all(trust.score(other) >= NEUTRAL for other in (M, H))
        if not busy and rows in (ADMITS, DENIES):
            assert trust.score(LIAR) < NEUTRAL
        swarm.kill(LIAR)
        assert await ask(swarm) < 1


async def test_a_stage_that_stalls_again_and_again_is_out_of_all_routes(patient_clock: MockClock) -> None:
    pools = {A: FakePool("0:4"), LIAR: FakePool("4:8"), H: FakePool("8:12")}
    async with open_swarm(pools) as swarm:
        be_silent(swarm, busy=False, rows=ADMITS)
        for _ in range(20):
            with pytest.raises(Exception, match=r"does not do its part|no connected node|cannot run now"):
                await ask(swarm)
        assert swarm[A].trust.score(LIAR) < WORK_MIN
        assert swarm[A].trust.score(H) >= NEUTRAL
        swarm.kill(LIAR)
        await swarm.start(M, FakePool("4:8"))
        with trio.fail_after(60):
            while M not in swarm[A].registry.nodes():
                await trio.lowlevel.checkpoint()
        assert await ask(swarm) < 1


async def test_a_stage_that_gives_a_token_every_five_seconds_is_left(patient_clock: MockClock) -> None:
    pools = {A: FakePool("0:4"), LIAR: FakePool("4:12"), M: FakePool("4:12")}
    async with open_swarm(pools) as swarm:
        router, send = swarm[LIAR].router, swarm[LIAR].router.send

        async def slowly(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
            if isinstance(decode_job(header, payload), StreamingToken):
                await trio.sleep(4.9)
            await send(receiver, header, payload)

        router.send = slowly  # type: ignore[method-assign]
        await boast(swarm)
        assert await ask(swarm) < 25
        assert await ask(swarm) < 1
        await twenty_requests(swarm, LIAR, (M,))


async def test_a_slow_stage_without_a_rival_is_waited_for(patient_clock: MockClock) -> None:
    async with open_swarm({A: FakePool("0:4"), M: FakePool("4:12")}) as swarm:
        router, send = swarm[M].router, swarm[M].router.send

        async def slowly(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
            await trio.sleep(4.9)
            await send(receiver, header, payload)

        router.send = slowly  # type: ignore[method-assign]
        assert await ask(swarm) > 30
        assert swarm[A].pipelines.statistics().recoveries == 0
        assert swarm[A].trust.score(M) >= NEUTRAL


async def test_progress_that_is_repeated_resets_no_deadline(patient_clock: MockClock) -> None:
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
        await boast(swarm)
        assert await ask(swarm) < 30
        assert await ask(swarm) < 1
        await twenty_requests(swarm, LIAR, (M,))


async def test_accusations_of_many_exclude_nobody_who_is_needed() -> None:
    pools = {A: FakePool("0:4"), M: FakePool("4:12")}
    liars = [node_id_named(f"liar{index}") for index in range(6)]
    pools |= {liar: FakePool("0:1") for liar in liars}
    async with open_swarm(pools) as swarm:
        for liar in liars:
            error = PipelineError(request_id="x", node_id=M, kind="worker_died", message="it failed")
            for _ in range(10):
                await swarm[liar].router.send(A, *encode_job(error))
        await ask(swarm)
        assert swarm[A].trust.score(M) >= NEUTRAL


def test_no_node_is_believed_to_read_weights_faster_than_any_machine() -> None:
    manifest = fake_entry().manifest
    n_bytes = sum(shard.size_bytes for shard in manifest.shards if shard.kind == "layer") / manifest.n_layers
    said = {NodeId(B): computes(manifest.model_id, 1e-30)}
    known = route_inputs(
        NodeId(A),
        manifest,
        workload(manifest, 9, 9),
        list(said),
        said,
        NetworkDistances(),
        Observations(),
        OwnLoad(),
    )
    assert known.speeds[NodeId(B)].decode_s == pytest.approx(n_bytes / FASTEST_BYTES_PER_S)
    assert known.speeds[NodeId(B)].prefill_s >= n_bytes / FASTEST_BYTES_PER_S / PREFILL_ROWS


STAGES = tuple(Stage(node_id=node, start=at, end=at + 4) for at, node in ((0, A), (4, B), (8, C)))


@pytest.mark.parametrize(
    ("reported", "waits_for", "culprit"),
    [
        ({B: (5, 0), C: (0, 0)}, (B,), B),
        ({B: (5, 5), C: (0, 0)}, (B, C), None),
        ({B: (5, 5), C: (5, 4)}, (C,), C),
        ({B: (5, 5), C: (5, 5)}, (C,), C),
        ({B: (0, 0), C: (0, 0)}, (B,), B),
        ({B: (UNSET, UNSET), C: (0, 0)}, (), None),
        ({B: (5, UNSET), C: (0, 0)}, (B, C), None),
        ({B: (0, 0), C: (5, 0)}, (C,), C),
    ],
)
def test_the_node_that_has_the_row_is_asked_for_it(
    reported: Mapping[str, tuple[int | UnsetType, int | UnsetType]],
    waits_for: tuple[NodeId, ...],
    culprit: str | None,
) -> None:
    states = {
        node: StageState(request_id="x", known=True, n_received=rows[0], n_sent=rows[1])
        for node, rows in reported.items()
    }
    found = judge_states(STAGES, A, states, 5, 5, False, 1.0)
    assert (found.waits_for, found.culprit) == (frozenset(waits_for), culprit)
    assert judge_states(STAGES, A, states, 5, 5, True, 1.0).error is None


def test_of_two_others_that_may_have_the_row_only_neighbours_are_asked() -> None:
    """One says to have passed it on and the next not to have it: what comes after both has no part in it."""
    stages = (*STAGES, Stage(node_id=D, start=12, end=16))
    rows = {B: (5, 5), C: (0, 0), D: (0, 0)}
    states = {
        node: StageState(request_id="x", known=True, n_received=received, n_sent=sent)
        for node, (received, sent) in rows.items()
    }
    assert judge_states(stages, A, states, 5, 5, False, 1.0).waits_for == {B, C}


async def test_a_change_waits_until_the_client_has_waited_as_long_as_it_costs() -> None:
    async def elsewhere_s(suspected: Collection[NodeId]) -> float:
        return 30.0

    pace = PipelineSpeed(1.0, 0.01, elsewhere_s)
    assert not await pace.is_worth_changing(29.9, ())
    assert await pace.is_worth_changing(30.0, ())
    assert not await PipelineSpeed(1.0, 0.01).is_worth_changing(1e9, ())
    assert not pace.is_late(10.0, has_begun=False)
    assert pace.is_late(10.1, has_begun=False)
    assert not pace.is_slow(2, 100.0)
    assert pace.is_slow(3, 100.0)
    assert not pace.is_slow(10, 10.0)
    assert pace.is_slow(10, 10.1)
