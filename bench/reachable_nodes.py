"""What it costs to know who is reachable, for each request: `python -m bench.reachable_nodes`.

One node that knows the records of many others: it is connected with 16, was connected with 48 more, and two
of twenty models were asked for lately. Between two requests a heartbeat comes, as in life, and a dial fails.
The rival is what was done before: a look at every node for each request. Processor time, each in turn.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from bench.common.figures import Figure, ratios, table
from swarmllm.swarm.change_feed import ChangeFeed
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.dialler import Dialler
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.reachable import ReachableNodes
from swarmllm.swarm.peers.reachable_index import UNTRIED_MAX
from swarmllm.swarm.records.envelope_book import EnvelopeBook
from swarmllm.swarm.records.registry import Registry
from swarmllm_proto.codec import encode_record
from swarmllm_proto.envelope import Envelope, seal
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import NodeRecord, ShardAnnounce

ME = node_id_named("me")
MODELS = [f"{number:064x}" for number in range(20)]
ASKED = MODELS[:2]
N_CONNECTED, N_TRIED = 16, 64


class Node:
    def __init__(self, n_nodes: int) -> None:
        self.now = 1000.0
        self.connected: Parts[float] = Parts.alone()
        self.book = EnvelopeBook(ME, lambda *_: True)
        self.dialler = Dialler(ME, random.Random(0))
        self.nodes = ReachableNodes(self.book, self.dialler, self.connected, ChangeFeed())
        self.registry = Registry(ME)
        self.nodes.needed = lambda: [self.registry.announcers_of(model_id) for model_id in ASKED]
        self.ids = [node_id_named(f"node {number}") for number in range(n_nodes)]
        for number, node_id in enumerate(self.ids):
            held = ShardAnnounce(model_id=MODELS[number % 20], name="m", n_layers=4, ranges=((0, 4),))
            record = encode_record(NodeRecord(node_id=node_id, models=(held,)))
            envelope = Envelope(node_id=node_id, started_at_ms=1, sequence=1, record=record)
            self.book.take(seal(envelope, lambda content: bytes(64)), self.now)
            self.dialler.suggest(node_id, [Address("192.0.2.1", 8810)], self.now)
            self.registry.apply(node_id, record)
            if number < N_CONNECTED:
                self.connected.put_last(node_id, self.now)
            if number < N_TRIED:
                self.dialler.answered(node_id)

    def something_happens(self, number: int) -> None:
        self.now += 0.5
        self.book.hear(self.ids[number % len(self.ids)], (1, 1), self.now)
        self.dialler.dialled(self.ids[-1 - number % len(self.ids)], self.now, succeeded=False)

    def indexed(self) -> frozenset[NodeId]:
        return self.nodes.at(self.now) | self.nodes.untried(self.now)

    def looked_at(self) -> frozenset[NodeId]:
        """Twice, as for each request: who is reachable, and who of them is untried."""
        return self._look() | self._look()

    def _look(self) -> frozenset[NodeId]:
        tried: list[NodeId] = []
        untried: list[NodeId] = []
        for node_id in self.ids:
            heard_at_s = self.book.heard_at_s(node_id)
            if node_id in self.connected or heard_at_s is None:
                continue
            if self.now > self.dialler.may_answer_from_s(node_id, heard_at_s):
                (tried if self.dialler.is_tried(node_id) else untried).append(node_id)
        if len(untried) > UNTRIED_MAX:
            untried.sort(key=self._is_needed, reverse=True)
        return frozenset((*self.connected, *tried, *untried[:UNTRIED_MAX]))

    def _is_needed(self, node_id: NodeId) -> bool:
        record = self.registry.node(node_id)
        return record is not None and any(each.model_id in ASKED for each in record.models)


def timed_ms(work: Callable[[], frozenset[NodeId]], figure: Figure) -> frozenset[NodeId]:
    began_s = time.process_time()
    found = work()
    figure.values.append((time.process_time() - began_s) * 1000)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="*", default=[250, 1000, 4096])
    parser.add_argument("--requests", type=int, default=60)
    arguments = parser.parse_args()
    rows: list[tuple[Figure, Figure | None]] = []
    for n_nodes in arguments.nodes:
        node = Node(n_nodes)
        node.indexed()
        index, looks = (
            Figure(f"{n_nodes} nodes, index", "ms"),
            Figure(f"{n_nodes} nodes, a look at each", "ms"),
        )
        for number in range(arguments.requests):
            node.something_happens(number)
            found = timed_ms(node.indexed, index), timed_ms(node.looked_at, looks)
            assert len(found[0]) == len(found[1]), "they disagree"
        rows += [(index, ratios(index, looks)), (looks, None)]
    print(table(rows))


if __name__ == "__main__":
    main()
