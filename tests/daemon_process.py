"""Real daemons in processes of their own, for tests: start, find, stop, and nothing left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from deadlines import DEADLINE_S
from forked_process import ForkedProcess, clean_environment
from kernel_timings import KERNEL_TIMINGS


@dataclass
class DaemonProcess:
    process: subprocess.Popen[bytes] | ForkedProcess
    data_dir: Path
    log: Path
    http: httpx.Client
    node_id: str
    addresses: list[str]

    @property
    def url(self) -> str:
        return str(self.http.base_url).rstrip("/")

    def stats(self) -> dict[str, Any]:
        return dict(self.http.get("/api/admin/stats").json())

    def worker_pids(self) -> list[int]:
        return [worker["pid"] for worker in self.stats()["workers"] if worker["pid"]]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)


@contextmanager
def running_daemon(
    folder: Path,
    nickname: str,
    *,
    load: list[str],
    bootstrap: list[str] | None = None,
    program: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    **tables: dict[str, Any],
) -> Iterator[DaemonProcess]:
    """On loopback, on free ports, its configuration in a file. Stopped hard at the end if it still runs.
    `program`: what a new Python runs instead of `swarmllm`. Without it the daemon is a fork (see
    `forked_process`). `environment`: what it has besides this one's."""
    data_dir = folder / nickname
    config = folder / f"{nickname}.toml"
    config.write_text(toml(nickname, data_dir, load, bootstrap or [], tables))
    log = folder / f"{nickname}.log"
    arguments = ["daemon", "--config", str(config)]
    process: subprocess.Popen[bytes] | ForkedProcess
    with log.open("wb") as output:
        its_environment = clean_environment() | (environment or {})
        if not program:
            process = ForkedProcess(arguments, log, KERNEL_TIMINGS, its_environment)
        else:
            process = subprocess.Popen(
                [sys.executable, *program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=its_environment,
            )
    try:
        found = wait_for(lambda: daemon_info(process, data_dir, log), DEADLINE_S, "daemon.json")
        with httpx.Client(base_url=found["api_url"], trust_env=False, timeout=DEADLINE_S) as http:
            yield DaemonProcess(process, data_dir, log, http, found["node_id"], found["addresses"])
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def forked_demo_node(folder: Path, module: str) -> ForkedProcess:
    """In place of `swarmllm.cli.demo.launch`, with which benchmarks start their nodes."""
    assert module == "swarmllm", "the fork server has read this one"
    log = folder / "daemon.log"
    log.touch()
    arguments = ["daemon", "--config", str(folder / "config.toml")]
    return ForkedProcess(arguments, log, KERNEL_TIMINGS, clean_environment())


def toml(
    nickname: str, data_dir: Path, load: list[str], bootstrap: list[str], tables: dict[str, dict[str, Any]]
) -> str:
    """JSON's strings, numbers, booleans and arrays are TOML's."""
    settings: dict[str, dict[str, Any]] = {
        "node": {"nickname": nickname, "data_dir": str(data_dir)},
        "network": {
            "listen_host": "127.0.0.1",
            "libp2p_port": 0,
            "data_port": 0,
            "mdns": False,
            "bootstrap": bootstrap,
        },
        "api": {"port": 0},
        "inference": {"n_threads": 1, "check_cuts": False},
        "model": {"load": load},
    }
    for table, keys in tables.items():
        settings.setdefault(table, {}).update(keys)
    lines: list[str] = []
    for table, keys in settings.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def daemon_info(
    process: subprocess.Popen[bytes] | ForkedProcess, data_dir: Path, log: Path
) -> dict[str, Any] | None:
    assert process.poll() is None, f"the daemon ended with {process.returncode}:\n{log.read_text()}"
    try:
        return dict(json.loads((data_dir / "daemon.json").read_text()))
    except FileNotFoundError:
        return None


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if result := condition():
            return result
        time.sleep(0.02)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


def process_exists(pid: int) -> bool:
    """Zombies count as gone: whoever has to reap them does so in its own time."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
