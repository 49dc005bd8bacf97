"""Who gets the places that a node has for others, and that assignments without jobs hold none for long."""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from typing import Any, Unpack

import numpy as np
import pytest
import trio
from deadlines import DEADLINE_S
from hypothesis import given
from hypothesis import strategies as st
from node_ids import LIAR, A, B, C, H, M, node_id_named
from trio.testing import MockClock

from bench.common.arithmetic import FakePool, uncut
from bench.place_shares import KINDS, NEW, fair_share, run
from swarmllm.errors import SwarmLLMError
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.capacity import (
    FADES_S,
    FIRST_JOB_S,
    KEPT_OF,
    KNOWN_S,
    MISSED_S,
    NEWCOMERS,
    SEEN_MAX,
    SHORTEST_TURN_S,
    TURN_S,
    WANT_S,
    OriginShares,
    SeenOrigins,
    Shares,
    StageAdmission,
    StagePlace,
)
from swarmllm.pipeline.stage.cell_shares import HeldCells, ask_for_cells
from swarmllm.pipeline.stage.compute import ForwardCall
from swarmllm.pipeline.stage.session_queue import OWN_MAX, PutResult, RelayedJob, SessionQueue
from swarmllm.swarm.peers.trust import NEUTRAL, TrustEvent
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.codec import decode_response, encode_job, encode_request
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import LayerForward, PipelineAck, PipelineAssignment, Stage
from swarmllm_proto.tensors import encode_tensor

from .fakes import Swarm, open_swarm

pytestmark = pytest.mark.long

PROMPT = "is there room?"


async def ask(swarm: Swarm, node_id: str = A) -> str:
    with trio.fail_after(DEADLINE_S):
        async with swarm[node_id].pipelines.generate(
            Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=6)
        ) as generation:
            return "".join([piece.text async for piece in generation])


async def assign_and_be_silent(
    swarm: Swarm, n_prompt_tokens: int = 1, request_id: str = "", origin: str = LIAR
) -> bool:
    stages = (
        Stage(node_id=origin, start=0, end=4),
        Stage(node_id=M, start=4, end=8),
        Stage(node_id=origin, start=8, end=12),
    )
    assignment = PipelineAssignment(
        request_id=request_id or uuid.uuid4().hex,
        model_id=swarm.entry.model_id,
        origin=origin,
        stages=stages,
        n_prompt_tokens=n_prompt_tokens,
        sampling=Sampling(),
    )
    ack = decode_response(await swarm[origin].router.request(M, encode_request(assignment)))
    assert isinstance(ack, PipelineAck)
    return ack.accepted


async def test_empty_assignments_of_one_member_keep_nobody_else_out(patient_clock: MockClock) -> None:
    pools = {A: FakePool("0:4"), M: FakePool("4:8"), H: FakePool("8:12"), LIAR: FakePool()}
    async with open_swarm(pools) as swarm:
        for _ in range(20):
            for _ in range(8):
                await assign_and_be_silent(swarm)
            assert await ask(swarm) == await uncut(PROMPT, 6)
            assert await ask(swarm, M) == await uncut(PROMPT, 6)
            await trio.sleep(1)
        assert swarm[A].trust.score(M) >= NEUTRAL


async def give_jobs(swarm: Swarm, pause_s: float) -> None:
    """Take every place at M that there is, and give each a job now and then."""
    row, positions = np.ones((1, 4), np.float32), dict[str, int]()
    for number in itertools.count():
        for turn in range(8):
            request_id = f"{number}-{turn}"
            if await assign_and_be_silent(swarm, request_id=request_id):
                positions[request_id] = 0
        for request_id, position in positions.items():
            job = LayerForward(
                request_id=request_id, step="layer", stage=1, position=position, n_tokens=1, prefill_left=0
            )
            await swarm[LIAR].router.send(M, *encode_job(job, encode_tensor(row)))
            positions[request_id] += 1
        await trio.sleep(pause_s)


async def test_a_member_that_gives_a_job_now_and_then_leaves_others_their_share(
    patient_clock: MockClock,
) -> None:
    pools = {A: FakePool("0:4"), M: FakePool("4:8"), H: FakePool("8:12"), LIAR: FakePool()}
    async with open_swarm(pools) as swarm, trio.open_nursery() as nursery:
        nursery.start_soon(give_jobs, swarm, 1.0)
        await trio.sleep(TURN_S + 5)
        for _ in range(20):
            assert await ask(swarm) == await uncut(PROMPT, 6)
            await trio.sleep(1)
        assert swarm[A].trust.score(M) >= NEUTRAL
        nursery.cancel_scope.cancel()


