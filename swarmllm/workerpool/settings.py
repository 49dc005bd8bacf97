"""Settings of the pool: how workers run, and which file a model is."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from swarmllm.errors import InvalidRequest
from swarmllm.models import CatalogueEntry
from swarmllm.models.manifest import checked_unit
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import FlashAttention, GpuLayers, KernelMode, KvType
from swarmllm_proto.segment_names import FOLDER

ContextCells = Annotated[int, Meta(ge=16, le=2**24)]
Threads = Annotated[int, Meta(ge=1, le=1024)]


@dataclass(frozen=True, slots=True)
class ModelFile:
    """The facts about a model that a worker needs."""

    model_id: ModelId
    path: Path
    """Absolute; opened by the worker, never by the pool."""
    checked_unit: int = 0
    """What a self-check found (`manifest.checked_unit`); 0: nothing."""

    @classmethod
    def of(cls, entry: CatalogueEntry) -> ModelFile:
        return cls(entry.model_id, entry.path, checked_unit(entry.manifest))


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The memory that the loaded layers of a model take; all but the weights is predicted."""

    weights_bytes: int = 0
    kv_bytes: int = 0
    work_bytes: int = 0
    mapped_bytes: int = 0
    """Of the weights, what is read from mapped pages of files: the system counts these as available."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Settings that one model may have of its own. None: as configured."""

    n_ctx: ContextCells | None = None
    n_threads: Threads | None = None
    n_gpu_layers: GpuLayers | None = None
    kv_type: KvType | None = None
    flash_attention: FlashAttention | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None

    @classmethod
    def of(cls, settings: WorkerSettings) -> LoadOptions:
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    def applied_to(self, settings: WorkerSettings) -> WorkerSettings:
        """Raises InvalidRequest where they cannot be met together."""
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        applied = replace(settings, **{name: value for name, value in chosen.items() if value is not None})
        if applied.kv_type != "f16" and applied.flash_attention == "off":
            raise InvalidRequest(
                f"keys and values as {applied.kv_type} need flash attention (flash_attention on or auto)",
                field="kv_type",
            )
        return applied


AS_CONFIGURED = LoadOptions()


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    cache_dir: Path
    """Folder in which workers keep segment files of users' models."""
    store_dir: Path | None = None
    """Folder of the store: layers of models in it move to segment files beside them."""
    n_ctx: int = 4096
    """KV cells of one model, shared by its slots."""
    n_slots: int = 8
    n_threads: int = 1
    log_level: str = "warning"
    """Of what workers write to the log: debug, info, warning or error."""
    use_mmap: bool = True
    n_gpu_layers: GpuLayers = 0
    continuous_batching: bool = True
    prefill_chunk_tokens: int = 128
    """Rows of one prompt in one batch."""
    n_prefixes: int = 16
    """Finished requests whose KV a worker keeps for prompts that begin alike."""
    prefix_max_bytes: int = 2**31
    """Host memory for kept KV whose cells others needed."""
    prefix_min_tokens: int = 32
    """Fewer rows are not worth sharing."""
    prefix_ttl_s: float = 600.0
    """How long KV is kept that nobody asks for."""
    session_ttl_s: float = 600.0
    """The same for that of sessions."""
    tell_prefixes: bool = False
    """Workers say what they keep, for other nodes to know (`kept_prefixes`)."""
    prefix_key: str = field(default="", repr=False)
    """What its names are keyed with; "": nothing."""
    journal_max_bytes: int = 2**28
    """Host memory for rows that running requests have sent on to the next stage."""
    max_model_bytes: int = 0
    """What the layers of one model may take by prediction; 0: what the machine has left."""
    kv_type: KvType = "f16"
    flash_attention: FlashAttention = "auto"
    kernels: KernelMode = "auto"
    check_cuts: bool = True
    """Whether cuts are tried that the table of architectures allows."""
    kernel_timings: Path | None = None
    """File in which workers keep what they measured of this machine; None: nowhere."""
    use_mlock: bool = False
    ngram_max_size: int = 4
    """Longest run of tokens that is looked up in the text so far, to guess what follows it; 0: none is."""
    ngram_num_pred_tokens: int = 10
    uses_draft_model: bool = False
    draft_model: Path | None = None
    """What guesses then; None: the file beside each model that is called like it with `-draft` behind."""
    speculative_gamma: int = 4
    swift_gamma: int = 0
    """Guesses per step that a model makes with a part of its layers; 0: none, and it is loaded in one
    piece."""
    swift_skip_ratio: float = 0.45
    start_timeout_s: float = 60.0
    """From spawning a worker until it says Ready: Python's start, and libllama's load from a cold disk."""
    load_timeout_s: float = 600.0
    """Longest silence of a worker that opens a model or loads layers; each sign of progress starts it
    anew."""
    call_timeout_s: float = 120.0
    """Longest wait for the answer to any other call; a worker that was silent all that time is killed."""
    cancel_timeout_s: float = 5.0
    """How long a request that leaves a generation early waits until its slot is free (it is freed later
    anyway)."""
    stop_timeout_s: float = 2.0
    """Between asking a worker to leave and killing it."""
    idle_timeout_s: float = 600.0
    """A worker without layers (it only tokenized or embedded) leaves after this time without a call."""

    def owns(self, model: ModelFile) -> bool:
        return self.store_dir is not None and self.store_dir in model.path.parents

    def segments_of(self, model: ModelFile) -> Path:
        """The folder for the segment files of a model."""
        return model.path.parent / FOLDER if self.owns(model) else self.cache_dir

    def draft_of(self, model: ModelFile) -> str:
        """The path of the draft model for a model, "" where there is none."""
        if not self.uses_draft_model:
            return ""
        if self.draft_model is not None:
            return str(self.draft_model)
        beside = model.path.with_name(f"{model.path.stem}-draft{model.path.suffix}")
        return str(beside) if beside.is_file() else ""
