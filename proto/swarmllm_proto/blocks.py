"""Names for prefixes of a token sequence: a chain of BLAKE3 hashes, one per complete block of 64 tokens.

    root    = blake3("swarmllm block 1" || model id, 32 bytes || u32 start || u32 end)
    hash[0] = blake3(root      || u32 token 0 .. u32 token 63)
    hash[i] = blake3(hash[i-1] || u32 token 64i .. u32 token 64i + 63)

Little-endian throughout. Each hash stands for everything before it, so equal hashes mean equal prefixes, and
the longest common prefix is found by comparing lists. Model and layer range are in the root because the KV of
the same tokens differs between models and between ranges. Tokens after the last complete block have no name:
KV is shared in whole blocks only.

What is named to the stages of a request begins with a keyed hash of the root instead, so that nobody can look
up a prompt that was guessed. What a node announces of the KV that it keeps begins, in a private swarm, with a
hash of the root that is keyed with the network's key, and in an open one with the root itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

BLOCK_TOKENS: Final = 64
"""Tokens per block: short system prompts still fill one, and a block's hash costs nothing beside its
prefill."""

_DOMAIN: Final = b"swarmllm block 1"
_RANGE: Final = Struct("<II")


def root_hash(model_id: str, start: int, end: int) -> bytes:
    """What the chain of layers [start, end) of a model begins with. `model_id`: 64 hex digits (ValueError if
    not)."""
    model = bytes.fromhex(model_id)
    if len(model) != 32:
        raise ValueError(f"a model id has 64 hex digits, not {len(model_id)}")
    return blake3(_DOMAIN + model + _RANGE.pack(start, end)).digest()


def secret_root(secret: bytes, model_id: str, start: int, end: int) -> bytes:
    """The same for names that only anyone who knows the secret (32 bytes) can make: others can compare them,
    but not try out what they stand for."""
    return blake3(root_hash(model_id, start, end), key=secret).digest()


def kept_root(key: str, model_id: str, n_layers: int) -> bytes:
    """What the names of kept KV of a whole model begin with: `root_hash`, or where there is a `key` (64 hex
    digits) `secret_root`. Raises ValueError for other digits."""
    if not key:
        return root_hash(model_id, 0, n_layers)
    return secret_root(bytes.fromhex(key), model_id, 0, n_layers)


def extend_block_hashes(previous: bytes, tokens: Sequence[int] | npt.NDArray[Any]) -> tuple[bytes, ...]:
    """32 bytes per complete block of `tokens`, chained after `previous`: a root, or the hash of the block
    before.

    Token ids are 0 to 2**32 - 1 (ValueError if not).
    """
    ids = np.asarray(tokens, dtype=np.int64)
    if ids.ndim != 1:
        raise ValueError(f"tokens have one dimension, not {ids.ndim}")
    if ids.size and not (ids.min() >= 0 and ids.max() <= 0xFFFFFFFF):
        raise ValueError("a token id is outside 0 to 2**32 - 1")
    n_complete = ids.size // BLOCK_TOKENS * BLOCK_TOKENS
    rows = ids[:n_complete].astype("<u4").reshape(-1, BLOCK_TOKENS)
    hashes = []
    for row in rows:
        previous = blake3(previous + row.tobytes()).digest()
        hashes.append(previous)
    return tuple(hashes)
