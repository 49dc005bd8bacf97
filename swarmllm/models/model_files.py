"""The file of a model, or the files of one that is published in parts, opened for reading; the disk.

Parts are found by their names (see `swarmllm_proto.split_files`), from any one of them or from their folder;
one that is missing is named before anything is read. What is read of several files looks like one (see
`split_model`). Blocking.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import msgspec

from swarmllm.errors import BadModel
from swarmllm.models.gguf_header import GgufHeader, read_header
from swarmllm.models.split_model import (
    MAX_LATER_HEADER_BYTES,
    PartHeader,
    check_count,
    in_part,
    join_parts,
)
from swarmllm.private_files import sync_folder
from swarmllm_proto.split_files import SPLIT_COUNT, SplitName, by_model, joint_mtime_ns, parse_split_name

MTIME_STEP_NS = 10**9
"""Whole seconds: every file system keeps those."""


def share_file(part: Path, target: Path) -> None:
    """The same file under a second name."""
    try:
        os.link(part, target)
    except OSError:
        # A file system without hard links.
        part.rename(target)


def give_back(origin: Path, names: Sequence[Path]) -> None:
    """Undo `share_file` where that could only rename."""
    for name in names:
        if not origin.exists() and name.exists():
            name.rename(origin)


def put(incoming: Path, final: Path) -> None:
    """A complete folder to its place; what was there is kept aside until `drop_all`, or `take_back`."""
    if final.exists():
        final.rename(_aside(incoming))
    incoming.rename(final)
    sync_folder(final.parent)


def take_back(incoming: Path, final: Path) -> None:
    """Undo `put`, if it came so far."""
    if not incoming.exists():
        shutil.rmtree(final, ignore_errors=True)
    if _aside(incoming).exists():
        _aside(incoming).rename(final)


def drop_all(incoming: Path) -> None:
    """What is neither at its place nor wanted any more."""
    for folder in (incoming, _aside(incoming)):
        shutil.rmtree(folder, ignore_errors=True)


def _aside(incoming: Path) -> Path:
    return incoming.with_name(f"{incoming.name}-before")


def whole_seconds_ns() -> int:
    return time.time_ns() // MTIME_STEP_NS * MTIME_STEP_NS


def allocated_bytes(file: Path) -> int:
    """On the disk, holes not counted; 0 where there is no such file."""
    with suppress(OSError):
        return file.stat().st_blocks * 512
    return 0


SHOWN_FILES = 20


@dataclass(frozen=True, slots=True)
class FileState:
    """How a model's file looked; another state means that what was learned from it no longer holds. Of
    parts: the size of the file that they would be joined, and one number for all modification times."""

    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        return cls(status.st_size, status.st_mtime_ns)


class PartFile(msgspec.Struct, frozen=True):
    """One of several files of a model, as it was when the model was hashed."""

    path: str
    size_bytes: int
    mtime_ns: int
    offsets: dict[str, int]
    """Of the tensors in it, by name, from its start."""

    @property
    def state(self) -> FileState:
        return FileState(self.size_bytes, self.mtime_ns)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Open files. Offsets are those of the one file, or of the one that the parts would be."""

    header: GgufHeader
    header_file: BinaryIO
    """In which the header lies at the offsets that `header` says."""
    start: bytes
    """Of parts: the joined file up to its first tensor; else empty."""
    parts: tuple[PartFile, ...]
    """Empty for one file."""
    size_bytes: int
    _files: tuple[BinaryIO, ...]
    _places: dict[str, tuple[int, int]]
    """Tensor -> (descriptor, offset), of parts."""

    def place(self, tensor: str, offset: int) -> tuple[int, int]:
        """(descriptor, offset in that file) of a tensor that lies at `offset`."""
        return self._places[tensor] if self.parts else (self._files[0].fileno(), offset)

    def state(self) -> FileState:
        """As the files are now."""
        found = [os.fstat(file.fileno()) for file in self._files]
        if not self.parts:
            return FileState.of(found[0])
        return joint_state(self.size_bytes, found)


def joint_state(size_bytes: int, found: Sequence[os.stat_result]) -> FileState:
    """`size_bytes`: of the joined file."""
    return FileState(size_bytes, joint_mtime_ns([(each.st_size, each.st_mtime_ns) for each in found]))


