"""A client that costs as little as a client can: one socket, and nothing parsed before the answer is over.

On a machine where daemons, workers and client share two cores, a client that parses every chunk as it comes
measures itself.
"""

from __future__ import annotations

import json
import re
import socket
import time
from bisect import bisect_right
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


def stream_events(api_url: str, path: str, body: dict[str, Any]) -> list[Event]:
    """POST, and every event of the answer."""
    where = urlsplit(api_url)
    payload = json.dumps(body).encode()
    request = (
        f"POST {path} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    ).encode() + payload
    pieces: list[bytes] = []
    ends: list[int] = []
    times_s: list[float] = []
    n_bytes = 0
    with socket.create_connection((where.hostname, where.port), timeout=_TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(request)
        while piece := connection.recv(_RECEIVE_BYTES):
            times_s.append(time.perf_counter())
            pieces.append(piece)
            n_bytes += len(piece)
            ends.append(n_bytes)
            if piece.endswith(b"0\r\n\r\n"):
                break
    answer = b"".join(pieces)
    status = answer.split(b"\r\n", 1)[0]
    if b" 200 " not in status + b" ":
        raise RuntimeError(answer.decode("utf-8", "replace"))
    return [
        Event(times_s[bisect_right(ends, match.end() - 1)], json.loads(match.group(1)))
        for match in _EVENT.finditer(answer)
    ]
