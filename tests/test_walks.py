"""The three walks of docs/architecture.md lead through functions that exist, in the code's order."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import reduce
from pathlib import Path
from types import ModuleType

import pytest

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "architecture.md").read_text("utf-8")
STEPS_MAX = 12
ENTRANCES = {"On the other node", "In the worker", "On a change", "For a request"}
"""How a step begins that no code of an earlier step calls: the network or a subscription leads there."""

SECTION = PAGE.partition("## Three walks through the code")[2].partition("\n## ")[0]
STEP = re.compile(r"^(\d+)\. (.*?)`([\w.]+):([\w.]+)`", re.MULTILINE)


def walks() -> list[list[tuple[str, str, str]]]:
    """Of each walk the steps: (words before the name, module, name in it)."""
    found: list[list[tuple[str, str, str]]] = []
    for number, before, module, name in STEP.findall(SECTION):
        if number == "1":
            found.append([])
        assert int(number) == len(found[-1]) + 1
        found[-1].append((before.strip(), module, name))
    return found


WALKS = walks()
each_walk = pytest.mark.parametrize("walk", WALKS, ids=lambda walk: str(walk[0][2]))


def source(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))


def room(module: str) -> str:
    return module.rpartition(".")[0]


def test_there_are_three_walks_one_of_them_in_two_forms() -> None:
    assert SECTION.count("\n### ") == 3
    assert len(WALKS) == 4


@each_walk
def test_a_walk_is_short_and_its_functions_exist(walk: list[tuple[str, str, str]]) -> None:
    assert len(walk) <= STEPS_MAX
    for _, module, name in walk:
        start: ModuleType | object = importlib.import_module(module)
        assert callable(reduce(getattr, name.split("."), start)), f"{module}:{name}"


@each_walk
def test_an_earlier_step_leads_to_each(walk: list[tuple[str, str, str]]) -> None:
    behind = source(walk[0][1])
    for before, module, name in walk[1:]:
        last = name.rpartition(".")[2]
        assert before in ENTRANCES or re.search(rf"\b{last}\b", behind), (
            f"nothing before leads to {module}:{name}"
        )
        behind += source(module)


@each_walk
def test_a_walk_does_not_return_to_a_room_that_it_left(walk: list[tuple[str, str, str]]) -> None:
    """But for rooms on another node."""
    visited: list[str] = []
    for before, module, _ in walk:
        if before in ENTRANCES:
            visited.clear()
        if not visited or visited[-1] != room(module):
            assert room(module) not in visited, f"back in {room(module)}"
            visited.append(room(module))
