"""What can be configured: one frozen dataclass per TOML table, one sentence per key.

The tables below are the only source: the TOML loader, the environment (`SWARMLLM_<TABLE>_<KEY>`), the
command line and docs/configuration.md are all derived from them, so a key that is not here does not exist
and a typo is an error with a suggestion, never a setting that silently does nothing. Later sources win:
defaults, TOML file, environment, flags.

Values are checked by msgspec against the annotations, the same way for every source; the environment and
flags bring text, which is turned into the field's type first.
"""

# ruff: noqa: RUF009 (_setting makes a dataclasses.field, it holds no shared mutable state)

from __future__ import annotations

import dataclasses
import difflib
import os
import socket
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from swarmllm.errors import ConfigError
from swarmllm_proto.ipc import FlashAttention, KvType

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1, le=65536)]
Guesses = Annotated[int, Meta(ge=1, le=64)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]

ENV_PREFIX = "SWARMLLM_"
BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def _setting(default: Any, doc: str) -> Any:
    return dataclasses.field(default=default, metadata={"doc": doc})


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
        "info", "How much is written to stderr; prompts and secrets never are."
    )


@dataclass(frozen=True, slots=True)
class NetworkTable:
    """How this node meets the others."""

    listen_host: str = _setting("0.0.0.0", "Address on which the libp2p and data ports listen.")
    libp2p_port: Port = _setting(8810, "TCP port of the control plane (libp2p); 0 takes any free port.")
    data_port: Port = _setting(8811, "TCP port of the data plane (activations); 0 takes any free port.")
    bootstrap: tuple[str, ...] = _setting(
        (), "Multiaddrs, each with /p2p/ID, of nodes that are dialled at start and again while not connected."
    )
    mdns: bool = _setting(True, "Find nodes on the local network by mDNS, and be found.")
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
    certfile: str = _setting("", "PEM file with the certificate chain; serves HTTPS, needs keyfile.")
    keyfile: str = _setting("", "PEM file with the certificate's private key, not encrypted.")
    max_body_bytes: Annotated[int, Meta(ge=1024, le=2**30)] = _setting(
        8 * 2**20, "Largest request body; anything bigger is refused with 413."
    )


