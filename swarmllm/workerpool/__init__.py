"""Model workers as the daemon sees them: spawn, talk to, restart, kill. libllama lives behind this wall."""

from __future__ import annotations

from swarmllm.workerpool.calls import TokenStream
from swarmllm.workerpool.pool import ForwardResult, WorkerPool, WorkerStatistics
from swarmllm.workerpool.settings import ModelFile, WorkerSettings

__all__ = ["ForwardResult", "ModelFile", "TokenStream", "WorkerPool", "WorkerSettings", "WorkerStatistics"]
