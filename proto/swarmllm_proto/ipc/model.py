"""Messages by which a worker opens its model, loads and unloads layers, and ends (see `ipc`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from swarmllm_proto.ipc.base import (
    DaemonMessage,
    Dimension,
    InfillTokens,
    KernelChoice,
    KernelClass,
    KernelMode,
    LayerIndex,
    Seconds,
    SizeBytes,
    TokenCount,
    TokenId,
    WorkerMessage,
    require_layer_range,
)

KvType = Literal["f16", "q8_0"]
FlashAttention = Literal["auto", "on", "off"]
GpuLayers = Annotated[int, Meta(ge=0, le=65535)] | Literal["auto"]


class Open(DaemonMessage, frozen=True, tag=True):
    """First message: which GGUF this worker serves. Opens vocabulary, template and embedding; loads no
    layer."""

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    cache_dir: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Folder for segment files cut from the GGUF."""
    owns_path: bool = False
    """The GGUF is the store's: its layers may move to segment files."""
    model_id: Annotated[str, Meta(min_length=64, max_length=64, pattern="^[0-9a-f]{64}$")] = "0" * 64
    """What names of kept KV begin with."""
    n_ctx: Annotated[int, Meta(ge=16, le=2**24)] = 4096
    """KV cells shared by all slots."""
    n_slots: Annotated[int, Meta(ge=1, le=256)] = 8
    n_threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    use_mmap: bool = True
    n_gpu_layers: GpuLayers = 0
    """Of each segment; auto: as many as the GPUs have room for."""
    continuous_batching: bool = True
    """Requests that run at the same time share libllama's batches."""
    prefill_chunk_tokens: Annotated[int, Meta(ge=1, le=4096)] = 128
    """Rows of one prompt in one batch, as far as batches are that large."""
    n_prefixes: Annotated[int, Meta(ge=0, le=255)] = 16
    """Finished requests whose KV is kept for prompts that begin alike; 0: none."""
    prefix_max_bytes: SizeBytes = 2**31
    """Host memory for kept KV whose cells others needed."""
    prefix_min_tokens: TokenCount = 32
    """Fewer rows are not worth sharing."""
    prefix_ttl_s: Seconds = 600.0
    """How long KV is kept that nobody asks for."""
    session_ttl_s: Seconds = 600.0
    """The same for that of sessions."""
    tell_prefixes: bool = False
    """Say with PrefixManifestUpdate what is kept."""
    prefix_key: Annotated[str, Meta(max_length=64, pattern="^([0-9a-f]{64})?$")] = ""
    """What the names of kept KV are keyed with, where only members of a private swarm are to make them."""
    max_bytes: SizeBytes = 0
    """What layers may take by prediction; 0: what the machine has left."""
    kv_type: KvType = "f16"
    flash_attention: FlashAttention = "off"
    use_mlock: bool = False
    ngram_max_size: Annotated[int, Meta(ge=0, le=16)] = 0
    """Longest run of tokens looked up in the text so far, to guess what follows it; 0: no lookup."""
    ngram_num_pred_tokens: Annotated[int, Meta(ge=1, le=64)] = 10
    draft_path: Annotated[str, Meta(max_length=4096)] = ""
    """A small GGUF of the same vocabulary that guesses; "": none."""
    speculative_gamma: Annotated[int, Meta(ge=1, le=64)] = 4
    swift_gamma: Annotated[int, Meta(ge=0, le=64)] = 0
    """Guesses per step at most that the model makes with a part of its layers; 0: none."""
    swift_skip_ratio: Annotated[float, Meta(ge=0, le=0.9)] = 0.45
    """The share of the layers that it then leaves out."""
    journal_max_bytes: SizeBytes = 2**28
    """Host memory for what running requests have sent on; 0: nothing is kept of it."""
    checked_unit: LayerIndex = 0
    """What a self-check found, here or elsewhere: layers may be cut at multiples of it, or, where it is the
    number of layers, nowhere; 0: nothing beyond the table."""
    kernels: KernelMode = "auto"
    """"auto": measured at the first load of a row length, or read from `kernel_timings`."""
    kernel_timings: Annotated[str, Meta(max_length=4096)] = ""
    """File in which the measurement is kept; "": nowhere."""


