"""What a ring gives jobs to in tests: a function, by default one that does nothing."""

from __future__ import annotations

from collections.abc import Callable

from swarmllm_proto.swarm import LayerForward
from swarmllm_workers.ring.seat import Seat


class Jobs:
    def __init__(self, take: Callable[..., None] = lambda *_: None) -> None:
        self._take = take

    def take(
        self, seat: Seat, job: LayerForward, payload: memoryview, came_at: float, is_alone: bool
    ) -> None:
        self._take(seat, job, payload, came_at, is_alone)
