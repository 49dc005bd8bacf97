"""Reads one file on a web server in ranges, from servers that disconnect, redirect, answer wrongly and limit
rates.

Redirects are followed here, not by httpx: a token goes to the host it is for and to no other, and https never
becomes http. The address is resolved anew for every piece, because the places that hubs redirect to expire.

What is read is only believed as the answer to what was asked: status 206, exactly these bytes, of a file of
this size and with this validator (ETag). A file that changed on the server is a failure of its own, so that
no two versions are ever mixed.
"""

from __future__ import annotations

import contextlib
import email.utils
import functools
import logging
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urljoin

import httpx
import trio

from swarmllm import __version__
from swarmllm.downloads.digest_book import Span
from swarmllm.downloads.settings import DownloadSettings
from swarmllm.downloads.source import (
    ConnectionBroken,
    DownloadRefused,
    FileChanged,
    ServerBusy,
    check_url,
    origin,
)
from swarmllm.errors import InvalidRequest, reason_of

log = logging.getLogger(__name__)

MAX_REDIRECTS = 5
MAX_FILE_BYTES = 2**46
MAX_LISTING_BYTES = 16 * 2**20
REDIRECTS = frozenset({301, 302, 303, 307, 308})
PASSING = frozenset({408, 425, 500, 502, 503, 504})
"""Statuses that another attempt may not meet."""

_CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})", re.ASCII)
_SHA256 = re.compile(r'(?:W/)?"?([0-9a-f]{64})"?', re.ASCII)


@dataclass(frozen=True, slots=True)
class RemoteFileInfo:
    """What a server says about a file before it is fetched."""

    size_bytes: int
    validator: str
    """Changes with the content; empty where the server does not say."""
    sha256: str
    """Hugging Face tells it of large files; else empty."""
    has_ranges: bool


@dataclass(frozen=True, slots=True)
class Zeros:
    n_bytes: int


HashedPiece = bytes | Span | Zeros
"""Of a file on a server: what it is, or where it lies in the file that was fetched."""


@dataclass(frozen=True, slots=True)
class HashedPieces:
    """A file on a server, read front to back, and its expected hash."""

    url: str
    sha256: str
    pieces: tuple[HashedPiece, ...]


class FileRemote(Protocol):
    """The interface of a remote file to a download."""

    @property
    def url(self) -> str: ...

    async def facts(self) -> RemoteFileInfo: ...

    def read(self, start: int, end: int, facts: RemoteFileInfo) -> AsyncGenerator[bytes, None]: ...

    def hashed(self, facts: RemoteFileInfo, sha256: str) -> tuple[HashedPieces, ...]: ...


class Remote:
    def __init__(self, http: httpx.AsyncClient, url: str, token: str, settings: DownloadSettings) -> None:
        """`token` is for the host of `url`."""
        self.url = url
        self._http = http
        self._token = token
        self._settings = settings

    async def facts(self) -> RemoteFileInfo:
        """Raises Refused, Busy, Broken."""
        async with self._get({"Range": "bytes=0-0"}) as (answer, seen):
            has_ranges = answer.status_code == 206
            if has_ranges:
                size_bytes = _content_range(answer)[2]
            else:
                # Also an empty answer to the request for a range of nothing.
                size_bytes = _length(answer)
            if not 0 < size_bytes < MAX_FILE_BYTES:
                raise DownloadRefused(f"{self.url}: a file of {size_bytes} bytes is no model")
            linked = _SHA256.fullmatch(seen.get("x-linked-etag", ""))
            return RemoteFileInfo(
                size_bytes, _validator(answer, seen), linked[1] if linked else "", has_ranges
            )

    async def read(self, start: int, end: int, facts: RemoteFileInfo) -> AsyncGenerator[bytes, None]:
        """Bytes [start, end), in what portions they come; all of the file from a server without ranges.
        Raises FileChanged, Refused, Busy, Broken; what came before was right."""
        ask = {"Range": f"bytes={start}-{end - 1}"} if facts.has_ranges else {}
        async with self._get(ask) as (answer, seen):
            if facts.has_ranges:
                if answer.status_code != 206:
                    # It gave ranges before: then this is another file, or another server behind the name.
                    raise ConnectionBroken(
                        f"{self.url}: the server answered a range with status {answer.status_code}"
                    )
                first, last, size_bytes = _content_range(answer)
                if (first, last + 1) != (start, end):
                    raise ConnectionBroken(f"{self.url}: the server sent other bytes than it was asked for")
            else:
                size_bytes = _length(answer)
            if size_bytes != facts.size_bytes or _validator(answer, seen) != facts.validator:
                raise FileChanged(f"{self.url} has changed on the server")
            at = start
            async with contextlib.aclosing(_body(answer, self.url)) as portions:
                async for data in portions:
                    if at + len(data) > end:
                        raise ConnectionBroken(f"{self.url}: the server sent more than it was asked for")
                    at += len(data)
                    yield data
            if at != end:
                raise ConnectionBroken(f"{self.url}: the server stopped {end - at} bytes early")

    def hashed(self, facts: RemoteFileInfo, sha256: str) -> tuple[HashedPieces, ...]:
        """What the fetched file is to be checked against: `sha256`, or what the server said."""
        wanted = sha256 or facts.sha256
        return (HashedPieces(self.url, wanted, ((0, facts.size_bytes),)),) if wanted else ()

    async def listing(self) -> bytes:
        """The whole of a small answer. Raises Refused, Busy, Broken."""
        data = bytearray()
        async with self._get({}) as (answer, _), contextlib.aclosing(_body(answer, self.url)) as portions:
            async for part in portions:
                data += part
                if len(data) > MAX_LISTING_BYTES:
                    raise DownloadRefused(f"{self.url}: the answer is larger than {MAX_LISTING_BYTES} bytes")
        return bytes(data)

    @contextlib.asynccontextmanager
    async def _get(self, headers: Mapping[str, str]) -> AsyncIterator[tuple[httpx.Response, dict[str, str]]]:
        """The last answer of a chain of redirects, and the headers of those before it."""
        url, seen = self.url, dict[str, str]()
        for _ in range(MAX_REDIRECTS + 1):
            try:
                request = self._http.build_request("GET", url, headers=self._headers(url) | dict(headers))
                answer = await self._http.send(request, stream=True)
            except httpx.InvalidURL:
                # Stricter than `check_url`; also of the redirect in the answer, which httpx looks at unasked.
                raise _misled(self.url) from None
            except httpx.HTTPError as error:
                raise ConnectionBroken(f"{url}: {reason_of(error)}") from error
            except ValueError:
                # A host name that the resolver's IDNA encoding refuses is a UnicodeError.
                raise (
                    DownloadRefused(f"{url}: that is not the name of a host")
                    if url == self.url
                    else _misled(self.url)
                ) from None
            try:
                if answer.status_code not in REDIRECTS:
                    _check(answer, self.url, bool(self._token), self._settings)
                    yield answer, seen
                    return
                seen |= {
                    name: value for name, value in answer.headers.items() if name.startswith("x-linked-")
                }
                url = _target(url, answer.headers.get("location", ""), self.url)
            finally:
                await answer.aclose()
        raise DownloadRefused(f"{self.url}: more than {MAX_REDIRECTS} redirects")

    def _headers(self, url: str) -> dict[str, str]:
        # A compressed body has no ranges.
        headers = {"User-Agent": f"swarmllm/{__version__}", "Accept-Encoding": "identity"}
        if self._token and origin(url) == origin(self.url):
            headers["Authorization"] = f"Bearer {self._token}"
        return headers


