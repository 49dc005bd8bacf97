"""The HTTP endpoint: its socket, its certificate and its keys, handed to the server.

The socket is made here: so the port is known before anything runs (0 takes any), a taken port is an error
with a remedy, and every connection inherits TCP_USER_TIMEOUT (a client whose machine is gone) and a bounded
send buffer (a client that does not read).
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING

import trio

from swarmllm.api.bootstrap import create_bootstrap_app
from swarmllm.api.http.app import create_app
from swarmllm.api.http.auth import is_loopback, secret_of
from swarmllm.api.http.exchange import Application, Headers
from swarmllm.api.http.limits import HttpLimits, limits_for
from swarmllm.api.http.server import HttpServer
from swarmllm.config import Config
from swarmllm.errors import ConfigError, reason_of
from swarmllm.keys import KeyFile, KeyRing
from swarmllm.node import Node
from swarmllm.node.bootstrap_node import BootstrapNode
from swarmllm.operating_system import limit_silence
from swarmllm.supervision import supervise_started

if TYPE_CHECKING:
    from trio_typing import TaskStatus

log = logging.getLogger(__name__)


def open_api(
    node: Node, config: Config, keys: KeyFile | None = None, limits: HttpLimits | None = None
) -> contextlib.AbstractAsyncContextManager[str]:
    """Serve until the block ends; yields the URL.

    Raises ConfigError where the port cannot be had, other machines could reach it and there is no key, or the
    certificate cannot be used.
    """
    return _serve(partial(create_app, node, config), config, keys, limits)


def open_bootstrap_api(
    node: BootstrapNode, config: Config, keys: KeyFile | None = None
) -> contextlib.AbstractAsyncContextManager[str]:
    """The same for a node without models. Raises ConfigError."""
    return _serve(partial(create_bootstrap_app, node, config), config, keys, None)


@contextlib.asynccontextmanager
async def _serve(
    create: Callable[[KeyRing | None], Application],
    config: Config,
    keys: KeyFile | None,
    limits: HttpLimits | None,
) -> AsyncIterator[str]:
    limits = limits or limits_for(config.api.max_body_bytes)
    ring, tls = await trio.to_thread.run_sync(_prepare, config, keys)
    listener = bind(config.api.host, config.api.port, has_keys=ring is not None and ring.is_required)
    _bound_what_waits(listener, limits)
    host, port = listener.getsockname()[:2]
    server = HttpServer(create(ring), limits, tls=tls, key_of=partial(_key_id, ring))

    async def one_life(*, task_status: TaskStatus[None]) -> None:
        # A socket of its own, which the server closes. While the task is down, clients wait at the other.
        await server.serve(listener.dup(), task_status=task_status)

    async with trio.open_nursery() as nursery:
        try:
            await supervise_started(nursery, "HTTP", one_life)
            yield f"{'http' if tls is None else 'https'}://{_reachable(host)}:{port}"
        finally:
            listener.close()
            server.stop()


def _key_id(ring: KeyRing | None, headers: Headers) -> str | None:
    secret = secret_of({name.decode("latin1"): value.decode("latin1") for name, value in headers}.get)
    key = ring.find(secret) if ring is not None and secret is not None else None
    return None if key is None else f"key {key.id}"


def _bound_what_waits(listener: socket.socket, limits: HttpLimits) -> None:
    limit_silence(listener, int(limits.write_s * 1000))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.send_buffer_bytes)


def _prepare(config: Config, keys: KeyFile | None) -> tuple[KeyRing | None, ssl.SSLContext | None]:
    """The keys, and the certificate where there is one. Raises ConfigError."""
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
    tls: ssl.SSLContext | None = None
    if api.certfile:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.minimum_version = ssl.TLSVersion.TLSv1_2
        tls.options |= ssl.OP_NO_RENEGOTIATION
        tls.set_alpn_protocols(["http/1.1"])
        try:
            tls.load_cert_chain(api.certfile, api.keyfile, password=_no_password)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"Cannot use api.certfile {api.certfile} with api.keyfile {api.keyfile}: {reason_of(error)}",
                field="api.certfile",
            ) from None
    elif not is_local:
        log.warning("HTTP beyond this machine without api.certfile: keys and prompts can be read on the way")
    return ring, tls


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
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {error.strerror}. Another daemon may run there; choose another "
            "api.port (0 takes any).",
            field="api.port",
        ) from None
    return listener
