"""Model workers as the daemon sees them: spawn, talk to, restart, kill. libllama lives behind this wall."""

from __future__ import annotations

from swarmllm.workerpool.calls import TokenStream
from swarmllm.workerpool.forward_result import ForwardResult
from swarmllm.workerpool.pool import WorkerPool, WorkerStatistics
from swarmllm.workerpool.settings import AS_CONFIGURED, LoadOptions, ModelFile, WorkerSettings

__all__ = [
    "AS_CONFIGURED",
    "ForwardResult",
    "LoadOptions",
    "ModelFile",
    "TokenStream",
    "WorkerPool",
    "WorkerSettings",
    "WorkerStatistics",
]
