"""Only the tensors that some layers need, of a model that is known here or to a connected node.

The model's manifest comes from the swarm, with a hash per tensor; the bytes come from the web server. So
each tensor is checked on its own, and what is not needed is never asked for. Without a manifest it cannot
be: who has read only a part of a file cannot know which model it is a part of (see `fetch_layers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import aclosing

import trio

from swarmllm.downloads.remote import Facts, FileRemote
from swarmllm.downloads.settings import DownloadSettings, RetrySchedule
from swarmllm.downloads.source import Broken
from swarmllm.errors import BadModel
from swarmllm.models import CatalogueEntry, Store, TensorEntry
from swarmllm.models.tensor_locations import Places
from swarmllm.models.tensor_writer import TensorWriter
from swarmllm.transfer.fetch import share_out

MAX_WRONG = 2
"""Attempts at one tensor whose bytes are not the model's."""
Progress = Callable[[int, int], None]


async def check_same_file(remote: FileRemote, facts: Facts, entry: CatalogueEntry) -> None:
    """Raises BadModel unless the file's size and its whole header are those of `entry`'s file."""
    other = BadModel(f"{remote.url} is not the file that {entry.name} was made from", field="source")
    if facts.size_bytes != entry.state.size_bytes:
        raise other
    places = Places(entry)
    n_bytes, at = min(tensor.offset for tensor in entry.manifest.tensors), 0
    async with aclosing(remote.read(0, n_bytes, facts)) as portions:
        async for data in portions:
            if await trio.to_thread.run_sync(places.read_container, at, len(data)) != data:
                raise other
            at += len(data)


class Parts:
    """Tensors of one container from one server. Run it once."""

    def __init__(
        self,
        remote: FileRemote,
        facts: Facts,
        store: Store,
        entry: CatalogueEntry,
        tensors: Iterable[TensorEntry],
        settings: DownloadSettings,
        patience: RetrySchedule,
        progress: Progress,
    ) -> None:
        self._remote = remote
        self._facts = facts
        self._store = store
        self._entry = entry
        self._pending = list(tensors)
        self._total_bytes = sum(tensor.size_bytes for tensor in self._pending)
        self._settings = settings
        self._progress = progress
        self._done: dict[str, int] = {}
        self._patience = patience

    async def run(self) -> None:
        """Raises DownloadError, BadModel, StoreFull; what has arrived is kept."""
        await share_out(self._settings.n_lanes, self._pending, self._tensor)

    async def _tensor(self, tensor: TensorEntry) -> None:
        writer = await trio.to_thread.run_sync(self._store.open_tensor, self._entry, tensor)
        n_wrong = 0
        try:
            while True:
                while writer.n_bytes < tensor.size_bytes:
                    try:
                        await self._read(tensor, writer)
                    except Broken as error:
                        await self._patience.wait(error)
                if await trio.to_thread.run_sync(writer.finish):
                    return
                n_wrong += 1
                if n_wrong == MAX_WRONG:
                    raise BadModel(
                        f"{self._remote.url} has other bytes of tensor {tensor.name} than {self._entry.name}"
                    )
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(writer.save)
                writer.close()

    async def _read(self, tensor: TensorEntry, writer: TensorWriter) -> None:
        start, end = tensor.offset + writer.n_bytes, tensor.offset + tensor.size_bytes
        async with aclosing(self._remote.read(start, end, self._facts)) as portions:
            async for data in portions:
                await trio.to_thread.run_sync(writer.append, data)
                self._patience.progress()
                self._done[tensor.name] = writer.n_bytes
                self._progress(sum(self._done.values()), self._total_bytes)
