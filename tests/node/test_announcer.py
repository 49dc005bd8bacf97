"""When the announcer tells the swarm of load that comes and goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import trio
import trio.testing
from msgspec import UNSET
from node_ids import A

from swarmllm.node.announcing.announcer import Announcer
from swarmllm.node.announcing.look_times import RARELY_S, SPEAK_S
from swarmllm.scheduling.speeds import Observations
from swarmllm.swarm.in_memory.network import InMemoryNetwork
from swarmllm.swarm.records.registry import Registry
from swarmllm_proto.swarm import NodeCapability


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


async def at_once(call: Callable[..., object], *arguments: object) -> object:
    """Instead of a thread: while one works, a mock clock jumps."""
    return call(*arguments)


@pytest.mark.parametrize("is_told", [True, False])
async def test_load_of_an_idle_node_is_told_within_a_second_of_its_beginning(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """Where nobody says that work began, at the next look that comes anyway."""
    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)
    load, nothing = Counted(), cast(Any, NothingHeld())
    async with InMemoryNetwork() as network, trio.open_nursery() as nursery:
        router = network.add(A)
        announcer = Announcer(
            "a",
            router=router,
            registry=Registry(A),
            pool=nothing,
            catalogue=nothing,
            transfer=nothing,
            observations=Observations(),
            describe=load.describe,
            placing=nothing,
            files=nothing,
            models=nothing,
        )
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
