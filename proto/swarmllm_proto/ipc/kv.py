"""Messages about KV that outlives its request: kept prefixes, and KV of requests whose pipeline broke (see
`ipc`).

Names travel in the payload, 32 bytes each, one after the other. A `scope` keeps what one origin named apart
from what another did: who chooses the names could call any rows anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from swarmllm_proto.errors import BadMessage
from swarmllm_proto.frames import Buffer
from swarmllm_proto.ipc.base import (
    DaemonMessage,
    LayerIndex,
    Position,
    RequestId,
    Seconds,
    SizeBytes,
    TokenCount,
    WorkerMessage,
    require_layer_range,
)
from swarmllm_proto.ipc.model import KvType

NAME_SIZE: Final = 32
"""BLAKE3's."""
Scope = Annotated[str, Meta(max_length=128)]
BlockCount = Annotated[int, Meta(ge=0, le=2**20)]
PartSizes = Annotated[tuple[SizeBytes, ...], Meta(max_length=256)]
Digest = Annotated[str, Meta(min_length=64, max_length=64, pattern="^[0-9a-f]{64}$")]


class _Blocks(DaemonMessage, frozen=True, kw_only=True):
    """Layers of which KV is spoken."""

    start: LayerIndex
    end: LayerIndex
    scope: Scope = ""
    """Whose names these are; "": this node's own."""

    def __post_init__(self) -> None:
        require_layer_range(self.start, self.end)


class PrefixFetchProbe(_Blocks, frozen=True, tag=True, kw_only=True):
    """These are the names of the request's complete blocks in layers [start, end), now or once their rows
    are computed. Payload: the names. A request without rows gets those that are kept here; when it ends, its
    rows are kept under the names. Answered by PrefixFetchResult."""

    request_id: RequestId


class ExportPrefixSnapshot(_Blocks, frozen=True, tag=True, kw_only=True):
    """The kept KV of as many of these blocks as there are. Payload: their names. Answered by
    PrefixSnapshotResponse."""

    first_row: Position = 0
    n_rows: TokenCount = 0
    """Only so many rows from `first_row` on, in one part, of blocks that are all kept and that this worker
    computed or checked; 0: all rows."""
    layers: tuple[LayerIndex, LayerIndex] | UnsetType = UNSET
    """With `n_rows`: KV of these layers only, [start, end); unset: of all that the names are of."""
    kv_type: Literal["q8_0"] | UnsetType = UNSET
    """With `n_rows`: rounded to this type, where it is kept as f16; unset: as it is kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not UNSET:
            start, end = self.layers
            if not self.n_rows or not self.start <= start < end <= self.end:
                raise ValueError(f"field `layers`: {start}:{end} is no part of {self.start}:{self.end}")


class LookUpPrefix(_Blocks, frozen=True, tag=True, kw_only=True):
    """How many of these blocks could a request get now? Payload: their names. Answered by
    PrefixLookedUp."""

    cuts: bool | UnsetType = UNSET
    """Make segments for exactly these layers first, where there are none."""


class CheckPrefix(_Blocks, frozen=True, tag=True, kw_only=True):
    """Compute blocks of KV again that came from another node. Payload: the tokens of all blocks that came,
    i32 [n]. Answered by PrefixChecked. Unless it is right, what rests on that KV is dropped."""

    request_id: RequestId
    """Under which it is computed."""
    blocks: Annotated[tuple[BlockCount, ...], Meta(min_length=1, max_length=16)]
    """Which: indices."""


class ImportPrefixSnapshot(_Blocks, frozen=True, tag=True, kw_only=True):
    """KV from elsewhere. Payload: the names of its blocks, then the bytes of a PrefixSnapshotResponse.
    Answered by PrefixFetchResult: all blocks, or 0 where there is no room."""

    n_blocks: BlockCount
    sizes: PartSizes
    digest: Digest
    """Of the bytes, without the names; `from_peer`: of the parts' digests, one after the other."""
    from_peer: bool = False
    """Another node computed it: parts are runs of rows in order, for one segment. Requests may use it, but it
    is neither told of nor exported before a CheckPrefix has found it right."""
    other_format: bool | UnsetType = UNSET
    """With `from_peer`: it was computed with other kernels, or kept as another type, which this worker
    converts. It is neither told of nor exported after that check either."""


class PrefixFetchResult(WorkerMessage, frozen=True, tag=True, kw_only=True):
    """Answers PrefixFetchProbe and ImportPrefixSnapshot: complete blocks whose rows the request has, or that
    were taken."""

    n_blocks: BlockCount


