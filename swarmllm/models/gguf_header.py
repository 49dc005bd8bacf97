"""A bounded reader of GGUF headers, for files nobody has vouched for.

Why not `gguf.GGUFReader`: it maps the file (a file that shrinks underneath kills the daemon with SIGBUS),
believes every count it reads (a header of forty bytes can ask for 2^64 strings), builds a numpy object per
token of the vocabulary (seconds for a large one), and does not tell where the bytes of a value lie, which
hashing needs. Here every length is held against what the file can still contain before anything is read,
large arrays are skipped rather than kept, and tensors are checked to lie inside the file without
overlapping, so that a reader of all reads the file at most once.

The layout is that of ggml's docs/gguf.md, versions 2 and 3, little-endian. Version 1 (32-bit counts, 2023)
is refused.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import BinaryIO

from gguf import GGML_QUANT_SIZES

from swarmllm.errors import BadModel

Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...]

MAX_HEADER_BYTES = 256 * 2**20
"""The largest vocabularies with their merges take some 20 MB."""
MAX_KEYS = 4096
"""Real files have some 20 to 60 keys."""
MAX_TENSORS = 65_536
"""DeepSeek-V3, among the largest, has about 1100: experts are stacked in one tensor."""
MAX_NAME_BYTES = 512
"""ggml itself stops at 64 for tensors; keys are longer."""
MAX_STRING_BYTES = 16 * 2**20
"""Chat templates reach some 100 KB."""
MAX_ARRAY_ITEMS = 16 * 2**20
"""Vocabularies reach 262144 tokens."""
MAX_KEPT_ITEMS = 4096
"""Longer arrays (vocabularies, merges, scores) are validated and skipped; per-layer arrays are far below.
The same number bounds what all kept arrays hold together, sixteen times over."""
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_BLOCKS: dict[int, tuple[int, int]] = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}


@dataclass(frozen=True, slots=True)
class HeaderKey:
    """One metadata key: where its value's bytes (type tag included) lie, and the value unless it is a long
    array."""

    offset: int
    size_bytes: int
    value: Value | None
    n_items: int
    """Length of an array; 1 for everything else."""


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    name: str
    ggml_type: int
    shape: tuple[int, ...]
    """ggml's order: the fastest-moving dimension first."""
    offset: int
    """From the start of the file."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    version: int
    keys: Mapping[str, HeaderKey]
    tensors: tuple[HeaderTensor, ...]
    """In the order in which their bytes lie in the file."""
    data_offset: int
    end_offset: int
    """Of the header; up to `data_offset` there is padding."""
    alignment: int

    def text(self, key: str) -> str:
        """Raises BadModel where the key is missing or no string."""
        value = self._required(key)
        if not isinstance(value, str):
            raise BadModel(f"GGUF key {key} is not a string")
        return value

    def count(self, key: str, *, default: int | None = None, maximum: int = 2**31 - 1) -> int:
        """A non-negative whole number. Raises BadModel where it is missing without a default, or something
        else."""
        if key not in self.keys and default is not None:
            return default
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= maximum:
            raise BadModel(f"GGUF key {key} is not a whole number between 0 and {maximum}")
        return value

    def number(self, key: str) -> int | None:
        """A whole number; None where the key is missing or something else."""
        value = self.keys[key].value if key in self.keys else None
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def numbers(self, key: str) -> tuple[int, ...] | None:
        """A list of whole numbers or truths; None where the key is missing, something else, or too long to
        have been kept."""
        value = self.keys[key].value if key in self.keys else None
        if not isinstance(value, tuple) or not all(isinstance(item, int) for item in value):
            return None
        return tuple(int(item) for item in value)

    def _required(self, key: str) -> Value | None:
        if key not in self.keys:
            raise BadModel(f"GGUF key {key} is missing")
        return self.keys[key].value


class HeaderIncomplete(BadModel):
    """The bytes end before the header does."""


def read_header(file: BinaryIO, max_bytes: int = MAX_HEADER_BYTES) -> GgufHeader:
    """Parse and check the header of an open GGUF. `file` must be seekable and buffered. Raises BadModel."""
    return _parse(file, os.fstat(file.fileno()).st_size, max_bytes)


def parse_header(start: bytes, size_bytes: int, max_bytes: int = MAX_HEADER_BYTES) -> GgufHeader:
    """The header of a file of `size_bytes` that begins with `start`. Raises HeaderIncomplete where `start`
    ends inside the header, BadModel."""
    header = _parse(BytesIO(start), size_bytes, max_bytes)
    if header.end_offset > len(start):
        raise HeaderIncomplete("the header is not here as a whole")
    return header


def _parse(file: BinaryIO, size_bytes: int, max_bytes: int) -> GgufHeader:
    file.seek(0)
    return _HeaderParser(file, size_bytes, max_bytes).parse()


class _HeaderParser:
    def __init__(self, file: BinaryIO, size_bytes: int, max_bytes: int) -> None:
        self._file = file
        self._size_bytes = size_bytes
        self._max_bytes = max_bytes
        self._at = 0
        self._kept_items = 0

    def parse(self) -> GgufHeader:
        if self._take(4, "magic") != b"GGUF":
            raise BadModel("not a GGUF file: it does not start with the magic bytes GGUF")
        version = self._u32("version")
        if version not in (2, 3):
            big_endian = version in (2 << 24, 3 << 24)
            raise BadModel(
                "big-endian GGUF files are not supported"
                if big_endian
                else f"GGUF version {version} is not 2 or 3"
            )
        n_tensors = self._u64("tensor count")
        n_keys = self._u64("key count")
        if n_tensors > MAX_TENSORS:
            raise BadModel(f"GGUF tensor count {n_tensors} is above {MAX_TENSORS}")
        if n_keys > MAX_KEYS:
            raise BadModel(f"GGUF key count {n_keys} is above {MAX_KEYS}")
        keys: dict[str, HeaderKey] = {}
        for _ in range(n_keys):
            name = self._name("key")
            if name in keys:
                raise BadModel(f"GGUF key {name} appears twice")
            start = self._at
            value, n_items = self._value(name)
            keys[name] = HeaderKey(start, self._at - start, value, n_items)
        alignment = DEFAULT_ALIGNMENT
        if "general.alignment" in keys:
            stated = keys["general.alignment"].value
            if not isinstance(stated, int) or stated < 8 or stated > 2**20 or stated & (stated - 1):
                raise BadModel("GGUF key general.alignment is not a power of two between 8 and 2^20")
            alignment = stated
        relative = [self._tensor_info(alignment) for _ in range(n_tensors)]
        end_offset = self._at
        data_offset = -(-end_offset // alignment) * alignment
        tensors = self._place(relative, data_offset)
        return GgufHeader(version, keys, tensors, data_offset, end_offset, alignment)

    def _place(self, relative: list[HeaderTensor], data_offset: int) -> tuple[HeaderTensor, ...]:
        placed: list[HeaderTensor] = []
        names: set[str] = set()
        end = data_offset
        for tensor in sorted(relative, key=lambda tensor: tensor.offset):
            offset = data_offset + tensor.offset
            if tensor.name in names:
                raise BadModel(f"tensor {tensor.name} appears twice")
            names.add(tensor.name)
            if offset < end:
                raise BadModel(f"tensor {tensor.name} overlaps the tensor before it")
            end = offset + tensor.size_bytes
            if end > self._size_bytes:
                raise BadModel(
                    f"the file is truncated: tensor {tensor.name} ends at byte {end}, "
                    f"the file at {self._size_bytes}"
                )
            placed.append(
                HeaderTensor(tensor.name, tensor.ggml_type, tensor.shape, offset, tensor.size_bytes)
            )
        return tuple(placed)

    def _tensor_info(self, alignment: int) -> HeaderTensor:
        name = self._name("tensor name")
        n_dimensions = self._u32(f"tensor {name}")
        if not 1 <= n_dimensions <= MAX_DIMENSIONS:
            raise BadModel(f"tensor {name} has {n_dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
        shape = tuple(self._u64(f"tensor {name}") for _ in range(n_dimensions))
        ggml_type = self._u32(f"tensor {name}")
        offset = self._u64(f"tensor {name}")
        if ggml_type not in _BLOCKS:
            raise BadModel(f"tensor {name} has the unknown ggml type {ggml_type}")
        block_items, block_bytes = _BLOCKS[ggml_type]
        if 0 in shape:
            raise BadModel(f"tensor {name} has an empty dimension")
        if shape[0] % block_items:
            raise BadModel(
                f"tensor {name}: its rows of {shape[0]} do not divide into blocks of {block_items}"
            )
        if offset % alignment:
            raise BadModel(f"tensor {name} is not aligned to {alignment} bytes")
        return HeaderTensor(name, ggml_type, shape, offset, math.prod(shape) // block_items * block_bytes)

    def _value(self, key: str) -> tuple[Value | None, int]:
        kind = self._u32(f"key {key}")
        if kind == _ARRAY:
            return self._array(key)
        return self._scalar(kind, key), 1

    def _scalar(self, kind: int, key: str) -> Scalar:
        if kind == _STRING:
            return self._string(key)
        layout = _SCALARS.get(kind)
        if layout is None:
            raise BadModel(f"GGUF key {key} has the unknown value type {kind}")
        raw = self._take(layout.size, f"key {key}")
        if kind == _BOOL and raw not in (b"\0", b"\1"):
            raise BadModel(f"GGUF key {key} is a boolean that is neither 0 nor 1")
        value: Scalar = layout.unpack(raw)[0]
        return value

    def _array(self, key: str) -> tuple[Value | None, int]:
        kind = self._u32(f"key {key}")
        n_items = self._u64(f"key {key}")
        smallest = 8 if kind == _STRING else _SCALARS[kind].size if kind in _SCALARS else 0
        if not smallest:
            raise BadModel(f"GGUF key {key} is an array of the unknown or nested type {kind}")
        if n_items > MAX_ARRAY_ITEMS or n_items * smallest > self._size_bytes - self._at:
            raise BadModel(f"GGUF key {key} announces {n_items} items, more than the file can hold")
        if n_items <= MAX_KEPT_ITEMS and self._kept_items + n_items <= 16 * MAX_KEPT_ITEMS:
            self._kept_items += n_items
            return tuple(self._scalar(kind, key) for _ in range(n_items)), n_items
        if kind == _STRING:
            for _ in range(n_items):
                self._string_bytes(key)
        else:
            self._skip(n_items * smallest, f"key {key}")
        return None, n_items

    def _string(self, what: str) -> str:
        try:
            return self._string_bytes(what).decode()
        except UnicodeDecodeError:
            # Tokens of byte-level vocabularies and odd authors' names exist; nothing here depends on them.
            return ""

    def _string_bytes(self, what: str) -> bytes:
        length = self._u64(what)
        if length > MAX_STRING_BYTES:
            raise BadModel(f"GGUF {what}: a string of {length} bytes is above {MAX_STRING_BYTES}")
        return self._take(length, what)

    def _name(self, what: str) -> str:
        length = self._u64(what)
        if not 1 <= length <= MAX_NAME_BYTES:
            raise BadModel(f"GGUF {what} is {length} bytes long, not 1 to {MAX_NAME_BYTES}")
        raw = self._take(length, what)
        if not all(0x21 <= byte <= 0x7E for byte in raw):
            raise BadModel(f"GGUF {what} {raw[:40]!r} is not printable ASCII")
        return raw.decode("ascii")

    def _u32(self, what: str) -> int:
        number: int = _U32.unpack(self._take(4, what))[0]
        return number

    def _u64(self, what: str) -> int:
        number: int = _U64.unpack(self._take(8, what))[0]
        return number

    def _take(self, n_bytes: int, what: str) -> bytes:
        self._advance(n_bytes, what)
        raw = self._file.read(n_bytes)
        if len(raw) != n_bytes:
            raise HeaderIncomplete("the file shrank while it was read")
        return raw

    def _skip(self, n_bytes: int, what: str) -> None:
        self._advance(n_bytes, what)
        self._file.seek(n_bytes, os.SEEK_CUR)

    def _advance(self, n_bytes: int, what: str) -> None:
        if self._at + n_bytes > self._size_bytes:
            raise BadModel(f"the file is truncated inside its header ({what})")
        self._at += n_bytes
        if self._at > self._max_bytes:
            raise BadModel(f"the header is longer than {self._max_bytes} bytes")
