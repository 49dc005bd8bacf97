"""Strangers at the door of a loopback server: web pages.

A page in the user's browser can send requests to 127.0.0.1. Two checks keep it out. The Host header must be a
name of this machine, or a page whose own domain was re-pointed at 127.0.0.1 (DNS rebinding) would count as
same-origin. And a request that carries the Origin of another site is refused outright, reads included; there
is no CORS.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

from swarmllm.api.errors import Forbidden

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)


def check_host(host: str, allowed: Collection[str]) -> None:
    """`host`: the Host header. Raises Forbidden."""
    match = _HOST.fullmatch(host)
    name = match["name"].strip("[]").lower() if match else ""
    if not (name == "localhost" or is_loopback(name) or name in allowed):
        raise Forbidden(
            f"Host {host[:100]!r} is not allowed; add the name to api.allowed_hosts to use it.", field="Host"
        )


def check_origin(origin: str | None, host: str) -> None:
    """Raises Forbidden unless there is no Origin or it is this server's own."""
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        raise Forbidden("Requests from other web sites are not accepted.", field="Origin")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
