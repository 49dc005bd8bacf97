"""Defines the settings: one frozen dataclass per TOML table, one sentence per key.

The tables below are the only source: the loaders of `config_sources` (TOML, environment, flags), the
command line and docs/configuration.md are all derived from them, so a key that is not here does not exist
and a typo is an error with a suggestion, never a setting that silently does nothing.
"""

# ruff: noqa: RUF009 (_setting makes a dataclasses.field, it holds no shared mutable state)

from __future__ import annotations

import dataclasses
import os
import socket
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from swarmllm.operating_system import n_cores
from swarmllm_proto.ipc import FlashAttention, GpuLayers, KernelMode, KvType

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1, le=65536)]
Guesses = Annotated[int, Meta(ge=1, le=64)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]
Timeout = Annotated[float, Meta(ge=0, le=86400)]


def _setting(default: Any, doc: str, *, reload: bool = False) -> Any:
    """`reload`: a change counts at once when the daemon gets SIGHUP."""
    return dataclasses.field(default=default, metadata={"doc": doc, "reload": reload})


@dataclass(frozen=True, slots=True)
class NodeTable:
    """Who this node is and where it keeps its things."""

    nickname: Annotated[str, Meta(max_length=64)] = _setting(
        "", "Name shown to other nodes; empty means the machine's host name."
    )
    data_dir: str = _setting(
        "", "Folder for identity, catalogue and caches; empty means ~/.local/share/swarmllm (XDG_DATA_HOME)."
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info", "How much is written to stderr; prompts and secrets never are.", reload=True
    )
    drain_timeout_s: Annotated[float, Meta(ge=0, le=600)] = _setting(
        30.0,
        "How long running requests may go on after SIGTERM or SIGINT; a second signal does not wait.",
    )


@dataclass(frozen=True, slots=True)
class LogTable:
    """How the node's log looks, and where it is kept."""

    format: Literal["text", "json"] = _setting(
        "text", "Lines for people, or one JSON object per line; the times are ISO 8601 in UTC."
    )
    file: Annotated[str, Meta(max_length=4096)] = _setting(
        "",
        "File that lines are written to besides stderr, renamed at 10 MB, two old ones kept; empty means "
        "daemon.log in the data folder, and no file where stderr goes to the journal; off means none.",
    )


@dataclass(frozen=True, slots=True)
class NetworkTable:
    """How this node meets the others."""

    listen_host: str = _setting(
        "*",
        "Address on which the libp2p and data ports listen. `*`: every one of this machine; "
        "`0.0.0.0`: every one of IPv4; `::`: every one of IPv6.",
    )
    libp2p_port: Port = _setting(8810, "TCP port of the control plane (libp2p); 0 takes any free port.")
    data_port: Port = _setting(8811, "TCP port of the data plane (activations); 0 takes any free port.")
    bootstrap: tuple[str, ...] = _setting(
        (),
        "Multiaddrs, each with /p2p/ID, of nodes that are dialled at start and again while not connected.",
        reload=True,
    )
    bootstrap_file: Annotated[str, Meta(max_length=4096)] = _setting(
        "",
        "File with further such addresses, one in each line; # begins a comment. Read at start, and at "
        "SIGHUP for more; those that are gone from it are dialled until a restart.",
        reload=True,
    )
    max_peers: Annotated[int, Meta(ge=1, le=4096)] = _setting(
        16,
        "Connections looked for, which carry gossip. Others may still connect, and nodes beyond them are "
        "dialled when a request needs them.",
    )
    max_connections: Annotated[int, Meta(ge=0, le=16384)] = _setting(
        0,
        "Connections that this node has at most, incoming and outgoing; beyond that a peer gives way. "
        "0: 300, and 2000 for `swarmllm bootstrap`.",
    )
    mdns: bool = _setting(True, "Find nodes on the local network by mDNS, and be found.")
    dht: Literal["on", "client", "off"] = _setting(
        "on",
        "Look for models that no connected node has in the swarm's DHT, and announce this node's; client: "
        "answer nobody there.",
    )
    relay: bool = _setting(
        True,
        "Be reached through a relay of the swarm where no peer can dial this node, and reach such nodes.",
    )
    hole_punching: bool = _setting(
        True,
        "Try to replace a connection through a relay by a direct one: both ends dial at the same moment.",
    )
    port_mapping: Literal["auto", "off"] = _setting(
        "auto",
        "Where this machine has no public IPv4 address and a peer outside has dialled it in vain: ask the "
        "default gateway, by UPnP, to forward both ports; off: never ask.",
    )
    relay_service: bool = _setting(False, "Carry connections between nodes that cannot reach each other.")
    direct_links: bool = _setting(
        True,
        "Workers of neighbouring stages send each other decode jobs directly, where the data port can be "
        "reached.",
    )
    announce: tuple[str, ...] = _setting(
        (), "IP addresses told to other nodes instead of those of the network interfaces."
    )
    allow: tuple[str, ...] = _setting((), "Ids of nodes that are trusted whatever they do.")
    deny: tuple[str, ...] = _setting((), "Ids of nodes with which no connection is made or kept.")
    only_allowed: bool = _setting(False, "Connect with nobody but the nodes in allow.")


