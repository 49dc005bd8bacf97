"""A second copy of a container's header: the one part that cannot be fetched again on its own.

Without its header nothing in a container can be found, so where it is damaged it is written anew from here.
The copy is sparse and as long as the container, so that it reads as a GGUF whose tensors are holes. Blocking.
"""

from __future__ import annotations

import os
from pathlib import Path

from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.identity import header_is_right

FILE_NAME = "header.gguf"


def write_copy(container: Path, header_bytes: int) -> None:
    """Beside `container`. Raises OSError."""
    with container.open("rb") as file:
        header = file.read(header_bytes)
        size_bytes = os.fstat(file.fileno()).st_size
    copy = container.with_name(FILE_NAME)
    temporary = copy.with_name(f".{FILE_NAME}")
    with temporary.open("wb") as file:
        file.write(header)
        file.truncate(size_bytes)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(copy)


def mend_header(entry: CatalogueEntry) -> bool:
    """Whether the container's header is right, now. Its modification time has moved where it was not. Raises
    OSError."""
    copy = entry.path.with_name(FILE_NAME)
    header_bytes = min(tensor.offset for tensor in entry.manifest.tensors)
    if header_is_right(entry.path, entry.manifest):
        if not copy.exists():
            write_copy(entry.path, header_bytes)
        return True
    if not copy.exists() or not header_is_right(copy, entry.manifest):
        return False
    with copy.open("rb") as file:
        header = file.read(header_bytes)
    with entry.path.open("r+b") as file:
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
    return True
