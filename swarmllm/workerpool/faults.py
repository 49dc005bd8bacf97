"""What a worker's Error message becomes in the daemon's tree of errors."""

from __future__ import annotations

from swarmllm.errors import (
    BadModel,
    ContextFull,
    GrammarTooComplex,
    InvalidRequest,
    Overloaded,
    SwarmLLMError,
    WorkerError,
)
from swarmllm_proto.ipc import Error

_MAPPED: dict[str, type[SwarmLLMError]] = {
    "context_full": ContextFull,
    "bad_model": BadModel,
    "cannot_cut": BadModel,
    "bad_template": InvalidRequest,
    "no_slot": Overloaded,
    "no_room": Overloaded,
}
"""By kind; every other kind is a WorkerError that carries it."""

_FIELDS = {"bad_template": "messages", "context_full": "messages"}
"""The field of the caller's request to blame where the worker names none."""


_SAMPLING = {
    "sampling.grammar": "grammar",
    "sampling.json_schema": "response_format",
    "sampling.logit_bias": "logit_bias",
    "sampling.repeat_penalty": "repeat_penalty",
}
"""What only the worker can check, and the field of the caller's request that it came from."""


def worker_fault(error: Error) -> SwarmLLMError:
    field = error.field or _FIELDS.get(error.kind)
    if error.kind == "too_complex":
        return GrammarTooComplex(error.message, field=_SAMPLING.get(error.field, field))
    if error.kind == "bad_message" and error.field in _SAMPLING:
        return InvalidRequest(error.message, field=_SAMPLING[error.field])
    mapped = _MAPPED.get(error.kind)
    if mapped is not None:
        return mapped(error.message, field=field)
    return WorkerError(f"{error.kind}: {error.message}", kind=error.kind, field=field)
