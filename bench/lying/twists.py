"""What a lying stage makes of a job, where random messages would hardly hit on it.

A twist takes the job and its assignment, and gives what is sent instead of what an honest stage sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
import numpy as np

from bench.lying.untruths import (
    World,
)
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.swarm import (
    CancelInference,
    JobMessage,
    LayerForward,
    PipelineAssignment,
    PipelineError,
    PrefillProgress,
    RemoteGenerateRequest,
    StageTiming,
    StreamingToken,
)
from swarmllm_proto.tensors import decode_tensor, encode_tensor

Sent = Iterable[tuple[str, JobMessage, bytes]]
Twist = Callable[[World, PipelineAssignment, LayerForward | RemoteGenerateRequest, bytes], Sent]


def _onward(
    world: World,
    assignment: PipelineAssignment,
    job: LayerForward | RemoteGenerateRequest,
    payload: bytes,
    **changes: Any,
) -> list[tuple[str, JobMessage, bytes]]:
    """As an honest stage would, but that nothing is computed: rows go on as they came, tokens are sampled
    from nothing. `changes`: fields of what is sent on."""
    rows = changes.pop("rows", None)
    stage = job.stage if isinstance(job, LayerForward) else 0
    if isinstance(job, LayerForward) and stage < len(assignment.stages) - 1:
        body = payload if rows is None else _rows(rows)
        if job.step == "embed":
            body = _rows(np.zeros((1, world.n_embd), np.float32)) if rows is None else body
        message: JobMessage = msgspec.structs.replace(
            job,
            step="layer",
            stage=stage + 1,
            timings=(*job.timings, StageTiming(stage, 0.0, 0.0)),
            **changes,
        )
        return [(assignment.stages[stage + 1].node_id, message, body)]
    if isinstance(job, LayerForward) and job.prefill_left:
        return [
            (
                assignment.origin,
                PrefillProgress(request_id=job.request_id, position=job.position + job.n_tokens),
                b"",
            )
        ]
    n_prompt = assignment.n_prompt_tokens
    index = 0 if isinstance(job, RemoteGenerateRequest) else max(0, job.position + job.n_tokens - n_prompt)
    ends = index + 1 >= assignment.sampling.max_tokens
    token = StreamingToken(
        request_id=job.request_id,
        index=changes.pop("index", index),
        token=changes.pop("token", 7),
        finish_reason=changes.pop("finish_reason", "length" if ends else None),
    )
    sent: list[tuple[str, JobMessage, bytes]] = [(assignment.origin, token, b"lie ")]
    if not ends and isinstance(job, LayerForward):
        back = LayerForward(
            request_id=job.request_id,
            step="embed",
            stage=0,
            position=job.position + job.n_tokens,
            n_tokens=1,
            token=7,
        )
        sent.append((assignment.stages[0].node_id, back, b""))
    return sent


def _rows(values: Any) -> bytes:
    return b"".join(bytes(piece) for piece in encode_tensor(np.ascontiguousarray(values)))


def _shaped(payload: bytes, world: World, job: LayerForward | RemoteGenerateRequest) -> Any:
    try:
        return np.array(decode_tensor(payload), np.float32)
    except ProtocolError:
        return np.zeros((job.n_tokens, world.n_embd), np.float32)


def _nan(world: World, assignment: PipelineAssignment, job: Any, payload: bytes) -> Sent:
    rows = _shaped(payload, world, job)
    rows[..., :1] = np.nan
    return _onward(world, assignment, job, payload, rows=rows)


def _wrong_width(world: World, assignment: PipelineAssignment, job: Any, payload: bytes) -> Sent:
    return _onward(
        world, assignment, job, payload, rows=np.zeros((job.n_tokens, world.n_embd + 1), np.float32)
    )


def _huge(world: World, assignment: PipelineAssignment, job: Any, payload: bytes) -> Sent:
    return _onward(
        world, assignment, job, payload, rows=np.full((job.n_tokens, world.n_embd), 1e30, np.float32)
    )


def _more_rows(world: World, assignment: PipelineAssignment, job: Any, payload: bytes) -> Sent:
    rows = np.zeros((job.n_tokens + 3, world.n_embd), np.float32)
    return _onward(world, assignment, job, payload, rows=rows, n_tokens=job.n_tokens + 3)


def _twice(world: World, assignment: PipelineAssignment, job: Any, payload: bytes) -> Sent:
    return _onward(world, assignment, job, payload) * 2


def _often(world: World, assignment: PipelineAssignment, job: Any, payload: bytes) -> Sent:
    return _onward(world, assignment, job, payload) * 40


def _elsewhere(world: World, assignment: PipelineAssignment, job: Any, payload: bytes) -> Sent:
    return [
        (to, message, body)
        for _, message, body in _onward(world, assignment, job, payload)
        for to in world.honest_ids
    ]


def _later_position(world: World, assignment: PipelineAssignment, job: Any, payload: bytes) -> Sent:
    if not isinstance(job, LayerForward):
        return _onward(world, assignment, job, payload, index=3)
    moved = msgspec.structs.replace(job, position=job.position + 5)
    return _onward(world, assignment, moved, payload)


def _token_beyond(world: World, assignment: PipelineAssignment, job: Any, payload: bytes) -> Sent:
    return [
        (
            to,
            msgspec.structs.replace(message, token=2**31 - 1) if hasattr(message, "token") else message,
            body,
        )
        for to, message, body in _onward(world, assignment, job, payload)
    ]


def _skips(world: World, assignment: PipelineAssignment, job: Any, payload: bytes) -> Sent:
    sent = _onward(world, assignment, job, payload)
    more = [
        (to, msgspec.structs.replace(message, index=message.index + ahead), body)
        for to, message, body in sent
        if isinstance(message, StreamingToken)
        for ahead in (1, 2, 5)
    ]
    return [*more, *sent]


def _ends_early(world: World, assignment: PipelineAssignment, job: Any, payload: bytes) -> Sent:
    return [
        (to, msgspec.structs.replace(message, finish_reason="stop", stopped_by=15), body)
        if isinstance(message, StreamingToken)
        else (to, message, body)
        for to, message, body in _onward(world, assignment, job, payload)
    ]


def _blames(world: World, assignment: PipelineAssignment, job: Any, payload: bytes) -> Sent:
    return [
        (
            assignment.origin,
            PipelineError(request_id=job.request_id, node_id=node_id, kind=kind, message="it was them"),
            b"",
        )
        for node_id in world.honest_ids
        for kind in ("node_unreachable", "worker_error")
    ]


def _damaged(world: World, assignment: PipelineAssignment, job: Any, payload: bytes) -> Sent:
    position = job.position if isinstance(job, LayerForward) else 0
    error = PipelineError(
        request_id=job.request_id, node_id=world.own_id, kind="damaged", damaged=True, position=position
    )
    return [(assignment.origin, error, b"")] * 2


def _cancels(world: World, assignment: PipelineAssignment, job: Any, payload: bytes) -> Sent:
    cancel = CancelInference(request_id=job.request_id, reason="for you")
    return [(node_id, cancel, b"") for node_id in world.honest_ids]


def _progress_forever(world: World, assignment: PipelineAssignment, job: Any, payload: bytes) -> Sent:
    return [(assignment.origin, PrefillProgress(request_id=job.request_id, position=1), b"")] * 20


def _beyond_progress(world: World, assignment: PipelineAssignment, job: Any, payload: bytes) -> Sent:
    return [(assignment.origin, PrefillProgress(request_id=job.request_id, position=2**31 - 1), b"")]


TWISTS: Final[dict[str, Twist]] = {
    "passes on what it got": _onward,
    "not a number": _nan,
    "wrong width": _wrong_width,
    "1e30": _huge,
    "more rows": _more_rows,
    "twice": _twice,
    "forty times": _often,
    "to everybody": _elsewhere,
    "a later position": _later_position,
    "a token that is none": _token_beyond,
    "tokens ahead": _skips,
    "ends early": _ends_early,
    "blames others": _blames,
    "reports damage": _damaged,
    "cancels": _cancels,
    "progress without end": _progress_forever,
    "progress beyond the prompt": _beyond_progress,
    "nothing": lambda world, assignment, job, payload: (),
}
