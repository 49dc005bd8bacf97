"""Hypercorn under trio, on a socket that is ours.

The socket is made here and handed over by descriptor: so the port is known before anything runs (0 takes
any), a taken port is an error with a remedy, and TCP_USER_TIMEOUT is inherited by every connection. Hypercorn
shields its writes from cancellation and gives them no deadline; a client that stays connected and stops
reading would otherwise hold its task for ever, and the daemon's end with it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from functools import partial

import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio import serve

from swarmllm.api.app import create_app
from swarmllm.api.guard import is_loopback
from swarmllm.api.hypercorn_guard import install
from swarmllm.config import Config
from swarmllm.errors import ConfigError
from swarmllm.keys import KeyFile, KeyRing
from swarmllm.node import Node

log = logging.getLogger(__name__)

STALLED_CLIENT_TIMEOUT_S = 20
KEEP_ALIVE_S = 30
STOP_GRACE_S = 1.0
BACKLOG = 128


@contextlib.asynccontextmanager
async def open_api(node: Node, config: Config, keys: KeyFile | None = None) -> AsyncIterator[str]:
    """Serve until the block ends; yields the URL.

    Raises ConfigError where the port cannot be had, other machines could reach it and there is no key, or the
    certificate cannot be used.
    """
    ring, is_secure = await trio.to_thread.run_sync(_prepare, config, keys)
    listener = bind(config.api.host, config.api.port, has_keys=ring is not None and ring.is_required)
    host, port = listener.getsockname()[:2]
    settings = HypercornConfig()
    settings.bind = [f"fd://{listener.detach()}"]
    settings.backlog = BACKLOG
    if is_secure:
        settings.certfile, settings.keyfile = config.api.certfile, config.api.keyfile
        # Disconnects are watched for on HTTP/1.1, where a connection is one request at a time.
        settings.alpn_protocols = ["http/1.1"]
    settings.keep_alive_timeout = KEEP_ALIVE_S
    settings.graceful_timeout = STOP_GRACE_S
    settings.include_server_header = False
    settings.errorlog = logging.getLogger("hypercorn.error")
    settings.errorlog.setLevel(logging.WARNING)
    stopping = trio.Event()
    install()
    async with trio.open_nursery() as nursery:
        await nursery.start(
            partial(serve, create_app(node, config, ring), settings, shutdown_trigger=stopping.wait)
        )
        try:
            yield f"{'https' if is_secure else 'http'}://{_reachable(host)}:{port}"
        finally:
            stopping.set()


def _prepare(config: Config, keys: KeyFile | None) -> tuple[KeyRing | None, bool]:
    """The keys, and whether there is a certificate. Raises ConfigError."""
    api, is_local = config.api, _is_local(config.api.host)
    ring: KeyRing | None = None
    if keys is not None:
        ring = KeyRing(keys)
        ring.refresh()
        if not is_local and ring.is_required:
            # Revoking the last key closes the endpoint, it does not open it.
            ring = KeyRing(keys, is_required=True)
            ring.refresh()
    if bool(api.certfile) != bool(api.keyfile):
        missing = "keyfile" if api.certfile else "certfile"
        raise ConfigError(f"HTTPS needs both files: api.{missing} is missing.", field=f"api.{missing}")
    if api.certfile:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                api.certfile, api.keyfile, password=_no_password
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"Cannot use api.certfile {api.certfile} with api.keyfile {api.keyfile}: {error}",
                field="api.certfile",
            ) from None
    elif not is_local:
        log.warning("HTTP beyond this machine without api.certfile: keys and prompts can be read on the way")
    return ring, bool(api.certfile)


def _no_password() -> str:
    """A daemon cannot answer a prompt on a terminal."""
    raise ValueError("the key is encrypted")


def _is_local(host: str) -> bool:
    return host == "localhost" or is_loopback(host)


def _reachable(host: str) -> str:
    """What this machine's own programs can dial."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def bind(host: str, port: int, *, has_keys: bool = False) -> socket.socket:
    """Raises ConfigError."""
    address = "127.0.0.1" if host == "localhost" else host
    if not _is_local(host) and not has_keys:
        raise ConfigError(
            f"api.host {host!r} is not a loopback address, and there are no API keys: anybody who reaches "
            "this machine could use it. Make a key first: swarmllm key create NAME",
            field="api.host",
        )
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_CLIENT_TIMEOUT_S * 1000)
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {error.strerror}. Another daemon may run there; choose another "
            "api.port (0 takes any).",
            field="api.port",
        ) from None
    return listener
