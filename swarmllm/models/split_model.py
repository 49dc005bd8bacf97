"""Reads a model in several GGUF files as the one file that the joined parts would be.

The joined file exists nowhere. It has a header, with the metadata of the first part and the tensors of all,
and a place for each tensor, and whatever speaks of a model's bytes by their offsets (manifests, containers
of the store, what travels between nodes) means those. So the rest of the program knows models in one file
only. The layout depends on nothing but the parts' headers: two nodes that have the same parts agree on it.

Everything that can be wrong with the parts and shows in their headers is refused here, before anybody reads
or fetches a tensor, with the part and the field named. No I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmllm.errors import BadModel
from swarmllm.models.gguf_header import (
    DEFAULT_ALIGNMENT,
    MAX_TENSORS,
    GgufHeader,
    HeaderTensor,
    parse_header,
)
from swarmllm_proto.split_files import SPLIT_COUNT, SPLIT_KEYS, SPLIT_MAX, SPLIT_NO, SPLIT_TENSORS, SplitName

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_LATER_HEADER_BYTES = 16 * 2**20
"""Of a part other than the first, which has no metadata but the keys of the split."""
_OWN_KEYS = SPLIT_KEYS | {"general.alignment"}
"""What each part says for itself."""
_ATTENTION_NORM = "attn_norm.weight"


@dataclass(frozen=True, slots=True)
class PartHeader:
    name: str
    """As errors call the part."""
    header: GgufHeader
    start: bytes
    """The file's first bytes, the header at least."""

    def value(self, key: str) -> bytes:
        entry = self.header.keys[key]
        return self.start[entry.offset : entry.offset + entry.size_bytes]


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """The place of a tensor of the joined file in its part."""

    part: int
    """From 0."""
    offset: int
    """In that part."""
    tensor: HeaderTensor
    """In the joined file."""


@dataclass(frozen=True, slots=True)
class JoinedModel:
    start: bytes
    """The joined file up to its first tensor."""
    header: GgufHeader
    size_bytes: int
    """Of the joined file."""
    places: tuple[PlacedTensor, ...]
    """In the order of the joined file."""


@contextmanager
def in_part(name: SplitName) -> Iterator[None]:
    """What is wrong is wrong with this part."""
    try:
        yield
    except BadModel as error:
        message = f"part {name.number} of {name.count} ({name}): {error.message}"
        raise type(error)(message, field=error.field) from error


def check_count(name: SplitName) -> None:
    """Raises BadModel for more parts than anybody makes."""
    if name.count > SPLIT_MAX:
        raise BadModel(f"{name}: a model of {name.count} parts; at most {SPLIT_MAX} are read")


def check_part(name: SplitName, header: GgufHeader) -> None:
    """Raises BadModel where a header is not that of the part that its name says."""
    with in_part(name):
        count = header.count(SPLIT_COUNT)
        if count != name.count:
            raise BadModel(f"GGUF key {SPLIT_COUNT} is {count}, its name says {name.count}")
        number = header.count(SPLIT_NO)
        if number != name.number - 1:
            raise BadModel(f"GGUF key {SPLIT_NO} is {number}, its name says {name.number - 1} (from 0)")


def join_parts(names: Sequence[SplitName], parts: Sequence[PartHeader]) -> JoinedModel:
    """The joined file of all parts, in order. Raises BadModel naming the part and the field."""
    first = parts[0]
    for name, part in zip(names, parts, strict=True):
        check_part(name, part.header)
    n_tensors = sum(len(part.header.tensors) for part in parts)
    if n_tensors > MAX_TENSORS:
        raise BadModel(f"the parts have {n_tensors} tensors, more than {MAX_TENSORS}")
    for name, part in zip(names, parts, strict=True):
        with in_part(name):
            _check_against_first(first, part, n_tensors)
    _check_tensors(names, parts)
    return _join(first, parts, n_tensors)


def _check_against_first(first: PartHeader, part: PartHeader, n_tensors: int) -> None:
    if part is first or SPLIT_TENSORS in part.header.keys:
        said = part.header.count(SPLIT_TENSORS)
        if said != n_tensors:
            raise BadModel(f"GGUF key {SPLIT_TENSORS} is {said}, the parts have {n_tensors} tensors together")
    for key in part.header.keys:
        if key in _OWN_KEYS:
            continue
        if key not in first.header.keys or part.value(key) != first.value(key):
            raise BadModel(f"GGUF key {key} is not what the first part says: a part of another model")


def _check_tensors(names: Sequence[SplitName], parts: Sequence[PartHeader]) -> None:
    owners: dict[str, SplitName] = {}
    norm: tuple[int, ...] | None = None
    for name, part in zip(names, parts, strict=True):
        with in_part(name):
            end = part.header.data_offset
            for tensor in part.header.tensors:
                if tensor.offset - end >= part.header.alignment:
                    raise BadModel(f"tensor {tensor.name} does not follow the one before it")
                end = tensor.offset + tensor.size_bytes
                if tensor.name in owners:
                    raise BadModel(f"tensor {tensor.name} is in part {owners[tensor.name].number} already")
                owners[tensor.name] = name
                if tensor.name.startswith("blk.") and tensor.name.endswith(f".{_ATTENTION_NORM}"):
                    norm = norm or tensor.shape
                    if tensor.shape != norm:
                        raise BadModel(
                            f"tensor {tensor.name} has the shape {tensor.shape}, that of another layer"
                            f" {norm}: a part of another model"
                        )


def _join(first: PartHeader, parts: Sequence[PartHeader], n_tensors: int) -> JoinedModel:
    alignment = first.header.alignment if "general.alignment" in first.header.keys else DEFAULT_ALIGNMENT
    keys = [key for key in first.header.keys if key not in SPLIT_KEYS]
    written = [b"GGUF", struct.pack("<IQQ", 3, n_tensors, len(keys))]
    for key in keys:
        written += [_text(key), first.value(key)]
    size_bytes = 0
    offsets: list[tuple[int, int, HeaderTensor, int]] = []
    for number, part in enumerate(parts):
        for tensor in part.header.tensors:
            size_bytes = -(-size_bytes // alignment) * alignment
            shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
            written += [_text(tensor.name), shape, struct.pack("<IQ", tensor.ggml_type, size_bytes)]
            offsets.append((number, tensor.offset, tensor, size_bytes))
            size_bytes += tensor.size_bytes
    start = b"".join(written)
    start += bytes(-len(start) % alignment)
    places = tuple(
        PlacedTensor(
            number,
            offset,
            HeaderTensor(each.name, each.ggml_type, each.shape, len(start) + at, each.size_bytes),
        )
        for number, offset, each, at in offsets
    )
    total_bytes = len(start) + size_bytes
    return JoinedModel(start, parse_header(start, total_bytes), total_bytes, places)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
