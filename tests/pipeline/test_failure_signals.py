"""Failures are found out within the time of an acknowledgement, and told to everybody."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from node_ids import LIAR, A, B, C, F, M
from trio.testing import MockClock, wait_all_tasks_blocked

from bench.common.arithmetic import uncut
from swarmllm.errors import NodeUnreachable, NoPipeline, WorkerDied
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.route.suspects import MAX_ACCUSERS, MAX_PER_ACCUSER, SUSPECT_S, Suspects, sparing
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm_proto.codec import decode_job
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import LayerForward

from .fakes import computes, open_swarm
from .test_survival import N_TOKENS, PROMPT, SETTINGS, kills, pools_of, read

ACK_S = SETTINGS.ack_timeout_s


def drop_one(swarm: object, node_id: str, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The first job at position `at` that this node sends is never heard of again."""
    router = swarm[node_id].router  # type: ignore[index]
    send, n_dropped = router.send, 0

    async def lossy(receiver: str, header: bytes, payload: bytes | memoryview = b"") -> None:
        nonlocal n_dropped
        message = decode_job(header, payload)
        if isinstance(message, LayerForward) and message.position == at and not n_dropped:
            n_dropped += 1
            return
        await send(receiver, header, payload)

    monkeypatch.setattr(router, "send", lossy)


