"""`swarmllm doctor`: finds problems of this node, and names the remedies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from swarmllm.cli.client import EXIT_FAILED, Client, CommandFailed, DaemonUnreachable
from swarmllm.cli.daemon_checks import check_daemon
from swarmllm.cli.display import make_console, print_json, safe
from swarmllm.cli.machine_checks import (
    Finding,
    check_bootstrap,
    check_build,
    check_clock,
    check_copies,
    check_disk,
    check_memory,
    check_open_files,
    check_ports,
    clock_is_synchronised,
    open_files_limit,
)
from swarmllm.cli.options import api_option, config_option, json_option
from swarmllm.config import Config
from swarmllm.config_sources import load_config
from swarmllm.errors import ConfigError
from swarmllm.memory_info import memory_bytes
from swarmllm.operating_system import cpu_features, gpu_vendor

if TYPE_CHECKING:
    from swarmllm.models.segment_copies import CopiesView

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
    yield from check_ports(config, is_running=is_running)
    yield from check_clock(clock_is_synchronised())
    yield from check_memory(*memory_bytes())
    yield from check_open_files(open_files_limit())
    yield from check_disk(config.data_dir)
    yield from check_copies(segment_copies(config))
    yield from check_build(build_info(), cpu_features(), config.resources.n_gpu_layers, gpu_vendor())
    if stats is not None:
        yield from check_daemon(stats)
    if stats is None or not stats["peers_connected"]:
        yield from check_bootstrap(bootstrap_of(config))


def build_info() -> dict[str, Any] | None:
    # Late, as below.
    from swarmllm.workerpool import gpus

    return gpus.build_info()


def bootstrap_of(config: Config) -> tuple[str, ...]:
    # Late, as below.
    from swarmllm.daemon_settings import bootstrap_addresses

    try:
        return bootstrap_addresses(config)
    except ConfigError:
        return config.network.bootstrap  # check_configuration has said it


def segment_copies(config: Config) -> CopiesView:
    # Late: it takes longer to import than most commands take.
    from swarmllm.models.segment_copies import SEGMENTS, SegmentCopies

    return SegmentCopies(config.data_dir / SEGMENTS, config.store.segment_cache_gib).view()


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
