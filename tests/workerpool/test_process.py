from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest
import trio
from deadlines import DEADLINE_S
from pool_parts import FAKE_WORKER

from swarmllm.errors import WorkerDied
from swarmllm.workerpool.process import WorkerProcess, describe_exit, worker_environment


def test_a_worker_does_not_learn_the_daemons_secrets() -> None:
    environment = {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "2",
        "LC_ALL": "C",
        "SWARMLLM_API_KEY": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "HF_TOKEN": "secret",
    }
    assert worker_environment(environment) == {"PATH": "/bin", "OMP_NUM_THREADS": "2", "LC_ALL": "C"}


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (0, "exited with status 0"),
        (-11, "was killed by SIGSEGV"),
        (-99, "was killed by signal 99"),
        (None, "did not exit"),
    ],
)
def test_an_exit_is_described(status: int | None, text: str) -> None:
    assert describe_exit(status) == text


def entries(folder: Path) -> list[str]:
    return [str(path) for path in folder.iterdir()]


def connects(impostor: socket.socket, folder: Path) -> bool:
    """Whether there is a socket in `folder` that listens; it is connected to then."""
    try:
        return any(impostor.connect_ex(path) == 0 for path in entries(folder))
    except FileNotFoundError:
        return False


def commands_of_children() -> str:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return " ".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in children)


@pytest.mark.slow
async def test_another_process_cannot_take_the_workers_place(tmp_path: Path) -> None:
    failures: list[str] = []

    async def spawn() -> None:
        command = [sys.executable, str(FAKE_WORKER), "never-connects"]
        with pytest.raises(WorkerDied) as caught:
            await WorkerProcess.spawn(command, tmp_path, timeout_s=2.0)
        failures.append(caught.value.message)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(spawn)
        with trio.fail_after(DEADLINE_S), socket.socket(socket.AF_UNIX) as impostor:
            impostor.setblocking(False)
            while not connects(impostor, tmp_path):
                await trio.lowlevel.checkpoint()
            await trio.lowlevel.wait_readable(impostor.fileno())
            assert impostor.recv(1) == b""
    assert "did not connect within 2 s" in failures[0]
    assert entries(tmp_path) == []


@pytest.mark.slow
async def test_a_process_is_gone_when_its_spawning_is_cancelled(tmp_path: Path) -> None:
    command = [sys.executable, str(FAKE_WORKER), "never-connects"]
    with trio.move_on_after(0.3) as scope:
        await WorkerProcess.spawn(command, tmp_path, timeout_s=30)
    assert scope.cancelled_caught
    assert "never-connects" not in commands_of_children()
