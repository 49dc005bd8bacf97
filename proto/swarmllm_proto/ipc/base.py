"""Parts of the messages between daemon and worker (see `ipc`): bases, accounts, cuts, kernels."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from swarmllm_proto.limits import LAYERS_MAX

CallId = Annotated[int, Meta(ge=0, le=2**53)]
RequestId = Annotated[str, Meta(min_length=1, max_length=64)]
LayerIndex = Annotated[int, Meta(ge=0, le=LAYERS_MAX)]
Position = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenCount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
JobNumber = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Owner = Annotated[str, Meta(max_length=256)]
"""For whom work is: nodes that share a worker's time as one have one; none: the node's own users."""
SizeBytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Dimension = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""Thirty years at most: keeps infinity out of sums and averages."""
FinishReason = Literal["stop", "length", "cancelled"]
ErrorKind = Literal[
    "bad_message",
    "bad_model",
    "cannot_cut",
    "not_loaded",
    "no_slot",
    "no_room",
    "context_full",
    "bad_tensor",
    "position_gap",
    "bad_template",
    "out_of_memory",
    "too_complex",
    "engine",
    "bad_picture",
]
STOPS_MAX: Final = 16
StopIndex = Annotated[int, Meta(ge=0, le=STOPS_MAX - 1)]
"""Of a string in `Sampling.stop`."""
GeneratedTokens = Annotated[tuple[TokenId, ...], Meta(max_length=2**19)]
"""What a request has generated already, where another process goes on with it; at most 5 bytes each."""
RowFormat = Literal["f32", "lossless", "q8_0"]
"""How rows go to the next stage (see `tensors`)."""
StageIndex = Annotated[int, Meta(ge=0, le=255)]
KernelClass = Annotated[str, Meta(max_length=64)]
"""Of a model in a worker: whose exact rows have equal bits says the same."""


def require_layer_range(start: int, end: int) -> None:
    """Raises ValueError naming `end`; msgspec turns it into a validation error with the message's path."""
    if end <= start:
        raise ValueError(f"field `end`: {end} must be above start {start}")


def require_job_number(number: int | UnsetType, fresh: int | UnsetType) -> None:
    """Raises ValueError naming `fresh`."""
    if (number is UNSET) is not (fresh is UNSET):
        raise ValueError("field `fresh`: it comes with `number`, and not without")
    if number is not UNSET and fresh is not UNSET and fresh > number:
        raise ValueError(f"field `fresh`: {fresh} must not be above number {number}")


class StageTiming(msgspec.Struct, frozen=True, array_like=True):
    """What one stage spent on this step; travels as an array of its fields in this order."""

    stage: StageIndex
    compute_s: Seconds
    """Inside the worker."""
    busy_s: Seconds
    """From the job's arrival at the node to its departure: queue, IPC and compute."""


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=False, omit_defaults=True):
    """How the head samples. Temperature 0 is greedy. `seed` None lets the worker draw one."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**20)] = 256
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**20)] = 0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repeat_penalty: Annotated[float, Meta(ge=0, le=10)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None
    stop: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=STOPS_MAX)
    ] = ()
    ignore_eos: bool = False
    typical_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    xtc_probability: Annotated[float, Meta(ge=0, le=1)] = 0.0
    xtc_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.1
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] = 0.0
    dry_base: Annotated[float, Meta(ge=1, le=100)] = 1.75
    dry_allowed_length: Annotated[int, Meta(ge=1, le=1024)] = 2
    mirostat: Literal[0, 1, 2] = 0
    """The version; takes the place of the truncating samplers (top_k, top_p, min_p, typical_p, XTC)."""
    mirostat_tau: Annotated[float, Meta(ge=0, le=100)] = 5.0
    mirostat_eta: Annotated[float, Meta(ge=0, le=1)] = 0.1
    logit_bias: Annotated[
        tuple[tuple[TokenId, Annotated[float, Meta(ge=-1000, le=1000)]], ...], Meta(max_length=1024)
    ] = ()
    grammar: Annotated[str, Meta(max_length=65536)] = ""
    """GBNF; at most one of this and `json_schema`."""
    json_schema: Annotated[str, Meta(max_length=65536)] = ""
    """The text of a JSON schema that the output follows."""
    logprobs: bool = False
    """Tokens come with their log-probabilities."""
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] = 0
    """How many of the likeliest tokens come along with each; needs `logprobs`."""
    json_before: Annotated[str, Meta(max_length=64)] = ""
    """Text that stands before that JSON; a model that calls tools expects its own marks around a call."""
    json_after: Annotated[str, Meta(max_length=64)] = ""
    """Text that stands behind it."""
    json_max: Annotated[int, Meta(ge=1, le=64)] = 1
    """The JSON with what stands around it comes this often at most, at least once."""
    exact: bool = False
    """The request's rows have the same bits whatever else runs there: cells and batches of its own."""
    fingerprint_key: Annotated[int, Meta(ge=0, le=2**32 - 1)] | None = None
    """Tokens come with a fingerprint of their logits, of the tokens that this number draws (see
    `fingerprints`). None: without."""
    repeat_last_n: Annotated[int, Meta(ge=0, le=1024)] = 1024
    """So many of the generated tokens are penalised by `repeat_penalty`, `presence_penalty` and
    `frequency_penalty`."""


