"""Read the header of a GGUF: metadata, and where each tensor lies, in one file or in several.

gguf-py's `GGUFReader` makes several numpy objects per array element, seconds for a vocabulary of 150,000
tokens, and trusts every length. This reader walks the same bytes once, keeps each value as a slice of the
mapped file and decodes it when asked, so that cutting a segment copies values byte for byte. Every length
is checked against the file before it is used: a broken file is a `CallError("bad_model")` that says what is
wrong with it.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from swarmllm_proto.split_files import SPLIT_COUNT, SPLIT_MAX, SPLIT_NO, SPLIT_TENSORS, parse_split_name
from swarmllm_workers.errors import CallError

MAGIC: Final = b"GGUF"
ALIGNMENT_DEFAULT: Final = 32
ALIGNMENT_MAX: Final = 65536
N_VALUES_MAX: Final = 65536
N_TENSORS_MAX: Final = 1_000_000
NAME_SIZE_MAX: Final = 65535
"""gguf.cpp refuses longer keys."""
N_DIMS_MAX: Final = 4

STRING: Final = 8
ARRAY: Final = 9
BOOL: Final = 7
_SCALARS: Final[dict[int, str]] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
UINT32: Final = 4
FLOAT32: Final = 6

Scalar = int | float | bool | str


@dataclass(frozen=True)
class Value:
    """One metadata value. `raw` is its encoding without the leading type."""

    type: int
    raw: bytes | mmap.mmap | memoryview
    element_type: int = -1
    n_elements: int = 0

    def scalar(self) -> Scalar:
        if self.type == STRING:
            return bytes(self.raw[8:]).decode("utf-8", "replace")
        if self.type == ARRAY:
            raise CallError("bad_model", "expected a single value, found an array")
        return np.frombuffer(self.raw, _SCALARS[self.type])[0].item()  # type: ignore[no-any-return]

    def numbers(self) -> np.ndarray:
        """The elements of an array of numbers, in the type in which the file stores them."""
        if self.type != ARRAY or self.element_type not in _SCALARS:
            raise CallError("bad_model", "expected an array of numbers")
        return np.frombuffer(self.raw, _SCALARS[self.element_type], offset=12)

    def sliced(self, start: int, end: int) -> Value:
        """The array's elements [start, end)."""
        return array_value(self.element_type, self.numbers()[start:end])


def scalar_value(value_type: int, value: float | str) -> Value:
    if isinstance(value, str):
        text = value.encode()
        return Value(STRING, struct.pack("<Q", len(text)) + text)
    return Value(value_type, np.array(value, _SCALARS[value_type]).tobytes())


def array_value(element_type: int, numbers: np.ndarray) -> Value:
    data = np.ascontiguousarray(numbers, _SCALARS[element_type])
    return Value(ARRAY, struct.pack("<IQ", element_type, len(data)) + data.tobytes(), element_type, len(data))


@dataclass(frozen=True)
class TensorInfo:
    name: str
    shape: tuple[int, ...]
    """As GGUF stores it: the contiguous dimension first."""
    type: GGMLQuantizationType
    offset: int
    """From the start of the file."""
    size_bytes: int
    path: Path
    """The file."""


