"""`swarmllm service`: a node that starts with the machine and comes back when it falls, by systemd.

A user's unit needs no root, and its node may read the models that the user may read; its hardening is what a
user's manager can do without namespaces. The machine's unit runs as a user of its own that owns nothing but
its state folder, and sees the rest of the system read-only. It gets no dynamic user: an operator has to be
able to run `swarmllm key` as the owner of the node's files.

A configuration that cannot be used does not get better by starting again, so that is not tried. A worker
that the kernel kills for memory is the daemon's to replace: systemd's own policy would end the whole node.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import click

from swarmllm.cli.client import EXIT_USAGE, CommandFailed, WrongUsage
from swarmllm.cli.display import print_json
from swarmllm.cli.options import json_option
from swarmllm.config_sources import load_config
from swarmllm.errors import ConfigError, reason_of

UNIT_NAME = "swarmllm.service"
BOOTSTRAP_UNIT_NAME = "swarmllm-bootstrap.service"
SYSTEM_USER = "swarmllm"
SYSTEM_HOME = Path("/var/lib/swarmllm")
"""The state folder; the node's data folder lies in it where a user's lies in the home folder."""

UNIT = """\
[Unit]
Description={description}
Wants=network-online.target
After=network-online.target

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
Restart=on-failure
RestartSec=2
RestartPreventExitStatus={exit_usage}
OOMPolicy=continue
WatchdogSec=60
TimeoutStartSec=300
TimeoutStopSec=45
LimitNOFILE=65536
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
UMask=0077
{more}
[Install]
WantedBy={target}
"""

SYSTEM_HARDENING = f"""\
User={SYSTEM_USER}
StateDirectory=swarmllm
StateDirectoryMode=0700
CapabilityBoundingSet=
PrivateTmp=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHome=read-only
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
ProtectSystem=strict
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
SystemCallErrorNumber=EPERM
SystemCallFilter=@system-service
"""
"""Devices stay visible: a GPU is one."""
WITHOUT_MODELS = "PrivateDevices=yes\n"


def unit_name(*, bootstrap: bool) -> str:
    return BOOTSTRAP_UNIT_NAME if bootstrap else UNIT_NAME


def unit_file(*, system: bool, bootstrap: bool = False) -> Path:
    if system:
        return Path("/etc/systemd/system") / unit_name(bootstrap=bootstrap)
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "systemd" / "user" / unit_name(bootstrap=bootstrap)


def unit_text(config_file: Path | None, *, system: bool, bootstrap: bool = False) -> str:
    """Raises WrongUsage where a path cannot be written into a unit."""
    words = [sys.executable, "-m", "swarmllm", "bootstrap" if bootstrap else "daemon"]
    words += ["--config", str(config_file)] if config_file else []
    hardening = SYSTEM_HARDENING + (WITHOUT_MODELS if bootstrap else "")
    return UNIT.format(
        description="SwarmLLM bootstrap node" if bootstrap else "SwarmLLM node",
        command=" ".join(map(quoted, words)),
        exit_usage=EXIT_USAGE,
        more=hardening if system else "",
        target="multi-user.target" if system else "default.target",
    )


def quoted(word: str) -> str:
    """As systemd.service(5) has it: a percent sign begins a specifier, a dollar sign a variable."""
    if not word.isprintable():
        raise WrongUsage(f"systemd cannot be given {word!r}.")
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def first_private_folder(*paths: Path) -> Path | None:
    """The outermost folder on the way to one of `paths` that only its owner or group may enter."""
    folders = [folder for path in paths for folder in reversed(path.parents)]
    return next((folder for folder in folders if not folder.stat().st_mode & 0o001), None)


SYSTEMCTL_TIMEOUT_S = 120


@click.group(
    short_help="Run the node as a systemd service.",
    epilog="""\b
Examples:
  swarmllm service install
  swarmllm service install --config ~/node.toml
  sudo /opt/swarmllm/.venv/bin/swarmllm service install --system
  swarmllm service install --print
  sudo /opt/swarmllm/.venv/bin/swarmllm service install --system --bootstrap
  swarmllm service uninstall
