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
from collections.abc import AsyncIterator
from functools import partial

import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio import serve

from swarmllm.api.app import create_app
from swarmllm.api.guard import is_loopback
from swarmllm.config import Config
from swarmllm.errors import ConfigError
from swarmllm.node import Node

STALLED_CLIENT_TIMEOUT_S = 20
KEEP_ALIVE_S = 30
STOP_GRACE_S = 1.0
BACKLOG = 128


@contextlib.asynccontextmanager
async def open_api(node: Node, config: Config) -> AsyncIterator[str]:
    """Serve until the block ends; yields the URL. Raises ConfigError where the port cannot be had."""
    listener = bind(config.api.host, config.api.port)
    host, port = listener.getsockname()[:2]
    settings = HypercornConfig()
    settings.bind = [f"fd://{listener.detach()}"]
    settings.backlog = BACKLOG
    settings.keep_alive_timeout = KEEP_ALIVE_S
    settings.graceful_timeout = STOP_GRACE_S
    settings.include_server_header = False
    settings.errorlog = logging.getLogger("hypercorn.error")
    settings.errorlog.setLevel(logging.WARNING)
    stopping = trio.Event()
    async with trio.open_nursery() as nursery:
        await nursery.start(
            partial(serve, create_app(node, config), settings, shutdown_trigger=stopping.wait)
        )
        try:
            yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
        finally:
            stopping.set()


def bind(host: str, port: int) -> socket.socket:
    """Raises ConfigError."""
    address = "127.0.0.1" if host == "localhost" else host
    if not is_loopback(address):
        raise ConfigError(
            f"api.host {host!r} is not a loopback address. There are no API keys yet, so the API listens on "
            "this machine only; to reach it from elsewhere use an SSH tunnel or a proxy that authenticates.",
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
