"""The attempts of a request on its origin: which one is the current one, what a standby changes, and for how
long each is known by its id."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import trio
from node_ids import A, B, C, D
from trio.testing import MockClock

from bench.common.arithmetic import fake_entry
from swarmllm.pipeline.check.statements import Statements
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.origin.requests import (
    LINGER_S,
    LINGERING_MAX,
    Attempt,
    OriginRequest,
    OriginRequests,
)
from swarmllm.pipeline.request import first_id
from swarmllm.pipeline.route.assembly import Assembly
from swarmllm.pipeline.route.reported_loads import ReportedLoad
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import Stage

CHAIN: Any = object()


def way(last: str, row_format: Any = None) -> Assembly:
    """A route that begins here."""
    stages = (Stage(node_id=A, start=0, end=6), Stage(node_id=last, start=6, end=12))
    return Assembly(stages, (None, None), row_formats=("f32", row_format) if row_format else ())


def a_request(request_id: str = "req_1", *generated: int) -> OriginRequest:
    request = OriginRequest(request_id, fake_entry(), np.arange(3, dtype=np.int32), Sampling(max_tokens=5))
    request.generated.extend(generated)
    request.n_attempts = 1
    return request


def attempt_at(request: OriginRequest, assembly: Assembly, *, is_standby: bool = False) -> Attempt:
    attempt = request.attempt(assembly, request.assignment(assembly, A, is_standby=is_standby))
    if not is_standby:
        request.goes_to(attempt)
    return attempt


def test_only_the_first_attempt_has_the_id_of_the_client() -> None:
    request = a_request()
    first, second = attempt_at(request, way(B)), attempt_at(request, way(C))
    standby = attempt_at(request, way(D), is_standby=True)
    assert first.id == request.id
    assert len({first.id, second.id, standby.id}) == 3
    assert {first_id(each.id) for each in (first, second, standby)} == {request.id}
    assert [each.context.request_id for each in (first, second, standby)] == [first.id, second.id, standby.id]


def test_an_attempt_takes_over_what_earlier_ones_hold_and_a_standby_nothing() -> None:
    request = a_request("req_1", 7)
    first, second = attempt_at(request, way(B)), attempt_at(request, way(C))
    third, standby = request.assignment(way(D), A), request.assignment(way(D), A, is_standby=True)
    assert (third.resumes, third.generated) == ((second.id, first.id), (7,))
    assert (standby.resumes, standby.generated) == ((), (7,))


def test_a_standby_that_overtakes_is_the_current_attempt_and_all_that_there_is_to_go_on_with() -> None:
    request = a_request("req_1", 7)
    slow = attempt_at(request, way(B))
    standby = attempt_at(request, way(C), is_standby=True)
    assert (request.current, request.attempts) == (slow, [slow])
    request.taken_over_by(standby)
    assert (request.current, request.attempts) == (standby, [standby])
    assert request.broken is standby.assembly
    assert request.assignment(way(D), A).resumes == (standby.id,)


def test_rows_stay_rounded_for_as_long_as_their_tokens_are_there() -> None:
    request = a_request()
    attempt_at(request, way(B, "q8_0"))
    assert request.was_rounded
    attempt_at(request, way(C))
    assert not request.was_rounded, "nothing has come of the first"
    attempt_at(request, way(B, "q8_0"))
    request.generated.append(7)
    assert attempt_at(request, way(C), is_standby=True).was_rounded
    attempt_at(request, way(C))
    assert request.was_rounded


def test_a_standby_rounds_for_the_request_only_once_it_has_overtaken() -> None:
    request = a_request("req_1", 7)
    attempt_at(request, way(B))
    standby = attempt_at(request, way(C, "q8_0"), is_standby=True)
    assert not request.was_rounded
    request.taken_over_by(standby)
    assert request.was_rounded


async def test_every_open_attempt_counts_and_is_found_by_its_id() -> None:
    requests, request = OriginRequests(), a_request("req_1", 7)
    with requests.under_way(request):
        assert (len(requests), requests.held()) == (1, [])
        slow = attempt_at(request, way(B))
        standby = attempt_at(request, way(C), is_standby=True)
        assert (len(requests), len(requests.held())) == (1, 1)
        requests.opened(slow, CHAIN)
        requests.opened(standby, other := object())  # type: ignore[arg-type]
        assert (len(requests), len(requests.held())) == (2, 2)
        request.taken_over_by(standby)
        assert (requests.chain(slow.id), requests.chain(standby.id)) == (CHAIN, other)
        assert requests.chains() == [CHAIN, other]
        assert (len(requests), len(requests.held())) == (2, 2)
        requests.closed(standby)
        assert (requests.chain(slow.id), requests.chain(standby.id)) == (CHAIN, None)
    assert (len(requests), len(requests.held())) == (1, 1), "the overtaken one is still open"
    requests.closed(slow)
    assert (len(requests), requests.held(), requests.attempt(slow.id)) == (0, [], None)


async def test_what_was_just_sent_counts_until_its_node_is_known_to_have_it(
    autojump_clock: MockClock,
) -> None:
    requests, start_s = OriginRequests(), trio.current_time()
    for index, last in enumerate((B, B, C)):
        attempt = attempt_at(a_request(f"req_{index}"), way(last))
        requests.opened(attempt, cast(Chain, SimpleNamespace(began_s=trio.current_time())))
        await trio.sleep(1)
    first, _, third = (each.request for each in requests.open_attempts())
    assert requests.just_sent({}, None) == {A: 1, C: 1}, "the others began longer ago than a record takes"
    assert requests.just_sent({}, third) == {}
    reported = ReportedLoad(0, start_s + 0.5, first.id)
    assert requests.just_sent({B: reported}, None) == {A: 1, B: 2, C: 1}
    assert requests.just_sent({B: reported._replace(at_s=start_s + 1.0)}, None)[B] == 1


async def test_an_attempt_is_known_after_its_end_only_if_its_stages_sign_and_not_for_long(
    autojump_clock: MockClock,
) -> None:
    requests, request = OriginRequests(), a_request()
    with requests.under_way(request):
        plain, signing = attempt_at(request, way(B)), attempt_at(request, way(C))
        signing.statements = Statements.of(signing.context)
        for each in (plain, signing):
            requests.opened(each, CHAIN)
            requests.closed(each)
        assert (requests.attempt(plain.id), requests.attempt(signing.id)) == (None, signing)
        assert (requests.chain(signing.id), requests.open_attempts()) == (None, [])
        await trio.sleep(LINGER_S - 1)
        requests.closed(plain)
        assert requests.attempt(signing.id) is signing
        await trio.sleep(1)
        requests.closed(plain)
        assert requests.attempt(signing.id) is None


async def test_no_more_than_so_many_attempts_are_known_after_their_end() -> None:
    requests = OriginRequests()
    running, ended = attempt_at(a_request("running"), way(B)), list[Attempt]()
    requests.opened(running, CHAIN)
    for index in range(LINGERING_MAX + 1):
        attempt = attempt_at(a_request(f"req_{index}"), way(B))
        attempt.statements = Statements.of(attempt.context)
        requests.opened(attempt, CHAIN)
        requests.closed(attempt)
        ended.append(attempt)
    assert requests.attempt(ended[0].id) is None
    assert all(requests.attempt(each.id) is each for each in (running, *ended[1:]))


@pytest.mark.parametrize("is_signed", [False, True])
async def test_an_attempt_that_ends_late_takes_no_other_one_of_its_id_with_it(is_signed: bool) -> None:
    requests = OriginRequests()
    earlier, later = (attempt_at(a_request("req_1"), way(B)) for _ in range(2))
    if is_signed:
        earlier.statements = Statements.of(earlier.context)
    requests.opened(earlier, CHAIN)
    requests.opened(later, CHAIN)
    requests.closed(earlier)
    assert requests.attempt("req_1") is later
