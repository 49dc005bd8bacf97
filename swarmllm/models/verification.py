"""Compares a model's files with its manifest, in full or in samples.

A full verification (`swarmllm models verify`) reads every byte that is used. Tensors have their hash in the
manifest. The header of the GGUF has none of its own; it is right if it gives the ModelId together with the
tensors' digests. A segment file's header is the worker's work and carries its own hash (`segment_names`);
beside the layers that moved there it holds copies of small tensors, which are read too. What nobody reads
(padding, holes, the dummy vocabulary of a segment) is not looked at.

A file whose modification time has changed (a copy put in its place, a `touch`, a restored backup) is compared
in samples (`is_same_content`): the whole header, and the data of as many chunks as are quickly read, spread
over the file at random. A small model is read whole. Blocking.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from swarmllm.errors import BadModel
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.gguf_header import GgufHeader, read_header
from swarmllm.models.hashing import CHUNK_BYTES, READ_BYTES, Progress, TensorHasher, is_chunk, manifest_of
from swarmllm.models.manifest import Manifest, TensorEntry
from swarmllm.models.model_files import ModelFiles, open_model
from swarmllm.models.tensor_locations import TensorLocations
from swarmllm_proto.segment_names import (
    FOLDER,
    LAYOUT_VERSION,
    NO_SEAL,
    SEAL_KEY,
    TRIAL,
    UNFINISHED,
    SegmentName,
    copy_prefix,
    header_hash,
    parse_copy_name,
    parse_segment_name,
)

N_CHUNKS: Final = 64
"""Chunks of 1 MiB that are read of a file; one that has fewer is read whole."""
HEADER = "header"
"""How a damaged header is called among damaged tensors."""
_STRING_HEAD_BYTES = 4 + 8


def header_is_right(path: Path, manifest: Manifest) -> bool:
    """Whether `path` begins with the header of this model, in the same layout; of parts, their headers
    together."""
    try:
        with open_model(path) as files:
            return _has_header(files, manifest)
    except BadModel:
        return False


def _has_header(files: ModelFiles, manifest: Manifest) -> bool:
    """Raises BadModel."""
    digests = {tensor.name: tensor.blake3 for tensor in manifest.tensors}
    found = manifest_of(files.header_file, files.header, digests, manifest.name)
    offsets = {tensor.name: tensor.offset for tensor in manifest.tensors}
    return (
        found.model_id == manifest.model_id
        and {tensor.name: tensor.offset for tensor in found.tensors} == offsets
    )


def is_same_content(
    path: Path, manifest: Manifest, chunk_list: Callable[[TensorEntry], bytes | None]
) -> bool:
    """`chunk_list`: of a tensor, None where it is not known; such a tensor is read whole if it is chosen."""
    chunks = [
        (tensor, start) for tensor in manifest.tensors for start in range(0, tensor.size_bytes, CHUNK_BYTES)
    ]
    try:
        with open_model(path) as files:
            if not _has_header(files, manifest):
                return False
            known: dict[str, bytes | None] = {}
            for tensor, start in random.sample(chunks, min(N_CHUNKS, len(chunks))):
                if tensor.name not in known:
                    known[tensor.name] = chunk_list(tensor)
                if not _is_right(files, tensor, start, known[tensor.name]):
                    return False
    except BadModel:
        return False
    return True


def _is_right(files: ModelFiles, tensor: TensorEntry, start: int, chunk_list: bytes | None) -> bool:
    file, offset = files.place(tensor.name, tensor.offset)
    if chunk_list is not None:
        n_bytes = min(CHUNK_BYTES, tensor.size_bytes - start)
        return is_chunk(chunk_list, start, os.pread(file, n_bytes, offset + start))
    hasher = TensorHasher()
    for at in range(0, tensor.size_bytes, CHUNK_BYTES):
        n_bytes = min(CHUNK_BYTES, tensor.size_bytes - at)
        hasher.update(os.pread(file, n_bytes, offset + at))
    return hasher.hexdigest() == tensor.blake3


@dataclass(frozen=True)
class SegmentPlace:
    path: Path
    name: SegmentName

    def __str__(self) -> str:
        return f"segment {self.name.start}:{self.name.end}"


def segments_of(entry: CatalogueEntry, copies: Path | None) -> list[SegmentPlace]:
    """The segment files of a model that this version reads. `copies`: the folder for those of users'
    files."""
    if entry.is_stored:
        folder: Path | None = entry.path.parent / FOLDER
        named = {path: parse_segment_name(path.name) for path in _files(folder)}
    else:
        folder = copies
        size_bytes = sum(part.size_bytes for part in entry.parts) or entry.state.size_bytes
        prefix = copy_prefix(str(entry.path.resolve()), size_bytes, entry.state.mtime_ns)
        named = {path: parse_copy_name(path.name, prefix) for path in _files(folder)}
    return [SegmentPlace(path, name) for path, name in named.items() if name is not None]


def unfinished_files(container_folder: Path) -> list[Path]:
    """What a worker that was killed has left beside a container's segment files."""
    return [path for path in _files(container_folder / FOLDER) if _is_unfinished(path)]


