"""Cut a segment file: a small GGUF that holds layers [start, end) of another, renumbered from 0.

libllama has no public "run layers 8 to 15"; a file that says it has only those layers needs none. Beside
the layers it holds what libllama insists on: without the head a vocabulary of 32 dummy tokens, with the
head the real output matrix and, where that is not the embedding itself, an embedding of the right shape
that nobody reads (a hole in the file). The embedding's rows are looked up outside (`embedding.py`), so
every segment is fed hidden states.

Tensor bytes are copied by way of a buffer, a whole huge page at a time (`huge_pages.py`); with
`copy_file_range` the page cache would hold them in small pages. `llama_model_init_from_user` would avoid
the file, but it invents every optional tensor with uninitialised data.

Bit-exactness rests on each layer seeing the numbers it would see in the uncut model: per-layer metadata is
sliced, everything else is kept as it is (`swarmllm_proto.architectures` is the table of exceptions).
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
from gguf.constants import GGMLQuantizationType

from swarmllm_proto.architectures import PER_LAYER_KEYS, Architecture, window_period
from swarmllm_proto.segment_names import NO_SEAL, SEAL_KEY, UNFINISHED, seal
from swarmllm_workers.engine.huge_pages import PageWriter
from swarmllm_workers.engine.shared_weights import FilePlace, Part
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import (
    ARRAY,
    FLOAT32,
    MAGIC,
    STRING,
    UINT32,
    GgufFile,
    TensorInfo,
    Value,
    array_value,
    scalar_value,
)

DUMMY_VOCABULARY: Final = 32
WIDE_WINDOW: Final = 2**24
"""Rows: the largest context that can be asked for."""

_BLOCK: Final = re.compile(r"blk\.(\d+)\.(.+)", re.ASCII)
_KEPT_GENERAL: Final = frozenset(
    {"general.architecture", "general.alignment", "general.quantization_version"}
)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Planned:
    """One tensor of the segment file. `source` None: a hole."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    size_bytes: int
    source: TensorInfo | None


def layer_of(tensor: str) -> int | None:
    """The layer of a tensor. None: it belongs to no layer."""
    block = _BLOCK.fullmatch(tensor)
    return None if block is None else int(block[1])


def n_layers_of(source: GgufFile) -> int:
    """The number of layers that can be run. Layers for multi-token prediction at the end do not count."""
    prefix = source.text("general.architecture")
    n_blocks = source.integer(f"{prefix}.block_count")
    n_layers = n_blocks - source.integer(f"{prefix}.nextn_predict_layers", 0)
    if not 0 < n_layers <= n_blocks <= 65535:
        raise CallError("bad_model", f"{source.path.name} announces {n_layers} of {n_blocks} layers", "path")
    return n_layers


def plan_values(
    source: GgufFile, architecture: Architecture, start: int, end: int, n_vocab: int
) -> dict[str, Value]:
    """The segment's metadata. `n_vocab`: tokens of its vocabulary, real or dummy."""
    prefix = architecture.name
    n_blocks = source.integer(f"{prefix}.block_count")
    values: dict[str, Value] = {}
    for key, value in source.values.items():
        if key.startswith(("tokenizer.", "split.")) or (
            key.startswith("general.") and key not in _KEPT_GENERAL
        ):
            continue
        if value.type == ARRAY and value.n_elements == 0:
            continue  # gguf.cpp takes an array of length zero for a broken file
        is_per_layer = key.removeprefix(f"{prefix}.") in PER_LAYER_KEYS or (
            architecture.is_generic and key.startswith(f"{prefix}.") and value.n_elements == n_blocks
        )
        if value.type == ARRAY and is_per_layer:
            if value.n_elements < end:
                raise CallError(
                    "bad_model", f"{key} has {value.n_elements} elements for {n_blocks} layers", "path"
                )
            value = value.sliced(start, end)
        values[key] = value
    values[f"{prefix}.block_count"] = scalar_value(UINT32, end - start)
    if f"{prefix}.nextn_predict_layers" in values:
        values[f"{prefix}.nextn_predict_layers"] = scalar_value(UINT32, 0)
    dense = source.integer(f"{prefix}.leading_dense_block_count", -1)
    if dense >= 0:
        values[f"{prefix}.leading_dense_block_count"] = scalar_value(
            UINT32, min(max(dense - start, 0), end - start)
        )
    if architecture.sliding_window_period:
        _set_windows(values, source, architecture, start, end)
    if architecture.recurrent_period:
        _set_recurrent(values, source, architecture, start, end)
    _write_out(values, source, architecture)
    if start > 0:
        for key, number in architecture.reset_keys:
            values[f"{prefix}.{key}"] = scalar_value(FLOAT32 if isinstance(number, float) else UINT32, number)
    values[f"{prefix}.vocab_size"] = scalar_value(UINT32, n_vocab)
    values["tokenizer.ggml.model"] = scalar_value(STRING, "none")
    stand_in = architecture.stand_in(n_layers_of(source))
    if stand_in == prefix:
        return values
    values["general.architecture"] = scalar_value(STRING, stand_in)
    return {
        f"{stand_in}.{key.removeprefix(f'{prefix}.')}" if key.startswith(f"{prefix}.") else key: value
        for key, value in values.items()
    }


