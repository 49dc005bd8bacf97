"""Wraps the calls that only Linux has, for a worker, each with a replacement on other systems.

Elsewhere nothing here fails: a function says that it does not know, or does the portable thing, which is
slower or less strict. IS_LINUX is looked at with each call, so a test can switch the Linux way off.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

IS_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG: Final = 1
PARENT_LOOK_S: Final = 0.5
"""How often the parent is looked for where the kernel tells nobody of its end."""


def die_with_parent() -> None:
    """Kill this process when the thread that started it ends, even while libllama computes. On other systems
    a thread checks now and then whether the parent still runs. Exits at once if the parent has already ended.
    An idle worker sees the end of its socket anyway; a worker in the middle of a long prefill would see it
    late."""
    parent = os.getppid()
    if IS_LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_die_after, args=(parent,), name="parent", daemon=True).start()
    if parent == 1 or os.getppid() != parent:
        sys.exit("the daemon has gone")


def _die_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)


def cores() -> set[int]:
    """The cores on which this thread may run."""
    return os.sched_getaffinity(0) if IS_LINUX else set(range(os.cpu_count() or 1))


def settle_thread(on: Collection[int], niceness: int) -> None:
    """Bind this thread to the cores in `on`, if there are any, and lower its priority to `niceness`. A thread
    whose priority is as low already keeps it: only root may raise one. On other systems this does nothing,
    and where the system refuses, the thread goes on where it is."""
    if not IS_LINUX:
        return
    thread = threading.get_native_id()
    if on:
        with contextlib.suppress(OSError):  # none of them is left to this process
            os.sched_setaffinity(thread, on)
    if os.getpriority(os.PRIO_PROCESS, thread) < niceness:
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, thread, niceness)


class PinnedThreads:
    """Threads of this process that are bound to one core each and can be released for a time. Empty on
    systems other than Linux."""

    def __init__(self) -> None:
        self._kept: dict[int, set[int]] = {}

    def let_move(self, on: Collection[int]) -> None:
        """Allow all bound threads to run on the cores in `on`, if there are any."""
        if not IS_LINUX or not on:
            return
        for thread in [int(each.name) for each in Path("/proc/self/task").iterdir()]:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                where = os.sched_getaffinity(thread)
                if len(where) == 1 < len(on):
                    os.sched_setaffinity(thread, on)
                    self._kept[thread] = where

    def keep_again(self) -> None:
        for thread, where in self._kept.items():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, where)
        self._kept.clear()


def address_space_bytes() -> int | None:
    """The size of the address space of this process. None: the system does not tell it, and a limit on it has
    no effect."""
    if not IS_LINUX:
        return None
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def mappings() -> list[list[str]]:
    """The mappings of this process as /proc/self/maps lists them: range, access, offset, device, inode and
    path, where there is one. Empty where the system has no such list."""
    if not IS_LINUX:
        return []
    return [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]


def bytes_in_huge_pages(address: int) -> int:
    """The number of bytes in huge pages of the file that is mapped at this address. 0 where the system does
    not tell it."""
    if not IS_LINUX:
        return 0
    is_there = False
    with Path("/proc/self/smaps").open() as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if "-" in name:
                is_there = int(name.partition("-")[0], 16) == address
            elif is_there and name == "FilePmdMapped":
                return int(rest.split()[0]) * 1024
    return 0


def mapped_files() -> set[Path] | None:
    """The files that this process has mapped. None: the system does not tell them."""
    if not IS_LINUX:
        return None
    return {Path(fields[5].strip()) for fields in mappings() if len(fields) == 6}


class Wakeup:
    """`descriptor` is readable from a call of `set`, in any thread, until `clear`."""

    def __init__(self) -> None:
        if IS_LINUX:
            self.descriptor = self._writing = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        else:
            self.descriptor, self._writing = os.pipe()
            os.set_blocking(self.descriptor, False)
            os.set_blocking(self._writing, False)
        self._is_event = IS_LINUX

    def set(self) -> None:
        if self._is_event:
            os.eventfd_write(self._writing, 1)
        else:
            with contextlib.suppress(BlockingIOError):  # full of earlier ones
                os.write(self._writing, b"+")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if self._is_event:
                os.eventfd_read(self.descriptor)
                return
            while os.read(self.descriptor, 4096):
                pass

    def close(self) -> None:
        for descriptor in {self.descriptor, self._writing}:
            os.close(descriptor)


def receive(
    connection: socket.socket, size: int, ancillary_size: int
) -> tuple[bytes, list[tuple[int, int, bytes]]]:
    """As `recvmsg`: data and ancillary data. Descriptors in it are not inherited; elsewhere `keep_private`
    has to see to that. Raises OSError."""
    flags = socket.MSG_CMSG_CLOEXEC if IS_LINUX else 0
    data, ancillary, _, _ = connection.recvmsg(size, ancillary_size, flags)
    return data, ancillary


def keep_private(descriptors: Sequence[int]) -> None:
    """Keep the programs that this one starts from inheriting these descriptors, where `receive` has not done
    so."""
    if not IS_LINUX:
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
