"""Starts short-lived tasks of requests that may outlive the code which starts them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

import trio

from swarmllm.errors import SwarmLLMError
from swarmllm.supervision import spawn

Task = Callable[[], Awaitable[None]]


class SpawnsTasks(Protocol):
    def spawn(self, task: Task, /) -> None:
        """Raises SwarmLLMError while the pipelines of this node do not run."""
        ...


class PipelineTasks:
    """The tasks of all requests of a node, in the nursery of its pipelines."""

    def __init__(self) -> None:
        self.nursery: trio.Nursery | None = None
        """None: the pipelines do not run."""

    def spawn(self, task: Task, failed: Callable[[Exception], object] | None = None, /) -> None:
        """Calls `failed` with the Exception that the task raises. Raises SwarmLLMError while the pipelines of
        this node do not run."""
        if self.nursery is None:
            raise SwarmLLMError("the node is stopping")
        spawn(self.nursery, "request", task, failed=failed)

    def spawn_if_running(self, task: Task) -> None:
        """Starts nothing while the pipelines of this node do not run."""
        if self.nursery is not None:
            self.spawn(task)
