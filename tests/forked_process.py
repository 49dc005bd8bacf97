"""Start `swarmllm` in a process of its own without importing everything again for each one.

What a daemon imports takes seconds of processor time. A server process imports it once, and every daemon is a
fork of that process, which has done nothing else: no event loop, no thread, no open file of a node.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

PRELOADED = [
    "__main__",
    "swarmllm.cli.main",
    "swarmllm.cli.daemon",
    "swarmllm.daemon",
    # Not what encodes pictures: whoever is imported last has libllama's words on why it loads no file.
    "swarmllm_workers.server.loop",
]
LAST = "tests.preloaded"
"""What is imported when all else has been. It is named from the folder that pytest was started in, which is
all that the server process has in its path."""


class ForkedProcess:
    """As much of `subprocess.Popen` as tests use."""

    def __init__(
        self, arguments: Sequence[str], log: Path, kernel_timings: Path, environment: Mapping[str, str]
    ) -> None:
        """`kernel_timings`: where its workers keep them, instead of in its data folder.

        Raises OSError where the server process can't be reached."""
        context = multiprocessing.get_context("forkserver")
        assert isinstance(context, ForkServerContext)
        context.set_forkserver_preload([*PRELOADED, LAST])
        self._process = context.Process(
            target=run_swarmllm, args=(list(arguments), str(log), str(kernel_timings), dict(environment))
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        status = self.returncode
        if status is None:
            raise subprocess.TimeoutExpired("swarmllm", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SWARMLLM_")}


def run_swarmllm(arguments: list[str], log: str, kernel_timings: str, environment: dict[str, str]) -> None:
    """In the forked process."""
    from swarmllm import daemon_settings
    from swarmllm.cli.main import main

    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for opened, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(opened, standard)
    sys.argv = ["swarmllm", *arguments]
    vars(daemon_settings)["KERNEL_TIMINGS"] = (
        kernel_timings  # which is not below the data folder: it is absolute
    )
    main()