@dataclass(frozen=True, slots=True)
class ApiTable:
    """The HTTP endpoint: OpenAI-compatible API and administration."""

    host: str = _setting(
        "127.0.0.1",
        "Address to listen on; one that other machines reach needs an API key (swarmllm key create NAME).",
    )
    port: Port = _setting(8800, "TCP port; 0 takes any free port (see daemon.json in the data folder).")
    allowed_hosts: tuple[str, ...] = _setting(
        (), "Names accepted in the Host header besides localhost and the loopback addresses."
    )
    allowed_origins: tuple[str, ...] = _setting(
        (),
        "Origins (https://app.example) of other sites' pages that may use the models from a browser (CORS), "
        "not administer; * is any page, localhost any that a server on the browser's own machine sends.",
    )
    certfile: str = _setting("", "PEM file with the certificate chain; serves HTTPS, needs keyfile.")
    keyfile: str = _setting("", "PEM file with the certificate's private key, not encrypted.")
    max_body_bytes: Annotated[int, Meta(ge=1024, le=2**30)] = _setting(
        32 * 2**20,
        "Largest request body; anything bigger is refused with 413. In it pictures take 4/3 of their size.",
    )
    fetch_images: bool = _setting(
        False,
        "Fetch pictures that requests name by https addresses, from public addresses only; otherwise "
        "pictures come in the request.",
    )
    strict: bool = _setting(
        False,
        "Refuse fields of requests that are not known here; otherwise they are ignored and named in the "
        "header x-swarm-ignored.",
    )


