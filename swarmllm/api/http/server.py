"""Accepts HTTP/1.1 connections and serves each: h11 for the protocol, ASGI for the application.

Each connection is one task behind one guard: whatever TLS, h11, quart or a handler raises there ends that
connection, costs one line in the log at most, and nothing else. Only cancellation and Ctrl-C pass. Every wait
has a deadline. There is no HTTP/2, no WebSocket and no other upgrade.

A request that cannot be understood or afforded is answered with one of OpenAI's error objects and
`Connection: close`. Then the connection lingers for a moment: a client that is still sending would otherwise
be reset by its kernel before it has read the answer.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import h11
import msgspec
import trio

from swarmllm.api.http.exchange import Application, Exchange, Headers, HttpRefused, exception_leaves
from swarmllm.api.http.limits import (
    CHUNK_BYTES,
    ClientByteBudget,
    ConnectionPlace,
    ConnectionPlaces,
    HttpLimits,
    client_of,
)
from swarmllm.api.http.wire import ClientGone, HttpWire
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


@dataclass(frozen=True)
class ServerParts:
    """What all connections of one server share."""

    application: Application
    limits: HttpLimits
    places: ConnectionPlaces[HttpConnection]
    bodies: ClientByteBudget
    key_of: Callable[[Headers], str | None]
    """The API key's id of a request's headers, where it has one that is known."""
    stopping: trio.Event


class HttpConnection:
    def __init__(self, parts: ServerParts, wire: HttpWire) -> None:
        self._parts = parts
        self._limits = parts.limits
        self.wire = wire
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=parts.limits.header_bytes)
        self._method = b""
        self.scope = trio.CancelScope()
        """All of this connection; cancelled when it loses its place or the server stops."""

    async def run(self, place: ConnectionPlace[HttpConnection]) -> None:
        """Serve until either side ends. Raises what the socket raises."""
        is_first = True
        while not self._parts.stopping.is_set():
            try:
                request = await self._next_request(is_first=is_first)
                if request is None:
                    return
                client = self._parts.key_of(list(request.headers)) or place.client
                if not self._parts.places.begin(place, client):
                    raise HttpRefused(429, "too_many_requests", "This client has too many requests running.")
                try:
                    has_ended_well = await self._exchange(request, client)
                finally:
                    self._parts.places.end(place, client)
            except h11.RemoteProtocolError as error:
                await self._refuse(HttpRefused(error.error_status_hint, "bad_request", str(error)))
                return
            except HttpRefused as refusal:
                await self._refuse(refusal)
                return
            except ClientGone:
                return
            except Exception as error:
                _report(place.client, error)
                text = "This node hit an unexpected error; its log says more."
                await self._refuse(HttpRefused(500, "internal_error", text))
                return
            if not has_ended_well:
                return
            is_first = False

    async def _next_request(self, *, is_first: bool) -> h11.Request | None:
        """None: the client has closed, or said nothing for too long."""
        limits = self._limits
        event = self._h11.next_event()
        has_begun = bool(self._h11.trailing_data[0])
        with trio.CancelScope() as waiting:
            begin_s = limits.header_s if is_first or has_begun else limits.idle_s
            waiting.deadline = trio.current_time() + begin_s
            while event is h11.NEED_DATA:
                data = await self.wire.read(CHUNK_BYTES)
                if data and not has_begun:
                    has_begun = True
                    if not is_first:
                        waiting.deadline = trio.current_time() + limits.header_s
                self._h11.receive_data(data)
                event = self._h11.next_event()
        if waiting.cancelled_caught:
            if has_begun:
                raise HttpRefused(
                    408, "request_timeout", f"The header took longer than {limits.header_s:g} s."
                )
            return None
        if not isinstance(event, h11.Request):
            return None
        self._method = event.method
        if event.http_version not in (b"1.0", b"1.1"):
            raise HttpRefused(505, "http_version_not_supported", "This server speaks HTTP/1.1.")
        if len(event.headers) > limits.headers:
            raise HttpRefused(
                431, "too_many_headers", f"A request has at most {limits.headers} header lines."
            )
        return event

    async def _exchange(self, request: h11.Request, client: str) -> bool:
        parts = self._parts
        exchange = Exchange(
            self.wire, self._h11, request, client, self._limits, parts.bodies, is_last=parts.stopping.is_set
        )
        return await exchange.run(parts.application)

    async def _refuse(self, refusal: HttpRefused) -> None:
        if self._h11.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        error = {
            "message": refusal.message,
            "type": "rate_limit_error" if refusal.status == 429 else "invalid_request_error",
            "param": None,
            "code": refusal.code,
        }
        body = msgspec.json.encode({"error": error})
        headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
        headers += [("connection", "close"), ("x-content-type-options", "nosniff")]
        if refusal.status in (429, 503):
            headers.append(("retry-after", "1"))
        try:
            head = self._h11.send(h11.Response(status_code=refusal.status, headers=headers))
            if self._method != b"HEAD":
                head += self._h11.send(h11.Data(data=body))
            await self.wire.write(head)
        except (h11.LocalProtocolError, ClientGone):
            return
        await self.wire.linger()


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
        self.places: ConnectionPlaces[HttpConnection] = ConnectionPlaces(limits)
        self.bodies = ClientByteBudget(limits.bodies_bytes, limits.bodies_bytes_of_client)
        self._limits = limits
        self._tls = tls
        self._parts = ServerParts(
            application,
            limits,
            self.places,
            self.bodies,
            key_of,
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
        connection = HttpConnection(self._parts, HttpWire(stream, self._limits))
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
