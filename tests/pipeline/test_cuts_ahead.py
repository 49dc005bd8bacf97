"""Loaded layers are cut where the next routes need it, once for each situation."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from node_ids import A, B, C

from bench.common.arithmetic import FakePool
from swarmllm.errors import NoPipeline
from swarmllm.models.layers import LayerRange
from swarmllm.pipeline.origin.generation import Prompt
from swarmllm.pipeline.route.cuts_ahead import CutsAhead
from swarmllm.pipeline.stage.served import Served
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import Stage

from .fakes import open_swarm
from .test_assembly import stages

R = LayerRange


@dataclass
class Stand:
    """Node b, whose layers, other holders and route can be set."""

    layers: tuple[LayerRange, ...] = (R(4, 12),)
    others: dict[str, tuple[LayerRange, ...]] = field(default_factory=lambda: {A: (R(0, 8),)})
    route: tuple[Stage, ...] = ()
    done: list[Served] = field(default_factory=list)
    cuts: list[tuple[LayerRange, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        stand: Any = self
        self.ahead = CutsAhead(B, stand, stand, stand, stand, stand)

    async def get(self, model_id: str) -> Any:
        return SimpleNamespace(model_id=model_id)

    async def stages_for(self, entry: Any) -> tuple[Stage, ...]:
        assert entry.model_id == "m"
        if not self.route:
            raise NoPipeline("nobody has the rest")
        return self.route

    def served(self) -> list[Served]:
        return self.done

    def context_sizes(self) -> dict[str, int]:
        return {"m": 512} if self.layers else {}

    def loaded(self, _model_id: str) -> tuple[LayerRange, ...]:
        return self.layers

    def held(self, _model_id: str) -> dict[str, tuple[LayerRange, ...]]:
        return {**self.others, B: self.layers}

    def cut(self, _model_id: str, layers: LayerRange, *, if_idle: bool = False) -> None:
        self.cuts.append((layers, if_idle))


async def test_a_nodes_stages_of_the_route_are_cut_once_while_nobody_uses_them() -> None:
    stand = Stand(route=stages("a 0:6", "b 6:12"))
    for _ in range(3):
        await stand.ahead.look()
    assert stand.cuts == [(R(6, 12), True)]
    stand.route = stages("a 0:5", "b 5:12")
    await stand.ahead.look()
    assert len(stand.cuts) == 1, "speeds alone are no reason"
    stand.others[C] = (R(0, 5),)
    await stand.ahead.look()
    assert stand.cuts[1:] == [(R(5, 12), True)]


async def test_after_another_load_it_is_cut_again() -> None:
    stand = Stand(route=stages("a 0:6", "b 6:12"))
    await stand.ahead.look()
    kept, stand.layers = stand.layers, ()
    await stand.ahead.look()
    stand.layers = kept
    await stand.ahead.look()
    assert stand.cuts == [(R(6, 12), True)] * 2


async def test_what_others_used_here_lately_is_cut_too_and_what_is_held_so_is_not() -> None:
    stand = Stand(route=stages("a 0:4", "b 4:12"))
    stand.done = [
        Served("m", A, (R(8, 12),), 0, 1, 5, 0.0),
        Served("m", C, (R(8, 12), R(2, 6)), 0, 1, 5, 0.0),
        Served("other", C, (R(5, 6),), 0, 1, 5, 0.0),
    ]
    await stand.ahead.look()
    assert stand.cuts == [(R(8, 12), True)]


async def test_without_a_route_nothing_is_cut_until_the_holders_change() -> None:
    stand = Stand()
    await stand.ahead.look()
    stand.route = stages("a 0:6", "b 6:12")
    await stand.ahead.look()
    assert stand.cuts == []
    stand.others[C] = (R(0, 6),)
    await stand.ahead.look()
    assert stand.cuts == [(R(6, 12), True)]


async def test_an_accepted_assignment_has_its_layers_cut_before_rows_come() -> None:
    pool = FakePool("4:12")
    async with open_swarm({A: FakePool("0:6"), B: pool}) as swarm:
        prompt, sampling = Prompt(text="hello"), Sampling(max_tokens=2)
        async with swarm[A].pipelines.generate(prompt, swarm.entry, sampling) as generation:
            assert len([token async for token in generation]) == 2
    assert pool.cuts == [R(6, 12)]
