"""Weights and cells in huge pages, where the system can.

A decode step reads every weight once. Mapped in pages of 4 KiB, that is a miss of the address translation
every 4 KiB: a segment took 5 to 8 % longer than the same layers inside the uncut file, which the kernel had
in pages of 2 MiB. The page cache takes the size from the process that fills it: a write of whole aligned huge
pages makes huge pages, and so does a first read through a mapping that asks for them. Nothing brings small
ones together afterwards (most kernels collapse only those of executables and of shared memory).

Cells are read likewise, and are in huge pages of the process: with eight streams a step took 5 to 8 % less
(an Intel Xeon of family 6, model 167).

Kernels and file systems without large pages for files take all this as ordinary writes and reads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from swarmllm_workers import operating_system
from swarmllm_workers.errors import CallError

HUGE_PAGE: Final = 2 * 2**20
GAP_MAX: Final = 4096
"""Bytes not written between two that are: more than that stays a hole."""
POPULATE_READ: Final = 22
"""`MADVPOPULATE_READ`, which Python does not name."""
POPULATE_WRITE: Final = 23
FIXED: Final = 0x10
NO_RESERVE: Final = 0x4000
"""Of the flags of `mmap`, too."""
_WINDOW: Final = 128 * 2**20
_FILLED_AT_ONCE: Final = 16 * 2**20
"""What waits for the kernel meanwhile waits some milliseconds."""
_MOST: Final = 0.9
_FAST_BYTES_PER_S: Final = 300e6
"""A slower disk, or memory in pieces, would keep a load waiting longer than the steps win."""
_SLOW_READ_MAX_S: Final = 2.0
"""That may be spent on a file all the same: a disk that is still writing is slow for a moment."""


class PageWriter:
    """Writes a file from front to back in whole aligned pages; what is left out stays a hole."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._page = bytearray(HUGE_PAGE)
        self._view = memoryview(self._page)
        self._start = self._end = 0
        """What is waiting to be written, as offsets in the file: within one page."""

    def __enter__(self) -> PageWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.flush()

    def room(self, offset: int) -> memoryview:
        """The buffer for the bytes of the file from `offset` to the end of the page. `filled` has to
        follow."""
        if not self._end <= offset <= self._end + GAP_MAX:
            self.flush()
            self._start = self._end = offset
        while self._end < offset:  # a gap is written too, or the pages beside it were not whole
            n_zeros = min(offset - self._end, HUGE_PAGE - self._end % HUGE_PAGE)
            self._free()[:n_zeros] = bytes(n_zeros)
            self._end += n_zeros
        return self._free()

    def _free(self) -> memoryview:
        if self._end > self._start and self._end % HUGE_PAGE == 0:
            self.flush()
        return self._view[self._end % HUGE_PAGE :]

    def filled(self, n_bytes: int) -> None:
        """Mark the first bytes of the buffer from `room` as written."""
        self._end += n_bytes

    def write(self, offset: int, data: bytes) -> None:
        left = memoryview(data)
        while left:
            room = self.room(offset)[: len(left)]
            n_bytes = len(room)
            room[:] = left[:n_bytes]
            self.filled(n_bytes)
            left, offset = left[n_bytes:], offset + n_bytes

    def flush(self) -> None:
        first = self._start % HUGE_PAGE
        left = self._view[first : first + self._end - self._start]
        while left:
            n_bytes = os.pwrite(self._file, left, self._start)
            left, self._start = left[n_bytes:], self._start + n_bytes
        self._start = self._end


def read_in(path: Path, on_read: Callable[[int], None] = lambda _: None) -> None:
    """Read a file that is about to be mapped into the page cache, as `read_anew` does. `on_read`: called with
    bytes, and may raise."""
    with suppress(OSError):
        if (size := path.stat().st_size) >= HUGE_PAGE and operating_system.IS_LINUX:
            read_anew(path, [(0, size)], on_read)


