"""Messages between the daemon and a model worker, over one Unix socket.

Each message is the JSON header of one frame (see `frames`); tensors and raw text bytes travel in the frame's
payload, never in the JSON. A daemon message carries a call `id` chosen by the daemon; every worker message
that answers it carries the same `id`. A worker owns one model: `Open` names its GGUF, `Load` and `Unload`
move layer ranges in and out, and the process leaves with `Bye` when its last range is unloaded.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, UnsetType

from swarmllm_proto.ipc.base import (  # noqa: F401
    AtWork,
    CallId,
    CheckCuts,
    Cut,
    CutsChecked,
    DaemonMessage,
    Dimension,
    ErrorKind,
    Fingerprint,
    FinishReason,
    GenerateDone,
    GeneratedTokens,
    GuessCount,
    InfillTokens,
    JobNumber,
    KernelChoice,
    KernelClass,
    KernelMode,
    KernelWay,
    LayerIndex,
    Logprobs,
    Owner,
    Position,
    RequestId,
    RowFormat,
    Sampling,
    Scores,
    Seconds,
    SizeBytes,
    StageIndex,
    StageTiming,
    StopIndex,
    TokenAgain,
    TokenCount,
    TokenId,
    TokenLogprob,
    TokensAgain,
    UseThreads,
    WorkerMessage,
    require_job_number,
    require_layer_range,
)
from swarmllm_proto.ipc.kv import (  # noqa: F401
    CheckPrefix,
    ExportPrefixSnapshot,
    HoldRequest,
    ImportPrefixSnapshot,
    KeptRows,
    LookUpPrefix,
    PrefixChecked,
    PrefixFetchProbe,
    PrefixFetchResult,
    PrefixLookedUp,
    PrefixManifestUpdate,
    PrefixSnapshotResponse,
    ReadJournal,
    Resumed,
    ResumeRequest,
)
from swarmllm_proto.ipc.model import (  # noqa: F401
    Bye,
    FlashAttention,
    Gpu,
    GpuLayers,
    KvType,
    Load,
    Loaded,
    Open,
    Opened,
    Progress,
    Ready,
    Shutdown,
    Unload,
)
from swarmllm_proto.ipc.ring import (
    Arrived,
    CloseLinks,
    LinkLost,
    Relay,
    TakeLink,
    TakePrompt,
    TakeSeat,
    Turned,
)
from swarmllm_proto.ipc.texts import (  # noqa: F401
    EncodeText,
    OpenTextEncoder,
    PoolingKind,
    TextEncoded,
    TextEncoderOpened,
)
from swarmllm_proto.ipc.vision import (  # noqa: F401
    EncodePicture,
    EncodeSound,
    OpenProjector,
    PictureEncoded,
    PictureKind,
    PicturePart,
    PictureRecoded,
    ProjectorOpened,
    RecodePicture,
    SoundKind,
)
from swarmllm_proto.picture_runs import PictureRuns

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""How much a model should think before it answers, for chat templates that can say so."""


TextPlace = Literal["whole", "first", "later"]


class Tokenize(DaemonMessage, frozen=True, tag=True):
    """`text` as it is, or `messages` (and `tools`) through the model's chat template. Answered by Tokens."""

    text: str | None = None
    messages: list[dict[str, object]] | None = None
    tools: list[dict[str, object]] | None = None
    effort: Effort | None = None
    template: str = ""
    """A chat template (Jinja) in place of the model's."""
    place: TextPlace = "whole"
    """Of `text`: "first" and "later" are pieces of a rendered template between pictures. A beginning-of-text
    token is added to a first one that has none, and never to a later one."""


class CheckGrammar(DaemonMessage, frozen=True, tag=True):
    """Whether the grammar or JSON schema of `sampling` can be followed. Answered by Done, or by an Error that
    names the field."""

    sampling: Sampling


class ApplyTemplate(DaemonMessage, frozen=True, tag=True):
    """What the model's chat template makes of a conversation, up to where the assistant speaks. Answered by
    Text."""

    messages: list[dict[str, object]]
    tools: list[dict[str, object]] | None = None
    effort: Effort | None = None
    template: str = ""
    """A chat template (Jinja) in place of the model's."""
    is_to_answer: bool = True
    """False: up to the end of the last message."""


