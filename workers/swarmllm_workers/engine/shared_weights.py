"""Load layers of a file that is already there as a model of their own, without a copy of their weights.

libllama loads whole files only, but what it needs of a file until the weights are read is the header. So a
part of a file is loaded from a file in memory that has a header and nothing behind it (a `Stub`), and then
each tensor is told where its bytes lie in a mapping of the file that holds them. All parts of one file, and
the file itself where it is loaded, too, have the same pages of the page cache.

1. The stub has its full size when libllama asks for it, and is cut to its header before libllama maps it (it
   says in between what it has read): mapping would fill all pages. Where libllama says nothing of the kind,
   it takes a second longer.
2. Before libllama reads weights, the pages behind the header become pages of zeros.
3. After that, tensors in the stub get the address of their bytes. Those that ggml wants in another order get
   memory that all parts with the same tensor have (`arranged_weights.py`), and their bytes are arranged there
   by the first of them. Until then libllama is kept from filling them (`left_weights.c`). Tensors in other
   buffers of libllama's are given their bytes: these are copies.

This rests on an internal function of libllama. Where it is missing, `is_supported` is False.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from swarmllm_workers import operating_system
from swarmllm_workers.engine.arranged_weights import MatrixKey, arranged
from swarmllm_workers.engine.huge_pages import (
    FIXED,
    HUGE_PAGE,
    NO_RESERVE,
    let_go,
    libc,
    map_or_fail,
    populate,
    read_anew,
    want_huge_pages,
)
from swarmllm_workers.errors import CallError
from swarmllm_workers.kernels import small_batches
from swarmllm_workers.kernels.interposing import mapped_libraries

_TENSOR_MAP: Final = "_Z29llama_internal_get_tensor_mapB5cxx11PK11llama_model"
_ELEMENT_SIZE: Final = 40
"""Of a `std::pair<std::string, ggml_tensor *>`, the pointer last."""
_BUFFER_AT: Final = 8
"""Of the pointer to its buffer in a `ggml_tensor`, behind an enum."""
_ARRANGED: Final = b"CPU_REPACK"
"""The buffer of matrices in another order."""
_IS_HEADER_READ: Final = b"loaded meta data"
_PAGE: Final = mmap.PAGESIZE


class FilePlace(NamedTuple):
    """A range of bytes of a file."""

    path: Path
    offset: int
    size_bytes: int


class _Functions(NamedTuple):
    tensor_map: Callable[[int], int]
    """Of a model, the address of a vector of names and tensors."""
    ggml: ctypes.CDLL
    data_at: int
    """Of the address of its bytes in a `ggml_tensor`."""


@cache
def _functions() -> _Functions | None:
    for libllama in mapped_libraries("libllama"):
        for ggml in mapped_libraries("libggml-base"):
            tensor_map = getattr(libllama, _TENSOR_MAP, None)
            if tensor_map is None:
                continue
            tensor_map.restype, tensor_map.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
            ggml.ggml_get_name.restype, ggml.ggml_get_name.argtypes = ctypes.c_char_p, (ctypes.c_void_p,)
            ggml.ggml_get_data.restype, ggml.ggml_get_data.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
            ggml.ggml_nbytes.restype, ggml.ggml_nbytes.argtypes = ctypes.c_size_t, (ctypes.c_void_p,)
            ggml.ggml_backend_buffer_name.restype = ctypes.c_char_p
            ggml.ggml_backend_buffer_name.argtypes = (ctypes.c_void_p,)
            ggml.ggml_backend_tensor_set.restype = None
            ggml.ggml_backend_tensor_set.argtypes = (
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_size_t,
            )
            # A structure in which each word is its own offset: what is read of it is where it was read.
            words = (ctypes.c_uint64 * 40)(*range(8, 8 * 41, 8))
            return _Functions(tensor_map, ggml, ggml.ggml_get_data(ctypes.addressof(words)) - 8)
    return None


def is_supported() -> bool:
    """Whether this libllama can do it on this system."""
    return operating_system.IS_LINUX and _functions() is not None


def _tensors(functions: _Functions, handle: int) -> Iterator[int]:
    """Addresses of all tensors of a loaded model; two may have one name."""
    vector = (ctypes.c_void_p * 2).from_address(functions.tensor_map(handle))
    for element in range(vector[0] or 0, vector[1] or 0, _ELEMENT_SIZE):
        tensor = ctypes.c_void_p.from_address(element + _ELEMENT_SIZE - 8).value
        if tensor:
            yield tensor


def _buffer_of(functions: _Functions, tensor: int) -> bytes:
    buffer = ctypes.c_void_p.from_address(tensor + _BUFFER_AT).value
    return bytes(functions.ggml.ggml_backend_buffer_name(buffer)) if buffer else b""


def private_bytes(handle: int) -> int | None:
    """The bytes of a loaded model's weights that do not lie in the mapped file. None: unknown."""
    functions = _functions()
    if functions is None:
        return None
    total = 0
    for tensor in _tensors(functions, handle):
        if _buffer_of(functions, tensor) != b"CPU_Mapped":
            total += functions.ggml.ggml_nbytes(tensor)
    return total


