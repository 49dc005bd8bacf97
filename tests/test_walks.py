"""The three walks of docs/architecture.md are the code's call paths, read from the source (call_paths.py).

Each step is led to by the one before: by calls, or functions handed on, within the packages of the two. So a
step that is renamed, moved, left out or no longer called fails here, and so does a path through a package
that the list does not name."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from call_paths import Place, class_at, function_at, path, with_bases

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "architecture.md").read_text("utf-8")
SECTION = PAGE.partition("## Three walks through the code")[2].partition("\n## ")[0]
STEP = re.compile(r"^(\d+)\. (.*?)`([\w.]+):([\w.]+)`", re.MULTILINE)
STEPS_MAX = 12

ELSEWHERE = ("On the other node", "In the worker")
"""How a step begins to which bytes lead that another process has sent."""
QUEUED = "From the queue"
"""How a step begins that the class of the step before leads to later, from what it has queued."""
ENTRANCES = {
    "On a change": "swarmllm.daemon:_open_rooms",
    "For a request": "swarmllm.pipeline.origin.opener:PipelineOpener.open_pipeline",
    "By registration": "swarmllm.pipeline.pipelines:Pipelines.run",
}
"""How a step begins that no earlier step leads to, and what does."""


def place(text: str) -> Place:
    module, _, name = text.partition(":")
    return Place(module, name)


IMPLEMENTS = {
    "Compute": place("swarmllm.workerpool.pool:WorkerPool"),
    "GossipReader": place("swarmllm.swarm.records.spread:RecordSpread"),
    "LinkJobs": place("swarmllm_workers.schedule.forwards:Forwards"),
    "Opener": place("swarmllm.pipeline.origin.opener:PipelineOpener"),
    "Router": place("swarmllm.swarm.libp2p_router:Libp2pRouter"),
    "Work": place("swarmllm_workers.schedule.work:ForwardWork"),
}
"""Protocol or base class -> what stands there in the walks."""
PROTOCOLS = {
    "Compute": "swarmllm.pipeline.stage.compute",
    "GossipReader": "swarmllm.swarm.libp2p.gossip",
    "LinkJobs": "swarmllm_workers.ring.ring",
    "Opener": "swarmllm.pipeline.repair.failover",
    "Router": "swarmllm.swarm.router",
    "Work": "swarmllm_workers.schedule.work",
}
OVERRIDES = {
    place("swarmllm_workers.schedule.work:ForwardWork._deliver"): place(
        "swarmllm_workers.schedule.ring_work:RingWork._deliver"
    )
}
"""A method -> that of a subclass, which stands there in the walks."""


@dataclass(frozen=True)
class Step:
    before: str
    """The words before the name."""
    at: Place


def walks() -> list[list[Step]]:
    found: list[list[Step]] = []
    for number, before, module, name in STEP.findall(SECTION):
        if number == "1":
            found.append([])
        assert int(number) == len(found[-1]) + 1
        found[-1].append(Step(before.strip(), Place(module, name)))
    return found


WALKS = walks()
each_walk = pytest.mark.parametrize("walk", WALKS, ids=lambda walk: str(walk[0].at.name))


def leads(start: list[Place], target: Place) -> bool:
    rooms = {each.room for each in (*start, target)}
    return bool(path(start, target, rooms, IMPLEMENTS, OVERRIDES))


def methods(owner: Place) -> list[Place]:
    found = class_at(Place(owner.module, owner.name.partition(".")[0]))
    assert found is not None
    return [found.place.method(name) for name in found.methods]


def test_there_are_three_walks_one_of_them_in_two_forms() -> None:
    assert SECTION.count("\n### ") == 3
    assert len(WALKS) == 4


@each_walk
def test_a_walk_is_short_and_its_functions_exist(walk: list[Step]) -> None:
    assert len(walk) <= STEPS_MAX
    for step in walk:
        assert function_at(step.at) is not None, str(step.at)


@each_walk
def test_each_step_is_led_to_by_the_one_before(walk: list[Step]) -> None:
    for before, step in itertools.pairwise(walk):
        if step.before in ELSEWHERE:
            continue
        if step.before in ENTRANCES:
            start = [place(ENTRANCES[step.before])]
        elif step.before == QUEUED:
            start = methods(before.at)
        else:
            start = [before.at]
        assert leads(start, step.at), f"{start[0]} does not lead to {step.at}"


@each_walk
def test_a_walk_does_not_return_to_a_room_that_it_left(walk: list[Step]) -> None:
    """But for rooms in another process."""
    visited: list[str] = []
    for step in walk:
        if step.before in ELSEWHERE:
            visited.clear()
        if not visited or visited[-1] != step.at.room:
            assert step.at.room not in visited, f"back in {step.at.room}"
            visited.append(step.at.room)


@pytest.mark.parametrize("name", IMPLEMENTS)
def test_what_stands_for_a_protocol_has_its_methods(name: str) -> None:
    protocol, implementer = class_at(Place(PROTOCOLS[name], name)), class_at(IMPLEMENTS[name])
    assert protocol is not None
    assert implementer is not None
    known = {method for base in with_bases(implementer) for method in (*base.methods, *base.fields)}
    assert {each for each in protocol.methods if not each.startswith("__")} <= known


def test_an_override_is_of_a_subclass() -> None:
    for base, override in OVERRIDES.items():
        owner = class_at(Place(override.module, override.name.partition(".")[0]))
        assert owner is not None
        assert base.name.partition(".")[0] in {each.place.name for each in with_bases(owner)}
        assert function_at(override) is not None


@each_walk
def test_a_step_that_is_renamed_or_stands_at_another_place_fails(walk: list[Step]) -> None:
    for before, step in itertools.pairwise(walk):
        if step.before in ELSEWHERE or step.before in ENTRANCES or step.before == QUEUED:
            continue
        assert not leads([before.at], Place(step.at.module, step.at.name + "_soon"))
        assert not leads([step.at], before.at), "the other way round"