def _write_out(values: dict[str, Value], source: GgufFile, row: Architecture) -> None:
    """State what libllama would derive from the number of layers of the whole model."""
    n_layers, n_vocab = n_layers_of(source), source.tensors["token_embd.weight"].shape[-1]
    done: set[str] = set()
    for entry in row.written_out:
        key = f"{row.name}.{entry.key}"
        fits = (not entry.n_layers or n_layers in entry.n_layers) and entry.n_vocab in (0, n_vocab)
        if fits and key not in done and (entry.replaces or key not in values):
            number = entry.value(n_layers) if callable(entry.value) else entry.value
            done.add(key)
            values[key] = scalar_value(FLOAT32 if isinstance(number, float) else UINT32, number)


def _set_recurrent(
    values: dict[str, Value], source: GgufFile, row: Architecture, start: int, end: int
) -> None:
    """Write out which of the segment's layers are recurrent."""
    key = f"{row.name}.attention.recurrent_layers"
    if key in values and values[key].type == ARRAY:
        return
    period = source.integer(f"{row.name}.full_attention_interval", row.recurrent_period)
    if period <= 0:
        raise CallError("bad_model", f"{row.name}.full_attention_interval is {period}", "path")
    recurrent = np.array([(layer + 1) % period != 0 for layer in range(start, end)])
    values[key] = array_value(UINT32, recurrent)


def _set_windows(values: dict[str, Value], source: GgufFile, row: Architecture, start: int, end: int) -> None:
    """Write out which of the segment's layers attend to a window: as a period, which every release of
    libllama reads, where there is one."""
    pattern, width = (f"{row.name}.attention.sliding_window{suffix}" for suffix in ("_pattern", ""))
    windowed = row.windowed(n_layers_of(source), source.number, source.numbers)[start:end]
    if not any(windowed):
        if row.window_is_optional:
            values.pop(width, None)
            values.pop(pattern, None)
            return
        windowed = [True] * len(windowed)
        values[width] = scalar_value(UINT32, WIDE_WINDOW)
    period = window_period(windowed)
    listed = array_value(UINT32, np.array(windowed))
    values[pattern] = listed if period is None else scalar_value(UINT32, period)


def plan_tensors(
    source: GgufFile, start: int, end: int, *, has_head: bool, n_vocab: int
) -> Iterator[Planned]:
    """The segment's tensors in the order of the source file."""
    is_tied = "output.weight" not in source.tensors
    for tensor in source.tensors.values():
        block = _BLOCK.fullmatch(tensor.name)
        if block is not None:
            index = int(block[1])
            if start <= index < end:
                name = f"blk.{index - start}.{block[2]}"
                yield Planned(name, tensor.shape, tensor.type, tensor.size_bytes, tensor)
        elif has_head:
            unread = tensor.name == "token_embd.weight" and not is_tied
            yield Planned(
                tensor.name, tensor.shape, tensor.type, tensor.size_bytes, None if unread else tensor
            )
        elif tensor.shape[-1] == n_vocab and tensor.name.startswith(("token_embd.", "output.")):
            shape = (*tensor.shape[:-1], DUMMY_VOCABULARY)
            n_bytes = 4 * DUMMY_VOCABULARY * (shape[0] if len(shape) > 1 else 1)
            yield Planned(tensor.name, shape, GGMLQuantizationType.F32, n_bytes, None)
        else:
            yield Planned(tensor.name, tensor.shape, tensor.type, tensor.size_bytes, tensor)


def _plan(
    source: GgufFile, architecture: Architecture, start: int, end: int
) -> tuple[list[Planned], bytes, list[int], int]:
    """Tensors, the bytes before them, each tensor's offset in the file, and the file's size."""
    n_layers = n_layers_of(source)
    if not 0 <= start < end <= n_layers:
        raise CallError("cannot_cut", f"layers {start}:{end} of a model of {n_layers} layers", "end")
    has_head = end == n_layers
    embedding = source.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CallError("bad_model", f"{source.path.name} has no embedding matrix", "path")
    n_vocab = embedding.shape[1]
    tensors = list(plan_tensors(source, start, end, has_head=has_head, n_vocab=n_vocab))
    values = plan_values(source, architecture, start, end, n_vocab if has_head else DUMMY_VOCABULARY)
    return tensors, *_encode_header(values, tensors, source.alignment)


