"""Two connected nodes agree on a moment at which both dial (DCUtR's messages).

The one that begins says where it may be dialled, hears the same of the other, and takes the round trip's
time. It then says "now" and begins half a round trip later, when the other one hears it. Addresses that come
so are the other node's word alone: `believed` takes few of them, and none inside a network that is nobody's
business.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager

import trio

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.discovery.addresses import Address, is_loopback, is_public
from swarmllm.swarm.discovery.relay.messages import (
    MESSAGE_MAX_BYTES,
    Punch,
    decode_punch,
    encode_punch,
)
from swarmllm.swarm.libp2p.host import Host, Stream
from swarmllm.swarm.libp2p.stream_framing import framed, read_framed
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.identifiers import NodeId

TALK_S = 10.0
BELIEVED_MAX = 6
"""Addresses of one node that are dialled at the agreed moment."""
PORT_MIN = 1024
"""Below are services of the system, and a router gives no such port to a connection from a higher one."""


def believed(
    said: Sequence[Address], known: Collection[Address] = (), *, on_loopback: bool = False
) -> tuple[Address, ...]:
    """Those of another node's addresses at which it may be dialled. `known`: what its signed envelope says,
    which is dialled anyway. `on_loopback`: this node listens there only, so it can dial nowhere else."""
    return tuple(
        each
        for each in dict.fromkeys(Address(each.ip, each.port) for each in said)
        if each in known
        or (each.port >= PORT_MIN and is_public(each.ip))
        or (on_loopback and is_loopback(each.ip))
    )[:BELIEVED_MAX]


@asynccontextmanager
async def moment_with(
    host: Host,
    node_id: NodeId,
    protocol: str,
    own: Sequence[Address],
    *,
    later_s: float = 0.0,
    measures_again: bool = False,
) -> AsyncIterator[tuple[Address, ...]]:
    """The body runs at the moment, `later_s` after it; it gets what the other node says of where it may be
    dialled. `measures_again`: the other one's first answer takes it a while. Raises NodeUnreachable. Not to
    be cancelled."""
    stream = await host.open_stream(node_id, protocol)
    try:
        try:
            asked_at_s = trio.current_time()
            await stream.write(framed(encode_punch(Punch("connect", tuple(own)))))
            answer = await _heard(stream, "connect")
            if measures_again:
                asked_at_s = trio.current_time()
                await stream.write(framed(encode_punch(Punch("sync"))))
                await _heard(stream, "sync")
            rtt_s = trio.current_time() - asked_at_s
            await stream.write(framed(encode_punch(Punch("sync"))))
        except Exception as error:  # also libp2p's, of many kinds
            raise NodeUnreachable(f"node {node_id} agrees on no moment: {type(error).__name__}") from None
        await trio.sleep(rtt_s / 2 + later_s)
        yield answer.addresses
    finally:
        with trio.move_on_after(2.0):
            await stream.reset()


async def moment_of(
    stream: Stream, own: Callable[[], Awaitable[Sequence[Address]]], *, measures_again: bool = False
) -> tuple[Address, ...]:
    """The other part: returns at the moment. Raises ProtocolError, TooSlowError."""
    asked = await _heard(stream, "connect")
    await stream.write(framed(encode_punch(Punch("connect", tuple(await own())))))
    if measures_again:
        await _heard(stream, "sync")
        await stream.write(framed(encode_punch(Punch("sync"))))
    await _heard(stream, "sync")
    return asked.addresses


async def _heard(stream: Stream, kind: str) -> Punch:
    with trio.fail_after(TALK_S):
        heard = decode_punch(await read_framed(stream, MESSAGE_MAX_BYTES))
    if heard.kind != kind:
        raise BadMessage("type", f"is not {kind}")
    return heard