class GgufFile:
    """A mapped GGUF. `values` in file order, `tensors` by name in file order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.paths: tuple[Path, ...] = (path,)
        """The files of the model (see `SplitSource`)."""
        try:
            with path.open("rb") as file:
                self.size_bytes = file.seek(0, 2)
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CallError("bad_model", f"cannot read {path}: {reason}", "path") from None
        self._at = 0
        self.values: dict[str, Value] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._read_header()
        except (struct.error, IndexError) as error:
            self.map.close()
            raise CallError("bad_model", f"{path.name} is truncated inside its header", "path") from error
        except CallError:
            self.map.close()
            raise

    def close(self) -> None:
        self.values.clear()
        self.map.close()

    def text(self, key: str, default: str = "") -> str:
        value = self.values.get(key)
        return str(value.scalar()) if value is not None and value.type == STRING else default

    def number(self, key: str) -> int | None:
        value = self.values.get(key)
        return None if value is None or value.type in (STRING, ARRAY) else int(value.scalar())

    def numbers(self, key: str) -> list[int] | None:
        value = self.values.get(key)
        if value is None or value.type != ARRAY or value.element_type in (STRING, ARRAY):
            return None
        return [int(number) for number in value.numbers()]

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None or value.type in (STRING, ARRAY):
            if default is None:
                raise CallError("bad_model", f"{self.path.name} has no number {key!r}", "path")
            return default
        return int(value.scalar())

    def tensor_data(self, tensor: TensorInfo) -> np.ndarray:
        """The tensor's bytes, u8 [size_bytes]: a view of the file."""
        return np.frombuffer(self._map_of(tensor), np.uint8, tensor.size_bytes, tensor.offset)

    def _map_of(self, tensor: TensorInfo) -> mmap.mmap:
        return self.map

    def _read_header(self) -> None:
        name = self.path.name
        if self.map[:4] != MAGIC:
            raise CallError("bad_model", f"{name} is not a GGUF file", "path")
        self._at = 4
        version = self._unpack("<I")
        if version not in (2, 3):
            raise CallError("bad_model", f"{name} has GGUF version {version} (2 and 3 can be read)", "path")
        n_tensors, n_values = self._unpack("<Q"), self._unpack("<Q")
        if n_tensors > N_TENSORS_MAX or n_values > N_VALUES_MAX:
            raise CallError("bad_model", f"{name} announces {n_tensors} tensors, {n_values} values", "path")
        for _ in range(n_values):
            key = self._string()
            self.values[key] = self._value(key)
        infos = [self._tensor_head() for _ in range(n_tensors)]
        self.alignment = self.integer("general.alignment", ALIGNMENT_DEFAULT)
        if not 8 <= self.alignment <= ALIGNMENT_MAX or self.alignment & (self.alignment - 1):
            raise CallError("bad_model", f"{name} has alignment {self.alignment}", "path")
        data_start = -(-self._at // self.alignment) * self.alignment
        for tensor_name, shape, tensor_type, offset in infos:
            block, block_bytes = GGML_QUANT_SIZES[tensor_type]
            if shape[0] % block:
                raise CallError(
                    "bad_model", f"tensor {tensor_name} has rows of {shape[0]} in blocks of {block}", "path"
                )
            size = prod(shape) // block * block_bytes
            if offset % self.alignment or data_start + offset + size > self.size_bytes:
                raise CallError("bad_model", f"tensor {tensor_name} lies outside of {name}", "path")
            if tensor_name in self.tensors:
                raise CallError("bad_model", f"tensor {tensor_name} appears twice", "path")
            self.tensors[tensor_name] = TensorInfo(
                tensor_name, shape, tensor_type, data_start + offset, size, self.path
            )

    def _unpack(self, form: str) -> int:
        (number,) = struct.unpack_from(form, self.map, self._at)
        self._at += struct.calcsize(form)
        return int(number)

    def _take(self, size: int) -> bytes:
        if size > self.size_bytes - self._at:
            raise IndexError(size)
        data = self.map[self._at : self._at + size]
        self._at += size
        return data

    def _string(self) -> str:
        size = self._unpack("<Q")
        if size > NAME_SIZE_MAX:
            raise CallError("bad_model", f"{self.path.name} has a name of {size} bytes", "path")
        return self._take(size).decode("utf-8", "replace")

    def _value(self, key: str) -> Value:
        value_type = self._unpack("<I")
        start = self._at
        if value_type == STRING:
            self._skip_string()
            return Value(value_type, self.map[start : self._at])
        if value_type != ARRAY:
            if value_type not in _SCALARS:
                raise CallError("bad_model", f"{key} has the unknown type {value_type}", "path")
            return Value(value_type, self._take(np.dtype(_SCALARS[value_type]).itemsize))
        element_type, n_elements = self._unpack("<I"), self._unpack("<Q")
        if element_type == STRING:
            if n_elements * 8 > self.size_bytes - self._at:
                raise CallError("bad_model", f"{key} announces {n_elements} elements", "path")
            for _ in range(n_elements):
                self._skip_string()
        elif element_type in _SCALARS:
            self._skip(n_elements * np.dtype(_SCALARS[element_type]).itemsize)
        else:
            raise CallError("bad_model", f"{key} is an array of the unknown type {element_type}", "path")
        return Value(value_type, self.map[start : self._at], element_type, n_elements)

    def _skip_string(self) -> None:
        self._skip(self._unpack("<Q"))

    def _skip(self, size: int) -> None:
        if size > self.size_bytes - self._at:
            raise IndexError(size)
        self._at += size

    def _tensor_head(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        n_dims = self._unpack("<I")
        if not 1 <= n_dims <= N_DIMS_MAX:
            raise CallError("bad_model", f"tensor {name} has {n_dims} dimensions", "path")
        shape = tuple(self._unpack("<Q") for _ in range(n_dims))
        if not all(0 < size < 2**40 for size in shape):
            raise CallError("bad_model", f"tensor {name} has the shape {shape}", "path")
        type_tag = self._unpack("<I")
        try:
            tensor_type = GGMLQuantizationType(type_tag)
        except ValueError:
            raise CallError("bad_model", f"tensor {name} has the unknown type {type_tag}", "path") from None
        return name, shape, tensor_type, self._unpack("<Q")


class SplitSource(GgufFile):
    """A model in several GGUF files, read as one. `path` and `values` are those of the first part, `tensors`
    those of all, in the order of the parts.

    libllama finds the other parts by their names as well (`swarmllm_proto.split_files`), so the whole model
    runs straight from them; segment files are cut from the parts that have their layers.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._parts: dict[Path, GgufFile] = {}
        try:
            self._open_parts()
        except CallError:
            self.close()
            raise

    def _open_parts(self) -> None:
        self.paths = files_of(self.path)
        n_tensors = self.integer(SPLIT_TENSORS, -1)
        for number, path in enumerate(self.paths):
            part = GgufFile(path) if number else self
            if number:
                self._parts[path] = part
            if (part.integer(SPLIT_NO, -1), part.integer(SPLIT_COUNT, 1)) != (number, len(self.paths)):
                raise CallError(
                    "bad_model", f"{path.name} is not part {number + 1} of {len(self.paths)}", "path"
                )
            if number:
                self._add(part)
        if len(self.tensors) != n_tensors:
            raise CallError(
                "bad_model",
                f"{self.path.name} announces {n_tensors} tensors, its parts have {len(self.tensors)}",
                "path",
            )

    def _add(self, part: GgufFile) -> None:
        for name, tensor in part.tensors.items():
            if name in self.tensors:
                raise CallError("bad_model", f"{part.path.name} has tensor {name} again", "path")
            self.tensors[name] = tensor
        if len(self.tensors) > N_TENSORS_MAX:
            raise CallError("bad_model", f"the parts have more than {N_TENSORS_MAX} tensors", "path")
        self.size_bytes += part.size_bytes

    def _map_of(self, tensor: TensorInfo) -> mmap.mmap:
        part = self._parts.get(tensor.path)
        return self.map if part is None else part.map

    def close(self) -> None:
        for part in self._parts.values():
            part.close()
        super().close()


def open_source(path: Path) -> GgufFile:
    """The model whose file, or the first of whose files, is `path`. Raises CallError bad_model."""
    if len(files_of(path)) > 1:
        return SplitSource(path)
    source = GgufFile(path)
    if (count := source.integer(SPLIT_COUNT, 1)) > 1:
        source.close()
        raise CallError(
            "bad_model",
            f"{path.name} is one of {count} parts of a model, but not called NAME-00001-of-{count:05}.gguf",
            "path",
        )
    return source


def files_of(path: Path) -> tuple[Path, ...]:
    """All files of a model. Raises CallError bad_model where `path` is a part, but not the first."""
    name = parse_split_name(path.name)
    if name is None:
        return (path,)
    if name.number != 1 or name.count > SPLIT_MAX:
        raise CallError("bad_model", f"{path.name} is not the first of at most {SPLIT_MAX} parts", "path")
    return tuple(path.with_name(str(each)) for each in name.all())
