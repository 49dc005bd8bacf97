"""The digests of files that this node's catalogue knows whole, for nodes that have only a part of one."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import trio
from blake3 import blake3

from swarmllm.models import Catalogue, CatalogueEntry, TensorEntry
from swarmllm.models.hashing import READ_BYTES

REMEMBERED = 64
"""Files whose header has been hashed."""


class KnownFiles:
    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._headers: OrderedDict[tuple[str, int], str] = OrderedDict()
        """(ModelId, modification time) -> BLAKE3 of the file up to its first tensor."""

    async def digests(self, header: str, size_bytes: int) -> dict[int, bytes] | None:
        """Of every tensor of a file, in the order of their offsets; None: there is no such model here."""
        for entry in await trio.to_thread.run_sync(self._catalogue.of_size, size_bytes):
            tensors = sorted(
                entry.manifest.tensors,
                key=lambda tensor: tensor.offset,
            )
            if tensors and await self._header(entry, tensors[0]) == header:
                return {place: bytes.fromhex(tensor.blake3) for place, tensor in enumerate(tensors)}
        return None

    async def _header(self, entry: CatalogueEntry, first: TensorEntry) -> str:
        key = (entry.model_id, entry.state.mtime_ns)
        if key not in self._headers:
            self._headers[key] = await trio.to_thread.run_sync(_hash_start, entry.path, first.offset)
            while len(self._headers) > REMEMBERED:
                self._headers.popitem(last=False)
        return self._headers.get(key, "")


def _hash_start(path: Path, n_bytes: int) -> str:
    """Empty where it cannot be read."""
    hasher = blake3()
    try:
        with path.open("rb") as file:
            while n_bytes and (data := file.read(min(READ_BYTES, n_bytes))):
                hasher.update(data)
                n_bytes -= len(data)
    except OSError:
        return ""
    return "" if n_bytes else hasher.hexdigest()
