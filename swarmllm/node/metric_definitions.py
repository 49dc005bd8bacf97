"""Every metric of a node by name, and the table of docs/metrics.md that is drawn from it.

Latencies have OpenTelemetry's names for model servers where there is one, so that dashboards made for other
servers fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
INFO = Definition(
    "swarmllm_info",
    "gauge",
    "Always 1; says which version runs, on which Python, with which llama-cpp-python.",
    ("version", "python", "llama_cpp_python"),
)
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
    "swarmllm_dht_records", "gauge", "What other nodes announced in the DHT, kept here for nodes that ask."
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
REASSIGNMENTS = Definition(
    "swarmllm_pipeline_reassignments_total",
    "counter",
    "Routes left for lighter ones, because more ran on nodes that had accepted than their records said.",
)
RECOVERIES = Definition(
    "swarmllm_streams_recovered_total",
    "counter",
    "Times that a stream went on over another pipeline after its own had broken.",
)
HEDGES = Definition(
    "swarmllm_standbys_total",
    "counter",
    "Pipelines that were started beside one that was far slower than planned.",
)
HEDGES_WON = Definition(
    "swarmllm_standbys_won_total", "counter", "Of these, those that gave the next token first."
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
    "Prompts whose beginning another node keeps, of a whole model or of layers here: its KV came (hit), did "
    "not come (miss), or was not asked for (declined). A miss counts for each node that was asked, with the "
    "reason `late`, `busy`, `absent`, `unreachable`, `refused` (by this node itself) or `wrong`. What is "
    "declined has the reason `no_gain` (computing it takes hardly longer), `first_block_late` (waiting may "
    "cost too much), `own_speed_unknown`, `too_many` (fetches at once) or `avoided` (all failed lately).",
    ("outcome", "reason"),
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
PICTURES_GIVEN = Definition(
    "swarmllm_pictures_given_total", "counter", "Pictures that were encoded here for other nodes."
)
PICTURES_FETCHED = Definition(
    "swarmllm_pictures_fetched_total",
    "counter",
    "Pictures of this node's requests that other nodes encoded.",
)
PICTURES_REFUSED = Definition(
    "swarmllm_picture_answers_refused_total",
    "counter",
    "Answers of other nodes about pictures that could not be used, and answers that did not come.",
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
WORKER_CPU = Definition(
    "swarmllm_worker_cpu_seconds_total", "counter", "Processor time of a model's worker.", ("model_id",)
)
WORKER_RESIDENT = Definition(
    "swarmllm_worker_resident_memory_bytes",
    "gauge",
    "Memory of a model's worker, with the part of the model's file that is mapped.",
    ("model_id",),
)
WORKER_FILES = Definition(
    "swarmllm_worker_open_fds", "gauge", "Open files and connections of a model's worker.", ("model_id",)
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

KNOWN = Definition("swarmllm_nodes_known", "gauge", "Nodes of which a bootstrap node has a record.")
CONNECTIONS = Definition(
    "swarmllm_connections", "gauge", "Connections of a bootstrap node, those that are being greeted too."
)
CONNECTIONS_MAX = Definition("swarmllm_connections_max", "gauge", "How many of them it may have.")
RESERVATIONS = Definition(
    "swarmllm_relay_reservations", "gauge", "Nodes that are reached through a bootstrap node."
)
CIRCUITS = Definition(
    "swarmllm_relay_circuits", "gauge", "Connections between others that a bootstrap node carries."
)
RELAYED = Definition(
    "swarmllm_relay_bytes_total", "counter", "Bytes that it carried over such connections that have ended."
)
OF_BOOTSTRAP_NODES = (KNOWN, CONNECTIONS, CONNECTIONS_MAX, RESERVATIONS, CIRCUITS, RELAYED)
"""What `swarmllm bootstrap` has and `swarmllm daemon` has not."""

DEFINITIONS = tuple(value for value in list(vars().values()) if isinstance(value, Definition))


def reference() -> str:
    """docs/metrics.md, drawn from the definitions above."""
    lines = [
        "# Metrics",
        "",
        "Generated from `swarmllm/node/metric_definitions.py` by its `reference()`; a test compares.",
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
