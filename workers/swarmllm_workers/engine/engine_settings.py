"""The settings of a worker's model, and what follows from them for the contexts of its segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from swarmllm_proto.ipc import FlashAttention, GpuLayers, KvType
from swarmllm_proto.limits import EXACT_ROWS
from swarmllm_workers.cache.prefixes import PrefixSettings
from swarmllm_workers.engine.libllama import N_BATCH, ContextSettings, Threads
from swarmllm_workers.kernels.small_batches import ROWS_MAX

SEQUENCES_MAX: Final = 256
"""As many has libllama in one context."""
_CELLS_MULTIPLE: Final = 256
"""libllama attends in whole multiples of so many cells."""


@dataclass(frozen=True)
class EngineSettings:
    n_ctx: int = 4096
    """KV cells of each segment, shared by all slots."""
    n_slots: int = 8
    n_threads: int = 1
    threads: Threads | None = field(default=None, compare=False)
    """Of all segments but those of exact requests, in the place of `n_threads`."""
    use_mmap: bool = True
    use_mlock: bool = False
    max_bytes: int = 0
    """What the held layers may take by prediction; 0: what the machine has left."""
    kv_type: KvType = "f16"
    flash_attention: FlashAttention = "off"
    n_gpu_layers: GpuLayers = 0
    model_id: str = "0" * 64
    prefix_key: str = field(default="", repr=False)
    """What names of kept KV are keyed with; 64 hex digits, or "": they are not."""
    prefixes: PrefixSettings = field(default_factory=PrefixSettings)
    """How much is kept of requests that are over."""
    journal_max_bytes: int = 2**28
    """Host memory for rows that running requests have sent on."""
    native_tap: bool = True
    of_one_request: bool = False
    """No other one has rows in such a segment."""
    checked_unit: int = 0
    """What a self-check found: layers may be cut at multiples of it, or, where it is no less than their
    number, nowhere; 0: nothing."""
    is_unwanted: Callable[[], bool] | None = None
    """Asked while a long batch runs: whether to leave it."""


def rows_of_exact_batch(settings: EngineSettings) -> int:
    """That a context has room for: no fewer than sequences, or libllama aborts."""
    return max(EXACT_ROWS, settings.n_slots)


def exact_settings(settings: EngineSettings, n_rows: int, kv_type: KvType | None = None) -> EngineSettings:
    """The settings of the segments of an exact request of so many rows, with keys and values of `kv_type`, or
    as in `settings`. Fused attention adds up in an order that depends on the number of threads; quantised
    values have no other."""
    kv_type = kv_type or settings.kv_type
    attention: FlashAttention = "off" if kv_type == "f16" else settings.flash_attention
    return replace(
        settings,
        kv_type=kv_type,
        n_ctx=-(-n_rows // _CELLS_MULTIPLE) * _CELLS_MULTIPLE,
        threads=None,
        flash_attention=attention,
        prefixes=PrefixSettings(n_entries=0, n_cells_entries=0),
        of_one_request=True,
    )


def n_sequences_of(settings: EngineSettings, *, is_recurrent: bool) -> int:
    """Beyond the slots: one for each entry of kept rows, one in which an entry is cut to size, and the last,
    which has rows for as long as it takes to read them. One more may follow: `unused_sequence_of`."""
    n_kept = settings.prefixes.n_cells_entries
    return settings.n_slots + (0 if is_recurrent or not n_kept else n_kept + 2)


def unused_sequence_of(settings: EngineSettings, *, is_recurrent: bool) -> int | None:
    """The sequence of `UnusedCells`. None: there is none."""
    n_sequences = n_sequences_of(settings, is_recurrent=is_recurrent)
    if is_recurrent or settings.of_one_request or settings.n_slots == 1 or n_sequences >= SEQUENCES_MAX:
        return None
    return n_sequences


def n_outputs_of(n_sequences: int, *, has_head: bool) -> int:
    return max(n_sequences, ROWS_MAX) if has_head else N_BATCH


def context_settings(
    settings: EngineSettings, *, is_recurrent: bool, has_head: bool, n_batch: int = N_BATCH
) -> ContextSettings:
    """The context settings of a segment, without its tap."""
    n_sequences = n_sequences_of(settings, is_recurrent=is_recurrent)
    n_sequences += unused_sequence_of(settings, is_recurrent=is_recurrent) is not None
    return ContextSettings(
        n_ctx=settings.n_ctx,
        n_slots=n_sequences,
        n_threads=settings.n_threads,
        threads=settings.threads,
        kv_type=settings.kv_type,
        flash_attention=settings.flash_attention,
        n_outputs_max=min(n_outputs_of(n_sequences, has_head=has_head), n_batch),
        n_batch=n_batch,
        is_unwanted=settings.is_unwanted,
    )
