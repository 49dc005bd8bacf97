"""When the announcer tells the swarm of load that comes and goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest
import trio
import trio.testing
from msgspec import UNSET
from node_ids import A, B

from swarmllm.node.announcing.announcer import Announcer, Holdings
from swarmllm.node.announcing.look_times import RARELY_S, SPEAK_S
from swarmllm.node.announcing.record_changes import SETTLED_S
from swarmllm.scheduling.speeds import Observations
from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.swarm.records.registry import Registry
from swarmllm_proto.codec import decode_record
from swarmllm_proto.node_load import NodeLoad, decode_load
from swarmllm_proto.swarm import (
    KeptPrefix,
    NodeCapability,
    NodeRecord,
    ObservedLatency,
    ObservedLink,
    PrefixCacheAnnounce,
    ShardAnnounce,
)


@dataclass
class NothingHeld:
    """All that an announcer asks about holdings."""

    model_ids: tuple[str, ...] = ()
    shares: object = UNSET
    shared: object = UNSET
    fetched: object = UNSET
    gives: bool = False

    def list(self) -> tuple[object, ...]:
        return ()

    def models(self) -> dict[str, object]:
        return {}

    def kept_prefixes(self) -> dict[str, object]:
        return {}

    def announcements(self, _entries: object) -> tuple[object, ...]:
        return ()

    def announce_far(self, _names: object) -> None: ...


@dataclass
class Counted:
    """A node's load, and how often it was asked for."""

    active_requests: int = 0
    looked_at_s: list[float] = field(default_factory=list)

    def describe(self) -> NodeCapability:
        self.looked_at_s.append(trio.current_time())
        return NodeCapability(active_requests=self.active_requests)


def announcer_of(router: object, held: object, describe: Callable[[], NodeCapability]) -> Announcer:
    node = cast(Any, held)
    return Announcer(
        "a",
        router=cast(Any, router),
        registry=Registry(A),
        pool=node,
        catalogue=node,
        transfer=node,
        observations=Observations(),
        describe=describe,
        placing=node,
        files=node,
        models=node,
    )


async def at_once(call: Callable[..., object], *arguments: object) -> object:
    """Instead of a thread: while one works, a mock clock jumps."""
    return call(*arguments)


@pytest.mark.parametrize("is_told", [True, False])
async def test_load_of_an_idle_node_is_told_within_a_second_of_its_beginning(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """Where nobody says that work began, at the next look that comes anyway."""
    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)
    load, nothing = Counted(), NothingHeld()
    async with InMemoryNetwork() as network, trio.open_nursery() as nursery:
        router = network.add(A)
        announcer = announcer_of(router, nothing, load.describe)
        await nursery.start(announcer.run)
        await trio.sleep(300.1)
        assert len([each for each in load.looked_at_s if each > 100]) <= 200 / RARELY_S + 1
        assert not router.loads()
        load.active_requests = 1
        if is_told:
            announcer.work_began()
        await trio.sleep((SPEAK_S if is_told else RARELY_S) + 0.1)
        told = router.loads()[A]
        load.active_requests = 0
        await trio.sleep(SPEAK_S + 0.1)
        assert router.loads()[A] != told
        nursery.cancel_scope.cancel()


