"""Describes one request on a node that takes part in it, and makes request ids.

A request has one id from the HTTP header `x-request-id` to the log line of the last worker. A client's
request keeps its id on every node. Further attempts at it, and further answers to one prompt, get ids that
begin with it: `req_2f6c...` and `req_2f6c....9d41c0aa`. Their ends are random, so that a member that has seen
the first cannot take the next one's place on another node.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from swarmllm.models.entry import CatalogueEntry
from swarmllm.pipeline.job import RequestView
from swarmllm.pipeline.origin.output import Chunk
from swarmllm.pipeline.origin.pictures import PictureRows
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.ipc.base import RowFormat
from swarmllm_proto.limits import EXACT_ROWS
from swarmllm_proto.picture_runs import PictureRun, has_grid
from swarmllm_proto.swarm import (
    PipelineAssignment,
    PipelineError,
    PrefillProgress,
    StageBlocks,
    StreamingToken,
)
from swarmllm_proto.tensors import BLOCK_BYTES, BLOCK_VALUES, Tensor

OriginMessage = StreamingToken | PrefillProgress | PipelineError
PREFIX: Final = "req_"
_SEPARATOR: Final = "."


def exact_chunk_tokens(chunk_tokens: int) -> int:
    """Of an exact request, in the place of `chunk_tokens`: no piece of its prompt lies in two chunks."""
    return max(EXACT_ROWS, chunk_tokens - chunk_tokens % EXACT_ROWS)


def new_request_id() -> str:
    """28 characters, 96 random bits."""
    return PREFIX + secrets.token_hex(12)


def further_id(request_id: str) -> str:
    """Of one more attempt at the same request, or of one more answer to it."""
    return first_id(request_id) + _SEPARATOR + secrets.token_hex(4)


def first_id(request_id: str) -> str:
    """The id that the client saw."""
    return request_id.partition(_SEPARATOR)[0]


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The constant facts of a request on a node that takes part in it."""

    request_id: str
    model: ModelFile
    n_embd: int
    n_vocab: int
    n_prompt_tokens: int
    sampling: Sampling
    view: RequestView
    wants: Literal["tokens", "normed"] = "tokens"
    scored: tuple[int, ...] = ()
    """With "normed": after each row, the token whose likelihood is reported; known to the origin and to the
    node of the last stage."""
    generated: tuple[int, ...] = ()
    """Tokens of the broken pipeline that this one replaces; known to the origin and to the node of the last
    stage."""
    conversation: str = ""
    """Its name as the client gave it; known at the origin only."""
    row_formats: tuple[RowFormat, ...] = ()
    """How rows come to each stage; empty: all as f32."""
    n_generated: int = 0
    """Of an exact request: how many of `n_prompt_tokens` are no prompt, where nobody said which."""
    kernel_class: str = ""
    """Of an exact request, known at the origin only: what each stage said when it accepted it."""
    picture_runs: tuple[PictureRun, ...] = ()
    """Rows of the prompt that stand on a grid or see each other."""
    n_embd_input: int = 0
    """Width of a picture's rows at layer 0, where they have further parts; 0: `n_embd`."""
    owner: str = ""
    """Who shares the time of this node's workers as one: the origin, or all that have earned no trust; "":
    this node's own users."""

    @property
    def n_given_tokens(self) -> int:
        """Rows that come in chunks, before the first token is sampled here. (A stage that is not told what
        was generated before has it counted as prompt.)"""
        return self.n_prompt_tokens + len(self.generated)

    @property
    def exact_rows(self) -> int:
        """Rows that an exact request has at most; 0: it is none."""
        return self.n_prompt_tokens + self.sampling.max_tokens if self.sampling.exact else 0

    @property
    def n_prompt_rows(self) -> int:
        """Rows of the prompt. Of an exact request, only these are computed several at a time."""
        return self.n_prompt_tokens - self.n_generated

    def width(self, stage: int, position: int, n_rows: int) -> int:
        """Values in each row from `position` on, as the rows come to a stage."""
        if stage == 0 and self.n_embd_input and has_grid(self.picture_runs, position, n_rows):
            return self.n_embd_input
        return self.n_embd

    def row_format(self, stage: int) -> RowFormat:
        """The format of the rows that come to a stage."""
        return self.row_formats[stage] if stage < len(self.row_formats) else "f32"

    def row_bytes(self) -> list[int | None]:
        """Bytes of a row from each stage to the next; None after the last stage, and where the size depends
        on the values."""
        sizes = {"f32": 4 * self.n_embd, "q8_0": self.n_embd // BLOCK_VALUES * BLOCK_BYTES}
        following = range(1, len(self.view.stages))
        return [*(sizes.get(self.row_format(stage)) for stage in following), None]

    def rounds(self, stage: int) -> bool:
        """Whether a stage rounds the rows that it sends on."""
        return self.row_format(stage + 1) == "q8_0"


def request_context(assignment: PipelineAssignment, entry: CatalogueEntry, node_id: NodeId) -> RequestContext:
    return RequestContext(
        request_id=assignment.request_id,
        model=ModelFile.of(entry),
        n_embd=entry.manifest.n_embd,
        n_vocab=entry.manifest.n_vocab,
        n_prompt_tokens=assignment.n_prompt_tokens,
        sampling=assignment.sampling,
        generated=assignment.generated,
        wants=assignment.wants,
        scored=assignment.scored or (),
        row_formats=assignment.row_formats or (),
        n_generated=assignment.n_generated or 0,
        picture_runs=assignment.picture_runs or (),
        n_embd_input=entry.manifest.n_embd_input,
        view=RequestView(
            node_id=node_id,
            origin=assignment.origin,
            stages=assignment.stages,
            prompt_here=assignment.origin == node_id,
        ),
    )


class OriginSide(Protocol):
    """The client's side of the request, on the node that the client asked."""

    @property
    def prompt(self) -> Tensor:
        """i32 [n_prompt_tokens + what had been generated before]."""
        ...

    @property
    def pictures(self) -> PictureRows | None:
        """The rows of the prompt that are not tokens."""
        ...

    def next_chunk(self) -> Chunk | None:
        """The rows that leave next, if any may leave now."""
        ...

    def receive(self, sender: NodeId, message: OriginMessage, payload: bytes | memoryview) -> None:
        """Never waits, never raises."""
        ...

    def lost(self, node_id: NodeId) -> None:
        """A stage's node cannot be reached any more."""
        ...

    def blame(self, node_id: NodeId) -> None:
        """It failed because of this node."""
        ...

    def fail(self, error: Exception) -> None: ...

    @property
    def may_be_resumed(self) -> bool:
        """It broke, and another pipeline may go on with what this one has."""
        ...

    @property
    def has_begun(self) -> bool:
        """Whether this pipeline has given a token."""
        ...

    def prefixes_of(self, node_id: NodeId) -> tuple[StageBlocks, ...]:
        """Names of all that the node's stages have been sent."""
        ...

    @property
    def n_rows(self) -> int:
        """How many rows of the request every stage has computed: the prompt's, and one for each token but the
        newest. 0 before the first token."""
        ...
