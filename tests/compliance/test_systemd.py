"""`swarmllm service` under a real systemd, the init of a small machine of its own (systemd_box.sh)."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deadlines import DEADLINE_S

BOX = Path(__file__).with_name("systemd_box.sh")
SYSTEMD = Path("/lib/systemd/systemd")
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
DROP_INS = Path("/etc/systemd/system/swarmllm.service.d")
CONFIG = Path("/var/lib/swarmllm/.config/swarmllm/config.toml")

pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0 or not SYSTEMD.exists() or shutil.which("unshare") is None,
        reason="needs root, systemd and unshare",
    ),
    pytest.mark.skipif(
        Path(sys.prefix).is_relative_to("/tmp"),
        reason="the machine has a /tmp of its own, in which this checkout is not",
    ),
]


class Machine:
    """A machine with systemd, of which only the first process is known here."""

    def __init__(self, init_pid: int) -> None:
        self._enter = [
            "nsenter",
            "-t",
            str(init_pid),
            "--all",
            "--root",
            "--wd",
            "--",
            "env",
            "-i",
            f"PATH={PATH}",
        ]

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self._enter, *command], capture_output=True, text=True, timeout=DEADLINE_S)

    def said(self, *command: str | Path) -> str:
        done = self.run(*command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def root(self, *command: str) -> str:
        return self.said(*swarmllm(Path("/root")), *command)

    def user(self, *command: str) -> str:
        """`swarmllm` by the user of the service."""
        home = Path("/var/lib/swarmllm")
        return self.said("runuser", "-u", "swarmllm", "--", *swarmllm(home), *command)

    def show(self, what: str) -> str:
        return self.said("systemctl", "show", "swarmllm", "--property", what, "--value")

    def write(self, path: Path, text: str) -> None:
        self.said("install", "-d", path.parent)
        self.said("sh", "-c", f"printf %s {shlex.quote(text)} > {path}")

    def running_after(self, process: str) -> str:
        """Main process of the service, once it serves and is another one than `process`."""

        def is_new() -> bool:
            return self.show("MainPID") not in ("0", process) and self.show("ActiveState") == "active"

        eventually(is_new)
        return self.show("MainPID")


def swarmllm(home: Path) -> list[str]:
    found = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []
    return ["env", f"HOME={home}", *found, sys.executable, "-m", "swarmllm"]


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, holds
        time.sleep(0.05)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    box = tmp_path / f"swarmllm-box-{os.getpid()}"
    box.mkdir()
    process = subprocess.Popen([BOX, box], stdin=subprocess.DEVNULL)
    try:
        eventually(lambda: init_of(process) is not None)
        init = init_of(process)
        assert init is not None
        there = Machine(init)
        eventually(lambda: there.run("systemctl", "is-active", "--quiet", "basic.target").returncode == 0)
        if "PYTHONPATH" in os.environ:
            there.write(
                DROP_INS / "path.conf", f"[Service]\nEnvironment=PYTHONPATH={os.environ['PYTHONPATH']}\n"
            )
        yield there
    finally:
        process.kill()
        process.wait()
        mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
        groups = next(Path(mount[1]) for mount in mounts if mount[2] == "cgroup2") / box.name
        eventually(lambda: remove_groups(groups))


def init_of(box: subprocess.Popen[bytes]) -> int | None:
    """None until the script has become systemd."""
    assert box.poll() is None, "the box did not start"
    children = Path(f"/proc/{box.pid}/task/{box.pid}/children").read_text().split()
    is_init = (pid for pid in children if Path(f"/proc/{pid}/exe").resolve().name == "systemd")
    return next(map(int, is_init), None)


def remove_groups(groups: Path) -> bool:
    """False while one of its processes is still ending."""
    try:
        for folder in sorted((p for p in groups.rglob("*") if p.is_dir()), reverse=True):
            folder.rmdir()
        groups.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def test_a_node_of_the_machine_serves_and_comes_back_when_it_falls_or_hangs(machine: Machine) -> None:
    machine.root("service", "install", "--system")
    first = machine.show("MainPID")
    assert (machine.show("ActiveState"), machine.show("StatusText")) == ("active", "http://127.0.0.1:8800")
    facts = dict(line.split(":\t", 1) for line in machine.said("cat", f"/proc/{first}/status").splitlines())
    assert (facts["CapBnd"].strip("0"), facts["NoNewPrivs"], facts["Seccomp"]) == ("", "1", "2")
    assert facts["Uid"].split()[0] == machine.said("id", "-u", "swarmllm")

    machine.user("models", "load", "guide")
    assert "layers" in machine.user("run", "What is a pipeline?")
    processes = Path("/sys/fs/cgroup/system.slice/swarmllm.service/cgroup.procs")
    worker = next(pid for pid in machine.said("cat", str(processes)).split() if pid != first)

    said = machine.said("journalctl", "--unit=swarmllm", "--priority=info", "--output=cat").splitlines()
    assert any(line.startswith("swarmllm.daemon: node") for line in said), said
    assert not machine.said("journalctl", "--quiet", f"_PID={first}", "--priority=err", "--output=cat")

    machine.said("kill", "-KILL", first)
    second = machine.running_after(first)
    assert machine.run("kill", "-0", worker).returncode != 0, "the worker ended with its daemon"

    machine.write(DROP_INS / "watchdog.conf", "[Service]\nWatchdogSec=2\n")
    machine.write(CONFIG, '[node]\nnickname = "attic"\n')
    machine.said("systemctl", "daemon-reload")
    machine.said("systemctl", "restart", "swarmllm")
    third = machine.running_after(second)
    machine.said("kill", "-STOP", third)
    machine.running_after(third)
    assert machine.show("NRestarts") == "1"
    assert json.loads(machine.user("status", "--json"))["nickname"] == "attic"

    machine.write(CONFIG, '[node]\nnickame = "attic"\n')
    assert machine.run("systemctl", "restart", "swarmllm").returncode != 0
    assert machine.show("ActiveState") == "failed", "what is written wrong is not tried again and again"
    machine.write(CONFIG, "")
    machine.said("systemctl", "start", "swarmllm")
    machine.said("systemctl", "stop", "swarmllm")
    assert (machine.show("Result"), machine.show("ExecMainStatus")) == ("success", "0")
    machine.root("service", "uninstall", "--system")
    assert machine.show("LoadState") == "not-found"


def test_a_node_of_a_user_runs_under_the_users_manager(machine: Machine) -> None:
    machine.said("useradd", "--create-home", "ann")
    uid = machine.said("id", "-u", "ann")
    machine.said("systemctl", "start", "dbus.service", "systemd-logind.service", f"user@{uid}.service")
    as_ann = [
        "runuser",
        "-u",
        "ann",
        "--",
        "env",
        f"XDG_RUNTIME_DIR=/run/user/{uid}",
        *swarmllm(Path("/home/ann")),
    ]
    assert "/home/ann/.config/systemd/user" in machine.said(*as_ann, "service", "install")
    assert json.loads(machine.said(*as_ann, "status", "--json"))["ready"] is True
    machine.said(*as_ann, "service", "uninstall")
    assert machine.run(*as_ann, "status").returncode != 0
