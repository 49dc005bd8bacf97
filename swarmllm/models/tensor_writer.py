"""One tensor on its way into a container (see `store`): written front to back, hashed on the way, continued
where an earlier attempt was interrupted. Blocking."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarmllm.errors import BadModel, StoreFull
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.hashing import CHUNK_BYTES, READ_BYTES, TensorHasher, is_chunk
from swarmllm.models.manifest import TensorEntry
from swarmllm.operating_system import sync_data

SAVE_BYTES = 16 * 2**20
"""A kill costs at most this much of each tensor on its way."""

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class TensorWriter:
    """One tensor on its way into a container, front to back."""

    def __init__(
        self,
        catalogue: Catalogue,
        entry: CatalogueEntry,
        tensor: TensorEntry,
        n_bytes: int,
        chunk_list: bytes | None = None,
    ) -> None:
        """`chunk_list`: checked before; with it whole chunks are written only after they have been checked
        (`append_chunk`), and what is there is believed as far as it is right."""
        self.tensor = tensor
        self.n_bytes = n_bytes
        """Written so far."""
        self._catalogue = catalogue
        self._model_id = entry.model_id
        self._path = entry.path
        self._saved_bytes = n_bytes
        self._chunk_list = chunk_list
        self._hasher = TensorHasher()
        with disk_faults(self._path):
            self._file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._look_at(n_bytes)
            except BaseException:
                self.close()
                raise

    def _look_at(self, n_bytes: int) -> None:
        self.n_bytes = 0
        for data in pieces(self._file, self.tensor.offset, n_bytes, CHUNK_BYTES):
            if self._chunk_list is not None and not is_chunk(self._chunk_list, self.n_bytes, data):
                break
            self._hasher.update(data)
            self.n_bytes += len(data)

    def append_chunk(self, data: bytes | memoryview) -> bool:
        """Whether that is the next chunk; only then it is written. Raises StoreFull."""
        assert self._chunk_list is not None
        if not is_chunk(self._chunk_list, self.n_bytes, data):
            return False
        self.append(data)
        return True

    def append(self, data: bytes | memoryview) -> None:
        """Raises StoreFull; ValueError beyond the tensor's end."""
        if self.n_bytes + len(data) > self.tensor.size_bytes:
            raise ValueError(f"{self.tensor.name} has {self.tensor.size_bytes} bytes")
        with disk_faults(self._path):
            left = memoryview(data)
            while left:
                n = os.pwrite(self._file, left, self.tensor.offset + self.n_bytes)
                self._hasher.update(left[:n])
                self.n_bytes += n
                left = left[n:]
        if self.n_bytes - self._saved_bytes >= SAVE_BYTES:
            self.save()

    def save(self) -> None:
        """Let a later attempt begin here."""
        if self.n_bytes != self._saved_bytes:
            self._record(complete=False)

    def finish(self) -> bool:
        """Whether the whole tensor is there and right; if it is not, it begins anew."""
        if self.n_bytes == self.tensor.size_bytes and self._hasher.hexdigest() == self.tensor.blake3:
            self._catalogue.keep_chunk_lists(self._model_id, {self.tensor.name: self._hasher.chunk_list()})
            self._record(complete=True)
            return True
        self.restart()
        return False

    def restart(self) -> None:
        self.n_bytes = 0
        self._hasher = TensorHasher()
        self.save()

    def close(self) -> None:
        os.close(self._file)

    def _record(self, *, complete: bool) -> None:
        with disk_faults(self._path):
            sync_data(self._file)
        with self._catalogue.database() as database:
            database.execute(
                "INSERT OR REPLACE INTO tensors VALUES (?, ?, ?, ?)",
                (self._model_id, self.tensor.name, self.n_bytes, int(complete)),
            )
        self._saved_bytes = self.n_bytes


def pieces(file: int, offset: int, size_bytes: int, at_once: int = READ_BYTES) -> Iterator[bytes]:
    while size_bytes:
        data = os.pread(file, min(at_once, size_bytes), offset)
        if not data:
            raise BadModel("the file is shorter than it should be")
        yield data
        offset += len(data)
        size_bytes -= len(data)


@contextmanager
def disk_faults(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise StoreFull(
                f"{path} cannot be written: {error.strerror}; what is there already is kept"
            ) from error
        raise BadModel(f"{path} cannot be used: {error.strerror or error}") from error