async def test_a_long_answer_that_gives_its_place_up_is_completed_all_the_same(
    patient_clock: MockClock,
) -> None:
    pools = {A: FakePool("0:4"), B: FakePool("0:4"), M: FakePool("4:8"), H: FakePool("8:12")}
    async with open_swarm(pools) as swarm:
        texts: list[str] = []

        async def slow(position: int, layers: LayerRange) -> None:
            await trio.sleep(2.0)

        async def ask_for_long() -> None:
            async with swarm[A].pipelines.generate(
                Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=50)
            ) as generation:
                texts.append("".join([piece.text async for piece in generation]))

        swarm[M].pool.before_forward = slow
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(ask_for_long)
            await trio.sleep(TURN_S + 5)
            assert await ask(swarm, B) == await uncut(PROMPT, 6)
        assert texts == [await uncut(PROMPT, 50)] * 8
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (M, H))


async def test_a_prompt_that_cannot_fit_is_refused_and_makes_no_node_look_full() -> None:
    pools = {A: FakePool("0:4"), M: FakePool("4:8"), H: FakePool("8:12"), LIAR: FakePool()}
    async with open_swarm(pools) as swarm:
        assert not await assign_and_be_silent(swarm, 2**31 - 1)
        assert swarm[M].pipelines.room().free_kv_tokens > 0


def places(**held: int) -> list[StagePlace]:
    return [
        StagePlace(f"{letter}{i}", node_id_named(letter), 90.0 + i, has_begun=True)
        for letter, n in held.items()
        for i in range(n)
    ]


def test_one_origin_may_have_all_while_nobody_else_asks() -> None:
    shares = Shares(8)
    for n in range(8):
        assert shares.ask(A, places(a=n), 100.0).is_granted
    assert not shares.ask(A, places(a=8), 100.0).is_granted


def test_an_origin_that_was_turned_away_is_served_before_one_that_has_its_share() -> None:
    shares = Shares(8)
    assert not shares.ask(B, places(a=8), 100.0).is_granted
    assert not shares.ask(A, places(a=7), 101.0).is_granted
    assert shares.ask(B, places(a=7), 102.0).is_granted
    assert shares.ask(A, places(a=6, b=1), 103.0).is_granted
    assert not shares.ask(B, places(a=8), 110.0).is_granted
    assert shares.ask(A, places(a=7), 110.0 + WANT_S).is_granted


def test_what_an_origin_has_used_counts_half_after_five_minutes() -> None:
    shares = Shares(8)
    shares.ask(B, places(a=1), 100.0)
    shares.ask(B, places(a=1), 160.0)
    used_s = shares._used_s[node_id_named("a")]
    assert used_s > 50.0
    shares.ask(B, [], 160.0 + FADES_S)
    assert shares._used_s[node_id_named("a")] == pytest.approx(used_s / 2)


def test_unused_places_go_first_those_of_the_origin_with_most_before_others() -> None:
    shares = Shares(4)
    taken = [StagePlace(f"a{i}", A, 10.0 + i, has_begun=i == 0) for i in range(3)]
    taken.append(StagePlace("b0", B, 0.0, has_begun=False))
    assert shares.ask(C, taken, 13.0).instead_of == "a1"
    assert (
        shares.ask(A, [StagePlace("b0", B, 100.0, has_begun=False), *places(a=3)], 101.0).instead_of is None
    )
    # Once it is old enough, even the only one of another.
    taken = [StagePlace("b0", B, 0.0, has_begun=False), *places(a=3)]
    assert shares.ask(A, taken, FIRST_JOB_S).instead_of == "b0"
    assert shares.ask(A, taken, FIRST_JOB_S - 0.1).instead_of is None


def test_running_requests_above_their_origins_share_give_way_after_a_turn() -> None:
    shares, taken = Shares(8), places(a=8)
    assert not shares.ask(B, taken, 97.0 + TURN_S - 8).is_granted
    assert shares.ask(B, taken, 90.0 + TURN_S).instead_of == "a0"
    # An origin with no more than its share keeps what it has, however long.
    assert shares.ask(B, places(a=4, b=4), 1000.0).instead_of is None
    assert shares.ask(C, places(a=4, b=4), 1000.0).instead_of == "a0"