@dataclass(frozen=True, slots=True)
class InferenceTable:
    """How requests are run."""

    max_concurrent_requests: Count = _setting(
        10, "Requests of this node's users that run at once, by their keys' tiers; never more than n_slots."
    )
    max_queued_requests: Annotated[int, Meta(ge=0, le=65536)] = _setting(
        64, "Requests that may wait for their turn; one more is refused with 429."
    )
    queue_timeout_s: Seconds = _setting(30.0, "Longest wait for a turn; then 429.", reload=True)
    prefill_chunk_tokens: Annotated[int, Meta(ge=1, le=4096)] = _setting(
        128, "Prompt tokens that are computed, and walk the pipeline, as one chunk."
    )
    n_ctx: Annotated[int, Meta(ge=16, le=2**24)] = _setting(
        4096, "KV cells of each model on this node, shared by its slots."
    )
    n_slots: Annotated[int, Meta(ge=1, le=256)] = _setting(
        8, "Requests of which a worker can hold KV at the same time."
    )
    continuous_batching: bool = _setting(
        True, "Requests that run at the same time share the worker's batches; false computes them in turn."
    )
    prefix_cache_enabled: bool = _setting(
        True, "Keep the KV of finished requests for prompts that begin alike and for a session's next turn."
    )
    prefix_cache_max_entries: Annotated[int, Meta(ge=0, le=246)] = _setting(
        16, "Finished requests of which each worker keeps KV, in its cells or in host memory; 0 keeps none."
    )
    prefix_cache_max_mb: Annotated[int, Meta(ge=0, le=2**20)] = _setting(
        2048, "Host memory in MiB per worker for kept KV whose cells others needed; 0 drops it then."
    )
    prefix_cache_min_tokens: Annotated[int, Meta(ge=1, le=65536)] = _setting(
        32, "A prompt that shares fewer tokens with an earlier one is computed anew."
    )
    share_prefix_cache_with_peers: Literal["auto", "on", "off"] = _setting(
        "auto",
        "Announce the prompts whose KV is kept, of models that run here whole, give peers that KV and fetch "
        "theirs, also that of layers of cut models; auto: in a private swarm. Tells members that a prompt "
        "which they guess was seen here.",
    )
    cross_node_prefix_trust_min: Annotated[float, Meta(ge=0, le=1)] = _setting(
        0.5, "Nothing of the kind is heard from, given to or fetched from nodes that are trusted less."
    )
    cross_node_prefix_timeout_s: Seconds = _setting(
        3.0, "Longest wait of a request for KV from a peer; then its prompt is computed."
    )
    cross_node_prefix_network_timeout_s: Seconds = _setting(2.5, "The part of it that the peer may take.")
    cross_node_prefix_serving_timeout_s: Seconds = _setting(
        2.0, "What this node's worker may take to give a peer one piece of KV."
    )
    cross_node_prefix_formats: Literal["any", "same"] = _setting(
        "any",
        "KV to fetch: same (with the bits that this node would compute), any (also of other processors and "
        "the other kv_type, converted; as q8_0 where activation_compression says so: the text is not exactly "
        "the one without). Stages of cut models fetch the same only.",
    )
    kv_cache_ttl_secs: Seconds = _setting(600.0, "How long KV is kept that no request asks for.")
    session_timeout_seconds: Seconds = _setting(600.0, "The same for that of sessions (session_id).")
    n_threads: Annotated[int, Meta(ge=0, le=1024)] = _setting(
        0,
        "Compute threads of a worker; 0 means the cores this process may use, and no more than the whole "
        "processors that its control group has. Workers that compute at the same time share them.",
    )
    kv_type: KvType = _setting("f16", "Keys and values; q8_0 is half as large, needs flash_attention.")
    flash_attention: FlashAttention = _setting(
        "auto", "libllama's fused attention: on, off, auto (if it can)."
    )
    kernels: KernelMode = _setting(
        "auto",
        "Matrix products: auto (the fastest here, as measured; attention of few rows too), ggml, ours.",
    )
    check_cuts: bool = _setting(
        True,
        "Try the cuts of each model whose whole file is here, once, in a process of its own; otherwise only "
        "where its architecture is not in the table.",
    )
    exact: bool = _setting(
        False,
        "Compute every request of this node's clients so that its results do not depend on others; slower "
        "where several run at once (docs/exactness.md).",
    )
    ngram_lookup_enabled: bool = _setting(True, "Guess tokens from the text so far; the text stays the same.")
    ngram_max_size: Annotated[int, Meta(ge=2, le=16)] = _setting(4, "Longest run of tokens looked up.")
    ngram_num_pred_tokens: Guesses = _setting(
        10, "Guesses per lookup; a step checks at most 6 of any kind, a trip over several nodes 15."
    )
    guess_from_prompt: Literal["auto", "on", "off"] = _setting(
        "auto",
        "Tell the node with a cut model's last layers the prompt's token ids, so that it guesses from them; "
        "auto: in a private swarm.",
    )
    speculative_decoding: bool = _setting(False, "Let a small model guess; the text stays the same.")
    speculative_draft_model: str = _setting("", "Its GGUF; empty means NAME-draft.gguf beside NAME.gguf.")
    speculative_gamma: Guesses = _setting(4, "Guesses of the small model per step.")
    swift_self_speculative: bool = _setting(False, "Guess with a part of the layers, loaded in pieces.")
    swift_gamma: Guesses = _setting(4, "Guesses with a part of the layers per step.")
    swift_skip_ratio: Annotated[float, Meta(gt=0, le=0.9)] = _setting(0.45, "The share of layers left out.")
    first_token_timeout_s: Seconds = _setting(
        120.0, "Longest wait for a pipeline's first token, and for each later one."
    )
    journal_max_mb: Annotated[int, Meta(ge=0, le=2**20)] = _setting(
        256, "Host memory in MiB per worker for what stages sent on, for repairs and checks; 0 keeps none."
    )
    failover_timeout_s: Timeout = _setting(60.0, "How long a broken stream looks for other nodes; 0: not.")
    hedge: Annotated[float, Meta(ge=0, le=1)] = _setting(
        0.05,
        "Where a pipeline is far slower than planned, another one starts beside it, and the first to give "
        "the next token keeps the request. This part of the work of this node's requests may be done again "
        "for that; 0: nothing is.",
    )
    check_rate: Annotated[float, Meta(ge=0, le=1)] = _setting(
        0.0625,
        "Part of the requests of fully trusted nodes whose results are computed again; of strangers five "
        "times as many. Checks cost no more than about half of this part of the requests' own work. 0: none; "
        "1: all, whatever it costs.",
    )
    activation_compression: Literal["off", "lossless", "q8_0", "auto"] = _setting(
        "auto",
        "How rows travel between stages: off (f32), lossless (zstd, where that is not known to be slower), "
        "q8_0 (a quarter of the bytes, but rounded: the text is not exactly that of the uncut model), auto "
        "(lossless where a line is measured to gain by it; never q8_0).",
    )
    picture_compression: Literal["off", "auto", "always"] = _setting(
        "auto",
        "How pictures go to nodes that encode them, and their rows come back: off (as they are), auto (as "
        "JPEG of quality 90, and as f16 with zstd, each where a line is measured to gain by it: the text is "
        "not exactly that of a picture encoded here), always. With `exact`, off.",
    )
    encrypted_pipeline: bool = _setting(
        False,
        "Run the first and the last segment here only: peers see hidden states of the middle, never text.",
    )
    encrypted_models: tuple[str, ...] = _setting(
        (),
        "Models that run like that where encrypted_pipeline is false, each by its own name (no further one).",
    )
    local_embedding_privacy: bool = _setting(
        False, "Never send a prompt's token ids to a peer, not even to one that runs the whole model."
    )
    pins: tuple[str, ...] = _setting(
        (), "Layers that run on one node only, each NAME:START:END@NODE with the node's id."
    )
    rr_ack_timeout_s: Seconds = _setting(10.0, "Longest wait for stages to accept, or for a lost job.")


