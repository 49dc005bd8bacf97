"""Accept HTTP connections and keep what happens on one of them away from everything else.

Each connection is one task behind one guard: whatever TLS, h11, quart or a handler raises there ends that
connection, costs one line in the log at most, and nothing else. Only cancellation and Ctrl-C pass.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import trio

from swarmllm.api.http.connection import HttpConnection, ServerParts
from swarmllm.api.http.exchange import Application, Headers, exception_leaves
from swarmllm.api.http.limits import ByteBudget, HttpLimits, Places, client_of
from swarmllm.api.http.wire import ClientGone, Wire
from swarmllm.log_filter import provoked_by, where

if TYPE_CHECKING:
    from trio_typing import TaskStatus

log = logging.getLogger(__name__)

ACCEPT_RETRY_S = 0.1
CLOSE_TIMEOUT_S = 1.0
STOP_GRACE_S = 1.0
"""For requests that run when the server stops."""
_PASS = (trio.Cancelled, KeyboardInterrupt)
_ORDINARY = (OSError, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError, ClientGone)
"""What a network does."""


def no_key(headers: Headers) -> None:
    """No client has a key."""


class HttpServer:
    def __init__(
        self,
        application: Application,
        limits: HttpLimits,
        *,
        tls: ssl.SSLContext | None = None,
        key_of: Callable[[Headers], str | None] = no_key,
    ) -> None:
        self.places: Places[HttpConnection] = Places(limits)
        self.bodies = ByteBudget(limits.bodies_bytes, limits.bodies_bytes_of_client)
        self._limits = limits
        self._tls = tls
        self._parts = ServerParts(
            application,
            limits,
            self.places,
            self.bodies,
            key_of,
            _report,
            trio.Event(),
        )

    async def serve(
        self, listener: socket.socket, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Takes the bound socket over; until `stop`, and then STOP_GRACE_S for what still runs."""
        listener.setblocking(False)
        listener.listen(self._limits.backlog)
        async with (
            trio.SocketListener(trio.socket.from_stdlib_socket(listener)) as accepting,
            trio.open_nursery() as connections,
        ):
            task_status.started()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._accept, accepting, connections)
                await self._parts.stopping.wait()
                nursery.cancel_scope.cancel()
            await accepting.aclose()
            for place in self.places:
                if place.is_waiting:
                    place.holder.scope.cancel()
            connections.cancel_scope.deadline = trio.current_time() + STOP_GRACE_S

    def stop(self) -> None:
        self._parts.stopping.set()

    async def _accept(self, listener: trio.SocketListener, connections: trio.Nursery) -> NoReturn:
        while True:
            try:
                stream = await listener.accept()
            except OSError as error:
                # No descriptors or no memory left, or a network that went away: all of it passes.
                provoked_by(log, "http").warning("cannot accept HTTP connections: %s", error.strerror)
                await trio.sleep(ACCEPT_RETRY_S)
                continue
            connections.start_soon(self._guarded, stream)

    async def _guarded(self, stream: trio.SocketStream) -> None:
        client = "unknown"
        try:
            client = client_of(stream.socket.getpeername()[0])
            await self._serve_one(stream, client)
        except BaseException as error:
            passing = _passing(error)
            if passing is not None:
                raise passing from None
            if not all(isinstance(leaf, _ORDINARY) for leaf in exception_leaves(error)):
                _report(client, error)
        finally:
            await trio.aclose_forcefully(stream)

    async def _serve_one(self, stream: trio.SocketStream, client: str) -> None:
        connection = HttpConnection(self._parts, Wire(stream, self._limits))
        decision = self.places.enter(client, connection)
        if decision.evicted is not None:
            decision.evicted.holder.scope.cancel()
        if decision.place is None:
            provoked_by(log, client).warning("refused an HTTP connection of %s: all places are taken", client)
            return
        try:
            with connection.scope:
                if self._tls is not None:
                    secure = trio.SSLStream(stream, self._tls, server_side=True, https_compatible=True)
                    with trio.fail_after(self._limits.handshake_s):
                        await secure.do_handshake()
                    connection.wire.stream = secure
                await connection.run(decision.place)
                with trio.move_on_after(CLOSE_TIMEOUT_S):
                    await connection.wire.stream.aclose()
        finally:
            self.places.leave(decision.place)


def _report(client: str, error: BaseException) -> None:
    for leaf in exception_leaves(error):
        provoked_by(log, client).warning("an HTTP connection of %s failed: %s", client, where(leaf))


def _passing(error: BaseException) -> BaseException | None:
    """What of an error is no fault of the connection: cancellation and Ctrl-C."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(_PASS)[0]
    return error if isinstance(error, _PASS) else None
