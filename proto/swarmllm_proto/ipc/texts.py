"""Messages between the daemon and a worker that encodes whole texts (see `ipc`).

Such a worker owns one model of the BERT kind: `OpenTextEncoder` names it, each `EncodeText` brings one text,
and `Shutdown` ends it. It runs no layers for others, and a model worker refuses these messages.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from swarmllm_proto.ipc.base import DaemonMessage, Dimension, Seconds, TokenCount, WorkerMessage

PoolingKind: TypeAlias = Literal["none", "mean", "cls", "last", "rank"]
"""What a model makes of the states of a text: nothing, one vector, or scores (`rank`)."""
EncodedText: TypeAlias = Annotated[str, Meta(max_length=4 * 2**20)]


class OpenTextEncoder(DaemonMessage, frozen=True, tag=True):
    """First message: which model this worker runs, whole. Answered by TextEncoderOpened."""

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Of the model's GGUF; of several files, the first."""
    n_threads: Annotated[int, Meta(ge=1, le=1024)] = 1


class TextEncoderOpened(WorkerMessage, frozen=True, tag=True):
    """Answers OpenTextEncoder."""

    pooling: PoolingKind
    """The model's own."""
    n_outputs: Dimension
    """Numbers that a text becomes: the width of a vector, or how many scores."""
    n_tokens_max: TokenCount
    """Of a text."""


class EncodeText(DaemonMessage, frozen=True, tag=True):
    """One text: `text`, or, where that is null, token ids as payload, i32 [n]. Answered by TextEncoded."""

    text: EncodedText | None = None
    document: EncodedText | None = None
    """What `text` asks about, for a model that ranks: both are one text with the model's marks between."""


class TextEncoded(WorkerMessage, frozen=True, tag=True):
    """Answers EncodeText. Payload: f32 [n_outputs], or f32 [n, n_outputs], a row per token, where the model
    pools nothing."""

    n_tokens: TokenCount
    """Of the text, with what the model wants around it."""
    compute_s: Seconds = 0.0
