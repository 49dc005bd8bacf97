"""What a lying member says below the daemons: envelopes, heartbeats, where others are, the DHT, relays,
openings.

`RouterLie` holds messages as MessagePack would have them; `tell` sends them through the project's own
router, whose `lies_at` makes it answer what other routers ask with the lie as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import trio
from hypothesis import strategies as st
from libp2p.kad_dht.pb import kademlia_pb2

from bench.lying.message_types import ASKED_DETAILS, DETAILS, DIGESTS, ENVELOPE, HEARTBEAT
from bench.lying.untruths import (
    BAD_IDS,
    HONEST,
    INNER,
    OWN,
    Draw,
    World,
    addresses,
    encoded,
    filled,
    wire_values,
)
from swarmllm.errors import SwarmLLMError
from swarmllm.swarm.discovery.dht.dht import PROTOCOL as DHT_PROTOCOL
from swarmllm.swarm.libp2p.gossip import HEALTH, MODELS
from swarmllm.swarm.libp2p.stream_framing import framed
from swarmllm.swarm.libp2p_router import Libp2pRouter
from swarmllm.swarm.records.exchange import (
    KIND_APPLICATION,
    KIND_DETAILS,
    KIND_DIAL_BACK,
    KIND_DIGESTS,
    KIND_ENVELOPES,
    KIND_PEERS,
)
from swarmllm_proto.frames import FrameKind, Hello, encode_frame
from swarmllm_proto.router_messages import (
    DialBackRequest,
    DialBackResponse,
    PeerExchangeRequest,
    PeerExchangeResponse,
)

TIMEOUT_S: Final = 5.0
RELAY_PROTOCOLS: Final = (
    "/libp2p/circuit/relay/0.2.0/hop",
    "/libp2p/circuit/relay/0.2.0/stop",
    "/libp2p/dcutr",
)
DOMAINS: Final = {MODELS: b"swarmllm envelope 1:", HEALTH: b"swarmllm heartbeat 1:"}
Wire = Any


@dataclass(frozen=True)
class RouterLie:
    statements: tuple[tuple[str, Wire], ...]
    """(topic, envelope or heartbeat), signed by the liar."""
    answers: Mapping[int, Wire]
    """By kind of request; None: nothing for a while."""
    asks: tuple[tuple[int, Wire], ...]
    """(kind, body)"""
    openings: tuple[tuple[Wire, tuple[tuple[int, bytes], ...]], ...]
    """Connections of the data plane: hello, then frames of these kinds."""
    links: tuple[str, ...]
    """What links are asked for."""
    dht: tuple[bytes, ...]
    relay: tuple[tuple[str, bytes], ...]


def router_lies(world: World) -> st.SearchStrategy[RouterLie]:
    mine = wire_values(ENVELOPE, world).map(
        lambda told: told | {"node_id": OWN} if isinstance(told, dict) else told
    )
    beats = wire_values(HEARTBEAT, world).map(
        lambda told: told | {"node_id": OWN} if isinstance(told, dict) else told
    )
    statement = st.one_of(
        st.tuples(st.just(MODELS), st.one_of(mine, mine, mine, wire_values(ENVELOPE, world))),
        st.tuples(st.just(HEALTH), st.one_of(beats, beats, wire_values(HEARTBEAT, world))),
    )
    details = st.one_of(st.binary(max_size=200), wire_values(DETAILS, world).map(_unsigned))
    answers = st.fixed_dictionaries(
        {},
        optional={
            KIND_PEERS: st.one_of(st.none(), wire_values(PeerExchangeResponse, world)),
            KIND_DIAL_BACK: st.one_of(st.none(), wire_values(DialBackResponse, world)),
            KIND_DIGESTS: st.one_of(st.none(), wire_values(DIGESTS, world)),
            KIND_ENVELOPES: st.one_of(st.none(), st.lists(st.binary(max_size=200), max_size=3)),
            KIND_DETAILS: st.one_of(st.none(), st.lists(details, max_size=3)),
        },
    )
    ids = st.sampled_from((*HONEST, *world.other_ids, OWN, *BAD_IDS))
    asks = st.one_of(
        st.tuples(st.just(KIND_PEERS), wire_values(PeerExchangeRequest, world)),
        st.tuples(st.just(KIND_DIAL_BACK), wire_values(DialBackRequest, world)),
        st.tuples(st.just(KIND_DIGESTS), st.sampled_from((b"", [], {}, None))),
        st.tuples(st.just(KIND_ENVELOPES), st.one_of(st.lists(ids, max_size=4), st.just(["x" * 129]))),
        st.tuples(st.just(KIND_DETAILS), st.lists(wire_values(ASKED_DETAILS, world), max_size=4)),
        st.tuples(st.sampled_from((KIND_APPLICATION, 5, 255)), st.sampled_from((b"", {}, [1]))),
    )
    frame = st.tuples(
        st.sampled_from((*[int(kind) for kind in FrameKind], 9, 255)),
        st.sampled_from((b"", b"\0" * 8, b"\xff" * 8, b"\1", b"\xc1" * 100)),
    )
    opening = st.tuples(wire_values(Hello, world), st.lists(frame, max_size=4).map(tuple))
    return st.builds(
        RouterLie,
        statements=st.lists(statement, max_size=2).map(tuple),
        answers=answers,
        asks=st.lists(asks, max_size=2).map(tuple),
        openings=st.lists(opening, max_size=1).map(tuple),
        links=st.lists(st.sampled_from((world.model_id, "f" * 64, "", "x" * 128, "\0")), max_size=1).map(
            tuple
        ),
        dht=st.lists(_dht_messages(world), max_size=2).map(tuple),
        relay=st.lists(
            st.tuples(
                st.sampled_from(RELAY_PROTOCOLS),
                st.sampled_from(
                    (b"", b"\0", b"\xff" * 9, b"\x04\x08\x00\x12\x00", b"\x06\x08\x01\x12\x02\x0a\x00")
                ),
            ),
            max_size=1,
        ).map(tuple),
    )


def _unsigned(told: Wire) -> Wire:
    """As it travels, with a signature that is none."""
    return {INNER: [{INNER: told}, bytes(64)]}


def _dht_messages(world: World) -> st.SearchStrategy[bytes]:
    """libp2p's kad-dht in protobuf: keys of others, peers that are none, addresses of others."""
    key = st.sampled_from((b"", b"\0" * 32, b"\xff" * 34, b"x" * 5000, bytes.fromhex(world.model_id)))
    packed_ids = st.sampled_from((b"", b"\0\x24" + b"\1" * 36, b"\x12\x20" + b"\2" * 32, b"\xff" * 64))
    packed_addresses = st.one_of(
        st.sampled_from((b"", b"\x04\x7f\0\0\1\x06\0\x09", b"\xff" * 40)), addresses(world).map(str.encode)
    )

    @st.composite
    def message(draw: Draw) -> bytes:
        peers = [
            kademlia_pb2.Message.Peer(
                id=draw(packed_ids),
                addrs=draw(st.lists(packed_addresses, max_size=4)),
                connection="CAN_CONNECT",
            )
            for _ in range(draw(st.sampled_from((0, 1, 2, 40))))
        ]
        told = kademlia_pb2.Message(
            type=draw(
                st.sampled_from(
                    ("PUT_VALUE", "GET_VALUE", "ADD_PROVIDER", "GET_PROVIDERS", "FIND_NODE", "PING")
                )
            ),
            key=draw(key),
            closerPeers=peers,
            providerPeers=peers,
        )
        return bytes(told.SerializeToString())

    return message()


