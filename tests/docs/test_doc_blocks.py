"""What the documents tell people to type works: every code block in them is run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_forks import command_forks
from daemon_process import wait_for
from deadlines import DEADLINE_S
from doc_blocks import PAGES, SOME_ID, Block, Machine, blocks, real_once
from faulty_server import open_shelf
from other_guide import other_guide

pytestmark = [pytest.mark.slow, pytest.mark.long]

QUICKSTART = next(page for page in PAGES if page.name == "quickstart.md")
OTHER_PAGES = [page for page in PAGES if page.name not in ("quickstart.md", "first-ten-minutes.md")]
"""Those two need several machines; test_first_ten_minutes types the second."""


def all_blocks(pages: list[Path], *languages: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for page in pages for block in blocks(page, *languages)]


class RunningNode:
    """A machine with its daemon."""

    def __init__(self, machine: Machine, command: str) -> None:
        self.machine = machine
        self.process = machine.start(command)
        found = wait_for(self._daemon_info, DEADLINE_S, "daemon.json")
        self.url = str(found["api_url"])
        self.address = str(found["addresses"][0])

    def _daemon_info(self) -> dict[str, Any] | None:
        assert self.process.poll() is None, (self.machine.home / "daemon.log").read_text()
        try:
            return dict(json.loads((self.machine.data_dir / "daemon.json").read_text()))
        except (FileNotFoundError, ValueError):
            return None

    def answers(self, model: str) -> bool:
        answer = httpx.get(f"{self.url}/api/admin/models/{model}/status", trust_env=False, timeout=DEADLINE_S)
        return bool(answer.json().get("complete"))

    def type(self, block: Block) -> subprocess.CompletedProcess[str]:
        if block.language == "python":
            code = block.code.replace("http://127.0.0.1:8800", self.url)
            return self.machine.run(sys.executable, "-c", code)
        return self.machine.run("sh", "-ec", block.code)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of the program `swarmllm`."""
    with command_forks() as stand_in:
        yield real_once(tmp_path_factory.mktemp("typed") / "once", stand_in)


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[[Machine, str], RunningNode]]:
    """Start a node on a machine. All are stopped at the end."""
    with ExitStack() as stack:

        def start_one(machine: Machine, command: str) -> RunningNode:
            node = RunningNode(machine, command)
            stack.callback(node.stop)
            return node

        yield start_one


@pytest.fixture(scope="module")
def node(
    start: Callable[[Machine, str], RunningNode], script: str, tmp_path_factory: pytest.TempPathFactory
) -> RunningNode:
    """One that serves the whole guide."""
    machine = Machine(tmp_path_factory.mktemp("machines") / "only", script)
    node = start(machine, "swarmllm daemon --load guide")
    wait_for(lambda: node.answers("guide"), DEADLINE_S, "the guide to be loaded")
    return node


@pytest.mark.parametrize("block", all_blocks(OTHER_PAGES, "sh", "python"))
def test_what_a_page_tells_to_type_works(block: Block, node: RunningNode) -> None:
    done = node.type(block)
    assert done.returncode == 0, f"{block}:\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("block", all_blocks(PAGES, "toml"))
def test_configurations_in_pages_are_accepted(block: Block, script: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(block.code.replace("12D3KooW...", SOME_ID))
    machine = Machine(tmp_path / "machine", script)
    done = machine.run("swarmllm", "config", "check", str(tmp_path / "config.toml"))
    assert done.returncode == 0, f"{block}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("block", all_blocks(PAGES, "json"))
def test_json_in_pages_is_json(block: Block) -> None:
    """A member of an object is shown without the object around it."""
    code = block.code.strip()
    json.loads(code if code.startswith("{") else "{" + code + "}")


def test_three_machines_follow_the_quickstart(
    start: Callable[[Machine, str], RunningNode], script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with open_shelf() as hub:
        hub.files["/ORG/REPO/resolve/main/FILE.gguf"] = other_guide("H")
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        _follow_the_quickstart(start, tmp_path, script)
        assert hub.n_bytes < 2 * len(other_guide("H")), "each machine has fetched more than its part"


def _follow_the_quickstart(start: Callable[[Machine, str], RunningNode], folder: Path, script: str) -> None:
    machines = {name: Machine(folder / name, script) for name in ("first", "second", "third")}
    _put_model(machines["first"].home / "models" / "qwen.gguf")
    nodes: dict[str, RunningNode] = {}
    asked: list[str] = []
    invitation = ""
    for block in blocks(QUICKSTART, "sh", "python"):
        name = block.machine or "second"
        if block.commands[0].startswith("swarmllm daemon"):
            (command,) = block.commands
            nodes[name] = start(machines[name], command)
            continue
        typed = replace(block, code=block.code.replace("INVITATION", invitation))
        done = wait_for(partial(_worked, machines[name], nodes.get(name), typed), DEADLINE_S, str(block))
        if block.commands == ["swarmllm invite"]:
            invitation = done.stdout.strip()
        asked.append(done.stdout)
        if block.commands[0].startswith("swarmllm share"):
            # Shown once: that every layer is held, though each machine has room for a part only.
            assert "complete. " in done.stdout
    assert set(nodes) == {"first", "second", "third"}
    shown = "\n".join(asked)
    for expected in ("kitchen", "attic", "garage", "pipeline", "tokens/s", "parted: fetched"):
        assert expected in shown
    assert (machines["second"].home / "answer.txt").read_text().strip()


def _worked(
    machine: Machine, node: RunningNode | None, block: Block
) -> subprocess.CompletedProcess[str] | None:
    done = node.type(block) if node is not None else machine.run("sh", "-ec", block.code)
    print(block, done.stdout, done.stderr)
    return done if done.returncode == 0 else None


def _put_model(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(other_guide("Q"))
