"""A `swarmllm` to type whose process imports nothing: a server that has imported everything forks itself.

A command imports for half a second of processor time, a daemon for three, and a page of the documents has
dozens of commands, some of which are typed again until they work. A small program stands for each: it gives
its files, folder, environment and network to the server, passes signals on, and ends as the fork does.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NoReturn

from forked_worker import Passed, forks, start_server
from kernel_timings import KERNEL_TIMINGS

PROGRAM: Final = Path(__file__).with_name("forked_command.py")
N_FILES: Final = 5
"""What the program sends: its three standard files, its folder and its network."""
REQUEST_MAX: Final = 1 << 20


@contextmanager
def command_forks() -> Iterator[str]:
    """What stands for `swarmllm` in a shell script."""
    start_server()
    with (
        tempfile.TemporaryDirectory(prefix="forks-") as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        path = Path(folder, "socket")
        listener.bind(str(path))
        listener.listen()
        passed = Passed(listener.fileno())
        server = forks().Process(target=serve, args=(passed, str(KERNEL_TIMINGS)))
        server.start()
        listener.close()
        try:
            yield f'"{sys.executable}" -I -S "{PROGRAM}" "{path}"'
        finally:
            server.terminate()
            server.join()
            server.close()


def serve(descriptor: int, kernel_timings: str) -> None:
    """In a process of its own, until it is ended or the test process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch
    parent = multiprocessing.parent_process()
    assert parent is not None
    with socket.socket(fileno=descriptor) as listener:
        while parent.sentinel not in select.select([listener, parent.sentinel], [], [])[0]:
            with listener.accept()[0] as connection:
                if os.fork() == 0:
                    listener.close()
                    do_and_end(lambda: watch(connection, kernel_timings))


def watch(connection: socket.socket, kernel_timings: str) -> int:
    """Beside each command: it is sent the signals of the program that stands for it, and ends with that."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    data, files, _, _ = socket.recv_fds(connection, REQUEST_MAX, N_FILES)
    while not data.endswith(b"\n"):
        data += connection.recv(REQUEST_MAX)
    pid = os.fork()
    if pid == 0:
        connection.close()
        do_and_end(lambda: run(json.loads(data), files, kernel_timings))
    for each in files:
        os.close(each)
    end = os.pidfd_open(pid)
    while end not in select.select([connection, end], [], [])[0]:
        numbers = connection.recv(64)
        for number in numbers or [signal.SIGKILL]:
            os.kill(pid, number)
        if not numbers:
            break
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        connection.sendall(f"{status}\n".encode())
    return 0


def run(request: dict[str, Any], files: list[int], kernel_timings: str) -> int:
    """In the process of the command."""
    from swarmllm import daemon_settings
    from swarmllm.cli.main import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    *standard, folder, network = files
    if not os.path.sameopenfile(network, own_network := os.open("/proc/self/ns/net", os.O_RDONLY)):
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.setns(network, 0) == 0, os.strerror(ctypes.get_errno())
    os.fchdir(folder)
    for number, opened in enumerate(standard):
        os.dup2(opened, number)
    for opened in (*files, own_network):
        os.close(opened)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.stdin = os.fdopen(0, "r", encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.argv = ["swarmllm", *request["arguments"]]
    vars(daemon_settings)["KERNEL_TIMINGS"] = kernel_timings
    main()
    return 0


def do_and_end(task: Callable[[], int]) -> NoReturn:
    """Of what has been forked nothing else must be done at its end."""
    status = 1
    try:
        status = task()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            status = end.code or 0
        else:
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
