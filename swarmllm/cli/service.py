"""`swarmllm service`: a node that starts with the machine and comes back when it falls, by systemd.

A unit of the user, not of the system: it needs no root, and the node may read the models that its user may
read. Hardening is what a user's manager can do without namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click

from swarmllm.cli.display import print_json
from swarmllm.cli.errors import CommandFailed, WrongUsage
from swarmllm.cli.options import json_option
from swarmllm.config import load_config
from swarmllm.errors import ConfigError

UNIT_NAME = "swarmllm.service"
SYSTEMCTL_TIMEOUT_S = 120

UNIT = """\
[Unit]
Description=SwarmLLM node
Wants=network-online.target
After=network-online.target

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
Restart=on-failure
RestartSec=2
WatchdogSec=60
TimeoutStartSec=300
TimeoutStopSec=30
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
UMask=0077

[Install]
WantedBy=default.target
"""


@click.group(
    short_help="Run the node as a systemd service.",
    epilog="""\b
Examples:
  swarmllm service install
  swarmllm service install --config ~/node.toml
  swarmllm service install --print
  swarmllm service uninstall
""",
)
def service() -> None:
    """Run the node as a systemd service of this user: started at login, restarted when it fails or hangs."""


@service.command(short_help="Install and start the service.")
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False, resolve_path=True),
    help="TOML file of the node.  [default: ~/.config/swarmllm/config.toml, if there is one]",
)
@click.option("--start/--no-start", default=True, help="Start it now and at every login.  [default: start]")
@click.option("--print", "only_print", is_flag=True, help="Print the unit instead of installing it.")
@json_option
def install(config_file: Path | None, start: bool, only_print: bool, as_json: bool) -> None:
    """Write the unit and start it. Again does no harm: the unit is replaced and the node restarted."""
    try:
        load_config(config_file)
    except ConfigError as error:
        raise WrongUsage(error.message) from None
    file, unit = unit_file(), unit_text(config_file)
    if only_print:
        if as_json:
            print_json({"path": str(file), "unit": unit})
        else:
            click.echo(unit, nl=False)
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(unit, "utf-8")
    except OSError as error:
        raise CommandFailed(f"Cannot write {file}: {error.strerror}") from None
    if start:
        systemctl("daemon-reload")
        systemctl("enable", UNIT_NAME)
        systemctl("restart", UNIT_NAME)
    if as_json:
        print_json({"path": str(file), "started": start})
        return
    click.echo(f"Wrote {file}")
    if start:
        click.echo("The node runs. Its log: journalctl --user -u swarmllm -f")
        click.echo("To have it run while you are logged out too: loginctl enable-linger")


@service.command(short_help="Stop the service and remove it.")
@json_option
def uninstall(as_json: bool) -> None:
    """Stop the node and remove the unit. Models, identity and configuration stay."""
    file = unit_file()
    if not file.exists():
        raise CommandFailed(f"There is no {file}: nothing to remove.")
    systemctl("disable", "--now", UNIT_NAME)
    file.unlink()
    systemctl("daemon-reload")
    if as_json:
        print_json({"path": str(file)})
    else:
        click.echo(f"Removed {file}")


def unit_file() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "systemd" / "user" / UNIT_NAME


def unit_text(config_file: Path | None) -> str:
    words = [sys.executable, "-m", "swarmllm", "daemon"]
    words += ["--config", str(config_file)] if config_file else []
    return UNIT.format(command=" ".join(map(quoted, words)))


def quoted(word: str) -> str:
    """As systemd.service(5) has it: a percent sign begins a specifier, a dollar sign a variable."""
    if not word.isprintable():
        raise WrongUsage(f"systemd cannot be given {word!r}.")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def systemctl(*arguments: str) -> None:
    """Raises CommandFailed with its words."""
    program = shutil.which("systemctl")
    if program is None:
        raise CommandFailed("There is no systemctl here; --print shows the unit.")
    try:
        done = subprocess.run(
            [program, "--user", *arguments], capture_output=True, text=True, timeout=SYSTEMCTL_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandFailed(f"systemctl --user {' '.join(arguments)}: {error}") from None
    if done.returncode:
        raise CommandFailed(f"systemctl --user {' '.join(arguments)} failed: {done.stderr.strip()}")
