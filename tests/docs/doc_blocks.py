"""The code blocks of the documents, as something that can be run.

What a block's fence says decides: `sh` and `python` are run, `toml` must be a configuration the daemon takes,
`json` must be JSON. A fence without a language is there to be looked at: output, other machines, root.
A first line like `# second machine` says on which machine a block is typed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MACHINE = re.compile(r"# (\w+) machine$")
SOME_ADDRESS = re.compile(r"/ip4/192\.0\.2\.7/tcp/8810/p2p/12D3KooW\.\.\.")
SOME_ID = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
COMMAND_TIMEOUT_S = 120


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def machine(self) -> str:
        """The word before "machine"; empty where the block does not say."""
        said = MACHINE.match(self.code.partition("\n")[0])
        return said[1] if said else ""

    @property
    def commands(self) -> list[str]:
        return [line for line in self.code.splitlines() if line.strip() and not line.startswith("#")]


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    text = page.read_text("utf-8")
    for match in BLOCK.finditer(text):
        if match[1] in languages:
            yield Block(page, text[: match.start()].count("\n") + 1, match[1], match[2])


REAL: Final = f'exec "{sys.executable}" -m swarmllm "$@"\n'
"""The script of `swarmllm`."""


def real_once(folder: Path, stand_in: str) -> str:
    """A script of `swarmllm`: each command is a real process the first time that it is typed on one of the
    machines that have this folder, and later `stand_in`, of `command_forks`."""
    folder.mkdir()
    return (
        'case "$1" in models|network) name="$1 $2";; *) name="$1";; esac\n'
        f'if mkdir "{folder}/$name" 2> /dev/null; then {REAL.strip()}; fi\n'
        f'exec {stand_in} "$@"\n'
    )


class Machine:
    """A home folder and an environment: what makes a machine, as far as a node can tell."""

    def __init__(self, home: Path, script: str = REAL) -> None:
        """`script`: of the program `swarmllm`, for a shell."""
        self.home = home
        programs = home / "bin"
        programs.mkdir(parents=True)
        program = programs / "swarmllm"
        program.write_text(f"#!/bin/sh\n{script}")
        program.chmod(0o755)
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("SWARMLLM_", "XDG_"))
        }
        self.environment = kept | {
            "HOME": str(home),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "SWARMLLM_NETWORK_LISTEN_HOST": "127.0.0.1",
            "SWARMLLM_NETWORK_LIBP2P_PORT": "0",
            "SWARMLLM_NETWORK_DATA_PORT": "0",
            "SWARMLLM_NETWORK_MDNS": "false",
            "SWARMLLM_API_PORT": "0",
            "SWARMLLM_INFERENCE_N_THREADS": "1",
            # By default a node looks every five seconds what it should hold, and loads it at the third look.
            "SWARMLLM_AUTO_MANAGE_INTERVAL_S": "0.5",
        }
        self.enter: tuple[str, ...] = ()
        """Words before every command."""

    @property
    def data_dir(self) -> Path:
        return self.home / ".local" / "share" / "swarmllm"

    def start(self, command: str) -> subprocess.Popen[bytes]:
        with (self.home / "daemon.log").open("wb") as log:
            return subprocess.Popen(
                [*self.enter, "sh", "-c", f"exec {command}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                cwd=self.home,
            )

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.enter, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.home,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