def test_where_more_origins_want_places_than_there_are_they_take_turns() -> None:
    shares, members = Shares(2), [node_id_named(name) for name in "abcd"]
    taken = [StagePlace(f"{n}", origin, 0.0, has_begun=True) for n, origin in enumerate(members[:2])]
    assert not shares.ask(members[2], taken, 1.0).is_granted
    assert not shares.ask(members[3], taken, 2.0).is_granted
    turn_s = TURN_S * 2 / 4
    assert not shares.ask(members[2], taken, turn_s - 0.1).is_granted
    # Both places are at the end of their turn; who was turned away first comes first.
    assert shares.ask(members[2], taken, turn_s).instead_of == "0"
    taken[0] = StagePlace("2", members[2], turn_s, has_begun=True)
    assert not shares.ask(members[0], taken, turn_s).is_granted
    assert shares.ask(members[3], taken, turn_s).instead_of == "1"
    taken[1] = StagePlace("3", members[3], turn_s, has_begun=True)
    # Their turn, too, comes to its end, and only when they have used more than who waits.
    assert not shares.ask(members[0], taken, 1.5 * turn_s).is_granted
    assert shares.ask(members[0], taken, 3.0 * turn_s).instead_of == "2"


def test_a_place_that_becomes_free_goes_to_the_waiting_origin_that_has_used_least() -> None:
    shares, (a, b, c) = Shares(1), (node_id_named(name) for name in "abc")
    assert shares.ask(a, [], 0.0).is_granted
    held = [StagePlace("a", a, 0.0, has_begun=True)]
    assert not shares.ask(b, held, 5.0).is_granted
    assert not shares.ask(c, held, 6.0).is_granted
    assert not shares.ask(a, [], 7.0).is_granted  # it has used some, and the others nothing
    assert not shares.ask(c, [], 7.0).is_granted  # it was turned away after b
    assert shares.ask(b, [], 7.0).is_granted


@pytest.mark.parametrize("kind", KINDS[:4])
@pytest.mark.parametrize("n_others", [7, 8, 12])
def test_members_that_hold_places_leave_an_honest_one_its_share(kind: str, n_others: int) -> None:
    outcome = run(kind, n_others, 300.0, seed=1)
    # It waits for the first turn to end.
    assert outcome.n_answers >= 0.85 * fair_share(kind, n_others, 300.0 - TURN_S)
    assert outcome.n_given_up == 0


def test_one_place_stays_free_for_an_origin_that_was_served_lately() -> None:
    shares = Shares(8)
    assert shares.ask(B, places(a=7), 100.0).is_granted
    assert not shares.ask(A, places(a=7), 101.0).is_granted
    assert shares.ask(A, places(a=6), 101.0).is_granted
    assert shares.ask(A, places(a=7), 100.0 + WANT_S).is_granted


def test_of_few_places_none_stays_free() -> None:
    shares = Shares(KEPT_OF - 1)
    assert shares.ask(B, [], 100.0).is_granted
    assert shares.ask(A, places(a=KEPT_OF - 2), 101.0).is_granted


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0, 3)), max_size=120),
)
def test_no_more_places_are_taken_than_there_are_and_none_that_is_used_is_lost(
    capacity: int, asked: list[tuple[str, bool, float]]
) -> None:
    shares, taken, now_s = Shares(capacity), dict[str, StagePlace](), 0.0
    for i, (origin, begins, pause_s) in enumerate(asked):
        now_s += pause_s
        admission = shares.ask(origin, taken.values(), now_s)
        if admission.instead_of is not None:
            lost = taken.pop(admission.instead_of)
            assert not lost.has_begun or now_s - lost.assigned_s >= TURN_S
        if admission.is_granted:
            taken[str(i)] = StagePlace(str(i), origin, now_s, begins)
        assert len(taken) <= capacity
        assert sum(Counter(place.origin for place in taken.values()).values()) == len(taken)


ASKED = st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans(), st.floats(0, 20)), max_size=40)


