"""One worker as an operating system process: spawned, connected, watched, reaped.

Spawned by `subprocess.Popen` on trio's own thread, not by `trio.lowlevel.open_process`: a worker asks the
kernel to be killed when its parent dies, and "parent" there means the *thread* that spawned it. Trio spawns
in a helper thread that ends when it has been idle for ten seconds, and would take the worker with it. The
price is some milliseconds of the event loop per spawn.

A session of its own, so that Ctrl-C in the terminal reaches the daemon only, which then stops its workers
in order. The daemon listens and the worker connects; the kernel's word for who connected (SO_PEERCRED) is
held against the pid, so another process of this user cannot take the worker's place.

The exit is awaited through a pidfd: it cannot be confused with a later process of the same pid. On other
systems than Linux it is looked for now and then, and a connection is taken on its word (operating_system).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import trio

from swarmllm import operating_system
from swarmllm.errors import WorkerDied, reason_of
from swarmllm_proto.errors import without_folders

log = logging.getLogger("swarmllm.worker")

SOCKET_PATH_MAX = 107
"""sizeof(sockaddr_un.sun_path) less the final zero."""
STDERR_LINES_KEPT = 20
STDERR_LINE_MAX = 500
ACCEPT_RETRY_S = 0.1
EXIT_LOOK_S = 0.05
"""Where nothing tells of an exit."""
KILL_TIMEOUT_S = 5.0
"""A process that survives SIGKILL longer than this hangs inside the kernel; nobody here can do anything
about it."""

_ENVIRONMENT = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LANG",
        "TZ",
        "TMPDIR",
        "LD_LIBRARY_PATH",
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
    }
)
_ENVIRONMENT_PREFIXES = (
    "LC_", "OMP_", "GOMP_", "KMP_", "GGML_", "LLAMA_", "CUDA_", "NVIDIA_", "HIP_", "HSA_", "ROCR_", "VK_",
    "SWARMLLM_WORKER_",
)  # fmt: skip


def worker_environment(environment: dict[str, str]) -> dict[str, str]:
    """What a worker may know of the daemon's environment: not its API keys."""
    return {
        key: value
        for key, value in environment.items()
        if key in _ENVIRONMENT or key.startswith(_ENVIRONMENT_PREFIXES)
    }


def describe_exit(status: int | None) -> str:
    if status is None:
        return "did not exit"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


