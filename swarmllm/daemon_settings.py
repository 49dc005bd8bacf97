"""Turns the configuration into the settings of each package of the daemon."""

from __future__ import annotations

from pathlib import Path

from swarmllm.config import Config
from swarmllm.errors import ConfigError, InvalidRequest
from swarmllm.models.names import check_name
from swarmllm.models.segment_copies import SEGMENTS
from swarmllm.node.data_dir import KERNEL_TIMINGS
from swarmllm.pipeline.prefix.choice import PrefixFetchSettings
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.scheduling.constraints import Constraints, Pin
from swarmllm.swarm.discovery.addresses import EVERYWHERE
from swarmllm.swarm.discovery.bootstrap_file import read_bootstrap_file
from swarmllm.swarm.membership.network_key import OPEN_SWARM, Network
from swarmllm.swarm.membership.peer_lists import PeerLists
from swarmllm.swarm.peers.connection_limits import CONNECTIONS_MAX
from swarmllm.swarm.settings import SwarmSettings
from swarmllm.transfer import TransferSettings
from swarmllm.workerpool import WorkerSettings
from swarmllm_proto.identifiers import parse_ip


def check_settings(config: Config) -> None:
    """Raises ConfigError for what the types of the settings do not tell and the daemon would refuse."""
    swarm_settings(config, Path())
    worker_settings(config, Path(), OPEN_SWARM)
    pipeline_settings(config, OPEN_SWARM)


def transfer_settings(config: Config) -> TransferSettings:
    return TransferSettings(
        share=config.store.share,
        upload_bytes_s=config.store.upload_mib_s * 2**20,
        max_uploads=config.store.max_uploads,
    )


def shares_prefixes(config: Config, network: Network) -> bool:
    """Whether kept KV is announced, given and fetched."""
    wanted = config.inference.share_prefix_cache_with_peers
    is_wanted = network.is_private if wanted == "auto" else wanted == "on"
    return is_wanted and config.inference.prefix_cache_enabled


def tells_prompt(config: Config, network: Network) -> bool:
    """Whether the last stage of a model over several nodes gets to know prompts, to guess from them."""
    inference = config.inference
    wanted = inference.guess_from_prompt
    is_wanted = network.is_private if wanted == "auto" else wanted == "on"
    return is_wanted and not inference.local_embedding_privacy


def worker_settings(config: Config, data_dir: Path, network: Network) -> WorkerSettings:
    inference = config.inference
    return WorkerSettings(
        cache_dir=data_dir / SEGMENTS,
        store_dir=data_dir / "models",
        n_ctx=config.inference.n_ctx,
        n_slots=config.inference.n_slots,
        n_threads=config.n_threads,
        log_level="debug" if config.node.log_level == "debug" else "warning",
        use_mmap=config.resources.use_mmap,
        n_gpu_layers=config.resources.n_gpu_layers,
        continuous_batching=config.inference.continuous_batching,
        prefill_chunk_tokens=inference.prefill_chunk_tokens,
        n_prefixes=inference.prefix_cache_max_entries if inference.prefix_cache_enabled else 0,
        prefix_max_bytes=inference.prefix_cache_max_mb * 2**20,
        journal_max_bytes=inference.journal_max_mb * 2**20,
        prefix_min_tokens=inference.prefix_cache_min_tokens,
        prefix_ttl_s=inference.kv_cache_ttl_secs,
        session_ttl_s=inference.session_timeout_seconds,
        tell_prefixes=shares_prefixes(config, network),
        prefix_key=network.prefix_key,
        max_model_bytes=int(config.resources.max_model_gib * 2**30),
        kv_type=inference.kv_type,
        flash_attention=inference.flash_attention,
        kernels=inference.kernels,
        check_cuts=inference.check_cuts,
        kernel_timings=data_dir / KERNEL_TIMINGS,
        use_mlock=config.resources.use_mlock,
        ngram_max_size=inference.ngram_max_size if inference.ngram_lookup_enabled else 0,
        ngram_num_pred_tokens=inference.ngram_num_pred_tokens,
        uses_draft_model=inference.speculative_decoding,
        draft_model=_file(inference.speculative_draft_model),
        speculative_gamma=inference.speculative_gamma,
        swift_gamma=inference.swift_gamma if inference.swift_self_speculative else 0,
        swift_skip_ratio=inference.swift_skip_ratio,
    )


