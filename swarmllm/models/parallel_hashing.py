"""Hashes the tensors of open files on several threads: BLAKE3 and reading both run without Python's lock.

The threads take pieces in the order of the file, one after the other, so that a disk is read front to back.
The calling thread is one of them; it alone reports progress, because callers give up by raising there.
Blocking.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from swarmllm.errors import BadModel
from swarmllm.models.tensor_digest import CHUNK_BYTES, DIGEST_BYTES, chunk_digest, chunk_list_bytes

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all). What it raises ends the work and reaches the caller."""

READ_BYTES = 4 * 2**20
"""Some chunks at once, few enough to stay in the cache."""
MAX_THREADS = 4
"""More only wait for the disk, or take the processor from running requests."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    file: int
    offset: int
    size_bytes: int
    chunk_list: bytearray


class ParallelHashing:
    """Run it once."""

    def __init__(self, n_threads: int | None = None) -> None:
        """`n_threads` None: as many as there are processors, at most MAX_THREADS."""
        self._n_threads = n_threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._tensors: dict[str, _Tensor] = {}
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._failure: BaseException | None = None

    def add(self, name: str, file: int, offset: int, size_bytes: int) -> None:
        """`file`: a descriptor."""
        self._tensors[name] = _Tensor(file, offset, size_bytes, bytearray(chunk_list_bytes(size_bytes)))

    def run(self, progress: Progress) -> dict[str, bytes]:
        """The chunk list of each tensor, by name. Raises BadModel where a file ends early, OSError, and
        what `progress` raises."""
        self._pieces = self._all_pieces()
        self._total_bytes = sum(tensor.size_bytes for tensor in self._tensors.values())
        n_helpers = min(self._n_threads - 1, self._total_bytes // READ_BYTES)
        helpers = [threading.Thread(target=self._help, name="hashing") for _ in range(n_helpers)]
        for helper in helpers:
            helper.start()
        try:
            self._take_pieces(progress)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            for helper in helpers:
                helper.join()
        if self._failure is not None:
            raise self._failure
        progress(self._total_bytes, self._total_bytes)
        return {name: bytes(tensor.chunk_list) for name, tensor in self._tensors.items()}

    def _all_pieces(self) -> Iterator[tuple[_Tensor, int]]:
        for tensor in self._tensors.values():
            for start in range(0, max(1, tensor.size_bytes), READ_BYTES):
                yield tensor, start

    def _help(self) -> None:
        try:
            self._take_pieces(None)
        except BaseException as error:  # reaches the caller in its own thread
            self._failure = error

    def _take_pieces(self, progress: Progress | None) -> None:
        buffer = memoryview(bytearray(READ_BYTES))
        while self._failure is None:
            with self._lock:
                piece = next(self._pieces, None)
            if piece is None:
                return
            tensor, start = piece
            n_bytes = min(READ_BYTES, tensor.size_bytes - start)
            _hash_piece(tensor, start, buffer[:n_bytes])
            with self._lock:
                self._done_bytes += n_bytes
                done_bytes = self._done_bytes
            if progress is not None and done_bytes < self._total_bytes:
                progress(done_bytes, self._total_bytes)


def _hash_piece(tensor: _Tensor, start: int, buffer: memoryview) -> None:
    n_read = 0
    while n_read < len(buffer):
        n = os.preadv(tensor.file, [buffer[n_read:]], tensor.offset + start + n_read)
        if not n:
            raise BadModel("the file shrank while it was read")
        n_read += n
    for at in range(0, max(1, len(buffer)), CHUNK_BYTES):
        place = (start + at) // CHUNK_BYTES * DIGEST_BYTES
        tensor.chunk_list[place : place + DIGEST_BYTES] = chunk_digest(buffer[at : at + CHUNK_BYTES])
