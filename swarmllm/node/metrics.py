"""What a node counts for Prometheus, and the table that docs/metrics.md is drawn from.

Two kinds of numbers. Requests are observed as they end, into counters and histograms kept here. Everything
else (peers, pipelines, workers) has its own keeper already and is only asked when somebody scrapes, so that
no number exists twice and drifts apart.

Latencies have OpenTelemetry's names for model servers where there is one, so that dashboards made for other
servers fit. Labels come from this node's catalogue and from fixed words, never from what a client wrote:
a label that a client may choose is a leak of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Definition:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds in seconds."""


# From a small model's answer on one machine to a long prompt over slow links.
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
# OpenTelemetry's advice (semantic conventions for generative AI, metrics).
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

REQUESTS = Definition(
    "swarmllm_inference_requests_total",
    "counter",
    "Requests of this node's clients that have ended; `outcome` is completed, failed or cancelled.",
    ("model", "outcome"),
)
LATENCY = Definition(
    "swarmllm_inference_latency_seconds",
    "histogram",
    "From a request's arrival to its last token, waiting for a turn included; completed requests.",
    ("model",),
    _REQUEST_S,
)
FIRST_TOKEN = Definition(
    "gen_ai_server_time_to_first_token_seconds",
    "histogram",
    "From a request's arrival to its first token, waiting for a turn included.",
    ("model",),
    _FIRST_TOKEN_S,
)
PER_TOKEN = Definition(
    "gen_ai_server_time_per_output_token_seconds",
    "histogram",
    "Mean time per token after the first, one observation per completed request of two tokens or more.",
    ("model",),
    _PER_TOKEN_S,
)
QUEUE = Definition(
    "swarmllm_queue_seconds", "histogram", "Waiting for a turn.", ("model",), (0.0, *_REQUEST_S)
)
PROMPT_TOKENS = Definition(
    "swarmllm_prompt_tokens_total", "counter", "Prompt tokens of requests that got a first token.", ("model",)
)
CACHED_TOKENS = Definition(
    "swarmllm_cached_prompt_tokens_total",
    "counter",
    "Prompt tokens that were not computed, because an earlier request began alike.",
    ("model",),
)
GENERATED_TOKENS = Definition(
    "swarmllm_generated_tokens_total", "counter", "Tokens generated for this node's clients.", ("model",)
)
GUESSED_TOKENS = Definition(
    "swarmllm_guessed_tokens_total",
    "counter",
    "Tokens that were guessed ahead and checked (speculation), by who did and whether the model said them.",
    ("model", "by", "guess"),
)
INFO = Definition("swarmllm_info", "gauge", "Always 1; says which version runs.", ("version",))
READY = Definition(
    "swarmllm_ready",
    "gauge",
    "1 when what `model.load` names, and what was loaded by hand before the start, is loaded, else 0.",
)
STARTED = Definition(
    "swarmllm_start_time_seconds", "gauge", "When the node started, in seconds since the epoch."
)
COMPLETE = Definition(
    "swarmllm_model_complete",
    "gauge",
    "1 when this node and those it is connected to hold all layers of a model of its catalogue, else 0.",
    ("model",),
)
MISSING = Definition(
    "swarmllm_model_missing_layers",
    "gauge",
    "Layers of a model of this node's catalogue that neither this node nor a connected one holds.",
    ("model",),
)
PROCESS_CPU = Definition(
    "process_cpu_seconds_total", "counter", "Processor time of the daemon, without its workers."
)
PROCESS_RESIDENT = Definition(
    "process_resident_memory_bytes", "gauge", "Memory of the daemon, without its workers."
)
PROCESS_VIRTUAL = Definition("process_virtual_memory_bytes", "gauge", "Address space of the daemon.")
PROCESS_STARTED = Definition(
    "process_start_time_seconds", "gauge", "When the daemon's process started, in seconds since the epoch."
)
PROCESS_FILES = Definition("process_open_fds", "gauge", "Open files and connections of the daemon.")
PROCESS_FILES_MAX = Definition("process_max_fds", "gauge", "How many of them it may have.")
RTT = Definition("swarmllm_peer_rtt_seconds", "gauge", "Round trip to a connected node, averaged.", ("peer",))
BANDWIDTH = Definition(
    "swarmllm_peer_bytes_per_second",
    "gauge",
    "What large messages of a node arrived at, averaged.",
    ("peer",),
)
DAMAGED = Definition(
    "swarmllm_peer_damaged_jobs_total", "counter", "Jobs that arrived damaged and were repeated.", ("peer",)
)
PEERS = Definition("swarmllm_peers_connected", "gauge", "Nodes this one is connected to.")
DHT_NODES = Definition(
    "swarmllm_dht_nodes", "gauge", "Nodes that answer in the DHT, as far as this one knows them."
)
DHT_RECORDS = Definition(
    "swarmllm_dht_records", "gauge", "What other nodes announced in the DHT, kept here for whoever asks."
)
SENT = Definition("swarmllm_peer_sent_bytes_total", "counter", "Bytes sent to a connected node.", ("peer",))
RECEIVED = Definition(
    "swarmllm_peer_received_bytes_total", "counter", "Bytes received from a connected node.", ("peer",)
)
ACTIVE = Definition("swarmllm_requests_active", "gauge", "Requests of this node's clients that have a turn.")
QUEUED = Definition("swarmllm_requests_queued", "gauge", "Requests that wait for a turn.")
TURNS = Definition("swarmllm_requests_max", "gauge", "Turns there are.")
TIER_ACTIVE = Definition(
    "swarmllm_tier_requests_active",
    "gauge",
    "Requests that have a turn, by their tier.",
    ("tier",),
)
TIER_QUEUED = Definition(
    "swarmllm_tier_requests_queued",
    "gauge",
    "Requests that wait for a turn, by their tier.",
    ("tier",),
)
TIER_TURNS = Definition(
    "swarmllm_tier_requests_max", "gauge", "Turns there are for a tier and those below it.", ("tier",)
)
REFUSED = Definition(
    "swarmllm_requests_refused_total",
    "counter",
    "Requests answered with 429; `reason` is full, timeout or rate (the key's limit).",
    ("tier", "reason"),
)
SEGMENTS = Definition(
    "swarmllm_segments_served_total", "counter", "Jobs run through this node's layers for other nodes."
)
FOREIGN = Definition(
    "swarmllm_stage_requests_active", "gauge", "Requests of other nodes that use layers of this one."
)
SERVED_TOKENS = Definition(
    "swarmllm_served_tokens_total",
    "counter",
    "Tokens of other nodes' answers that this node's layers computed, guesses included.",
    ("model",),
)
SERVED_RATE = Definition(
    "swarmllm_served_tokens_per_second",
    "gauge",
    "The same per second and node that asked, over the last five seconds.",
    ("model", "peer"),
)
SERVED_ACTIVE = Definition(
    "swarmllm_served_requests_active",
    "gauge",
    "Requests of another node that use this node's layers now; gone ten minutes after the last.",
    ("model", "peer"),
)
RETRIES = Definition(
    "swarmllm_pipeline_retries_total", "counter", "Requests started anew over another route."
)
RECOVERIES = Definition(
    "swarmllm_streams_recovered_total",
    "counter",
    "Times that a stream went on over another pipeline after its own had broken.",
)
REBUILT = Definition(
    "swarmllm_streams_rebuilt_total",
    "counter",
    "Of the recovered streams, those of which only the lost stages were computed again.",
)
BY_LINK = Definition(
    "swarmllm_jobs_by_link_total",
    "counter",
    "Decode jobs that workers took from links and ran, as far as told.",
)
REPEATS = Definition("swarmllm_jobs_repeated_total", "counter", "Jobs repeated after they arrived damaged.")
BAD = Definition("swarmllm_messages_bad_total", "counter", "Messages of other nodes that could not be read.")
CHECKS = Definition(
    "swarmllm_checks_total",
    "counter",
    "Results of other nodes that were computed again: right, wrong, disputed between two, or dropped.",
    ("outcome",),
)
PREFIX_FETCHES = Definition(
    "swarmllm_prefix_fetches_total",
    "counter",
    "Prompts whose beginning another node announced: its KV came (hit), did not come (miss), or was not "
    "asked for because computing it was expected to take no longer (declined).",
    ("outcome",),
)
PREFIX_TOKENS = Definition(
    "swarmllm_prefix_fetched_tokens_total", "counter", "Tokens of prompts whose KV came from other nodes."
)
PREFIX_FETCHED = Definition(
    "swarmllm_prefix_fetched_bytes_total", "counter", "KV of prompts that came from other nodes."
)
PREFIX_GIVEN = Definition(
    "swarmllm_prefix_given_bytes_total", "counter", "KV of prompts that other nodes fetched here."
)
PREFIX_CHECKS = Definition(
    "swarmllm_prefix_checks_total",
    "counter",
    "Beginnings of prompts from other nodes of which blocks were computed again: right or wrong.",
    ("outcome",),
)
WEIGHTS = Definition("swarmllm_worker_weights_bytes", "gauge", "Weights that a worker holds.", ("model_id",))
PENDING = Definition(
    "swarmllm_worker_calls_pending", "gauge", "Calls a worker has not answered.", ("model_id",)
)
STARTS = Definition(
    "swarmllm_worker_starts_total",
    "counter",
    "Processes started for a model; more than one means that one died or idled.",
    ("model_id",),
)

