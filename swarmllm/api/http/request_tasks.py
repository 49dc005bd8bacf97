"""One HTTP request's tasks: its handler, its watch for a client that leaves, and the tasks it owns.

quart-trio runs a request in a nursery of its own and cancels it when the client disconnects. Feeds (see
`feed`) need the same end but outlive the handler, so they get a nursery around that one: whatever way the
request ends, its feeds have ended before the next request of its connection is read.
"""

from __future__ import annotations

from typing import Protocol, TypeVar, cast

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable
from quart import request
from quart_trio.asgi import TrioASGIHTTPConnection

from swarmllm.supervision import spawn

FEEDS = "swarmllm.feeds"


class Owned(Protocol):
    """A task that serves one request and may be told to stop."""

    async def run(self) -> None: ...

    def stop(self) -> None: ...

    def has_failed(self, error: Exception) -> None: ...


OwnedTask = TypeVar("OwnedTask", bound=Owned)


class Feeds:
    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._feeds: list[Owned] = []

    def start(self, feed: Owned) -> None:
        self._feeds.append(feed)
        spawn(self._nursery, "request", feed.run, failed=feed.has_failed)

    def stop(self) -> None:
        for feed in self._feeds:
            feed.stop()


class RequestTasks(TrioASGIHTTPConnection):
    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async with trio.open_nursery() as nursery:
            feeds = Feeds(nursery)
            cast(dict[str, object], self.scope)[FEEDS] = feeds
            try:
                await super().__call__(receive, send)
            finally:
                feeds.stop()


def own_feed(feed: OwnedTask) -> OwnedTask:
    """Start it; it ends with the current request at the latest."""
    cast(Feeds, cast(dict[str, object], request.scope)[FEEDS]).start(feed)
    return feed
