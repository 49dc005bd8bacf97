"""What a node tells about itself, its models and its peers: facts, not yet their JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swarmllm.downloads import WaitingView
from swarmllm.models import CatalogueEntry, LayerRange
from swarmllm.swarm.peers.trust import Explanation
from swarmllm.swarm.router import PeerInfo
from swarmllm.workerpool.settings import LoadOptions, ModelMemory
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.swarm import FileAnnounce, NodeRecord


@dataclass(frozen=True, slots=True)
class Readiness:
    status: Literal["starting", "ready", "failed"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class HolderView:
    node_id: NodeId
    nickname: str
    layers: tuple[LayerRange, ...]
    is_self: bool


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model of the catalogue (then `entry` is there) or one that only other nodes have."""

    model_id: ModelId | Literal[""]
    name: str
    n_layers: int
    entry: CatalogueEntry | None
    files: FileAnnounce | None
    """What of it lies on this node's disk."""
    sources: tuple[str, ...]
    """Other connected nodes that give its files."""
    loaded: tuple[LayerRange, ...]
    memory: ModelMemory
    settings: LoadOptions | None
    """With which it is loaded here."""
    holders: tuple[HolderView, ...]
    missing: tuple[LayerRange, ...]
    """Layers that no connected node holds."""
    complete: bool
    """A request would find a pipeline now."""
    trouble: str = ""
    """What is wrong with its file, where layers are loaded here: they run on, but cannot be loaded again."""
    waiting: WaitingView | None = None
    """Only some layers of a file are here, and it is not known yet which model they are of; then there is no
    `model_id`."""


@dataclass(frozen=True, slots=True)
class PeerView:
    info: PeerInfo
    record: NodeRecord | None
    """None until the peer has said something about itself."""
    trust: float
    n_damaged: int = 0
    """Jobs that arrived from it with a wrong digest, and so were sent again."""
    n_prefixes: int = 0
    """Prompts' beginnings of which it announces the KV, where it is trusted enough."""


@dataclass(frozen=True, slots=True)
class PeerDetails:
    """One node, whether connected or only remembered."""

    node_id: NodeId
    connected: PeerView | None
    record: NodeRecord | None
    trust: Explanation


@dataclass(slots=True)
class RequestCounts:
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    generated_tokens: int = 0

    def count(self, outcome: Literal["completed", "failed", "cancelled"]) -> None:
        setattr(self, outcome, getattr(self, outcome) + 1)