@dataclass(frozen=True, slots=True)
class InferenceTable:
    """How requests are run."""

    max_concurrent_requests: Count = _setting(
        10,
        "Requests of this node's users that run at the same time (a key's tier may say more or fewer);"
        " never more than n_slots.",
    )
    max_queued_requests: Annotated[int, Meta(ge=0, le=65536)] = _setting(
        64, "Requests that may wait for their turn; one more is refused with 429."
    )
    queue_timeout_s: Seconds = _setting(30.0, "Longest wait for a turn; then 429.")
    prefill_chunk_tokens: Annotated[int, Meta(ge=1, le=4096)] = _setting(
        128, "Prompt tokens that walk the pipeline as one chunk."
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
    kv_cache_ttl_secs: Seconds = _setting(600.0, "How long KV is kept that no request asks for.")
    session_timeout_seconds: Seconds = _setting(600.0, "The same for that of sessions (session_id).")
    n_threads: Annotated[int, Meta(ge=0, le=1024)] = _setting(
        0, "Compute threads of each worker; 0 means the cores this process may use."
    )
    kv_type: KvType = _setting("f16", "Keys and values; q8_0 is half as large, needs flash_attention.")
    flash_attention: FlashAttention = _setting(
        "off", "libllama's fused attention: on, off, auto (if it can)."
    )
    ngram_lookup_enabled: bool = _setting(True, "Guess tokens from the text so far; the text stays the same.")
    ngram_max_size: Annotated[int, Meta(ge=2, le=16)] = _setting(4, "Longest run of tokens looked up.")
    ngram_num_pred_tokens: Guesses = _setting(10, "Guesses per lookup; a step checks at most 6 of any kind.")
    speculative_decoding: bool = _setting(False, "Let a small model guess; the text stays the same.")
    speculative_draft_model: str = _setting("", "Its GGUF; empty means NAME-draft.gguf beside NAME.gguf.")
    speculative_gamma: Guesses = _setting(4, "Guesses of the small model per step.")
    swift_self_speculative: bool = _setting(False, "Guess with a part of the layers, loaded in pieces.")
    swift_gamma: Guesses = _setting(4, "Guesses with a part of the layers per step.")
    swift_skip_ratio: Annotated[float, Meta(gt=0, le=0.9)] = _setting(0.45, "The share of layers left out.")
    first_token_timeout_s: Seconds = _setting(
        120.0, "Longest wait for a pipeline's first token, and for each later one."
    )
    failover_timeout_s: Annotated[float, Meta(ge=0, le=86400)] = _setting(
        60.0,
        "How long a stream whose pipeline broke waits for nodes that can go on with it; 0 ends it at once.",
    )
    encrypted_pipeline: bool = _setting(
        False,
        "Run the first and the last segment here only: peers see hidden states of the middle, never text.",
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


@dataclass(frozen=True, slots=True)
class ResourcesTable:
    """What a worker may use of the machine."""

    use_mmap: bool = _setting(True, "Map model files into memory instead of reading them.")
    max_model_gib: Annotated[float, Meta(ge=0, le=2**20)] = _setting(
        0.0, "GiB that the layers of one model may take, KV and work space too; 0: what the machine has left."
    )
    use_mlock: bool = _setting(False, "Keep the weights in memory, never paged out; needs `ulimit -l`.")
    n_gpu_layers: Annotated[int, Meta(ge=0, le=65535)] = _setting(
        0, "Layers of each segment put on the GPU; needs a llama-cpp-python built for it."
    )


@dataclass(frozen=True, slots=True)
class StoreTable:
    """Models that come from other nodes, and what this node gives to others."""

    quota_gib: Annotated[float, Meta(ge=0, le=2**20)] = _setting(
        0.0, "Disk space in GiB for models fetched from other nodes; 0 means no limit but the disk."
    )
    share: bool = _setting(
        True, "Give this node's models to connected nodes that ask for them; they load them by name."
    )
    upload_mib_s: Annotated[float, Meta(ge=0, le=2**20)] = _setting(
        0.0, "MiB per second that this node gives to others at most, all together; 0 means no limit."
    )
    max_uploads: Annotated[int, Meta(ge=1, le=256)] = _setting(
        4, "Pieces of models (of 1 MiB) that are read and sent at the same time; more wait, then are put off."
    )


@dataclass(frozen=True, slots=True)
class AutoManageTable:
    """Models of which the swarm decides what this node holds; see docs/scheduling.md."""

    models: tuple[str, ...] = _setting(
        (), "Names of the models that are placed on this node; empty: it loads only what it is told."
    )
    max_memory_gib: Annotated[float, Meta(ge=0, le=2**20)] = _setting(
        0.0, "For the layers of all models; 0 means half of this machine's memory."
    )
    max_pipes: Annotated[int, Meta(ge=0, le=65536)] = _setting(
        0, "Complete pipelines after which no new one is begun; 0 means no limit."
    )
    interval_s: Seconds = _setting(5.0, "Between two looks; layers move when three agree.")


@dataclass(frozen=True, slots=True)
class Config:
    node: NodeTable = dataclasses.field(default_factory=NodeTable)
    network: NetworkTable = dataclasses.field(default_factory=NetworkTable)
    api: ApiTable = dataclasses.field(default_factory=ApiTable)
    inference: InferenceTable = dataclasses.field(default_factory=InferenceTable)
    model: ModelTable = dataclasses.field(default_factory=ModelTable)
    resources: ResourcesTable = dataclasses.field(default_factory=ResourcesTable)
    store: StoreTable = dataclasses.field(default_factory=StoreTable)
    auto_manage: AutoManageTable = dataclasses.field(default_factory=AutoManageTable)

    @property
    def data_dir(self) -> Path:
        if self.node.data_dir:
            return Path(self.node.data_dir).expanduser().absolute()
        return default_data_dir(os.environ)

    @property
    def nickname(self) -> str:
        return self.node.nickname or socket.gethostname()

    @property
    def n_threads(self) -> int:
        return self.inference.n_threads or len(os.sched_getaffinity(0))


TABLES: dict[str, type] = {
    "node": NodeTable,
    "network": NetworkTable,
    "api": ApiTable,
    "inference": InferenceTable,
    "model": ModelTable,
    "resources": ResourcesTable,
    "store": StoreTable,
    "auto_manage": AutoManageTable,
}


def default_data_dir(env: Mapping[str, str]) -> Path:
    base = env.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "swarmllm"


def default_config_file(env: Mapping[str, str]) -> Path:
    base = env.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "swarmllm" / "config.toml"


def load_config(
    path: Path | None = None,
    *,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Config:
    """Defaults < TOML file < environment < flags (`{"api.port": 0}`; a value of None is no flag).

    `path` None reads the default file if there is one; a path that is given must exist. Raises ConfigError
    naming the key and where it came from.
    """
    env = os.environ if env is None else env
    values: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
    origins: dict[str, str] = {}

    def put(table: str, key: str, value: object, origin: str) -> None:
        values[table][key] = value
        origins[f"{table}.{key}"] = origin

    for table, key, value, origin in [*_from_file(path, env), *_from_env(env), *_from_flags(flags or {})]:
        put(table, key, value, origin)
    return Config(**{table: _build(table, values[table], origins) for table in TABLES})


def _build(table: str, values: dict[str, Any], origins: Mapping[str, str]) -> Any:
    for key, value in values.items():
        kind = typing.get_type_hints(TABLES[table], include_extras=True)[key]
        try:
            values[key] = msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            name = f"{table}.{key}"
            raise ConfigError(f"{name} ({origins[name]}): {error}", field=name) from None
    return TABLES[table](**values)


Setting = tuple[str, str, object, str]


def _from_file(path: Path | None, env: Mapping[str, str]) -> list[Setting]:
    file = path or default_config_file(env)
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        if path is None:
            return []
        raise ConfigError(f"There is no configuration file {file}.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"Cannot read {file}: {error}") from None
    found: list[Setting] = []
    for table, keys in tables.items():
        _check_known(table, TABLES, "table", str(file))
        if not isinstance(keys, dict):
            raise ConfigError(f"{table} in {file} is a table: write [{table}], keys below it.", field=table)
        for key, value in keys.items():
            _check_known(key, keys_of(table), f"key of [{table}]", str(file))
            found.append((table, key, value, str(file)))
    return found


def _from_env(env: Mapping[str, str]) -> list[Setting]:
    found: list[Setting] = []
    for name, text in env.items():
        table, _, key = name.removeprefix(ENV_PREFIX).lower().partition("_")
        if not name.startswith(ENV_PREFIX) or not key or table not in TABLES:
            continue
        _check_known(key, keys_of(table), f"key of [{table}]", f"environment {name}")
        found.append((table, key, _parse(table, key, text), f"environment {name}"))
    return found


def _from_flags(flags: Mapping[str, object]) -> list[Setting]:
    found: list[Setting] = []
    for name, value in flags.items():
        table, _, key = name.partition(".")
        _check_known(table, TABLES, "table", "flag")
        _check_known(key, keys_of(table), f"key of [{table}]", "flag")
        if value is not None:
            found.append((table, key, _parse(table, key, value) if isinstance(value, str) else value, "flag"))
    return found


def keys_of(table: str) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(TABLES[table])}


def _check_known(name: str, known: Mapping[str, object], what: str, origin: str) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
        raise ConfigError(f"{name!r} is not a {what} ({origin}). {hint}", field=name)


def _parse(table: str, key: str, text: str) -> object:
    """Text as the field's type; what does not parse is left for msgspec to refuse."""
    default = keys_of(table)[key].default
    if isinstance(default, tuple):
        return [item.strip() for item in text.split(",") if item.strip()]
    if isinstance(default, bool):
        return BOOLEANS.get(text.lower(), text)
    if isinstance(default, int | float):
        try:
            return type(default)(text)
        except ValueError:
            return text
    return text


def as_dict(config: Config) -> dict[str, dict[str, object]]:
    """Every effective value by table and key, as JSON types."""
    return typing.cast("dict[str, dict[str, object]]", msgspec.to_builtins(dataclasses.asdict(config)))