@pytest.mark.parametrize("dropper", [A, B, C])
async def test_a_job_that_is_dropped_silently_is_missed_within_the_time_of_an_acknowledgement(
    dropper: str, patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_swarm(pools_of(a="0:4", b="4:8", c="8:12"), settings=SETTINGS) as swarm:
        drop_one(swarm, dropper, monkeypatch, at=len(PROMPT) + 5)
        started_s = trio.current_time()
        text, generation = await read(swarm, A, kills(swarm))
        assert text == await uncut(PROMPT, N_TOKENS)
        assert generation.n_recoveries == 1
        assert trio.current_time() - started_s == pytest.approx(ACK_S, abs=0.5)
        await swarm.quiet()


async def test_a_retry_prefers_no_pipeline(patient_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation returns to its nodes, though others are a little quicker, but not when that has just
    failed without anybody being to blame."""
    async with open_swarm(pools_of(a="0:4", b="4:12", c="4:12"), settings=SETTINGS) as swarm:
        pipelines, model_id = swarm[A].pipelines, swarm.entry.model_id

        async def turn() -> str:
            prompt = Prompt(text=PROMPT, session="talk")
            async with pipelines.generate(prompt, swarm.entry, Sampling(max_tokens=3)) as generation:
                async for _ in generation:
                    pass
                return generation.route[1].node_id

        first = await turn()
        (other,) = {B, C} - {first}
        await swarm.tell(A, {first: computes(model_id, 0.0012), other: computes(model_id, 0.001)})
        assert (await pipelines.stages_for(swarm.entry))[1].node_id == other
        assert await turn() == first
        drop_one(swarm, A, monkeypatch, at=0)
        assert await turn() == other
        assert pipelines.statistics().retries == 1


async def test_a_stage_that_knows_nothing_of_the_request_is_found_out_at_the_first_look(
    patient_clock: MockClock,
) -> None:
    async with open_swarm(pools_of(a="0:4", b="4:8", c="8:12"), settings=SETTINGS) as swarm:

        async def forget(index: int) -> None:
            if index == 4:
                sessions = swarm[B].pipelines._sessions.by_request
                sessions.clear()

        started_s = trio.current_time()
        text, generation = await read(swarm, A, forget)
        assert text == await uncut(PROMPT, N_TOKENS)
        assert generation.n_recoveries == 1
        assert trio.current_time() - started_s == pytest.approx(ACK_S / 2, abs=0.5)


async def test_a_stage_that_does_not_answer_is_to_blame(patient_clock: MockClock) -> None:
    mortal = PipelineSettings(failover_timeout_s=0)
    async with open_swarm(pools_of(a="0:4", b="4:12"), settings=mortal) as swarm:

        async def fall_silent(index: int) -> None:
            if index == 4:

                async def silent(sender: str, body: bytes) -> bytes:
                    await trio.sleep_forever()
                    raise AssertionError

                async def deaf(sender: str, header: bytes, payload: memoryview) -> None:
                    pass

                swarm[B].router.serve(silent, deaf)

        started_s = trio.current_time()
        with pytest.raises(NodeUnreachable, match=f"node {B} does not say how the request stands within 5 s"):
            await read(swarm, A, fall_silent)
        assert trio.current_time() - started_s == pytest.approx(ACK_S, abs=0.5)


async def test_work_that_takes_long_is_waited_for(patient_clock: MockClock) -> None:
    pools = pools_of(a="0:4", b="4:12")

    async def slowly(position: int, layers: LayerRange) -> None:
        if position == len(PROMPT) + 3:
            await trio.sleep(60)

    pools[B].before_forward = slowly
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        text, generation = await read(swarm, A, kills(swarm))
        assert text == await uncut(PROMPT, N_TOKENS)
        assert generation.n_recoveries == 0


async def test_everybody_learns_of_a_node_that_fails() -> None:
    """The next request of another node goes around it, without finding out by itself."""
    pools = pools_of(a="0:4", f="0:4", b="4:12", c="4:12")

    async def dies(position: int, layers: LayerRange) -> None:
        raise WorkerDied("worker 4711 was killed by signal 9")

    pools[B].before_forward = pools[C].before_forward = dies
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        first = (await swarm[F].pipelines.stages_for(swarm.entry))[1].node_id
        assert (await swarm[A].pipelines.stages_for(swarm.entry))[1].node_id == first
        other = C if first == B else B
        pools[other].before_forward = None
        await read(swarm, A, kills(swarm))
        await wait_all_tasks_blocked()
        n_before = len(pools[first].calls)
        text, _ = await read(swarm, F, kills(swarm))
        assert text == await uncut(PROMPT, N_TOKENS)
        assert swarm[F].pipelines.statistics().retries == 0
        assert len(pools[first].calls) == n_before
        await swarm.quiet()


async def test_a_suspect_is_used_where_there_is_nobody_else() -> None:
    pools = pools_of(a="0:4", b="4:12", m="")
    async with open_swarm(pools, settings=SETTINGS) as swarm:
        swarm[A].pipelines._suspects.accuse(M, B, trio.current_time())
        text, _ = await read(swarm, A, kills(swarm))
        assert text == await uncut(PROMPT, N_TOKENS)


async def test_a_suspect_that_comes_back_is_none_any_more() -> None:
    async with open_swarm(pools_of(a="0:4", b="4:12", m="")) as swarm:
        suspects = swarm[A].pipelines._suspects
        suspects.accuse(M, B, trio.current_time())
        swarm.kill(B)
        await wait_all_tasks_blocked()
        assert suspects.now(trio.current_time()) == {B}
        await swarm.start(B, pools_of(b="4:12")[B])
        await wait_all_tasks_blocked()
        assert not suspects.now(trio.current_time())


def test_suspicion_ends_by_itself_or_when_the_node_comes_back() -> None:
    suspects = Suspects()
    suspects.accuse(A, B, 0.0)
    suspects.accuse(A, C, 1.0)
    assert suspects.now(1.0) == {B, C}
    suspects.clear(C)
    assert suspects.now(SUSPECT_S - 0.1) == {B}
    assert suspects.now(SUSPECT_S) == frozenset()


def test_one_node_is_believed_of_no_more_than_a_few_others() -> None:
    suspects = Suspects()
    for number in range(MAX_PER_ACCUSER + 1):
        suspects.accuse(A, str(number), 0.0)
    assert len(suspects.now(0.0)) == MAX_PER_ACCUSER
    suspects.accuse(B, "one more", 0.0)
    assert len(suspects.now(0.0)) == MAX_PER_ACCUSER + 1


def test_no_more_nodes_are_listened_to_than_there_is_room_for() -> None:
    suspects = Suspects()
    for number in range(MAX_ACCUSERS + 1):
        suspects.accuse(f"accuser {number}", f"node {number}", 0.0)
    assert len(suspects.now(0.0)) == MAX_ACCUSERS
    # When what they said counts no more, others are listened to.
    suspects.accuse("another", "late", SUSPECT_S)
    assert suspects.now(SUSPECT_S) == {"late"}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.floats(0, 0.2)), max_size=300))
def test_what_one_node_may_say_of_others_is_bounded(accusations: list[tuple[int, int, float]]) -> None:
    suspects, now_s = Suspects(), 0.0
    for accuser, node_id, gap_s in accusations:
        now_s += gap_s
        suspects.accuse(str(accuser), str(node_id), now_s)
        n_accusers = len({accuser for accuser, _, _ in accusations})
        assert len(suspects.now(now_s)) <= MAX_PER_ACCUSER * n_accusers


def test_a_stranger_is_more_doubtful_than_a_trusted_node_that_more_pipelines_broke_with() -> None:
    """The stranger holds all that the two trusted ones hold: doing without one of those first would leave it
    in the route, and then it could not be spared any more."""
    suspects, trust = Suspects(), {LIAR: 0.5, B: 0.9, C: 0.9}
    for _ in range(2):
        suspects.doubt([B, C], 0.0)
    suspects.doubt([LIAR], 0.0)
    assert suspects.ordered(0.0) == [*sorted([B, C]), LIAR]
    ordered = suspects.ordered(0.0, trust.__getitem__)
    assert ordered == [LIAR, *sorted([B, C])]

    def choose(avoided: set[str]) -> list[str]:
        route = [next((n for n in each if n not in avoided), "") for each in ((B, LIAR), (C, LIAR))]
        if "" in route:
            raise NoPipeline("nobody")
        return route

    assert sparing(choose, (), ordered) == [B, C]
    # Who breaks pipeline after pipeline is doubted in spite of its merits.
    for _ in range(4):
        suspects.doubt([B], 0.0)
    assert suspects.ordered(0.0, trust.__getitem__)[0] == B
