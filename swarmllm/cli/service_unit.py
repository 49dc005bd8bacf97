"""The text of the systemd unit, for a node of one user and for a node of the whole machine.

A user's unit needs no root, and its node may read the models that the user may read; its hardening is what a
user's manager can do without namespaces. The machine's unit runs as a user of its own that owns nothing but
its state folder, and sees the rest of the system read-only. It gets no dynamic user: an operator has to be
able to run `swarmllm key` as the owner of the node's files.

A configuration that cannot be used does not get better by starting again, so that is not tried. A worker
that the kernel kills for memory is the daemon's to replace: systemd's own policy would end the whole node.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from swarmllm.cli.errors import EXIT_USAGE, WrongUsage

UNIT_NAME = "swarmllm.service"
SYSTEM_USER = "swarmllm"
SYSTEM_HOME = Path("/var/lib/swarmllm")
"""The state folder; the node's data folder lies in it where a user's lies in the home folder."""

UNIT = """\
[Unit]
Description=SwarmLLM node
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
TimeoutStopSec=30
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


def unit_file(*, system: bool) -> Path:
    if system:
        return Path("/etc/systemd/system") / UNIT_NAME
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "systemd" / "user" / UNIT_NAME


def unit_text(config_file: Path | None, *, system: bool) -> str:
    """Raises WrongUsage where a path cannot be written into a unit."""
    words = [sys.executable, "-m", "swarmllm", "daemon"]
    words += ["--config", str(config_file)] if config_file else []
    return UNIT.format(
        command=" ".join(map(quoted, words)),
        exit_usage=EXIT_USAGE,
        more=SYSTEM_HARDENING if system else "",
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
