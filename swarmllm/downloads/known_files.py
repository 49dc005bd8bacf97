"""The digests of files that this node's catalogue knows whole, for nodes that have only a part of one."""

from __future__ import annotations

from collections import OrderedDict

import trio
from blake3 import blake3

from swarmllm.errors import BadModel
from swarmllm.models import Catalogue, CatalogueEntry, TensorEntry
from swarmllm.models.hashing import READ_BYTES
from swarmllm.models.tensor_locations import Places

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
            self._headers[key] = await trio.to_thread.run_sync(_hash_start, Places(entry), first.offset)
            while len(self._headers) > REMEMBERED:
                self._headers.popitem(last=False)
        return self._headers.get(key, "")


def _hash_start(places: Places, n_bytes: int) -> str:
    """Empty where it cannot be read."""
    hasher, at = blake3(), 0
    try:
        while at < n_bytes and (data := places.read_container(at, min(READ_BYTES, n_bytes - at))):
            hasher.update(data)
            at += len(data)
    except (OSError, BadModel):
        return ""
    return hasher.hexdigest() if at == n_bytes else ""
