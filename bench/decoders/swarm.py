"""What other nodes, libp2p's protocols and people's strings put before the swarm's own decoders: the part of
`decoders.py` that needs libp2p."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import trio

from bench.decoders.target import ADDRESS, NODE_ID, Target
from swarmllm.downloads.source import parse_source
from swarmllm.errors import InvalidRequest, RemoteError
from swarmllm.models.layers import LayerRange
from swarmllm.scheduling.constraints import Pin
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.data.wire import Hello, WireClosed, checked_hello
from swarmllm.swarm.discovery.addresses import Address, CircuitAddress, NodeAddress
from swarmllm.swarm.discovery.dht import messages as dht
from swarmllm.swarm.discovery.relay import messages as relay
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.libp2p.stream_framing import framed, read_framed
from swarmllm.swarm.records.details_book import AskedDetails, DetailsBook
from swarmllm.swarm.records.details_exchange import DetailsExchange
from swarmllm.swarm.records.envelope_book import Digest, EnvelopeBook
from swarmllm.swarm.records.exchange import KIND_ENVELOPES, RecordExchange
from swarmllm.swarm.router import RequestRefused
from swarmllm_proto.envelope import Details, Envelope, seal
from swarmllm_proto.errors import BadMessage, FrameTooLarge, FrameTruncated
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.record_parts import RecordDetails
from swarmllm_proto.segment_names import parse_segment_name
from swarmllm_proto.swarm import NodeRecord

WHERE = Address("192.0.2.7", 8810)
HUB = "https://huggingface.co"


def swarm_targets() -> dict[str, Target]:
    contact = dht.Contact(NODE_ID, (WHERE,))
    found = dht.Message(dht.DhtMessageKind.GET_PROVIDERS, b"k" * 34, closer=(contact,), providers=(contact,))
    reserved = relay.Hop("status", status=relay.Status.OK, expires_at=2_000_000_000)
    hops = {
        "connect": relay.encode_hop(relay.Hop("connect", node_id=NODE_ID)),
        "reserved": relay.encode_hop(reserved, duration_s=3600),
    }
    stops = {
        "connect": relay.encode_stop(relay.Stop("connect", node_id=NODE_ID)),
        "status": relay.encode_stop(relay.Stop("status", status=relay.Status.CONNECTION_FAILED)),
    }
    punches = {"connect": relay.encode_punch(relay.Punch("connect", (WHERE,)))}
    return {
        "DHT message": Target(dht.decode, seeds={"found": dht.encode(found)}),
        "relay: hop": Target(relay.decode_hop, seeds=hops),
        "relay: stop": Target(relay.decode_stop, seeds=stops),
        "hole punching": Target(relay.decode_punch, seeds=punches),
        "stream frame": Target(_read_stream, (FrameTooLarge, FrameTruncated), {"framed": framed(b"x" * 300)}),
        "hello": Target(
            checked_hello, (WireClosed,), {"request/hello": msgspec.msgpack.encode(Hello(v=1, link="job"))}
        ),
        "digests told": Target(
            lambda data: trio.run(_exchange(data).synchronise, NODE_ID),
            (RemoteError,),
            {"response/digests": msgspec.msgpack.encode([Digest(NODE_ID, 1, 2, 3.0)])},
        ),
        "envelopes told": Target(
            lambda data: trio.run(_exchange(data).fetch, NODE_ID, {NODE_ID: 1.0}),
            (RemoteError,),
            {"response/envelopes": msgspec.msgpack.encode([b"sealed"])},
        ),
        "envelopes asked": Target(
            lambda data: _exchange(b"").answer(KIND_ENVELOPES, data),
            (RequestRefused,),
            {"request/asked": msgspec.msgpack.encode([NODE_ID])},
        ),
        "details told": Target(
            lambda data: trio.run(_details(data).look),
            seeds={"response/details": msgspec.msgpack.encode([_SEALED_DETAILS])},
        ),
        "details asked": Target(
            lambda data: _details(b"").answer(data),
            (RequestRefused,),
            {"request/details": msgspec.msgpack.encode([AskedDetails(NODE_ID, 1, 2)])},
        ),
        "address": _text(Address.parse, ADDRESS),
        "bootstrap address": _text(lambda text: NodeAddress.parse(text, field="bootstrap"), ADDRESS),
        "relay address": _text(CircuitAddress.parse, f"{ADDRESS}/p2p-circuit"),
        "layer range": _text(LayerRange.parse, "0:12"),
        "pin": _text(Pin.parse, f"guide:0:4@{NODE_ID}"),
        "segment file name": _text(parse_segment_name, "v4-0-12.gguf"),
        "source of a model": _text(lambda text: parse_source(text, HUB), "hf:org/repo:model-Q4_K_M.gguf"),
    }


def _text(parse: Callable[[str], object], example: str) -> Target:
    return Target(lambda data: parse(data.decode("latin-1")), (InvalidRequest,), {"text": example.encode()})


class _Bytes:
    """A stream that has all its bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self, n: int | None = None) -> bytes:
        taken, self._data = self._data[:n], self._data[n:]
        return taken


def _run(coroutine: Any) -> object:
    """What never waits needs no event loop."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("it waits")


class _Reader:
    def take(self, sealed: bytes, ages_s: Mapping[NodeId, float]) -> NodeId:
        return NODE_ID

    def blame(self, sender: NodeId, error: BadMessage) -> None: ...

    def pass_on(self, node_id: NodeId) -> None: ...

    def is_lost(self, node_id: NodeId, heard_at_s: float) -> bool:
        return False


def _exchange(answered: bytes) -> RecordExchange:
    """With a node that answers everything so."""

    async def answer(_node_id: str, _kind: int, _body: bytes) -> bytes:
        return answered

    return RecordExchange(EnvelopeBook(NODE_ID, lambda *_: True), answer, _Reader())


_ASKER: Final = node_id_named("asker")
_DETAILS: Final = msgspec.msgpack.encode(RecordDetails())
_SEALED_DETAILS: Final = seal(
    Details(node_id=NODE_ID, started_at_ms=1, number=1, details=_DETAILS), lambda _: bytes(64)
)


def _details(answered: bytes) -> DetailsExchange:
    """Asks another node, which answers everything so."""

    async def answer(_node_id: NodeId, _kind: int, _body: bytes) -> bytes:
        return answered

    record = msgspec.msgpack.encode(NodeRecord(node_id=NODE_ID))
    said = Envelope(node_id=NODE_ID, started_at_ms=1, sequence=1, record=record, details=1)
    envelopes = EnvelopeBook(_ASKER, lambda *_: True)
    envelopes.take(seal(said, lambda _: bytes(64)), 0.0)
    book = DetailsBook(_ASKER, envelopes, lambda *_: True)
    exchange = DetailsExchange(book, answer, (NODE_ID,), _Reader(), ChangeFeed())
    exchange.interests = lambda: [(NODE_ID,)]
    return exchange


def _read_stream(data: bytes) -> object:
    return _run(read_framed(_Bytes(data), 1 << 16))  # type: ignore[arg-type]