class WorkerProcess:
    """`connection`: the accepted socket, non-blocking. The caller that gets one of these must `reap` it."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stderr is not None
        self._popen = popen
        self._exit_fd = operating_system.exit_descriptor(popen.pid)
        self._is_released = False
        self._stderr = popen.stderr
        os.set_blocking(self._stderr.fileno(), False)
        self._stderr_line = b""
        self._stderr_tail: deque[str] = deque(maxlen=STDERR_LINES_KEPT)
        self.connection: socket.socket | None = None

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; the negative signal number where a signal ended it."""
        return self._popen.returncode

    def __repr__(self) -> str:
        state = "running" if self.exit_status is None else describe_exit(self.exit_status)
        return f"<WorkerProcess {self.pid} {state}>"

    @classmethod
    async def spawn(cls, command: Sequence[str], socket_dir: Path, timeout_s: float) -> WorkerProcess:
        """Run `command --socket PATH` and wait until that very process has connected. Raises WorkerDied."""
        path = socket_dir / f"worker-{secrets.token_hex(6)}.sock"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.setblocking(False)
                await trio.to_thread.run_sync(listener.bind, str(path))
                listener.listen(4)
                process = cls._start([*command, "--socket", str(path)])
                try:
                    process.connection = await process._accept(listener, timeout_s)
                except BaseException:
                    with trio.CancelScope(shield=True):
                        await process.reap(grace_s=0.0)
                    raise
                return process
        except OSError as error:
            raise WorkerDied(f"the worker cannot be started: {reason_of(error)}") from error
        finally:
            path.unlink(missing_ok=True)

    @classmethod
    def _start(cls, command: Sequence[str]) -> WorkerProcess:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=worker_environment(dict(os.environ)),
            start_new_session=True,
        )
        try:
            return cls(popen)
        except OSError:
            with popen:
                popen.kill()
            raise

    async def _accept(self, listener: socket.socket, timeout_s: float) -> socket.socket:
        connection: socket.socket | None = None
        async with trio.open_nursery() as nursery:

            async def accept() -> None:
                nonlocal connection
                connection = await self._accept_own(listener)
                nursery.cancel_scope.cancel()

            async def notice_exit() -> None:
                await self.wait()
                nursery.cancel_scope.cancel()

            nursery.cancel_scope.deadline = trio.current_time() + timeout_s
            nursery.start_soon(accept)
            nursery.start_soon(notice_exit)
            nursery.start_soon(self.log_stderr)
        if connection is not None:
            return connection
        if self.exit_status is not None:
            what = f"{describe_exit(self.exit_status)} before it connected"
        else:
            what = f"did not connect within {timeout_s:g} s and was killed"
        await self.reap(grace_s=0.0)
        raise WorkerDied(self.exit_summary(what))

    async def _accept_own(self, listener: socket.socket) -> socket.socket:
        while True:
            await trio.lowlevel.wait_readable(listener.fileno())
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue
            except OSError as error:
                # Out of file descriptors, most likely; the deadline ends this if it stays so.
                log.warning("the connection of worker %d cannot be accepted: %s", self.pid, reason_of(error))
                await trio.sleep(ACCEPT_RETRY_S)
                continue
            connection.setblocking(False)
            pid = operating_system.peer_pid(connection)
            if pid is None or pid == self.pid:
                return connection
            log.warning("process %d connected in place of worker %d: refused", pid, self.pid)
            connection.close()

    async def wait(self) -> int:
        """Until the process has exited; only one task at a time may wait."""
        while self._popen.poll() is None:
            if self._exit_fd is None:
                await trio.sleep(EXIT_LOOK_S)
            else:
                await trio.lowlevel.wait_readable(self._exit_fd)
        status: int = self._popen.returncode
        return status

    def kill(self) -> None:
        # The group, in case the worker started something; the leader is not reaped yet, so the id is its own.
        if self.exit_status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def reap(self, grace_s: float) -> bool:
        """Give it `patience_s` to exit by itself, then kill it; release everything. Shield it from
        cancellation.

        Returns whether it had to be killed.
        """
        with trio.move_on_after(grace_s):
            await self.wait()
        had_to_kill = self._popen.poll() is None
        self.kill()
        with trio.move_on_after(KILL_TIMEOUT_S):
            await self.wait()
        if not self._is_released:
            self._is_released = True
            self._read_stderr()
            trio.lowlevel.notify_closing(self._stderr.fileno())
            self._stderr.close()
            if self._exit_fd is not None:
                os.close(self._exit_fd)
        if self.connection is not None:
            trio.lowlevel.notify_closing(self.connection.fileno())
            self.connection.close()
            self.connection = None
        return had_to_kill

    async def log_stderr(self) -> None:
        """Pass the worker's stderr on to the log until it closes it."""
        while self._read_stderr():
            await trio.lowlevel.wait_readable(self._stderr.fileno())

    def exit_summary(self, what: str) -> str:
        """A sentence for WorkerDied: `what` happened, and the last words on stderr."""
        words = " | ".join(self._stderr_tail)
        return f"worker process {self.pid} {what}" + (f"; its last words: {words}" if words else "")

    def _read_stderr(self) -> bool:
        """Whether more may come."""
        while True:
            try:
                data = os.read(self._stderr.fileno(), 65536)
            except BlockingIOError:
                return True
            *lines, self._stderr_line = (self._stderr_line + data).split(b"\n")
            if not data or len(self._stderr_line) > STDERR_LINE_MAX:
                lines.append(self._stderr_line)
                self._stderr_line = b""
            for line in lines:
                text = "".join(
                    character for character in line.decode("utf-8", "replace") if character.isprintable()
                ).strip()[:STDERR_LINE_MAX]
                if text:
                    self._stderr_tail.append(without_folders(text))
                    log.info("worker %d says: %s", self.pid, text)
            if not data:
                return False