@dataclass(frozen=True, slots=True)
class ModelTable:
    """Which models run here."""

    load: tuple[str, ...] = _setting(
        (),
        "Loaded at start: NAME for a whole model or NAME:START:END for layers [START, END), e.g. guide:0:4.",
    )
    restore: bool = _setting(
        True, "Load at start, after what load names, what was loaded by hand before and not unloaded since."
    )
    on_demand: bool = _setting(
        True,
        "Load a model that a request asks for and the swarm does not hold; connected nodes give what is not"
        " on this disk.",
    )
    keep_alive_s: Annotated[float, Meta(ge=-1, le=2**31)] = _setting(
        300.0, "How long a model loaded on demand stays after its last request; -1: for ever."
    )


@dataclass(frozen=True, slots=True)
class ResourcesTable:
    """What a worker may use of the machine."""

    use_mmap: bool = _setting(True, "Map model files into memory instead of reading them.")
    max_model_gib: Annotated[float, Meta(ge=0, le=2**20)] = _setting(
        0.0, "GiB that the layers of one model may take, KV and work space too; 0: what the machine has left."
    )
    strangers_mib: Annotated[int, Meta(ge=64, le=2**20)] = _setting(
        1120,
        "MiB that other nodes may make this one keep of requests, messages and jobs; the largest message"
        " is a fifth of it.",
    )
    use_mlock: bool = _setting(False, "Keep the weights in memory, never paged out; needs `ulimit -l`.")
    n_gpu_layers: GpuLayers = _setting(
        "auto",
        "Layers of each segment put on the GPU, the last ones; auto: as many as GPUs with memory of their own"
        " have room for. Needs a llama-cpp-python built for it.",
    )


@dataclass(frozen=True, slots=True)
class StoreTable:
    """Models that come from other nodes, and what this node gives to others."""

    quota_gib: Annotated[float, Meta(ge=0, le=2**20)] = _setting(
        0.0,
        "Disk space in GiB for models fetched from other nodes or the web; 0 means no limit but the disk.",
    )
    segment_cache_gib: Annotated[float, Meta(ge=0, le=2**20)] = _setting(
        64.0,
        "Disk space in GiB for copies of layers of this machine's own files, made where only some layers of"
        " one are loaded; the least recently used go first, none in use goes; 0 means no limit but the disk.",
    )
    share: bool = _setting(
        True,
        "Give this node's models to connected nodes that ask for them; they load them by name.",
        reload=True,
    )
    upload_mib_s: Annotated[float, Meta(ge=0, le=2**20)] = _setting(
        0.0,
        "MiB per second that this node gives to others at most, all together; 0 means no limit.",
        reload=True,
    )
    max_uploads: Annotated[int, Meta(ge=1, le=256)] = _setting(
        4,
        "Pieces of models (of 1 MiB) that are read and sent at the same time; more wait, then are put off.",
        reload=True,
    )


