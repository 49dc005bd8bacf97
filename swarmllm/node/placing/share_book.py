"""Keeps shares over restarts: `shares.json` in the data folder.

It has two lists of models: those that this node's user shares with the swarm by command, and those that were
fetched only to be placed here. It also has two lists of files whose model nobody knows yet: those that this
node shares, and those that it fetches layers of because another node shares them. If `shares.json` cannot be
read, it is ignored with a line in the log: then nothing is shared until the command is repeated, and fetched
models count as the user's own.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import msgspec
import trio
from msgspec import Meta

from swarmllm.errors import ConfigError, reason_of
from swarmllm.private_files import write_private
from swarmllm_proto.identifiers import NOT_PUBLISHED, Digest, ModelId, PublishedName
from swarmllm_proto.swarm import SharedFile

log = logging.getLogger("swarmllm.node")

FILE_NAME = "shares.json"
VERSION = 1
MAX_FILE_BYTES = 2**20
SHARED_MAX = 8
"""As many as a record has room for."""
FETCHED_MAX = 1024
SHARED_FILES_MAX = 2
FOLLOWED_FILES_MAX = 4
"""As many as a record has room for."""

Name = Annotated[str, Meta(min_length=1, max_length=200)]


class _Shared(msgspec.Struct, frozen=True):
    model_id: ModelId
    name: Name
    source: PublishedName = NOT_PUBLISHED


class _Followed(msgspec.Struct, frozen=True):
    header: Digest
    size_bytes: Annotated[int, Meta(ge=0)]


class _File(msgspec.Struct, frozen=True):
    version: int
    shared: Annotated[tuple[_Shared, ...], Meta(max_length=SHARED_MAX)] = ()
    fetched: Annotated[tuple[ModelId, ...], Meta(max_length=FETCHED_MAX)] = ()
    files: Annotated[tuple[SharedFile, ...], Meta(max_length=SHARED_FILES_MAX)] = ()
    followed: Annotated[tuple[_Followed, ...], Meta(max_length=FOLLOWED_FILES_MAX)] = ()


class ShareBook:
    def __init__(self, path: Path | None = None) -> None:
        """`path` None: nothing outlives the process."""
        self.shared: dict[ModelId, str] = {}
        """Model -> name. Changed by its owner, who calls `save`; so is `fetched`."""
        self.sources: dict[ModelId, PublishedName] = {}
        """Of those of `shared` whose file is published: where."""
        self.fetched: dict[ModelId, None] = {}
        """In the order in which they were begun."""
        self.files: dict[str, SharedFile] = {}
        """By header: files that this node shares before it can know their models."""
        self.followed: dict[str, int] = {}
        """Header -> size in bytes, of files of which layers are fetched here because other nodes share
        them."""
        self._path = path
        self._saving = trio.Lock()

    async def save(self) -> None:
        """Where it cannot be written the log says so."""
        if self._path is None:
            return
        with trio.CancelScope(shield=True):
            async with self._saving:
                shared = tuple(
                    _Shared(model_id, name, self.sources.get(model_id, NOT_PUBLISHED))
                    for model_id, name in self.shared.items()
                )
                followed = tuple(_Followed(Digest(header), n) for header, n in self.followed.items())
                content = msgspec.json.encode(
                    _File(
                        VERSION,
                        shared,
                        tuple(self.fetched)[-FETCHED_MAX:],
                        tuple(self.files.values())[:SHARED_FILES_MAX],
                        followed[:FOLLOWED_FILES_MAX],
                    )
                )
                try:
                    await trio.to_thread.run_sync(write_private, self._path, content + b"\n")
                except ConfigError as error:
                    log.warning("the next start will not know what is shared now: %s", error.message)


def open_share_book(data_dir: Path) -> ShareBook:
    """As an earlier run left it; empty where the file cannot be used, which the log says. Blocking."""
    path = data_dir / FILE_NAME
    book = ShareBook(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
        read = msgspec.json.decode(content, type=_File)
        if read.version != VERSION:
            raise ValueError(f"it is of version {read.version}, and this program reads {VERSION}")
    except FileNotFoundError:
        return book
    except (OSError, ValueError) as error:
        log.warning("%s is ignored, so nothing is shared that was shared before: %s", path, reason_of(error))
        return book
    book.shared = {each.model_id: each.name for each in read.shared}
    book.sources = {each.model_id: each.source for each in read.shared if each.source}
    book.fetched = dict.fromkeys(read.fetched)
    book.files = {file.header: file for file in read.files}
    book.followed = {file.header: file.size_bytes for file in read.followed}
    return book
