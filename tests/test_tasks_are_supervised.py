"""No task of the daemon is started past `swarmllm.supervision`, except inside a function that waits for it.

A task in a nursery that the same function opened ends with that function: what it raises goes to the caller,
which is itself a supervised or contained task. Every such function is named here, because a nursery that is
open for as long as the daemon runs looks just like it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmllm.supervision import SCOPES, TASKS

PACKAGE = Path(__file__).resolve().parent.parent / "swarmllm"
SUPERVISED = ("supervise", "supervise_started", "spawn", "detach")

WAITED_FOR = {
    # Several peers or addresses are asked at once, and the answers awaited.
    "downloads/shared_digests.py": {"_ask_around", "run"},
    "pipeline/origin/assignment.py": {"assign", "assign_with_prefixes"},
    "pipeline/repair/probing.py": {"probe"},
    "pipeline/repair/standbys.py": {"_race"},
    "pipeline/route/warming.py": {"_warm_one"},
    "pipeline/vision/happy_eyeballs.py": {"_first"},
    "pipeline/stage/admission.py": {"_reach_neighbours", "next_end"},
    "swarm/discovery/dht/dht.py": {"run", "_search", "_tell_all"},
    "swarm/discovery/address_race.py": {"first_to_answer"},
    "swarm/discovery/reachability.py": {"answer"},
    "swarm/records/details_exchange.py": {"look"},
    "swarm/data/holes.py": {"_dial_all"},
    "swarm/discovery/relay/hole_punching.py": {"_dial_all"},
    "swarm/discovery/wide_area.py": {"_meet_all"},
    # Both directions or all parts of one connection, session, worker, answer, transfer.
    "api/http/server.py": {"serve", "_accept"},
    "api/openai/remote_pictures.py": {"fetch_all"},
    "api/output/choices.py": {"_whole"},
    "pipeline/stage/session.py": {"_clean_up"},
    "swarm/data/connection.py": {"run"},
    "swarm/data/data_plane.py": {"send_goodbye"},
    "swarm/discovery/relay/service.py": {"run"},
    "pipeline/prefix/serving.py": {"_both"},
    "pipeline/prefix/transfer.py": {"ask_sources", "_slices"},
    "transfer/fetch.py": {"run_lanes"},
    "workerpool/cut_check.py": {"run"},
    "workerpool/process.py": {"_accept"},
    "workerpool/worker.py": {"run"},
    # Parts of one long-lived task, which restarts as a whole (`run` of the shared digests too).
    "node/placing/auto_shard.py": {"_begin_looks"},
    "swarm/libp2p/gossip.py": {"run_gossip"},
}
"""File -> functions that start tasks which they wait for."""
NOT_THE_DAEMON = ("supervision/", "swarm/in_memory/", "cli/")


def starts(source: str) -> Iterator[tuple[str, int]]:
    """(function, line) of every task that is started past the supervision."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
                receiver = ast.unparse(child.func.value)
                is_start = child.func.attr == "start_soon" and receiver != "self"
                is_start |= child.func.attr == "start" and "nursery" in receiver
                if is_start or child.func.attr == "spawn_system_task":
                    yield function, child.lineno
            yield from walk(child, function)

    class_bodies = ast.parse(source)
    for node in ast.walk(class_bodies):
        if isinstance(node, ast.Module | ast.ClassDef):
            for child in node.body:
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from walk(child, child.name)


def names(source: str) -> Iterator[tuple[str, str, int]]:
    """(function of the supervision, the name it is given, line)"""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SUPERVISED:
            given = node.args[1] if len(node.args) > 1 else None
            is_literal = isinstance(given, ast.Constant) and isinstance(given.value, str)
            yield node.func.id, given.value if is_literal else "", node.lineno


def sources() -> Iterator[tuple[str, str]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        path = str(file.relative_to(PACKAGE))
        if not path.startswith(NOT_THE_DAEMON):
            yield path, file.read_text(encoding="utf-8")


def test_no_task_is_started_past_the_supervision() -> None:
    found = [
        f"swarmllm/{path}:{line}: {function} starts a task: use supervise or spawn, or list it above"
        for path, source in sources()
        for function, line in starts(source)
        if function not in WAITED_FOR.get(path, ())
    ]
    assert not found, "\n" + "\n".join(found)


def test_every_exception_is_still_one() -> None:
    started = {(path, function) for path, source in sources() for function, _ in starts(source)}
    listed = {(path, function) for path, functions in WAITED_FOR.items() for function in functions}
    assert not listed - started


def test_every_name_is_in_its_table_and_every_task_is_started_once() -> None:
    tasks, scopes = {task.name for task in TASKS}, {scope.name for scope in SCOPES}
    started: list[str] = []
    for path, source in sources():
        for function, name, line in names(source):
            is_task = function.startswith("supervise")
            assert name in (tasks if is_task else scopes), f"{path}:{line}: {name!r} is in no table"
            started += [name] if is_task else []
    assert sorted(started) == sorted(tasks)


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def f(self):\n        self._nursery.start_soon(g)",
        "async def f():\n    async with trio.open_nursery() as nursery:\n        await nursery.start(g)",
        "def f():\n    def inner():\n        nursery.start_soon(g)",
        "def f():\n    trio.lowlevel.spawn_system_task(g)",
    ],
)
def test_the_reader_sees_every_kind_of_start(source: str) -> None:
    assert [function for function, _ in starts(source)] == ["f"]
