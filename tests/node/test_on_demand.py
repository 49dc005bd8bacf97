"""Models that are loaded because a request asks for them, and how long they stay."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from dataclasses import replace as changed
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from swarmllm.errors import InvalidRequest, WorkerError
from swarmllm.guide import GUIDE_PATH
from swarmllm.models import CatalogueEntry, LayerRange, build_manifest
from swarmllm.models.model_files import FileState
from swarmllm.node.on_demand import FOREVER_S, KeepAlive, OnDemand, parse_keep_alive
from swarmllm.workerpool import AS_CONFIGURED, LoadOptions
from swarmllm_proto.identifiers import ModelId

MANIFEST = build_manifest(GUIDE_PATH)
WHOLE = MANIFEST.whole


def entry(name: str) -> CatalogueEntry:
    return CatalogueEntry(name, name, Path("/nowhere"), MANIFEST, FileState(1, 1))


@pytest.mark.parametrize(
    ("said", "meant_s"),
    [
        (None, None), (0, 0), ("0", 0), (1.5, 1.5), ("300", 300), ("5m", 300), ("1h30m", 5400),
        ("10ms", 0.01),
        (-1, FOREVER_S), ("-1", FOREVER_S), ("-1m", FOREVER_S), (1e300, FOREVER_S), ("1.5h", 5400),
    ],
)  # fmt: skip
def test_keep_alive_is_seconds_or_a_duration(said: float | str | None, meant_s: float | None) -> None:
    assert parse_keep_alive(said) == (meant_s if meant_s is None else pytest.approx(meant_s))


@pytest.mark.parametrize("said", ["", "soon", "5 m", "m", "5m5", "nan", math.nan, "\u0665m"])
def test_what_is_no_time_is_refused(said: float | str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_keep_alive(said)
    assert caught.value.field == "keep_alive"


@given(st.lists(st.sampled_from(["begin", "end", "wait"]), max_size=30))
def test_a_model_with_requests_under_way_never_expires(steps: list[str]) -> None:
    kept, now_s, n = KeepAlive(), 0.0, 0
    kept.loaded("a", 10.0, now_s)
    idle_since_s = 0.0
    for step in steps:
        if step == "begin":
            kept.begin("a", None)
            n += 1
        elif step == "end" and n:
            kept.end("a", now_s)
            n -= 1
            idle_since_s = now_s
        elif step == "wait":
            now_s += 4.0
        assert kept.expired(now_s) == (("a",) if not n and now_s >= idle_since_s + 10 else ())
        assert kept.next_s(now_s) == (math.inf if n else idle_since_s + 10)


@dataclass
class World:
    """The models of a node that has room for some."""

    held: set[str] = field(default_factory=set)
    loads: list[tuple[str, LoadOptions]] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)
    room: int = 9
    complete: set[str] = field(default_factory=set)
    managed: set[str] = field(default_factory=set)
    loads_on_demand: bool = True
    used_s: dict[str, float] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    """Models of which connected nodes have files."""
    too_large: set[str] = field(default_factory=set)
    weights_room: int = 9
    others_have_room: bool = False
    spread: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.on_demand = OnDemand(self)

    def loaded(self, model_id: ModelId) -> tuple[LayerRange, ...]:
        return (WHOLE,) if model_id in self.held else ()

    async def load_whole(self, wanted: CatalogueEntry, options: LoadOptions) -> None:
        await trio.sleep(2)
        if len(self.held) >= self.room:
            raise WorkerError("out_of_memory: no room", kind="out_of_memory")
        self.held.add(wanted.model_id)
        self.loads.append((wanted.model_id, options))

    def can_bring(self, entry: CatalogueEntry) -> bool:
        return not entry.absent(entry.manifest.tensors) or entry.model_id in self.given

    def lacks_room(self, entry: CatalogueEntry) -> bool:
        return entry.model_id in self.too_large or len(self.held) >= self.weights_room

    async def fetch(self, wanted: CatalogueEntry) -> None:
        if wanted.absent(wanted.manifest.tensors) and not self.lacks_room(wanted):
            await trio.sleep(1000)

    async def spread_out(self, entry: CatalogueEntry) -> bool:
        await trio.sleep(2)
        if not self.others_have_room:
            return False
        self.spread.add(entry.model_id)
        self.complete.add(entry.model_id)
        return True

    def is_spread(self, model_id: ModelId) -> bool:
        return model_id in self.spread

    async def drop_whole(self, gone: CatalogueEntry) -> None:
        await trio.sleep(1)
        if gone.model_id in self.spread:
            self.spread.discard(gone.model_id)
            self.complete.discard(gone.model_id)
        self.held.discard(gone.model_id)
        self.drops.append(gone.model_id)

    def is_complete(self, entry: CatalogueEntry) -> bool:
        return entry.model_id in self.complete

    def is_managed(self, model_id: ModelId) -> bool:
        return model_id in self.managed

    def may_load(self) -> bool:
        return self.loads_on_demand

    def used_by_others_s(self, model_id: ModelId) -> float:
        return self.used_s.get(model_id, -math.inf)

    @asynccontextmanager
    async def asked(
        self, name: str, said_s: float | None = None, keep_s: float = 300.0
    ) -> AsyncIterator[None]:
        async with self.on_demand.using(entry(name), AS_CONFIGURED, keep_s, said_s):
            yield


@asynccontextmanager
async def open_world() -> AsyncIterator[World]:
    world = World()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.on_demand.run)
        yield world
        nursery.cancel_scope.cancel()


async def test_a_model_is_loaded_once_for_all_who_ask_and_goes_after_its_time(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:

        async def ask() -> None:
            async with world.asked("a"):
                assert world.held == {"a"}
                await trio.sleep(10)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask)
        assert world.loads == [("a", AS_CONFIGURED)]
        await trio.sleep(299)
        assert world.held == {"a"}
        await trio.sleep(3)
        assert world.drops == ["a"]
        async with world.asked("a"):
            assert world.held == {"a"}


async def test_its_user_removes_one_that_was_only_loaded_for_requests_at_once(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        async with world.asked("a"):
            await world.on_demand.give_up("a")
            assert world.held == {"a"}, "a request is under way"
        await world.on_demand.give_up("a")
        assert world.held == set()
        assert world.on_demand.expires_in_s("a") is None
        async with world.asked("b"):
            pass
        world.managed.add("b")
        await world.on_demand.give_up("b")
        world.held.add("c")
        await world.on_demand.give_up("c")
        assert world.held == {"b", "c"}, "placement and a person hold them"


async def test_a_request_says_how_long_it_stays(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        async with world.asked("a", said_s=0.0):
            await trio.sleep(1000)
        await trio.sleep(2)
        assert world.drops == ["a"]
        async with world.asked("b", said_s=FOREVER_S):
            pass
        await trio.sleep(10**7)
        assert world.held == {"b"}
        assert world.on_demand.expires_in_s("b") is None
        async with world.asked("b", said_s=60.0):
            assert world.on_demand.expires_in_s("b") == 60
        await trio.sleep(20)
        assert world.on_demand.expires_in_s("b") == 40
        await trio.sleep(42)
        assert world.held == set()


async def test_what_a_person_loaded_or_others_hold_or_placement_manages_is_left_alone(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        world.held = {"mine"}
        world.complete, world.managed = {"theirs"}, {"placed"}
        for name in ("mine", "theirs", "placed"):
            async with world.asked(name, said_s=0.0):
                pass
        partly = changed(entry("partly"), present=frozenset())
        async with world.on_demand.using(partly, AS_CONFIGURED, 300.0):
            pass
        world.loads_on_demand = False
        async with world.asked("other"):
            pass
        await trio.sleep(10**6)
        assert (world.loads, world.drops, world.held) == ([], [], {"mine"})


async def test_a_model_that_a_person_loads_later_stays(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        async with world.asked("a"):
            pass
        world.on_demand.forget("a")
        await trio.sleep(10**6)
        assert world.held == {"a"}


async def test_idle_models_make_room_the_longest_unused_one_first(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        world.room = 2
        async with world.asked("a"):
            pass
        await trio.sleep(1)
        async with world.asked("b"):
            pass
        async with world.asked("a"):
            await trio.sleep(1)
        async with world.asked("c"):
            assert world.held == {"a", "c"}
            async with world.asked("a"):
                with pytest.raises(WorkerError, match="no room"):
                    async with world.asked("d"):
                        raise AssertionError("there is no room")
        assert world.drops == ["b"]


async def test_what_other_nodes_use_stays_meanwhile_and_for_its_time_afterwards(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        async with world.asked("a", said_s=0.0):
            world.used_s["a"] = math.inf
        await trio.sleep(1000)
        assert world.held == {"a"}
        assert world.on_demand.expires_in_s("a") == 300
        world.used_s["a"] = trio.current_time()
        await trio.sleep(290)
        assert world.held == {"a"}
        assert world.on_demand.expires_in_s("a") == 10
        async with world.asked("a", said_s=0.0):
            pass
        await trio.sleep(9)
        assert world.held == {"a"}, "its own requests say nothing of others'"
        await trio.sleep(12)
        assert world.drops == ["a"]


async def test_what_other_nodes_use_makes_no_room(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        world.room = 2
        for name in ("a", "b"):
            async with world.asked(name):
                pass
        world.used_s["a"] = math.inf
        async with world.asked("c"):
            assert world.held == {"a", "c"}
            with pytest.raises(WorkerError, match="no room"):
                async with world.asked("d"):
                    raise AssertionError("there is no room")
        world.used_s["a"] = trio.current_time() + 1
        async with world.asked("e"):
            assert world.held == {"a", "e"}, "the one that was used longest ago goes"


async def test_what_placement_has_taken_over_stays(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        async with world.asked("a"):
            pass
        world.managed = {"a"}
        await trio.sleep(10**6)
        assert world.held == {"a"}


async def test_whoever_gives_up_while_it_loads_leaves_no_trace(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        with trio.move_on_after(1):
            async with world.asked("a"):
                raise AssertionError("it takes 2 s")
        assert world.held == set()
        async with world.asked("a"):
            assert world.held == {"a"}
        await trio.sleep(302)
        assert world.held == set()


async def test_a_request_while_it_is_being_dropped_loads_it_again(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        async with world.asked("a"):
            pass
        await trio.sleep(300.5)
        async with world.asked("a"):
            assert world.held == {"a"}
        assert (world.drops, len(world.loads)) == (["a"], 2)


def elsewhere(name: str) -> CatalogueEntry:
    """Known here, with nothing of it on this disk."""
    return changed(entry(name), present=frozenset())


async def test_a_model_that_only_other_nodes_have_on_their_disks_is_brought_here(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        async with world.on_demand.using(elsewhere("far"), AS_CONFIGURED, 300.0):
            assert world.held == set(), "nobody has it"
        world.given = {"far"}
        async with world.on_demand.using(elsewhere("far"), AS_CONFIGURED, 300.0):
            assert world.held == {"far"}


async def test_one_that_is_being_fetched_keeps_no_other_waiting(autojump_clock: MockClock) -> None:
    async with open_world() as world, trio.open_nursery() as nursery:
        world.given = {"far"}

        async def ask_far() -> None:
            async with world.on_demand.using(elsewhere("far"), AS_CONFIGURED, 300.0):
                assert trio.current_time() - began_s == 1002

        began_s = trio.current_time()
        nursery.start_soon(ask_far)
        await trio.sleep(1)
        async with world.asked("near"):
            assert trio.current_time() - began_s == 3


async def test_one_that_has_no_room_here_is_spread_over_others_for_as_long_as_it_is_asked_for(
    autojump_clock: MockClock,
) -> None:
    async with open_world() as world:
        world.too_large, world.given, world.others_have_room = {"big"}, {"big"}, True
        async with world.on_demand.using(elsewhere("big"), AS_CONFIGURED, 300.0):
            assert (world.held, world.complete) == (set(), {"big"})
        async with world.on_demand.using(elsewhere("big"), AS_CONFIGURED, 300.0):
            assert world.drops == []
        await trio.sleep(302)
        assert (world.complete, world.drops) == (set(), ["big"])


async def test_nothing_is_fetched_of_one_that_has_room_nowhere(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        world.too_large, world.given = {"big"}, {"big"}
        async with world.on_demand.using(elsewhere("big"), AS_CONFIGURED, 300.0):
            assert (world.held, world.loads) == (set(), [])


async def test_idle_models_go_before_one_is_loaded_that_needs_their_room(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        world.weights_room = 1
        async with world.asked("a"):
            pass
        began_s = trio.current_time()
        async with world.asked("b"):
            assert world.held == {"b"}
        assert world.drops == ["a"]
        assert trio.current_time() - began_s == 3, (
            "a second for dropping, two for loading, and no try between"
        )


async def test_who_asks_while_it_is_spread_waits_for_it(autojump_clock: MockClock) -> None:
    async with open_world() as world:
        world.too_large, world.others_have_room = {"big"}, True
        seen: list[set[str]] = []

        async def ask(after_s: float) -> None:
            await trio.sleep(after_s)
            world.managed = {"big"} if after_s else set()
            async with world.asked("big"):
                seen.append(set(world.complete))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 0)
            nursery.start_soon(ask, 1)
        assert seen == [{"big"}, {"big"}]
