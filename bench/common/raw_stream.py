"""A client that costs as little as a client can: bare sockets, one thread, and nothing parsed before the
answers are over.

On a machine where daemons, workers and client share two cores, a client that parses every chunk as it comes
measures itself.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_EVENT = re.compile(rb"^data: (\{.*\})\r?$", re.MULTILINE)
_RECEIVE_BYTES = 65536
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Event:
    """One server-sent event, and when its last byte had come, by `time.perf_counter`."""

    at_s: float
    content: dict[str, Any]


@dataclass(frozen=True)
class Question:
    """A POST whose answer is a stream of events."""

    api_url: str
    path: str
    body: dict[str, Any]


class RawStream:
    """One answer as it arrives: bytes, and when they came."""

    def __init__(self, question: Question) -> None:
        where = urlsplit(question.api_url)
        payload = json.dumps(question.body).encode()
        request = (
            f"POST {question.path} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
        ).encode() + payload
        self.is_over = False
        self.n_received = 0
        """How often bytes have come: the headers, then about as often as there were events."""
        self._pieces: list[bytes] = []
        self._ends: list[int] = []
        self._times_s: list[float] = []
        self._n_bytes = 0
        self.begun_s = time.perf_counter()
        self.connection = socket.create_connection((where.hostname, where.port), timeout=_TIMEOUT_S)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection.sendall(request)

    def receive(self) -> None:
        """Take what has come; there is something, or the other side has closed."""
        piece = self.connection.recv(_RECEIVE_BYTES)
        if piece:
            self._times_s.append(time.perf_counter())
            self._pieces.append(piece)
            self._n_bytes += len(piece)
            self._ends.append(self._n_bytes)
            self.n_received += 1
        if not piece or piece.endswith(b"0\r\n\r\n"):
            self.close()

    def close(self) -> None:
        self.is_over = True
        self.connection.close()

    def events(self) -> list[Event]:
        answer = b"".join(self._pieces)
        status = answer.split(b"\r\n", 1)[0]
        if b" 200 " not in status + b" ":
            raise RuntimeError(answer.decode("utf-8", "replace"))
        return [
            Event(self._times_s[bisect_right(self._ends, match.end() - 1)], json.loads(match.group(1)))
            for match in _EVENT.finditer(answer)
        ]


class Client:
    """Any number of answers at the same time."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def ask(self, question: Question) -> RawStream:
        stream = RawStream(question)
        self._selector.register(stream.connection, selectors.EVENT_READ, stream)
        return stream

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Receive what comes until then."""
        while not is_done():
            ready = self._selector.select(_TIMEOUT_S)
            if not ready:
                raise TimeoutError(f"no answer went on for {_TIMEOUT_S:.0f} s")
            for key, _ in ready:
                stream: RawStream = key.data
                stream.receive()
                if stream.is_over:
                    self._selector.unregister(stream.connection)

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            key.data.close()
        self._selector.close()


def stream_all(questions: Sequence[Question]) -> list[list[Event]]:
    """Ask all at once; every event of every answer."""
    client = Client()
    streams = [client.ask(question) for question in questions]
    client.run_until(lambda: all(stream.is_over for stream in streams))
    client.close()
    return [stream.events() for stream in streams]


def stream_events(api_url: str, path: str, body: dict[str, Any]) -> list[Event]:
    """POST, and every event of the answer."""
    return stream_all([Question(api_url, path, body)])[0]
