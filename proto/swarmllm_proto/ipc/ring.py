"""Messages about links, and about the jobs that travel by them (see `ipc`)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc.base import (
    DaemonMessage,
    LayerIndex,
    Owner,
    RequestId,
    RowFormat,
    Sampling,
    Seconds,
    StageIndex,
    TokenCount,
    WorkerMessage,
    require_layer_range,
)
from swarmllm_proto.picture_runs import PictureRuns


class TakeLink(DaemonMessage, frozen=True, tag=True):
    """A connected TCP socket comes with the first byte of this message (SCM_RIGHTS); its handshake is done.
    Payload: the 32 bytes of the one key that this end needs, then its next nonce as u64, little-endian.
    Answered by Done; a link with the same peer in the same direction is closed for it."""

    peer: NodeId
    direction: Literal["sending", "receiving"]


class CloseLinks(DaemonMessage, frozen=True, tag=True):
    """Close the links with a peer, in both directions. Answered by Done."""

    peer: NodeId


class TakeSeat(DaemonMessage, frozen=True, tag=True):
    """This worker runs layers [start, end) as one stage of a request, and may take its decode jobs from a
    link with `before` and pass them on by a link with `after`, until the request is cancelled or released.
    Answered by Done."""

    request_id: RequestId
    stage: StageIndex
    start: LayerIndex
    end: LayerIndex
    before: NodeId
    after: NodeId
    origin: NodeId
    """Who is told of tokens."""
    n_prompt_tokens: TokenCount
    sampling: Sampling | None = None
    """Of the last stage, which samples; null everywhere else."""
    row_format: RowFormat = "f32"
    """How its rows go to the next stage; with "q8_0" they are rounded before they go or are kept."""
    exact_rows: TokenCount = 0
    """As in Forward."""
    picture_runs: PictureRuns = ()
    """As in Forward."""
    owner: Owner | UnsetType = UNSET
    ring: Annotated[str, Meta(min_length=1, max_length=64)] | UnsetType = UNSET
    """Equal for requests with the same stages on the same nodes: what jobs of one say of the stages before
    holds for the next one. Unset: nothing is remembered."""

    def __post_init__(self) -> None:
        require_layer_range(self.start, self.end)


class TakePrompt(DaemonMessage, frozen=True, tag=True):
    """The prompt of a request whose last layers run here, to guess from what follows. Payload: i32
    [n_prompt_tokens]. Answered by Done; of no use without a seat."""

    request_id: RequestId
    stage: StageIndex
    begins: bool | UnsetType = UNSET
    """No token has been generated, so the answer that the prompt had before may leave at once."""


class Arrived(WorkerMessage, frozen=True, tag=True):
    """A job message came by a link that this worker does not handle itself (id 0). Payload: its frame."""

    sender: NodeId


class Relay(WorkerMessage, frozen=True, tag=True):
    """A job message is to be sent over the data plane, because no link leads there (id 0). Payload: its
    frame."""

    request_id: RequestId
    receiver: NodeId


class Turned(WorkerMessage, frozen=True, tag=True):
    """A sign of life of a request whose jobs come by links (id 0): what its seat did since the last sign. At
    most one per second and seat; the last one says how things stand."""

    request_id: RequestId
    stage: StageIndex
    n_jobs: TokenCount
    """Finished."""
    compute_s: Seconds
    """Of those with one row."""
    running: bool
    """Another one is here and not finished."""
    n_windows: TokenCount | UnsetType = UNSET
    """Of the jobs, those with several rows: a token and guesses."""
    n_window_rows: TokenCount | UnsetType = UNSET
    """Of all of these, also of guesses that were wrong."""
    n_numbered: TokenCount | UnsetType = UNSET
    """Of the jobs, those beside which others were under way: all of their rows may have been refused."""


class LinkLost(WorkerMessage, frozen=True, tag=True):
    """A link has ended (id 0). What may not have arrived has been handed over in Relays before."""

    peer: NodeId
    direction: Literal["sending", "receiving"]
    reason: str = ""
