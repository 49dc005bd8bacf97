"""A node's record: what it holds, how fast it is, and how much it can take on (see `swarm`).

Its parts are `gc=False`: a node keeps hundreds of thousands of them, none can be part of a cycle, and a
collection that visits each stops everything else.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from swarmllm_proto.ipc.base import KernelClass, LayerIndex, Seconds
from swarmllm_proto.swarm.base import (
    PREFIX_MODELS_MAX,
    WIRE_VERSION,
    Count,
    ModelId,
    NodeId,
    PrefixCacheAnnounce,
    ShortText,
)
from swarmllm_proto.swarm.sharing import FetchedFile, SharedFile, SharedModel
from swarmllm_proto.swarm.vision import RECORD_PROJECTORS_MAX, ProjectorAnnounce

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


MAX_GPUS: Final = 16


class GpuMemory(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    name: ShortText
    total_bytes: Count
    free_bytes: Count = 0


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
    gpus: Annotated[tuple[GpuMemory, ...], Meta(max_length=MAX_GPUS)] | UnsetType = UNSET
    """On which it can compute layers. Unset: none, or it does not say."""


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
