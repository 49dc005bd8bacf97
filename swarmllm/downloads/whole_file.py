"""A whole file: fetched in pieces side by side, continued after any interruption, checked before it counts.

A folder per source holds what has come so far: `part.gguf`, sparse, and `state.json`, which says which bytes
of it count and of which version of the file they are. It is written after the bytes are on the disk, so a
process killed at any moment loses the pieces on their way and nothing else.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import aclosing
from pathlib import Path

import msgspec
import trio

from swarmllm.downloads.digest_book import Span, cut, joined, missing, n_bytes
from swarmllm.downloads.remote import FileRemote, HashedPiece, HashedPieces, RemoteFileInfo, Zeros
from swarmllm.downloads.settings import DownloadSettings, RetrySchedule
from swarmllm.downloads.source import ConnectionBroken, DownloadError, FileChanged
from swarmllm.errors import StoreFull
from swarmllm.models.tensor_writer import pieces
from swarmllm.operating_system import sync_data
from swarmllm.transfer.fetch import share_out

log = logging.getLogger(__name__)

PART, STATE = "part.gguf", "state.json"
Progress = Callable[[int, int], None]


class DownloadState(msgspec.Struct, kw_only=True):
    url: str
    size_bytes: int
    validator: str
    done: list[Span]


class WholeFile:
    """One file on its way into `folder`."""

    def __init__(
        self,
        remote: FileRemote,
        folder: Path,
        settings: DownloadSettings,
        retries: RetrySchedule,
        progress: Progress,
    ) -> None:
        self.part = folder / PART
        self._remote = remote
        self._folder = folder
        self._settings = settings
        self._progress = progress
        self._facts = RemoteFileInfo(0, "", "", has_ranges=False)
        self._done: list[Span] = []
        self._retries = retries
        self._saving = trio.Lock()

    async def run(self, facts: RemoteFileInfo, sha256: str, on_checking: Callable[[], None]) -> None:
        """Fetch what is missing; `part` is the file then, its `sha256` (or what the server said) checked.
        Raises DownloadError, StoreFull; what has arrived is kept, unless it is wrong."""
        self._facts = facts
        self._done = await trio.to_thread.run_sync(self._begin)
        self._report()
        try:
            while left := missing(self._done, facts.size_bytes):
                await self._fetch(left)
        except FileChanged:
            # Only now: every lane has ended.
            await trio.to_thread.run_sync(self.forget)
            raise
        on_checking()
        for file in self._remote.hashed(facts, sha256):
            if await self._sha256(file.pieces) != file.sha256:
                await trio.to_thread.run_sync(self._throw_away, file)
                raise DownloadError(
                    f"{file.url}: what came does not have the SHA-256 {file.sha256}; it is thrown away"
                )

    def forget(self) -> None:
        """Throw away what has come. Blocking."""
        for name in (PART, STATE):
            (self._folder / name).unlink(missing_ok=True)

    def _throw_away(self, file: HashedPieces) -> None:
        """Of several files, only this one. Blocking."""
        gone = joined(piece for piece in file.pieces if isinstance(piece, tuple))
        size_bytes = self._facts.size_bytes
        kept = missing([*missing(self._done, size_bytes), *gone], size_bytes)
        if kept:
            self._write_state(kept)
        else:
            self.forget()

    def _begin(self) -> list[Span]:
        """What an earlier attempt has left, if it was of the same version of the file."""
        facts = self._facts
        try:
            state = msgspec.json.decode((self._folder / STATE).read_bytes(), type=DownloadState)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            state = None
        same = state is not None and (state.url, state.size_bytes, state.validator) == (
            self._remote.url,
            facts.size_bytes,
            facts.validator,
        )
        if state is None or not same or not facts.has_ranges or not self.part.exists():
            if state is not None:
                log.info("%s is begun anew", self._remote.url)
            self.forget()
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self.part.open("wb") as file:
                file.truncate(facts.size_bytes)
            return []
        return joined((start, min(end, facts.size_bytes)) for start, end in state.done if start >= 0)

    async def _fetch(self, left: list[Span]) -> None:
        size_bytes = self._settings.piece_bytes if self._facts.has_ranges else self._facts.size_bytes
        wanted = cut(left, size_bytes)

        async def fetch(piece: Span) -> None:
            await self._piece(*piece)

        await share_out(self._settings.n_lanes, wanted, fetch)

    async def _piece(self, start: int, end: int) -> None:
        """All of it, however often the connection breaks."""
        at = start
        while at < end:
            at, failure = await self._read(at if self._facts.has_ranges else start, end)
            if failure is not None:
                await self._retries.wait(failure)

    async def _read(self, start: int, end: int) -> tuple[int, ConnectionBroken | None]:
        """How far it came, and what broke it off."""
        at = start
        reading = self._remote.read(start, end, self._facts)
        file = await trio.to_thread.run_sync(os.open, self.part, os.O_WRONLY | os.O_CLOEXEC)
        try:
            async with aclosing(reading) as portions:
                async for data in portions:
                    await trio.to_thread.run_sync(write_at, file, data, at)
                    at += len(data)
                    self._note(at - len(data), at)
        except ConnectionBroken as error:
            return at, error
        finally:
            with trio.CancelScope(shield=True):
                await self._save(file)
                os.close(file)
        return at, None

    def _note(self, start: int, end: int) -> None:
        if self._facts.has_ranges:
            # Else the next attempt begins at the start, and this was no progress.
            self._retries.progress()
        self._done = joined([*self._done, (start, end)])
        self._report()

    async def _save(self, file: int) -> None:
        """What is noted now is on the disk before it is written down."""
        async with self._saving:
            done = list(self._done) if self._facts.has_ranges else []
            await trio.to_thread.run_sync(sync_data, file)
            await trio.to_thread.run_sync(self._write_state, done)

    def _write_state(self, done: list[Span]) -> None:
        facts = self._facts
        state = DownloadState(
            url=self._remote.url, size_bytes=facts.size_bytes, validator=facts.validator, done=done
        )
        temporary = self._folder / f"{STATE}.tmp"
        temporary.write_bytes(msgspec.json.encode(state))
        temporary.replace(self._folder / STATE)

    def _report(self) -> None:
        self._progress(n_bytes(self._done), self._facts.size_bytes)

    async def _sha256(self, file_pieces: Iterable[HashedPiece]) -> str:
        digest = hashlib.sha256()

        def hash_all() -> None:
            with self.part.open("rb") as file:
                for piece in file_pieces:
                    if isinstance(piece, bytes):
                        digest.update(piece)
                    elif isinstance(piece, Zeros):
                        digest.update(bytes(piece.n_bytes))
                    else:
                        for data in pieces(file.fileno(), piece[0], piece[1] - piece[0]):
                            trio.from_thread.check_cancelled()
                            digest.update(data)

        await trio.to_thread.run_sync(hash_all)
        return digest.hexdigest()


def write_at(file: int, data: bytes, at: int) -> None:
    """All of it, blocking. Raises StoreFull."""
    left = memoryview(data)
    while left:
        try:
            n = os.pwrite(file, left, at)
        except OSError as error:
            raise StoreFull(f"The download cannot be written: {error.strerror}") from error
        at += n
        left = left[n:]
