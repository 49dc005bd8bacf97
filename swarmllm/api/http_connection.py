"""One HTTP/1.1 connection: h11 for the protocol, ASGI for the application, a deadline for every wait.

HTTP/1.1 (and 1.0) only: no HTTP/2, no WebSockets, no other upgrade. Bytes are read when the application asks
for them and have been charged to the client before. While a request runs, its `receive` goes on reading, so
that a client that leaves is noticed; what it sends of its next request (CHUNK_BYTES at most) waits.

Whatever cannot be understood or afforded is answered with one of OpenAI's error objects and
`Connection: close`. Then the connection lingers for a moment: a client that is still sending would otherwise
be reset by its kernel before it has read the answer.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import h11
import msgspec
import trio

from swarmllm.api.http_limits import CHUNK_BYTES, ByteBudget, HttpLimits, Place, Places

Headers = list[tuple[bytes, bytes]]
Event = dict[str, Any]
Application = Callable[[Any, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]
ALWAYS_ONCE = (b"origin", b"content-type", b"authorization", b"x-api-key", b"sec-fetch-site")
"""Two of them are two answers to one question, and two readers may choose differently."""
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Refused(Exception):
    """The request is answered by this server and not by the application."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


class ClientGone(Exception):
    """Nobody is there to answer, or nobody who reads."""


@dataclass(frozen=True)
class ServerParts:
    """What all connections of one server share."""

    application: Application
    limits: HttpLimits
    places: Places[HttpConnection]
    bodies: ByteBudget
    key_of: Callable[[Headers], str | None]
    """The API key's id of a request's headers, where it has one that is known."""
    on_error: Callable[[str, BaseException], None]
    """Called with the client and what the application raised."""
    stopping: trio.Event


class HttpConnection:
    def __init__(
        self,
        parts: ServerParts,
        stream: trio.SocketStream,
        *,
        is_secure: bool,
    ) -> None:
        self._parts = parts
        self._limits = parts.limits
        self.stream: trio.SocketStream | trio.SSLStream = stream
        """TLS takes the place of the socket before `run`."""
        self._socket = sock = stream.socket
        self._scheme = "https" if is_secure else "http"
        self._peer: tuple[str, int] = sock.getpeername()[:2]
        self._own: tuple[str, int] = sock.getsockname()[:2]
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=parts.limits.header_bytes)
        self._method = b""
        self.scope = trio.CancelScope()
        """All of this connection; cancelled when it loses its place or the server stops."""

    async def run(self, place: Place[HttpConnection]) -> None:
        """Serve until either side ends. Raises what the socket raises."""
        is_first = True
        while not self._parts.stopping.is_set():
            try:
                request = await self._next_request(is_first=is_first)
                if request is None:
                    return
                client = self._parts.key_of(list(request.headers)) or place.client
                exchange = Exchange(self._parts, self, request, client)
                if not self._parts.places.begin(place, client):
                    raise Refused(429, "too_many_requests", "This client has too many requests running.")
                try:
                    is_over = await exchange.run()
                finally:
                    self._parts.places.end(place, client)
            except h11.RemoteProtocolError as error:
                await self._refuse(Refused(error.error_status_hint, "bad_request", str(error)))
                return
            except Refused as refusal:
                await self._refuse(refusal)
                return
            except ClientGone:
                return
            if not is_over:
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
                data = await self.stream.receive_some(CHUNK_BYTES)
                if data and not has_begun:
                    has_begun = True
                    if not is_first:
                        waiting.deadline = trio.current_time() + limits.header_s
                self._h11.receive_data(data)
                event = self._h11.next_event()
        if waiting.cancelled_caught:
            if has_begun:
                raise Refused(408, "request_timeout", f"The header took longer than {limits.header_s:g} s.")
            return None
        if not isinstance(event, h11.Request):
            return None
        self._method = event.method
        if event.http_version not in (b"1.0", b"1.1"):
            raise Refused(505, "http_version_not_supported", "This server speaks HTTP/1.1.")
        if len(event.headers) > limits.headers:
            raise Refused(431, "too_many_headers", f"A request has at most {limits.headers} header lines.")
        return event

    # What an exchange needs.

    async def write(self, data: bytes) -> None:
        """Raises ClientGone also where the client takes nothing for too long."""
        view = memoryview(data)
        try:
            for start in range(0, len(view), CHUNK_BYTES):
                with trio.fail_after(self._limits.write_s):
                    await self.stream.send_all(view[start : start + CHUNK_BYTES])
        except trio.TooSlowError:
            self.reset()
            raise ClientGone from None
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            raise ClientGone from None

    async def read(self, n_bytes: int) -> bytes:
        """b"" at the end. Raises ClientGone."""
        try:
            return bytes(await self.stream.receive_some(n_bytes))
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            raise ClientGone from None

    def reset(self) -> None:
        """Forget what waits in the kernel for a client that does not read."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)

    @property
    def protocol(self) -> h11.Connection:
        return self._h11

    def scope_of(self, request: h11.Request) -> Event:
        """ASGI's description of a request. Raises Refused."""
        path, _, query = _origin_form(request).partition(b"?")
        headers = list(request.headers)
        for name in ALWAYS_ONCE:
            if sum(name == other for other, _ in headers) > 1:
                raise Refused(400, "bad_request", f"The header {name.decode()} is there more than once.")
        return {
            "type": "http",
            "http_version": request.http_version.decode(),
            "asgi": {"spec_version": "2.1", "version": "3.0"},
            "method": request.method.decode().upper(),
            "scheme": self._scheme,
            "path": unquote(path.decode()),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "client": self._peer,
            "server": self._own,
            "state": {},
            "extensions": {},
        }

    async def _refuse(self, refusal: Refused) -> None:
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
            await self.write(head)
        except (h11.LocalProtocolError, ClientGone):
            return
        await self.linger()

    async def linger(self) -> None:
        """Say that this is all, and read for a moment what the client is still sending."""
        with trio.move_on_after(self._limits.linger_s):
            try:
                if isinstance(self.stream, trio.SocketStream):
                    await self.stream.send_eof()
                n_left = self._limits.linger_bytes
                while n_left > 0 and (data := await self.read(CHUNK_BYTES)):
                    n_left -= len(data)
            except (ClientGone, trio.BrokenResourceError, trio.ClosedResourceError, OSError):
                return


