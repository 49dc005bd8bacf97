"""Opening a link: from a fresh connection between two nodes to an end that each can give away.

The dialler's hello says what it wants the link for. Whoever is dialled hands its end to whoever will read
from it and only then says so; until it has, the dialler sends nothing, so no byte can be on its way to the
wrong reader.
"""

from __future__ import annotations

import msgspec
import trio

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.data.noise_wire import NoiseWire
from swarmllm.swarm.data.wire import VERSION, Hello, Kind, WireClosed
from swarmllm.swarm.router import LinkEnd, LinkHandler
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.frames import FrameDecoder, encode_frame
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import SWARM_HEADER_MAX

ACCEPT_S = 15.0
"""How long the other side may take: its worker may be in the middle of a long step."""


async def ask_for_link(node_id: NodeId, wire: NoiseWire, purpose: str) -> LinkEnd:
    """The dialler's part; the wire is closed either way. Raises NodeUnreachable."""
    try:
        with trio.fail_after(ACCEPT_S):
            hello = msgspec.msgpack.encode(Hello(v=VERSION, link=purpose))
            await wire.write(encode_frame(bytes((Kind.HELLO,)) + hello))
            await _accepted(wire)
        return wire.sending_end()
    except (WireClosed, ProtocolError, OSError, trio.TooSlowError) as error:
        raise NodeUnreachable(f"node {node_id} takes no link ({error or 'no answer'})") from None
    finally:
        wire.abort()


async def give_link(node_id: NodeId, wire: NoiseWire, purpose: str, on_link: LinkHandler) -> None:
    """The part of whoever was dialled; the wire is closed either way."""
    try:
        end = wire.receiving_end()
        try:
            if await on_link(node_id, purpose, end):
                with trio.fail_after(ACCEPT_S):
                    await wire.write(encode_frame(bytes((Kind.LINK,))))
        finally:
            end.close()
    except (WireClosed, OSError, trio.TooSlowError):
        return  # The dialler learns of it by the end of the connection.
    finally:
        wire.abort()


async def _accepted(wire: NoiseWire) -> None:
    decoder = FrameDecoder(SWARM_HEADER_MAX, 0)
    while True:
        for frame in decoder.feed(await wire.receive()):
            # Until the hello arrived there, this was a connection like any other: with a hello and a ping.
            if frame.header[:1] == bytes((Kind.LINK,)):
                return