class PrefixSnapshotResponse(WorkerMessage, frozen=True, tag=True, kw_only=True):
    """Answers ExportPrefixSnapshot. Payload: the KV of the first `n_blocks` blocks, as libllama writes it,
    part after part; nothing where none are kept."""

    n_blocks: BlockCount
    sizes: PartSizes = ()
    """Bytes of each part: one for each segment that runs the layers here."""
    digest: Annotated[str, Meta(max_length=64)] = ""
    """BLAKE3 of the payload."""


class PrefixLookedUp(WorkerMessage, frozen=True, tag=True, kw_only=True):
    """Answers LookUpPrefix."""

    n_blocks: BlockCount
    row_bytes: SizeBytes = 0
    """KV of one row in these layers; 0: this model's KV neither leaves this worker nor enters it."""
    kv_format: Annotated[str, Meta(max_length=64)] = ""
    """Equal where two workers write and compute KV alike."""
    kv_type: KvType | UnsetType = UNSET
    """Of this worker's KV, to which it can bring KV of another format; unset: it cannot."""
    kv_encoding: Annotated[str, Meta(max_length=64)] | UnsetType = UNSET
    """With `kv_type`: equal where the same bytes are the same numbers to two workers."""


CheckOutcome = Literal["equal", "close", "wrong", "gone"]


class PrefixChecked(WorkerMessage, frozen=True, tag=True, kw_only=True):
    """Answers CheckPrefix. equal: bit for bit; close: within the tolerance; gone: the KV is not kept any
    more."""

    outcome: CheckOutcome


class PrefixManifestUpdate(WorkerMessage, frozen=True, tag=True, kw_only=True):
    """Unasked, where the Open wanted it: which prompts' beginnings are kept of all layers now, where that has
    changed. Payload: of each the hash of its last complete block, the most recently used first."""

    n_blocks: Annotated[tuple[Annotated[int, Meta(ge=1, le=2**20)], ...], Meta(max_length=256)]
    """Of each, in the order of the payload."""


def join_names(names: Sequence[bytes]) -> bytes:
    return b"".join(names)


def split_names(data: Buffer) -> tuple[bytes, ...]:
    """Raises BadMessage where the bytes are no whole names."""
    data = bytes(data)
    if len(data) % NAME_SIZE:
        raise BadMessage("payload", f"{len(data)} bytes are not names of {NAME_SIZE} bytes each")
    return tuple(data[at : at + NAME_SIZE] for at in range(0, len(data), NAME_SIZE))


HeldRanges = Annotated[tuple[tuple[LayerIndex, LayerIndex], ...], Meta(min_length=1, max_length=256)]


class KeptRows(msgspec.Struct, frozen=True, array_like=True):
    """The rows that are kept of a request in one range of layers; travels as an array of its fields in this
    order."""

    n_rows: TokenCount = 0
    """Whose KV is there, from position 0 on."""
    n_journal: TokenCount = 0
    """Whose results can be read again, from position 0 on."""


class HoldRequest(DaemonMessage, frozen=True, tag=True):
    """Stop the request, but keep its KV and its journal for a ResumeRequest, for so long or until others need
    the room. Answered by Done."""

    request_id: RequestId
    hold_s: Seconds


class ResumeRequest(DaemonMessage, frozen=True, tag=True):
    """What was held of `resumes` is this request's from now on, its KV cut to `n_rows`. Answered by
    Resumed."""

    request_id: RequestId
    resumes: RequestId
    n_rows: TokenCount
    ranges: HeldRanges
    """Of which the answer speaks."""

    def __post_init__(self) -> None:
        for start, end in self.ranges:
            if end <= start:
                raise ValueError(f"field `ranges`: {end} must be above start {start}")


class Resumed(WorkerMessage, frozen=True, tag=True, kw_only=True):
    """Answers ResumeRequest."""

    kept: Annotated[tuple[KeptRows, ...], Meta(max_length=256)]
    """Of each range."""


class ReadJournal(DaemonMessage, frozen=True, tag=True):
    """What the layers before `end` gave for rows [position, position + n_rows) of the request, or what came
    to the layers from `end` on. Answered by LayerResult with f32 [n_rows, n_embd]."""

    request_id: RequestId
    end: LayerIndex
    position: Position
    n_rows: Annotated[int, Meta(ge=1, le=4096)]
