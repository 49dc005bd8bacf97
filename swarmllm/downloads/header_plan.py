"""Describes the model of a file on a web server from its header alone, for plans that are made before it is
fetched.

No tensor is read, so every digest is `UNKNOWN` and the manifest's ModelId is nobody's. Sizes, layers and cuts
are those of the model.
"""

from __future__ import annotations

import io
from contextlib import aclosing
from dataclasses import dataclass, replace

import httpx
import trio
from blake3 import blake3

from swarmllm.downloads.published_files import published_name
from swarmllm.downloads.remote import FileRemote, Remote, RemoteFileInfo, open_http
from swarmllm.downloads.settings import DownloadSettings, RetrySchedule
from swarmllm.downloads.source import (
    DownloadError,
    DownloadSource,
    choose_file,
    file_url,
    listed_files,
    listing_url,
    model_name,
)
from swarmllm.downloads.split_remote import open_remote
from swarmllm.downloads.unidentified_model import UNKNOWN, header_bytes
from swarmllm.models import Manifest
from swarmllm.models.gguf_header import GgufHeader, HeaderIncomplete, parse_header
from swarmllm.models.hashing import manifest_of
from swarmllm.models.names import normalise_name
from swarmllm_proto.identifiers import NOT_PUBLISHED, PublishedName

TIMEOUT_S = 120.0
"""Somebody waits for the plan."""
MAX_FAILURES = 3


@dataclass(frozen=True, slots=True)
class PublishedModel:
    name: str
    """What it will be called, unless somebody says otherwise."""
    file_bytes: int
    """Of the file that all parts make together."""
    layout: Manifest
    header: str
    """BLAKE3 of the file up to its first tensor."""
    sha256: str
    """Of the file; empty: the server does not say it."""
    source: PublishedName
    """By which other nodes can find it on their hub; empty: they cannot."""


async def read_published(source: DownloadSource, settings: DownloadSettings) -> PublishedModel:
    """Raises InvalidRequest (which file is meant), DownloadError, BadModel."""
    settings = replace(settings, max_failures=min(settings.max_failures, MAX_FAILURES))
    retries = RetrySchedule(settings, lambda trouble: None)
    with trio.move_on_after(TIMEOUT_S):
        async with open_http(settings) as http:
            url = source.url or await find_address(source, settings, http, retries)
            token = settings.token if source.is_endpoint else ""
            remote = open_remote(http, url, token, settings)

            async def read() -> PublishedModel:
                facts = await remote.facts()
                name = normalise_name(model_name(url))
                start, header = await read_start(remote, facts, settings.header_step_bytes)
                layout, digest = await trio.to_thread.run_sync(_layout, start, header, name)
                said = published_name(url, settings.endpoint) if source.is_endpoint else NOT_PUBLISHED
                return PublishedModel(name, facts.size_bytes, layout, digest, facts.sha256, said)

            return await retries.keep_trying(read)
    raise DownloadError(f"{source.text}: its header was not here within {TIMEOUT_S:g} s")


async def find_address(
    source: DownloadSource, settings: DownloadSettings, http: httpx.AsyncClient, retries: RetrySchedule
) -> str:
    """Of the file of a repository that is meant. Raises InvalidRequest, DownloadError."""
    url = listing_url(settings.endpoint, source.repo)
    raw = await retries.keep_trying(Remote(http, url, settings.token, settings).listing)
    names = listed_files(raw, url)
    return file_url(settings.endpoint, source.repo, choose_file(source.repo, names, source.wanted))


async def read_start(remote: FileRemote, facts: RemoteFileInfo, step_bytes: int) -> tuple[bytes, GgufHeader]:
    """The file's beginning up to its header's end, or somewhat further. Raises Broken, Refused, BadModel."""
    start = b""
    while True:
        want = min(facts.size_bytes, len(start) + max(step_bytes, len(start) // 4))
        # A server without ranges begins at the front each time; the reading ends where enough is here.
        begin = len(start) if facts.has_ranges else 0
        end = want if facts.has_ranges else facts.size_bytes
        data = bytearray(start[:begin])
        async with aclosing(remote.read(begin, end, facts)) as portions:
            async for portion in portions:
                data += portion
                if len(data) >= want:
                    break
        start = bytes(data)
        try:
            header = await trio.to_thread.run_sync(parse_header, start, facts.size_bytes)
        except HeaderIncomplete:
            if len(start) >= facts.size_bytes:
                raise
        else:
            if len(start) >= header_bytes(header):
                return start, header


def _layout(start: bytes, header: GgufHeader, name: str) -> tuple[Manifest, str]:
    """And the digest of what comes before the tensors."""
    digests = {tensor.name: UNKNOWN for tensor in header.tensors}
    layout = manifest_of(io.BytesIO(start), header, digests, name)
    return layout, blake3(start[: header_bytes(header)]).hexdigest()
