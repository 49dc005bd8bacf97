"""One HTTP/1.1 connection: h11 for the protocol, ASGI for the application, a deadline for every wait.

HTTP/1.1 (and 1.0) only: no HTTP/2, no WebSockets, no other upgrade.

Whatever cannot be understood or afforded is answered with one of OpenAI's error objects and
`Connection: close`. Then the connection lingers for a moment: a client that is still sending would otherwise
be reset by its kernel before it has read the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import h11
import msgspec
import trio

from swarmllm.api.http.exchange import Application, Exchange, Headers, Refused
from swarmllm.api.http.limits import CHUNK_BYTES, ByteBudget, HttpLimits, Place, Places
from swarmllm.api.http.wire import ClientGone, Wire


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
    def __init__(self, parts: ServerParts, wire: Wire) -> None:
        self._parts = parts
        self._limits = parts.limits
        self.wire = wire
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
                if not self._parts.places.begin(place, client):
                    raise Refused(429, "too_many_requests", "This client has too many requests running.")
                try:
                    has_ended_well = await self._exchange(request, client)
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
            except Exception as error:
                self._parts.on_error(place.client, error)
                text = "This node hit an unexpected error; its log says more."
                await self._refuse(Refused(500, "internal_error", text))
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

    async def _exchange(self, request: h11.Request, client: str) -> bool:
        parts = self._parts
        exchange = Exchange(
            self.wire, self._h11, request, client, self._limits, parts.bodies, is_last=parts.stopping.is_set
        )
        return await exchange.run(parts.application)

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
            await self.wire.write(head)
        except (h11.LocalProtocolError, ClientGone):
            return
        await self.wire.linger()
