"""What the pool knows about its workers, for people and dashboards."""

from __future__ import annotations

from dataclasses import dataclass

from swarmllm.models.layers import LayerRange
from swarmllm.workerpool.hosted import HostedModel
from swarmllm_proto.identifiers import ModelId
from swarmllm_proto.ipc import KernelChoice


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """One model's worker at one moment."""

    model_id: ModelId
    pid: int | None
    """None where no worker is up."""
    loaded: tuple[LayerRange, ...]
    weights_bytes: int
    n_pending: int
    n_calls: int
    """Of the present process, like the byte counts."""
    bytes_sent: int
    bytes_received: int
    n_starts: int
    last_end: str
    """How the previous process ended."""
    kernels: tuple[KernelChoice, ...] = ()
    """What it measured of its matrix products."""


def statistics_of(hosted: HostedModel) -> WorkerStatistics:
    worker = hosted.worker
    return WorkerStatistics(
        model_id=hosted.model.model_id,
        pid=worker.pid if worker else None,
        loaded=hosted.wanted,
        weights_bytes=hosted.memory.weights_bytes,
        n_pending=worker.n_pending if worker else 0,
        n_calls=worker.n_calls if worker else 0,
        bytes_sent=worker.bytes_sent if worker else 0,
        bytes_received=worker.bytes_received if worker else 0,
        n_starts=hosted.n_starts,
        last_end=hosted.last_end,
        kernels=hosted.kernels,
    )
