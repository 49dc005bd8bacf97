"""A bootstrap node: other nodes find each other through it. It has no models, takes no requests, and knows
everybody.

It holds what every node's router holds (connections, records, the DHT, circuits that it relays), announces
itself with an empty record, and refuses all other requests of nodes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NoReturn

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from swarmllm.loop_watchdog import LoopWatchdog
from swarmllm.node import metric_definitions as metric
from swarmllm.node.announcing.announcer import SOFTWARE
from swarmllm.node.metrics import dht_families, family, process_families
from swarmllm.node.views import Readiness
from swarmllm.supervision import current as current_supervision
from swarmllm.swarm.libp2p_router import Libp2pRouter
from swarmllm.swarm.router import RequestRefused
from swarmllm_proto.codec import encode_record
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import NodeRecord


class BootstrapNode:
    def __init__(
        self, nickname: str, router: Libp2pRouter, watchdog: LoopWatchdog, connections_max: int
    ) -> None:
        self.nickname = nickname
        self.watchdog = watchdog
        self.supervision = current_supervision()
        self.started_at = time.time()
        self.connections_max = connections_max
        self.router = router
        self._is_stopping = False
        self._metrics = CollectorRegistry()
        self._metrics.register(_State(self))
        ProcessCollector(registry=self._metrics)
        router.serve(_refuse, _ignore)

    def __repr__(self) -> str:
        return f"<BootstrapNode {self.router.node_id}>"

    async def announce(self) -> None:
        """Once: what it says of itself never changes."""
        record = NodeRecord(
            node_id=self.router.node_id,
            nickname=self.nickname,
            software=SOFTWARE,
            started_at=self.started_at,
            sequence=1,
        )
        await self.router.publish(encode_record(record))

    def readiness(self) -> Readiness:
        if self._is_stopping:
            return Readiness("stopping", "the node stops")
        if self.supervision.status("libp2p").is_down:
            return Readiness("failed", "libp2p is being started again")
        return Readiness("ready")

    def metrics(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._metrics)

    def nickname_in_log(self, node_id: str) -> str:
        return self.nickname if node_id == self.router.node_id else ""

    def model_name_in_log(self, model_id: str) -> str:
        """Bootstrap nodes have none."""
        return ""

    async def drain(self, limit_s: float) -> None:
        """There is nothing to wait for: circuits go on over other relays."""
        self._is_stopping = True


class _State(Collector):
    def __init__(self, node: BootstrapNode) -> None:
        self._node = node

    def describe(self) -> Iterable[Metric]:
        """Nothing: else registering would ask the node, which is still being made."""
        return ()

    def collect(self) -> Iterator[Metric]:
        node, router = self._node, self._node.router
        yield from process_families(node)
        yield from dht_families(router.wide_area.statistics())
        values = [
            (metric.READY, float(node.readiness().status == "ready")),
            (metric.PEERS, len(router.connected())),
            (metric.KNOWN, sum(node_id != router.node_id for node_id in router.records())),
            (metric.CONNECTIONS, sum(router.host.n_connections().values())),
            (metric.CONNECTIONS_MAX, node.connections_max),
        ]
        if (relay := router.wide_area.relay_service) is not None:
            values += [
                (metric.RESERVATIONS, relay.book.n_reservations),
                (metric.CIRCUITS, relay.book.n_circuits),
                (metric.RELAYED, relay.n_bytes),
            ]
        for definition, value in values:
            yield family(definition, [((), value)])


async def _refuse(sender: NodeId, body: bytes) -> NoReturn:
    raise RequestRefused("a bootstrap node has no models")


async def _ignore(sender: NodeId, header: bytes, payload: memoryview) -> None:
    """No request runs here, so that no message can belong to one."""
