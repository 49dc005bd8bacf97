"""Bytes that no honest HTTP client sends, and what the server may answer."""

from __future__ import annotations

import struct
from dataclasses import dataclass

CHAT = b"/v1/chat/completions"
JSON = b"Content-Type: application/json\r\n"


def head(method: bytes, path: bytes, *lines: bytes, version: bytes = b"1.1") -> bytes:
    return b"\r\n".join([method + b" " + path + b" HTTP/" + version, b"Host: localhost", *lines, b"", b""])


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """Of HTTP/2."""
    return struct.pack("!I", len(body))[1:] + bytes([kind, flags]) + struct.pack("!I", stream) + body


def literal(name: bytes, value: bytes) -> bytes:
    """A header in HPACK, without Huffman."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)
H2_HEAD = (
    literal(b":method", b"POST")
    + literal(b":path", CHAT)
    + literal(b":scheme", b"http")
    + literal(b":authority", b"localhost")
)
H2_KILL = PREFACE + frame(1, 4, 1, H2_HEAD) + frame(3, 0, 1, struct.pack("!I", 8)) + frame(0, 1, 1, b"{}")
"""HEADERS, RST_STREAM, DATA: ended a daemon whose server spoke HTTP/2."""


@dataclass(frozen=True)
class Attack:
    name: str
    data: bytes
    statuses: tuple[int, ...]
    """Of the first answer; 0: the connection is closed without one."""


WS = (b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Version: 13")
ATTACKS = (
    Attack("HTTP/2 by prior knowledge", PREFACE, (505,)),
    Attack("HTTP/2: data after a reset", H2_KILL, (505,)),
    Attack(
        "h2c upgrade",
        head(
            b"GET",
            b"/health",
            b"Connection: Upgrade, HTTP2-Settings",
            b"Upgrade: h2c",
            b"HTTP2-Settings: AAAA",
        ),
        (200,),
    ),
    Attack(
        "h2c upgrade, settings that are no base64",
        head(
            b"GET", b"/health", b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: !"
        ),
        (200,),
    ),
    Attack(
        "WebSocket", head(b"GET", b"/api/events", *WS, b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="), (400,)
    ),
    Attack("WebSocket without key", head(b"GET", b"/", *WS), (400,)),
    Attack("WebSocket of a strange path", head(b"GET", b"/nothing", *WS) + b"\xff" * 200, (400,)),
    Attack("unknown method", head(b"BREW", b"/health"), (405,)),
    Attack("unknown path", head(b"GET", b"/nothing"), (404,)),
    Attack("TRACE", head(b"TRACE", b"/health"), (405,)),
    Attack("CONNECT", head(b"CONNECT", b"localhost:80"), (400,)),
    Attack("CONNECT of a path", head(b"CONNECT", b"/health"), (405,)),
    Attack("OPTIONS *", head(b"OPTIONS", b"*"), (400,)),
    Attack("empty path", head(b"GET", b"?x"), (400,)),
    Attack("foreign absolute target", head(b"GET", b"http://evil.com/health"), (400,)),
    Attack("broken absolute target", head(b"GET", b"http://[/health"), (400,)),
    Attack("own absolute target", head(b"GET", b"http://localhost/health"), (200,)),
    Attack("target that is no ASCII", head(b"GET", b"/\xff\xfe"), (400,)),
    Attack("target with NUL and slashes", head(b"GET", b"/v1/models/%00%2e%2e%2f%ff"), (404,)),
    Attack("64 KiB target", head(b"GET", b"/" + b"a" * 2**16), (431,)),
    Attack("header of 64 KiB", head(b"GET", b"/health", b"X: " + b"a" * 2**16), (431,)),
    Attack("1,000 headers", head(b"GET", b"/health", *[b"X: a"] * 1000), (431,)),
    Attack("header without name", head(b"GET", b"/health", b": a"), (400,)),
    Attack("header with a space in its name", head(b"GET", b"/health", b"Host : evil"), (400,)),
    Attack("header with NUL", head(b"GET", b"/health", b"X: a\0b"), (400,)),
    Attack("two Hosts", head(b"GET", b"/health", b"Host: evil.com"), (400,)),
    Attack("no Host", b"GET /health HTTP/1.1\r\n\r\n", (400,)),
    Attack("no Host, 1.0", b"GET /health HTTP/1.0\r\n\r\n", (403,)),
    Attack("Host that is none", b"GET /health HTTP/1.1\r\nHost: [::1\r\n\r\n", (403,)),
    Attack(
        "two Origins",
        head(b"GET", b"/health", b"Origin: http://localhost", b"Origin: http://evil.com"),
        (400,),
    ),
    Attack("Origin that is no URL", head(b"GET", b"/health", b"Origin: http://["), (403,)),
    Attack("Origin with a bad port", head(b"GET", b"/health", b"Origin: http://localhost:port"), (403,)),
    Attack("Origin null", head(b"GET", b"/health", b"Origin: null"), (403,)),
    Attack("Origin with Latin-1", head(b"GET", b"/health", b"Origin: http://\xe9"), (403,)),
    Attack("obs-fold", head(b"GET", b"/health", b"X: a", b" folded"), (200,)),
    Attack("bare LF", b"GET /health HTTP/1.1\nHost: localhost\n\n", (200,)),
    Attack("bare CR", b"GET /health HTTP/1.1\rHost: localhost\r\r", (0, 400, 408)),
    Attack("HTTP/9.9", head(b"GET", b"/health", version=b"9.9"), (505,)),
    Attack("HTTP/0.9", b"GET /health\r\n\r\n", (400,)),
    Attack("TLS to a plain port", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), (400,)),
    Attack("zeros", bytes(1000), (400,)),
    Attack("negative length", head(b"POST", CHAT, b"Content-Length: -1"), (400,)),
    Attack("absurd length", head(b"POST", CHAT, b"Content-Length: " + b"9" * 20), (413,)),
    Attack("length of 5,000 digits", head(b"POST", CHAT, b"Content-Length: " + b"9" * 5000), (400,)),
    Attack("250 MB announced", head(b"POST", CHAT, b"Content-Length: 250000000") + b" " * 9999, (413,)),
    Attack("two lengths", head(b"POST", CHAT, b"Content-Length: 1", b"Content-Length: 2") + b"{}", (400,)),
    Attack(
        "length and chunks",
        head(b"POST", CHAT, JSON[:-2], b"Content-Length: 2", b"Transfer-Encoding: chunked") + b"0\r\n\r\n",
        (400,),
    ),
    Attack("unknown transfer coding", head(b"POST", CHAT, b"Transfer-Encoding: gzip") + b"{}", (501,)),
    Attack(
        "chunk of no size", head(b"POST", CHAT, JSON[:-2], b"Transfer-Encoding: chunked") + b"x\r\n", (400,)
    ),
    Attack(
        "chunk of 2^80 bytes",
        head(b"POST", CHAT, JSON[:-2], b"Transfer-Encoding: chunked") + b"f" * 20 + b"\r\n" + b" " * 70000,
        (400, 413),
    ),
    Attack(
        "broken trailer",
        head(b"POST", CHAT, JSON[:-2], b"Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\nX\xff: \0\r\n\r\n",
        (400,),
    ),
    Attack("body of a GET", head(b"GET", b"/health", b"Content-Length: 5") + b"hello", (200,)),
    Attack("garbage after an answer", head(b"GET", b"/health") + b"\xff" * 5000, (200,)),
    Attack("200 requests in one packet", head(b"GET", b"/health") * 200, (200,)),
    Attack("half a request", head(b"GET", b"/health")[:-2], (0, 400, 408)),
    Attack("half a body", head(b"POST", CHAT, JSON[:-2], b"Content-Length: 9") + b"{", (0, 400, 408)),
    Attack(
        "Expect",
        head(b"POST", CHAT, JSON[:-2], b"Content-Length: 2", b"Expect: 100-continue") + b"{}",
        (100, 400),
    ),
    Attack("Expect of something else", head(b"POST", CHAT, b"Content-Length: 0", b"Expect: tea"), (400, 415)),
)
