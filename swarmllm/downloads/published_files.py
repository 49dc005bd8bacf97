"""Files on the hub that other nodes name as those of a shared model, for a node that needs its layers.

A name is resolved at this node's own endpoint, never at an address of somebody else's, and without this
node's token, which is for what its own user asks for. Whether it is the right file shows by its size, and
then by every chunk that comes (`transfer.fetch`): a wrong name costs a header's size and a chunk per lane.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from urllib.parse import unquote

import trio

from swarmllm.downloads.remote import FileRemote, RemoteFileInfo, open_http
from swarmllm.downloads.settings import DownloadSettings
from swarmllm.downloads.source import DownloadError, DownloadRefused, parse_source
from swarmllm.downloads.split_remote import open_remote
from swarmllm.errors import BadModel, InvalidRequest, RemoteError
from swarmllm.models import CatalogueEntry
from swarmllm.transfer.fetch import NotTheFile, PublishedFile, ReadPublished
from swarmllm_proto.identifiers import NOT_PUBLISHED, PUBLISHED_PATTERN, NodeId, PublishedName

TRIED_MAX = 2
"""Names that are tried in one fetch."""
REFUSED_S = 3600.0
"""For so long no name is tried of a node that named a wrong file."""
_NAME = re.compile(PUBLISHED_PATTERN)
REFUSED_MAX = 256
"""Nodes that did; the oldest are forgotten."""
HEADER_ROOM_BYTES = 2**20
"""So much longer may the headers of all parts be than that of the joined file."""


class PublishedFiles:
    def __init__(self, settings: DownloadSettings) -> None:
        self.settings = settings
        self._refused_until_s: dict[NodeId, float] = {}

    def named(self, said: Iterable[tuple[NodeId, str]]) -> tuple[PublishedFile, ...]:
        """`said`: nodes, and `hf:ORG/REPO:FILE.gguf` as each names it. Nothing where this node is offline."""
        if self.settings.offline:
            return ()
        now_s = trio.current_time()
        files: dict[str, PublishedFile] = {}
        for node_id, text in said:
            if text not in files and now_s >= self._refused_until_s.get(node_id, now_s):
                files[text] = PublishedFile(
                    node_id, text, partial(self._open, text), partial(self._refuse, node_id)
                )
        return tuple(files.values())[:TRIED_MAX]

    def _refuse(self, node_id: NodeId) -> None:
        self._refused_until_s.pop(node_id, None)
        self._refused_until_s[node_id] = trio.current_time() + REFUSED_S
        while len(self._refused_until_s) > REFUSED_MAX:
            del self._refused_until_s[next(iter(self._refused_until_s))]

    @asynccontextmanager
    async def _open(self, text: str, entry: CatalogueEntry) -> AsyncIterator[ReadPublished]:
        settings = self.settings
        try:
            source = parse_source(text, settings.endpoint)
        except InvalidRequest as error:
            raise NotTheFile(error.message) from error
        if not source.is_endpoint or not source.url:
            raise NotTheFile("it names no file of a repository")
        max_header_bytes = min(tensor.offset for tensor in entry.manifest.tensors) + HEADER_ROOM_BYTES
        async with open_http(settings) as http:
            try:
                remote = open_remote(http, source.url, "", settings, max_header_bytes)
                facts = await remote.facts()
            except BadModel as error:
                raise NotTheFile(error.message) from error
            if facts.size_bytes != entry.state.size_bytes:
                raise NotTheFile(
                    f"it has {facts.size_bytes} bytes, and the model's file {entry.state.size_bytes}"
                )
            if not facts.has_ranges:
                raise DownloadRefused(f"{source.url}: this server gives no parts of files")
            yield partial(_read, remote, facts)


async def _read(
    remote: FileRemote, facts: RemoteFileInfo, start: int, end: int
) -> AsyncGenerator[bytes, None]:
    """Raises RemoteError."""
    try:
        async with aclosing(remote.read(start, end, facts)) as portions:
            async for data in portions:
                yield data
    except DownloadError as error:
        raise RemoteError(error.message) from error


def published_name(url: str, endpoint: str) -> PublishedName:
    """What other nodes can be told of the file at an address of a hub; empty: nothing."""
    if (found := repository_file(url, endpoint)) is None:
        return NOT_PUBLISHED
    name = f"hf:{found[0]}:{found[1]}"
    return PublishedName(name) if _NAME.fullmatch(name) else NOT_PUBLISHED


def repository_file(url: str, endpoint: str) -> tuple[str, str] | None:
    """(repository, file) of an address of a hub; None: it is none."""
    if not url.startswith(f"{endpoint}/"):
        return None
    repo, separator, file = unquote(url.removeprefix(f"{endpoint}/")).partition("/resolve/main/")
    return (repo, file) if separator else None