@asynccontextmanager
async def open_http(settings: DownloadSettings) -> AsyncIterator[httpx.AsyncClient]:
    """Proxies come from the environment (HTTPS_PROXY, NO_PROXY), and so do certificates (SSL_CERT_FILE)."""
    timeout = httpx.Timeout(settings.read_timeout_s, connect=settings.connect_timeout_s)
    limits = httpx.Limits(max_connections=settings.n_lanes + 2)
    tls = await trio.to_thread.run_sync(_certificates)
    async with httpx.AsyncClient(verify=tls, timeout=timeout, limits=limits, follow_redirects=False) as http:
        yield http


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Cached, and called in a thread: reading them takes tens of milliseconds of the processor."""
    return httpx.create_ssl_context()


async def _body(answer: httpx.Response, url: str) -> AsyncGenerator[bytes, None]:
    portions = answer.aiter_raw()
    try:
        async for data in portions:
            yield data
    except httpx.HTTPError as error:
        raise ConnectionBroken(f"{url}: {reason_of(error)}") from error
    finally:
        await answer.aclose()
        # httpx nests generators; on a closed connection they all come to their end instead of being dropped.
        with contextlib.suppress(httpx.HTTPError, httpx.StreamError):
            async for _ in portions:
                pass


def _check(answer: httpx.Response, url: str, has_token: bool, settings: DownloadSettings) -> None:
    status = answer.status_code
    if status in (200, 206):
        return
    if status == 429 or status in PASSING:
        pause_s = _retry_after_s(answer.headers.get("retry-after", ""))
        if pause_s > settings.max_retry_after_s:
            raise DownloadRefused(f"{url}: the server asks for {pause_s:.0f} s of patience; try again later")
        raise ServerBusy(f"{url}: status {status}", pause_s)
    if status in (401, 403):
        remedy = "the token in HF_TOKEN may not read it" if has_token else "set HF_TOKEN if it needs one"
        raise DownloadRefused(f"{url}: the server does not allow it ({status}); {remedy}")
    if status in (404, 410):
        raise DownloadRefused(f"{url}: there is no such file ({status})")
    raise DownloadRefused(f"{url}: the server answered with status {status}")


def _retry_after_s(text: str) -> float:
    if text.isascii() and text.isdigit():
        return float(text[:6])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _content_range(answer: httpx.Response) -> tuple[int, int, int]:
    match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
    if match is None:
        raise ConnectionBroken(f"{answer.url}: the server sent a range without saying which")
    return int(match[1]), int(match[2]), int(match[3])


def _length(answer: httpx.Response) -> int:
    text = answer.headers.get("content-length", "")
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise DownloadRefused(f"{answer.url}: the server does not say how large the file is")
    return int(text)


def _validator(answer: httpx.Response, seen: Mapping[str, str]) -> str:
    return seen.get("x-linked-etag") or answer.headers.get("etag") or answer.headers.get("last-modified", "")


def _target(url: str, location: str, asked: str) -> str:
    """Where a redirect leads. Raises Refused."""
    try:
        target = urljoin(url, location)
        stays_encrypted = target.startswith("https:") or not url.startswith("https:")
        if stays_encrypted:
            check_url(target)
    except (InvalidRequest, ValueError):
        raise _misled(asked) from None
    if not stays_encrypted:
        raise DownloadRefused(f"{asked}: the server wants to continue without encryption")
    return target


def _misled(url: str) -> DownloadRefused:
    return DownloadRefused(f"{url}: the server redirects to a place that is no address")
