"""A job: the state of one walk of one request; and the view of a request that a node needs to decide its next
step.

A walk carries one batch of rows (a chunk of the prompt, or one token) through the stages; on the wire it is a
`LayerForward`. Two steps of the Language Pipes seed are never where a job rests, because the engine fuses
them: NORM happens inside the same libllama graph as the last layer and HEAD, and TOKENIZE is over before
there is a job, since the stages are told the number of prompt tokens in their assignment. They are named all
the same, because they happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from msgspec import UNSET, UnsetType

from swarmllm.models.layers import LayerRange
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import FinishReason, Scores, Token
from swarmllm_proto.swarm import LayerForward, Stage, StageTiming, StreamingToken
from swarmllm_proto.tensors import Tensor


class ComputeStep(Enum):
    """What is to be computed next."""

    TOKENIZE = "tokenize"
    EMBED = "embed"
    LAYER = "layer"
    NORM = "norm"
    HEAD = "head"


@dataclass(slots=True)
class Job:
    """Mutable, because one object goes through all states of one walk; owned by one task."""

    step: ComputeStep
    stage: int = 0
    """Index of the stage that computes next."""
    position: int = 0
    """Absolute position of the first row."""
    n_tokens: int = 0
    prefill_left: int = 0
    """Prompt tokens after this chunk; 0: the head samples from the last row."""
    token: int | None = None
    """The sampled token that is to be embedded; None: rows of the prompt."""
    guesses: tuple[int, ...] = ()
    """Of the last stage, to be embedded behind `token`."""
    tensor: Tensor | None = None
    """f32 [n_tokens, n_embd], or i32 [n_tokens] where the first stage's worker embeds; None until EMBED."""
    timings: tuple[StageTiming, ...] = ()
    sender: NodeId | None = None
    """The node that it came from; None: it began here."""
    since_s: float = 0.0
    """When the present stage got it (the node's own clock)."""
    sampled: Token | None = None
    """What the head sampled from the last row, and the bytes to show for it; set by the last stage's
    forward."""
    piece: bytes = b""
    scores: Scores = ()
    """Of its rows, where the request wants those; set by the last stage's forward."""
    resent: bool = False
    """A link broke behind it: it may have been here before."""
    number: int | UnsetType = UNSET
    """As in `LayerForward`: others of the request may be under way beside it."""
    fresh: int | UnsetType = UNSET
    until: int | None = None
    """The last stage that computes its rows; None: the pipeline's last. Only of rows that are no token's:
    they build stages of a broken pipeline again."""
    finish_reason: FinishReason | None = None
    """Set by HEAD with the last token."""
    is_passed_on: bool = False
    """The token that has just been sampled is on its way to the first stage, and to the origin if that is
    there."""
    unreported: tuple[StreamingToken, bytes] | None = None
    """The same token for the origin, which is told once the job has left."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """What one node knows of one request: enough to decide, nothing to compute with."""

    node_id: NodeId
    origin: NodeId
    stages: Sequence[Stage]
    prompt_here: bool
    """This node is the origin and holds the prompt."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a pipeline has at least one stage")

    @property
    def node_ids(self) -> frozenset[NodeId]:
        """The origin's and every stage's."""
        return frozenset({self.origin, *(stage.node_id for stage in self.stages)})

    @property
    def last(self) -> int:
        return len(self.stages) - 1

    @property
    def runs_layers(self) -> bool:
        """Whether any stage is here."""
        return any(stage.node_id == self.node_id for stage in self.stages)

    @property
    def first_here(self) -> int | None:
        """The first stage that is here."""
        here = (index for index, stage in enumerate(self.stages) if stage.node_id == self.node_id)
        return next(here, None)

    def is_here(self, stage: int) -> bool:
        return self.stages[stage].node_id == self.node_id

    def senders(self, message: LayerForward) -> tuple[str, ...]:
        """Who may send it."""
        if message.step == "embed":
            return (self.stages[-1].node_id, self.origin) if message.stage == 0 else ()
        return (self.origin,) if message.stage == 0 else (self.stages[message.stage - 1].node_id,)

    def hands_to(self, node_id: NodeId, receiver: NodeId) -> bool:
        """Whether jobs go from one node to the other in this request."""
        ring = [self.stages[-1].node_id, *(stage.node_id for stage in self.stages)]
        ways = {*pairwise(ring), (self.origin, ring[1])}
        return (node_id, receiver) in ways

    def layers(self, stage: int) -> LayerRange:
        return LayerRange(self.stages[stage].start, self.stages[stage].end)
