"""A newcomer's first ten minutes, command by command, on two machines: network namespaces with a cable.

Nothing is set that the page does not set: ports, discovery and folders are the defaults.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from command_forks import command_forks
from daemon_process import wait_for
from deadlines import DEADLINE_S
from doc_blocks import PAGES, Block, Machine, blocks, real_once
from namespace_machines import NamespaceMachine, namespace_machines

PAGE: Final = next(page for page in PAGES if page.name == "first-ten-minutes.md")
STOPS_SECOND: Final = "# first machine, after the second has stopped"
SHOWN: Final = re.compile(r"^```sh\n(?P<code>.*?)^```\n\n```\n(?P<shown>.*?)^```$", re.DOTALL | re.MULTILINE)
NAMES: Final = ("first", "second")

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, NamespaceMachine]]:
    with command_forks() as stand_in:
        script = real_once(tmp_path / "typed", stand_in)
        with namespace_machines(tmp_path, NAMES, script) as machines:
            yield machines


def masked(line: str) -> str:
    """What is the same on every machine and in every run."""
    line = re.sub(r"…\w{8}\b", "…ID", line)
    line = re.sub(r"\b[0-9a-f]{12,}\b", "HEX", line)
    line = re.sub(r"\b\d+\.\d+(\.\d+)?", "N", line)
    return " ".join(line.split())


def missing(shown: str, printed: str) -> list[str]:
    """Lines of the page that were not printed; one that ends in … is the beginning of one."""
    lines = {masked(line) for line in printed.splitlines()}
    return [
        line
        for line in map(masked, shown.splitlines())
        if line not in lines
        and not (line.endswith("…") and any(each.startswith(line[:-1]) for each in lines))
    ]


def typed(machine: Machine, block: Block, shown: str) -> str | None:
    """What it prints; None where it fails or does not print yet what the page shows."""
    done = machine.run("sh", "-ec", block.code)
    print(block, done.stdout, done.stderr, missing(shown, done.stdout))
    return done.stdout if done.returncode == 0 and not missing(shown, done.stdout) else None


def shows(machine: NamespaceMachine, said: str) -> bool:
    """Whether its daemon has printed what the page shows."""
    return not missing(said, machine.printed())


def test_a_newcomer_sees_what_the_page_shows(machines: dict[str, NamespaceMachine]) -> None:
    shown = {match["code"]: match["shown"] for match in SHOWN.finditer(PAGE.read_text("utf-8"))}
    daemons: dict[str, subprocess.Popen[bytes]] = {}
    invitation = ""
    n_typed = 0
    with ExitStack() as stack:
        for block in blocks(PAGE, "sh"):
            name = block.code.split()[1]
            machine = machines[name]
            if block.code.startswith(STOPS_SECOND):
                daemons["second"].send_signal(signal.SIGINT)
                assert daemons["second"].wait(DEADLINE_S) == 0
            if block.commands[0].startswith("swarmllm daemon"):
                (command,) = block.commands
                daemons[name] = machine.start_daemon(command, stack)
                wait_for(partial(shows, machine, shown.get(block.code, "")), DEADLINE_S, str(block))
                continue
            said = shown.get(block.code, "")
            filled = replace(block, code=block.code.replace("INVITATION", invitation))
            printed = wait_for(partial(typed, machine, filled, said), DEADLINE_S, str(block))
            n_typed += 1
            if "swarmllm invite" in block.commands:
                (invitation,) = re.findall(r"swarmllm-join-\S+", printed)
    assert set(daemons) == set(NAMES)
    assert n_typed == len(list(blocks(PAGE, "sh"))) - len(NAMES)
    assert len(shown) >= 9


def test_a_line_that_was_not_printed_is_found() -> None:
    printed = "kitchen  …npbfYAyD  0:6   5.95\nswarm 0123456789abcdef\nswarmllm-join-abc\n"
    assert missing("kitchen …ABCDEFGH 0:6 1.25\nswarm ffffffffffffffff\nswarmllm-join-…\n", printed) == []
    assert missing("kitchen …ABCDEFGH 6:12 1.25\nanother\n", printed) == ["kitchen …ID 6:12 N", "another"]
