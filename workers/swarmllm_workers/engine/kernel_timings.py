"""The file in which a machine's kernel timings are kept, so that they are measured once.

They hold for one processor, one build of libllama and one build of our kernels; with another of these the
file is as good as none. What it contains is checked like any other input: what is not a whole and possible
measurement is measured anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from swarmllm_proto.ipc_base import KernelType, Nanoseconds
from swarmllm_workers.engine.kernel_choice import ROW_CLASSES, RowChoice, Way

log = logging.getLogger(__name__)

FILE_BYTES_MAX: Final = 2**18
SHAPES_MAX: Final = 128
_CPUINFO_BYTES_MAX: Final = 2**16


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What products take the same time for."""

    k: Annotated[int, Meta(ge=32, le=2**31 - 1)]
    """Numbers of a matrix row."""
    n_threads: Annotated[int, Meta(ge=1, le=1024)]
    is_cached: bool
    """All matrices of the model fit in the processor's last cache."""
    type: KernelType = "Q8_0"
    """Of the matrices."""


class _Measured(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    way: Annotated[int, Meta(ge=0, le=4)]
    ggml_ns: Nanoseconds
    ours_ns: Nanoseconds | None


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    shape: Shape
    classes: Annotated[tuple[_Measured, ...], Meta(min_length=len(ROW_CLASSES), max_length=len(ROW_CLASSES))]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    machine: Annotated[str, Meta(max_length=512)]
    entries: Annotated[tuple[_Entry, ...], Meta(max_length=SHAPES_MAX)]


Timings = dict[Shape, tuple[RowChoice, ...]]


def read(path: Path, machine: str, ways: Iterable[Way]) -> Timings:
    """Empty where there is no such file, or it is another machine's, or not a whole one."""
    possible = set(ways)
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ValueError("too large")
        found = msgspec.json.decode(data, type=_File)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("kernel timings in %s cannot be used and are measured anew: %s", path.name, error)
        return {}
    if found.machine != machine:
        return {}
    return {
        entry.shape: tuple(
            RowChoice(rows, Way(each.way), each.ggml_ns, each.ours_ns)
            for rows, each in zip(ROW_CLASSES, entry.classes, strict=True)
        )
        for entry in found.entries
        if all(Way(each.way) in possible for each in entry.classes)
    }


def write(path: Path, machine: str, timings: Timings) -> None:
    """Whole or not at all. What goes wrong costs the next load its measurement, and nothing else."""
    entries = tuple(
        _Entry(shape, tuple(_Measured(each.way, each.ggml_ns, each.ours_ns) for each in choices))
        for shape, choices in list(timings.items())[-SHAPES_MAX:]
    )
    data = msgspec.json.encode(_File(machine, entries))
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        log.info("kernel timings cannot be kept in %s: %s", path.name, error.strerror)


def machine_key(libraries: Iterable[Path]) -> str:
    """The processor's name, and a digest of its features and of these libraries."""
    name, features = processor()
    digest = hashlib.sha256(features.encode())
    for path in libraries:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"{name}; {digest.hexdigest()[:32]}"


def processor() -> tuple[str, str]:
    """Its name with family and model, and its features."""
    try:
        with Path("/proc/cpuinfo").open("rb") as file:
            text = file.read(_CPUINFO_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return platform.processor() or platform.machine(), ""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name") or platform.machine()
    numbers = f"family {fields.get('cpu family', '?')}, model {fields.get('model', '?')}"
    return f"{name[:200]} ({numbers[:80]})", fields.get("flags") or fields.get("Features") or ""


def cache_bytes() -> int:
    """Of the processor's last cache; 0 where the system does not say."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text()[:32].strip()
        except OSError:
            continue
        if text[:-1].isdecimal() and text[-1:] in "KM":
            sizes.append(int(text[:-1]) * (2**20 if text[-1] == "M" else 2**10))
    return max(sizes)
