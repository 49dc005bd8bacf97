"""What a node says about KV that it kept (see `swarm` and `blocks`).

Unlike the names in a pipeline's assignment these hashes have no secret in them: whoever has the same model
and the same beginning of a prompt makes the same ones, and so finds out who has its KV. It also finds out
that somebody asked for just that, which is why a node says nothing of the kind unless it was told to.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from swarmllm_proto.swarm_base import DIGEST_SIZE, ModelId

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
