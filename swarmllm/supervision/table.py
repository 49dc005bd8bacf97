"""Names every long-lived task of the daemon, and every scope that short-lived tasks belong to.

docs/supervision.md is drawn from this table by `reference()`; a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Policy = Literal["essential", "restart", "give up"]


@dataclass(frozen=True, slots=True)
class LongLived:
    """A task that lives as long as the daemon. `meanwhile`: what does not happen while it is down."""

    name: str
    policy: Policy
    does: str
    meanwhile: str


@dataclass(frozen=True, slots=True)
class Scope:
    """What a short-lived task belongs to. `ends`: what an unexpected exception ends, and nothing else.
    `outlives_requests`: its tasks go on after the request that caused them, and their lines of the log are
    not about it."""

    name: str
    ends: str
    outlives_requests: bool = False


TASKS: Final = (
    LongLived(
        "stop on signal",
        "essential",
        "waits for SIGINT and SIGTERM",
        "the node could only be killed",
    ),
    LongLived(
        "systemd watchdog",
        "essential",
        "tells systemd that the event loop runs",
        "systemd would kill the node",
    ),
    LongLived(
        "reload on SIGHUP",
        "restart",
        "reads the configuration again",
        "a changed file counts after a restart",
    ),
    LongLived("libp2p", "restart", "runs libp2p and gossip", "no new connections, no gossip; streams go on"),
    LongLived(
        "data port", "restart", "accepts data connections", "peers reach this node over libp2p streams only"
    ),
    LongLived(
        "connection timer",
        "restart",
        "pings peers, acknowledges, ends silent connections",
        "frozen peers stay connected",
    ),
    LongLived(
        "libp2p pings",
        "restart",
        "pings libp2p connections over which nothing comes",
        "connections without anything to carry end",
    ),
    LongLived("connection upgrades", "restart", "looks for direct connections", "streams stay on relays"),
    LongLived("messages to self", "restart", "delivers messages of this node to itself", "local stages wait"),
    LongLived("heartbeats", "restart", "tells the version of this node's record", "missed news stays missed"),
    LongLived(
        "record comparisons",
        "restart",
        "compares records with connected nodes",
        "what gossip misses is learned later",
    ),
    LongLived(
        "load changes",
        "restart",
        "tells everybody in a large swarm what load of this node lasts",
        "nodes that do not use this one know an older load",
    ),
    LongLived(
        "record details",
        "restart",
        "asks for the details of nodes whose models are used here",
        "routes are planned with first guesses",
    ),
    LongLived("record expiry", "restart", "forgets records of absent nodes", "records of absent nodes stay"),
    LongLived(
        "peer expiry",
        "restart",
        "forgets limits and pauses of peers that are over",
        "they stay up to the limits of each",
    ),
    LongLived("dialler", "restart", "dials known nodes", "no connections from this side"),
    LongLived(
        "bootstrap resolver", "restart", "resolves bootstrap addresses", "the last known addresses count"
    ),
    LongLived("mDNS", "restart", "finds nodes on the local network", "nodes are found by other ways"),
    LongLived("peer memory", "restart", "saves the addresses of peers", "a restart knows fewer peers"),
    LongLived("reachability checks", "restart", "asks peers to dial back", "the last known result is shown"),
    LongLived(
        "port mapping",
        "restart",
        "has the router forward ports where peers dial in vain",
        "what is forwarded ends within the hour",
    ),
    LongLived(
        "membership checks",
        "restart",
        "drops peers that are no longer let in",
        "revoked members stay connected",
    ),
    LongLived("DHT", "restart", "keeps the routing table and announcements fresh", "announcements expire"),
    LongLived("relay reservations", "restart", "reserves places at relays", "reservations expire"),
    LongLived("trust", "restart", "saves what is known of peers' conduct", "a restart forgets the newest"),
    LongLived("registry", "restart", "applies records to the registry", "routes use older records"),
    LongLived(
        "pipelines",
        "restart",
        "accepts assignments and jobs, follows connections",
        "requests that use this node fail; other nodes take over",
    ),
    LongLived(
        "route warming",
        "restart",
        "dials the nodes of probable routes",
        "the first request over such a node waits for a dial",
    ),
    LongLived(
        "cuts ahead",
        "restart",
        "cuts loaded layers where routes will need it",
        "the first request over a new cut waits for it",
    ),
    LongLived("links", "restart", "opens and closes links between workers", "jobs go by way of the daemons"),
    LongLived("checks", "restart", "computes rows of other nodes again", "less is checked"),
    LongLived("picture checks", "restart", "has pictures encoded again", "such lies are not found"),
    LongLived("prefix checks", "restart", "computes KV from other nodes again", "such KV is not passed on"),
    LongLived("idle workers", "restart", "stops workers that nobody uses", "idle workers keep their memory"),
    LongLived(
        "announcer", "restart", "publishes what this node holds and its load", "others see an older record"
    ),
    LongLived("speed probe", "give up", "measures this machine's speed once", "an estimate is used"),
    LongLived("downloads", "restart", "carries downloads", "downloads that ran have failed"),
    LongLived("digest gathering", "restart", "asks for digests of partly fetched models", "such models wait"),
    LongLived(
        "first loads",
        "give up",
        "loads the configured and remembered models",
        "`swarmllm models load` loads them by hand",
    ),
    LongLived("repeated loads", "restart", "tries again what could not be loaded", "such models wait"),
    LongLived(
        "unused models", "restart", "drops what was loaded on demand", "models loaded on demand stay loaded"
    ),
    LongLived(
        "segment copies", "restart", "removes copies of layers that nobody uses", "they keep their disk space"
    ),
    LongLived("placement", "restart", "loads and drops layers by plan", "the layers stay as they are"),
    LongLived(
        "shared files", "restart", "fetches parts of files that nodes share", "the files stay as they are"
    ),
    LongLived("HTTP", "restart", "serves the API on its port", "clients wait or are refused"),
)

SCOPES: Final = (
    Scope("request", "the request, with an error to its client"),
    Scope("question", "the question to a peer, with an error to the code that asked"),
    Scope("peer", "the connections with that peer", outlives_requests=True),
    Scope("connection", "the connection", outlives_requests=True),
    Scope("download", "the download; it shows the error"),
    Scope("model", "the questions about one partly fetched model"),
    Scope("worker", "the worker process; the next request starts another", outlives_requests=True),
    Scope("link", "the link between two workers; jobs go by way of the daemons", outlives_requests=True),
)

BY_NAME: Final = {task.name: task for task in TASKS}
SCOPE_NAMES: Final = frozenset(scope.name for scope in SCOPES)
OUTLIVING: Final = frozenset(scope.name for scope in SCOPES if scope.outlives_requests)


def reference() -> str:
    """docs/supervision.md."""
    lines = [
        "# Supervision",
        "",
        "Generated from the tables in `swarmllm/supervision/table.py` by its `reference()`; a test compares.",
        "",
        "## Long-lived tasks",
        "",
        "Every task that lives as long as the daemon is started with `supervise` and has one of three",
        "policies:",
        "",
        "- *essential*: the daemon ends, with a sentence that names the task and the error.",
        "- *restart*: the task is started again after 0.2 s. The pause doubles with each failure, up to",
        "  30 s, and starts over after a minute without one. The log has the error, `swarmllm status` and",
        "  `swarmllm doctor` show the task, `swarmllm_task_failures_total` counts.",
        "- *give up*: the error is logged once, and `swarmllm status` and `swarmllm doctor` show it. A wrong",
        "  setting (a model in `model.load` that does not exist) ends the daemon all the same.",
        "",
        "| task | policy | what it does | what happens while it is down |",
        "|---|---|---|---|",
        *(f"| {task.name} | {task.policy} | {task.does} | {task.meanwhile} |" for task in TASKS),
        "",
        "## Short-lived tasks",
        "",
        "A task that belongs to a request, a peer, a connection or a download is started with `spawn`. An",
        "exception that its code does not expect ends what the task belongs to, and nothing else. The log",
        "has it once a minute per cause, and `swarmllm_scope_failures_total` counts.",
        "",
        "| scope | what an unexpected exception ends |",
        "|---|---|",
        *(f"| {scope.name} | {scope.ends} |" for scope in SCOPES),
        "",
    ]
    return "\n".join(lines)
