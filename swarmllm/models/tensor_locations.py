"""Finds the tensors of a model: in its file, in one of several, or, of a container, in a segment file to
which a worker has moved them (see `swarmllm_proto.segment_names`).

A worker may move them at any moment, so bytes count only if their place is the same after reading as before:
a segment file has its name before the container gets its hole, and loses it after the container has the
bytes again. Blocking.
"""

from __future__ import annotations

import os
from pathlib import Path

from swarmllm.errors import BadModel
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.gguf_header import read_header
from swarmllm.models.manifest import TensorEntry
from swarmllm.models.model_files import FileState, open_model
from swarmllm_proto.segment_names import FOLDER, parse_segment_name

_ATTEMPTS = 8
"""More moves than that in the time of one read do not happen."""


class TensorLocations:
    def __init__(self, entry: CatalogueEntry, *, only_unchanged: bool = False) -> None:
        """`only_unchanged`: of a user's file nothing is read once it is not what was hashed."""
        self._path = entry.path
        self._only_unchanged = only_unchanged and not entry.is_stored
        self._states = {Path(part.path): part.state for part in entry.parts} or {entry.path: entry.state}
        self._in_parts = {
            tensor: (Path(part.path), offset)
            for part in entry.parts
            for tensor, offset in part.offsets.items()
        }
        self._joined_start = b""
        """Of parts, the header of the joined file, once it was asked for."""
        self._n_layers = entry.manifest.n_layers
        self._folder = entry.path.parent / FOLDER if entry.is_stored else None
        self._listing: tuple[str, ...] = ()
        self._moved: dict[str, tuple[Path, int]] = {}

    def of(self, tensor: TensorEntry) -> tuple[Path, int]:
        """The file, and the offset in it. Raises BadModel."""
        self._look()
        if self._in_parts:
            return self._in_parts[tensor.name]
        return self._moved.get(tensor.name, (self._path, tensor.offset))

    def files(self) -> dict[Path, set[str]]:
        """The segment files, each with the names of the tensors in it."""
        self._look()
        files: dict[Path, set[str]] = {}
        for name, (path, _) in self._moved.items():
            files.setdefault(path, set()).add(name)
        return files

    def read(self, tensor: TensorEntry, offset: int, n_bytes: int) -> bytes:
        """Bytes of the tensor's data, `n_bytes` unless the file ends before. Raises BadModel, OSError."""
        for _ in range(_ATTEMPTS):
            path, start = place = self.of(tensor)
            try:
                data = self._read(path, start + offset, n_bytes)
            except FileNotFoundError:
                if path == self._path:
                    raise
                continue
            if self.of(tensor) == place:
                return data
        raise BadModel(f"the layers of {self._path} do not stay in one place")

    def read_container(self, offset: int, n_bytes: int) -> bytes:
        """Bytes that never move: of the header. Raises as `read` does."""
        if not self._in_parts:
            return self._read(self._path, offset, n_bytes)
        if not self._joined_start:
            with open_model(self._path) as files:
                self._joined_start = files.start
        for path in self._states if self._only_unchanged else ():
            self._refuse_changed(path, path.stat())
        return self._joined_start[offset : offset + n_bytes]

    def _read(self, path: Path, start: int, n_bytes: int) -> bytes:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if self._only_unchanged:
                self._refuse_changed(path, os.fstat(file))
            return os.pread(file, n_bytes, start)
        finally:
            os.close(file)

    def _refuse_changed(self, path: Path, status: os.stat_result) -> None:
        if FileState.of(status) != self._states[path]:
            raise BadModel(f"{path} has changed since it was added")

    def _look(self) -> None:
        if self._folder is None:
            return
        try:
            listing = tuple(sorted(path.name for path in self._folder.iterdir()))
        except FileNotFoundError:
            listing = ()
        if listing == self._listing:
            return
        moved: dict[str, tuple[Path, int]] = {}
        for file_name in listing:
            name = parse_segment_name(file_name)
            if name is None:
                continue
            path = self._folder / file_name
            try:
                with path.open("rb") as file:
                    header = read_header(file)
            except FileNotFoundError:
                # Gone since; the next look tells.
                return
            for tensor in header.tensors:
                whose = name.moved(tensor.name, self._n_layers)
                if whose is not None:
                    moved.setdefault(whose, (path, tensor.offset))
        self._listing, self._moved = listing, moved