LOGPROB_MIN: Final = -9999.0
"""The least log-probability: stands for minus infinity, which JSON does not have; OpenAI's choice."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """How likely a token was; travels as an array of its fields in this order."""

    token: TokenId
    logprob: Annotated[float, Meta(ge=-9999, le=0)]
    """Natural logarithm of its probability in the model's own distribution: before temperature, penalties,
    biases, grammar and truncation. Never below -9999, which stands for impossible."""
    piece: Annotated[bytes, Meta(max_length=1024)]
    """Its text, special tokens spelt out."""


Logprobs = Annotated[tuple[TokenLogprob, ...], Meta(max_length=21)]
"""The token itself, then the likeliest ones in order; empty where nobody asked."""


Scores = Annotated[tuple[Logprobs, ...], Meta(max_length=2**19)]
"""One for each row: of the token that follows it in the prompt, then of the likeliest ones."""


Fingerprint = Annotated[bytes, Meta(max_length=64)]
"""Of the logits that a token was taken from; empty where nobody asked."""


class TokenAgain(msgspec.Struct, frozen=True, array_like=True):
    """The token that a row gave when it was sampled again, after the reported tokens; travels as an array of
    its fields in this order."""

    token: TokenId
    ends: bool
    """The model ends its text with it."""
    logprobs: Logprobs
    """Of the token that was told, then of the likeliest ones."""
    fingerprint: Fingerprint = b""
    """Of its own logits, and of the one that the told token has among them."""
    apart: Annotated[float, Meta(ge=0, le=1)] | None = None
    """So much probability lies between the random number and the told token, where nothing but temperature
    and seed decide; None: something else does."""


TokensAgain = Annotated[tuple[TokenAgain, ...], Meta(max_length=4096)]
"""One for each row, in order; fewer where a grammar says what may follow, which is not known after a token
that differs."""


class DaemonMessage(msgspec.Struct, frozen=True, tag=True, tag_field="type", kw_only=True):
    """The base of every message to a worker."""

    id: CallId
    """Chosen by the daemon, never reused while the call is open; every answer carries it."""


class WorkerMessage(msgspec.Struct, frozen=True, tag=True, tag_field="type", kw_only=True):
    """The base of every message from a worker."""

    id: CallId = 0
    """Of the call that is answered; 0: nobody asked."""


Guesser: TypeAlias = Literal["again", "lookup", "draft", "swift", "chain"]
"""The answer that the same prompt had before, the text so far, a small model, the model with a part of its
layers, or, of a model over several nodes, any of these at its last stage."""


class InfillTokens(msgspec.Struct, frozen=True, array_like=True):
    """The special tokens for fill-in-the-middle prompts; travels as an array of its fields in this order."""

    prefix: TokenId
    suffix: TokenId
    middle: TokenId
    repository: TokenId | None = None
    """Before the name of a repository; null: the model knows of none."""
    file: TokenId | None = None
    """Before the name of each file of it."""


class GuessCount(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that were guessed in one way, and checked; travels as an array of its fields in this order."""

    by: Guesser
    n_checked: TokenCount
    n_right: TokenCount
    """Of those, the ones that the model then said."""

    def __post_init__(self) -> None:
        if self.n_right > self.n_checked:
            raise ValueError(f"n_right: {self.n_right} of {self.n_checked} guesses")


