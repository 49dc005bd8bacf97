"""What the pool needs to know: how workers run, and which file a model is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model as far as a worker is concerned."""

    model_id: str
    path: Path
    """Absolute; opened by the worker, never by the pool."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    cache_dir: Path
    """Folder in which workers keep segment files."""
    n_ctx: int = 4096
    """KV cells of one model, shared by its slots."""
    n_slots: int = 8
    n_threads: int = 1
    use_mmap: bool = True
    n_gpu_layers: int = 0
    continuous_batching: bool = True
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
    start_timeout_s: float = 60.0
    """From spawning a worker until it says Ready: Python's start, and libllama's load from a cold disk."""
    load_timeout_s: float = 600.0
    """Longest silence of a worker that opens a model or loads layers; each sign of progress starts it
    anew."""
    call_timeout_s: float = 120.0
    """Longest wait for the answer to any other call; a worker that was silent all that time is killed."""
    cancel_timeout_s: float = 5.0
    """How long whoever leaves a generation early waits until its slot is free (it is freed later anyway)."""
    stop_timeout_s: float = 2.0
    """Between asking a worker to leave and killing it."""
    idle_timeout_s: float = 600.0
    """A worker without layers (it only tokenized or embedded) leaves after this time without a call."""