@given(st.integers(1, 8), ASKED)
def test_origins_that_have_all_earned_nothing_share_as_if_all_had_once_they_are_known(
    capacity: int, asked: list[tuple[str, bool, float]]
) -> None:
    plain, shares, now_s = Shares(capacity), OriginShares(capacity), KNOWN_S
    taken: dict[str, StagePlace] = {}
    for letter in "abcdef":
        shares._seen_origins.asked(node_id_named(letter), 0.0)
    for i, (name, begins, pause_s) in enumerate(asked):
        now_s, origin = now_s + pause_s, node_id_named(name)
        for letter in "abcdef":
            shares._seen_origins.asked(node_id_named(letter), now_s)
        admission = shares.ask(origin, taken.values(), now_s, lambda each: False)
        assert admission == plain.ask(origin, taken.values(), now_s)
        taken.pop(admission.instead_of or "", None)
        if admission.is_granted:
            taken[str(i)] = StagePlace(str(i), origin, now_s, begins)


@given(st.integers(2, 8), ASKED)
def test_newcomers_together_keep_no_more_than_one_origin_that_has_earned_trust(
    capacity: int, asked: list[tuple[str, bool, float]]
) -> None:
    shares, taken, now_s, earned = OriginShares(capacity), dict[str, StagePlace](), 0.0, node_id_named("a")
    for i, (name, begins, pause_s) in enumerate(asked):
        now_s += pause_s
        # Every newcomer has an identity of its own.
        origin = earned if name == "a" else node_id_named(f"new {i}")
        before = list(taken.values())
        admission = shares.ask(origin, before, now_s, lambda each: each == earned)
        if admission.instead_of is not None:
            lost = taken.pop(admission.instead_of)
            assert not lost.has_begun or now_s - lost.assigned_s >= SHORTEST_TURN_S
        if admission.is_granted:
            taken[str(i)] = StagePlace(str(i), origin, now_s, begins)
        assert len(taken) <= capacity
        if origin == earned and not admission.is_granted:
            of_newcomers = [place for place in before if place.origin != earned]
            has_its_share = len(before) - len(of_newcomers) >= capacity // 2
            assert has_its_share or all(now_s - place.assigned_s < TURN_S for place in of_newcomers)


def test_a_newcomer_takes_its_place_from_newcomers_where_these_have_their_share() -> None:
    shares, members = OriginShares(4), {node_id_named("a"), node_id_named("b")}
    taken = [
        StagePlace("a", node_id_named("a"), 0.0, has_begun=True),
        StagePlace("b", node_id_named("b"), 0.0, has_begun=True),
        *(StagePlace(f"new{n}", node_id_named("x"), float(n), has_begun=True) for n in range(2)),
    ]
    asked = node_id_named("y"), taken
    assert not shares.ask(*asked, TURN_S - 1, members.__contains__).is_granted
    assert shares.ask(*asked, TURN_S, members.__contains__).instead_of == "new0"
    # One who has earned trust and holds nothing takes it from them before it takes it from its like.
    waiting = node_id_named("c")
    assert shares.ask(waiting, taken, TURN_S, {*members, waiting}.__contains__).instead_of == "new0"


@pytest.mark.parametrize("n_others", [1, 8])
def test_new_identities_do_not_keep_out_a_member_that_has_earned_trust(n_others: int) -> None:
    outcome = run(NEW, n_others, 300.0, seed=1)
    assert outcome.n_answers >= 0.85 * fair_share(NEW, n_others, 300.0 - TURN_S)


def test_new_identities_do_not_keep_out_a_newcomer_that_comes_back() -> None:
    outcome = run(NEW, 1, 200.0, seed=1, has_earned=False)
    assert outcome.n_answers >= 0.8 * fair_share(NEW, 1, 200.0 - KNOWN_S, has_earned=False)


def test_an_origin_is_known_a_minute_after_it_came_first_until_it_is_missed() -> None:
    known = SeenOrigins()
    known.asked(A, 0.0)
    assert not known.is_known(A, KNOWN_S - 1)
    known.asked(A, KNOWN_S)
    assert known.is_known(A, KNOWN_S)
    assert not known.is_known(B, KNOWN_S)
    known.asked(A, KNOWN_S + MISSED_S)
    assert known.is_known(A, KNOWN_S + MISSED_S)
    known.asked(A, KNOWN_S + 2 * MISSED_S + 1)
    assert not known.is_known(A, KNOWN_S + 2 * MISSED_S + 1)


