"""One HTTP request's tasks: its handler, its watch for a client that leaves, and the tasks it owns.

quart-trio runs a request in a nursery of its own and cancels it when the client disconnects. Feeds (see
`feed`) need the same end but outlive the handler, so they get a nursery around that one: whatever way the
request ends, its feeds have ended before the next line of hypercorn runs.

Two races between the libraries are closed here. Hypercorn reports a disconnect also after every complete
answer, from within the handler's last `send`, and quart-trio would then cancel that very call: what hypercorn
does next (close the connection, or arm its idle timer) would be lost. And hypercorn waits while the
application's queue is full, so somebody must go on reading it until the handler is done, even when nobody
wants the rest of a body.
"""

from __future__ import annotations

from typing import Protocol, TypeVar, cast

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, ASGISendEvent
from quart import request
from quart.asgi import ASGIHTTPConnection
from quart.wrappers import Request
from quart_trio.asgi import TrioASGIHTTPConnection

FEEDS = "swarmllm.feeds"


class Owned(Protocol):
    """A task that serves one request and may be told to stop."""

    async def run(self) -> None: ...

    def stop(self) -> None: ...


OwnedTask = TypeVar("OwnedTask", bound=Owned)


class Feeds:
    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._feeds: list[Owned] = []

    def start(self, feed: Owned) -> None:
        self._feeds.append(feed)
        self._nursery.start_soon(feed.run)

    def stop(self) -> None:
        for feed in self._feeds:
            feed.stop()


class Connection(TrioASGIHTTPConnection):
    _answered = False

    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async def watched_send(event: ASGISendEvent) -> None:
            if event["type"] == "http.response.body" and not event.get("more_body", False):
                self._answered = True
            await send(event)

        async with trio.open_nursery() as nursery:
            feeds = Feeds(nursery)
            cast(dict[str, object], self.scope)[FEEDS] = feeds
            try:
                await super().__call__(receive, watched_send)
            finally:
                feeds.stop()

    async def handle_messages(  # type: ignore[override]
        self, nursery: trio.Nursery, request: Request, receive: ASGIReceiveCallable
    ) -> None:
        await ASGIHTTPConnection.handle_messages(self, request, receive)
        if not self._answered:
            nursery.cancel_scope.cancel()
        while True:
            await receive()


def own_feed(feed: OwnedTask) -> OwnedTask:
    """Start it; it ends with the current request at the latest."""
    cast(Feeds, cast(dict[str, object], request.scope)[FEEDS]).start(feed)
    return feed