class Detokenize(DaemonMessage, frozen=True, tag=True):
    """Payload: i32 [n] token ids. Answered by Text, special tokens included."""

    as_generated: bool = False
    """What each of them adds to a text that is generated, instead, as a MessagePack list of bytes. Most
    special tokens add nothing."""


class Embed(DaemonMessage, frozen=True, tag=True):
    """Payload: i32 [n] token ids. Answered by LayerResult with f32 [n, n_embd] embedding rows."""


class Forward(DaemonMessage, frozen=True, tag=True):
    """Run layers [start, end) for one request. Payload: f32 [n, n_embd] hidden states, or, where start is 0,
    i32 [n] token ids (the worker embeds them). Rows of a picture on a grid have their further parts behind
    them there, where the model has such parts: f32 [n, n_embd_input].

    The request's KV is truncated to `position` first, so a repeated forward is idempotent; a gap is an error.
    Where layers are recurrent only position 0 can be gone back to, anything else is an error too.
    want: "hidden" -> LayerResult with f32 [n, n_embd]; "normed" -> the same after the final norm (needs the
    head); "scores" -> LayerResult with the Scores of the rows (needs the head), of which `sampling` says how
    many of the likeliest tokens come along; "none" -> LayerResult without tensor (prefill at the last stage);
    "token" -> Token sampled from the last row (needs the head); "again" -> LayerResult with TokensAgain, one
    sampled from each row after the tokens that were told before it (needs the head). `sampling` must come
    with the first "token" and with every "again", and with it `generated`, where the request began elsewhere:
    the tokens between the prompt and the one that is wanted.
    """

    request_id: RequestId
    start: LayerIndex
    end: LayerIndex
    position: Position
    want: Literal["hidden", "none", "token", "normed", "scores", "again"]
    sampling: Sampling | None = None
    n_prompt_tokens: TokenCount = 0
    generated: GeneratedTokens = ()
    scored: GeneratedTokens = ()
    """For "scores" and "again": the tokens that follow the rows, one for each."""
    seat: StageIndex | None = None
    """The request's seat that this is: its result may leave by a link, and the answer then says so."""
    timings: Annotated[tuple[StageTiming, ...], Meta(max_length=256)] = ()
    """Of the stages before, to be sent on with the result."""
    waited_s: Seconds = 0.0
    """Since the job arrived at the node."""
    resent: bool = False
    """A link broke behind this job: it may have come by that already, and is then answered with Done."""
    rounded: bool = False
    """Of "hidden": the rows are to be what q8_0 can carry (see `tensors`), in the answer as in what is
    kept of them."""
    exact_rows: TokenCount = 0
    """Above 0: the request is exact, and will have at most so many rows. They get cells and batches of their
    own; prompts run in pieces of EXACT_ROWS, counted from the first, and what follows row by row. Every
    forward of such a request says so."""
    kv_type: KvType | UnsetType = UNSET
    """With `exact_rows`, in the first forward: how keys and values of the request are kept, where that is not
    as those of the worker's other requests."""
    picture_runs: PictureRuns = ()
    """Rows of the request that stand on a grid or see each other; every forward of it says so."""
    owner: Owner | UnsetType = UNSET
    number: JobNumber | UnsetType = UNSET
    """With `seat`: as in `LayerForward`. Such a job is answered with Done when it has its place in the order;
    what comes of it leaves by a link or a Relay."""
    fresh: JobNumber | UnsetType = UNSET
    """As in `LayerForward`."""

    def __post_init__(self) -> None:
        require_layer_range(self.start, self.end)
        require_job_number(self.number, self.fresh)
        if self.kv_type is not UNSET and not self.exact_rows:
            raise ValueError("field `kv_type`: it comes with `exact_rows`, and not without")


class Generate(DaemonMessage, frozen=True, tag=True):
    """Whole decode loop in this worker, which must hold [0, n_layers). Payload: i32 [n] prompt token ids.
    Answered by Token ... GenerateDone."""

    request_id: RequestId
    sampling: Sampling = Sampling()
    n_generated: TokenCount = 0
    """The last so many tokens of the payload are not prompt: the request generated them elsewhere, and goes
    on here with the next."""
    session_id: Annotated[str, Meta(max_length=256)] = ""
    """A conversation whose next turn begins with this one: its KV is kept to the last row, and longest."""
    own_kv: bool = False
    """It takes no rows that another node computed and that were not checked."""
    owner: Owner | UnsetType = UNSET
    clients_of: Owner | UnsetType = UNSET
    """The node whose client asks. Requests of its clients share every token that they begin with, and whole
    blocks with all others; those with `own_kv` that name no node share whole blocks only."""


