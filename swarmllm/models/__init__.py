"""Model files: what they are (manifest), how they may be cut (layers), where they lie (catalogue). No
network, no libllama."""

from __future__ import annotations

from swarmllm.models.catalogue import Catalogue
from swarmllm.models.entry import CatalogueEntry
from swarmllm.models.hashing import build_manifest
from swarmllm.models.layers import LayerRange, covers, merge, subtract
from swarmllm.models.manifest import Manifest, Shard, TensorEntry, needed_tensors
from swarmllm.models.store import Store

__all__ = [
    "Catalogue",
    "CatalogueEntry",
    "LayerRange",
    "Manifest",
    "Shard",
    "Store",
    "TensorEntry",
    "build_manifest",
    "covers",
    "merge",
    "needed_tensors",
    "subtract",
]
