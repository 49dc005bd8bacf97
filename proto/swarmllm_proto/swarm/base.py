"""Parts of the messages between nodes (see `swarm`): bases, checks, kept KV, broken pipelines.

Unlike the names in a pipeline's assignment, these hashes contain no secret: a node with the same model and
the same beginning of a prompt computes the same hashes, and so finds the nodes that have its KV. It also
learns that somebody sent this prompt, which is why nodes announce these hashes only where their user has
switched it on.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.identifiers import Digest as Digest
from swarmllm_proto.identifiers import ModelId as ModelId
from swarmllm_proto.identifiers import NodeId as NodeId
from swarmllm_proto.ipc.base import (
    LayerIndex,
    Position,
    RequestId,
    StageIndex,
    TokenCount,
    require_layer_range,
)
from swarmllm_proto.ipc.model import KvType
from swarmllm_proto.limits import CHECKED_ROWS_MAX, COMMITMENT_MAX, PREFIX_KV_MAX

WIRE_VERSION: Final = 1
"""The `v` of every message. A reader ignores fields it does not know and refuses another version."""

DIGEST_SIZE: Final = 32
"""BLAKE3's."""
NAMES_MAX: Final = 32768
"""Bytes of names in one list: 1024 blocks, half of a job message's header."""

ShortText = Annotated[str, Meta(max_length=200)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
TensorName = Annotated[str, Meta(max_length=512)]


class FetchRows(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request, origin -> stage, after the last token: rows at a layer boundary, as they left the stage that
    ends there or came to the one that begins there. Answered by RowsPiece."""

    v: int = WIRE_VERSION
    request_id: RequestId
    boundary: LayerIndex
    position: Position
    n_tokens: Annotated[int, Meta(ge=1, le=4096)]
    digest_only: bool = False


class RowsPiece(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Response to FetchRows."""

    v: int = WIRE_VERSION
    request_id: RequestId
    known: bool
    """False: not all of these rows are here any more."""
    digest: Annotated[bytes, Meta(max_length=DIGEST_SIZE)] = b""
    """BLAKE3 of the rows."""
    rows: Annotated[memoryview, Meta(max_length=CHECKED_ROWS_MAX)] = memoryview(b"")
    """f32, little-endian, one row after the other."""
    commitment: Annotated[bytes, Meta(max_length=COMMITMENT_MAX)] | UnsetType = UNSET
    """Of rows that came to the stage: the header of the RowsCommitment in which the one before it says that
    it sent just these, where the receiver has it."""


PREFIXES_MAX: Final = 64
"""Of one model. 64 are 3 KB of a record."""
PREFIX_MODELS_MAX: Final = 8


class KeptPrefix(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The beginning of a prompt; travels as an array of its fields in this order."""

    hash: Annotated[bytes, Meta(min_length=DIGEST_SIZE, max_length=DIGEST_SIZE)]
    """Of its last complete block, which stands for all before it."""
    n_blocks: Annotated[int, Meta(ge=1, le=2**20)]


class PrefixCacheAnnounce(msgspec.Struct, frozen=True, tag=True, kw_only=True, gc=False):
    """One model that a node runs whole, and the prompts' beginnings of which it has the KV of every layer,
    the most recently used first."""

    model_id: ModelId
    prefixes: Annotated[tuple[KeptPrefix, ...], Meta(max_length=PREFIXES_MAX)]


PrefixLayers = tuple[LayerIndex, LayerIndex]
"""[start, end)."""


class PrefixKvFetch(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request: KV of rows [first_row, first_row + n_rows) of a prompt's beginning. Answered by PrefixKv."""

    v: int = WIRE_VERSION
    model_id: ModelId
    names: Annotated[bytes, Meta(min_length=DIGEST_SIZE, max_length=NAMES_MAX)]
    """Of the beginning's blocks, 32 bytes each."""
    kv_format: Annotated[str, Meta(min_length=1, max_length=64)]
    """The asker's. Rows in another one are of use to it only with `takes`."""
    first_row: Position
    n_rows: Annotated[int, Meta(ge=1, le=65536)]
    scope: NodeId | UnsetType = UNSET
    """The origin that gave the names, to a stage; unset: the receiver announces them to everybody."""
    held: PrefixLayers | UnsetType = UNSET
    """Layers of which the names are; with `scope`. Unset: all."""
    layers: PrefixLayers | UnsetType = UNSET
    """Of these layers, the ones that are wanted; unset: all of them."""
    takes: KvType | UnsetType = UNSET
    """The asker takes rows in another format, too: q8_0: rounded to that type where they are kept as f16;
    f16: as they are kept."""
    kv_encoding: Annotated[str, Meta(min_length=1, max_length=64)] | UnsetType = UNSET
    """With `takes`: in which other formats are of use to it."""

    def __post_init__(self) -> None:
        if len(self.names) % DIGEST_SIZE:
            raise ValueError(
                f"field `names`: {len(self.names)} bytes are no names of {DIGEST_SIZE} bytes each"
            )
        if (self.held is UNSET) != (self.scope is UNSET) or (self.held is UNSET and self.layers is not UNSET):
            raise ValueError("field `held`: layers and the scope of their names come together")
        if self.held is not UNSET:
            start, end = self.held if self.layers is UNSET else self.layers
            if not self.held[0] <= start < end <= self.held[1]:
                raise ValueError(f"field `layers`: {start}:{end} is no part of {self.held[0]}:{self.held[1]}")
        n_named = len(self.names) // DIGEST_SIZE * BLOCK_TOKENS
        if self.first_row + self.n_rows > n_named:
            raise ValueError(
                f"field `n_rows`: {self.n_rows} rows from {self.first_row} on, where {n_named} are named"
            )


class PrefixKv(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Response to PrefixKvFetch."""

    v: int = WIRE_VERSION
    status: Literal["ok", "busy", "absent"]
    digest: Annotated[bytes, Meta(max_length=DIGEST_SIZE)] = b""
    """BLAKE3 of `data`."""
    data: Annotated[memoryview, Meta(max_length=PREFIX_KV_MAX)] = memoryview(b"")
    """As libllama writes the state of a sequence that has these rows and no others."""
    other_format: bool | UnsetType = UNSET
    """With the first row: true where the rows are not in the format of the asker's `kv_format`."""


class StageRows(msgspec.Struct, frozen=True, array_like=True):
    """The rows that one stage still has of a request; travels as an array of its fields in this order."""

    stage: StageIndex
    n_rows: TokenCount
    """Whose KV is there, from position 0 on."""
    n_journal: TokenCount
    """That it can send on once more, from position 0 on."""


class ReplayRows(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Job message, origin -> a stage: send rows that left it once more to the stage after it, which has lost
    its KV or is another node. They arrive there as a LayerForward."""

    v: int = WIRE_VERSION
    request_id: RequestId
    stage: StageIndex
    """Whose results they are."""
    position: Position
    n_tokens: Annotated[int, Meta(ge=1, le=4096)]
    until: StageIndex
    """The last stage that is to compute them."""

    def __post_init__(self) -> None:
        if self.until <= self.stage:
            raise ValueError(f"field `until`: {self.until} must be after stage {self.stage}")


TELL_PROMPT_TOKENS_MAX: Final = 2**18
"""Of a prompt that the last stage is told."""
EARLY_PROMPT_TOKENS_MAX: Final = 2**14
"""Of a prompt that is told with an assignment."""


class StageBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Names of the complete blocks (see `blocks`) of what one stage has computed or is about to; travels as
    an array of its fields in this order. The origin makes them with a secret of its own, other ones for each
    stage's layers: they say that two of its requests begin alike, and nothing of how."""

    stage: Annotated[int, Meta(ge=0, le=255)]
    names: Annotated[bytes, Meta(max_length=NAMES_MAX)]
    """32 bytes each, one after the other."""

    def __post_init__(self) -> None:
        if len(self.names) % DIGEST_SIZE:
            raise ValueError(
                f"field `names`: {len(self.names)} bytes are no names of {DIGEST_SIZE} bytes each"
            )


class KeptElsewhere(msgspec.Struct, frozen=True, kw_only=True):
    """Where a stage may fetch KV of its layers: a node that was a stage of an earlier request of this origin
    which began alike."""

    stage: StageIndex
    node_id: NodeId
    start: LayerIndex
    end: LayerIndex
    """Layers [start, end) of the earlier stage; those of `stage` are among them."""
    n_blocks: Annotated[int, Meta(ge=1, le=NAMES_MAX // DIGEST_SIZE)]
    """First ones of the prompt that are kept there."""
    names: Annotated[bytes, Meta(max_length=NAMES_MAX)] = b""
    """Of these blocks in layers [start, end), 32 bytes each; empty where those are the layers of `stage`, of
    which the assignment has the names."""

    def __post_init__(self) -> None:
        require_layer_range(self.start, self.end)
        if self.names and len(self.names) != self.n_blocks * DIGEST_SIZE:
            raise ValueError(f"field `names`: {len(self.names)} bytes for {self.n_blocks} blocks")


class TellPrompt(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Request, origin -> last stage that `guesses`, where the origin allows it: the prompt, to guess from.
    Answered by PipelineAck."""

    v: int = WIRE_VERSION
    request_id: RequestId
    tokens: Annotated[bytes, Meta(min_length=4, max_length=4 * TELL_PROMPT_TOKENS_MAX)]
    """i32 each, little-endian."""

    def __post_init__(self) -> None:
        if len(self.tokens) % 4:
            raise ValueError(f"field `tokens`: {len(self.tokens)} bytes are no tokens of 4 bytes each")
