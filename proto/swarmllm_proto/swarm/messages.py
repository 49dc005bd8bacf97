"""Messages between nodes, as msgpack with a `type` tag (see wire.md).

Three ways to travel: a *record* is what a node says about itself and everybody may read (gossip); a *request*
has a response; a *job message* is the header of one frame on the persistent stream between two neighbours,
with the tensor in the frame's payload. A job never carries the prompt: the origin embeds it, and stages see
hidden states.

The parts of a record are `gc=False`: a node keeps hundreds of thousands of them, none can be part of a cycle,
and a collection that visits each stops everything else.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from swarmllm_proto.ipc.kv import BlockCount
from swarmllm_proto.ipc.messages import (
    Fingerprint,
    FinishReason,
    GeneratedTokens,
    JobNumber,
    KernelClass,
    LayerIndex,
    Logprobs,
    Position,
    RequestId,
    RowFormat,
    Sampling,
    Seconds,
    StopIndex,
    TokenCount,
    TokenId,
    require_job_number,
    require_layer_range,
)
from swarmllm_proto.ipc.messages import StageTiming as StageTiming
from swarmllm_proto.limits import GUESSES_MAX
from swarmllm_proto.picture_runs import PictureRun as PictureRun
from swarmllm_proto.picture_runs import PictureRuns, require_order
from swarmllm_proto.row_commitments import RowsCommitment as RowsCommitment
from swarmllm_proto.swarm.base import DIGEST_SIZE as DIGEST_SIZE
from swarmllm_proto.swarm.base import NAMES_MAX as NAMES_MAX
from swarmllm_proto.swarm.base import PREFIX_MODELS_MAX
from swarmllm_proto.swarm.base import TELL_PROMPT_TOKENS_MAX as TELL_PROMPT_TOKENS_MAX
from swarmllm_proto.swarm.base import WIRE_VERSION as WIRE_VERSION
from swarmllm_proto.swarm.base import Count as Count
from swarmllm_proto.swarm.base import Digest as Digest
from swarmllm_proto.swarm.base import FetchRows as FetchRows
from swarmllm_proto.swarm.base import KeptPrefix as KeptPrefix
from swarmllm_proto.swarm.base import ModelId as ModelId
from swarmllm_proto.swarm.base import NodeId as NodeId
from swarmllm_proto.swarm.base import PrefixCacheAnnounce as PrefixCacheAnnounce
from swarmllm_proto.swarm.base import PrefixKv as PrefixKv
from swarmllm_proto.swarm.base import PrefixKvFetch as PrefixKvFetch
from swarmllm_proto.swarm.base import ReplayRows as ReplayRows
from swarmllm_proto.swarm.base import RowsPiece as RowsPiece
from swarmllm_proto.swarm.base import ShortText as ShortText
from swarmllm_proto.swarm.base import StageBlocks as StageBlocks
from swarmllm_proto.swarm.base import StageRows as StageRows
from swarmllm_proto.swarm.base import TellPrompt as TellPrompt
from swarmllm_proto.swarm.base import TensorName as TensorName
from swarmllm_proto.swarm.sharing import FILE_PARTS_MAX as FILE_PARTS_MAX
from swarmllm_proto.swarm.sharing import FetchedFile as FetchedFile
from swarmllm_proto.swarm.sharing import FilePart as FilePart
from swarmllm_proto.swarm.sharing import SharedFile as SharedFile
from swarmllm_proto.swarm.sharing import SharedModel as SharedModel
from swarmllm_proto.swarm.transfer import FetchPiece as FetchPiece
from swarmllm_proto.swarm.transfer import Outline as Outline
from swarmllm_proto.swarm.transfer import Piece as Piece
from swarmllm_proto.swarm.vision import RECORD_PROJECTORS_MAX
from swarmllm_proto.swarm.vision import ProjectorAnnounce as ProjectorAnnounce
from swarmllm_proto.swarm.vision import VisionEncodeRequest as VisionEncodeRequest
from swarmllm_proto.swarm.vision import VisionEncodeResponse as VisionEncodeResponse

RUNNING_MAX: Final = 65_535
RECORD_MODELS_MAX: Final = 256
MODEL_RANGES_MAX: Final = 64
"""In one list of a record."""
RECORD_RANGES_MAX: Final = 2048
"""In all lists of a record: its readers decode and index it in one step of their event loop."""

HeldRanges = Annotated[tuple[tuple[LayerIndex, LayerIndex], ...], Meta(max_length=MODEL_RANGES_MAX)]
"""[start, end) of layers."""


class ShardAnnounce(msgspec.Struct, frozen=True, tag=True, kw_only=True, gc=False):
    """One model of which a node holds layers, ready to run."""

    model_id: ModelId
    name: ShortText
    n_layers: LayerIndex
    ranges: HeldRanges
    loading: HeldRanges = ()
    """What it is about to hold: nobody else need begin with it."""
    pinned: HeldRanges = ()
    """Of `ranges`, what its user loaded and the swarm does not move."""
    fetched: tuple[Count, Count] | UnsetType = UNSET
    """(bytes that have come, bytes in all) of what it fetches for `loading`; for people."""
    kv_type: Annotated[str, Meta(max_length=16)] | UnsetType = UNSET
    """In which it keeps keys and values: rows of two nodes are nearer to each other where it is the same.
    Names that a reader does not know mean nothing to it."""
    kernel_class: KernelClass | UnsetType = UNSET
    """Nodes that say the same give equal bits for the same rows of exact requests; who says nothing is like
    nobody."""

    def __post_init__(self) -> None:
        named = {"ranges": self.ranges, "loading": self.loading, "pinned": self.pinned}
        for name, ranges in named.items():
            for start, end in ranges:
                if not start < end <= self.n_layers:
                    raise ValueError(f"field `{name}`: {start}:{end} is no range of {self.n_layers} layers")


class FileAnnounce(msgspec.Struct, frozen=True, tag=True, kw_only=True, gc=False):
    """One model of which a node has bytes on its disk and gives them to nodes that ask with FetchPiece."""

    model_id: ModelId
    name: ShortText
    n_layers: LayerIndex
    layers: HeldRanges = ()
    embedding: bool = False
    head: bool = False

    def __post_init__(self) -> None:
        for start, end in self.layers:
            if not start < end <= self.n_layers:
                raise ValueError(f"field `layers`: {start}:{end} is no range of {self.n_layers} layers")


class ObservedLatency(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The latency of layers of one model on a node: averages per layer and row; 0: never observed."""

    model_id: ModelId
    decode_s: Seconds = 0.0
    prefill_s: Seconds = 0.0


