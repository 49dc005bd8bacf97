"""What this package assumes of quart, quart-trio and h11 beyond their documentation, one test each.

A test that fails here names the code that has to change with the library.
"""

from __future__ import annotations

import inspect

import h11
import trio
from quart import Quart
from quart.asgi import ASGIHTTPConnection
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection

from swarmllm.api.http.app import App
from swarmllm.api.http.request_tasks import RequestTasks


def test_quart_makes_one_connection_object_per_request_of_the_class_that_we_name() -> None:
    assert QuartTrio.asgi_http_class is TrioASGIHTTPConnection, (
        "quart-trio chooses its connection class elsewhere: app.App.asgi_http_class has no effect"
    )
    assert App.asgi_http_class is RequestTasks
    assert "asgi_http_class" in inspect.getsource(Quart.asgi_app), (
        "Quart.asgi_app no longer reads asgi_http_class: feeds of a request would never start"
    )


def test_a_connection_object_keeps_the_scope_that_requests_show() -> None:
    parameters = list(inspect.signature(ASGIHTTPConnection.__init__).parameters)
    assert parameters == ["self", "app", "scope"], (
        "quart's connection object takes other arguments: request_tasks.RequestTasks finds no scope"
    )


async def test_quart_trio_cancels_a_request_when_its_client_disconnects() -> None:
    """request_tasks.Feeds and the watch for clients that leave rely on it."""
    app = App("test")
    ended = trio.Event()

    @app.get("/")
    async def wait() -> str:
        try:
            await trio.sleep_forever()
        finally:
            ended.set()
        raise AssertionError

    messages = [
        {"type": "http.request", "body": b"", "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, object]:
        await trio.lowlevel.checkpoint()
        return messages.pop(0)

    async def send(event: object) -> None:
        raise AssertionError(f"an answer to nobody: {event}")

    scope = {
        **{"type": "http", "http_version": "1.1", "method": "GET", "scheme": "http", "path": "/"},
        **{"raw_path": b"/", "query_string": b"", "root_path": "", "headers": [], "state": {}},
        **{"asgi": {"spec_version": "2.1", "version": "3.0"}, "client": ("127.0.0.1", 1)},
        **{"server": ("127.0.0.1", 2), "extensions": {}},
    }
    with trio.fail_after(10):
        await app(scope, receive, send)  # type: ignore[arg-type]
    assert ended.is_set(), "quart-trio no longer cancels the handler of a client that is gone"


def test_quart_logs_through_the_method_that_we_override() -> None:
    assert "log_exception" in inspect.getsource(Quart.handle_exception), (
        "Quart.handle_exception logs elsewhere: tracebacks with a prompt's words could reach the log"
    )


def test_h11_says_what_waits_unread_and_pauses_between_requests() -> None:
    """`exchange` leaves the next request in h11's buffer until this one is answered."""
    protocol = h11.Connection(h11.SERVER)
    protocol.receive_data(b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET /next")
    assert isinstance(protocol.next_event(), h11.Request)
    assert isinstance(protocol.next_event(), h11.EndOfMessage)
    assert protocol.next_event() is h11.PAUSED
    assert protocol.trailing_data == (b"GET /next", False)


def test_h11_takes_no_upgrade_by_itself() -> None:
    protocol = h11.Connection(h11.SERVER)
    protocol.receive_data(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\nPRI")
    while protocol.next_event() is not h11.PAUSED:
        pass
    protocol.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
    protocol.send(h11.EndOfMessage())
    assert protocol.their_state is h11.DONE, "an upgrade that was not granted ends the connection"