def test_who_comes_back_is_remembered_however_many_others_come_once() -> None:
    known, others = SeenOrigins(), node_id_named("others")
    known.asked(A, 0.0)
    for second in range(2 * SEEN_MAX):
        if second % (SEEN_MAX // 2) == 0:
            known.asked(A, second / 100)
        known.asked(NodeId(f"{others}{second}"), second / 100)
    assert known.is_known(A, KNOWN_S)
    assert not known.is_known(NodeId(f"{others}0"), KNOWN_S)


async def test_workers_share_their_time_among_origins_and_all_that_have_earned_no_trust() -> None:
    owners: dict[tuple[str, str], set[str]] = {}

    class Pool(FakePool):
        name = ""

        async def forward(self, model: ModelFile, **call: Unpack[ForwardCall]) -> Any:
            owners.setdefault((self.name, call["request_id"]), set()).add(call.get("owner", ""))
            return await super().forward(model, **call)

    pools = {A: Pool("0:4"), M: Pool("4:8"), H: Pool("8:12")}
    for node_id, pool in pools.items():
        pool.name = node_id
    async with open_swarm(pools) as swarm:
        await ask(swarm)
        for _ in range(11):
            swarm[M].trust.note(A, TrustEvent.SERVED)
        await ask(swarm)
    assert [said for (node_id, _), said in owners.items() if node_id == A] == [{""}, {""}]
    assert [said for (node_id, _), said in owners.items() if node_id == M] == [{NEWCOMERS}, {A}]
    assert [said for (node_id, _), said in owners.items() if node_id == H] == [{NEWCOMERS}, {NEWCOMERS}]


def test_newcomers_do_not_pass_on_among_themselves_what_another_waits_for() -> None:
    member, late = node_id_named("a"), node_id_named("late")
    taken = [StagePlace(f"{n}", node_id_named(f"new{n}"), 0.0, has_begun=True) for n in range(4)]
    for is_awaited in (False, True):
        shares = OriginShares(4)
        if is_awaited:
            assert not shares.ask(member, taken, 30.0, member.__eq__).is_granted
        # Their turn is shorter than what another origin has to wait for a place above their share.
        assert shares.ask(late, taken, TURN_S - 1, member.__eq__).is_granted is not is_awaited
    assert shares.ask(member, taken, TURN_S, member.__eq__).instead_of == "0"


async def test_a_member_that_has_earned_trust_is_served_beside_new_identities(
    patient_clock: MockClock,
) -> None:
    """They take every place, and a new one asks again and again."""
    strangers = [node_id_named(f"stranger{n}") for n in range(60)]
    pools = {A: FakePool("0:4"), M: FakePool("4:8"), H: FakePool("8:12")}
    pools |= {stranger: FakePool() for stranger in strangers}
    row = np.ones((1, 4), np.float32)
    async with open_swarm(pools) as swarm:
        for _ in range(11):
            swarm[M].trust.note(A, TrustEvent.SERVED)

        async def keep_out() -> None:
            for n, stranger in enumerate(strangers):
                if n >= 20:
                    await trio.sleep(5)
                if await assign_and_be_silent(swarm, request_id=f"{n}", origin=stranger):
                    job = LayerForward(
                        request_id=f"{n}", step="layer", stage=1, position=0, n_tokens=1, prefill_left=0
                    )
                    await swarm[stranger].router.send(M, *encode_job(job, encode_tensor(row)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_out)
            n_answered = 0
            for _ in range(30):
                await trio.sleep(5)
                try:
                    n_answered += await ask(swarm) == await uncut(PROMPT, 6)
                except SwarmLLMError:
                    continue
            assert n_answered >= 15
            nursery.cancel_scope.cancel()


async def test_what_a_node_puts_into_its_own_queue_leaves_the_part_of_others_free() -> None:
    queue, item = SessionQueue(2), RelayedJob("x", b"", b"")
    for _ in range(OWN_MAX):
        assert queue.put(item, is_foreign=False) is PutResult.QUEUED
    n_foreign = 0
    while queue.put(item, is_foreign=True) is PutResult.QUEUED:
        n_foreign += 1
    assert n_foreign == 2 * 3 + 8
    for _ in range(OWN_MAX + 1):
        await queue.get()
    assert queue.put(item, is_foreign=True) is PutResult.QUEUED
    assert queue.put(item, is_foreign=True) is PutResult.OVERRUN


@pytest.mark.parametrize("n", [1, 8])
async def test_requests_of_one_origin_side_by_side_are_all_answered(n: int) -> None:
    pools = {A: FakePool("0:4"), M: FakePool("4:8"), H: FakePool("8:12")}
    async with open_swarm(pools) as swarm, trio.open_nursery() as nursery:
        for _ in range(n):
            nursery.start_soon(ask, swarm)


def cells(*held: tuple[str, int], assigned_s: float = 90.0, has_begun: bool = True) -> list[HeldCells]:
    """(node, cells of a prompt of it)"""
    return [
        HeldCells(StagePlace(f"{node_id}-{index}", node_id, assigned_s, has_begun), n_cells)
        for index, (node_id, n_cells) in enumerate(held)
    ]


def asks(
    origin: str, n_cells: int, taken: list[HeldCells], *, own: int = 0, now_s: float = 100.0, earned: str = ""
) -> StageAdmission:
    trusted = {node_id_named(letter) for letter in earned}
    return ask_for_cells(origin, n_cells, taken, own, 1000, now_s, trusted.__contains__)


def test_a_prompt_takes_all_cells_while_nobody_else_is_there() -> None:
    assert asks(A, 999, []).is_granted
    assert asks(A, 999, cells((A, 999))).is_granted  # What fits, the worker says.
    assert asks(B, 300, cells((A, 700))).is_granted


def test_beside_others_no_prompt_takes_more_than_its_share_once_not_all_fit() -> None:
    others = cells(*((node_id_named(letter), 60) for letter in "abcdefghi"))
    assert not asks(M, 999, others).is_granted
    assert not asks(M, 470, others).is_granted
    assert asks(M, 460, others).is_granted  # All fit.
    assert not asks(A, 600, others).is_granted
    assert asks(M, 100, cells(*((node_id_named(letter), 105) for letter in "abcdefghi"))).is_granted


def test_what_is_above_the_share_gives_way_after_its_turn_the_largest_first() -> None:
    taken = cells((A, 500), (A, 300), (B, 150))
    asked = asks(M, 100, taken, now_s=90.0 + TURN_S)
    assert (asked.is_granted, asked.instead_of) == (True, f"{A}-0")
    assert asks(M, 100, taken, now_s=89.0 + TURN_S) == StageAdmission(is_granted=True)
    unused = [*taken, *cells((A, 40), has_begun=False)]
    assert asks(M, 100, unused).instead_of == f"{A}-0"


def test_own_users_are_one_of_those_who_share() -> None:
    assert asks(A, 600, cells((A, 100)), own=300).is_granted
    assert not asks(A, 600, [], own=500).is_granted
    assert not asks(A, 401, cells((B, 200)), own=400).is_granted
    assert asks(A, 333, cells((B, 300)), own=400, earned="ab").is_granted


def test_new_identities_share_what_one_trusted_origin_has() -> None:
    crowd = cells(*((node_id_named(letter), 100) for letter in "bcdefghi"))
    assert asks(A, 500, crowd, earned="a").is_granted
    assert not asks(A, 500, crowd).is_granted
    assert asks(A, 500, crowd, earned="a", now_s=90.0 + TURN_S).instead_of is not None
    assert not asks(M, 120, [*crowd, *cells((A, 200))], earned="a").is_granted


async def test_a_prompt_as_long_as_the_context_leaves_others_theirs(patient_clock: MockClock) -> None:
    """A member holds most cells of a node and gives nothing; another one is answered within its share."""
    pools = {A: FakePool("0:4"), M: FakePool("4:8"), H: FakePool("8:12"), LIAR: FakePool()}
    async with open_swarm(pools, settings=PipelineSettings(n_ctx=64)) as swarm:
        assert await assign_and_be_silent(swarm, 60)
        assert await assign_and_be_silent(swarm, 60)
        assert await ask(swarm) == await uncut(PROMPT, 6)
        assert swarm[A].trust.score(M) >= NEUTRAL


async def test_while_others_hold_cells_a_prompt_above_the_share_is_refused_for_now(
    patient_clock: MockClock,
) -> None:
    pools = {A: FakePool("0:4"), M: FakePool("4:8"), H: FakePool("8:12"), LIAR: FakePool()}
    async with open_swarm(pools, settings=PipelineSettings(n_ctx=64)) as swarm:
        assert await assign_and_be_silent(swarm, 20, origin=A)
        assert not await assign_and_be_silent(swarm, 50)
        assert await assign_and_be_silent(swarm, 32)
