"""Every error that leaves a module of the daemon, on one page.

Foreign exceptions (trio, libp2p, msgspec, sqlite, OS) are mapped into this tree at the edge where they
arise. Local faults and faults reported by another node are different types, because they call for different
remedies. Each carries the HTTP status and the OpenAI error type it becomes.
"""

from __future__ import annotations

import re

from swarmllm_proto.identifiers import NodeId


def reason_of(error: BaseException) -> str:
    """What a foreign exception says, without the number and the path that an OSError also shows."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return re.sub(r"\[Errno -?\d+\] ?", "", str(error)) or type(error).__name__


class SwarmLLMError(Exception):
    """Base of all. `message` says what happened and, where there is one, what to do next."""

    http_status = 500
    error_type = "server_error"
    code = "internal_error"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class InvalidRequest(SwarmLLMError):
    """The caller sent something wrong; `field` names it."""

    http_status = 400
    error_type = "invalid_request_error"
    code = "invalid_value"


class ModelNotFound(InvalidRequest):
    http_status = 404
    code = "model_not_found"


class Conflict(InvalidRequest):
    """The request is well-formed but the present state forbids it (already loaded, in use ...)."""

    http_status = 409
    code = "conflict"


class ContextFull(InvalidRequest):
    """Prompt and output do not fit the model's context."""

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        n_prompt_tokens: int | None = None,
        n_ctx: int | None = None,
    ) -> None:
        """What is known of the tokens that there are, and of those that there is room for."""
        super().__init__(message, field=field)
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx


class GrammarTooComplex(InvalidRequest):
    """Following the request's grammar or JSON schema took more than a token may take."""

    code = "grammar_too_complex"


class ConfigError(SwarmLLMError):
    code = "config_error"


class BadModel(SwarmLLMError):
    """A GGUF that cannot be read, or cannot be cut where asked."""

    http_status = 422
    error_type = "invalid_request_error"
    code = "bad_model"


class Overloaded(SwarmLLMError):
    http_status = 429
    error_type = "rate_limit_error"
    code = "overloaded"

    def __init__(self, message: str, *, field: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, field=field)
        self.retry_after_s = retry_after_s


class NodeStopping(SwarmLLMError):
    """This node was told to stop: it takes no new requests, or had to end one that took too long."""

    http_status = 503
    error_type = "service_unavailable"
    code = "node_stopping"
    retry_after_s = 10.0
    """About what a restart takes."""


class StoreFull(SwarmLLMError):
    """There is no room for what was to be stored: the quota, or the disk. What is there is intact."""

    http_status = 507
    code = "store_full"


class StoreLocked(SwarmLLMError):
    """Another process holds one of this node's databases. Nothing is lost; the same call works later."""

    http_status = 503
    error_type = "service_unavailable"
    code = "store_locked"


class NoPipeline(SwarmLLMError):
    """No set of connected holders covers every layer of the model."""

    http_status = 503
    error_type = "service_unavailable"
    code = "no_pipeline"


class VisionEncoderUnavailable(SwarmLLMError):
    """There is a picture in the prompt, and nothing here that could look at it."""

    http_status = 503
    error_type = "service_unavailable"
    code = "vision_encoder_unavailable"


class WorkerError(SwarmLLMError):
    """This node's worker refused or failed one call; the worker lives on. `kind` is the worker's own word
    for it (see `swarmllm_proto.ipc.Error.kind`), empty where the fault was noticed on this side."""

    code = "worker_error"

    def __init__(self, message: str, *, kind: str = "", field: str | None = None) -> None:
        super().__init__(message, field=field)
        self.kind = kind


class WorkerDied(WorkerError):
    """This node's worker process is gone; the next request restarts it."""

    http_status = 503
    code = "worker_died"


class RemoteError(SwarmLLMError):
    """Another node reported a failure."""

    http_status = 502
    error_type = "upstream_error"
    code = "remote_error"


class NodeUnreachable(RemoteError):
    http_status = 503
    code = "node_unreachable"


class NodeRefused(RemoteError):
    """Another node takes no part in a request (it lacks the layers, or a neighbour). `unreachable`: the id of
    the neighbour that it does not reach, as it says."""

    code = "node_refused"

    def __init__(self, message: str, *, unreachable: NodeId | None = None) -> None:
        super().__init__(message)
        self.unreachable = unreachable


class NodeBusy(RemoteError):
    """Another node has as much to do as it may."""

    http_status = 429
    error_type = "rate_limit_error"
    code = "node_busy"


class StageMoved(NodeBusy):
    """A request leaves its pipeline, because a node of it is about to give up the layers. Nobody failed."""


class DeadlineExceeded(SwarmLLMError):
    http_status = 504
    error_type = "timeout"
    code = "deadline_exceeded"
