"""`swarmllm doctor`: what keeps this node from working well, and what to do about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from swarmllm.cli import checkup
from swarmllm.cli.checkup import Finding
from swarmllm.cli.client import Client
from swarmllm.cli.display import make_console, print_json, safe
from swarmllm.cli.errors import EXIT_FAILED, CommandFailed, DaemonUnreachable
from swarmllm.cli.options import api_option, config_option, json_option
from swarmllm.config import Config
from swarmllm.config_sources import load_config
from swarmllm.errors import ConfigError
from swarmllm.memory_info import memory_bytes

MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "problem": ("✗", "red")}


@click.command(
    short_help="Look for what keeps this node from working well.",
    epilog="""\b
Exit codes:
  0 no problem (warnings are none)   1 a problem was found
""",
)
@config_option
@json_option
@api_option
def doctor(config_file: Path | None, as_json: bool, api_url: str) -> None:
    """Look at configuration, ports, clock, memory, disk, libllama and the way to other nodes; say what is
    wrong and what to do. Works with and without a running daemon, and sees more with one."""
    findings = list(examine(config_file, api_url))
    n_problems = sum(finding.level == "problem" for finding in findings)
    if as_json:
        print_json({"ok": not n_problems, "findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        console = make_console()
        for finding in findings:
            mark, style = MARKS[finding.level]
            line = Text.assemble((mark, style), f" {finding.check:<15}", safe(finding.message))
            console.print(line, soft_wrap=True)
            if finding.remedy:
                console.print(Text(f"  {'':<15}→ {finding.remedy}"), soft_wrap=True)
    if n_problems:
        raise SystemExit(EXIT_FAILED)


def examine(config_file: Path | None, api_url: str) -> Iterator[Finding]:
    try:
        config = load_config(config_file)
    except ConfigError as error:
        yield Finding("configuration", "problem", error.message, "swarmllm config check shows it too")
        config = Config()
    else:
        yield Finding("configuration", "ok", "the configuration can be used")
    stats, finding = ask_daemon(api_url)
    is_running = finding is None or finding.level == "problem"
    if finding is not None:
        yield finding
    yield from checkup.check_ports(config, is_running=is_running)
    yield from checkup.check_clock(checkup.clock_is_synchronised())
    yield from checkup.check_memory(*memory_bytes())
    yield from checkup.check_open_files(checkup.open_files_limit())
    yield from checkup.check_disk(config.data_dir)
    yield from checkup.check_build(
        checkup.build_info(), checkup.cpu_features(), config.resources.n_gpu_layers
    )
    if stats is not None:
        yield from checkup.check_daemon(stats)
    if stats is None or not stats["peers_connected"]:
        yield from checkup.check_bootstrap(config.network.bootstrap)


def ask_daemon(api_url: str) -> tuple[dict[str, Any] | None, Finding | None]:
    """What the daemon says; a finding where there is none, or where it does not say."""
    try:
        with Client(api_url) as client:
            return client.get("/api/admin/stats"), None
    except DaemonUnreachable:
        return None, Finding("daemon", "ok", f"no daemon runs at {api_url}")
    except CommandFailed as error:
        return None, Finding(
            "daemon",
            "problem",
            f"the daemon at {api_url} does not tell about itself: {error.message}",
            "a key that may administer it goes into SWARMLLM_KEY; its log says the rest",
        )
