"""Fetches pictures that a request names by https addresses, where `api.fetch_images` allows that.

A client chooses the address, and must not reach through this node what only this node can reach. So all IP
addresses of a name have to be public, and the connection goes to one of those that were checked, not to the
name. Redirects are checked in the same way. No proxy, cookie or key is used, and bytes are charged to the
client before they are kept.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final, Protocol
from urllib.parse import urljoin, urlsplit

import httpx
import trio

from swarmllm.errors import InvalidRequest, Overloaded
from swarmllm.host_names import HostName, parse_host_name
from swarmllm_proto.limits import MIB, PICTURE_BYTES_MAX

FETCH_S: Final = 20.0
"""For all pictures of a request."""
AT_ONCE: Final = 8
"""Pictures, of all requests together."""
REDIRECTS_MAX: Final = 3
URL_MAX: Final = 4096
"""Characters."""
IPv4_NOT: Final = tuple(map(IPv4Network, ("192.0.0.0/24", "192.88.99.0/24")))
IPv6_ONLY: Final = IPv6Network("2000::/3")
IPv6_NOT: Final = tuple(map(IPv6Network, ("2001::/23", "2002::/16", "3fff::/20")))
"""Tunnels lead to IPv4 addresses of any kind."""
REDIRECTS: Final = (301, 302, 303, 307, 308)

Charge = Callable[[int], bool]
"""Takes so many bytes for the client; False: there is no room."""


class _Failed(Exception):
    """Why a picture was not fetched."""


def is_public(text: str) -> bool:
    """Whether everybody on the internet can reach this address, and nobody else can be meant by it."""
    address = ip_address(text)
    if not address.is_global or address.is_multicast:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in IPv4_NOT)
    assert isinstance(address, IPv6Address)
    return address in IPv6_ONLY and not any(address in network for network in IPv6_NOT)


class NetworkBackend(Protocol):
    """The network that pictures are fetched from."""

    async def resolve(self, host: HostName) -> list[str]:
        """Its IP addresses. Raises OSError."""
        ...

    def is_allowed(self, address: str) -> bool:
        """Whether this node may connect to the IP address for a client."""
        ...

    def tls_context(self) -> ssl.SSLContext:
        """Blocking."""
        ...


class Internet:
    """The public addresses of the internet, and the certificate authorities of this machine."""

    async def resolve(self, host: HostName) -> list[str]:
        found = await trio.socket.getaddrinfo(host, 443, type=trio.socket.SOCK_STREAM)
        return [str(address[4][0]) for address in found]

    def is_allowed(self, address: str) -> bool:
        return is_public(address)

    def tls_context(self) -> ssl.SSLContext:
        return _internet_tls_context()


@cache
def _internet_tls_context() -> ssl.SSLContext:
    """Cached: reading the authorities takes a while."""
    return httpx.create_ssl_context(trust_env=False)


@dataclass(frozen=True, slots=True)
class PictureFetcher:
    """One for all requests of a node."""

    network: NetworkBackend = field(default_factory=Internet)
    port: int = 443
    deadline_s: float = FETCH_S
    limit: trio.CapacityLimiter = field(default_factory=lambda: trio.CapacityLimiter(AT_ONCE))

    async def fetch_all(self, asked: list[tuple[str, str]], charge: Charge) -> list[bytes]:
        """`asked`: (URL, field of the request). Raises InvalidRequest naming the field, and Overloaded."""
        fetched = [b""] * len(asked)
        tls = await trio.to_thread.run_sync(self.network.tls_context)

        async def fetch(index: int, url: str, name: str) -> None:
            async with self.limit:
                try:
                    fetched[index] = await self._fetch(url, tls, charge)
                except _Failed as error:
                    raise InvalidRequest(f"the picture was not fetched: {error}.", field=name) from None

        with trio.move_on_after(self.deadline_s) as scope:
            try:
                async with trio.open_nursery() as nursery:
                    for index, (url, name) in enumerate(asked):
                        nursery.start_soon(fetch, index, url, name)
            except* (InvalidRequest, Overloaded) as group:
                raise _first(group) from None
        if scope.cancelled_caught:
            late = next((name for data, (_, name) in zip(fetched, asked, strict=True) if not data), None)
            raise InvalidRequest(f"was not fetched within {self.deadline_s:g} s.", field=late)
        return fetched

    async def _fetch(self, url: str, tls: ssl.SSLContext, charge: Charge) -> bytes:
        for _ in range(REDIRECTS_MAX + 1):
            host, target = self._parse(url)
            address = await self._address(host)
            dialled = f"[{address}]" if ":" in address else address
            request = httpx.Request(
                "GET",
                f"https://{dialled}:{self.port}{target}",
                headers={
                    "Host": f"[{host}]" if ":" in host else host,
                    "Accept": "image/*",
                    "Accept-Encoding": "identity",
                    "User-Agent": "swarmllm",
                },
                extensions={"sni_hostname": host},
            )
            try:
                async with httpx.AsyncClient(verify=tls, trust_env=False, timeout=None) as http:
                    answer = await http.send(request, stream=True, follow_redirects=False)
                    try:
                        if answer.status_code not in REDIRECTS:
                            return await _body(answer, charge)
                        url = urljoin(url, answer.headers.get("location", ""))
                    finally:
                        await answer.aclose()
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                # The last one for hosts of redirects, which httpx looks at unasked.
                raise _Failed(f"its server cannot be asked ({type(error).__name__})") from None
        raise _Failed(f"there are more than {REDIRECTS_MAX} redirects")

    def _parse(self, url: str) -> tuple[HostName, str]:
        """(host, path with query)"""
        if len(url) > URL_MAX or not url.isascii() or not url.isprintable() or " " in url:
            raise _Failed("its address is not valid")
        try:
            parts = urlsplit(url)
            port = parts.port
            host = parse_host_name(parts.hostname or "")
        except ValueError:
            raise _Failed("its address is not valid") from None
        if parts.scheme != "https" or "@" in parts.netloc or port not in (None, self.port):
            raise _Failed(f"only https addresses without user and at port {self.port} are fetched")
        return host, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    async def _address(self, host: HostName) -> str:
        """One of its addresses, all of which are public."""
        try:
            found = await self.network.resolve(host)
        except OSError:
            found = []
        if not found or not all(map(self.network.is_allowed, found)):
            # The same words for both: what this node's resolver knows is nobody's business.
            raise _Failed("the name of its host leads to no public address")
        return next((address for address in found if ":" not in address), found[0])


async def _body(answer: httpx.Response, charge: Charge) -> bytes:
    if answer.status_code != 200:
        raise _Failed(f"its server answered with status {answer.status_code}")
    data = bytearray()
    pieces = answer.aiter_raw()
    try:
        async for piece in pieces:
            if len(data) + len(piece) > PICTURE_BYTES_MAX:
                raise _Failed(f"it is larger than {PICTURE_BYTES_MAX // MIB} MiB")
            if not charge(len(piece)):
                raise Overloaded("The bodies of the requests that run now fill their memory.")
            data += piece
    finally:
        await answer.aclose()
        # httpx nests generators; on a closed connection they all come to their end instead of being dropped.
        with suppress(httpx.HTTPError, httpx.StreamError):
            async for _ in pieces:
                pass
    return bytes(data)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
