"""What the planner is asked for on behalf of a request, and what becomes of its answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import trio
from node_ids import A, B, C, D
from trio.testing import MockClock

from bench.common.arithmetic import fake_entry
from swarmllm.errors import NoPipeline
from swarmllm.pipeline.origin.requests import OriginRequest
from swarmllm.pipeline.repair.retry_policy import RetryPolicy
from swarmllm.pipeline.route.assembly import AFFINITY, Assembly
from swarmllm.pipeline.route.inputs import OwnLoad
from swarmllm.pipeline.route.reported_loads import ReportedLoad
from swarmllm.pipeline.route.request_routes import DOUBTED, GAIN, UNTRIED, LighterRoute, RequestRoutes
from swarmllm.pipeline.route.route_planner import RequestSize
from swarmllm.pipeline.route.suspects import Suspects
from swarmllm.pipeline.route.untried import PAUSE_S
from swarmllm.pipeline.stage.capacity import EXPECTED_OUTPUT_TOKENS
from swarmllm.swarm.peers.trust import NeutralTrust
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling

from .test_assembly import stages

ENTRY = fake_entry()
VIA_B = Assembly(stages("a 0:6", "b 6:12"), (None, None), n_active={B: 1})
VIA_C = stages("a 0:6", "c 6:12")


class Stand:
    """The parts that routes are made of, as a planner, a router and this node's load; it remembers what it
    was asked."""

    announced_s = 0.0

    def __init__(self) -> None:
        self.answer: Assembly | None = VIA_B
        self.sizes: list[RequestSize] = []
        self.asked: list[dict[str, Any]] = []
        self.loads: list[OwnLoad] = []
        self.met: list[tuple[int, int]] = []
        """Tokens that a request is for, and how many of those that count here it is."""
        self.sent_besides: list[OriginRequest | None] = []
        self.untried_nodes: list[str] = []
        self.suspects = Suspects()
        stand: Any = self
        trust = NeutralTrust()
        self.routes = RequestRoutes(stand, stand, stand, self.suspects, trust, stand)

    def of(self, entry: object, tokens: np.ndarray) -> Mapping[NodeId, int]:
        return {C: len(tokens)}

    def now(
        self,
        entry: object,
        n_tokens: int,
        reported: Mapping[NodeId, ReportedLoad],
        *,
        n_asking: int,
        besides: OriginRequest | None,
    ) -> OwnLoad:
        self.met.append((n_tokens, n_asking))
        self.sent_besides.append(besides)
        return OwnLoad(len(self.met), "", {}, {node_id: each.n_running for node_id, each in reported.items()})

    def untried(self) -> frozenset[str]:
        return frozenset(self.untried_nodes)

    def reachable(self) -> frozenset[str]:
        return frozenset({A, B, C, D} - set(self.untried_nodes))

    async def choose(
        self, entry: object, size: RequestSize, load: OwnLoad, avoid: object, **how: Any
    ) -> Assembly:
        assert entry is ENTRY
        self.sizes.append(size)
        self.loads.append(load)
        self.asked.append({"avoid": avoid, **how})
        if self.answer is None:
            raise NoPipeline("nobody has it")
        return self.answer

    async def plan(
        self, entry: object, size: RequestSize, load: OwnLoad, suspects: Any, untried: Any
    ) -> tuple[RequestSize, OwnLoad, Mapping[NodeId, str], Mapping[NodeId, str]]:
        return size, load, suspects, untried


def request(n_tokens: int = 10, max_tokens: int = 7, **fields: Any) -> OriginRequest:
    tokens = np.arange(n_tokens, dtype=np.int32)
    return OriginRequest("r", ENTRY, tokens, Sampling(max_tokens=max_tokens), RetryPolicy(0.0), **fields)


def assign(request: OriginRequest, assembly: Assembly) -> None:
    request.goes_to(request.attempt(assembly, request.assignment(assembly, A)))


def other(cost_s: float = 1.0, accepted_cost_s: float = 10.0) -> Assembly:
    return Assembly(VIA_C, (None, None), cost_s=cost_s, accepted_cost_s=accepted_cost_s)


async def test_a_question_without_a_request_counts_none_as_its_own() -> None:
    stand = Stand()
    size = RequestSize(100, 23)
    assert await stand.routes.stages_for(ENTRY, {B}, size) == VIA_B.stages
    assert stand.asked == [{"avoid": {B}, "is_exact": False}]
    planned: Any = await stand.routes.plan(ENTRY, size)
    assert planned[0] == size
    assert stand.met == [(123, 0), (123, 0)]
    assert stand.sent_besides == [None, None]


async def test_a_plan_does_without_those_that_a_request_would_do_without() -> None:
    stand = Stand()
    stand.untried_nodes = [B, C]
    stand.suspects.doubt([B], trio.current_time())
    planned: Any = await stand.routes.plan(ENTRY, RequestSize(1, 1))
    assert planned[2:] == ({B: DOUBTED}, {C: UNTRIED})


@pytest.mark.parametrize("max_tokens", [7, EXPECTED_OUTPUT_TOKENS + 5])
async def test_a_request_is_planned_for_the_answer_that_may_be_expected(max_tokens: int) -> None:
    stand = Stand()
    await stand.routes.choose(request(10, max_tokens))
    n_output = min(max_tokens, EXPECTED_OUTPUT_TOKENS)
    assert stand.sizes == [RequestSize(10, n_output)]
    assert stand.met == [(10 + n_output, 1)], "it counts here already"


async def test_what_a_request_asks_for_is_kept_connected() -> None:
    stand = Stand()
    await stand.routes.choose(request())
    assert list(stand.routes.warming._asked) == [ENTRY.model_id]


async def test_a_standby_is_looked_for_with_all_rows_that_it_would_have_to_compute() -> None:
    stand = Stand()
    assert await stand.routes.standby(request(generated=[1, 2, 3]), frozenset({C})) is VIA_B
    assert stand.sizes == [RequestSize(13, 7)]
    assert stand.asked[0]["suspects"] == [C]


async def test_first_those_are_spared_that_this_request_waits_for_and_last_the_untried() -> None:
    stand = Stand()
    stand.untried_nodes = [D, B]
    stand.suspects.doubt([C], trio.current_time())
    await stand.routes.choose(request(), suspected=[B])
    assert stand.asked[0]["suspects"] == [B, C, D]
    assert stand.asked[0]["untried"] == ()


async def test_only_a_request_that_nobody_waits_for_yet_may_lead_over_untried_nodes() -> None:
    stand = Stand()
    stand.untried_nodes = [D]
    await stand.routes.choose(request(n_attempts=1))
    await stand.routes.choose(request(n_attempts=2))
    await stand.routes.choose(request(n_attempts=1), accepted=VIA_B)
    assert [(each["suspects"], each["untried"]) for each in stand.asked] == [([], {D}), ([D], ()), ([D], ())]


async def test_after_a_dial_in_vain_requests_do_without_untried_nodes_until_one_has_accepted(
    autojump_clock: MockClock,
) -> None:
    stand = Stand()
    stand.untried_nodes = [B]
    unlucky = request(n_attempts=1)
    chosen = await stand.routes.choose(unlucky)
    assert chosen.untried == {B}
    assign(unlucky, chosen)
    unlucky.recovery.avoid.add(B)
    unlucky.n_attempts = 2
    await stand.routes.choose(unlucky)
    await stand.routes.choose(request(n_attempts=1))
    assert stand.asked[-1]["suspects"] == [B]
    planned: Any = await stand.routes.plan(ENTRY, RequestSize(1, 1))
    assert planned[2:] == ({B: UNTRIED}, {})
    await trio.sleep(PAUSE_S)
    lucky = request(n_attempts=1)
    chosen = await stand.routes.choose(lucky)
    assert stand.asked[-1]["untried"] == {B}
    stand.routes.took_over(lucky, chosen)
    assert stand.routes._untried._n_failures == 0


async def test_a_stage_that_refused_was_not_dialled_in_vain() -> None:
    stand = Stand()
    stand.untried_nodes = [B]
    refused = request(n_attempts=1)
    assign(refused, await stand.routes.choose(refused))
    stand.untried_nodes = []
    refused.recovery.avoid.add(B)
    refused.n_attempts = 2
    await stand.routes.choose(refused)
    assert stand.routes._untried.may_be_taken(trio.current_time())


async def test_an_accepted_route_stays_where_nobody_has_more_to_do_than_it_had_said() -> None:
    stand = Stand()
    stand.answer = other()
    assert await stand.routes.lighter(request(), VIA_B, {A: 0, B: 1}, 0.1) is None
    assert stand.asked == []
    for n_running in ({A: 1, B: 1}, {A: 0, B: 2}):
        assert await stand.routes.lighter(request(), VIA_B, n_running, 0.1) is stand.answer
    assert stand.loads[-1].reported == {A: 0, B: 2}


@pytest.mark.parametrize(
    ("answer", "asked_s", "is_taken"),
    [
        (other(cost_s=4.0, accepted_cost_s=5.0), 0.5, True),
        (other(cost_s=4.0, accepted_cost_s=5.0), 1.0, False),
        (other(cost_s=5.0, accepted_cost_s=5.0), 0.0, False),
        (Assembly(VIA_B.stages, (None, None), cost_s=1.0, accepted_cost_s=9.0), 0.0, False),
        (None, 0.0, False),
    ],
    ids=["clearly less", "as much with asking", "as much", "the same stages", "there is none"],
)
async def test_another_route_is_taken_only_where_it_takes_less_with_what_asking_takes(
    answer: Assembly | None, asked_s: float, is_taken: bool
) -> None:
    stand = Stand()
    stand.answer = answer
    asked = request()
    found = await stand.routes.lighter(asked, VIA_B, {B: 9}, asked_s)
    assert found is (answer if is_taken else None)
    assert stand.sent_besides == [asked], "the accepted attempt is no load of others"
    assert stand.asked[0]["accepted"] is VIA_B


@pytest.mark.parametrize(("is_reused", "factor"), [(True, AFFINITY), (False, GAIN)])
async def test_a_conversation_keeps_its_last_pipeline_for_longer(is_reused: bool, factor: float) -> None:
    stand = Stand()
    accepted = Assembly(VIA_B.stages, (None, None), is_reused)
    await stand.routes.lighter(request(), accepted, {B: 9}, 0.0)
    assert stand.asked[0]["accepted_factor"] == factor


def test_a_conversation_goes_where_its_last_turn_went() -> None:
    routes = Stand().routes
    turn = request(conversation="chat")
    assert routes.previous(turn) == ()
    routes.took_over(turn, VIA_B)
    assert routes.previous(turn) == VIA_B.stages
    assert routes.previous(request(conversation="another")) == ()


async def test_changing_a_slow_pipeline_is_worth_what_the_rest_takes_without_the_slow_ones() -> None:
    stand = Stand()
    stand.answer = other(cost_s=3.0)
    pace = stand.routes.pace(request(), VIA_B)
    assert await pace.is_worth_changing(3.0, [B])
    assert not await pace.is_worth_changing(2.9, [B])
    assert await pace.is_worth_changing(3.0, [B, C]), "one of them is spared"
    assert not await pace.is_worth_changing(3.0, [C]), "it needs all of them"
    stand.answer = None
    assert not await pace.is_worth_changing(3.0, [B])


def test_a_lighter_route_comes_with_the_error_that_leads_to_it() -> None:
    found = LighterRoute(VIA_B)
    assert (found.assembly, found.args) == (VIA_B, (VIA_B,))


async def test_what_nodes_know_of_a_prompt_counts_but_for_exact_requests() -> None:
    stand = Stand()
    for is_exact in (False, True):
        await stand.routes.choose(request(10, is_exact=is_exact))
    assert [size.cached_rows for size in stand.sizes] == [{C: 10}, {}]
