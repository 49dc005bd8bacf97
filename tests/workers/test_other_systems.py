"""What a worker does on a system other than Linux, run here with the Linux way switched off."""

from __future__ import annotations

import os
import resource
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from deadlines import DEADLINE_S

from swarmllm_workers import operating_system
from swarmllm_workers.decode.bounded_call import TookTooLong, bounded
from swarmllm_workers.engine import huge_pages, shared_weights
from swarmllm_workers.kernels import interposing
from swarmllm_workers.server.background import ThreadInbox

from .client import Worker, worker_environment
from .conftest import MakeModel

ELSEWHERE = "from swarmllm_workers import operating_system; operating_system.IS_LINUX = False; "
PROGRAM = ("-c", f"{ELSEWHERE}from swarmllm_workers.__main__ import main; main()")
PROMPT = np.array([72, 101, 108, 108, 111, 44], np.int32)


@pytest.fixture
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operating_system, "IS_LINUX", False)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Worker]:
    """A worker process."""
    (tmp_path / "elsewhere").mkdir()
    worker = Worker(tmp_path / "elsewhere" / "socket", program=PROGRAM)
    try:
        yield worker
    finally:
        worker.close()


@pytest.mark.slow
def test_a_worker_computes_the_same(worker: Worker, elsewhere: Worker, make_model: MakeModel) -> None:
    path = make_model("llama")
    answers = []
    for each in (worker, elsewhere):
        n_layers = each.open(path, (0, 1)).n_layers
        assert n_layers > 1
        answers.append(each.hidden(PROMPT, request_id="part", start=0, end=1, position=0))
    np.testing.assert_array_equal(*answers)


@pytest.mark.slow
def test_a_worker_ends_soon_after_its_parent() -> None:
    sleep = "import time; time.sleep(600)"
    child = f"{ELSEWHERE}operating_system.die_with_parent(); print(1, flush=True); {sleep}"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]]); {sleep}"
    with subprocess.Popen(
        [sys.executable, "-c", parent, child], stdout=subprocess.PIPE, env=worker_environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == b"1\n"
        process.kill()
        # The child has the other end of the pipe, too.
        assert process.stdout.read() == b""


@pytest.mark.usefixtures("_elsewhere")
def test_an_inbox_wakes_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "eventfd")
    inbox = ThreadInbox()
    done: list[int] = []
    for number in range(100_000):  # more than a pipe holds
        inbox.put(lambda number=number: done.append(number))  # type: ignore[misc]
    assert select.select([inbox.descriptor], [], [], DEADLINE_S)[0]
    inbox.run()
    assert done == list(range(100_000))
    assert not select.select([inbox.descriptor], [], [], 0)[0]
    inbox.run()
    inbox.close()


@pytest.mark.usefixtures("_elsewhere")
def test_descriptors_that_come_are_not_inherited() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(theirs, [b"+"], [0])
        data, ((_, _, content),) = operating_system.receive(ours, 10, socket.CMSG_SPACE(4))
        descriptor = int.from_bytes(content, sys.byteorder)
        operating_system.keep_private([descriptor])
        assert (data, os.get_inheritable(descriptor)) == (b"+", False)
        os.close(descriptor)


@pytest.mark.usefixtures("_elsewhere")
def test_threads_are_left_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    monkeypatch.delattr(os, "sched_getaffinity")
    priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    operating_system.settle_thread({0}, priority + 1)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == priority
    assert operating_system.cores() == set(range(os.cpu_count() or 1))


@pytest.mark.usefixtures("_elsewhere")
def test_bounded_code_has_a_bound_of_time_only() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)

    def endless() -> None:
        with bounded(0.01):
            assert resource.getrlimit(resource.RLIMIT_AS) == before
            while True:
                pass

    with pytest.raises(TookTooLong):
        endless()
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.usefixtures("_elsewhere")
def test_weights_lie_in_ordinary_pages_of_files_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huge_pages, "libc", None)
    path = tmp_path / "weights"
    path.write_bytes(bytes(huge_pages.HUGE_PAGE))
    huge_pages.read_in(path)
    huge_pages.read_anew(path, [(0, huge_pages.HUGE_PAGE)], lambda _n_bytes: None)
    huge_pages.want_huge_pages(0, 1)
    huge_pages.populate(0, 1)
    assert not shared_weights.is_supported()


def test_the_libraries_in_use_are_found_without_a_list_of_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("libllama", "libggml-base", "libggml-cpu", "libggml.so")
    expected = [interposing.mapped_paths(name) for name in names]
    assert all(expected)
    monkeypatch.setattr(operating_system, "IS_LINUX", False)
    assert [interposing.mapped_paths(name) for name in names] == expected


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_a_thread_of_a_process_with_a_low_priority_keeps_it() -> None:
    """As in a daemon that was started with `nice`, or whose unit says Nice=10."""
    code = (
        "import os, threading\n"
        "from swarmllm_workers import operating_system\n"
        "os.nice(10)\n"
        "if os.geteuid() == 0:\n"
        "    os.setuid(65534)\n"
        "def work():\n"
        "    operating_system.settle_thread({4095}, 5)\n"
        "    print(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    already = os.getpriority(os.PRIO_PROCESS, 0)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert (done.stdout, done.stderr) == (f"{min(19, already + 10)}\n", "")
