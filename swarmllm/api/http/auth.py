"""Checks API keys, and refuses requests that pages of other sites caused.

The key file is looked at again at most once a second: a revoked key works for a second at the longest, and
a busy node does not ask its disk for every request.

A page in the user's browser can send requests to 127.0.0.1. Four checks keep it out. The Host header must be
a name of this machine, or a page whose own domain was re-pointed at 127.0.0.1 (DNS rebinding) would count as
same-origin. A request that carries the Origin of another site is refused outright, reads included, unless the
operator let that site in (CORS). A request that the browser marks as caused by another site (Sec-Fetch-Site)
is refused too, except for a link to the dashboard. Finally, administration requests that change something
must be `application/json`, with or without a body: a page cannot send that type, or PUT, PATCH or DELETE,
before a preflight, and no preflight of another site's page is granted for administration. This check needs no
header that a browser might leave out.
"""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Callable, Collection

import trio
from quart import Request, Response

from swarmllm.api.admin.endpoints import FILES_PREFIX, PAGE_PATH
from swarmllm.api.http.errors import Forbidden, UnsupportedMedia
from swarmllm.errors import ConfigError, InvalidRequest
from swarmllm.keys import ApiKey, KeyRing

log = logging.getLogger(__name__)

REFRESH_EVERY_S = 1.0
OPEN_PATHS = ("/health", "/health/ready", PAGE_PATH)
"""For load balancers and service managers, which have no keys: without one they tell nothing about models.
And the page that asks a person for a key, with its files."""


class Unauthorized(InvalidRequest):
    http_status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"


class Authenticator:
    def __init__(self, ring: KeyRing | None) -> None:
        self._ring = ring
        self._refreshed_s = float("-inf")
        self._refreshing = trio.Lock()

    @property
    def is_required(self) -> bool:
        """Whether this node asks for keys."""
        return self._ring is not None and self._ring.is_required

    async def admit(self, request: Request) -> ApiKey | None:
        """The key that the caller has shown; None where none is needed. Raises Unauthorized, Forbidden."""
        if self._ring is None:
            return None
        await self._refresh(self._ring)
        if not self._ring.is_required:
            return None
        secret = secret_of(request.headers.get)
        if _is_open(request.path):
            return self._ring.find(secret) if secret is not None else None
        if secret is None:
            raise Unauthorized("This node asks for an API key: send Authorization: Bearer KEY.")
        key = self._ring.find(secret)
        if key is None:
            raise Unauthorized("This API key is not known here, or revoked.")
        if request.path.startswith(ADMIN_PREFIXES) and not key.is_admin:
            raise Forbidden(f"Key {key.name} may use models, not administer this node.")
        return key

    async def _refresh(self, ring: KeyRing) -> None:
        async with self._refreshing:
            now_s = trio.current_time()
            if now_s - self._refreshed_s < REFRESH_EVERY_S:
                return
            self._refreshed_s = now_s
            try:
                await trio.to_thread.run_sync(ring.refresh)
            except ConfigError as error:
                log.warning("%s; the keys known so far stay in force", error.message)


def secret_of(header: Callable[[str], str | None]) -> str | None:
    """What a request shows as its key; `header` gives a header's value by its name in lower case."""
    scheme, _, credentials = (header("authorization") or "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    return header("x-api-key") or None


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(FILES_PREFIX)


ADMIN_PREFIXES = ("/api/admin/", "/api/events", "/api/copy", "/api/create", "/api/delete", "/api/pull")
"""The last four are Ollama's."""
EXPOSED = "Retry-After, Server-Timing, x-request-id, x-swarm-ignored, x-swarm-nodes, x-swarm-route"
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)


def check_host(host: str, allowed: Collection[str]) -> None:
    """`host`: the Host header. Raises Forbidden."""
    match = _HOST.fullmatch(host)
    name = match["name"].strip("[]").lower() if match else ""
    if not (name == "localhost" or is_loopback(name) or name in allowed):
        raise Forbidden(
            f"Host {host[:100]!r} is not allowed; add the name to api.allowed_hosts to use it.", field="Host"
        )


def check_admin_type(method: str, path: str, mimetype: str) -> None:
    """Raises UnsupportedMedia for administration that a page could ask for without a preflight."""
    is_simple = method not in (*SAFE_METHODS, "DELETE", "PUT", "PATCH")
    if path.startswith(ADMIN_PREFIXES) and is_simple and mimetype != "application/json":
        raise UnsupportedMedia(
            "Administration takes Content-Type: application/json, also without a body.", field="Content-Type"
        )


def check_upgrade(upgrade: str) -> None:
    """`upgrade`: the Upgrade header. Raises InvalidRequest for WebSockets; other upgrades are ignored."""
    if "websocket" in upgrade.lower():
        raise InvalidRequest("There are no WebSockets here; streams are server-sent events.", field="Upgrade")


_THIS_MACHINES = re.compile(r"https?://(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?")


class Origins:
    """Decides which web pages may send requests. In `allowed`, "*" is any page, and "localhost" any page from
    the machine that its browser runs on."""

    def __init__(self, allowed: Collection[str] = ()) -> None:
        self._allowed = frozenset(origin.lower().rstrip("/") for origin in allowed)

    def check(self, origin: str | None, host: str, path: str) -> None:
        """Raises Forbidden unless there is no Origin, or it is this server's own or one that is let in."""
        own = (f"http://{host}".lower(), f"https://{host}".lower())
        if origin is None or origin.lower() in own or self.lets_in(origin, path):
            return
        raise Forbidden(
            f"Pages of {origin[:100]!r} are not let in; add the origin to api.allowed_origins in the "
            "configuration to let them use the models.",
            field="Origin",
        )

    def check_site(self, request: Request) -> None:
        """Raises Forbidden where the browser says that another site's page caused the request."""
        site = request.headers.get("Sec-Fetch-Site", "none").lower()
        if site in ("none", "same-origin") or self.lets_in(request.headers.get("Origin"), request.path):
            return
        is_link = request.method in SAFE_METHODS and request.headers.get("Sec-Fetch-Mode") == "navigate"
        if not (is_link and request.path == "/"):
            raise Forbidden("Another site's page caused this request.", field="Sec-Fetch-Site")

    def lets_in(self, origin: str | None, path: str) -> bool:
        if origin is None or path.startswith(ADMIN_PREFIXES):
            return False
        own_pages = "localhost" in self._allowed and _THIS_MACHINES.fullmatch(origin.lower()) is not None
        return own_pages or "*" in self._allowed or origin.lower() in self._allowed

    def answer_preflight(self, request: Request) -> Response | None:
        """What a browser asks before it lets a page send a request; it sends no key with that."""
        is_preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not is_preflight or not self.lets_in(request.headers.get("Origin"), request.path):
            return None
        # Some old browsers take no 204.
        response = Response(b"", status=200)
        response.headers["Access-Control-Allow-Methods"] = "GET, POST, DELETE"
        response.headers["Access-Control-Allow-Headers"] = request.headers.get(
            "Access-Control-Request-Headers", ""
        )
        response.headers["Access-Control-Max-Age"] = "600"
        return response

    def stamp(self, request: Request, response: Response) -> None:
        """Tells the browser that the page may read this."""
        origin = request.headers.get("Origin")
        if origin is not None and self.lets_in(origin, request.path):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED
            response.headers["Vary"] = "Origin"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
