"""What the daemon does on a system other than Linux, run here with the Linux way switched off."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from daemon_process import running_daemon, wait_for
from deadlines import DEADLINE_S
from pool_parts import FAKE_WORKER

from swarmllm import memory_info, operating_system, process_use
from swarmllm.errors import WorkerDied
from swarmllm.workerpool.process import WorkerProcess


@pytest.fixture
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operating_system, "IS_LINUX", False)


pytestmark = pytest.mark.usefixtures("_elsewhere")


@pytest.fixture
def connections() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    with dialled, accepted:
        yield dialled, accepted


@pytest.mark.slow
async def test_a_worker_is_started_and_reaped(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        process = await WorkerProcess.spawn([sys.executable, str(FAKE_WORKER)], tmp_path, DEADLINE_S)
        assert process.connection is not None
        assert process.exit_status is None
        had_to_kill = await process.reap(grace_s=0.0)
    assert (had_to_kill, process.exit_status) == (True, -9)


@pytest.mark.slow
async def test_the_exit_of_a_worker_is_noticed(tmp_path: Path) -> None:
    with trio.fail_after(DEADLINE_S), pytest.raises(WorkerDied) as caught:
        await WorkerProcess.spawn([sys.executable, str(FAKE_WORKER), "exits"], tmp_path, DEADLINE_S)
    assert "exited with status 3 before it connected; its last words: no such model" in caught.value.message


@pytest.mark.slow
def test_a_daemon_answers_and_ends(tmp_path: Path) -> None:
    code = (
        "from swarmllm import operating_system; operating_system.IS_LINUX = False; "
        "from swarmllm.cli.main import main; main()"
    )
    inference = {"n_threads": 1}
    with running_daemon(
        tmp_path, "elsewhere", load=["guide"], program=("-c", code), inference=inference
    ) as node:
        wait_for(lambda: node.http.get("/health/ready").status_code == 200, DEADLINE_S, "the guide")
        asked = {"model": "guide", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        answer = node.http.post("/v1/chat/completions", json=asked).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] > 0
        assert node.stop() == 0


def test_nobody_says_who_is_at_the_other_end() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        assert operating_system.peer_pid(ours) is None
    assert operating_system.exit_descriptor(os.getpid()) is None


def test_the_kernels_own_limit_of_silence_stays(connections: tuple[socket.socket, socket.socket]) -> None:
    dialled, _ = connections
    operating_system.limit_silence(dialled, 1234)
    assert dialled.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


def test_data_is_on_the_disk_with_all_that_belongs_to_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    monkeypatch.delattr(os, "fdatasync")
    operating_system.sync_data(7)
    assert synced == [7]


def test_cores_and_memory_are_counted_as_python_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert operating_system.n_cores() == os.cpu_count()
    assert operating_system.cpu_features() == frozenset()
    total, available = memory_info.memory_bytes()
    assert (total, available) == (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 0)
    assert process_use.resident_bytes(os.getpid()) == 0


def test_the_address_of_the_way_out_is_one_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operating_system, "_SOMEWHERE_ELSE", ("127.0.0.1", 9))
    assert operating_system.interface_ips() == ["127.0.0.1"]


def test_without_a_network_there_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    assert operating_system.interface_ips() == []


def test_a_process_is_known_by_its_number_only() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        (mark,) = operating_system.family(child.pid)
        assert (mark.pid, mark.started_ticks) == (child.pid, 0)
        assert operating_system.is_alive(mark)
        child.kill()
        child.wait(DEADLINE_S)
        assert not operating_system.is_alive(mark)
        assert operating_system.family(child.pid) == []


def test_a_child_can_outlive_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", None)
    operating_system.signal_at_parents_end(15)()