def plan_part(
    source: GgufFile,
    architecture: Architecture,
    start: int,
    end: int,
    places: Mapping[str, tuple[Path, int]] = MappingProxyType({}),
) -> Part:
    """What `cut` would write of [start, end), with the bytes where they lie. `places`: as for `cut`. Raises
    CallError as `cut` does."""
    tensors, header, _, size = _plan(source, architecture, start, end)
    found: dict[str, FilePlace] = {}
    for tensor in tensors:
        if tensor.source is not None:
            path, offset = places.get(tensor.source.name, (tensor.source.path, tensor.source.offset))
            found[tensor.name] = FilePlace(path, offset, tensor.size_bytes)
    return Part(header, size, found)


def plan_whole(source: GgufFile) -> Part:
    """All of a model, in one file or several, with the bytes where they lie."""
    values = {key: value for key, value in source.values.items() if not key.startswith("split.")}
    tensors = [
        Planned(each.name, each.shape, each.type, each.size_bytes, each) for each in source.tensors.values()
    ]
    header, _, size = _encode_header(values, tensors, source.alignment)
    return Part(
        header,
        size,
        {each.name: FilePlace(each.path, each.offset, each.size_bytes) for each in source.tensors.values()},
    )


def cut(
    source: GgufFile,
    architecture: Architecture,
    start: int,
    end: int,
    target: Path,
    progress: Progress | None = None,
    places: Mapping[str, tuple[Path, int]] = MappingProxyType({}),
) -> None:
    """Write layers [start, end) to `target`, atomically. The range that ends at the last layer holds the
    head. `places`: files and offsets of tensors whose bytes do not lie in the source.

    Raises CallError bad_model where the source cannot be cut so, out_of_memory where the disk is full.
    """
    tensors, header, offsets, size = _plan(source, architecture, start, end)
    temporary = target.with_name(f"{UNFINISHED}{target.name}.{os.getpid()}")
    try:
        with ExitStack() as stack, temporary.open("wb") as writer:
            paths = {*source.paths, *(path for path, _ in places.values())}
            readers = {path: stack.enter_context(path.open("rb")).fileno() for path in paths}
            os.ftruncate(writer.fileno(), size)
            total = sum(tensor.size_bytes for tensor in tensors if tensor.source is not None)
            done = 0
            with PageWriter(writer.fileno()) as pages:
                pages.write(0, header)
                for tensor, offset in zip(tensors, offsets, strict=True):
                    if tensor.source is not None:
                        path, read_at = places.get(
                            tensor.source.name, (tensor.source.path, tensor.source.offset)
                        )
                        for n in _copy(readers[path], read_at, pages, offset, tensor.size_bytes):
                            done += n
                            if progress is not None:
                                progress(done, total)
        temporary.rename(target)
    except OSError as error:
        raise CallError(
            "out_of_memory", f"cannot write the segment file {target}: {error.strerror}"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _encode_header(
    values: dict[str, Value], tensors: list[Planned], alignment: int
) -> tuple[bytes, list[int], int]:
    """The bytes before the tensor data, each tensor's offset in the file, and the file's size."""
    parts = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(values) + 1)]
    parts += [_string(SEAL_KEY), struct.pack("<I", STRING), _string(NO_SEAL)]
    seal_at = sum(map(len, parts)) - len(NO_SEAL)
    for key, value in values.items():
        parts += [_string(key), struct.pack("<I", value.type), bytes(value.raw)]
    relative = 0
    positions: list[int] = []
    for tensor in tensors:
        shape = struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
        parts += [_string(tensor.name), struct.pack("<I", len(tensor.shape)), shape]
        parts.append(struct.pack("<IQ", tensor.type, relative))
        positions.append(relative)
        relative += -(-tensor.size_bytes // alignment) * alignment
    header = b"".join(parts)
    header += bytes(-len(header) % alignment)
    return seal(header, seal_at), [len(header) + position for position in positions], len(header) + relative


def _copy(reader: int, read_at: int, pages: PageWriter, write_at: int, size: int) -> Iterator[int]:
    while size > 0:
        n = os.preadv(reader, [pages.room(write_at)[:size]], read_at)
        if n == 0:
            raise CallError("bad_model", "the GGUF became shorter while it was being cut", "path")
        pages.filled(n)
        yield n
        read_at, write_at, size = read_at + n, write_at + n, size - n


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
