"""Matrices in ggml's own order of rows ("repacked"), each once for all parts of a file that have it.

ggml gives every model that it loads a rearranged copy of such matrices. Two parts of one file that overlap,
or a part and the segment that it was cut from, would have two. So the copy belongs to this module: a tensor
of each part gets its address. The memory that libllama has reserved for the tensor is never touched.

`keeping` is for the time between the end of one segment and the beginning of another over the same layers:
nothing is given back within it, so that nothing has to be arranged again.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

from swarmllm_workers.engine.huge_pages import HUGE_PAGE, NO_RESERVE, libc, map_or_fail, want_huge_pages


class MatrixKey(NamedTuple):
    """The place of a matrix in a file."""

    device: int
    inode: int
    mtime_ns: int
    offset: int
    size_bytes: int


@dataclass
class _Matrix:
    base: int
    reserved: int
    address: int
    n_users: int = 0


class ArrangedMatrices:
    """The rearranged matrices of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._matrices: dict[MatrixKey, _Matrix] = {}
        self._n_keeping = 0

    @property
    def size_bytes(self) -> int:
        with self._lock:
            return sum(key.size_bytes for key in self._matrices)

    def take(self, key: MatrixKey, arrange: Callable[[int], None]) -> int:
        """Add a user of the matrix and return its address. For the first user `arrange` fills the memory at
        an address. Raises CallError out_of_memory."""
        with self._lock:
            matrix = self._matrices.get(key)
            if matrix is None:
                matrix = _new(key.size_bytes)
                try:
                    arrange(matrix.address)
                except BaseException:
                    libc.munmap(matrix.base, matrix.reserved)
                    raise
                self._matrices[key] = matrix
            matrix.n_users += 1
            return matrix.address

    def give_back(self, key: MatrixKey) -> None:
        with self._lock:
            self._matrices[key].n_users -= 1
            self._sweep()

    @contextmanager
    def keeping(self) -> Iterator[None]:
        with self._lock:
            self._n_keeping += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_keeping -= 1
                self._sweep()

    def _sweep(self) -> None:
        if self._n_keeping:
            return
        for key in [key for key, matrix in self._matrices.items() if not matrix.n_users]:
            matrix = self._matrices.pop(key)
            libc.munmap(matrix.base, matrix.reserved)


def _new(size_bytes: int) -> _Matrix:
    """In huge pages, but for what does not fill one."""
    reserved = size_bytes + HUGE_PAGE
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    base = map_or_fail(None, reserved, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1)
    address = -(-base // HUGE_PAGE) * HUGE_PAGE
    want_huge_pages(address, size_bytes // HUGE_PAGE * HUGE_PAGE)
    return _Matrix(base, reserved, address)


arranged: Final = ArrangedMatrices()