class GenerateDone(WorkerMessage, frozen=True, tag=True):
    """The last answer to Generate, after its Tokens; the request's slot is free."""

    request_id: str
    finish_reason: FinishReason
    n_prompt_tokens: TokenCount
    n_generated: TokenCount
    prefill_s: Seconds
    decode_s: Seconds
    n_cached_tokens: TokenCount = 0
    """Of the prompt: not computed, because an earlier request began alike."""
    guesses: Annotated[tuple[GuessCount, ...], Meta(max_length=4)] = ()
    """One for each way of guessing that had guesses to be checked."""
    other_format: bool | UnsetType = UNSET
    """It began with KV that another node computed in another format (see ImportPrefixSnapshot)."""

    @property
    def n_guessed(self) -> int:
        return sum(each.n_checked for each in self.guesses)

    @property
    def n_guessed_right(self) -> int:
        return sum(each.n_right for each in self.guesses)


class CheckCuts(DaemonMessage, frozen=True, tag=True):
    """Try which cuts of the open model, of which the whole file must be there, compute the same as the uncut
    model. Answered by Progress ... CutsChecked."""

    units: Annotated[tuple[Annotated[int, Meta(ge=1, le=65535)], ...], Meta(max_length=64)] = ()
    """Layers per part to try, in this order; none: those that the table, or the model's number of layers,
    suggests."""


class CutsChecked(WorkerMessage, frozen=True, tag=True):
    """Answers CheckCuts."""

    cut_alignment: LayerIndex
    """Layers may be cut at multiples of this; 0: the model runs whole only."""
    whole_reason: Annotated[str, Meta(max_length=2000)] = ""
    """Why, where cut_alignment is 0."""


class Cut(DaemonMessage, frozen=True, tag=True):
    """Have segments of exactly [start, end), which are held, before a request needs them. Answered by Done,
    also where nothing was made because of `if_idle`."""

    start: LayerIndex
    end: LayerIndex
    if_idle: bool = False
    """Not where rows of requests, or rows that are kept for such, would have to move."""

    def __post_init__(self) -> None:
        require_layer_range(self.start, self.end)


class UseThreads(DaemonMessage, frozen=True, tag=True):
    """Compute with so many threads from the next step on, or with those of Open where they are fewer.
    Answered by Done."""

    n_threads: Annotated[int, Meta(ge=1, le=1024)]


class AtWork(WorkerMessage, frozen=True, tag=True):
    """Said unasked (id 0): the worker has begun to compute, or has not computed for 0.2 s."""

    is_at_work: bool


KernelMode = Literal["auto", "ggml", "ours"]
"""Whose matrix products are computed: those that were measured as the fastest, or always one side's."""
KernelType = Literal["Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "attention"]
"""Types of matrices for which there is a choice, and attention of few rows."""
KernelWay = Literal[
    "ggml-dots",
    "ggml-tiles",
    "avx2",
    "avx2-streamed",
    "avx512",
    "avx512-in-order",
    "avx512-pairs",
    "neon",
    "panels-avx2",
    "panels-vnni",
    "panels-amx",
    "panels-few",
    "ggml",
    "ours",
]
"""The last two are of attention."""
Nanoseconds = Annotated[int, Meta(ge=0, le=10**15)]


class KernelChoice(msgspec.Struct, frozen=True):
    """How products of batches of some sizes are computed with matrices of one row length; or attention."""

    type: KernelType
    k: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    """Numbers of a matrix row; of attention, of a key."""
    n_threads: Annotated[int, Meta(ge=1, le=1024)]
    first_rows: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    last_rows: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    """The batch sizes from `first_rows`, which was measured, to this."""
    chosen: KernelWay
    ggml_ns: Nanoseconds
    """Per product with a slice of a matrix, of ggml's fastest way that has the right bits. Of attention, per
    batch with 300 cells of one layer."""
    ours_ns: Nanoseconds
    """Of our fastest; 0: none has the right bits."""
