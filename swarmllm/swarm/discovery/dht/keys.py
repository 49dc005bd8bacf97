"""What is looked for in the DHT, and how near two things are.

A key is a multihash, as other implementations take it from a CID: that of a model is its ModelId, which is a
BLAKE3 hash already; that of a name is a hash with a context of its own, so that no name is another's ModelId.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from blake3 import blake3
from libp2p.peer.id import ID

from swarmllm_proto.identifiers import ModelId, NodeId, is_model_id

KEY_MAX_BYTES = 64
"""The longest multihash that is looked at; ours have 34."""
_BLAKE3 = bytes((0x1E, 0x20))
_NAME_CONTEXT = "swarmllm 2026 model name in the DHT"


def model_key(model_id: ModelId) -> bytes:
    """`model_id`: 64 hexadecimal digits."""
    return _BLAKE3 + bytes.fromhex(model_id)


def name_key(name: str) -> bytes:
    return _BLAKE3 + blake3(name.encode(), derive_key_context=_NAME_CONTEXT).digest()


def keys_of(name_or_id: str) -> tuple[bytes, ...]:
    """The beginning of an id leads nowhere: a hash has no near misses."""
    return (*([model_key(name_or_id)] if is_model_id(name_or_id) else []), name_key(name_or_id))


def place(content: bytes) -> int:
    """Where a key, or a node by the bytes of its id, is in the space of distances."""
    return int.from_bytes(hashlib.sha256(content).digest(), "big")


@lru_cache(4096)
def node_key(node_id: NodeId) -> bytes:
    """What FIND_NODE asks for."""
    return bytes(ID.from_base58(node_id).to_bytes())


def node_place(node_id: NodeId) -> int:
    return place(node_key(node_id))
