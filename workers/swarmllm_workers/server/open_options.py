"""What an Open asks for, as the settings of the engine and of what guesses for it."""

from __future__ import annotations

from typing import Final

from swarmllm_proto import ipc
from swarmllm_workers.cache.prefixes import PrefixSettings
from swarmllm_workers.engine.segment import EngineSettings
from swarmllm_workers.errors import CallError
from swarmllm_workers.server.read_ahead import ReadAhead
from swarmllm_workers.speculation.speculation import SpeculationSettings

SEQUENCES_MAX: Final = 256
"""libllama's limit."""


def engine_settings(message: ipc.Open, read_ahead: ReadAhead | None = None) -> EngineSettings:
    """Raises CallError bad_message."""
    if message.kv_type != "f16" and message.flash_attention == "off":
        raise CallError("bad_message", f"stored as {message.kv_type}, values need flash attention", "kv_type")
    return EngineSettings(
        n_ctx=message.n_ctx,
        n_slots=message.n_slots,
        n_threads=message.n_threads,
        use_mmap=message.use_mmap,
        use_mlock=message.use_mlock,
        max_bytes=message.max_bytes,
        kv_type=message.kv_type,
        flash_attention=message.flash_attention,
        n_gpu_layers=message.n_gpu_layers,
        model_id=message.model_id,
        prefixes=_prefix_settings(message),
        journal_max_bytes=message.journal_max_bytes,
        checked_unit=message.checked_unit,
        is_unwanted=read_ahead.is_unwanted if read_ahead is not None else None,
    )


def speculation_settings(message: ipc.Open) -> SpeculationSettings:
    return SpeculationSettings(
        ngram_size_max=message.ngram_max_size,
        ngram_tokens_max=message.ngram_num_pred_tokens,
        draft_path=message.draft_path,
        draft_tokens_max=message.speculative_gamma,
        swift_tokens_max=message.swift_gamma if message.swift_skip_ratio else 0,
        swift_skip_ratio=message.swift_skip_ratio,
    )


def _prefix_settings(message: ipc.Open) -> PrefixSettings:
    # One of the sequences beside the slots is none of the entries'.
    n_sequences = max(0, min(message.n_prefixes, SEQUENCES_MAX - message.n_slots - 1))
    return PrefixSettings(
        n_cells_entries=n_sequences,
        n_entries=message.n_prefixes if n_sequences else 0,
        max_bytes=message.prefix_max_bytes,
        min_tokens=message.prefix_min_tokens,
        ttl_s=message.prefix_ttl_s,
        session_ttl_s=message.session_ttl_s,
    )
