"""`swarmllm logs`: the lines of the node's log, from the journal or from its file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import click

from swarmllm.cli.client import CommandFailed, WrongUsage
from swarmllm.cli.options import config_option, json_option
from swarmllm.cli.service import UNIT_NAME, unit_file
from swarmllm.config_sources import load_config
from swarmllm.errors import ConfigError

LOOK_S = 0.25
"""How often a followed file is looked at."""


@click.command(
    short_help="Show what the node has written to its log.",
    epilog="""\b
Examples:
  swarmllm logs --lines 200
  swarmllm logs --follow | grep req_
""",
)
@click.option("--follow", "-f", is_flag=True, help="Go on with each new line until Ctrl-C.")
@click.option(
    "--lines",
    "-n",
    "n_lines",
    type=click.IntRange(0, 1_000_000),
    default=100,
    show_default=True,
    help="How many of the latest lines to begin with.",
)
@config_option
@json_option
def logs(follow: bool, n_lines: int, config_file: Path | None, as_json: bool) -> None:
    """Show the latest lines of the node's log, whether it runs or not: from its file (log.file), or from the
    journal where only the systemd service has written one.

    With --json each line is an object: as it was written where log.format is json, else {"line": TEXT}; from
    the journal with the journal's fields.
    """
    try:
        config = load_config(config_file)
    except ConfigError as error:
        raise WrongUsage(error.message) from None
    file = config.log_file
    unit = next((system for system in (True, False) if unit_file(system=system).exists()), None)
    if file is not None and file.exists():
        try:
            for line in lines_of(file, n_lines, follow=follow):
                click.echo(_as_json(line) if as_json else line, nl=False)
        except KeyboardInterrupt:
            return
        except OSError as error:
            raise CommandFailed(f"Cannot read {file}: {error.strerror}") from None
    elif unit is not None:
        show_journal(n_lines, follow=follow, system=unit, as_json=as_json)
    else:
        where = f"no {file}" if file is not None else "no file (log.file is off)"
        raise CommandFailed(f"There is {where}, and no systemd service of SwarmLLM here.")


def lines_of(file: Path, n_lines: int, *, follow: bool) -> Iterator[str]:
    """The last `n_lines`; with `follow` for ever what comes after them, over rotations of the file. Raises
    OSError."""
    stream = file.open(encoding="utf-8", errors="replace")
    try:
        yield from deque(stream, maxlen=n_lines)
        while follow:
            if line := stream.readline():
                yield line
                continue
            if _is_replaced(file, stream.fileno()):
                rest = stream.readlines()
                stream.close()
                stream = file.open(encoding="utf-8", errors="replace")
                yield from rest
                continue
            time.sleep(LOOK_S)
    finally:
        stream.close()


def _is_replaced(file: Path, descriptor: int) -> bool:
    try:
        there = file.stat()
    except FileNotFoundError:
        return False
    return not os.path.samestat(there, os.fstat(descriptor))


def _as_json(line: str) -> str:
    return line if line.startswith("{") else json.dumps({"line": line.rstrip("\n")}) + "\n"


def show_journal(n_lines: int, *, follow: bool, system: bool, as_json: bool) -> None:
    if shutil.which("journalctl") is None:
        raise CommandFailed("The service writes to the journal, but there is no journalctl here.")
    command = ["journalctl", *([] if system else ["--user"]), "--unit", UNIT_NAME, "--lines", str(n_lines)]
    command += [
        "--output",
        "json" if as_json else "short-iso",
        "--no-pager",
        *(["--follow"] if follow else []),
    ]
    try:
        status = subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        return
    if status:
        raise CommandFailed(f"{' '.join(command)} ended with {status}.")
