"""Some layers of a model that nobody knows yet: read whole once, kept in part.

A model's id covers every byte of it, so whoever is the first to know it has to read it all. What the layers
do not need is hashed and dropped: it costs the network, not the disk. From then on the model is known, and
the other nodes fetch only what their layers need (see `parts`).

What has been hashed is written down tensor by tensor, so an interruption costs the tensors on their way.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import trio
from blake3 import blake3

from swarmllm.downloads.errors import Broken, FileChanged, Refused
from swarmllm.downloads.patience import Patience
from swarmllm.downloads.remote import Facts, Remote
from swarmllm.downloads.settings import DownloadSettings
from swarmllm.downloads.whole import write_at
from swarmllm.errors import BadModel, SwarmLLMError
from swarmllm.models import LayerRange, TensorEntry, needed_tensors
from swarmllm.models.gguf_header import MAX_HEADER_BYTES, GgufHeader, HeaderTensor, read_header
from swarmllm.models.hashing import manifest_of
from swarmllm_proto.swarm import Outline

PART, NOTES = "layers.gguf", "digests.json"
FIRST_HEADER_BYTES = 2**20
UNKNOWN = "0" * 64
"""In place of a digest while only the layout of a model matters."""
Progress = Callable[[int, int], None]


class Notes(msgspec.Struct, kw_only=True):
    url: str
    size_bytes: int
    validator: str
    layers: str
    digests: dict[str, str]


@dataclass(frozen=True, slots=True)
class Learned:
    """All that makes the model known, and the file in which the wanted tensors lie at their places."""

    model_id: str
    outline: Outline
    header: bytes
    part: Path


class Learning:
    def __init__(
        self,
        remote: Remote,
        facts: Facts,
        folder: Path,
        layers: LayerRange,
        settings: DownloadSettings,
        progress: Progress,
    ) -> None:
        self._remote = remote
        self._facts = facts
        self._folder = folder
        self._part = folder / PART
        self._layers = layers
        self._settings = settings
        self._progress = progress
        self._patience = Patience(settings)
        self._digests: dict[str, str] = {}
        self._n_bytes = 0

    async def run(self, make_room: Callable[[int], Awaitable[None]], name: str) -> Learned:
        """`make_room(n_bytes)` is awaited before what is kept is fetched. Raises DownloadError, BadModel,
        StoreFull; what has been hashed is kept, unless the file changed."""
        try:
            await trio.to_thread.run_sync(self._begin)
            parsed = await self._header()
            wanted = await trio.to_thread.run_sync(self._wanted, parsed, name)
            await make_room(sum(tensor.size_bytes for tensor in wanted))
            await self._tensors(parsed, frozenset(tensor.name for tensor in wanted))
            return await trio.to_thread.run_sync(self._learned, parsed, name)
        except FileChanged:
            await trio.to_thread.run_sync(self.forget)
            raise

    def forget(self) -> None:
        """Blocking."""
        for name in (PART, NOTES):
            (self._folder / name).unlink(missing_ok=True)

    def _begin(self) -> None:
        facts = self._facts
        try:
            notes = msgspec.json.decode((self._folder / NOTES).read_bytes(), type=Notes)
        except (OSError, msgspec.DecodeError):
            notes = None
        if notes is not None and self._part.exists() and notes == self._notes(notes.digests):
            self._digests = notes.digests
            return
        self.forget()
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._part.open("wb") as file:
            file.truncate(facts.size_bytes)

    def _notes(self, digests: dict[str, str]) -> Notes:
        facts = self._facts
        return Notes(
            url=self._remote.url,
            size_bytes=facts.size_bytes,
            validator=facts.validator,
            layers=str(self._layers),
            digests=digests,
        )

    async def _header(self) -> GgufHeader:
        """As much of the beginning as it takes until the header is whole."""
        have, want = 0, FIRST_HEADER_BYTES
        while True:
            want = min(want, self._facts.size_bytes)
            await self._read(have, want)
            try:
                parsed = await trio.to_thread.run_sync(self._parse)
            except BadModel:
                # Perhaps only because the rest is still a hole.
                if want == self._facts.size_bytes or want > MAX_HEADER_BYTES:
                    raise
            else:
                if parsed.data_offset <= want:
                    return parsed
            have, want = want, want * 4

    def _parse(self) -> GgufHeader:
        with self._part.open("rb") as file:
            return read_header(file)

    def _wanted(self, parsed: GgufHeader, name: str) -> tuple[TensorEntry, ...]:
        with self._part.open("rb") as file:
            manifest = manifest_of(file, parsed, {tensor.name: UNKNOWN for tensor in parsed.tensors}, name)
        if self._layers not in manifest.whole:
            raise BadModel(f"{name} has layers {manifest.whole}, not {self._layers}", field="layers")
        return needed_tensors(manifest, self._layers)

    async def _tensors(self, parsed: GgufHeader, kept: frozenset[str]) -> None:
        pending = [tensor for tensor in parsed.tensors if tensor.name not in self._digests]
        self._n_bytes = sum(t.size_bytes for t in parsed.tensors if t.name in self._digests)
        failure: SwarmLLMError | None = None
        try:
            async with trio.open_nursery() as nursery:

                async def lane() -> None:
                    nonlocal failure
                    try:
                        while pending:
                            tensor = pending.pop(0)
                            await self._tensor(tensor, keep=tensor.name in kept)
                    except SwarmLLMError as error:
                        failure = failure or error
                        nursery.cancel_scope.cancel()

                for _ in range(self._settings.n_lanes):
                    nursery.start_soon(lane)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(self._save)
        if failure is not None:
            raise failure

    async def _tensor(self, tensor: HeaderTensor, *, keep: bool) -> None:
        hasher = blake3()

        def count(data: bytes) -> None:
            hasher.update(data)
            self._n_bytes += len(data)
            self._progress(self._n_bytes, self._facts.size_bytes)

        await self._read(tensor.offset, tensor.offset + tensor.size_bytes, count, keep=keep)
        self._digests[tensor.name] = hasher.hexdigest()

    async def _read(
        self, start: int, end: int, look: Callable[[bytes], None] = lambda data: None, *, keep: bool = True
    ) -> None:
        """All of [start, end), however often the connection breaks."""
        file = await trio.to_thread.run_sync(os.open, self._part, os.O_WRONLY | os.O_CLOEXEC)
        at = start
        try:
            while at < end:
                try:
                    async with aclosing(self._remote.read(at, end, self._facts)) as portions:
                        async for data in portions:
                            if keep:
                                await trio.to_thread.run_sync(write_at, file, data, at)
                            look(data)
                            at += len(data)
                            self._patience.progress()
                except Broken as error:
                    await self._patience.wait(error)
            if keep:
                await trio.to_thread.run_sync(os.fdatasync, file)
        finally:
            os.close(file)

    def _save(self) -> None:
        temporary = self._folder / f"{NOTES}.tmp"
        temporary.write_bytes(msgspec.json.encode(self._notes(self._digests)))
        temporary.replace(self._folder / NOTES)

    def _learned(self, parsed: GgufHeader, name: str) -> Learned:
        if not parsed.tensors:
            raise Refused(f"{self._remote.url}: there are no tensors in it")
        with self._part.open("rb") as file:
            manifest = manifest_of(file, parsed, self._digests, name)
            file.seek(0)
            header = file.read(parsed.tensors[0].offset)
        outline = Outline(header_bytes=len(header), size_bytes=self._facts.size_bytes, digests=self._digests)
        return Learned(manifest.model_id, outline, header, self._part)