LONGEST_STEP = Definition(
    "swarmllm_loop_longest_step_seconds",
    "gauge",
    "The longest step of the event loop in the last one to two minutes; nothing else runs during a step.",
)
SLOW_STEPS = Definition(
    "swarmllm_loop_slow_steps_total",
    "counter",
    "Steps of the event loop that took more than 0.25 s; the log names the task and the line.",
)

TASK_FAILURES = Definition(
    "swarmllm_task_failures_total",
    "counter",
    "Failures of a long-lived task of the daemon (docs/supervision.md); one that never failed is left out.",
    ("task",),
)
TASKS_DOWN = Definition(
    "swarmllm_tasks_down", "gauge", "Long-lived tasks that wait for their restart or were given up."
)
SCOPE_FAILURES = Definition(
    "swarmllm_scope_failures_total",
    "counter",
    "Unexpected exceptions that ended a request, a peer, a connection ... (docs/supervision.md).",
    ("scope",),
)

DEFINITIONS = tuple(value for value in list(vars().values()) if isinstance(value, Definition))


class Observed(Protocol):
    """The part of a node that is asked at every scrape."""

    started_at: float
    admission: Admission
    watchdog: LoopWatchdog
    supervision: Supervision

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
        self._requests = self._counter(REQUESTS)
        self._prompt_tokens = self._counter(PROMPT_TOKENS)
        self._cached_tokens = self._counter(CACHED_TOKENS)
        self._generated_tokens = self._counter(GENERATED_TOKENS)
        self._guessed_tokens = self._counter(GUESSED_TOKENS)
        self._latency = self._histogram(LATENCY)
        self._first_token = self._histogram(FIRST_TOKEN)
        self._per_token = self._histogram(PER_TOKEN)
        self._queue = self._histogram(QUEUE)
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
        yield _family(INFO, [((__version__,), 1)])
        for definition, value in (
            (READY, node.readiness().status == "ready"),
            (STARTED, node.started_at),
            (PEERS, len(node.peers())),
            (ACTIVE, admission.n_active),
            (QUEUED, admission.n_queued),
            (TURNS, admission.max_running),
            (SEGMENTS, pipelines.segments_served),
            (FOREIGN, pipelines.active_stage_requests),
            (RETRIES, pipelines.retries),
            (RECOVERIES, pipelines.recoveries),
            (REBUILT, pipelines.rebuilt),
            (BY_LINK, pipelines.jobs_by_link),
            (REPEATS, pipelines.repeats),
            (BAD, pipelines.messages_bad),
            (PREFIX_TOKENS, pipelines.prefix_tokens),
            (PREFIX_FETCHED, pipelines.prefix_fetched_bytes),
            (PREFIX_GIVEN, pipelines.prefix_given_bytes),
            (LONGEST_STEP, node.watchdog.longest_s),
            (SLOW_STEPS, node.watchdog.n_slow),
        ):
            yield _family(definition, [((), value)])
        n_right = pipelines.checked - pipelines.checks_wrong - pipelines.checks_disputed
        outcomes = {
            "right": n_right,
            "wrong": pipelines.checks_wrong,
            "disputed": pipelines.checks_disputed,
            "dropped": pipelines.checks_dropped,
        }
        yield _family(CHECKS, [((outcome,), value) for outcome, value in outcomes.items()])
        fetches = {
            "hit": pipelines.prefix_hits,
            "miss": pipelines.prefix_misses,
            "declined": pipelines.prefix_declined,
        }
        yield _family(PREFIX_FETCHES, [((outcome,), value) for outcome, value in fetches.items()])
        checks = {"right": pipelines.prefix_checked, "wrong": pipelines.prefix_wrong}
        yield _family(PREFIX_CHECKS, [((outcome,), value) for outcome, value in checks.items()])
        tasks = node.supervision.statuses()
        yield _family(TASK_FAILURES, [((t.name,), t.n_failures) for t in tasks if t.n_failures])
        yield _family(TASKS_DOWN, [((), sum(task.is_down for task in tasks))])
        yield _family(SCOPE_FAILURES, [((s,), n) for s, n in node.supervision.scope_failures().items()])
        if (dht := node.dht_statistics()) is not None:
            yield _family(DHT_NODES, [((), dht.n_nodes)])
            yield _family(DHT_RECORDS, [((), dht.n_records)])
        yield _family(TIER_ACTIVE, [((tier,), admission.n_active_of(tier)) for tier in TIERS])
        yield _family(TIER_QUEUED, [((tier,), admission.n_queued_of(tier)) for tier in TIERS])
        yield _family(TIER_TURNS, [((tier,), n) for tier, n in admission.caps.items()])
        yield _family(REFUSED, [(labels, n) for labels, n in sorted(admission.refused.items())])
        peers = [peer.info for peer in node.peers()]
        yield _family(SENT, [((peer.node_id,), peer.bytes_sent) for peer in peers])
        yield _family(RECEIVED, [((peer.node_id,), peer.bytes_received) for peer in peers])
        yield _family(RTT, [((p.node_id,), p.rtt_s) for p in peers if p.rtt_s is not None])
        yield _family(BANDWIDTH, [((p.node_id,), p.bytes_per_s) for p in peers if p.bytes_per_s is not None])
        yield _family(DAMAGED, [((view.info.node_id,), view.n_damaged) for view in node.peers()])
        yield _family(COMPLETE, [((view.name,), view.complete) for view in self.models])
        yield _family(
            MISSING, [((view.name,), sum(len(layers) for layers in view.missing)) for view in self.models]
        )
        names = {view.model_id: view.name for view in self.models}
        totals = node.served_tokens().items()
        yield _family(SERVED_TOKENS, [((names[each],), n) for each, n in totals if each in names])
        served = [
            ((names[each.model_id], each.origin), each) for each in node.served() if each.model_id in names
        ]
        yield _family(SERVED_RATE, [(labels, each.tokens_per_s) for labels, each in served])
        yield _family(SERVED_ACTIVE, [(labels, each.n_active) for labels, each in served])
        workers = node.worker_statistics()
        yield _family(WEIGHTS, [((worker.model_id,), worker.weights_bytes) for worker in workers])
        yield _family(PENDING, [((worker.model_id,), worker.n_pending) for worker in workers])
        yield _family(STARTS, [((worker.model_id,), worker.n_starts) for worker in workers])


def _family(definition: Definition, samples: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    kind = CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily
    family = kind(definition.name, definition.meaning, labels=definition.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def reference() -> str:
    """docs/metrics.md, drawn from the definitions above."""
    lines = [
        "# Metrics",
        "",
        "Generated from the definitions in `swarmllm/node/metrics.py` by its `reference()`; a test compares.",
        "",
        "`GET /metrics` answers in Prometheus' text format. A scrape configuration:",
        "",
        "```yaml",
        "scrape_configs:",
        "  - job_name: swarmllm",
        "    static_configs:",
        '      - targets: ["127.0.0.1:8800"]',
        "```",
        "",
        "[Alert rules](prometheus/alerts.yaml), [dashboard](prometheus/dashboard.json) for Grafana.",
        "",
        "Nothing here tells what was asked. A histogram has the series `_bucket`, `_sum` and `_count`.",
        "",
        "| name | kind | labels | meaning |",
        "|---|---|---|---|",
    ]
    for definition in DEFINITIONS:
        labels = ", ".join(f"`{label}`" for label in definition.labels)
        lines.append(f"| `{definition.name}` | {definition.kind} | {labels} | {definition.meaning} |")
    return "\n".join([*lines, ""])
