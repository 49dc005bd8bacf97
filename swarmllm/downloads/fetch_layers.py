"""Downloads some layers of a file: its header, the bytes of these layers, and nothing else.

`LayerFetch` is for a model that this node or a connected one knows. Its manifest comes from the swarm, with a
hash per tensor; the bytes come from the web server. So each tensor is checked on its own.

`FetchLayers` is for a file that nobody connected knows. Which model that is cannot be known from a part of it
(see `unidentified_model`). So nothing can be checked against a hash, only against what the server said of the
file: its size, its validator, and that each answer is of that version. What is fetched is hashed, and counts
when all digests of the file are known.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from pathlib import Path

import trio

from swarmllm.downloads.remote import FileRemote, RemoteFileInfo
from swarmllm.downloads.settings import DownloadSettings, RetrySchedule
from swarmllm.downloads.source import ConnectionBroken, FileChanged
from swarmllm.downloads.unidentified_model import UnidentifiedModel
from swarmllm.downloads.whole_file import write_at
from swarmllm.errors import BadModel
from swarmllm.models import CatalogueEntry, LayerRange, Store, TensorEntry
from swarmllm.models.gguf_header import MAX_HEADER_BYTES
from swarmllm.models.hashing import TensorHasher
from swarmllm.models.tensor_locations import TensorLocations
from swarmllm.models.tensor_writer import TensorWriter, pieces
from swarmllm.operating_system import sync_data
from swarmllm.transfer.fetch import share_out

Progress = Callable[[int, int], None]
MAX_WRONG = 2
"""Attempts at one tensor whose bytes are not the model's."""


class FetchLayers:
    """Run it once."""

    def __init__(
        self,
        remote: FileRemote,
        facts: RemoteFileInfo,
        model: UnidentifiedModel,
        settings: DownloadSettings,
        retries: RetrySchedule,
        progress: Progress,
    ) -> None:
        self._remote = remote
        self._facts = facts
        self._model = model
        self._settings = settings
        self._progress = progress
        self._retries = retries
        self._n_bytes = self._total_bytes = 0

    async def run(
        self, layers: LayerRange, make_room: Callable[[int], Awaitable[None]], header_digest: str = ""
    ) -> None:
        """`make_room(n_bytes)` is awaited before the layers are fetched; `header_digest`: what the file's
        header has to hash to. Raises DownloadError, BadModel, StoreFull; what has arrived is kept, unless the
        file changed and nothing else depends on it."""
        model = self._model
        is_new = not model.held
        try:
            if model.layout is None:
                await self._header()
            if header_digest and model.header_digest != header_digest:
                raise BadModel(f"{self._remote.url} has another header than the file that is shared")
            missing = await trio.to_thread.run_sync(model.missing_of, layers)
            if str(layers) not in model.state.layers:
                model.state.layers.append(str(layers))
            await model.save()
            self._total_bytes = sum(tensor.size_bytes for tensor in missing)
            await make_room(self._total_bytes - sum(model.state.begun.get(t.name, 0) for t in missing))
            await self._tensors(list(missing))
        except (FileChanged, BadModel):
            if is_new:
                await trio.to_thread.run_sync(model.forget)
            raise

    async def _header(self) -> None:
        """As much of the beginning as it takes until the header is whole."""
        have, step = 0, self._settings.header_step_bytes
        while self._model.layout is None:
            want = min(have + max(step, have // 4), self._facts.size_bytes)
            await self._read(have, want, lambda data: None)
            have = want
            try:
                await trio.to_thread.run_sync(self._model.learn_layout)
            except BadModel:
                # Perhaps only because the rest is still a hole.
                if have == self._facts.size_bytes or have > MAX_HEADER_BYTES:
                    raise
            else:
                if self._model.tensors[0].offset > have:
                    self._model.layout = None

    async def _tensors(self, pending: list[TensorEntry]) -> None:
        await share_out(self._settings.n_lanes, pending, self._tensor)

    async def _tensor(self, tensor: TensorEntry) -> None:
        model = self._model
        hasher = TensorHasher()
        begun = min(model.state.begun.get(tensor.name, 0), tensor.size_bytes)
        await trio.to_thread.run_sync(_hash_begun, model.part, tensor, begun, hasher)
        at, saved = begun, begun
        self._count(begun)

        def look(data: bytes) -> None:
            nonlocal at
            hasher.update(data)
            at += len(data)
            self._count(len(data))

        try:
            while at < tensor.size_bytes:
                until = min(tensor.size_bytes, at + self._settings.piece_bytes)
                await self._read(tensor.offset + at, tensor.offset + until, look)
                if at < tensor.size_bytes:
                    model.state.begun[tensor.name] = saved = at
                    await model.save()
        except BaseException:
            if at > saved:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(_sync, model.part)
                    model.state.begun[tensor.name] = at
                    await model.save()
            raise
        model.has(tensor.name, hasher.hexdigest())
        await model.save()

    async def _read(self, start: int, end: int, look: Callable[[bytes], None]) -> None:
        """All of [start, end), however often the connection breaks; then it is on the disk."""
        file = await trio.to_thread.run_sync(os.open, self._model.part, os.O_WRONLY | os.O_CLOEXEC)
        at = start
        try:
            while at < end:
                try:
                    async with aclosing(self._remote.read(at, end, self._facts)) as portions:
                        async for data in portions:
                            await trio.to_thread.run_sync(write_at, file, data, at)
                            look(data)
                            at += len(data)
                            self._retries.progress()
                except ConnectionBroken as error:
                    await self._retries.wait(error)
            await trio.to_thread.run_sync(sync_data, file)
        finally:
            os.close(file)

    def _count(self, n_bytes: int) -> None:
        self._n_bytes += n_bytes
        self._progress(self._n_bytes, self._total_bytes)


def _hash_begun(part: Path, tensor: TensorEntry, n_bytes: int, hasher: TensorHasher) -> None:
    with part.open("rb") as file:
        for data in pieces(file.fileno(), tensor.offset, n_bytes):
            hasher.update(data)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        sync_data(file)
    finally:
        os.close(file)


async def check_same_file(remote: FileRemote, facts: RemoteFileInfo, entry: CatalogueEntry) -> None:
    """Raises BadModel unless the file's size and its whole header are those of `entry`'s file."""
    other = BadModel(f"{remote.url} is not the file that {entry.name} was made from", field="source")
    if facts.size_bytes != entry.state.size_bytes:
        raise other
    places = TensorLocations(entry)
    n_bytes, at = min(tensor.offset for tensor in entry.manifest.tensors), 0
    async with aclosing(remote.read(0, n_bytes, facts)) as portions:
        async for data in portions:
            if await trio.to_thread.run_sync(places.read_container, at, len(data)) != data:
                raise other
            at += len(data)


class LayerFetch:
    """Tensors of one container from one server. Run it once."""

    def __init__(
        self,
        remote: FileRemote,
        facts: RemoteFileInfo,
        store: Store,
        entry: CatalogueEntry,
        tensors: Iterable[TensorEntry],
        settings: DownloadSettings,
        retries: RetrySchedule,
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
        self._retries = retries

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
                    except ConnectionBroken as error:
                        await self._retries.wait(error)
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
                self._retries.progress()
                self._done[tensor.name] = writer.n_bytes
                self._progress(sum(self._done.values()), self._total_bytes)
