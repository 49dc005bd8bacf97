"""Finds the damaged parts of a model, names them, and takes them out of use.

A container cannot be read without its header, so a damaged header is restored from a copy. The copy is sparse
and as long as the container, so that it reads as a GGUF whose tensors are holes. Blocking.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from swarmllm.errors import BadModel
from swarmllm.models.catalogue import Catalogue
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.hashing import Progress
from swarmllm.models.model_files import MTIME_STEP_NS
from swarmllm.models.tensor_locations import TensorLocations
from swarmllm.models.tensor_writer import disk_faults
from swarmllm.models.verification import (
    HEADER,
    SegmentPlace,
    Verification,
    header_is_right,
    seal_is_right,
    segments_of,
)

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


def repair_header(entry: CatalogueEntry) -> bool:
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


def find_damage(
    catalogue: Catalogue, entry: CatalogueEntry, copies: Path | None, progress: Progress
) -> tuple[str, ...]:
    """Read and hash all that is there; returns the names of the damaged parts: tensors, HEADER, segments.
    In a container damaged tensors are absent from then on, so that the next load fetches them again, and
    the header is repaired; copies of a user's layers go, to be made again. Raises BadModel."""
    with disk_faults(entry.path):
        damaged = [] if header_is_right(entry.path, entry.manifest) else [HEADER]
        if entry.is_stored and not repair_header(entry):
            raise BadModel(
                f"the header of {entry.path} is damaged and cannot be repaired; remove the model and load"
                f" it again: swarmllm models rm {entry.name}"
            )
        segments = segments_of(entry, copies)
        spoilt = [segment for segment in segments if not seal_is_right(segment)]
        entry = lose(catalogue, entry, (), spoilt)
        left = [segment for segment in segments if segment not in spoilt]
        reading = Verification(entry, left, progress)
        names = tuple(reading.damaged_tensors(TensorLocations(entry)))
        wrong = tuple(reading.damaged_segments())
        n_layers = entry.manifest.n_layers
        held = [each for each in left if any(each.name.holds(name, n_layers) for name in names)]
        lose(catalogue, entry, names, [*wrong, *(held if entry.is_stored else ())])
    return (*damaged, *map(str, (*spoilt, *wrong)), *names)


def lose(
    catalogue: Catalogue, entry: CatalogueEntry, names: Iterable[str], segments: Collection[SegmentPlace]
) -> CatalogueEntry:
    """With a segment file goes all that has moved there: what is fetched again goes into the
    container."""
    if entry.is_stored and (names or segments):
        n_layers = entry.manifest.n_layers
        gone = {
            tensor.name
            for tensor in entry.manifest.tensors
            if any(segment.name.holds(tensor.name, n_layers) for segment in segments)
        }
        with catalogue.database() as database:
            database.executemany(
                "DELETE FROM tensors WHERE model_id = ? AND name = ?",
                [(entry.model_id, name) for name in gone.union(names)],
            )
            database.execute(
                "UPDATE models SET mtime_ns = mtime_ns + ? WHERE model_id = ?",
                (MTIME_STEP_NS, entry.model_id),
            )
    for segment in segments:
        segment.path.unlink(missing_ok=True)
    return seal(catalogue, entry) if entry.is_stored else entry


def seal(catalogue: Catalogue, entry: CatalogueEntry) -> CatalogueEntry:
    """Give the container back its modification time, by which others know it; returns the entry as it is
    now."""
    now = catalogue.get(entry.model_id)
    with disk_faults(entry.path):
        os.utime(now.path, ns=(now.state.mtime_ns, now.state.mtime_ns))
    return now
