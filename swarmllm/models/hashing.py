"""From a GGUF file to its manifest: the one pass that reads every byte.

Reads instead of mapping: a mapped file that somebody truncates meanwhile kills the daemon with SIGBUS.
Blocking; callers run it in a thread and may raise from `progress` to give up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
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
from swarmllm.models.parallel_hashing import READ_BYTES, ParallelHashing, Progress
from swarmllm.models.tensor_digest import digest_of
from swarmllm_proto.cut_rules import cut_rule
from swarmllm_proto.split_files import split_stem

__all__ = ["READ_BYTES", "FileState", "Hashed", "Progress", "build_manifest", "hash_model", "manifest_of"]

MAY_LACK_TENSORS = frozenset({"deci"})
"""Nemotron's pruned models have layers without attention and feed-forward: nothing is left of them."""


@dataclass(frozen=True, slots=True)
class Hashed:
    """What reading a whole file has shown."""

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


def hash_model(path: Path, progress: Progress | None = None) -> Hashed:
    """`build_manifest`, with all that was seen on the way. `path`: the file, or any part of several."""
    with open_model(path) as files:
        before = files.state()
        check_model(files.header)
        chunk_lists = _hash_tensors(files, progress or (lambda done, total: None))
        digests = {name: digest_of(chunk_list) for name, chunk_list in chunk_lists.items()}
        manifest = manifest_of(files.header_file, files.header, digests, split_stem(path.name))
        if files.state() != before:
            raise BadModel(f"{path} was changed while it was read; add it again when it is complete")
        return Hashed(manifest, before, chunk_lists, files.parts)


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
    are not read, so that whoever has only a header can check a ModelId. Raises BadModel."""
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