""",
)
def service() -> None:
    """Run the node as a systemd service, restarted when it fails or hangs: of this user and started at login,
    or with --system of the machine and started with it."""


system_option = click.option(
    "--system/--user",
    "system",
    default=False,
    help=f"A service of the machine, under a user {SYSTEM_USER} of its own (needs root), or of this user.  "
    "[default: --user]",
)

bootstrap_option = click.option(
    "--bootstrap",
    is_flag=True,
    help="The service of a node without models, as `swarmllm bootstrap` runs it. Beside a daemon's it needs "
    "a configuration with another data folder and other ports.",
)


@service.command(short_help="Install and start the service.")
@system_option
@bootstrap_option
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False, resolve_path=True),
    help="TOML file of the node.  [default: .config/swarmllm/config.toml in the home folder of the service's "
    "user, if there is one]",
)
@click.option("--start/--no-start", default=True, help="Start it now and every time.  [default: start]")
@click.option("--print", "only_print", is_flag=True, help="Print the unit instead of installing it.")
@json_option
def install(
    system: bool, bootstrap: bool, config_file: Path | None, start: bool, only_print: bool, as_json: bool
) -> None:
    """Write the unit and start it. Again does no harm: the unit is replaced and the node restarted."""
    try:
        load_config(config_file)
    except ConfigError as error:
        raise WrongUsage(error.message) from None
    name = unit_name(bootstrap=bootstrap)
    file = unit_file(system=system, bootstrap=bootstrap)
    unit = unit_text(config_file, system=system, bootstrap=bootstrap)
    if only_print:
        if as_json:
            print_json({"path": str(file), "unit": unit})
        else:
            click.echo(unit, nl=False)
        return
    if system:
        prepare_system()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(unit, "utf-8")
    except OSError as error:
        raise CommandFailed(f"Cannot write {file}: {error.strerror}") from None
    if start:
        systemctl("daemon-reload", system=system)
        systemctl("enable", name, system=system)
        systemctl("restart", name, system=system)
    if as_json:
        print_json({"path": str(file), "started": start})
        return
    click.echo(f"Wrote {file}")
    if start and system:
        click.echo(f"The node runs. Its log: journalctl -u {file.stem} -f")
        click.echo(
            f"What belongs to the node is done as its user: sudo -u {SYSTEM_USER} -H swarmllm key create NAME"
        )
    elif start:
        click.echo(f"The node runs. Its log: journalctl --user -u {file.stem} -f")
        click.echo("To have it run while you are logged out too: loginctl enable-linger")


@service.command(short_help="Stop the service and remove it.")
@system_option
@bootstrap_option
@json_option
def uninstall(system: bool, bootstrap: bool, as_json: bool) -> None:
    """Stop the node and remove the unit. Models, identity and configuration stay."""
    file = unit_file(system=system, bootstrap=bootstrap)
    if not file.exists():
        raise CommandFailed(f"There is no {file}: nothing to remove.")
    if system:
        require_root()
    systemctl("disable", "--now", file.name, system=system)
    file.unlink()
    systemctl("daemon-reload", system=system)
    if as_json:
        print_json({"path": str(file)})
    else:
        click.echo(f"Removed {file}")


def require_root() -> None:
    if os.geteuid() != 0:
        raise WrongUsage(f"--system needs root: sudo {sys.argv[0]} {' '.join(sys.argv[1:])}")


def prepare_system() -> None:
    """The user of the machine's node. Raises WrongUsage where it could not run this installation."""
    require_root()
    python = Path(sys.executable)
    # The program of a virtual environment is a link to the one that made it, wherever that lives.
    private = first_private_folder(python, python.resolve(), Path(__file__))
    if private is not None:
        raise WrongUsage(
            f"The user {SYSTEM_USER} may not enter {private}, where this installation or its Python is: "
            "install SwarmLLM where everybody may read it, /opt/swarmllm for example, with a Python that "
            "everybody may run, and run this command from there."
        )
    try:
        pwd.getpwnam(SYSTEM_USER)
    except KeyError:
        shell = "/usr/sbin/nologin"
        call("useradd", "--system", "--home-dir", str(SYSTEM_HOME), "--shell", shell, SYSTEM_USER)


def systemctl(*arguments: str, system: bool) -> None:
    if shutil.which("systemctl") is None:
        raise CommandFailed("There is no systemctl here; --print shows the unit.")
    call("systemctl", *([] if system else ["--user"]), *arguments)


def call(program: str, *arguments: str) -> None:
    """Raises CommandFailed with the program's words."""
    command = [program, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SYSTEMCTL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandFailed(f"{' '.join(command)}: {reason_of(error)}") from None
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)} failed: {done.stderr.strip()}")