class _MappedFile:
    """A file in memory, read-only and at a boundary of huge pages."""

    def __init__(self, path: Path) -> None:
        self.n_users = 0
        self._n_uses: Counter[tuple[int, int]] = Counter()
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            self._size, self.mtime_ns = status.st_size, status.st_mtime_ns
            self._reserved = self._size + HUGE_PAGE
            kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
            self._base = map_or_fail(None, self._reserved, 0, kind, -1)
            self.address = -(-self._base // HUGE_PAGE) * HUGE_PAGE
            map_or_fail(self.address, self._size, mmap.PROT_READ, mmap.MAP_SHARED | FIXED, file.fileno())
        want_huge_pages(self.address, self._size)

    def read_in(self, offset: int, size: int) -> None:
        """Have these pages in the page table. Where the kernel cannot, their first use has them read."""
        start = offset // _PAGE * _PAGE
        populate(self.address + start, offset + size - start)

    def use(self, place: FilePlace) -> None:
        """Raises CallError bad_model."""
        self.check(place)
        self._n_uses[place.offset, place.size_bytes] += 1

    def leave(self, place: FilePlace) -> None:
        """What nobody uses any more leaves this process; the page cache keeps it while there is room."""
        key = place.offset, place.size_bytes
        self._n_uses[key] -= 1
        if not self._n_uses[key]:
            del self._n_uses[key]
            self.let_go(place)

    def let_go(self, place: FilePlace) -> None:
        """Take these pages out of this process's page table; reading them brings them back."""
        start = -(-place.offset // _PAGE) * _PAGE
        let_go(self.address + start, (place.offset + place.size_bytes) // _PAGE * _PAGE - start)

    def check(self, place: FilePlace) -> None:
        if not 0 <= place.offset <= place.offset + place.size_bytes <= self._size:
            raise CallError("bad_model", f"{place.path.name} is shorter than its tensors", "path")

    def close(self) -> None:
        libc.munmap(self._base, self._reserved)


class _MappedFiles:
    """One mapping of each file, for as long as somebody uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[tuple[int, int], _MappedFile] = {}

    def take(self, path: Path) -> tuple[tuple[int, int], _MappedFile]:
        status = path.stat()
        key = status.st_dev, status.st_ino
        with self._lock:
            if key not in self._files:
                self._files[key] = _MappedFile(path)
            self._files[key].n_users += 1
            return key, self._files[key]

    def give_back(self, key: tuple[int, int]) -> None:
        with self._lock:
            file = self._files[key]
            file.n_users -= 1
            if not file.n_users:
                del self._files[key]
                file.close()


_files: Final = _MappedFiles()


class _Loading(threading.local):
    """The stub that this thread is loading."""

    stub: Stub | None = None


_loading: Final = _Loading()


def on_log(text: bytes) -> None:
    """Read a log line of libllama, in the thread that loads a model."""
    if _loading.stub is not None and _IS_HEADER_READ in text:
        _loading.stub.header_is_read()


@dataclass(frozen=True)
class Part:
    """What is needed to load some layers of a file: a header, and where the bytes of its tensors lie."""

    header: bytes
    size_bytes: int
    """Of the file that would begin with this header."""
    places: Mapping[str, FilePlace]
    """By the names in the header; a tensor that is not here has zeros, which nobody reads."""

    @property
    def mapped_bytes(self) -> int:
        """Address space that loading takes, at most."""
        files = {place.path for place in self.places.values()}
        arranged_bytes = sum(place.size_bytes + HUGE_PAGE for place in self.places.values())
        return self.size_bytes + arranged_bytes + sum(path.stat().st_size + HUGE_PAGE for path in files)

    def read_in(self, on_progress: Callable[[float], None] | None = None) -> None:
        """Bring the bytes into the page cache, in huge pages where that can be. `on_progress` gets the
        fraction that is there, and may raise Stopped."""
        runs: dict[Path, list[tuple[int, int]]] = {}
        for path, offset, size_bytes in sorted(self.places.values()):
            known = runs.setdefault(path, [])
            if known and offset <= known[-1][1] + HUGE_PAGE:
                known[-1] = known[-1][0], max(known[-1][1], offset + size_bytes)
            else:
                known.append((offset, offset + size_bytes))
        total = sum(end - start for each in runs.values() for start, end in each)
        done = 0

        def on_read(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            if on_progress is not None:
                on_progress(done / total)

        for path, each in runs.items():
            read_anew(path, each, on_read)


@contextmanager
def header_file(part: Part) -> Iterator[Path]:
    """A file of the part's size with its header and nothing else; on Linux."""
    file = os.memfd_create("header", os.MFD_CLOEXEC)
    try:
        os.pwrite(file, part.header, 0)
        os.ftruncate(file, part.size_bytes)
        yield Path(f"/proc/self/fd/{file}")
    finally:
        os.close(file)


class Stub:
    """One loading of a part, and what has to stay as long as its model. Raises CallError bad_model or
    out_of_memory, also where the files of the part are gone."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._address = 0
        self._files: dict[Path, tuple[tuple[int, int], _MappedFile]] = {}
        self._used: list[FilePlace] = []
        self._arranged: list[MatrixKey] = []
        self.own_bytes = 0
        """Of the weights, those that are copies of this model alone, once it is filled."""
        self.private_bytes = 0
        """Those that are no pages of a file."""
        self._file = os.memfd_create("layers", os.MFD_CLOEXEC)
        try:
            for place in part.places.values():
                if place.path not in self._files:
                    self._files[place.path] = _files.take(place.path)
                self._files[place.path][1].use(place)
                self._used.append(place)
            os.pwrite(self._file, part.header, 0)
            os.ftruncate(self._file, part.size_bytes)
        except OSError as error:
            self.close()
            raise CallError("bad_model", f"cannot map the layers' files: {error.strerror}", "path") from None
        except CallError:
            self.close()
            raise

    @property
    def path(self) -> Path:
        return Path(f"/proc/self/fd/{self._file}")

    def __enter__(self) -> Stub:
        """This thread loads it now."""
        _loading.stub = self
        return self

    def __exit__(self, *_: object) -> None:
        _loading.stub = None
        small_batches.leave_weights(0, 0)

    def header_is_read(self) -> None:
        if not self._address:
            os.ftruncate(self._file, len(self._part.header))

    def weights_are_next(self) -> None:
        """Called with each progress; counts the first time. Raises CallError."""
        if self._address:
            return
        self._address = self._mapped_at()
        behind = -(-len(self._part.header) // _PAGE) * _PAGE
        size = -(-self._part.size_bytes // _PAGE) * _PAGE - behind
        if size > 0:
            kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED | NO_RESERVE
            map_or_fail(self._address + behind, size, mmap.PROT_READ, kind, -1)
        small_batches.leave_weights(self._address, self._address + self._part.size_bytes)

    def _mapped_at(self) -> int:
        inode = os.fstat(self._file).st_ino
        for fields in operating_system.mappings():
            if len(fields) == 6 and int(fields[4]) == inode and fields[5].startswith("/memfd:layers"):
                return int(fields[0].partition("-")[0], 16)
        raise CallError("bad_model", "libllama does not map the layers", "path")

    def fill(self, handle: int) -> None:
        """Give the model that was loaded its weights. Raises CallError."""
        functions = _functions()
        assert functions is not None  # is_supported
        small_batches.leave_weights(0, 0)
        end = self._address + self._part.size_bytes
        for tensor in _tensors(functions, handle):
            place = self._part.places.get(functions.ggml.ggml_get_name(tensor).decode())
            if place is None:
                continue
            if functions.ggml.ggml_nbytes(tensor) != place.size_bytes:
                raise CallError("bad_model", "libllama reads a tensor otherwise than its file says", "path")
            file = self._files[place.path][1]
            address = file.address + place.offset
            data = ctypes.c_void_p.from_address(tensor + functions.data_at)
            if self._address <= (data.value or 0) < end:
                file.read_in(place.offset, place.size_bytes)
                data.value = address
                continue
            self.private_bytes += place.size_bytes
            if _buffer_of(functions, tensor) == _ARRANGED:
                self._arrange(functions, tensor, data, place)
            else:
                functions.ggml.ggml_backend_tensor_set(tensor, address, 0, place.size_bytes)
                self.own_bytes += place.size_bytes
        os.close(self._file)
        self._file = -1

    def _arrange(self, functions: _Functions, tensor: int, data: ctypes.c_void_p, place: FilePlace) -> None:
        identity, file = self._files[place.path]
        key = MatrixKey(*identity, file.mtime_ns, place.offset, place.size_bytes)

        def arrange(address: int) -> None:
            data.value = address
            source = file.address + place.offset
            functions.ggml.ggml_backend_tensor_set(tensor, source, 0, place.size_bytes)
            file.let_go(place)

        data.value = arranged.take(key, arrange)
        self._arranged.append(key)

    def close(self) -> None:
        """After the model, if there was one."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        while self._arranged:
            arranged.give_back(self._arranged.pop())
        while self._used:
            place = self._used.pop()
            self._files[place.path][1].leave(place)
        while self._files:
            _, (key, _file) = self._files.popitem()
            _files.give_back(key)
