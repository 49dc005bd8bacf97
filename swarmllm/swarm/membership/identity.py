"""The identity of this node: an Ed25519 key whose public half is the node id.

The same key authenticates both planes (libp2p's Noise and the data plane's) and signs what the node says
about itself. The file holds libp2p's own encoding of a private key, readable by its owner only. Only Ed25519
ids are accepted from others too: they contain the public key, so a signature can be checked by anybody who
knows nothing but the id.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from libp2p.crypto.ed25519 import Ed25519PublicKey, create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.serialization import deserialize_private_key, deserialize_public_key
from libp2p.peer.id import ID

from swarmllm.errors import ConfigError
from swarmllm.private_files import write_private
from swarmllm_proto.identifiers import NodeId, parse_node_id

log = logging.getLogger(__name__)

KEY_NAME = "identity.key"
NODE_ID_MAX = 128
_KEY_FILE_MAX = 4096
_IDENTITY_MULTIHASH = 0


@dataclass(frozen=True, slots=True)
class Identity:
    node_id: NodeId
    key_pair: KeyPair = field(repr=False, compare=False)

    def sign(self, content: bytes) -> bytes:
        signature: bytes = self.key_pair.private_key.sign(content)
        return signature


def load_or_create_identity(data_dir: Path) -> Identity:
    """Blocking. Raises ConfigError when the file exists and holds no Ed25519 key: a new identity is never
    made silently."""
    path = data_dir / KEY_NAME
    if not path.exists():
        write_private(path, create_new_key_pair().private_key.serialize())
    try:
        _close_to_others(path)
        with path.open("rb") as file:
            content = file.read(_KEY_FILE_MAX)
        private_key = deserialize_private_key(content)
        public_key = private_key.get_public_key()
        if not isinstance(public_key, Ed25519PublicKey):
            raise TypeError("not an Ed25519 key")
    except Exception as error:
        raise ConfigError(
            f"cannot read the identity in {path} ({type(error).__name__}); "
            "restore it, or remove it to become a new node",
            field="data_dir",
        ) from None
    return Identity(parse_node_id(str(ID.from_pubkey(public_key))), KeyPair(private_key, public_key))


def verify(node_id: NodeId, content: bytes, signature: bytes) -> bool:
    """Whether the owner of `node_id` signed this. False for ids that are not Ed25519; never raises."""
    public_key = _public_key(node_id)
    if public_key is None:
        return False
    try:
        return bool(public_key.verify(content, signature))
    except Exception:
        return False


@lru_cache(maxsize=8192)
def _public_key(node_id: NodeId) -> Ed25519PublicKey | None:
    try:
        encoded = ID.from_base58(node_id).to_bytes() if len(node_id) <= NODE_ID_MAX else b""
        if encoded[:2] != bytes((_IDENTITY_MULTIHASH, len(encoded) - 2)):
            return None
        public_key = deserialize_public_key(encoded[2:])
    except Exception:
        return None
    if not isinstance(public_key, Ed25519PublicKey) or str(ID.from_pubkey(public_key)) != node_id:
        return None
    return public_key


def _close_to_others(path: Path) -> None:
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        log.warning("%s was readable by others (mode %o); it is now private", path, mode)
        path.chmod(0o600)