class Load(DaemonMessage, frozen=True, tag=True):
    """Make layers [start, end) runnable. The range that ends at n_layers also holds the head. Answered by
    Progress ... Loaded."""

    start: LayerIndex
    end: LayerIndex
    mapped_beside_bytes: SizeBytes | UnsetType = UNSET
    """Weights that other workers of the node have mapped: the system counts them as available."""

    def __post_init__(self) -> None:
        require_layer_range(self.start, self.end)


class Unload(DaemonMessage, frozen=True, tag=True):
    """Give layers [start, end) back; a range in the middle of a loaded one splits it. Answered by Loaded, and
    by Bye after the last layer."""

    start: LayerIndex
    end: LayerIndex

    def __post_init__(self) -> None:
        require_layer_range(self.start, self.end)


class Shutdown(DaemonMessage, frozen=True, tag=True):
    """Answered by Bye; then the process exits with 0."""


class Ready(WorkerMessage, frozen=True, tag=True):
    """First message of a worker after it has connected (id 0)."""

    pid: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    version: str
    engine: str
    """Version of llama-cpp-python and the build of libllama."""


class Opened(WorkerMessage, frozen=True, tag=True):
    """Answers Open: what the GGUF says about itself."""

    architecture: str
    name: str
    n_layers: LayerIndex
    n_embd: Dimension
    n_vocab: Dimension
    context_length: Dimension
    cut_alignment: LayerIndex
    """Layers may be cut at multiples of this; 0: the model runs whole only."""
    whole_reason: str = ""
    """Why the model cannot be cut, where cut_alignment is 0."""
    eos_tokens: tuple[TokenId, ...] = ()
    infill: InfillTokens | UnsetType = UNSET
    """Unset: the model fills nothing in."""
    has_chat_template: bool = False


class Progress(WorkerMessage, frozen=True, tag=True):
    """A Load, an Unload or a CheckCuts is under way; zero or more before its answer."""

    done_bytes: SizeBytes
    total_bytes: SizeBytes


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One that libllama sees."""

    name: Annotated[str, Meta(max_length=128)]
    """As ggml calls it, such as CUDA0."""
    description: Annotated[str, Meta(max_length=128)]
    total_bytes: SizeBytes
    free_bytes: SizeBytes
    has_own_memory: bool
    """Integrated ones use the machine's."""


class Loaded(WorkerMessage, frozen=True, tag=True):
    """Answers Load and Unload: what the worker now holds."""

    ranges: tuple[tuple[LayerIndex, LayerIndex], ...]
    weights_bytes: SizeBytes = 0
    kv_bytes: SizeBytes = 0
    """Of keys and values; this and `work_bytes` as predicted before loading."""
    work_bytes: SizeBytes = 0
    """What computing takes besides."""
    mapped_bytes: SizeBytes | UnsetType = UNSET
    """Of the weights, what is read from mapped pages of files."""
    kernels: Annotated[tuple[KernelChoice, ...], Meta(max_length=256)] = ()
    """What was measured about the products of these layers; none where nothing was to be chosen."""
    kernel_class: KernelClass | UnsetType = UNSET
    """As nodes announce it (see `swarm.ShardAnnounce`); unset: nobody's bits are known to be equal."""
    gpus: Annotated[tuple[Gpu, ...], Meta(max_length=64)] | UnsetType = UNSET
    """As they were after that; unset: there are none."""
    n_gpu_layers: Annotated[int, Meta(ge=0, le=2**20)] | UnsetType = UNSET
    """Layers on them, the output matrix counted as one; unset: none."""


class Bye(WorkerMessage, frozen=True, tag=True):
    """The last message: the worker exits with 0. Answers Shutdown, and the Unload that took the last
    range."""