class LargeSwarm:
    """What a router of one is told: what goes to everybody, what to those that ask, and loads."""

    node_id = A

    def __init__(self) -> None:
        self.told: list[tuple[str, NodeRecord | NodeLoad]] = []

    def peers(self) -> tuple[object, ...]:
        return ()

    async def publish(self, record: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.told.append(("all", decode_record(record)))

    async def publish_details(self, record: bytes, *, soon: bool) -> bool:
        await trio.lowlevel.checkpoint()
        self.told.append(("soon" if soon else "later", decode_record(record)))
        return False

    async def publish_load(self, load: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.told.append(("load", decode_load(load)))


async def test_in_a_large_swarm_a_load_that_has_settled_goes_to_nobody_anew(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)
    router, now = LargeSwarm(), NodeCapability()
    announcer = announcer_of(router, NothingHeld(), lambda: now)
    await announcer.publish()
    now = NodeCapability(stage_requests=2)
    for _ in range(5):
        await announcer.publish()
        await trio.sleep(SETTLED_S)
    assert [how for how, _ in router.told] == ["all", "load", "later"]


async def test_in_a_large_swarm_speeds_and_links_go_to_those_that_ask(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)
    router, now = LargeSwarm(), NodeCapability()
    announcer = announcer_of(router, NothingHeld(), lambda: now)
    fast = (ObservedLatency(model_id="a" * 64, decode_s=0.001),)
    slow = (ObservedLatency(model_id="a" * 64, decode_s=0.002),)
    near = (ObservedLink(node_id=B, rtt_s=0.02),)
    for said in (
        NodeCapability(max_requests=3),
        NodeCapability(max_requests=3, observed_latencies=fast),
        NodeCapability(max_requests=3, observed_latencies=fast, observed_links=near),
        NodeCapability(max_requests=3, observed_latencies=slow, observed_links=near, stage_requests=1),
        NodeCapability(max_requests=4, observed_latencies=slow, observed_links=near, stage_requests=1),
    ):
        now = said
        await announcer.publish()
        n_told = len(router.told)
        await announcer.publish()
        assert len(router.told) == n_told, "it has been told"
        await trio.sleep(1000)
    hows = [how for how, _ in router.told]
    assert hows == ["all", "soon", "later", "later", "load", "all"], "a heartbeat tells of both"
    speeds, links, both, load, last = (said for _, said in router.told[1:])
    assert isinstance(speeds, NodeRecord)
    assert speeds.capability.observed_latencies == fast
    assert isinstance(links, NodeRecord)
    assert links.capability.observed_links == near
    assert isinstance(both, NodeRecord)
    assert both.capability.observed_latencies == slow
    assert isinstance(load, NodeLoad)
    assert load.stage_requests == 1
    assert last == msgspec.structs.replace(
        both, sequence=5, capability=msgspec.structs.replace(both.capability, max_requests=4)
    )


async def test_in_a_large_swarm_kept_prompts_and_progress_go_to_those_that_ask(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = LargeSwarm()
    announcer = announcer_of(router, NothingHeld(), NodeCapability)
    kept = PrefixCacheAnnounce(model_id="a" * 64, prefixes=(KeptPrefix(bytes(32), 1),))

    def held(name: str, arrived: int, *prefixes: PrefixCacheAnnounce) -> Holdings:
        model = ShardAnnounce(
            model_id="a" * 64, name=name, n_layers=4, ranges=(), loading=((0, 4),), fetched=(arrived, 9)
        )
        return (model,), (), prefixes, UNSET, UNSET, UNSET, UNSET

    for holdings in (held("m", 1), held("m", 2), held("m", 2, kept), held("n", 3, kept)):

        async def of_now(holdings: Holdings = holdings) -> Holdings:
            await trio.lowlevel.checkpoint()
            return holdings

        monkeypatch.setattr(announcer, "_holdings", of_now)
        for _ in range(2):
            await announcer.publish()
        await trio.sleep(1000)
    assert [how for how, _ in router.told] == ["all", "later", "later", "all"]


async def test_a_record_says_of_speeds_what_was_said_where_they_are_about_the_same(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)
    router, now = LargeSwarm(), NodeCapability()
    announcer = announcer_of(router, NothingHeld(), lambda: now)
    for decode_s, n_taken in ((0.0010, 3), (0.0011, 4)):
        seen = (ObservedLatency(model_id="a" * 64, decode_s=decode_s),)
        now = NodeCapability(max_requests=n_taken, observed_latencies=seen)
        await announcer.publish()
    first, second = (said for _, said in router.told)
    assert isinstance(first, NodeRecord)
    assert isinstance(second, NodeRecord)
    assert second.capability == msgspec.structs.replace(first.capability, max_requests=4)
