"""Counts for Prometheus.

Two kinds of numbers. Requests are observed as they end, into counters and histograms kept here. Everything
else (peers, pipelines, workers) has its own owner and is read at each scrape, so that no number is stored
twice.

Labels come from this node's catalogue and from fixed words, never from what a client wrote:
a label that a client may choose is a leak of memory.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Literal, Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from swarmllm import __version__
from swarmllm.node import metric_definitions as metric
from swarmllm.node.metric_definitions import Definition
from swarmllm.pipeline.statistics import DECLINE_REASONS, MISS_REASONS
from swarmllm.process_use import process_use
from swarmllm.scheduling.tiers import TIERS

if TYPE_CHECKING:
    from swarmllm.loop_watchdog import LoopWatchdog
    from swarmllm.node.admission import Admission
    from swarmllm.node.views import ModelView, PeerView, Readiness
    from swarmllm.pipeline.origin.generation import Generation
    from swarmllm.pipeline.stage.served import Served
    from swarmllm.pipeline.statistics import PipelineStatistics
    from swarmllm.supervision import Supervision
    from swarmllm.swarm.router import DhtStatistics
    from swarmllm.workerpool import WorkerStatistics
    from swarmllm_proto.identifiers import ModelId

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Outcome = Literal["completed", "failed", "cancelled"]

# One `_created` series beside each counter would double the page for a fact that `time()` gives.
disable_created_metrics()  # type: ignore[no-untyped-call]


class ObservedProcess(Protocol):
    """The values that every kind of node gives at a scrape."""

    @property
    def started_at(self) -> float: ...
    @property
    def watchdog(self) -> LoopWatchdog: ...
    @property
    def supervision(self) -> Supervision: ...


class Observed(ObservedProcess, Protocol):
    """The part of a node that a scrape reads."""

    admission: Admission

    def readiness(self) -> Readiness: ...
    def peers(self) -> tuple[PeerView, ...]: ...
    def pipeline_statistics(self) -> PipelineStatistics: ...
    def served(self) -> tuple[Served, ...]: ...
    def served_tokens(self) -> Mapping[ModelId, int]: ...
    def worker_statistics(self) -> tuple[WorkerStatistics, ...]: ...
    def dht_statistics(self) -> DhtStatistics | None: ...


class Metrics:
    """One node's numbers; `text` is what a scrape gets."""

    def __init__(self, node: Observed) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter(metric.REQUESTS)
        self._prompt_tokens = self._counter(metric.PROMPT_TOKENS)
        self._cached_tokens = self._counter(metric.CACHED_TOKENS)
        self._generated_tokens = self._counter(metric.GENERATED_TOKENS)
        self._guessed_tokens = self._counter(metric.GUESSED_TOKENS)
        self._latency = self._histogram(metric.LATENCY)
        self._first_token = self._histogram(metric.FIRST_TOKEN)
        self._per_token = self._histogram(metric.PER_TOKEN)
        self._queue = self._histogram(metric.QUEUE)
        self._state = _NodeState(node)
        self._registry.register(self._state)
        ProcessCollector(registry=self._registry)

    def text(self, models: Sequence[ModelView]) -> bytes:
        """`models`: those of this node's catalogue."""
        self._state.models = models
        return generate_latest(self._registry)

    def first_token(self, model: str, generation: Generation, elapsed_s: float) -> None:
        """The first token is there, `elapsed_s` after the request came."""
        self._first_token.labels(model).observe(elapsed_s)
        self._queue.labels(model).observe(generation.timings.queue_s)
        self._prompt_tokens.labels(model).inc(generation.n_prompt_tokens)

    def ended(self, model: str, outcome: Outcome, generation: Generation | None, elapsed_s: float) -> None:
        self._requests.labels(model, outcome).inc()
        if generation is None:
            return
        self._generated_tokens.labels(model).inc(generation.n_generated)
        self._cached_tokens.labels(model).inc(generation.n_cached_tokens)
        for way in generation.guesses.ways:
            self._guessed_tokens.labels(model, way.by, "right").inc(way.n_right)
            self._guessed_tokens.labels(model, way.by, "wrong").inc(way.n_checked - way.n_right)
        if outcome == "completed":
            self._latency.labels(model).observe(elapsed_s)
            n_decoded = generation.n_generated - 1
            if n_decoded > 0:
                self._per_token.labels(model).observe(generation.timings.decode_s / n_decoded)

    def _counter(self, definition: Definition) -> Counter:
        return Counter(definition.name, definition.meaning, definition.labels, registry=self._registry)

    def _histogram(self, definition: Definition) -> Histogram:
        return Histogram(
            definition.name,
            definition.meaning,
            definition.labels,
            buckets=definition.buckets,
            registry=self._registry,
        )


