"""Wraps the calls that only Linux has, for the daemon and the commands, each with a replacement on other
systems.

Elsewhere nothing here fails: a function says that it does not know, or does the portable thing, which is
slower or less strict. IS_LINUX is looked at with each call, so a test can switch the Linux way off.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from swarmllm import control_group

if TYPE_CHECKING:
    import trio

IS_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG: Final = 1
_TFD_CLOEXEC: Final = os.O_CLOEXEC
_SIOCGIFADDR: Final = 0x8915
_SOMEWHERE_ELSE: Final = ("192.0.2.1", 9)
"""An address of nobody (RFC 5737, RFC 3849). Nothing is sent to it."""
_SOMEWHERE_ELSE_6: Final = ("2001:db8::1", 9)
_IPV6_ADDRESSES: Final = Path("/proc/net/if_inet6")
_ROUTES: Final = Path("/proc/net/route")
_IS_GATEWAY: Final = 0x02
"""Flag of a route."""
_GLOBAL_SCOPE: Final = 0
_NOT_FOR_OTHERS: Final = 0x01 | 0x08 | 0x20 | 0x40
"""Flags of an address that is temporary (RFC 8981), a duplicate, deprecated, or not tried yet."""


def n_cores() -> int:
    """On which this process may run, and no more than its control group gives it whole processors' time:
    threads of one computation wait for each other, so one that is held back holds back all."""
    if not IS_LINUX:
        return os.cpu_count() or 1
    return int(max(1, min(len(os.sched_getaffinity(0)), control_group.processors())))


def cpu_features() -> frozenset[str]:
    """As /proc/cpuinfo calls them; empty where nobody says."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines() if IS_LINUX else ():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def gpu_vendor() -> str | None:
    """NVIDIA or AMD, whose driver for computing is there; None: neither, or nobody says."""
    drivers = {"NVIDIA": "/proc/driver/nvidia/version", "AMD": "/dev/kfd"} if IS_LINUX else {}
    return next((vendor for vendor, path in drivers.items() if Path(path).exists()), None)


def exit_descriptor(pid: int) -> int | None:
    """Readable once this child has exited, to be closed by the caller. None: it has to be looked at now and
    then. Raises OSError."""
    return os.pidfd_open(pid) if IS_LINUX else None


class WakeTimer:
    """A timer of the kernel that lets one thread sleep until another one says so, or until it says for too
    long nothing else: to set it and to take it back wakes nobody. Leaving the block closes it."""

    def __init__(self) -> None:
        """Raises OSError."""
        # Not CDLL, which lets go of the interpreter's lock for the call: these last less than that takes.
        self._set = ctypes.PyDLL(None, use_errno=True).timerfd_settime
        self._file = ctypes.PyDLL(None, use_errno=True).timerfd_create(time.CLOCK_MONOTONIC, _TFD_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._never = _TimerSpec()

    def __enter__(self) -> WakeTimer:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def set(self, after_s: float) -> None:
        """It ends then, and not when it was to before."""
        # Zero would take it back.
        seconds, nanoseconds = divmod(max(1, int(after_s * 1e9)), 10**9)
        self._set(self._file, 0, ctypes.byref(_TimerSpec(0, 0, seconds, nanoseconds)), None)

    def clear(self) -> None:
        """It does not end."""
        self._set(self._file, 0, ctypes.byref(self._never), None)

    def wait(self) -> None:
        """Until it ends; blocking."""
        os.read(self._file, 8)


class _TimerSpec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "after_s", "after_ns")]


def wake_timer() -> WakeTimer | None:
    """None: the system has none."""
    with suppress(OSError, AttributeError):
        return WakeTimer() if IS_LINUX else None
    return None


def write_at_once(descriptor: int, data: bytes) -> int:
    """Write as much as a non-blocking socket takes without waiting; how many bytes, 0 where it takes none or
    the system has no such call. Raises OSError where the connection is over."""
    if not IS_LINUX:
        return 0
    try:
        return os.write(descriptor, data)
    except BlockingIOError:
        return 0


def peer_pid(connection: socket.socket) -> int | None:
    """The process at the other end of a Unix socket; None: nobody says. Raises OSError."""
    if not IS_LINUX:
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, _, _ = struct.unpack("3i", credentials)
    return int(pid)


