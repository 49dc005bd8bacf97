"""Nodes that start one after the other, hear late of each other, lose each other for a while and load at
different speeds: whatever each of them sees in between, where they end up is sound."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from swarmllm.models.layers import LayerRange, covers, merge, subtract
from swarmllm.node.placing.plan import next_step
from swarmllm.scheduling.placement import Hysteresis, ModelShape, PlacementNode, place

SHAPE = ModelShape(12, 1, 100, embedding_bytes=90, head_bytes=90)
WHOLE = LayerRange(0, 12)
BUDGET_BYTES = 975
"""Two of three have room for all layers together, nobody for all of them."""
TICK_S, CALM_S, END_S = 0.3, 40.0, 200.0


@dataclass
class Member:
    node_id: str
    layer_s: float
    starts_s: float
    held: tuple[LayerRange, ...] = ()
    loading: tuple[LayerRange, ...] = ()
    ready_s: float = 0.0
    looks_s: float = 0.0
    is_content: bool = False
    heard: dict[str, PlacementNode] = field(default_factory=dict)
    ready_elsewhere: dict[str, tuple[LayerRange, ...]] = field(default_factory=dict)
    hysteresis: Hysteresis = field(default_factory=Hysteresis)

    def record(self) -> PlacementNode:
        held = merge([*self.held, *self.loading])
        return PlacementNode(self.node_id, BUDGET_BYTES - sum(map(SHAPE.n_bytes, held)), self.layer_s, held)

    def look(self, connected: set[str]) -> bool:
        """Whether it has begun something."""
        view = [record for node_id, record in self.heard.items() if node_id in connected]
        target = place(SHAPE, [*view, self.record()]).targets[self.node_id]
        elsewhere = [layers for node_id in connected for layers in self.ready_elsewhere.get(node_id, ())]
        step = next_step(self.held, target, (), elsewhere, self.record().free_bytes, SHAPE)
        self.is_content = step.load is None and step.drop is None and not step.waits_for
        if step.load is None and step.drop is None:
            self.hysteresis.forget()
            return False
        if not self.hysteresis.see((target, step)):
            return False
        self.hysteresis.forget()
        if step.load is not None:
            self.loading = (step.load,)
        elif step.drop is not None:
            self.held = subtract(self.held, [step.drop])
        return True


def live(members: list[Member], rng: random.Random) -> None:
    """Until all of them have been content for a while, with nobody out of another's sight any more."""
    sees_from_s = {
        (one.node_id, other.node_id): max(one.starts_s, other.starts_s) + rng.uniform(0, 3)
        for one in members
        for other in members
        if one is not other
    }
    on_their_way: list[tuple[float, Member, PlacementNode, tuple[LayerRange, ...]]] = []
    n_quiet = 0

    def tell(who: Member, now_s: float) -> None:
        record = who.record()
        for other in members:
            if other is not who:
                late_s = rng.uniform(0, rng.choice([0.05, 0.3, 1.0]))
                on_their_way.append((now_s + late_s, other, record, who.held))

    for n_step in range(int(END_S / 0.1)):
        now_s = n_step * 0.1
        for changed in [changed for changed in on_their_way if changed[0] <= now_s]:
            on_their_way.remove(changed)
            _, hearer, record, ready = changed
            hearer.heard[record.node_id], hearer.ready_elsewhere[record.node_id] = record, ready
        if now_s < CALM_S and rng.random() < 0.02:
            pair = rng.choice(sorted(sees_from_s))
            sees_from_s[pair] = max(sees_from_s[pair], now_s + rng.uniform(0.3, 5))
        for each in members:
            if each.loading and each.ready_s <= now_s:
                each.held, each.loading = merge([*each.held, *each.loading]), ()
                tell(each, now_s)
            if each.loading or now_s < max(each.starts_s, each.looks_s):
                continue
            if not each.looks_s:
                tell(each, now_s)
            each.looks_s = now_s + TICK_S * rng.choice([1, 1, 1, 2, 5])
            connected = {b for (a, b), from_s in sees_from_s.items() if a == each.node_id and from_s <= now_s}
            if each.look(connected):
                each.ready_s = now_s + rng.choice([0.2, 1.0, 4.0])
                tell(each, now_s)
        rests = not on_their_way and not any(each.loading or not each.is_content for each in members)
        n_quiet = n_quiet + 1 if rests and now_s > CALM_S else 0
        if n_quiet > 20:
            return
    raise AssertionError(f"they never come to rest: {[(each.node_id, each.held) for each in members]}")


def check(members: list[Member]) -> None:
    assert covers([layers for each in members for layers in each.held], WHOLE)
    for each in members:
        assert len(each.held) <= 1, members
        assert sum(map(SHAPE.n_bytes, each.held)) <= BUDGET_BYTES


@pytest.mark.parametrize("first_seed", [0, 10, 20, 30])
def test_whatever_they_saw_in_between_the_model_is_whole_and_each_holds_one_part(first_seed: int) -> None:
    """Of three that start, and of the two that are left when one is gone."""
    for seed in range(first_seed, first_seed + 10):
        rng = random.Random(seed)
        members = [
            Member(name, 0.001 * 2 ** (rng.randint(0, 8) / 2), i and rng.uniform(0, 6))
            for i, name in enumerate("abc")
        ]
        live(members, rng)
        check(members)
        members.pop(rng.randrange(3))
        for each in members:
            each.starts_s = each.looks_s = 0.0
        live(members, rng)
        check(members)
