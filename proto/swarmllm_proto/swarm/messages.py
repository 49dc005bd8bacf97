"""Messages between nodes, as msgpack with a `type` tag (see wire.md).

Three ways to travel: a *record* is what a node says about itself and everybody may read (`record.py`); a
*request* has a response; a *job message* is the header of one frame on the persistent stream between two
neighbours, with the tensor in the frame's payload. A job never carries the prompt: the origin embeds it, and
stages see hidden states.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from swarmllm_proto.ipc.base import StageIndex
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
from swarmllm_proto.swarm.base import EARLY_PROMPT_TOKENS_MAX as EARLY_PROMPT_TOKENS_MAX
from swarmllm_proto.swarm.base import NAMES_MAX as NAMES_MAX
from swarmllm_proto.swarm.base import TELL_PROMPT_TOKENS_MAX as TELL_PROMPT_TOKENS_MAX
from swarmllm_proto.swarm.base import WIRE_VERSION as WIRE_VERSION
from swarmllm_proto.swarm.base import Count as Count
from swarmllm_proto.swarm.base import Digest as Digest
from swarmllm_proto.swarm.base import FetchRows as FetchRows
from swarmllm_proto.swarm.base import KeptElsewhere as KeptElsewhere
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
from swarmllm_proto.swarm.record import MAX_GPUS as MAX_GPUS
from swarmllm_proto.swarm.record import MODEL_RANGES_MAX as MODEL_RANGES_MAX
from swarmllm_proto.swarm.record import RECORD_MODELS_MAX as RECORD_MODELS_MAX
from swarmllm_proto.swarm.record import RECORD_RANGES_MAX as RECORD_RANGES_MAX
from swarmllm_proto.swarm.record import FileAnnounce as FileAnnounce
from swarmllm_proto.swarm.record import GpuMemory as GpuMemory
from swarmllm_proto.swarm.record import HeldRanges as HeldRanges
from swarmllm_proto.swarm.record import NetworkCoordinate as NetworkCoordinate
from swarmllm_proto.swarm.record import NodeCapability as NodeCapability
from swarmllm_proto.swarm.record import NodeRecord as NodeRecord
from swarmllm_proto.swarm.record import ObservedLatency as ObservedLatency
from swarmllm_proto.swarm.record import ObservedLink as ObservedLink
from swarmllm_proto.swarm.record import ShardAnnounce as ShardAnnounce
from swarmllm_proto.swarm.sharing import FILE_PARTS_MAX as FILE_PARTS_MAX
from swarmllm_proto.swarm.sharing import FetchedFile as FetchedFile
from swarmllm_proto.swarm.sharing import FilePart as FilePart
from swarmllm_proto.swarm.sharing import SharedFile as SharedFile
from swarmllm_proto.swarm.sharing import SharedModel as SharedModel
from swarmllm_proto.swarm.transfer import FetchPiece as FetchPiece
from swarmllm_proto.swarm.transfer import Outline as Outline
from swarmllm_proto.swarm.transfer import Piece as Piece
from swarmllm_proto.swarm.vision import ProjectorAnnounce as ProjectorAnnounce
from swarmllm_proto.swarm.vision import VisionEncodeRequest as VisionEncodeRequest
from swarmllm_proto.swarm.vision import VisionEncodeResponse as VisionEncodeResponse

RUNNING_MAX: Final = 65_535


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
    kept_elsewhere: Annotated[tuple[KeptElsewhere, ...], Meta(max_length=256)] | UnsetType = UNSET
    """Of the receiver's stages: where KV of the prompt's beginning may be fetched. A receiver that does not
    know the field computes the prompt."""
    only_fetches: bool | UnsetType = UNSET
    """Nothing is to be computed: the receiver fetches what is kept elsewhere, and answers how much it has
    then. A receiver that does not know the field keeps a place for the request until it needs it."""
    prompt: Annotated[bytes, Meta(min_length=4, max_length=4 * EARLY_PROMPT_TOKENS_MAX)] | UnsetType = UNSET
    """As TellPrompt's tokens, of a prompt that these stages have answered before: the answer can leave before
    the rows of the prompt. Told to the last stage only, where the first one is the origin's own."""

    def __post_init__(self) -> None:
        if self.n_generated is not UNSET and self.n_generated >= self.n_prompt_tokens:
            raise ValueError(f"field `n_generated`: {self.n_generated} of {self.n_prompt_tokens} tokens")
        if self.prompt is not UNSET and len(self.prompt) != 4 * self.n_prompt_tokens:
            raise ValueError(f"field `prompt`: {len(self.prompt)} bytes for {self.n_prompt_tokens} tokens")
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
        for index, kept in enumerate(self.kept_elsewhere or ()):
            if kept.stage >= len(self.stages):
                raise ValueError(
                    f"field `kept_elsewhere[{index}].stage`: {kept.stage} of {len(self.stages)} stages"
                )
            stage = self.stages[kept.stage]
            if not kept.start <= stage.start < stage.end <= kept.end:
                raise ValueError(
                    f"field `kept_elsewhere[{index}]`: layers {stage.start}:{stage.end} are no part of "
                    f"{kept.start}:{kept.end}"
                )


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
    fetched: Annotated[tuple[StageIndex, ...], Meta(max_length=256)] | UnsetType = UNSET
    """Stages here whose first rows rest on KV that another node gave, for this request or an earlier one."""


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
    takes_early: bool | UnsetType = UNSET
    """A numbered job may come before the rows of the prompt's end, as far as the stages that the job has
    passed are concerned, and waits for them. A stage that does not know the field leaves it out."""
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