class Exchange:
    """One request and its answer."""

    def __init__(
        self, parts: ServerParts, connection: HttpConnection, request: h11.Request, client: str
    ) -> None:
        self._parts = parts
        self._limits = parts.limits
        self._connection = connection
        self._h11 = connection.protocol
        self._request = request
        self._client = client
        self._n_charged = 0
        self._n_body = 0
        self._n_announced: int | None = None
        self._body_began_s = trio.current_time()
        self._body_is_read = False
        self._head: h11.Response | None = None
        """Of an answer of known length: it leaves together with the first bytes of the body."""
        self._has_started = False
        self._is_answered = False
        self._has_no_body = False
        self._refusal: Refused | None = None
        self._client_left = False

    async def run(self) -> bool:
        """Whether the connection can carry another request. Raises Refused, ClientGone."""
        scope = self._connection.scope_of(self._request)
        for name, value in self._request.headers:
            if name == b"content-length":
                self._n_announced = int(value)
        if (self._n_announced or 0) > self._limits.body_bytes:
            raise self._too_large()
        try:
            await self._parts.application(scope, self._receive, self._send)
        except Exception as error:
            if not all(isinstance(each, (Refused, ClientGone)) for each in exception_leaves(error)):
                self._parts.on_error(self._client, error)
            elif self._refusal is None:
                raise ClientGone from None
        finally:
            self._parts.bodies.give_back(self._client, self._n_charged)
        if self._client_left:
            raise ClientGone
        if self._refusal is not None and not self._has_started:
            raise self._refusal
        if not self._is_answered:
            if not self._has_started:
                raise Refused(500, "internal_error", "This node hit an unexpected error; its log says more.")
            # The answer breaks off: its client misses the last chunk.
            return False
        return await self._finish()

    async def _finish(self) -> bool:
        """Read the little that may be left of the body; with more left, the connection ends here."""
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.SEND_BODY:
            with trio.move_on_after(self._limits.linger_s):
                n_left = CHUNK_BYTES
                while n_left > 0 and self._h11.their_state is h11.SEND_BODY:
                    try:
                        event = self._h11.next_event()
                        if event is h11.NEED_DATA:
                            self._h11.receive_data(await self._connection.read(CHUNK_BYTES))
                        elif isinstance(event, h11.Data):
                            n_left -= len(event.data)
                    except h11.RemoteProtocolError:
                        return False
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
            self._h11.start_next_cycle()
            return True
        await self._connection.linger()
        return False

    async def _receive(self) -> Event:
        if self._body_is_read:
            return await self._watch()
        return await self._body_event()

    async def _body_event(self) -> Event:
        while True:
            try:
                event = self._h11.next_event()
            except h11.RemoteProtocolError as error:
                raise self._refused(error.error_status_hint, "bad_request", str(error)) from None
            if event is h11.NEED_DATA:
                await self._read_body()
            elif isinstance(event, h11.Data):
                self._n_body += len(event.data)
                if self._n_body > self._limits.body_bytes:
                    self._refusal = self._too_large()
                    raise self._refusal
                self._charge(self._n_body)
                return {"type": "http.request", "body": bytes(event.data), "more_body": True}
            elif isinstance(event, h11.EndOfMessage):
                self._body_is_read = True
                return {"type": "http.request", "body": b"", "more_body": False}
            else:
                self._client_left = True
                return {"type": "http.disconnect"}

    async def _read_body(self) -> None:
        """More of it, charged before it is read and within the deadline for all of it."""
        if self._h11.they_are_waiting_for_100_continue:
            await self._connection.write(
                self._h11.send(h11.InformationalResponse(status_code=100, headers=[]))
            )
        limits = self._limits
        self._charge(min(self._n_body + CHUNK_BYTES, self._n_announced or limits.body_bytes))
        deadline_s = self._body_began_s + limits.body_s + self._n_body / limits.body_bytes_per_s
        with trio.move_on_at(deadline_s) as scope:
            data = await self._connection.read(CHUNK_BYTES)
        if scope.cancelled_caught:
            raise self._refused(408, "request_timeout", "The body took too long to arrive.")
        if not data:
            raise ClientGone
        self._h11.receive_data(data)

    def _charge(self, n_bytes: int) -> None:
        if n_bytes <= self._n_charged:
            return
        if not self._parts.bodies.take(self._client, n_bytes - self._n_charged):
            raise self._refused(
                503, "bodies_too_large", "The bodies of the requests that run now fill their memory."
            )
        self._n_charged = n_bytes

    async def _watch(self) -> Event:
        """Until the client leaves. What it sends of a next request waits in the connection's buffer."""
        if not self._h11.trailing_data[0]:
            data = await self._connection.read(CHUNK_BYTES)
            if not data:
                self._client_left = True
                return {"type": "http.disconnect"}
            self._h11.receive_data(data)
        await trio.sleep_forever()
        raise AssertionError

    async def _send(self, event: Event) -> None:
        if event["type"] == "http.response.start":
            await self._send_head(event["status"], list(event.get("headers", [])))
            return
        data = event.get("body", b"")
        out = b""
        if self._head is not None:
            out += self._h11.send(self._head)
            self._head = None
        if data and not self._has_no_body:
            out += self._h11.send(h11.Data(data=data))
        if not event.get("more_body", False):
            out += self._h11.send(h11.EndOfMessage())
            self._is_answered = True
        if out:
            await self._connection.write(out)

    async def _send_head(self, status: int, headers: Headers) -> None:
        self._has_started = True
        self._has_no_body = self._request.method == b"HEAD" or status in (204, 304)
        headers.append((b"date", formatdate(usegmt=True).encode()))
        names = {name.lower() for name, _ in headers}
        if self._parts.stopping.is_set() and b"connection" not in names:
            headers.append((b"connection", b"close"))
        head = h11.Response(status_code=status, headers=headers, reason=_reason(status))
        if b"content-length" in names:
            self._head = head
        else:
            await self._connection.write(self._h11.send(head))

    def _too_large(self) -> Refused:
        return Refused(413, "request_too_large", "The request body is larger than api.max_body_bytes.")

    def _refused(self, status: int, code: str, message: str) -> Refused:
        self._refusal = Refused(status, code, message)
        return self._refusal


def _origin_form(request: h11.Request) -> bytes:
    """The target as a path with its query. Raises Refused."""
    target = request.target
    if target.startswith(b"/"):
        return target
    scheme, separator, rest = target.partition(b"://")
    if separator and scheme.lower() in (b"http", b"https"):
        authority, slash, path = rest.partition(b"/")
        hosts = [value for name, value in request.headers if name == b"host"]
        if authority.lower() == (hosts or [b""])[0].lower():
            return slash + path or b"/"
    raise Refused(400, "bad_request", "The request's target must be a path.")


def exception_leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in exception_leaves(each)]
    return [error]


def _reason(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""
