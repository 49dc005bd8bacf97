"""Reads a model in several files on a web server as the one file that they would be when joined.

All headers are fetched first, and whatever they show to be wrong ends the download there, with a few
megabytes fetched at most. From then on this reads like a `Remote`: its header is put together here, its
tensors are read from whichever part has them, and what becomes of it on the disk is one file.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

import httpx

from swarmllm.downloads.remote import FileRemote, HashedPiece, HashedPieces, Remote, RemoteFileInfo, Zeros
from swarmllm.downloads.settings import DownloadSettings
from swarmllm.downloads.source import ConnectionBroken, DownloadError, DownloadRefused
from swarmllm.errors import BadModel
from swarmllm.models.gguf_header import MAX_HEADER_BYTES, HeaderIncomplete, parse_header
from swarmllm.models.split_model import (
    MAX_LATER_HEADER_BYTES,
    JoinedModel,
    PartHeader,
    PlacedTensor,
    check_count,
    check_part,
    in_part,
    join_parts,
)
from swarmllm_proto.split_files import SplitName, parse_split_name

LATER_STEP_BYTES = 64 * 2**10
"""Later parts have the places of their tensors in the header, and no vocabulary."""

_HEADER, _ZEROS = -1, -2
_ZEROS_AT_ONCE = bytes(2**16)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Bytes of the joined file that lie together in one place."""

    start: int
    end: int
    part: int
    """_HEADER: that of the joined file; _ZEROS: nowhere."""
    offset: int


