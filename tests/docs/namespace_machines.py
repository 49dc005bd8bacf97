"""Machines with networks of their own: network namespaces with cables to one switch.

Nothing is set for them: ports, discovery and folders are the defaults.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from daemon_process import wait_for
from deadlines import PATIENCE_S
from doc_blocks import Machine

CLONE_NEWNET = 0x40000000


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


class NamespaceMachine(Machine):
    """A machine with a network of its own, configured by nothing but what is typed."""

    def __init__(self, home: Path, namespace: str) -> None:
        super().__init__(home)
        self.environment = {
            name: value for name, value in self.environment.items() if not name.startswith("SWARMLLM_")
        }
        self.namespace = namespace
        self.enter = ("ip", "netns", "exec", namespace)

    def _serves(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, (self.home / "daemon.log").read_text()
        try:
            return bool(json.loads((self.data_dir / "daemon.json").read_text())["api_url"])
        except (FileNotFoundError, ValueError):
            return False

    def start_daemon(self, command: str, stack: ExitStack) -> subprocess.Popen[bytes]:
        """Once it serves; `stack` stops it."""
        process = self.start(command)
        stack.callback(stop, process)
        wait_for(lambda: self._serves(process), PATIENCE_S, f"the daemon of {self.namespace}")
        return process

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets that this thread opens in the block are of this machine."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/proc/thread-self/ns/net").open("rb") as outside:
            with Path("/run/netns", self.namespace).open("rb") as there:
                assert libc.setns(there.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert libc.setns(outside.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


@contextmanager
def namespace_machines(folder: Path, names: Sequence[str]) -> Iterator[dict[str, NamespaceMachine]]:
    """Skips the test where there can be none."""
    prefix = f"swarmllm-{os.getpid()}"
    switch = f"{prefix}-switch"
    with ExitStack() as stack:
        for namespace in (switch, *(f"{prefix}-{name}" for name in names)):
            try:
                ip("netns", "add", namespace)
            except (OSError, subprocess.CalledProcessError) as error:
                said = getattr(error, "stderr", b"") or str(error).encode()
                pytest.skip(f"no network namespaces here: {said.decode().strip()}")
            stack.callback(ip, "netns", "del", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        for number, name in enumerate(names, 1):
            namespace, port = f"{prefix}-{name}", f"port{number}"
            ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            ip("-n", switch, "link", "set", port, "master", "switch", "up")
            ip("-n", namespace, "addr", "add", f"10.87.0.{number}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")
        yield {name: NamespaceMachine(folder / name, f"{prefix}-{name}") for name in names}


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
