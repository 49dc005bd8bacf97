"""Computes the manifest of a GGUF file in one pass over every byte.

Reads instead of mapping: a mapped file that somebody truncates meanwhile kills the daemon with SIGBUS.
Blocking; callers run it in a thread and may raise from `progress` to give up.

A tensor of up to one MiB has the BLAKE3 of its bytes. The digest of a larger one is the BLAKE3 of its *chunk
list*: the BLAKE3 of each of its MiB, in order, 32 bytes each. So anyone who has the list, which the digest
proves, knows of every MiB that arrives whether it is right before writing it, and who sent it if it is
not. Which of the two a digest is follows from the tensor's size, and that from its shape and type, which
the ModelId covers.

BLAKE3 is a tree itself, but the library does not show the inner nodes.

The threads take pieces in the order of the file, one after the other, so that a disk is read front to back.
The calling thread is one of them; it alone reports progress, because callers give up by raising there.
Blocking.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from swarmllm.errors import BadModel
from swarmllm.models.gguf_header import GgufHeader
from swarmllm.models.layers import MAX_LAYER
from swarmllm.models.manifest import (
    EMBEDDING_INDEX,
    HEAD_INDEX,
    HEADER_INDEX,
    LAYOUT_KEYS,
    Manifest,
    Shard,
    ShardKind,
    TensorEntry,
    make_shard,
    tensor_place,
)
from swarmllm.models.model_files import FileState, ModelFiles, PartFile, open_model
from swarmllm.operating_system import n_cores
from swarmllm_proto.architectures import cut_rule, n_deepstack_layers
from swarmllm_proto.limits import PIECE_MAX
from swarmllm_proto.split_files import split_stem

CHUNK_BYTES = PIECE_MAX
"""So that every piece that travels is one chunk."""
DIGEST_BYTES = 32


class TensorHasher:
    """Front to back, in portions of any size."""

    def __init__(self) -> None:
        self._chunks = bytearray()
        self._hasher = blake3()
        self._n_bytes = 0
        """Of the chunk that is not complete yet."""

    def update(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            part = left[: CHUNK_BYTES - self._n_bytes]
            self._hasher.update(part)
            self._n_bytes += len(part)
            left = left[len(part) :]
            if self._n_bytes == CHUNK_BYTES:
                self._chunks += self._hasher.digest()
                self._hasher, self._n_bytes = blake3(), 0

    def chunk_list(self) -> bytes:
        """Of what has been seen so far."""
        if self._n_bytes or not self._chunks:
            return bytes(self._chunks) + self._hasher.digest()
        return bytes(self._chunks)

    def hexdigest(self) -> str:
        return digest_of(self.chunk_list())


def chunk_digest(data: bytes | memoryview) -> bytes:
    """The entry of one chunk in the chunk list."""
    return blake3(data).digest()


def digest_of(chunk_list: bytes) -> str:
    """The digest, as 64 hexadecimal digits, of the tensor that has this chunk list."""
    return chunk_list.hex() if len(chunk_list) == DIGEST_BYTES else blake3(chunk_list).hexdigest()


def chunk_list_bytes(size_bytes: int) -> int:
    """How long the chunk list of a tensor is."""
    return max(1, -(-size_bytes // CHUNK_BYTES)) * DIGEST_BYTES


def is_chunk(chunk_list: bytes, offset: int, data: bytes | memoryview) -> bool:
    """Whether `data` are the chunk that begins at `offset` of the tensor."""
    index, rest = divmod(offset, CHUNK_BYTES)
    expected = chunk_list[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
    return not rest and chunk_digest(data) == expected


Progress = Callable[[int, int], None]
"""(bytes done, bytes in all). What it raises ends the work and reaches the caller."""

READ_BYTES = CHUNK_BYTES
"""One chunk: with four, hashing took 1.15 times the processor time, as they leave the cache in between."""
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
        self._n_threads = n_threads or min(MAX_THREADS, n_cores())
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


MAY_LACK_TENSORS = frozenset({"deci"})
"""Nemotron's pruned models have layers without attention and feed-forward: nothing is left of them."""


@dataclass(frozen=True, slots=True)
class HashResult:
    """The result of reading a whole file."""

    manifest: Manifest
    state: FileState
    """For which it holds."""
    chunk_lists: dict[str, bytes]
    """By the tensors' names."""
    parts: tuple[PartFile, ...] = ()
    """Of a model in several files."""


def build_manifest(path: Path, progress: Progress | None = None) -> Manifest:
    """Read, check and hash a GGUF. Raises BadModel naming what is wrong with it."""
    return hash_model(path, progress).manifest


def hash_model(path: Path, progress: Progress | None = None) -> HashResult:
    """`build_manifest`, with all that was seen on the way. `path`: the file, or any part of several."""
    with open_model(path) as files:
        before = files.state()
        check_model(files.header)
        chunk_lists = _hash_tensors(files, progress or (lambda done, total: None))
        digests = {name: digest_of(chunk_list) for name, chunk_list in chunk_lists.items()}
        manifest = manifest_of(files.header_file, files.header, digests, split_stem(path.name))
        if files.state() != before:
            raise BadModel(f"{path} was changed while it was read; add it again when it is complete")
        return HashResult(manifest, before, chunk_lists, files.parts)


