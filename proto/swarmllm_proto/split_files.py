"""Models in several GGUF files: how the files are called, and what their headers say about it.

The convention is libllama's: `NAME-00001-of-00004.gguf`. The first part has all metadata; every part has its
number (`split.no`, from 0), the number of parts (`split.count`) and the number of tensors in all parts
(`split.tensors.count`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from blake3 import blake3

SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"
SPLIT_KEYS = frozenset({SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS})
SPLIT_MAX = 1024
"""Parts of a model. The largest ones that are published have about 100."""

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class SplitName:
    """`str()` gives the file's name."""

    stem: str
    number: int
    """From 1."""
    count: int

    def __str__(self) -> str:
        return f"{self.stem}-{self.number:05}-of-{self.count:05}.gguf"

    def all(self) -> tuple[SplitName, ...]:
        """The names of all parts, in order."""
        return tuple(replace(self, number=number) for number in range(1, self.count + 1))


def parse_split_name(name: str) -> SplitName | None:
    """Of a file, or a path or address that ends in a file's name. None: not the name of a part."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    number, count = int(match["number"]), int(match["count"])
    return SplitName(match["stem"], number, count) if 1 <= number <= count and count > 1 else None


def split_stem(name: str) -> str:
    """A file's name without `.gguf` and, also where it is the only part, without the number of the part."""
    match = _NAME.fullmatch(name)
    return match["stem"] if match else name.removesuffix(".gguf")


def by_model(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of files, grouped by the model that they are parts of, under the name of its first part."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        split = parse_split_name(name)
        models.setdefault(str(replace(split, number=1)) if split else name, []).append(name)
    return models


def joint_mtime_ns(files: Sequence[tuple[int, int]]) -> int:
    """One number in place of the modification times of several files, by which a change of any of them shows.
    `files`: (size, modification time in ns) of each."""
    digest = blake3(repr([tuple(map(int, each)) for each in files]).encode()).digest(7)
    return int.from_bytes(digest)
