"""Runs Python code on untrusted input within a bound of time and memory."""

from __future__ import annotations

import ctypes
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from swarmllm_workers import operating_system

MEMORY_MAX: Final = 512 * 2**20
"""Bytes of address space that the code may add."""

_set_async_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exception.argtypes = (ctypes.c_ulong, ctypes.c_void_p)


class TookTooLong(Exception):
    """Raised inside the bounded code, at whatever line it runs, when its time is over."""


class _Limit:
    """Of the process's address space: it is the process's, so what other threads are about to map counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._expected_bytes = 0
        self._before: tuple[int, int] | None = None

    def set(self) -> None:
        with self._lock:
            used = operating_system.address_space_bytes()
            if used is None:
                return
            self._before = soft, hard = resource.getrlimit(resource.RLIMIT_AS)
            limit = used + MEMORY_MAX + self._expected_bytes
            resource.setrlimit(resource.RLIMIT_AS, (limit if soft < 0 else min(limit, soft), hard))

    def lift(self) -> None:
        with self._lock:
            if self._before is not None:
                resource.setrlimit(resource.RLIMIT_AS, self._before)
                self._before = None

    def expect(self, n_bytes: int) -> None:
        with self._lock:
            self._expected_bytes += n_bytes
            if self._before is not None and n_bytes > 0:
                soft, hard = resource.getrlimit(resource.RLIMIT_AS)
                most = self._before[0]
                resource.setrlimit(
                    resource.RLIMIT_AS, (soft + n_bytes if most < 0 else min(soft + n_bytes, most), hard)
                )


_limit = _Limit()


@contextmanager
def mapping(n_bytes: int) -> Iterator[None]:
    """Within the block, this thread may add so much address space, even while another thread runs bounded
    code."""
    _limit.expect(n_bytes)
    try:
        yield
    finally:
        _limit.expect(-n_bytes)


class _Alarm:
    """Interrupts the Python code of the thread that sets it."""

    def __init__(self, seconds: float) -> None:
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._is_over = False
        self._has_fired = False
        self._timer = threading.Timer(seconds, self._interrupt)
        self._timer.daemon = True
        self._timer.start()

    def _interrupt(self) -> None:
        with self._lock:
            if not self._is_over:
                self._has_fired = True
                _set_async_exception(self._thread, id(TookTooLong))

    def end(self) -> None:
        """End the interruptions. The call itself may still be interrupted."""
        self._timer.cancel()
        with self._lock:
            self._is_over = True
        if self._has_fired:
            # What has not arrived yet. Not otherwise: the interpreter (3.11) looks for an exception at every
            # call from then on, and hangs under a trace function.
            _set_async_exception(self._thread, None)


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """In one thread at a time: an alarm interrupts the code, a limit on the address space makes it fail with
    MemoryError, where the system holds it."""
    try:
        alarm = _Alarm(seconds)  # before the limit: its thread needs memory, too
        try:
            _limit.set()
            yield
        finally:
            alarm.end()
    except TookTooLong:
        raise TookTooLong(f"it ran for more than {seconds:g} s") from None
    finally:
        _limit.lift()
