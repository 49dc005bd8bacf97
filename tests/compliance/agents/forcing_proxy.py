"""Stands between an agent and the daemon: keeps what both say, and has the first answer call a tool.

The guide is too small to choose a tool. So `tool_choice` of an agent's first request with tools is set, and
that tool's parameters are narrowed to the one call that is wanted. The call itself, its events and everything
after it are the daemon's own. All other bytes are passed on as they are."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

TIMEOUT_S = 600.0


@dataclass
class Exchange:
    path: str
    asked: dict[str, Any]
    status: int = 0
    answer: str = ""

    def events(self) -> list[dict[str, Any]]:
        """Of a stream. Raises ValueError for one that is not well-formed."""
        *blocks, end = self.answer.split("\n\n")
        if end:
            raise ValueError(f"the stream ends with {end!r}")
        data = [line for block in blocks for line in block.split("\n") if line.startswith("data: ")]
        return [json.loads(line[6:]) for line in data if line != "data: [DONE]"]


@dataclass
class ForcedCall:
    tools: tuple[str, ...]
    """The first of these that the agent offers."""
    arguments: dict[str, Any]
    """By the name of the parameter; one that the tool does not have is left out."""

    def into(self, body: dict[str, Any]) -> bool:
        """False: there is no such tool."""
        for tool in body.get("tools") or ():
            function = tool.get("function", tool)
            if function.get("name") not in self.tools:
                continue
            known = function["parameters"].get("properties", {})
            wanted = {name: {"const": value} for name, value in self.arguments.items() if name in known}
            function["parameters"] = {
                "type": "object",
                "properties": wanted,
                "required": list(wanted),
                "additionalProperties": False,
            }
            chosen = {"type": "function", "name": function["name"]}
            body["tool_choice"] = (
                chosen if function is tool else {"type": "function", "function": {"name": function["name"]}}
            )
            return True
        return False


@dataclass
class Proxy:
    url: str = ""
    exchanges: list[Exchange] = field(default_factory=list)
    """Of all POSTs."""
    has_forced: bool = False


@contextmanager
def forcing_proxy(upstream: str, call: ForcedCall) -> Iterator[Proxy]:
    proxy = Proxy()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.pass_on(b"")

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.loads(data)
            proxy.exchanges.append(Exchange(self.path, body))
            if not proxy.has_forced and call.into(body):
                proxy.has_forced = True
                data = json.dumps(body).encode()
            self.pass_on(data, proxy.exchanges[-1])

        def pass_on(self, data: bytes, exchange: Exchange | None = None) -> None:
            headers = {"Content-Type": "application/json"}
            with httpx.stream(
                self.command, upstream + self.path, content=data, headers=headers, timeout=TIMEOUT_S
            ) as answer:
                self.send_response(answer.status_code)
                self.send_header("Content-Type", answer.headers.get("content-type", ""))
                self.send_header("Connection", "close")
                self.end_headers()
                if exchange is not None:
                    exchange.status = answer.status_code
                for part in answer.iter_bytes():
                    if exchange is not None:
                        exchange.answer += part.decode(errors="replace")
                    self.wfile.write(part)
                    self.wfile.flush()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
