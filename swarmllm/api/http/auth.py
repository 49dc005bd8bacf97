"""Keys at the door: which request needs one, which has one, and what each may do.

The key file is looked at again at most once a second: a revoked key works for a second at the longest, and
a busy node does not ask its disk for every request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio
from quart import Request

from swarmllm.api.admin.dashboard_page import FILES_PREFIX, PAGE_PATH
from swarmllm.api.http.cross_origin import ADMIN_PREFIXES
from swarmllm.api.http.errors import Forbidden
from swarmllm.errors import ConfigError, InvalidRequest
from swarmllm.keys import ApiKey, KeyRing

log = logging.getLogger(__name__)

REFRESH_EVERY_S = 1.0
OPEN_PATHS = ("/health", "/health/ready", PAGE_PATH)
"""For load balancers and service managers, which have no keys: they tell nothing but that. And the page that
asks a person for a key, with its files."""


class Unauthorized(InvalidRequest):
    http_status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"


class Authenticator:
    def __init__(self, ring: KeyRing | None) -> None:
        self._ring = ring
        self._refreshed_s = float("-inf")
        self._refreshing = trio.Lock()

    async def admit(self, request: Request) -> ApiKey | None:
        """The key that the caller has shown; None where none is needed. Raises Unauthorized, Forbidden."""
        if self._ring is None:
            return None
        await self._refresh(self._ring)
        if not self._ring.is_required or _is_open(request.path):
            return None
        secret = secret_of(request.headers.get)
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
