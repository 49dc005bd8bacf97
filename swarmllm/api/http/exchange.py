"""One HTTP request and its answer: h11's events on one side, ASGI's on the other.

Bytes of a body are read when the application asks for them, and have been charged to the client before. When
the body is complete, the application's `receive` goes on reading, so that a client that leaves is noticed;
what the client sends of its next request (CHUNK_BYTES at most) waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import h11
import trio

from swarmllm.api.http.limits import CHUNK_BYTES, ClientByteBudget, HttpLimits
from swarmllm.api.http.wire import ClientGone, HttpWire

Headers = list[tuple[bytes, bytes]]
Event = dict[str, Any]
Application = Callable[[Any, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]
ALWAYS_ONCE = (b"origin", b"content-type", b"authorization", b"x-api-key", b"sec-fetch-site")
"""Two of them are two answers to one question, and two readers may choose differently."""


class HttpRefused(Exception):
    """The request is answered by this server and not by the application."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


class Exchange:
    """One request and its answer."""

    def __init__(
        self,
        wire: HttpWire,
        protocol: h11.Connection,
        request: h11.Request,
        client: str,
        limits: HttpLimits,
        bodies: ClientByteBudget,
        *,
        is_last: Callable[[], bool],
    ) -> None:
        """`is_last`: whether the connection ends with this answer, asked when the answer begins."""
        self._wire = wire
        self._h11 = protocol
        self._limits = limits
        self._bodies = bodies
        self._is_last = is_last
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
        self._refusal: HttpRefused | None = None
        self._client_left = False

    async def run(self, application: Application) -> bool:
        """Whether the connection can carry another request. Raises Refused, ClientGone and what the
        application raises."""
        scope = asgi_scope(self._request, self._wire)
        scope["state"]["charge"] = self._charge_more
        for name, value in self._request.headers:
            if name == b"content-length":
                self._n_announced = int(value)
        if (self._n_announced or 0) > self._limits.body_bytes:
            raise self._too_large()
        try:
            await application(scope, self._receive, self._send)
        except Exception as error:
            if not all(isinstance(each, (HttpRefused, ClientGone)) for each in exception_leaves(error)):
                raise
            if self._refusal is None:
                raise ClientGone from None
        finally:
            self._bodies.give_back(self._client, self._n_charged)
        if self._client_left:
            raise ClientGone
        if self._refusal is not None and not self._has_started:
            raise self._refusal
        if not self._is_answered:
            if not self._has_started:
                raise RuntimeError("the application did not answer")
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
                            self._h11.receive_data(await self._wire.read(CHUNK_BYTES))
                        elif isinstance(event, h11.Data):
                            n_left -= len(event.data)
                    except h11.RemoteProtocolError:
                        return False
        if self._h11.our_state is h11.DONE and self._h11.their_state is h11.DONE:
            self._h11.start_next_cycle()
            return True
        await self._wire.linger()
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
            await self._wire.write(self._h11.send(h11.InformationalResponse(status_code=100, headers=[])))
        limits = self._limits
        self._charge(min(self._n_body + CHUNK_BYTES, self._n_announced or limits.body_bytes))
        deadline_s = self._body_began_s + limits.body_s + self._n_body / limits.body_bytes_per_s
        with trio.move_on_at(deadline_s) as scope:
            data = await self._wire.read(CHUNK_BYTES)
        if scope.cancelled_caught:
            raise self._refused(408, "request_timeout", "The body took too long to arrive.")
        if not data:
            raise ClientGone
        self._h11.receive_data(data)

    def _charge(self, n_bytes: int) -> None:
        if n_bytes <= self._n_charged:
            return
        if not self._bodies.take(self._client, n_bytes - self._n_charged):
            raise self._refused(
                503, "bodies_too_large", "The bodies of the requests that run now fill their memory."
            )
        self._n_charged = n_bytes

    def _charge_more(self, n_bytes: int) -> bool:
        """For what the application keeps of this request besides its body. False: there is no room."""
        if not self._bodies.take(self._client, n_bytes):
            return False
        self._n_charged += n_bytes
        return True

    async def _watch(self) -> Event:
        """Until the client leaves. What it sends of a next request waits in the connection's buffer."""
        if not self._h11.trailing_data[0]:
            data = await self._wire.read(CHUNK_BYTES)
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
            await self._wire.write(out)

    async def _send_head(self, status: int, headers: Headers) -> None:
        self._has_started = True
        self._has_no_body = self._request.method == b"HEAD" or status in (204, 304)
        headers.append((b"date", formatdate(usegmt=True).encode()))
        names = {name.lower() for name, _ in headers}
        if self._is_last() and b"connection" not in names:
            headers.append((b"connection", b"close"))
        head = h11.Response(status_code=status, headers=headers, reason=_reason(status))
        if b"content-length" in names:
            self._head = head
        else:
            await self._wire.write(self._h11.send(head))

    def _too_large(self) -> HttpRefused:
        return HttpRefused(413, "request_too_large", "The request body is larger than api.max_body_bytes.")

    def _refused(self, status: int, code: str, message: str) -> HttpRefused:
        self._refusal = HttpRefused(status, code, message)
        return self._refusal


def asgi_scope(request: h11.Request, wire: HttpWire) -> Event:
    """ASGI's description of a request. Raises Refused."""
    path, _, query = _origin_form(request).partition(b"?")
    headers = list(request.headers)
    for name in ALWAYS_ONCE:
        if sum(name == other for other, _ in headers) > 1:
            raise HttpRefused(400, "bad_request", f"The header {name.decode()} is there more than once.")
    return {
        "type": "http",
        "http_version": request.http_version.decode(),
        "asgi": {"spec_version": "2.1", "version": "3.0"},
        "method": request.method.decode().upper(),
        "scheme": wire.scheme,
        "path": unquote(path.decode()),
        "raw_path": path,
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "client": wire.peer,
        "server": wire.own,
        "state": {},
        "extensions": {},
    }


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
    raise HttpRefused(400, "bad_request", "The request's target must be a path.")


def exception_leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in exception_leaves(each)]
    return [error]


def _reason(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""
