"""Turns an error of a stage into a message to the origin, and back."""

from __future__ import annotations

from typing import Final

from swarmllm.errors import (
    ContextFull,
    DeadlineExceeded,
    GrammarTooComplex,
    NodeBusy,
    NodeUnreachable,
    Overloaded,
    RemoteError,
    SwarmLLMError,
)
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import PipelineError

BAD_ROWS: Final = "bad_rows"
"""The node that the report names sent rows that no layer computes from what is finite."""
UNUSABLE_ROWS: Final = "unusable_rows"
"""The node that the report names sent rows that look sound, but rows before them are missing, or what layers
make of them is no number. It may have got them so itself."""
NOT_THE_REPORTERS_FAULT: Final = frozenset({NodeUnreachable.code, DeadlineExceeded.code, UNUSABLE_ROWS})
"""It waited for somebody else, or got what it cannot go on with."""
MESSAGE_MAX: Final = 2000


def report_of(request_id: str, node_id: NodeId, kind: str, text: str, position: int = 0) -> PipelineError:
    """`node_id`: where it failed, which is not always the node that says so. `position`: of rows that are
    refused, the first bad one."""
    return PipelineError(
        request_id=request_id, node_id=node_id, kind=kind, message=text[:MESSAGE_MAX], position=position
    )


def damage_report(request_id: str, node_id: NodeId, position: int) -> PipelineError:
    """A job arrived damaged at `node_id`, and is to be repeated."""
    return PipelineError(
        request_id=request_id,
        node_id=node_id,
        kind="damaged",
        message=f"a job at position {position} arrived damaged",
        damaged=True,
        position=position,
    )


def is_of_grammar(message: PipelineError, sampling: Sampling) -> bool:
    """Whether it blames what the client's grammar or JSON schema takes at some token, which is no node's
    fault. (That one does not compile is the stage's fault: it has compiled here.)"""
    return bool(sampling.grammar or sampling.json_schema) and message.kind == GrammarTooComplex.code


def is_the_reporters_fault(message: PipelineError, sampling: Sampling) -> bool:
    return message.kind not in NOT_THE_REPORTERS_FAULT and not is_of_grammar(message, sampling)


def reported_error(message: PipelineError, name: str, sampling: Sampling) -> SwarmLLMError:
    """What a report of the node called `name` is to the client."""
    text = "".join(character if character.isprintable() else " " for character in message.message)
    if is_of_grammar(message, sampling):
        return GrammarTooComplex(text, field="grammar" if sampling.grammar else "response_format")
    text, kind = f"node {name}: {text or message.kind}", message.kind
    if kind == ContextFull.code:
        return ContextFull(text)
    if kind == NodeUnreachable.code:
        return NodeUnreachable(text)
    if kind == DeadlineExceeded.code:
        return DeadlineExceeded(text)
    if kind in (NodeBusy.code, Overloaded.code):
        return NodeBusy(text)
    return RemoteError(text)