class _NodeState(Collector):
    def __init__(self, node: Observed) -> None:
        self._node = node
        self.models: Sequence[ModelView] = ()

    def describe(self) -> Iterable[Metric]:
        """Nothing: else registering would ask the node, which is still being made."""
        return ()

    def collect(self) -> Iterator[Metric]:
        node = self._node
        pipelines, admission = node.pipeline_statistics(), node.admission
        for definition, value in (
            (metric.READY, node.readiness().status == "ready"),
            (metric.PEERS, len(node.peers())),
            (metric.ACTIVE, admission.n_active),
            (metric.QUEUED, admission.n_queued),
            (metric.TURNS, admission.max_running),
            (metric.SEGMENTS, pipelines.segments_served),
            (metric.FOREIGN, pipelines.active_stage_requests),
            (metric.RETRIES, pipelines.retries),
            (metric.REASSIGNMENTS, pipelines.reassignments),
            (metric.RECOVERIES, pipelines.recoveries),
            (metric.REBUILT, pipelines.rebuilt),
            (metric.HEDGES, pipelines.hedges),
            (metric.HEDGES_WON, pipelines.hedges_won),
            (metric.BY_LINK, pipelines.jobs_by_link),
            (metric.REPEATS, pipelines.repeats),
            (metric.BAD, pipelines.messages_bad),
            (metric.PREFIX_TOKENS, pipelines.prefix_tokens),
            (metric.PREFIX_FETCHED, pipelines.prefix_fetched_bytes),
            (metric.PREFIX_GIVEN, pipelines.prefix_given_bytes),
            (metric.PICTURES_GIVEN, pipelines.pictures_given),
            (metric.PICTURES_FETCHED, pipelines.pictures_fetched),
            (metric.PICTURES_REFUSED, pipelines.pictures_refused),
        ):
            yield family(definition, [((), value)])
        n_right = pipelines.checked - pipelines.checks_wrong - pipelines.checks_disputed
        outcomes = {
            "right": n_right,
            "wrong": pipelines.checks_wrong,
            "disputed": pipelines.checks_disputed,
            "dropped": pipelines.checks_dropped,
        }
        yield family(metric.CHECKS, [((outcome,), value) for outcome, value in outcomes.items()])
        fetches: list[tuple[tuple[str, ...], int]] = [(("hit", ""), pipelines.prefix_hits)]
        fetches += [(("miss", why), pipelines.prefix_missed[why]) for why in MISS_REASONS]
        fetches += [(("declined", why), pipelines.prefix_not_asked[why]) for why in DECLINE_REASONS]
        yield family(metric.PREFIX_FETCHES, fetches)
        checks = {"right": pipelines.prefix_checked, "wrong": pipelines.prefix_wrong}
        yield family(metric.PREFIX_CHECKS, [((outcome,), value) for outcome, value in checks.items()])
        yield from process_families(node)
        yield from dht_families(node.dht_statistics())
        yield family(metric.TIER_ACTIVE, [((tier,), admission.n_active_of(tier)) for tier in TIERS])
        yield family(metric.TIER_QUEUED, [((tier,), admission.n_queued_of(tier)) for tier in TIERS])
        yield family(metric.TIER_TURNS, [((tier,), n) for tier, n in admission.caps.items()])
        yield family(metric.REFUSED, [(labels, n) for labels, n in sorted(admission.refused.items())])
        peers = [peer.info for peer in node.peers()]
        yield family(metric.SENT, [((peer.node_id,), peer.bytes_sent) for peer in peers])
        yield family(metric.RECEIVED, [((peer.node_id,), peer.bytes_received) for peer in peers])
        yield family(metric.RTT, [((p.node_id,), p.rtt_s) for p in peers if p.rtt_s is not None])
        yield family(
            metric.BANDWIDTH, [((p.node_id,), p.bytes_per_s) for p in peers if p.bytes_per_s is not None]
        )
        yield family(metric.DAMAGED, [((view.info.node_id,), view.n_damaged) for view in node.peers()])
        yield family(metric.COMPLETE, [((view.name,), view.complete) for view in self.models])
        yield family(
            metric.MISSING,
            [((view.name,), sum(len(layers) for layers in view.missing)) for view in self.models],
        )
        names = {view.model_id: view.name for view in self.models}
        totals = node.served_tokens().items()
        yield family(metric.SERVED_TOKENS, [((names[each],), n) for each, n in totals if each in names])
        served = [
            ((names[each.model_id], each.origin), each) for each in node.served() if each.model_id in names
        ]
        yield family(metric.SERVED_RATE, [(labels, each.tokens_per_s) for labels, each in served])
        yield family(metric.SERVED_ACTIVE, [(labels, each.n_active) for labels, each in served])
        workers = node.worker_statistics()
        yield family(metric.WEIGHTS, [((worker.model_id,), worker.weights_bytes) for worker in workers])
        yield family(metric.PENDING, [((worker.model_id,), worker.n_pending) for worker in workers])
        yield family(metric.STARTS, [((worker.model_id,), worker.n_starts) for worker in workers])
        uses = [(worker.model_id, process_use(worker.pid)) for worker in workers if worker.pid is not None]
        used = [((model_id,), use) for model_id, use in uses if use is not None]
        yield family(metric.WORKER_CPU, [(labels, use.cpu_s) for labels, use in used])
        yield family(metric.WORKER_RESIDENT, [(labels, use.resident_bytes) for labels, use in used])
        yield family(metric.WORKER_FILES, [(labels, use.n_files) for labels, use in used])


