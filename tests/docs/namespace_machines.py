"""Machines with networks of their own: network namespaces with cables to one switch.

Nothing is set for them: ports, discovery and folders are the defaults.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from daemon_process import wait_for
from deadlines import DEADLINE_S
from doc_blocks import Machine

from bench.common.namespaces import NoNamespaces, cabled_namespaces, inside


class NamespaceMachine(Machine):
    """A machine with a network of its own, configured by nothing but what is typed."""

    def __init__(self, home: Path, namespace: str, script: str) -> None:
        super().__init__(home, script)
        self.environment = {
            name: value for name, value in self.environment.items() if not name.startswith("SWARMLLM_")
        }
        self.namespace = namespace
        self.enter = ("ip", "netns", "exec", namespace)
        self._terminal = -1
        self._printed = b""

    def start(self, command: str) -> subprocess.Popen[bytes]:
        """In a terminal of its own, as a person starts it; stderr goes to daemon.log."""
        self._terminal, theirs = pty.openpty()
        os.set_blocking(self._terminal, False)
        self._printed = b""
        try:
            with (self.home / "daemon.log").open("wb") as log:
                return subprocess.Popen(
                    [*self.enter, "sh", "-c", f"exec {command}"],
                    stdin=subprocess.DEVNULL,
                    stdout=theirs,
                    stderr=log,
                    env=self.environment,
                    cwd=self.home,
                )
        finally:
            os.close(theirs)

    def printed(self) -> str:
        """What the daemon has shown in its terminal by now."""
        with suppress(OSError):  # there is nothing more, or nobody writes any more
            while data := os.read(self._terminal, 65536):
                self._printed += data
        return self._printed.decode("utf-8", "replace")

    def _serves(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, (self.home / "daemon.log").read_text()
        try:
            return bool(json.loads((self.data_dir / "daemon.json").read_text())["api_url"])
        except (FileNotFoundError, ValueError):
            return False

    def start_daemon(self, command: str, stack: ExitStack) -> subprocess.Popen[bytes]:
        """Once it serves; `stack` stops it."""
        process = self.start(command)
        stack.callback(os.close, self._terminal)
        stack.callback(stop, process)
        wait_for(lambda: self._serves(process), DEADLINE_S, f"the daemon of {self.namespace}")
        return process

    def inside(self) -> AbstractContextManager[None]:
        """Sockets that this thread opens in the block are of this machine."""
        return inside(self.namespace)


@contextmanager
def namespace_machines(
    folder: Path, names: Sequence[str], script: str
) -> Iterator[dict[str, NamespaceMachine]]:
    """`script`: of the program `swarmllm` on each. Skips the test where there can be none."""
    with ExitStack() as stack:
        try:
            namespaces = stack.enter_context(cabled_namespaces(names))
        except NoNamespaces as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield {name: NamespaceMachine(folder / name, namespaces[name], script) for name in names}


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
