"""What the nodes of `large_swarm` say of themselves, and the one book in which all have heard it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import trio
from msgspec import UNSET

from bench.common.large_swarm_nodes import ADDRESS, OBSERVER, Node, Origin
from bench.common.simulated_swarm import HEARTBEAT_BYTES, Figures
from swarmllm.node.announcing.capability import load_has_changed
from swarmllm.swarm.records.envelope_book import EnvelopeBook
from swarmllm.swarm.records.spread import heartbeat_interval_s
from swarmllm_proto.codec import decode_record, encode_record
from swarmllm_proto.envelope import Details, Envelope, seal
from swarmllm_proto.identifiers import Multiaddr, NodeId
from swarmllm_proto.node_load import decode_load, encode_load, load_of, with_load
from swarmllm_proto.record_parts import split_record
from swarmllm_proto.swarm import NodeCapability, NodeRecord


class HeardRecords:
    """As `RecordSpread` of each of them and of all that hear it."""

    def __init__(self, nodes: Mapping[NodeId, Node], rng: random.Random, *, is_brief: bool) -> None:
        """`nodes`: that are alive, whenever it is looked at. `is_brief`: envelopes have brief records."""
        self._nodes = nodes
        self._rng = rng
        self._is_brief = is_brief
        self.origins: Sequence[Origin] = ()
        """That hear of whom there is, and are told loads on data connections."""
        self.figures = Figures()
        self.book = EnvelopeBook(OBSERVER, lambda *_: True)
        self.n_fetched = 0
        """Envelopes that were asked for again, because the book had forgotten them."""
        self.decoded: dict[NodeId, tuple[bytes, bytes, NodeRecord]] = {}
        self.dirty: dict[NodeId, None] = {}
        """Nodes of which there is news."""

    def speak(self) -> None:
        """Those of whom there is news tell it."""
        dirty, self.dirty = self.dirty, {}
        for node_id in dirty:
            if (node := self._nodes.get(node_id)) is not None:
                self.publish(node)

    def publish(self, node: Node) -> None:
        capability, told = node.capability(), (node.held, node.loading)
        means = node.changes.of_all(capability, trio.current_time())
        node.sustained.note(load_of(capability), trio.current_time())
        self._tell_load(node, encode_load(load_of(capability)))
        if means == "load" and told == node.told:
            self._publish_load(node, capability)
        elif means == "settled" and told == node.told and self._is_brief:
            node.changes.load_settled()
        elif means in ("speeds", "links") and told == node.told and node.details is not None:
            self._write_details(node, split_record(encode_record(node.record()))[1])
            node.changes.details_published(capability)
            if means == "speeds":
                self._say_load(node)
            if load_has_changed(node.changes.told, capability):
                self._publish_load(node, capability)
        elif means != "nothing" or told != node.told or not node.sequence:
            node.told = told
            node.changes.record_published(capability)
            node.sequence += 1
            content = encode_record(node.record())
            if self._is_brief:
                node.recorded = node.sustained.at(trio.current_time())
                content, details = split_record(content, node.recorded)
                node.sustained.told(node.recorded)
                self._write_details(node, details)
            self.figures.n_record_bytes += len(content)
            self.figures.n_records += 1
            n_bytes = self._take(node, content)
            node.said_at_s = trio.current_time()
            self.figures.n_sealed_bytes += n_bytes
            self.figures.n_envelope_bytes += n_bytes

    def _write_details(self, node: Node, details: bytes) -> None:
        number = 1 if node.details is None else node.details.number + 1
        node.details = Details(node_id=node.node_id, started_at_ms=1, number=number, details=details)
        node.sealed_details = seal(node.details, lambda _: bytes(64))
        self.book.hear_details(node.node_id, 1, number)

    def _take(self, node: Node, content: bytes) -> int:
        """Bytes of the envelope."""
        envelope = Envelope(
            node_id=node.node_id,
            started_at_ms=1,
            sequence=node.sequence,
            addresses=(Multiaddr(ADDRESS),) * 2,
            data_addresses=(Multiaddr(ADDRESS),) * 2,
            record=content,
            details=UNSET if node.details is None else node.details.number,
        )
        sealed = seal(envelope, lambda _: bytes(64))
        self.book.take(sealed, trio.current_time())
        for origin in self.origins:
            origin.heard([node.node_id], trio.current_time())
            origin.details.envelope_came(node.node_id)
        self.decoded[node.node_id] = (content, b"", decode_record(content))
        return len(sealed)

    def _publish_load(self, node: Node, capability: NodeCapability) -> None:
        node.changes.load_published(capability, trio.current_time())
        if not self._is_brief:
            self._say_load(node)

    def _tell_load(self, node: Node, load: bytes) -> None:
        """On data connections, to those that use the node."""
        if load != node.direct_load:
            node.direct_load = load
            for origin in self.origins:
                origin.n_loads += node.node_id in origin.worked_with and self._is_brief

    def tell_sustained_loads(self) -> None:
        """As `LoadPublisher` does."""
        now = trio.current_time()
        for node in self._nodes.values():
            if self._is_brief and node.sustained.is_due(now, len(self._nodes)):
                self._say_load(node)

    def _say_load(self, node: Node) -> None:
        """In a heartbeat."""
        load = load_of(node.capability())
        if self._is_brief:
            load = node.sustained.at(trio.current_time())
            node.sustained.told(load)
        content = encode_load(load)
        node.said_at_s = trio.current_time()
        self.figures.n_load_bytes += HEARTBEAT_BYTES + len(content)
        self.figures.n_record_bytes += HEARTBEAT_BYTES + len(content)
        self.figures.n_sealed_bytes += HEARTBEAT_BYTES + len(content)
        self.figures.n_loads += 1
        if self.book.hear(node.node_id, (1, node.sequence), trio.current_time()):
            # Forgotten: who hears of it asks for the envelope again.
            self.n_fetched += 1
            self._take(node, self.decoded[node.node_id][0])
        record, _, _ = self.decoded[node.node_id]
        self.decoded[node.node_id] = (record, content, with_load(decode_record(record), decode_load(content)))

    def beat(self) -> None:
        """A heartbeat of somebody, unless a record of it came instead."""
        node = self._nodes[self._rng.choice(list(self._nodes))]
        if trio.current_time() < node.said_at_s + heartbeat_interval_s(len(self._nodes), 8):
            return
        self.figures.n_sealed_bytes += HEARTBEAT_BYTES
        if self.book.hear(node.node_id, (1, node.sequence), trio.current_time()):
            self.n_fetched += 1
            self._take(node, self.decoded[node.node_id][0])
