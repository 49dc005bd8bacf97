"""Strangers who look good and let requests fail get few of them, and honest newcomers are not kept out."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from bench.common.arithmetic import fake_entry
from swarmllm.errors import (
    DeadlineExceeded,
    NodeBusy,
    NodeRefused,
    NodeUnreachable,
    NoPipeline,
    SwarmLLMError,
)
from swarmllm.pipeline.check.verdict_recorder import VerdictRecorder
from swarmllm.pipeline.origin.attempts import note_newcomers, note_trust_events
from swarmllm.pipeline.origin.output import Blamed
from swarmllm.pipeline.origin.requests import OriginRequest
from swarmllm.pipeline.repair.retry_policy import RetryPolicy
from swarmllm.pipeline.route.assembly import Assembly
from swarmllm.pipeline.route.inputs import OwnLoad
from swarmllm.pipeline.route.newcomers import PAUSE_MAX_S, Newcomers
from swarmllm.pipeline.route.request_routes import NEWCOMER, NothingCached, RequestRoutes
from swarmllm.pipeline.route.route_planner import RequestSize
from swarmllm.pipeline.route.suspects import Suspects, sparing
from swarmllm.pipeline.route.untried import PAUSE_S
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers.trust import EARNED_MIN, NEUTRAL, TrustBook, TrustEvent
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import Stage

ENTRY = fake_entry()
ME = node_id_named("me")


class Client:
    """A node that asks, with its real routes, doubts and trust, among nodes that hold the whole model. What a
    request takes there by their records decides."""

    def __init__(self, seed: int, says_s: Mapping[str, float]) -> None:
        self.says_s = {node_id_named(name): cost_s for name, cost_s in says_s.items()}
        self.bad: set[NodeId] = {
            node_id for name in says_s if (node_id := node_id_named(name)) if "bad" in name
        }
        self.book = TrustBook()
        self.suspects = Suspects()
        self.node_id = ME
        self.announced_s = 0.0
        here: Any = self
        draw = random.Random(seed).choice
        self.routes = RequestRoutes(here, here, here, self.suspects, here, NothingCached(), draw)
        self.served_by: list[NodeId] = []
        self.n_failures: list[int] = []
        """Of each request, before it was answered."""
        self.failed: set[NodeId] = set()
        self.are_named = True
        """Whether it is known of nodes that let requests fail; else they lose no trust."""

    def note(self, node_id: NodeId, event: TrustEvent, detail: str = "") -> None:
        self.book.note(node_id, event, trio.current_time(), detail)

    def score(self, node_id: NodeId) -> float:
        return self.book.score(node_id, trio.current_time())

    def now(self, *_: Any, n_asking: int, besides: object = None) -> OwnLoad:
        return OwnLoad()

    def untried(self) -> frozenset[NodeId]:
        return frozenset()

    def reachable(self) -> frozenset[NodeId]:
        return frozenset(self.says_s)

    def holders(self, model_id: str) -> Collection[NodeId]:
        return self.says_s.keys()

    async def choose(
        self,
        entry: Any,
        size: Any,
        load: Any,
        avoid: Collection[NodeId],
        *,
        suspects: Sequence[NodeId],
        **_: Any,
    ) -> Assembly:
        def cheapest(avoided: set[NodeId]) -> Assembly:
            able = [node_id for node_id in self.says_s if node_id not in avoided]
            if not able:
                raise NoPipeline("nobody has it")
            best = min(able, key=lambda node_id: self.says_s[node_id])
            return Assembly((Stage(node_id=best, start=0, end=6),), (None,), cost_s=self.says_s[best])

        return sparing(cheapest, avoid, suspects)

    async def plan(self, entry: Any, size: Any, load: Any, suspects: Any, untried: Any) -> Any:
        return suspects

    async def ask(self) -> None:
        """One request, until it is answered."""
        request = OriginRequest("r", ENTRY, np.arange(3, dtype=np.int32), Sampling(), RetryPolicy(0.0))
        for n_failures in range(10):
            request.n_attempts = n_failures + 1
            (node_id,) = (await self.routes.choose(request)).node_ids
            chain: Any = SimpleNamespace(
                context=SimpleNamespace(view=SimpleNamespace(node_id=ME)),
                node_ids={node_id, ME},
                blamed=Blamed(),
                failure=None,
                is_complete=True,
            )
            if node_id not in self.bad:
                note_trust_events(chain, self, self.suspects)
                self.served_by.append(node_id)
                self.n_failures.append(n_failures)
                return
            self.failed.add(node_id)
            chain.failure, chain.is_complete = DeadlineExceeded("it does nothing"), False
            if self.are_named:
                chain.blamed.stalled(node_id)
            note_newcomers(chain, chain.failure, True, self.suspects.newcomers, self)
            request.recovery.avoid.add(node_id)
            self.suspects.doubt([node_id], trio.current_time())
            note_trust_events(chain, self, self.suspects)
        raise AssertionError("it was never answered")


BAD = {f"bad {number}": 0.1 + number / 1e4 for number in range(200)}
HONEST = {"a": 2.0, "b": 2.1, "c": 2.2}


@pytest.mark.parametrize("n_served", [11, 1])
async def test_two_hundred_fresh_names_that_do_nothing_cost_few_attempts(
    autojump_clock: MockClock, n_served: int
) -> None:
    """An hour of a request every five seconds."""
    client = Client(0, BAD | HONEST)
    for name in HONEST:
        for _ in range(n_served):
            client.note(node_id_named(name), TrustEvent.SERVED)
    for _ in range(720):
        await client.ask()
        await trio.sleep(5.0)
    hurt = [each for each in client.n_failures if each]
    # A minute, two, four, eight, then ten each.
    assert len(hurt) <= 5 + 3600 / PAUSE_MAX_S
    assert max(client.n_failures) == 1, "a second attempt takes no risk"


async def test_an_honest_newcomer_among_them_has_its_turn_and_then_most_of_the_work(
    autojump_clock: MockClock,
) -> None:
    few = dict(list(BAD.items())[:20])
    newcomer = node_id_named("newcomer")
    client = Client(1, few | HONEST | {"newcomer": 0.5})
    for name in HONEST:
        for _ in range(11):
            client.note(node_id_named(name), TrustEvent.SERVED)
    n_asked = 0
    while client.served_by.count(newcomer) < 20:
        await client.ask()
        await trio.sleep(30.0)
        n_asked += 1
        assert n_asked < 20 * (len(few) + 1) + 40, "each of them fails once before it is drawn again"
    assert client.score(newcomer) > EARNED_MIN


async def test_newcomers_that_nobody_can_blame_keep_no_honest_one_out(autojump_clock: MockClock) -> None:
    few = dict(list(BAD.items())[:20])
    newcomer = node_id_named("newcomer")
    client = Client(1, few | HONEST | {"newcomer": 0.5})
    client.are_named = False
    for name in HONEST:
        for _ in range(11):
            client.note(node_id_named(name), TrustEvent.SERVED)
    n_asked = 0
    while client.score(newcomer) <= EARNED_MIN:
        await client.ask()
        await trio.sleep(30.0)
        n_asked += 1
        assert n_asked < 20 * (len(few) + 1) + 40, "each of them fails once before it is drawn again"
    assert all(client.score(node_id) == NEUTRAL for node_id in client.bad)


def trusts(**scores: float) -> Any:
    known = {node_id_named(name): score for name, score in scores.items()}
    return lambda node_id: known.get(node_id, NEUTRAL)


def first(names: Sequence[NodeId]) -> NodeId:
    return names[0]


def spared(newcomers: Newcomers, score: Any, now_s: float, *names: str) -> list[set[NodeId]]:
    holders = [node_id_named(name) for name in names]
    return [set(each) for each in newcomers.to_spare(holders, score, now_s, first)]


def test_newcomers_are_spared_from_a_failure_on_until_one_of_them_has_served() -> None:
    newcomers, score = Newcomers(), trusts(known=0.6, once=0.51, bad=0.4)
    known, once, bad, new = map(node_id_named, ("known", "once", "bad", "new"))
    newcomers.failed([known], score, 0.0)
    assert newcomers.are_trusted(0.0), "it is none"
    newcomers.failed([known, bad], score, 0.0)
    assert spared(newcomers, score, PAUSE_S - 1, "known", "once", "bad", "new") == [
        {once, bad, new},
        {bad, new},
    ]
    assert spared(newcomers, score, PAUSE_S - 1, "known") == []
    after = spared(newcomers, score, PAUSE_S, "known", "once", "bad", "new")
    assert after[0] == {bad, new}, "of those that have not failed, one that has served is drawn first"
    newcomers.failed([once], score, PAUSE_S)
    after = spared(newcomers, score, 3 * PAUSE_S, "known", "once", "bad", "new")
    assert after[0] == {once, bad}, "those that have failed are not drawn before others"
    assert spared(newcomers, score, 3 * PAUSE_S, "bad") == []
    newcomers.served([known, once], score)
    assert not newcomers.are_trusted(3 * PAUSE_S)
    after = spared(newcomers, score, 3 * PAUSE_S, "known", "once", "bad", "new")
    assert after[0] == {bad, new}, "it has made up for its failure"
    for _ in range(2):
        newcomers.served([new], score)
    assert not newcomers.are_trusted(PAUSE_S - 1)
    assert newcomers.are_trusted(3 * PAUSE_S)


@pytest.mark.parametrize(
    ("error", "has_begun", "counts"),
    [
        (NodeBusy("full"), True, False),
        (NodeRefused("no layers"), False, False),
        (NodeUnreachable("not there"), False, False),
        (NodeUnreachable("gone"), True, True),
        (DeadlineExceeded("silent"), False, True),
        (NoPipeline("nobody"), True, False),
    ],
)
def test_a_refusal_is_not_held_against_newcomers(error: SwarmLLMError, has_begun: bool, counts: bool) -> None:
    async def fail() -> bool:
        newcomers = Newcomers()
        chain: Any = SimpleNamespace(
            context=SimpleNamespace(view=SimpleNamespace(node_id=ME)),
            node_ids={ME, NodeId("b")},
            blamed=Blamed(),
        )
        note_newcomers(chain, error, has_begun, newcomers, SimpleNamespace(score=lambda node_id: NEUTRAL))  # type: ignore[arg-type]
        return not newcomers.are_trusted(trio.current_time())

    assert trio.run(fail) is counts


async def test_a_newcomer_whose_results_were_wrong_has_failed() -> None:
    for is_signed in (True, False):
        client = Client(0, HONEST)
        recorder = VerdictRecorder(ME, client, client.suspects, PipelineStatistics())
        if is_signed:
            recorder.bad_rows(NodeId("b"))
        else:
            recorder.wrong(NodeId("b"), "layers")
        assert not client.suspects.newcomers.are_trusted(trio.current_time())


async def test_a_plan_says_which_newcomers_it_does_without(autojump_clock: MockClock) -> None:
    client = Client(0, HONEST | {"bad 1": 0.1})
    client.note(node_id_named("a"), TrustEvent.SERVED)
    client.suspects.newcomers.failed([node_id_named("bad 1")], client.score, 0.0)
    planned: Any = await client.routes.plan(ENTRY, RequestSize(1, 1))
    assert planned == dict.fromkeys(client.says_s, NEWCOMER)
