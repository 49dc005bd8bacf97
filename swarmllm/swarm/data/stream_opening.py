"""Opens libp2p streams for the data plane, each as a wire."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Literal

import trio

from swarmllm.errors import NodeUnreachable, SwarmLLMError
from swarmllm.supervision import detach, spawn
from swarmllm.swarm.data.noise_wire import HANDSHAKE_S
from swarmllm.swarm.data.stream_fallback import StreamWire
from swarmllm.swarm.libp2p.host import Host, Stream
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)


class StreamOpening:
    """`nursery` outlives every stream."""

    def __init__(self, host: Host, nursery: trio.Nursery) -> None:
        self._host = host
        self._nursery = nursery

    async def open(self, node_id: NodeId, protocol: str) -> StreamWire:
        """Raises NodeUnreachable."""
        # In a task of its own: half an opening cancelled would break the libp2p connection.
        opening = detach(
            self._nursery, "question", self._host.open_stream, node_id, protocol, dropped=self._reset
        )
        try:
            stream = await opening.within(HANDSHAKE_S, f"node {node_id} opened no stream")
        except BaseException as error:
            opening.abandon()  # A stream that comes now is reset.
            if not isinstance(error, SwarmLLMError):
                raise
            log.debug("no stream to %s: %s", node_id, error.message)
            raise NodeUnreachable(f"node {node_id} cannot be reached on the data plane") from None
        return self.wire(stream)

    def wire(self, stream: Stream) -> StreamWire:
        kind: Literal["relay", "libp2p"] = "relay" if self._host.is_relayed(stream) else "libp2p"
        abort: Callable[[], None] = partial(self._reset, stream)
        return StreamWire(stream, abort, kind, partial(self._host.relay_room, stream))

    def _reset(self, stream: Stream) -> None:
        async def reset() -> None:
            with trio.move_on_after(HANDSHAKE_S):
                await stream.reset()

        spawn(self._nursery, "connection", reset)
