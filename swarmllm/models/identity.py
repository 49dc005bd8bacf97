"""Whether a file is still the model that it was hashed as, without reading all of it.

A file whose modification time has changed (a copy put in its place, a `touch`, a restored backup) is compared
with the manifest: the whole header, and the data of as many chunks as are quickly read, spread over the file
at random. A small model is read whole. `swarmllm models verify` reads everything. Blocking.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

from swarmllm.errors import BadModel
from swarmllm.models.hashing import CHUNK_BYTES, TensorHasher, is_chunk, manifest_of
from swarmllm.models.manifest import Manifest, TensorEntry
from swarmllm.models.model_files import ModelFiles, open_model

N_CHUNKS: Final = 64
"""Chunks of 1 MiB that are read of a file; one that has fewer is read whole."""


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