def first_file(path: Path) -> Path:
    """The file by which a model is known: `path`, the first of the parts to which `path` belongs, or that of
    the only model in the folder `path`. Raises BadModel, also where a part is missing."""
    if path.is_dir():
        path = _only_model(path)
    return part_paths(path)[0]


def part_paths(path: Path) -> tuple[Path, ...]:
    """All files of the model of which `path` is one, in order. Raises BadModel naming the first that is
    missing."""
    name = parse_split_name(path.name)
    if name is None:
        return (path,)
    check_count(name)
    paths = tuple(path.with_name(str(each)) for each in name.all())
    for number, each in enumerate(paths, start=1):
        if not each.exists():
            raise BadModel(f"part {number} of {name.count} is missing: there is no {each}", field="path")
    return paths


def _only_model(folder: Path) -> Path:
    try:
        names = sorted(each.name for each in folder.iterdir())
    except OSError as error:
        raise BadModel(f"{folder} cannot be read: {error.strerror or error}", field="path") from error
    found = by_model(each for each in names if each.endswith(".gguf") and "mmproj" not in each.lower())
    if len(found) != 1:
        there = ", ".join(list(found)[:SHOWN_FILES])
        what = f"has {len(found)} models; name one of them: {there}" if found else "has no GGUF file"
        raise BadModel(f"the folder {folder} {what}", field="path")
    return folder / next(iter(found.values()))[0]


@contextmanager
def open_model(path: Path) -> Iterator[ModelFiles]:
    """`path`: the file, or any part. Raises BadModel that names the file."""
    try:
        with ExitStack() as stack:
            name = parse_split_name(path.name)
            yield _open_one(stack, path) if name is None else _open_parts(stack, path, name)
    except OSError as error:
        raise BadModel(f"{error.filename or path} cannot be read: {error.strerror or error}") from error
    except BadModel as error:
        if str(path) in error.message:
            raise
        raise BadModel(f"{path}: {error.message}", field=error.field) from error


def _open_one(stack: ExitStack, path: Path) -> ModelFiles:
    file = _open(stack, path)
    header = read_header(file)
    count = header.count(SPLIT_COUNT, default=1)
    if count > 1:
        raise BadModel(
            f"this is one of {count} parts of a model (GGUF key {SPLIT_COUNT}), but its name does not say"
            f" which; call the parts NAME-00001-of-{count:05}.gguf and so on, in one folder"
        )
    return ModelFiles(header, file, b"", (), os.fstat(file.fileno()).st_size, (file,), {})


def _open_parts(stack: ExitStack, path: Path, name: SplitName) -> ModelFiles:
    paths, names = part_paths(path), name.all()
    files, headers = [], []
    # The parts after the first have small headers: what is wrong with them shows at once.
    for each, part in zip(paths[1:] + paths[:1], names[1:] + names[:1], strict=True):
        with in_part(part):
            file = _open(stack, each)
            limits = (MAX_LATER_HEADER_BYTES,) if part.number > 1 else ()
            header = read_header(file, *limits)
            file.seek(0)
            headers.append(PartHeader(str(part), header, file.read(header.end_offset)))
            files.append(file)
    files, headers = files[-1:] + files[:-1], headers[-1:] + headers[:-1]
    joined = join_parts(names, headers)
    states = [os.fstat(file.fileno()) for file in files]
    offsets: list[dict[str, int]] = [{} for _ in files]
    for place in joined.places:
        offsets[place.part][place.tensor.name] = place.offset
    parts = tuple(
        PartFile(str(each), state.st_size, state.st_mtime_ns, inside)
        for each, state, inside in zip(paths, states, offsets, strict=True)
    )
    places = {each.tensor.name: (files[each.part].fileno(), each.offset) for each in joined.places}
    return ModelFiles(
        joined.header,
        BytesIO(joined.start),
        joined.start,
        parts,
        joined.size_bytes,
        tuple(files),
        places,
    )


def _open(stack: ExitStack, path: Path) -> BinaryIO:
    # O_NONBLOCK: opening a pipe that nobody writes to would otherwise never return.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = stack.enter_context(os.fdopen(descriptor, "rb", buffering=2**20))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise BadModel(f"{path} is not a regular file")
    return file