def check_model(header: GgufHeader) -> tuple[str, int]:
    """(architecture, layers) of a header that can be a model's. Raises BadModel naming what is wrong."""
    architecture = header.text("general.architecture")
    if (
        not architecture
        or not architecture.isascii()
        or not architecture.isprintable()
        or " " in architecture
    ):
        raise BadModel("GGUF key general.architecture is not a word")
    n_blocks = header.count(f"{architecture}.block_count", maximum=MAX_LAYER)
    n_layers = n_blocks - header.count(f"{architecture}.nextn_predict_layers", default=0)
    if n_layers <= 0:
        raise BadModel(f"GGUF key {architecture}.block_count says that the model has no layers")
    found = {tensor_place(tensor.name) for tensor in header.tensors}
    for kind, layer in found:
        if kind == "layer" and layer >= n_blocks:
            raise BadModel(f"there are tensors of layer {layer}, beyond the {n_blocks} layers of block_count")
    for layer in range(n_layers):
        if ("layer", layer) not in found and architecture not in MAY_LACK_TENSORS:
            raise BadModel(f"layer {layer} of {n_layers} has no tensors")
    return architecture, n_layers


def manifest_of(
    file: BinaryIO, header: GgufHeader, digests: Mapping[str, str], fallback_name: str
) -> Manifest:
    """The manifest of the model whose header is in `file`, given each tensor's digest. The tensors' data
    are not read, so that anyone who has only a header can check a ModelId. Raises BadModel."""
    architecture, n_layers = check_model(header)
    shards = _shards(file, header, n_layers, digests)
    rule = cut_rule(architecture, n_layers, header.number, header.numbers)
    tokens = header.keys.get("tokenizer.ggml.tokens")
    by_kind = {shard.kind: shard for shard in shards}
    return Manifest(
        name=_model_name(header, fallback_name),
        architecture=architecture,
        n_layers=n_layers,
        n_embd=header.count(f"{architecture}.embedding_length"),
        n_vocab=tokens.n_items if tokens else header.count(f"{architecture}.vocab_size", default=0),
        context_length=header.count(f"{architecture}.context_length", default=0),
        cut_alignment=rule.cut_alignment,
        whole_reason=rule.whole_reason,
        tied_embedding="output.weight" not in {tensor.name for tensor in by_kind["head"].tensors},
        size_bytes=sum(shard.size_bytes for shard in shards),
        shards=shards,
        n_deepstack=n_deepstack_layers(architecture, header.number),
    )


def _model_name(header: GgufHeader, fallback_name: str) -> str:
    entry = header.keys.get("general.name")
    return entry.value if entry and isinstance(entry.value, str) and entry.value.strip() else fallback_name


def _hash_tensors(files: ModelFiles, progress: Progress) -> dict[str, bytes]:
    """The chunk list of each tensor."""
    hashing = ParallelHashing()
    for tensor in files.header.tensors:
        hashing.add(tensor.name, *files.place(tensor.name, tensor.offset), tensor.size_bytes)
    return hashing.run(progress)


def _shards(
    file: BinaryIO, header: GgufHeader, n_layers: int, digests: Mapping[str, str]
) -> tuple[Shard, ...]:
    """Blocks from `n_layers` on predict further tokens: they go with the head."""
    places: dict[tuple[ShardKind, int], list[TensorEntry]] = defaultdict(list)
    for tensor in header.tensors:
        if tensor.name not in digests:
            raise BadModel(f"there is no digest of tensor {tensor.name}")
        kind, layer = tensor_place(tensor.name)
        places[("head", HEAD_INDEX) if kind == "layer" and layer >= n_layers else (kind, layer)].append(
            TensorEntry(
                name=tensor.name,
                ggml_type=tensor.ggml_type,
                shape=tensor.shape,
                offset=tensor.offset,
                size_bytes=tensor.size_bytes,
                blake3=digests[tensor.name],
            )
        )
    return (
        make_shard("header", HEADER_INDEX, places["header", HEADER_INDEX], _metadata_digests(file, header)),
        make_shard("embedding", EMBEDDING_INDEX, places["embedding", EMBEDDING_INDEX]),
        *(make_shard("layer", layer, places["layer", layer]) for layer in range(n_layers)),
        make_shard("head", HEAD_INDEX, places["head", HEAD_INDEX]),
    )


def _metadata_digests(file: BinaryIO, header: GgufHeader) -> dict[str, str]:
    digests = {}
    for key, entry in header.keys.items():
        if key not in LAYOUT_KEYS:
            file.seek(entry.offset)
            digests[key] = blake3(file.read(entry.size_bytes)).hexdigest()
    return digests