def _file(name: str) -> Path | None:
    return Path(name).expanduser().absolute() if name else None


def swarm_settings(config: Config, data_dir: Path) -> SwarmSettings:
    network = config.network
    return SwarmSettings(
        data_dir=data_dir,
        listen_host=_listen_host(network.listen_host),
        libp2p_port=network.libp2p_port,
        data_port=network.data_port,
        bootstrap=bootstrap_addresses(config),
        max_peers=network.max_peers,
        max_connections=network.max_connections or CONNECTIONS_MAX,
        mdns=network.mdns,
        announce=tuple(_ip(text, "network.announce") for text in network.announce),
        dht=network.dht,
        relay=network.relay,
        relay_service=network.relay_service,
        hole_punching=network.hole_punching,
        port_mapping=network.port_mapping == "auto",
        strangers_mib=config.resources.strangers_mib,
        lists=PeerLists.of(network.allow, network.deny, only_allowed=network.only_allowed),
    )


def bootstrap_addresses(config: Config) -> tuple[str, ...]:
    """Of the configuration and of its file. Blocking. Raises ConfigError."""
    file = _file(config.network.bootstrap_file)
    more = read_bootstrap_file(file) if file else ()
    return tuple(dict.fromkeys((*config.network.bootstrap, *more)))


def _listen_host(text: str) -> str:
    return EVERYWHERE if text == EVERYWHERE else _ip(text, "network.listen_host")


def _ip(text: str, field: str) -> str:
    try:
        return str(parse_ip(text))
    except ValueError:
        raise ConfigError(f"{field}: {text[:100]!r} is not an IP address.", field=field) from None


def pipeline_settings(config: Config, network: Network) -> PipelineSettings:
    inference = config.inference
    return PipelineSettings(
        prefill_chunk_tokens=inference.prefill_chunk_tokens,
        shares_prefixes=inference.prefix_cache_enabled,
        ack_timeout_s=inference.rr_ack_timeout_s,
        silence_timeout_s=inference.first_token_timeout_s,
        failover_timeout_s=inference.failover_timeout_s,
        prefix_fetch=PrefixFetchSettings(
            shares_prefixes(config, network),
            inference.cross_node_prefix_timeout_s,
            inference.cross_node_prefix_network_timeout_s,
            inference.cross_node_prefix_serving_timeout_s,
            any_format=inference.cross_node_prefix_formats == "any",
            rounds=inference.activation_compression == "q8_0",
        ),
        check_rate=inference.check_rate,
        hedge=inference.hedge,
        local_embedding_privacy=inference.local_embedding_privacy,
        guesses=inference.ngram_lookup_enabled or inference.speculative_decoding,
        tells_prompt=tells_prompt(config, network),
        activation_compression=inference.activation_compression,
        picture_compression=inference.picture_compression,
        n_ctx=inference.n_ctx,
        exact=inference.exact,
        max_requests_per_model=inference.n_slots,
        constraints=Constraints(
            inference.encrypted_pipeline, _pins(inference.pins), _private_models(inference.encrypted_models)
        ),
    )


def _private_models(names: tuple[str, ...]) -> frozenset[str]:
    try:
        for name in names:
            check_name(name)
    except InvalidRequest as error:
        field = "inference.encrypted_models"
        raise ConfigError(f"{field}: {error.message}", field=field) from None
    return frozenset(names)


def _pins(texts: tuple[str, ...]) -> tuple[Pin, ...]:
    try:
        return tuple(Pin.parse(text) for text in texts)
    except InvalidRequest as error:
        raise ConfigError(f"inference.pins: {error.message}", field="inference.pins") from None