def strays_of_copies(copies: Path | None, entries: Iterable[CatalogueEntry]) -> list[Path]:
    """Of the folder for copies: what was not finished, and copies of files that no model has any more."""
    wanted = {
        segment.path for entry in entries if not entry.is_stored for segment in segments_of(entry, copies)
    }
    return [path for path in _files(copies) if path not in wanted]


def seal_is_right(segment: SegmentPlace) -> bool:
    """Whether the header of a segment file is as it was written. Raises OSError."""
    if segment.name.layout != LAYOUT_VERSION:
        # Written before headers had their hash; the next load writes it anew.
        return True
    try:
        with segment.path.open("rb") as file:
            parsed = read_header(file)
            seal = parsed.keys[SEAL_KEY]
            file.seek(0)
            header = file.read(_data_offset(parsed))
    except FileNotFoundError:
        # Its layers have moved on since.
        return True
    except (BadModel, KeyError):
        return False
    at = seal.offset + _STRING_HEAD_BYTES
    found = header[at : at + len(NO_SEAL)]
    return seal.size_bytes == _STRING_HEAD_BYTES + len(NO_SEAL) and found == header_hash(header, at)


class Verification:
    """Reads the present parts of a model and reports progress."""

    def __init__(self, entry: CatalogueEntry, segments: Sequence[SegmentPlace], progress: Progress) -> None:
        """`segments`: those with a right header."""
        self._entry = entry
        self._progress = progress
        self._there = sorted(
            (t for t in entry.manifest.tensors if entry.present is None or t.name in entry.present),
            key=lambda tensor: tensor.offset,
        )
        self._inside = {segment: list(self._copied(segment)) for segment in segments}
        self._total_bytes = sum(tensor.size_bytes for tensor in self._there)
        self._total_bytes += sum(t.size_bytes for each in self._inside.values() for t, _ in each)
        self._done_bytes = 0

    def damaged_tensors(self, places: TensorLocations) -> Iterator[str]:
        """Of the model itself, wherever they lie. Raises OSError, BadModel."""
        for tensor in self._there:
            hasher = TensorHasher()
            for offset in range(0, tensor.size_bytes, READ_BYTES):
                n_bytes = min(READ_BYTES, tensor.size_bytes - offset)
                self._take(hasher, places.read(tensor, offset, n_bytes))
            if hasher.hexdigest() != tensor.blake3:
                yield tensor.name

    def damaged_segments(self) -> Iterator[SegmentPlace]:
        """Those that hold a wrong copy of a tensor. Raises OSError."""
        for segment, inside in self._inside.items():
            try:
                with segment.path.open("rb", buffering=0) as file:
                    is_right = [self._is_right(file, tensor, offset) for tensor, offset in inside]
            except FileNotFoundError:
                continue
            if not all(is_right):
                yield segment

    def _copied(self, segment: SegmentPlace) -> Iterator[tuple[TensorEntry, int]]:
        """(tensor, offset) of the copies in a segment file. What has moved there is no copy."""
        manifest = self._entry.manifest
        by_name = {tensor.name: tensor for tensor in manifest.tensors}
        try:
            with segment.path.open("rb") as file:
                header = read_header(file)
        except FileNotFoundError:
            return
        for found in header.tensors:
            tensor = by_name.get(segment.name.in_model(found.name) or "")
            has_moved = self._entry.is_stored and segment.name.moved(found.name, manifest.n_layers)
            is_unread = found.name == "token_embd.weight" and not manifest.tied_embedding
            if tensor is not None and found.shape == tensor.shape and not has_moved and not is_unread:
                yield tensor, found.offset

    def _is_right(self, file: BinaryIO, tensor: TensorEntry, offset: int) -> bool:
        hasher = TensorHasher()
        for at in range(offset, offset + tensor.size_bytes, READ_BYTES):
            n_bytes = min(READ_BYTES, offset + tensor.size_bytes - at)
            self._take(hasher, os.pread(file.fileno(), n_bytes, at))
        return hasher.hexdigest() == tensor.blake3

    def _take(self, hasher: TensorHasher, data: bytes) -> None:
        hasher.update(data)
        self._done_bytes += len(data)
        self._progress(self._done_bytes, self._total_bytes)


def _data_offset(header: GgufHeader) -> int:
    return min((tensor.offset for tensor in header.tensors), default=header.data_offset)


def _is_unfinished(path: Path) -> bool:
    return path.name.startswith((UNFINISHED, TRIAL))


def _files(folder: Path | None) -> list[Path]:
    try:
        return sorted(folder.iterdir()) if folder is not None else []
    except FileNotFoundError:
        return []