class SplitRemote:
    """The same services as `Remote`."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        url: str,
        token: str,
        settings: DownloadSettings,
        name: SplitName,
        max_header_bytes: int,
    ) -> None:
        """`url`: of any part; `name`: that of its file; `max_header_bytes`: of all parts together."""
        check_count(name)
        self._max_header_bytes = max_header_bytes
        self._names = name.all()
        urls = [_sibling(url, each) for each in self._names]
        self.url = urls[0]
        self._remotes = [Remote(http, each, token, settings) for each in urls]
        self._step_bytes = settings.header_step_bytes
        self._facts: list[RemoteFileInfo] = []
        self._starts: dict[int, bytes] = {}
        """Part -> its first bytes, so far."""
        self._parts: dict[int, PartHeader] = {}
        self._header = b""
        """Of the joined file; empty until it is known."""
        self._places: tuple[PlacedTensor, ...] = ()
        self._stretches: list[_Stretch] = []

    async def facts(self) -> RemoteFileInfo:
        """Of the joined file. Raises Refused, Busy, Broken; BadModel where the parts make no model. Goes on
        where it was when it is called again after Busy or Broken."""
        if self._header:
            self._facts, self._starts, self._parts, self._header = [], {}, {}, b""
        while len(self._facts) < len(self._remotes):
            self._facts.append(await self._facts_of(len(self._facts)))
        # Those of the later parts are small: what is wrong with them shows at once.
        for part in (*range(1, len(self._remotes)), 0):
            if part not in self._parts:
                self._parts[part] = await self._header_of(part)
                check_part(self._names[part], self._parts[part].header)
        joined = join_parts(self._names, [self._parts[part] for part in range(len(self._remotes))])
        self._stretches = _stretches(joined)
        self._header, self._places = joined.start, joined.places
        return RemoteFileInfo(joined.size_bytes, self._validator(), self._sha256(), has_ranges=True)

    async def read(self, start: int, end: int, facts: RemoteFileInfo) -> AsyncGenerator[bytes, None]:
        """Bytes [start, end) of the joined file. Raises as `Remote.read` does."""
        at = bisect_right(self._stretches, start, key=lambda stretch: stretch.start) - 1
        for stretch in self._stretches[at:]:
            if stretch.start >= end:
                break
            first, last = max(start, stretch.start) - stretch.start, min(end, stretch.end) - stretch.start
            if stretch.part == _HEADER:
                yield self._header[first:last]
                continue
            if stretch.part == _ZEROS:
                for at in range(first, last, len(_ZEROS_AT_ONCE)):
                    yield _ZEROS_AT_ONCE[: last - at]
                continue
            remote, part_facts = self._remotes[stretch.part], self._facts[stretch.part]
            reading = remote.read(stretch.offset + first, stretch.offset + last, part_facts)
            async with aclosing(reading) as portions:
                async for data in portions:
                    yield data

    def hashed(self, facts: RemoteFileInfo, sha256: str) -> tuple[HashedPieces, ...]:
        """One for each part of which the server told the SHA-256."""
        return tuple(
            HashedPieces(remote.url, each.sha256, self._pieces_of(part))
            for part, (remote, each) in enumerate(zip(self._remotes, self._facts, strict=True))
            if each.sha256
        )

    async def _facts_of(self, part: int) -> RemoteFileInfo:
        name, remote = self._names[part], self._remotes[part]
        try:
            facts = await remote.facts()
        except DownloadRefused as error:
            raise DownloadRefused(f"part {name.number} of {name.count}: {error.message}") from error
        if not facts.has_ranges and part:
            raise ConnectionBroken(f"{remote.url}: the server gave no range, as it did of other parts")
        if not facts.has_ranges:
            raise DownloadError(
                f"{remote.url}: this server gives no parts of files, and a model in {name.count} parts is"
                " checked by their headers first; fetch the files with another program and add them:"
                " swarmllm models add FOLDER"
            )
        return facts

    async def _header_of(self, part: int) -> PartHeader:
        name, remote, facts = self._names[part], self._remotes[part], self._facts[part]
        limit = min(MAX_LATER_HEADER_BYTES if part else MAX_HEADER_BYTES, self._max_header_bytes)
        step_bytes = min(self._step_bytes, LATER_STEP_BYTES) if part else self._step_bytes
        while True:
            have = self._starts.get(part, b"")
            want = min(len(have) + max(step_bytes, len(have) // 4), facts.size_bytes)
            n_bytes = sum(map(len, self._starts.values())) + want - len(have)
            if n_bytes > self._max_header_bytes + self._step_bytes:
                raise BadModel(
                    f"the headers of the parts are longer than {self._max_header_bytes} bytes together"
                )
            async with aclosing(remote.read(len(have), want, facts)) as portions:
                async for data in portions:
                    have += data
                    self._starts[part] = have
            with in_part(name):
                try:
                    header = parse_header(have, facts.size_bytes, limit)
                except HeaderIncomplete:
                    if len(have) < facts.size_bytes:
                        continue
                    raise
            self._starts[part] = have[: header.end_offset]
            return PartHeader(str(name), header, self._starts[part])

    def _validator(self) -> str:
        """Changes with any part."""
        said = repr([(each.size_bytes, each.validator) for each in self._facts])
        return hashlib.sha256(said.encode()).hexdigest() if all(e.validator for e in self._facts) else ""

    def _sha256(self) -> str:
        """Of the parts' SHA-256s, where all are known: it tells models in parts apart, and is no file's."""
        known = [each.sha256 for each in self._facts]
        return hashlib.sha256("".join(known).encode()).hexdigest() if all(known) else ""

    def _pieces_of(self, part: int) -> tuple[HashedPiece, ...]:
        """A part as it is on the server, from the joined file; between its tensors there are zeros."""
        pieces: list[HashedPiece] = [self._starts[part]]
        at = len(self._starts[part])
        for place in self._places:
            if place.part == part:
                tensor = place.tensor
                pieces += [Zeros(place.offset - at), (tensor.offset, tensor.offset + tensor.size_bytes)]
                at = place.offset + tensor.size_bytes
        return (*pieces, Zeros(self._facts[part].size_bytes - at))


def open_remote(
    http: httpx.AsyncClient,
    url: str,
    token: str,
    settings: DownloadSettings,
    max_header_bytes: int = MAX_HEADER_BYTES,
) -> FileRemote:
    """By the name of the file. Raises BadModel for more parts than anybody makes."""
    name = parse_split_name(unquote(urlsplit(url).path).rpartition("/")[2])
    if name is None:
        return Remote(http, url, token, settings)
    return SplitRemote(http, url, token, settings, name, max_header_bytes)


def _sibling(url: str, name: SplitName) -> str:
    """The address of another part; what follows the path stays."""
    parts = urlsplit(url)
    return parts._replace(path=f"{parts.path.rpartition('/')[0]}/{quote(str(name))}").geturl()


def _stretches(joined: JoinedModel) -> list[_Stretch]:
    """Without gaps, in order."""
    found = [_Stretch(0, len(joined.start), _HEADER, 0)]
    for place in joined.places:
        tensor, end = place.tensor, found[-1].end
        if tensor.offset > end:
            found.append(_Stretch(end, tensor.offset, _ZEROS, 0))
        found.append(_Stretch(tensor.offset, tensor.offset + tensor.size_bytes, place.part, place.offset))
    return found
