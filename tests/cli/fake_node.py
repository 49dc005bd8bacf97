"""A small HTTP server of our own that answers like a node: what the commands send and how they read the
answers is real, the node behind it is a dictionary."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from deadlines import DEADLINE_S

TEXT_DELAY_FOREVER = object()
"""In a stream: keep the connection open without saying more, until the client leaves."""


@dataclass
class Answer:
    """`body`: an object is sent as JSON, a str or bytes as it is, a list as a chunked stream of its items."""

    body: Any
    status: int = 200


@dataclass
class FakeNode:
    url: str
    answers: dict[tuple[str, str], Answer] = field(default_factory=dict)
    requests: list[tuple[str, str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    client_left: threading.Event = field(default_factory=threading.Event)
    stopping: threading.Event = field(default_factory=threading.Event)

    def on(self, method: str, path: str, body: Any, status: int = 200) -> None:
        self.answers[method, path] = Answer(body, status)

    def bodies(self, path: str) -> list[Any]:
        return [body for _, requested, body in self.requests if requested == path]


def sse(*events: Any) -> list[bytes]:
    """A stream of server-sent events."""
    return [
        b"data: " + (event if isinstance(event, bytes) else json.dumps(event).encode()) + b"\n\n"
        for event in events
    ]


def ndjson(*events: Any) -> list[bytes]:
    return [json.dumps(event).encode() + b"\n" for event in events]


@contextmanager
def running_fake_node() -> Iterator[FakeNode]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _respond(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            node.requests.append((self.command, self.path, body))
            node.authorizations.append(self.headers.get("Authorization"))
            answer = node.answers.get((self.command, self.path))
            if answer is None:
                answer = Answer(
                    {"error": {"message": f"no {self.path}", "type": "invalid_request_error"}}, 404
                )
            if isinstance(answer.body, list):
                self._stream(answer)
                return
            data = answer.body if isinstance(answer.body, str) else json.dumps(answer.body)
            self.send_response(answer.status)
            self.send_header("Content-Length", str(len(data.encode())))
            self.end_headers()
            self.wfile.write(data.encode())

        def _stream(self, answer: Answer) -> None:
            self.send_response(answer.status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for item in answer.body:
                if item is TEXT_DELAY_FOREVER:
                    self._wait_for_client_to_leave()
                    return
                self.wfile.write(b"%x\r\n%s\r\n" % (len(item), item))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

        def _wait_for_client_to_leave(self) -> None:
            self.connection.settimeout(DEADLINE_S)
            if self.connection.recv(1) == b"":
                node.client_left.set()
            self.close_connection = True

        def do_GET(self) -> None:
            self._respond()

        def do_POST(self) -> None:
            self._respond()

        def do_DELETE(self) -> None:
            self._respond()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    node = FakeNode(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield node
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


COMPLETIONS = "/v1/chat/completions"
SWARM = {
    "shape": "chain",
    "route": [
        {
            "node": f"12D3KooWNode{index}",
            "nickname": f"node-{index}",
            "layers": layers,
            "compute_ms_per_token": 0.5,
            "overhead_ms_per_token": 0.125,
            "network_ms_per_token": 0.25,
            "prefill_ms": 2.0,
            "bytes_per_token": 1024 if index == 1 else None,
        }
        for index, layers in enumerate(("0:6", "6:12"), 1)
    ],
    "guesses": {"checked": 8, "right": 7},
    "prefill_ms": 5.0,
    "decode_tokens_per_s": 400.0,
}


def delta(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], "usage": None}


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
END = (
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "swarm": SWARM},
    {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}},
    b"[DONE]",
)
CHAT_ANSWER = [b": waiting\n\n", *sse(ROLE, delta("Two "), delta("wörds."), *END)]