def signal_at_parents_end(number: int) -> Callable[[], None]:
    """What a child calls between fork and exec to get signal `number` when the thread that started it ends.
    Elsewhere it outlives a parent that is killed."""
    if not IS_LINUX:
        return lambda: None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, number)


def limit_silence(stream: socket.socket | trio.socket.SocketType, milliseconds: int) -> None:
    """End a TCP connection whose bytes nobody acknowledges for so long. Elsewhere the kernel's own limit
    counts, which may be a quarter of an hour."""
    if IS_LINUX:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def sync_data(file: int) -> None:
    """Have the bytes of a file on the disk. Raises OSError."""
    if IS_LINUX:
        os.fdatasync(file)
    else:
        os.fsync(file)


def interface_ips() -> list[str]:
    """IPv4 addresses of this machine; elsewhere only the one from which it would reach others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return list(_ips_of_interfaces(probe) if IS_LINUX else _ip_of_the_way_out(probe, _SOMEWHERE_ELSE))


def interface_ips6() -> list[str]:
    """IPv6 addresses of this machine by which others reach it for long: none of a link alone, none that is
    temporary. Elsewhere only the one from which it would reach others."""
    if not has_ipv6():
        return []
    if IS_LINUX:
        return list(_ips6_of_interfaces())
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        return list(_ip_of_the_way_out(probe, _SOMEWHERE_ELSE_6))


def default_gateway() -> str | None:
    """IPv4 address of the router that this machine sends everything else to; None: nobody says. Raises
    OSError."""
    return gateway_of(_ROUTES.read_text()) if IS_LINUX else None


def gateway_of(routes: str) -> str | None:
    """By the text of /proc/net/route."""
    found: list[tuple[int, str]] = []
    for line in routes.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[1] == fields[7] == "00000000" and int(fields[3], 16) & _IS_GATEWAY:
            found.append((int(fields[6]), socket.inet_ntoa(bytes.fromhex(fields[2])[::-1])))
    return min(found)[1] if found else None


def has_ipv6() -> bool:
    """Whether one can listen on it."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def _ips_of_interfaces(probe: socket.socket) -> Iterator[str]:
    for _, name in socket.if_nameindex():
        request = struct.pack("256s", name.encode()[:15])
        with suppress(OSError):  # an interface without an IPv4 address
            yield socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])


def _ips6_of_interfaces() -> Iterator[str]:
    """Each line: the address in hexadecimal, then the interface's number, the length of the prefix, the scope
    and the flags in hexadecimal, and the interface's name."""
    try:
        lines = _IPV6_ADDRESSES.read_text().splitlines()
    except OSError:  # a kernel without IPv6
        return
    for line in lines:
        address, _, _, scope, flags, _ = line.split()
        if int(scope, 16) == _GLOBAL_SCOPE and not int(flags, 16) & _NOT_FOR_OTHERS:
            yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))


def _ip_of_the_way_out(probe: socket.socket, somewhere: tuple[str, int]) -> Iterator[str]:
    with suppress(OSError):  # no network
        probe.connect(somewhere)
        yield str(probe.getsockname()[0])


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """One process, not the next one to get its number."""

    pid: int
    started_ticks: int
    """0: the system does not say."""


def mark_of(pid: int) -> ProcessMark | None:
    """The running process with this pid, or None (on Linux a zombie does not run)."""
    if not IS_LINUX:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return ProcessMark(pid, 0)
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else ProcessMark(pid, int(fields[19]))


def is_alive(mark: ProcessMark) -> bool:
    return mark_of(mark.pid) == mark


def family(pid: int) -> list[ProcessMark]:
    """The process and its descendants (a daemon's workers); elsewhere only itself."""
    marks: list[ProcessMark] = []
    pending = [pid]
    while pending:
        pid = pending.pop()
        if mark := mark_of(pid):
            marks.append(mark)
        # Every thread of its own: a child belongs to the thread that started it.
        for children in Path(f"/proc/{pid}/task").glob("*/children") if IS_LINUX else ():
            with suppress(OSError):
                pending += map(int, children.read_text().split())
    return marks
