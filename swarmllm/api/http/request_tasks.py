"""One HTTP request's tasks: its handler, its watch for a client that leaves, and the tasks it owns.

quart-trio runs a request in a nursery of its own and cancels it when the client disconnects. Feeds (see
`task`) need the same end but outlive the handler, so they get a nursery around that one: whatever way the
request ends, its feeds have ended before the next request of its connection is read.
"""

from __future__ import annotations

from typing import Protocol, TypeVar, cast

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable
from quart import request
from quart_trio.asgi import TrioASGIHTTPConnection

from swarmllm.supervision import spawn

TASK_GROUP = "swarmllm.tasks"


class RequestTask(Protocol):
    """A task that serves one request and may be told to stop."""

    async def run(self) -> None: ...

    def stop(self) -> None: ...

    def has_failed(self, error: Exception) -> None: ...


RequestTaskT = TypeVar("RequestTaskT", bound=RequestTask)


class RequestTaskGroup:
    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._tasks: list[RequestTask] = []

    def start(self, task: RequestTask) -> None:
        self._tasks.append(task)
        spawn(self._nursery, "request", task.run, failed=task.has_failed)

    def stop(self) -> None:
        for task in self._tasks:
            task.stop()


class RequestTasks(TrioASGIHTTPConnection):
    async def __call__(self, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        async with trio.open_nursery() as nursery:
            tasks = RequestTaskGroup(nursery)
            cast(dict[str, object], self.scope)[TASK_GROUP] = tasks
            try:
                await super().__call__(receive, send)
            finally:
                tasks.stop()


def start_request_task(task: RequestTaskT) -> RequestTaskT:
    """Start it; it ends with the current request at the latest."""
    cast(RequestTaskGroup, cast(dict[str, object], request.scope)[TASK_GROUP]).start(task)
    return task
