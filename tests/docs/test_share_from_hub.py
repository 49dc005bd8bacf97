"""A new user shares a published model in four parts over three machines, and asks it.

The machines are network namespaces, and the hub is in that of the first; the third reaches one of its own.
What is typed is what the quickstart says, with the names of this model; the nodes only look more often than
by default what they should hold.
"""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Final

import pytest
from command_forks import command_forks
from daemon_process import wait_for
from deadlines import DEADLINE_S
from doc_blocks import PAGES, blocks
from faulty_server import FaultyServer, open_shelf
from namespace_machines import NamespaceMachine, namespace_machines
from other_guide import other_guide
from split_gguf import split_gguf

QUICKSTART: Final = next(page for page in PAGES if page.name == "quickstart.md")
NAMES: Final = ("first", "second", "third")
NICKNAMES: Final = ("kitchen", "attic", "garage")
MODEL: Final = other_guide("P")

pytestmark = [pytest.mark.slow, pytest.mark.long]


def publish(hub: FaultyServer, folder: Path) -> str:
    """The name of the first of four parts, on the hub in ORG/REPO."""
    (folder / "whole.bin").write_bytes(MODEL)
    parts = split_gguf(folder / "whole.bin", folder, [0, 30, 71], stem="FILE-Q8_0")
    hub.files["/api/models/ORG/REPO"] = json.dumps(
        {"siblings": [{"rfilename": part.name} for part in parts]}
    ).encode()
    for part in parts:
        hub.files[f"/ORG/REPO/resolve/main/{part.name}"] = part.read_bytes()
    return parts[0].name


def mirror(hub: FaultyServer, machine: NamespaceMachine, stack: ExitStack) -> FaultyServer:
    """The same hub, as another machine reaches it."""
    with machine.inside():
        again = stack.enter_context(open_shelf())
    again.files = hub.files
    machine.environment["HF_ENDPOINT"] = again.url
    return again


def typed(machine: NamespaceMachine, command: str) -> subprocess.CompletedProcess[str] | None:
    done = machine.run("sh", "-ec", command)
    print(machine.namespace, command, done.stdout, done.stderr)
    return done if done.returncode == 0 else None


def test_one_share_and_one_question_give_an_answer_through_three_machines(tmp_path: Path) -> None:
    with ExitStack() as stack:
        script = f'exec {stack.enter_context(command_forks())} "$@"\n'
        machines = stack.enter_context(namespace_machines(tmp_path, NAMES, script))
        with machines["first"].inside():
            hub = stack.enter_context(open_shelf())
        (tmp_path / "hub").mkdir()
        part = publish(hub, tmp_path / "hub")
        machines["first"].environment["HF_ENDPOINT"] = hub.url
        reached = mirror(hub, machines["third"], stack)
        for machine in machines.values():
            settings = machine.home / ".config" / "swarmllm" / "config.toml"
            settings.parent.mkdir(parents=True)
            settings.write_text("[auto_manage]\ninterval_s = 0.5\n")
        invitation = ""
        before_share = takewhile(
            lambda block: not block.commands[0].startswith("swarmllm share"), blocks(QUICKSTART, "sh")
        )
        for block in before_share:
            machine = machines[block.machine]
            if block.commands[0].startswith("swarmllm daemon"):
                machine.start_daemon(block.commands[0], stack)
                continue
            code = replace(block, code=block.code.replace("INVITATION", invitation)).code
            done = wait_for(lambda m=machine, c=code: typed(m, c), DEADLINE_S, str(block))
            if block.commands == ["swarmllm invite"]:
                invitation = done.stdout.strip()

        # At once: records that say who has room are still on their way.
        shared = typed(machines["first"], f"swarmllm share hf:ORG/REPO:{part} --name big --yes")
        assert shared is not None
        assert "big: complete." in shared.stdout
        assert all(nickname in shared.stdout for nickname in NICKNAMES)
        assert hub.n_bytes < 1.6 * len(MODEL), "the first has fetched it more than once"
        assert reached.asked, "the third has not asked the hub that it reaches"
        assert reached.n_bytes < len(MODEL), "the third has fetched more than its layers"

        ask = 'swarmllm chat --model big --max-tokens 8 "What is a pipeline?" --route'
        answer = wait_for(lambda: typed(machines["second"], ask), DEADLINE_S, "an answer")
        route = answer.stdout + answer.stderr
        assert all(nickname in route for nickname in NICKNAMES), route
        assert "3 nodes" in route
