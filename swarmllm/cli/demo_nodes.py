"""The daemons of `swarmllm demo`: started in a folder of their own, watched, stopped, proved to be gone.

They are ordinary `swarmllm daemon` processes with ports chosen by the system and a configuration file each,
so the user's own configuration, data folder and running node are not touched. Each leads its own process
session: Ctrl-C in the terminal reaches only the demo, which then stops them in order; should the demo
itself be killed, the kernel ends them (parent-death signal), and a worker ends with its daemon.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STOP_TIMEOUT_S = 15.0
PR_SET_PDEATHSIG = 1
INTERRUPTIONS = frozenset({signal.SIGINT, signal.SIGTERM})
ONE_THREAD = {"n_threads": 1}
"""Three workers share this machine, and only one computes at a time."""


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """One process, not the next one to get its number."""

    pid: int
    started_ticks: int


@dataclass
class DemoNode:
    """One daemon of the demo."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def log_path(self) -> Path:
        return self.folder / "daemon.log"

    def announcement(self) -> dict[str, Any] | None:
        """What the daemon has written about itself (api_url, node_id, addresses ...), or None while it
        starts."""
        try:
            found = json.loads((self.folder / "data" / "daemon.json").read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def log_tail(self, n_lines: int) -> list[str]:
        try:
            return self.log_path.read_text("utf-8", "replace").splitlines()[-n_lines:]
        except OSError:
            return []


class DemoNodes:
    """All daemons of one demo and the folder they live in."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="swarmllm-demo-"))
        self.nodes: list[DemoNode] = []

    def start(
        self,
        name: str,
        load: Sequence[str],
        bootstrap: Sequence[str],
        inference: Mapping[str, object] = ONE_THREAD,
        network: Mapping[str, object] | None = None,
    ) -> DemoNode:
        """A daemon that loads `load` (NAME:START:END each) and dials `bootstrap`; `network` goes before what
        else would be in that table."""
        folder = self.folder / name
        folder.mkdir()
        config = folder / "config.toml"
        config.write_text(configuration(name, folder / "data", load, bootstrap, inference, network), "utf-8")
        with _uninterrupted():
            node = DemoNode(name, folder, _launch(folder))
            self.nodes.append(node)
        return node

    def restart(self, node: DemoNode) -> None:
        """Start a daemon that has ended, with what it had: its folder, its identity, other ports."""
        (node.folder / "data" / "daemon.json").unlink(missing_ok=True)
        node.process.wait(STOP_TIMEOUT_S)
        with _uninterrupted():
            node.process = _launch(node.folder)

    def stop(self) -> list[ProcessMark]:
        """End every daemon; returns the processes of the demo that survived, which should be none."""
        marks = [mark for node in self.nodes for mark in family(node.process.pid)]
        for node in reversed(self.nodes):
            if node.process.poll() is None:
                node.process.terminate()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for node in self.nodes:
            try:
                node.process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                node.process.kill()
                node.process.wait()
        while (alive := [mark for mark in marks if is_alive(mark)]) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        return alive

    def remove_folder(self) -> None:
        shutil.rmtree(self.folder)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits: in the middle of starting a process it would leave one that nobody knows of."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTIONS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _launch(folder: Path) -> subprocess.Popen[bytes]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SWARMLLM_")}
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def end_with_parent() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTIONS)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    with (folder / "daemon.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "swarmllm", "daemon", "--config", str(folder / "config.toml")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


def configuration(
    name: str,
    data_dir: Path,
    load: Sequence[str],
    bootstrap: Sequence[str],
    inference: Mapping[str, object],
    network: Mapping[str, object] | None = None,
) -> str:
    """A daemon's TOML file."""
    tables: dict[str, dict[str, object]] = {
        "node": {"nickname": name, "data_dir": str(data_dir)},
        "network": {
            "listen_host": "127.0.0.1",
            "libp2p_port": 0,
            "data_port": 0,
            "bootstrap": list(bootstrap),
            "mdns": False,
            **(network or {}),
        },
        "api": {"port": 0},
        "inference": dict(inference),
        "model": {"load": list(load)},
    }
    return "\n".join(
        line
        for table, keys in tables.items()
        for line in [f"[{table}]", *(f"{key} = {as_toml(value)}" for key, value in keys.items()), ""]
    )


def as_toml(value: object) -> str:
    """Strings, integers, booleans and lists of them, which TOML spells as JSON does but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def mark_of(pid: int) -> ProcessMark | None:
    """The running process with this pid, or None (a zombie does not run)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else ProcessMark(pid, int(fields[19]))


def is_alive(mark: ProcessMark) -> bool:
    return mark_of(mark.pid) == mark


def family(pid: int) -> list[ProcessMark]:
    """The process and its descendants (a daemon's workers)."""
    marks: list[ProcessMark] = []
    pending = [pid]
    while pending:
        pid = pending.pop()
        if mark := mark_of(pid):
            marks.append(mark)
        # Every thread of its own: a child belongs to the thread that started it.
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                pending += map(int, children.read_text().split())
    return marks