@cache
def build_labels() -> tuple[str, str, str]:
    """(ours, Python's, llama-cpp-python's) version; the last one "" where it is not installed."""
    try:
        runtime = version("llama-cpp-python")
    except PackageNotFoundError:
        runtime = ""
    return __version__, platform.python_version(), runtime


def process_families(node: ObservedProcess) -> Iterator[Metric]:
    """The process metrics of every kind of node."""
    yield family(metric.INFO, [(build_labels(), 1)])
    yield family(metric.STARTED, [((), node.started_at)])
    yield family(metric.LONGEST_STEP, [((), node.watchdog.longest_s)])
    yield family(metric.SLOW_STEPS, [((), node.watchdog.n_slow)])
    tasks = node.supervision.statuses()
    yield family(metric.TASK_FAILURES, [((t.name,), t.n_failures) for t in tasks if t.n_failures])
    yield family(metric.TASKS_DOWN, [((), sum(task.is_down for task in tasks))])
    failures = node.supervision.scope_failures()
    yield family(metric.SCOPE_FAILURES, [((scope,), n) for scope, n in failures.items()])


def dht_families(dht: DhtStatistics | None) -> Iterator[Metric]:
    if dht is not None:
        yield family(metric.DHT_NODES, [((), dht.n_nodes)])
        yield family(metric.DHT_RECORDS, [((), dht.n_records)])


def family(definition: Definition, samples: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    kind = CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily
    made = kind(definition.name, definition.meaning, labels=definition.labels)
    for labels, value in samples:
        made.add_metric(labels, value)
    return made