def read_anew(path: Path, runs: Iterable[tuple[int, int]], on_read: Callable[[int], None]) -> None:
    """Bring the bytes [start, end) of each run into the page cache, in huge pages also where they are there
    in small ones: these are read from the disk again, unless that is slow or does not help, as where somebody
    has them mapped. `on_read`: called with bytes. What goes wrong here, libllama meets again and reports."""
    with suppress(OSError), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        drops, spent_s = operating_system.IS_LINUX, 0.0
        for start, end in runs:
            for at in range(start // HUGE_PAGE * HUGE_PAGE, min(end, size), _WINDOW):
                n_bytes = min(at + _WINDOW, -(-end // HUGE_PAGE) * HUGE_PAGE, size) - at
                n_huge = _in_huge_pages(file.fileno(), at, n_bytes)
                if drops and n_huge < n_bytes // HUGE_PAGE * HUGE_PAGE * _MOST:
                    began_s = time.monotonic()
                    os.posix_fadvise(file.fileno(), at, n_bytes, os.POSIX_FADV_DONTNEED)
                    n_after = _in_huge_pages(file.fileno(), at, n_bytes)
                    taken_s = time.monotonic() - began_s
                    spent_s += taken_s
                    is_fast = n_bytes > _FAST_BYTES_PER_S * taken_s or spent_s < _SLOW_READ_MAX_S
                    drops = is_fast and n_after > n_huge
                on_read(min(at + n_bytes, end) - max(at, start))


def _in_huge_pages(file: int, at: int, size: int) -> int:
    """Bytes of the file from a boundary of huge pages on that lie in such, after all were read."""
    if not operating_system.IS_LINUX:
        return 0
    reserved = size + HUGE_PAGE
    base = libc.mmap(None, reserved, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE, -1, 0)
    if base in (None, MAP_FAILED):
        return 0
    try:
        address = -(-base // HUGE_PAGE) * HUGE_PAGE
        if libc.mmap(address, size, mmap.PROT_READ, mmap.MAP_SHARED | FIXED, file, at) != address:
            return 0
        want_huge_pages(address, size)
        populate(address, size)
        return operating_system.bytes_in_huge_pages(address)
    finally:
        libc.munmap(base, reserved)


def want_huge_pages(address: int, size: int) -> None:
    """Ask for huge pages for this mapping. On systems other than Linux this does nothing."""
    if operating_system.IS_LINUX:
        libc.madvise(address, size, mmap.MADV_HUGEPAGE)


def populate(address: int, size: int) -> None:
    """Enter these pages into the page table. If the kernel cannot, they are read at their first use."""
    if operating_system.IS_LINUX:
        libc.madvise(address, size, POPULATE_READ)


def fill_in(address: int, size: int) -> None:
    """Have memory behind these pages of this process, which are zero until somebody writes there, in huge
    pages for as long as the kernel has some at hand or makes them quickly. If it cannot (Linux before 5.14),
    they get it at their first use."""
    if operating_system.IS_LINUX:
        end = address + size
        want_huge_pages(address, size)
        for at in range(address, end, _FILLED_AT_ONCE):
            n_bytes = min(_FILLED_AT_ONCE, end - at)
            began_s = time.monotonic()
            if libc.madvise(at, n_bytes, POPULATE_WRITE) != 0:
                return
            if n_bytes == _FILLED_AT_ONCE < _FAST_BYTES_PER_S * (time.monotonic() - began_s):
                libc.madvise(at, end - at, mmap.MADV_NOHUGEPAGE)


def let_go(address: int, size: int) -> None:
    """Remove these pages of a file from the page table. Reading them brings them back."""
    if operating_system.IS_LINUX and size > 0:
        libc.madvise(address, size, mmap.MADV_DONTNEED)


libc: Final = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
MAP_FAILED: Final = ctypes.c_void_p(-1).value


def map_or_fail(address: int | None, size: int, protection: int, kind: int, file: int) -> int:
    """As `mmap` of C, from the beginning of a file. Raises CallError out_of_memory."""
    found = libc.mmap(address, size, protection, kind, file, 0)
    if found in (None, MAP_FAILED):
        raise CallError("out_of_memory", f"cannot map {size} bytes: {os.strerror(ctypes.get_errno())}")
    return int(found)