@dataclass(frozen=True, slots=True)
class AutoManageTable:
    """Models of which the swarm decides what this node holds; see docs/scheduling.md."""

    models: Annotated[tuple[str, ...], Meta(max_length=32)] = _setting(
        (), "Names of the models that are placed on this node; empty: it loads only what it is told."
    )
    max_memory_gib: Annotated[float, Meta(ge=0, le=2**20)] = _setting(
        0.0,
        "GiB for the layers of all models that are placed here; 0 means half of this machine's memory,"
        " and that of GPUs on which layers may lie.",
    )
    max_pipes: Annotated[int, Meta(ge=0, le=65536)] = _setting(
        0, "Complete pipelines after which no new one is begun; 0 means no limit."
    )
    interval_s: Seconds = _setting(5.0, "Between two looks; layers move when three agree.")
    share: Annotated[tuple[str, ...], Meta(max_length=8)] = _setting(
        (), "Names of models that this node asks the others to hold parts of; it takes part itself."
    )
    accept: Annotated[tuple[str, ...], Meta(max_length=16)] = _setting(
        ("private",),
        "Node ids whose shared models may be placed here in max_memory_gib; `members`: every trusted node;"
        " `private`: every trusted node where the swarm is private.",
    )
    max_disk_gib: Annotated[float, Meta(ge=0, le=2**20)] = _setting(
        0.0, "GiB for what is fetched in order to place it here; 0 means as much as for memory."
    )
    projector_holders: Annotated[int, Meta(ge=0, le=256)] = _setting(
        2,
        "Nodes that are to have the projector of a model that is placed here, if any node has one; 0: whoever"
        " was given it.",
    )


@dataclass(frozen=True, slots=True)
class DownloadsTable:
    """Models from the web (`swarmllm models pull`). HF_TOKEN, HF_ENDPOINT and HTTPS_PROXY come from the
    environment."""

    offline: bool = _setting(False, "Fetch nothing from the web (as HF_HUB_OFFLINE=1).", reload=True)
    connections: Annotated[int, Meta(ge=1, le=32)] = _setting(
        4, "Pieces of one file that are fetched at the same time.", reload=True
    )


@dataclass(frozen=True, slots=True)
class Config:
    node: NodeTable = dataclasses.field(default_factory=NodeTable)
    log: LogTable = dataclasses.field(default_factory=LogTable)
    network: NetworkTable = dataclasses.field(default_factory=NetworkTable)
    api: ApiTable = dataclasses.field(default_factory=ApiTable)
    inference: InferenceTable = dataclasses.field(default_factory=InferenceTable)
    model: ModelTable = dataclasses.field(default_factory=ModelTable)
    resources: ResourcesTable = dataclasses.field(default_factory=ResourcesTable)
    store: StoreTable = dataclasses.field(default_factory=StoreTable)
    auto_manage: AutoManageTable = dataclasses.field(default_factory=AutoManageTable)
    downloads: DownloadsTable = dataclasses.field(default_factory=DownloadsTable)

    @property
    def data_dir(self) -> Path:
        if self.node.data_dir:
            return Path(self.node.data_dir).expanduser().absolute()
        return default_data_dir(os.environ)

    @property
    def log_file(self) -> Path | None:
        """None: there is to be none, wherever stderr goes."""
        if self.log.file == "off":
            return None
        return Path(self.log.file).expanduser().absolute() if self.log.file else self.data_dir / "daemon.log"

    @property
    def nickname(self) -> str:
        return self.node.nickname or socket.gethostname()

    @property
    def n_threads(self) -> int:
        return self.inference.n_threads or n_cores()


TABLES: dict[str, type] = {
    "node": NodeTable,
    "log": LogTable,
    "network": NetworkTable,
    "api": ApiTable,
    "inference": InferenceTable,
    "model": ModelTable,
    "resources": ResourcesTable,
    "store": StoreTable,
    "auto_manage": AutoManageTable,
    "downloads": DownloadsTable,
}


def default_data_dir(env: Mapping[str, str]) -> Path:
    base = env.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "swarmllm"


def default_config_file(env: Mapping[str, str]) -> Path:
    base = env.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "swarmllm" / "config.toml"


def keys_of(table: str) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(TABLES[table])}


def as_dict(config: Config) -> dict[str, dict[str, object]]:
    """Every effective value by table and key, as JSON types."""
    return typing.cast("dict[str, dict[str, object]]", msgspec.to_builtins(dataclasses.asdict(config)))