def lies_at(router: Libp2pRouter, lie: RouterLie, names: Mapping[str, str]) -> None:
    """From here on it answers other routers with the lie, and everything else as it should."""
    protocol = router._requests
    honest: Callable[[str, int, bytes], Awaitable[bytes]] = router._answer

    async def answer(sender: str, kind: int, body: bytes) -> bytes:
        if kind not in lie.answers:
            return await honest(sender, kind, body)
        told = lie.answers[kind]
        if told is None:
            await trio.sleep(TIMEOUT_S)
            return b""
        return encoded(filled(told, names))

    protocol._answer = answer


async def tell(
    router: Libp2pRouter, lie: RouterLie, names: Mapping[str, str], honest_ids: tuple[str, ...]
) -> None:
    """Everything that it says unasked, to every honest node."""
    gossip = router.spread._gossip
    assert gossip is not None
    for number, (topic, told) in enumerate(lie.statements):
        statement = _newest(router, told, number)
        await gossip.publish(topic, _sealed(router, topic, encoded(filled(statement, names))))
    # What it says as an honest node would is newer again.
    router.spread.own = msgspec.structs.replace(router.spread.own, sequence=router.spread.own.sequence + 1000)
    for node_id in honest_ids:
        for kind, body in lie.asks:
            content = body if isinstance(body, bytes) else encoded(filled(body, names))
            await _quietly(router._requests.request(node_id, kind, content, timeout_s=TIMEOUT_S))
        for purpose in lie.links:
            await _quietly(_open_link(router, node_id, purpose))
        for hello, frames in lie.openings:
            await _quietly(_open(router, node_id, encoded(filled(hello, names)), frames))
        for message in lie.dht:
            await _quietly(_say(router, node_id, DHT_PROTOCOL, framed(message)))
        for protocol, content in lie.relay:
            await _quietly(_say(router, node_id, protocol, content))


def _newest(router: Libp2pRouter, statement: Wire, number: int) -> Wire:
    """What claims to be old is heard by nobody: made newer than all that the liar has said, but where it
    names a sequence at its limit."""
    if not isinstance(statement, dict) or statement.get("sequence") == 2**53:
        return statement
    own = router.spread.own
    return statement | {"started_at_ms": own.started_at_ms, "sequence": own.sequence + 100 + number}


def _sealed(router: Libp2pRouter, topic: str, body: bytes) -> bytes:
    return msgspec.msgpack.encode([body, router._identity.sign(DOMAINS[topic] + body)])


async def _open_link(router: Libp2pRouter, node_id: str, purpose: str) -> None:
    (await router.open_link(node_id, purpose)).close()


async def _open(
    router: Libp2pRouter, node_id: str, hello: bytes, frames: tuple[tuple[int, bytes], ...]
) -> None:
    wire = await router.plane._handshake(node_id)
    if wire is None:
        return
    try:
        await wire.write(encode_frame(bytes((FrameKind.HELLO,)) + hello))
        for kind, body in frames:
            await wire.write(encode_frame(bytes((kind,)) + body[:32], body))
        await trio.sleep(0.05)
    finally:
        wire.abort()


async def _say(router: Libp2pRouter, node_id: str, protocol: str, content: bytes) -> None:
    stream = await router.host.open_stream(node_id, protocol, content)
    await trio.sleep(0.05)
    await stream.reset()


async def _quietly(telling: Awaitable[object]) -> None:
    """Whatever comes of it: the nodes that are lied to are looked at, not the liar."""
    with trio.move_on_after(TIMEOUT_S), contextlib.suppress(SwarmLLMError, Exception):
        await telling
