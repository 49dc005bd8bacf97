"""Nodes of the routes that the next requests will take are dialled before them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from node_ids import A, B, C
from trio.testing import MockClock

from swarmllm.errors import NodeUnreachable, NoPipeline
from swarmllm.pipeline.route.route_planner import DEFAULT_SIZE
from swarmllm.pipeline.route.warming import ASKED_S, DIALS_MAX, EVERY_S, MODELS_MAX, ROUTES, RouteWarming


@dataclass
class Stand:
    """A node that knows its connections, and a planner with one route for each model."""

    node_id: str = A
    dead: set[str] = field(default_factory=set)
    routes: dict[str, list[str]] = field(default_factory=dict)
    others: list[list[str]] = field(default_factory=list)
    """Of every model, after its own."""
    known: set[str] = field(default_factory=lambda: {A, B, C, "d"})
    linked: set[str] = field(default_factory=set)
    dialled: list[str] = field(default_factory=list)
    kept_ready: list[str] = field(default_factory=list)
    """Connected already: they get a data connection, where there is none."""
    planned: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        stand: Any = self
        self.warming = RouteWarming(stand, stand, lambda entry, size: stand)

    def ask(self, model_id: str, now: float = 0.0) -> None:
        entry: Any = SimpleNamespace(model_id=model_id)
        self.warming.asked(entry, DEFAULT_SIZE, now)

    def reachable(self) -> set[str]:
        return self.known

    def connected(self) -> set[str]:
        return self.linked

    async def reach(self, node_id: str) -> None:
        if node_id in self.linked:
            self.kept_ready.append(node_id)
            return
        self.dialled.append(node_id)
        if node_id in self.dead:
            raise NodeUnreachable("nothing answers")
        self.linked.add(node_id)

    async def choose(self, entry: Any, size: object, load: object, avoid: object) -> Any:
        assert (size, load) == (DEFAULT_SIZE, self)
        if not avoid:
            self.planned.append(entry.model_id)
        for route in (self.routes.get(entry.model_id), *self.others):
            if route is not None and not set(route) & set(avoid):
                return SimpleNamespace(stages=[SimpleNamespace(node_id=each) for each in route])
        raise NoPipeline("nobody has it")


async def test_the_nodes_of_a_route_are_dialled_that_are_not_connected() -> None:
    stand = Stand(routes={"m": [A, C, B, "d", B]}, linked={C})
    stand.ask("m")
    await stand.warming.warm(0.0)
    assert sorted(stand.dialled) == sorted([B, "d"])
    assert stand.kept_ready == [C]
    await stand.warming.warm(EVERY_S)
    assert len(stand.dialled) == 2, "they are connected now"
    assert sorted(stand.kept_ready[1:]) == sorted([B, C, "d"])


async def test_one_that_does_not_answer_keeps_no_other_waiting_and_is_tried_again() -> None:
    stand = Stand(routes={"gone": [], "m": [B, C]}, dead={B})
    stand.ask("unknown")
    stand.ask("m")
    await stand.warming.warm(0.0)
    assert sorted(stand.dialled) == sorted([B, C])
    await stand.warming.warm(EVERY_S)
    assert sorted(stand.dialled) == sorted([B, B, C])


async def test_the_nodes_of_the_next_best_routes_are_dialled_after_those_of_the_best() -> None:
    stand = Stand(routes={"m": [A, B]}, others=[[B, "e"], [A, C], [C], ["d"], ["f"]])
    stand.ask("m")
    await stand.warming.warm(0.0)
    assert sorted(stand.dialled) == sorted([B, C, "d"]), f"{ROUTES} routes without a node in common"


async def test_a_model_that_runs_here_needs_nobody_else() -> None:
    stand = Stand(routes={"m": [A]})
    stand.ask("m")
    await stand.warming.warm(0.0)
    assert stand.dialled == []


async def test_a_long_route_is_dialled_a_few_at_a_time() -> None:
    names = [f"n{n}" for n in range(DIALS_MAX + 1)]
    stand = Stand(routes={"m": names})
    stand.ask("m")
    await stand.warming.warm(0.0)
    assert sorted(stand.dialled) == names[:DIALS_MAX]
    await stand.warming.warm(EVERY_S)
    assert sorted(stand.dialled) == names


async def test_where_all_reachable_nodes_are_connected_nothing_is_worked_out() -> None:
    stand = Stand(routes={"m": [B]}, linked={A, B, C, "d"})
    stand.ask("m")
    await stand.warming.warm(0.0)
    assert stand.planned == []


async def test_a_model_is_kept_warm_for_a_while_after_its_last_request() -> None:
    stand = Stand()
    stand.ask("m", 5.0)
    stand.ask("m", 10.0)
    await stand.warming.warm(9.0 + ASKED_S)
    assert stand.planned == ["m"]
    await stand.warming.warm(10.0 + ASKED_S)
    await stand.warming.warm(10.0)
    assert stand.planned == ["m"], "it is forgotten"


async def test_of_many_models_the_latest_are_kept_warm() -> None:
    stand = Stand()
    names = [f"m{n}" for n in range(MODELS_MAX + 1)]
    for name in names[:MODELS_MAX]:
        stand.ask(name)
    stand.ask(names[0])
    stand.ask(names[MODELS_MAX])
    await stand.warming.warm(1.0)
    assert stand.planned == [*names[2:MODELS_MAX], names[0], names[MODELS_MAX]]


@pytest.mark.parametrize("n_rounds", [0, 3])
async def test_it_is_worked_out_again_and_again(autojump_clock: MockClock, n_rounds: int) -> None:
    stand = Stand()
    stand.ask("m")
    with trio.move_on_after((n_rounds + 0.5) * EVERY_S):
        await stand.warming.run()
    assert len(stand.planned) == 1 + n_rounds


async def test_the_first_request_for_a_model_begins_a_round_at_once_and_no_later_one(
    autojump_clock: MockClock,
) -> None:
    stand = Stand()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stand.warming.run)
        await trio.sleep(1.0)
        for model_id, expected in (("m", ["m"]), ("m", ["m"]), ("other", ["m", "m", "other"])):
            stand.ask(model_id, trio.current_time())
            await trio.sleep(1.0)
            assert stand.planned == expected
        nursery.cancel_scope.cancel()