class ObservedLink(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The measured link between a node and one of its peers."""

    node_id: NodeId
    rtt_s: Seconds
    bytes_per_s: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    """Of large transfers between them; 0: there was none."""


Place = Annotated[float, Meta(ge=-30, le=30)]
PlaceSize = Annotated[float, Meta(ge=0, le=30)]


class NetworkCoordinate(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The network coordinate of a node: distances are round trips in seconds (Vivaldi)."""

    position_s: tuple[Place, Place, Place]
    height_s: PlaceSize
    error: PlaceSize
    """Its own relative doubt."""


class NodeCapability(msgspec.Struct, frozen=True, tag=True, kw_only=True, gc=False):
    """How much a node can take on, and how fast it has been."""

    memory_total_bytes: Count = 0
    memory_free_bytes: Count = 0
    active_requests: Count = 0
    max_requests: Count = 0
    stage_requests: Count = 0
    """Requests of other nodes in which it takes part."""
    queued_requests: Count = 0
    memory_bytes_per_s: Annotated[float, Meta(ge=0, le=1e15)] = 0.0
    """Measured on this machine; with `flops` it gives a first guess for models that have not run yet."""
    flops: Annotated[float, Meta(ge=0, le=1e18)] = 0.0
    observed_latencies: Annotated[tuple[ObservedLatency, ...], Meta(max_length=32)] = ()
    observed_links: Annotated[tuple[ObservedLink, ...], Meta(max_length=32)] = ()
    coordinate: NetworkCoordinate | None = None
    slots: Count = 0
    """Requests of which it holds KV at the same time, per model; 0: it does not say."""
    free_slots: Count = 0
    """Of the model that has fewest left."""
    free_kv_tokens: Count = 0
    """KV cells that no running request may still need, of the model that has fewest left."""
    placed_models: Annotated[tuple[ModelId, ...], Meta(max_length=32)] = ()
    """Models of which the swarm may decide what this node holds."""
    placing_free_bytes: Count = 0
    """Memory that is left for their layers."""
    row_formats: (
        Annotated[tuple[Annotated[str, Meta(max_length=16)], ...], Meta(max_length=8)] | UnsetType
    ) = UNSET
    """In which the node can read rows, besides f32; names that a reader does not know mean nothing to it.
    Unset: none."""
    placing_free_disk_bytes: Count | UnsetType = UNSET
    """Disk space that is left for fetching them; unset: it does not say."""
    accepts_shares_of: Annotated[tuple[ShortText, ...], Meta(max_length=16)] | UnsetType = UNSET
    """Whose shared models may be placed on it: node ids, or `members` for every node that it trusts."""
    commits: bool | UnsetType = UNSET
    """It commits to the rows that it sends, where the origin asks for it, and reads RowsCommitments."""
    picture_runs: bool | UnsetType = UNSET
    """It computes rows as `picture_runs` of a PipelineAssignment says. Unset: it does not know the field."""


class NodeRecord(msgspec.Struct, frozen=True, tag=True, kw_only=True, gc=False):
    """What a node says about itself; it alone writes it. The highest (started_at, sequence) wins."""

    v: int = WIRE_VERSION
    node_id: NodeId
    nickname: ShortText = ""
    software: ShortText = ""
    started_at: Annotated[float, Meta(ge=0, le=1e11)] = 0.0
    """Unix time in seconds of the daemon's start."""
    sequence: Count = 0
    models: Annotated[tuple[ShardAnnounce, ...], Meta(max_length=RECORD_MODELS_MAX)] = ()
    capability: NodeCapability = NodeCapability()
    files: Annotated[tuple[FileAnnounce, ...], Meta(max_length=RECORD_MODELS_MAX)] = ()
    prefix_caches: Annotated[tuple[PrefixCacheAnnounce, ...], Meta(max_length=PREFIX_MODELS_MAX)] = ()
    """Only where its user wants others to know."""
    shares: Annotated[tuple[SharedModel, ...], Meta(max_length=8)] | UnsetType = UNSET
    """Withdrawn when a newer record does not have it; unset: none."""
    shared_files: Annotated[tuple[SharedFile, ...], Meta(max_length=2)] | UnsetType = UNSET
    fetched_files: Annotated[tuple[FetchedFile, ...], Meta(max_length=4)] | UnsetType = UNSET
    """Of the SharedFiles of nodes that it accepts. Unset: it fetches none for any node."""
    projectors: (
        Annotated[tuple[ProjectorAnnounce, ...], Meta(max_length=RECORD_PROJECTORS_MAX)] | UnsetType
    ) = UNSET
    """With which it encodes pictures for others; unset: none."""

    def __post_init__(self) -> None:
        n_ranges = sum(len(m.ranges) + len(m.loading) + len(m.pinned) for m in self.models)
        n_ranges += sum(len(file.layers) for file in self.files)
        if n_ranges > RECORD_RANGES_MAX:
            raise ValueError(f"field `models`: {n_ranges} ranges, above the limit of {RECORD_RANGES_MAX}")


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """Layers [start, end) on one node."""

    node_id: NodeId
    start: LayerIndex
    end: LayerIndex
    commits: bool | UnsetType = UNSET
    """The node is to commit to its rows with RowsCommitments, and reads them."""

    def __post_init__(self) -> None:
        require_layer_range(self.start, self.end)


class PipelineAssignment(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request: take part in one request's walk. Sent to every stage, answered by PipelineAck."""

    v: int = WIRE_VERSION
    request_id: RequestId
    model_id: ModelId
    origin: NodeId
    stages: Annotated[tuple[Stage, ...], Meta(min_length=1, max_length=256)]
    n_prompt_tokens: TokenCount
    sampling: Sampling
    generated: GeneratedTokens = ()
    """By a pipeline that broke: this one goes on after them. Told to the last stage only."""
    wants: Literal["tokens", "normed"] = "tokens"
    """"normed": no tokens, but the prompt's rows after the final norm, with every PrefillProgress."""
    scored: GeneratedTokens | UnsetType = UNSET
    """With "normed", and then one for each row of the prompt: not the rows are told, but how likely these
    tokens were after them, and `sampling.top_logprobs` of the likeliest. Told to the last stage only."""
    prefixes: Annotated[tuple[StageBlocks, ...], Meta(max_length=256)] = ()
    """Of the receiver's stages: what the prompt consists of, for rows that are there already to be used."""
    resumes: Annotated[tuple[RequestId, ...], Meta(max_length=16)] = ()
    """The same request under the ids of pipelines that broke, the newest first: what the receiver still has
    of the first that it knows becomes this one's."""
    row_formats: Annotated[tuple[RowFormat, ...], Meta(max_length=256)] | UnsetType = UNSET
    """How rows come to each stage; unset: all as f32. With "q8_0" the stage before rounds them. A receiver
    that does not know the field sends f32, which every stage reads."""
    n_generated: TokenCount | UnsetType = UNSET
    """Of `n_prompt_tokens` so many, the last ones, were generated by a pipeline that broke. Told to stages of
    exact requests that are not told which."""
    picture_runs: PictureRuns | UnsetType = UNSET
    """Rows of pictures that stand on a grid or see each other. A receiver that knows the field says so in its
    PipelineAck; the others would compute something else, and are not to take part."""

    def __post_init__(self) -> None:
        if self.n_generated is not UNSET and self.n_generated >= self.n_prompt_tokens:
            raise ValueError(f"field `n_generated`: {self.n_generated} of {self.n_prompt_tokens} tokens")
        if self.row_formats is not UNSET:
            if len(self.row_formats) != len(self.stages):
                raise ValueError(
                    f"field `row_formats`: {len(self.row_formats)} formats for {len(self.stages)} stages"
                )
            if self.row_formats[0] == "q8_0":
                raise ValueError("field `row_formats[0]`: rows that the origin embeds are rounded by nobody")
        if self.picture_runs is not UNSET:
            require_order(self.picture_runs, self.n_prompt_tokens)
        expected = 0
        for index, stage in enumerate(self.stages):
            if stage.start != expected:
                raise ValueError(f"field `stages[{index}].start`: {stage.start} where {expected} must follow")
            expected = stage.end


class PipelineAck(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Response to PipelineAssignment; `reason` says why it was not accepted."""

    v: int = WIRE_VERSION
    request_id: RequestId
    accepted: bool
    reason: ShortText = ""
    busy: bool = False
    """Refused only for now: the node has as much to do as it may."""
    n_prefix_blocks: BlockCount = 0
    """Of the blocks that were named, how many every stage here has rows of already: the prompt may begin
    after them."""
    kept: Annotated[tuple[StageRows, ...], Meta(max_length=256)] = ()
    """Of the request that is resumed, what the stages here still have."""
    n_running: Annotated[int, Meta(ge=0, le=RUNNING_MAX)] | UnsetType = UNSET
    """Requests that run on this node beside this one."""
    guesses: bool | UnsetType = UNSET
    """Of the last stage: it guesses tokens, and more of them where it is told the prompt (TellPrompt)."""
    unreachable: NodeId | UnsetType = UNSET
    """Refused because this stage's rows or tokens go to that node next, and this node does not reach it."""
    kernel_class: KernelClass | UnsetType = UNSET
    """Of an exact request: what ShardAnnounce says of the layers here, at this moment."""
    picture_runs: bool | UnsetType = UNSET
    """The rows that the assignment's `picture_runs` name are computed as those say."""


class ProbeStage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request, origin -> stage: asks for the state of a request that has been silent. Answered by
    StageState."""

    v: int = WIRE_VERSION
    request_id: RequestId


class StageState(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Response to ProbeStage."""

    v: int = WIRE_VERSION
    request_id: RequestId
    known: bool
    """The node takes part in this request of this origin."""
    busy: bool = False
    """Something of it happens here: a job waits, is computed or comes in."""
    n_received: Position | UnsetType = UNSET
    """Rows below this have come to the stage here; unset: they come by links, or several stages are here."""
    n_sent: Position | UnsetType = UNSET
    """Rows below this have left it; unset as above."""


class CancelInference(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Job message, origin -> every stage: the request is over (finished, failed or its client left);
    free everything."""

    v: int = WIRE_VERSION
    request_id: RequestId
    reason: ShortText = ""
    prefixes: Annotated[tuple[StageBlocks, ...], Meta(max_length=256)] = ()
    """Of the receiver's stages: the names of all that was computed, for it to be kept under them."""
    hold: bool = False
    """Its pipeline broke, and another one may resume it: keep what is there for a while."""
    n_rows: TokenCount | UnsetType = UNSET
    """That the request has in the end: stages that commit sign for the last ones of them."""


class LayerForward(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Job message: the walk goes on here. step "embed": `token` is to be embedded by the first stage (no
    payload); step "layer": payload is f32 [n, n_embd], at layer 0 wider with rows of pictures that have
    further parts.

    `digest` is BLAKE3 over the header without its last 32 bytes, then the payload; those bytes are the
    digest, so it stays the last field for ever. It guards against damage (memory, disk, a careless relay),
    not against the sender.
    """

    v: int = WIRE_VERSION
    request_id: RequestId
    step: Literal["embed", "layer"]
    stage: Annotated[int, Meta(ge=0, le=255)]
    """Index into the assignment's stages of the receiver."""
    position: Position
    """Absolute position of the first row."""
    n_tokens: TokenCount
    prefill_left: TokenCount = 0
    """Prompt tokens that come after this chunk; 0: the head samples from the last row."""
    token: TokenId = 0
    timings: Annotated[tuple[StageTiming, ...], Meta(max_length=256)] = ()
    resent: bool = False
    """A link between two workers broke behind this job: it may have arrived there before."""
    until: Annotated[int, Meta(ge=0, le=255)] | None = None
    """The last stage that computes these rows, where it is not the pipeline's last: the stages after it have
    them already."""
    guesses: Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=GUESSES_MAX)] | UnsetType = UNSET
    """With step "embed": tokens that may follow `token`, to be embedded behind it; `n_tokens` counts them."""
    window_rows: Annotated[int, Meta(ge=2, le=255)] | UnsetType = UNSET
    """So many rows may come in one decode job, as far as the stages that the job has passed are concerned.
    Unset: one; a stage that does not know the field leaves it out."""
    jobs_max: Annotated[int, Meta(ge=2, le=255)] | UnsetType = UNSET
    """So many decode jobs of the request may be under way at once, as far as the stages that the job has
    passed are concerned. Unset: one; a stage that does not know the field leaves it out."""
    number: JobNumber | UnsetType = UNSET
    """Of a decode job beside which others of the request may be under way: stages run these jobs in the order
    of their numbers, each once. Unset: no other one is under way."""
    fresh: JobNumber | UnsetType = UNSET
    """With `number`: jobs with numbers below this begin with guesses that were refused, and are not run."""
    digest: Annotated[bytes, Meta(max_length=32)] = b""

    def __post_init__(self) -> None:
        if self.number is not UNSET or self.fresh is not UNSET:
            require_job_number(self.number, self.fresh)
        if self.guesses is not UNSET and (self.step != "embed" or self.n_tokens != 1 + len(self.guesses)):
            raise ValueError(f"field `guesses`: {len(self.guesses)} in a job of {self.n_tokens} rows")


class StreamingToken(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Job message, last stage -> origin. Payload: UTF-8 bytes to show (may be empty), for an origin that
    cannot make them of the tokens itself."""

    v: int = WIRE_VERSION
    request_id: RequestId
    index: TokenCount
    token: TokenId
    finish_reason: FinishReason | None = None
    timings: Annotated[tuple[StageTiming, ...], Meta(max_length=256)] = ()
    logprobs: Logprobs = ()
    n_cached_tokens: TokenCount = 0
    """With the last token: of the prompt, not computed, because an earlier request there began alike."""
    stopped_by: StopIndex | None = None
    """Which of the sampling's stop strings ended the generation here; None: another thing did."""
    guessed: tuple[TokenCount, TokenCount] | UnsetType = UNSET
    """With the last token of several stages: guesses that were checked, and those that were right."""
    fingerprint: Fingerprint | UnsetType = UNSET
    """Of the logits that it was taken from, where the sampling asks for it; unset: the stage tells none."""


class RemoteGenerateRequest(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Job message, origin -> the only stage of a pipeline that has accepted: run the whole decode loop there.
    Payload: i32 [n_tokens], the prompt and, at its end, what the assignment says was generated. Answered by
    StreamingTokens."""

    v: int = WIRE_VERSION
    request_id: RequestId
    n_tokens: TokenCount


class PrefillProgress(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Job message, last stage -> origin: rows up to `position` have passed every layer. Payload: f32
    [n, n_embd], the rows after the final norm that end there, where the assignment wants them; MessagePack of
    Scores of the same rows, where it has `scored` tokens."""

    v: int = WIRE_VERSION
    request_id: RequestId
    position: Position
    timings: Annotated[tuple[StageTiming, ...], Meta(max_length=256)] = ()


class PipelineError(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Job message, any stage -> origin: the walk failed here. Origin -> everybody: a pipeline broke because
    of `node_id`, which is best avoided for a while."""

    v: int = WIRE_VERSION
    request_id: RequestId
    node_id: NodeId
    kind: ShortText
    message: Annotated[str, Meta(max_length=2000)] = ""
    damaged: bool = False
    """The job arrived with a wrong digest: the origin may repeat the current token."""
    position: Position = 0


JobMessage: TypeAlias = (
    LayerForward
    | StreamingToken
    | PrefillProgress
    | PipelineError
    | CancelInference
    | RemoteGenerateRequest
    | ReplayRows
    | RowsCommitment
)
SwarmRequest: TypeAlias = (
    PipelineAssignment
    | TellPrompt
    | FetchPiece
    | ProbeStage
    | FetchRows
    | PrefixKvFetch
    | VisionEncodeRequest
)
SwarmResponse: TypeAlias = PipelineAck | Piece | StageState | RowsPiece | PrefixKv | VisionEncodeResponse
