"""A small web server that misbehaves in every way it is told to."""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

Fault = Callable[["Handler", bytes], None]


@dataclass
class Asked:
    path: str
    span: tuple[int, int] | None
    authorization: str | None
    host: str


@dataclass
class FaultyServer:
    """What is on it, and how it is handed out. `faults` are used up, one per request."""

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    faults: deque[Fault] = field(default_factory=deque)
    redirects: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with redirects."""
    linked: dict[str, str] = field(default_factory=dict)
    """Path -> the SHA-256 that is told with its redirect."""
    has_ranges: bool = True
    on_request: Callable[[], None] = lambda: None
    n_bytes: int = 0
    """Sent as bodies."""
    proxied: list[str] = field(default_factory=list)
    """Addresses that were asked for as from a proxy."""

    def spans(self, path: str) -> list[tuple[int, int]]:
        return [asked.span for asked in self.asked if asked.path == path and asked.span]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    web_server: FaultyServer

    def do_GET(self) -> None:
        web_server = self.web_server
        web_server.on_request()
        if self.path.startswith("http://"):
            # As a proxy is asked.
            web_server.proxied.append(self.path)
            self.path = urlsplit(self.path).path
        span = self.span()
        host, authorization = self.headers["Host"], self.headers.get("Authorization")
        web_server.asked.append(Asked(self.path, span, authorization, host))
        data = web_server.files.get(self.path)
        if self.path in web_server.redirects:
            linked = (
                {"X-Linked-Etag": f'"{web_server.linked[self.path]}"'}
                if self.path in web_server.linked
                else {}
            )
            self.reply(
                302, b"", {"Location": web_server.redirects[self.path], **linked, **web_server.headers}
            )
        elif data is None:
            self.reply(404, b"no")
        elif web_server.faults:
            web_server.faults.popleft()(self, data)
        else:
            self.give(data)

    def give(self, data: bytes, **changes: str) -> None:
        """As asked, except for `changes` of headers."""
        span = self.span()
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        if span and self.web_server.has_ranges:
            start, end = span
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
            self.reply(206, data[start:end], headers | changes)
        else:
            self.reply(200, data, headers | changes)

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.web_server.n_bytes += len(body)
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def reset(self) -> None:
        """The connection ends as by a cut cable."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def span(self) -> tuple[int, int] | None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        return (int(match[1]), int(match[2]) + 1) if match else None

    def log_message(self, format: str, *args: object) -> None:
        pass


def well(handler: Handler, data: bytes) -> None:
    """As it should be."""
    handler.give(data)


# Faults.


def reset_at_once(handler: Handler, data: bytes) -> None:
    handler.reset()


def reset_in_the_middle(handler: Handler, data: bytes) -> None:
    start, end = handler.span() or (0, len(data))
    handler.send_response(206 if handler.web_server.has_ranges else 200)
    if handler.web_server.has_ranges:
        handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
    handler.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
    handler.send_header("Content-Length", str(end - start))
    handler.end_headers()
    handler.wfile.write(data[start : (start + end) // 2])
    handler.reset()


def too_short(handler: Handler, data: bytes) -> None:
    """A length that is right for what comes, and less than what was asked for."""
    start, end = handler.span() or (0, len(data))
    handler.give(
        data[: (start + end) // 2],
        Content_Range=f"bytes {start}-{end - 1}/{len(data)}",
        ETag=f'"{hashlib.sha1(data).hexdigest()}"',
    )


def other_bytes(handler: Handler, data: bytes) -> None:
    start, end = handler.span() or (0, len(data))
    handler.give(data, Content_Range=f"bytes {start + 1}-{end}/{len(data)}")


def too_much(handler: Handler, data: bytes) -> None:
    start, end = handler.span() or (0, len(data))
    body = data[start:end] + b"more"
    handler.reply(
        206,
        body,
        {
            "Content-Range": f"bytes {start}-{end - 1}/{len(data)}",
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
        },
    )


def no_range_this_time(handler: Handler, data: bytes) -> None:
    handler.reply(200, b"welcome to the hotel's network")


def nonsense_header(handler: Handler, data: bytes) -> None:
    handler.give(data, Content_Range="bytes some of it")


def status(code: int, **headers: str) -> Callable[[Handler, bytes], None]:
    return lambda handler, data: handler.reply(code, b"", headers)


FAULTS = {
    "reset at once": reset_at_once,
    "reset in the middle": reset_in_the_middle,
    "too short": too_short,
    "other bytes": other_bytes,
    "too much": too_much,
    "no range": no_range_this_time,
    "nonsense": nonsense_header,
    "429": status(429, Retry_After="0"),
    "429 without a word": status(429),
    "500": status(500),
    "503": status(503, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
}


@contextmanager
def open_shelf() -> Iterator[FaultyServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OurHandler", (Handler,), {}))
    server.daemon_threads = True
    web_server = FaultyServer(f"http://127.0.0.1:{server.server_address[1]}")
    server.RequestHandlerClass.web_server = web_server  # type: ignore[attr-defined]

    server.handle_error = lambda request, address: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield web_server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