class CancelRequest(DaemonMessage, frozen=True, tag=True):
    """Stop the request and free its slot; a running Generate ends with
    GenerateDone(finish_reason="cancelled"). Answered by Done."""

    request_id: RequestId


class ReleaseRequestKv(DaemonMessage, frozen=True, tag=True):
    """Free the request's slot (unknown requests are fine). Answered by Done."""

    request_id: RequestId


class Tokens(WorkerMessage, frozen=True, tag=True):
    """Payload: i32 [n] token ids."""


class Text(WorkerMessage, frozen=True, tag=True):
    """Answers ApplyTemplate and Detokenize. Payload: UTF-8; a detokenized text may begin or end inside a
    character."""


class LayerResult(WorkerMessage, frozen=True, tag=True):
    """Answers Embed, Forward and ReadJournal. Payload: f32 [n, n_embd], MessagePack of Scores where want
    was "scores" and of TokensAgain where it was "again", or empty where it was "none"."""

    request_id: str = ""
    compute_s: Seconds = 0.0
    onward: bool = False
    """The result has left by a link to the next stage; no payload here."""


class Token(WorkerMessage, frozen=True, tag=True):
    """One sampled token. Payload: the UTF-8 bytes that may be shown now (empty while a stop string or a split
    character is pending)."""

    request_id: str
    index: TokenCount
    """0 for the first generated token."""
    token: TokenId
    finish_reason: FinishReason | None = None
    compute_s: Seconds = 0.0
    logprobs: Logprobs = ()
    onward: bool = False
    """The token has left by a link to the first stage."""
    stopped_by: StopIndex | None = None
    """Which of the sampling's stop strings ended the generation here; None: another thing did."""
    fingerprint: Fingerprint | UnsetType = UNSET
    """Of the logits that it was taken from; unset: nobody asked."""


class Done(WorkerMessage, frozen=True, tag=True):
    """Answers CancelRequest, ReleaseRequestKv, HoldRequest, TakeLink, CloseLinks, TakeSeat, TakePrompt, Cut
    and UseThreads; and of Forwards with a seat those that were `resent` and had come before, those with a
    number, and windows at the last stage."""


class Error(WorkerMessage, frozen=True, tag=True):
    """The call failed. `kind` is stable and machine-readable, `field` names the offending field where there
    is one. fatal: the worker cannot go on and exits."""

    kind: ErrorKind
    message: str
    field: str = ""
    request_id: str = ""
    fatal: bool = False


AnyDaemonMessage: TypeAlias = (
    Open
    | Load
    | Unload
    | CheckCuts
    | Cut
    | UseThreads
    | Tokenize
    | CheckGrammar
    | ApplyTemplate
    | Detokenize
    | Embed
    | Forward
    | TakeLink
    | CloseLinks
    | TakeSeat
    | TakePrompt
    | Generate
    | CancelRequest
    | ReleaseRequestKv
    | HoldRequest
    | ResumeRequest
    | ReadJournal
    | PrefixFetchProbe
    | ExportPrefixSnapshot
    | ImportPrefixSnapshot
    | LookUpPrefix
    | CheckPrefix
    | OpenProjector
    | EncodePicture
    | EncodeSound
    | RecodePicture
    | OpenTextEncoder
    | EncodeText
    | Shutdown
)
AnyWorkerMessage: TypeAlias = (
    Ready
    | Opened
    | Progress
    | Loaded
    | CutsChecked
    | AtWork
    | Tokens
    | Text
    | LayerResult
    | Token
    | GenerateDone
    | Arrived
    | Relay
    | Turned
    | LinkLost
    | Done
    | Resumed
    | PrefixFetchResult
    | PrefixSnapshotResponse
    | PrefixLookedUp
    | PrefixChecked
    | PrefixManifestUpdate
    | ProjectorOpened
    | PictureEncoded
    | PictureRecoded
    | TextEncoderOpened
    | TextEncoded
    | Error
    | Bye
)
