"""Segment files that hold the only copy of a container's layers.

A container belongs to the daemon's store, so what a segment file holds need not lie in it as well
(`swarmllm_proto.segment_names`). Cutting moves: the segment file is written whole, renamed, and only then
are holes punched into the container. A range that overlaps files which are no longer used first gets what
it needs from them; what remains of those goes back to the container before they are removed. At every
moment each byte is somewhere complete, and readers look for segment files first, so a kill between any two
steps costs disk space until the next settling and nothing else.

A container that a segment has mapped (nearly all run straight from it) must not change: the engine settles
only while there is none.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swarmllm_proto.architectures import Architecture
from swarmllm_proto.segment_names import LAYOUT_VERSION, SegmentName, parse_segment_name
from swarmllm_workers.engine import segment_file
from swarmllm_workers.engine.ranges import Range
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import GgufFile, TensorInfo

log = logging.getLogger(__name__)

_PUNCH_HOLE_KEEP_SIZE: Final = 0x02 | 0x01
_COPY_BYTES: Final = 16 * 2**20


@dataclass(frozen=True)
class _SegmentFile:
    name: SegmentName
    path: Path
    offsets: dict[str, int]
    """Of what has moved here, by the model's names."""


class ContainerSegments:
    """Offers the same methods as `SegmentCache`."""

    def __init__(self, folder: Path, source: GgufFile, n_layers: int) -> None:
        self._folder = folder
        self._source = source
        self._n_layers = n_layers
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise CallError("bad_message", f"{folder}: {error.strerror}", "cache_dir") from error

    def ensure(
        self, architecture: Architecture, start: int, end: int, progress: segment_file.Progress | None = None
    ) -> Path:
        """The segment file of [start, end), cut now where it is missing. Raises CallError as `cut` does, and
        bad_model where bytes are missing that should be in the container."""
        path = self._folder / str(SegmentName(LAYOUT_VERSION, start, end))
        if not path.exists():
            places = self.places(start, end)
            segment_file.cut(self._source, architecture, start, end, path, progress, places)
            _sync(path)
            _sync(self._folder)
        return path

    def places(self, start: int, end: int) -> dict[str, tuple[Path, int]]:
        """Files and offsets of the tensors that have moved. Raises CallError bad_model where what
        [start, end) needs is missing."""
        places = {tensor: (file.path, at) for file in self._files() for tensor, at in file.offsets.items()}
        self._refuse_holes(SegmentName(LAYOUT_VERSION, start, end), places)
        return places

    def whole(self) -> Path:
        """The path of the container, which then has every layer."""
        files = self._files()
        if files:
            self._dissolve(files, [])
        return self._source.path

    def settle(self, running: Collection[Range]) -> None:
        """Move every layer to one place. `running`: the ranges whose files are in use. A failure costs disk
        space only."""
        kept: list[_SegmentFile] = []
        files = self._files()
        for file in sorted(files, key=lambda file: (file.name.start, file.name.end) not in running):
            is_current = file.name.layout == LAYOUT_VERSION
            if is_current and not any(_overlap(file.name, other.name) for other in kept):
                kept.append(file)
        try:
            gone = [file for file in files if file not in kept]
            if gone:
                self._dissolve(gone, kept)
            self._punch(kept)
        except (CallError, OSError) as error:
            log.warning(
                "some layers of %s stay on the disk twice: %s",
                self._source.path,
                getattr(error, "strerror", None) or error,
            )

    def _files(self) -> list[_SegmentFile]:
        found = []
        for path in sorted(self._folder.iterdir()):
            name = parse_segment_name(path.name)
            if name is not None:
                inside = GgufFile(path)
                named = {name.moved(tensor, self._n_layers): info for tensor, info in inside.tensors.items()}
                offsets = {
                    tensor: info.offset
                    for tensor, info in named.items()
                    if tensor in self._source.tensors
                    and info.size_bytes == self._source.tensors[tensor].size_bytes
                }
                inside.close()
                found.append(_SegmentFile(name, path, offsets))
        return found

    def _refuse_holes(self, name: SegmentName, places: dict[str, tuple[Path, int]]) -> None:
        with self._source.path.open("rb") as file:
            for info in self._source.tensors.values():
                is_here = info.name in places or not name.holds(info.name, self._n_layers)
                if not is_here and _has_hole(file.fileno(), info):
                    raise CallError(
                        "bad_model",
                        f"the bytes of {info.name} are not in {self._source.path} (nor in a segment file): "
                        "remove the model and load it again",
                        "path",
                    )

    def _dissolve(self, gone: list[_SegmentFile], kept: list[_SegmentFile]) -> None:
        """Bring back what only files of `gone` hold, and remove them."""
        elsewhere = {tensor for file in kept for tensor in file.offsets}
        with self._container() as container:
            for file in gone:
                with file.path.open("rb") as reader:
                    for tensor, offset in file.offsets.items():
                        if tensor not in elsewhere:
                            elsewhere.add(tensor)
                            _copy(reader.fileno(), offset, container, self._source.tensors[tensor])
            os.fsync(container)
        for file in gone:
            file.path.unlink(missing_ok=True)

    def _punch(self, files: list[_SegmentFile]) -> None:
        with self._container() as container:
            for file in files:
                for tensor in file.offsets:
                    info = self._source.tensors[tensor]
                    if not _punch_hole(container, info.offset, info.size_bytes):
                        return

    @contextmanager
    def _container(self) -> Iterator[int]:
        """Open for a change that its modification time, by which others know it, does not show."""
        container = os.open(self._source.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            mtime_ns = os.fstat(container).st_mtime_ns
            try:
                yield container
            finally:
                os.utime(container, ns=(mtime_ns, mtime_ns))
        except OSError as error:
            raise CallError("out_of_memory", f"cannot write {self._source.path}: {error.strerror}") from error
        finally:
            os.close(container)


def _overlap(a: SegmentName, b: SegmentName) -> bool:
    return a.start < b.end and b.start < a.end


def _copy(reader: int, offset: int, container: int, info: TensorInfo) -> None:
    done = 0
    while done < info.size_bytes:
        data = os.pread(reader, min(_COPY_BYTES, info.size_bytes - done), offset + done)
        if not data:
            raise CallError("bad_model", "a segment file became shorter", "path")
        done += os.pwrite(container, data, info.offset + done)


def _has_hole(file: int, info: TensorInfo) -> bool:
    try:
        begins_in_data = os.lseek(file, info.offset, os.SEEK_DATA) == info.offset
    except OSError:  # there is no more data
        return True
    return not begins_in_data or os.lseek(file, info.offset, os.SEEK_HOLE) < info.offset + info.size_bytes


def _punch_hole(file: int, offset: int, size_bytes: int) -> bool:
    """Whether the file system can."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_int(file), ctypes.c_int(_PUNCH_HOLE_KEEP_SIZE))
    failed = libc.fallocate(*arguments, ctypes.c_int64(offset), ctypes.c_int64(size_bytes))
    if failed:
        log.info("no holes can be punched here: %s", os.strerror(ctypes.get_errno()))
    return not failed


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
