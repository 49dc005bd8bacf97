"""What a worker's Error message becomes in the daemon's tree of errors."""

from __future__ import annotations

from swarmllm.errors import BadModel, ContextFull, InvalidRequest, Overloaded, SwarmLLMError, WorkerError
from swarmllm_proto.ipc import Error

_MAPPED: dict[str, type[SwarmLLMError]] = {
    "context_full": ContextFull,
    "bad_model": BadModel,
    "cannot_cut": BadModel,
    "bad_template": InvalidRequest,
    "no_slot": Overloaded,
}
"""By kind; every other kind is a WorkerError that carries it."""

_FIELDS = {"bad_template": "messages", "context_full": "messages"}
"""The field of the caller's request to blame where the worker names none."""


def worker_fault(error: Error) -> SwarmLLMError:
    field = error.field or _FIELDS.get(error.kind)
    mapped = _MAPPED.get(error.kind)
    if mapped is not None:
        return mapped(error.message, field=field)
    return WorkerError(f"{error.kind}: {error.message}", kind=error.kind, field=field)
