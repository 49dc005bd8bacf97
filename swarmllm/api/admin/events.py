"""GET /api/events: everything a dashboard shows, as one stream of server-sent events.

The state of the node is cut into sections (`node`, `peers`, `models`, `requests`, `downloads`, `shares`,
`work`). A reader gets each of them once, whole, and again when it has changed. It sends whole sections
instead of differences, so that a slow reader simply misses the states in between: nothing is queued, a reader
costs one reference per section, and a reader that stalls is disconnected like any other client.

The sections are made at most once per INTERVAL_S for all readers, and not at all without one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import cast

import trio
from quart import Blueprint, Response, current_app

from swarmllm.api.admin.downloads import download_json
from swarmllm.api.admin.node_json import (
    Json,
    departed_json,
    loading_json,
    model_json,
    peer_json,
    request_json,
    stats_json,
    work_json,
    worker_json,
)
from swarmllm.api.admin.progress import ProgressStreams
from swarmllm.api.admin.shares import shares_json
from swarmllm.api.http.context import current_caller
from swarmllm.api.http.json import encode, encoded
from swarmllm.api.http.request_tasks import start_request_task
from swarmllm.api.output.response import EVENT_STREAM
from swarmllm.errors import Overloaded
from swarmllm.memory_info import memory_bytes
from swarmllm.node import Node, PeerView
from swarmllm.process_use import resident_bytes

INTERVAL_S = 0.5
SIGN_OF_LIFE_S = 10.0
MAX_READERS = 32
MAX_READERS_OF_KEY = 16
NODE_SECTIONS = "swarmllm.node_sections"

events = Blueprint("events", __name__)


@events.get("/api/events")
async def stream() -> Response:
    node_sections = cast(NodeSections, current_app.extensions[NODE_SECTIONS])
    start_request_task(node_sections.seat(current_caller().key_id))
    response = Response(_events(node_sections), content_type=EVENT_STREAM)
    response.timeout = None
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"
    return response


async def _events(node_sections: NodeSections) -> AsyncIterator[bytes]:
    seen: dict[str, bytes] = {}
    last_s = trio.current_time()
    while True:
        sections = await node_sections.sections()
        changed = [
            b"event: %s\ndata: %s\n\n" % (name.encode(), data)
            for name, data in sections.items()
            if seen.get(name) != data
        ]
        seen = dict(sections)
        now_s = trio.current_time()
        if changed or now_s - last_s >= SIGN_OF_LIFE_S:
            last_s = now_s
            yield b"".join(changed) or b": alive\n\n"
        await trio.sleep(INTERVAL_S)


class ReaderSeat:
    """The place of one reader, held from before its answer begins until its request ends."""

    def __init__(self, readers: Counter[str], key_id: str) -> None:
        self._readers = readers
        self._key_id = key_id
        self._scope = trio.CancelScope()
        readers[key_id] += 1

    async def run(self) -> None:
        try:
            with self._scope:
                await trio.sleep_forever()
        finally:
            self._readers[self._key_id] -= 1

    def stop(self) -> None:
        self._scope.cancel()

    def has_failed(self, error: Exception) -> None:
        """Nobody waits for this task."""


class NodeSections:
    """The sections of one node, shared by all who read them."""

    def __init__(self, node: Node, streams: ProgressStreams) -> None:
        self._readers: Counter[str] = Counter()
        self._node = node
        self._streams = streams
        self._sections: Mapping[str, bytes] = {}
        self._made_s = float("-inf")
        self._making = trio.Lock()
        self._n_tokens = 0

    @property
    def n_readers(self) -> int:
        return self._readers.total()

    def seat(self, key_id: str) -> ReaderSeat:
        """Raises Overloaded where all are taken, or one key has half of them."""
        if self.n_readers >= MAX_READERS:
            raise Overloaded(f"{self.n_readers} clients read /api/events already.")
        if key_id and self._readers[key_id] >= MAX_READERS_OF_KEY:
            raise Overloaded(f"{self._readers[key_id]} clients with this key read /api/events already.")
        return ReaderSeat(self._readers, key_id)

    async def sections(self) -> Mapping[str, bytes]:
        """Name -> JSON; what it was a moment ago at the oldest."""
        async with self._making:
            now_s = trio.current_time()
            # Half the interval: readers come round a little early or late.
            if now_s - self._made_s > INTERVAL_S / 2:
                sections = await self._make(now_s)
                self._sections = {name: encode(section) for name, section in sections.items()}
                self._made_s = now_s
            return self._sections

    async def _make(self, now_s: float) -> dict[str, Json]:
        node = self._node
        models = await node.models.list()
        stats = stats_json(node, models)
        # Time goes on without a change.
        del stats["uptime_s"], stats["models"]
        total_bytes, available_bytes = memory_bytes()
        stats |= {
            "started_at": round(node.started_at, 3),
            "tokens_per_s": self._tokens_per_s(now_s),
            "memory_total_bytes": total_bytes,
            "memory_available_bytes": available_bytes,
            "resident_bytes": resident_bytes(os.getpid()),
            "workers": [
                worker_json(worker) | {"resident_bytes": resident_bytes(worker.pid) if worker.pid else 0}
                for worker in node.worker_statistics()
            ],
        }
        return {
            "node": stats,
            "peers": {
                "peers": await encoded(node.peers(), _peer_json),
                "left": [departed_json(each) for each in node.peer_lookup.departed()],
            },
            "models": {"models": await encoded(models, model_json), "left_out": node.models.n_left_out()},
            "requests": {
                "live": [request_json(view) for view in node.requests.live()],
                "recent": [request_json(view) for view in node.requests.recent()],
            },
            "downloads": {"downloads": [download_json(view) for view in node.downloads.list()]},
            "shares": {"shares": shares_json(node)},
            "work": {
                "running": [work_json(work) for work in self._streams.running()],
                "loading": loading_json(node),
            },
        }

    def _tokens_per_s(self, now_s: float) -> float | None:
        """All answers together, since the last look; None where that was too long ago to mean now."""
        n_tokens, since_s = self._node.requests.generated_tokens, now_s - self._made_s
        n_new, self._n_tokens = n_tokens - self._n_tokens, n_tokens
        return round(n_new / since_s, 1) if since_s < 4 * INTERVAL_S else None


def _peer_json(view: PeerView) -> Json:
    peer = peer_json(view)
    # Time goes on without a change.
    del peer["connected_s"]
    return peer
