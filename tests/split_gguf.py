"""Splits a GGUF into parts as `llama-gguf-split` does, from gguf-py's reading of it."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf

ALIGNMENT = 32
_FORMATS = {"split.no": (2, "<H"), "split.count": (2, "<H"), "split.tensors.count": (5, "<i")}


def split_gguf(
    source: Path,
    folder: Path,
    boundaries: Sequence[int],
    *,
    stem: str = "model",
    changed: Mapping[int, Mapping[str, int | None]] | None = None,
    twice: str = "",
) -> list[Path]:
    """The parts of `source`. `boundaries`: the tensor with which each part after the first begins, so that
    (0, n) makes a first part of metadata only. `changed`: for the part of this number (from 1) keys of the
    split that say something else (None: not there). `twice`: a tensor that is also in the last part."""
    reader = gguf.GGUFReader(source)
    metadata = [
        b"".join(bytes(each.data) for each in field.parts)
        for name, field in reader.fields.items()
        if not name.startswith(("GGUF.", "split."))
    ]
    tensors = list(reader.tensors)
    ends = [*boundaries, len(tensors)]
    paths = []
    for number, (start, end) in enumerate(zip([0, *boundaries], ends, strict=True), start=1):
        inside = tensors[start:end]
        if twice and number == len(ends):
            inside += [tensor for tensor in tensors if tensor.name == twice]
        said: dict[str, int | None] = {
            "split.no": number - 1,
            "split.count": len(ends),
            "split.tensors.count": len(tensors) + bool(twice),
        }
        said |= (changed or {}).get(number, {})
        keys = metadata if number == 1 else []
        keys = [*keys, *(_key(name, value) for name, value in said.items() if value is not None)]
        path = folder / f"{stem}-{number:05}-of-{len(ends):05}.gguf"
        path.write_bytes(_file(keys, inside))
        paths.append(path)
    return paths


def _key(name: str, value: int) -> bytes:
    kind, form = _FORMATS[name]
    return _text(name) + struct.pack("<I", kind) + struct.pack(form, value)


def _file(keys: Sequence[bytes], tensors: Sequence[gguf.ReaderTensor]) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys)
    body = b""
    for tensor in tensors:
        shape = [int(size) for size in tensor.shape]
        head += _text(tensor.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += struct.pack("<IQ", int(tensor.tensor_type), len(body))
        data = tensor.data.tobytes()
        body += data + bytes(-len(data) % ALIGNMENT)
    return head + bytes(-len(head) % ALIGNMENT) + body


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
