"""What a model is: its identity, hyper-parameters and shards.

The ModelId is BLAKE3 over *canonical text* (`canonical_bytes`), and that text is chosen so that the id
stays what it is when the same model is stored differently:

- content, never place: no file offsets, no file order, no alignment, no name of the file or of the model in
  the catalogue. A model put together from layers of several peers has the id of the GGUF it came from, and
  so would a split GGUF;
- a shard's digest covers the names, types, shapes and digests of its tensors, sorted by name. Tensors are
  hashed one by one so that each can be checked on its own (even each MiB of it, see `tensor_digest`), and so
  that the file is read front to back whatever the order of names;
- metadata counts (tokenizer, chat template, RoPE and every other hyper-parameter change what the model
  says), as the raw bytes of each value, sorted by key; only the keys that describe the container are left
  out (`LAYOUT_KEYS`);
- what this program derives (cut alignment, sizes, vocabulary size) does not count: it may be corrected
  without making a model a stranger to its holders;
- lines of plain text rather than JSON or msgpack: there is one way to write them, in any language.

Four kinds of shard: a `layer` each; `embedding` and `head`, which only the ends of a pipeline need; and
`header`, which everybody needs: metadata and the few tensors that all layers share (`rope_freqs`).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from blake3 import blake3
from msgspec import Meta

from swarmllm.models.layers import LayerRange
from swarmllm_proto.identifiers import ModelId

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Meta(ge=0)]
ShardKind = Literal["layer", "embedding", "head", "header"]

MMPROJ_INDEX = 2**32 - 1
"""Kept free for the projector of a vision encoder, which no manifest holds yet."""
HEAD_INDEX = 2**32 - 2
EMBEDDING_INDEX = 2**32 - 3
HEADER_INDEX = 2**32 - 4
"""Beyond all layers, so that a shard's index alone says which it is."""

LAYOUT_KEYS = frozenset({"general.alignment", "split.no", "split.count", "split.tensors.count"})
"""Metadata about the container, not the model."""

_FIRST_LINE = "swarmllm-model 2"


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    ggml_type: Count
    shape: tuple[Count, ...]
    """ggml's order: the fastest-moving dimension first."""
    offset: Count
    """In the file this manifest was made from; not part of the identity."""
    size_bytes: Count
    blake3: Digest
    """As `tensor_digest` has it."""


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest unit that is hashed, moved and stored."""

    index: Count
    """The layer's, or one of the above."""
    kind: ShardKind
    size_bytes: Count
    blake3: Digest
    tensors: tuple[TensorEntry, ...]
    """Sorted by name."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    architecture: str
    n_layers: Count
    n_embd: Count
    n_vocab: Count
    context_length: Count
    cut_alignment: Count
    """Layers may be cut at multiples of this; 0: the model runs whole only."""
    whole_reason: str
    """Why the model cannot be cut, where cut_alignment is 0."""
    tied_embedding: bool
    """The head reads the embedding's matrix, so whoever runs the head needs the embedding shard too."""
    size_bytes: Count
    shards: tuple[Shard, ...]
    """header, embedding, layers 0 ..., head."""
    cuts_checked_with: str = ""
    """The version of the engine with which this node has tried the cuts itself (see `cuts`)."""

    @property
    def canonical_bytes(self) -> bytes:
        lines = [_FIRST_LINE, f"architecture {self.architecture}", f"layers {self.n_layers}"]
        lines += [f"{shard.kind} {shard.index} {shard.blake3}" for shard in self.shards]
        return ("\n".join(lines) + "\n").encode()

    @property
    def model_id(self) -> ModelId:
        """64 hexadecimal digits."""
        return ModelId(blake3(self.canonical_bytes).hexdigest())

    @property
    def whole(self) -> LayerRange:
        return LayerRange(0, self.n_layers)

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        """Of all shards, in their order."""
        return tuple(tensor for shard in self.shards for tensor in shard.tensors)

    def can_cut_at(self, layer: int) -> bool:
        """Whether a segment may begin or end at `layer`."""
        if layer in (0, self.n_layers):
            return True
        return self.cut_alignment > 0 and layer % self.cut_alignment == 0 and layer < self.n_layers


def make_shard(
    kind: ShardKind, index: int, tensors: list[TensorEntry], metadata: dict[str, str] | None = None
) -> Shard:
    """A shard with its digest. `metadata`: key -> hexadecimal BLAKE3 of the value's bytes, for the header
    shard."""
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    lines = [f"key {key} {digest}" for key, digest in sorted((metadata or {}).items())]
    lines += [
        f"tensor {tensor.name} {tensor.ggml_type} {','.join(map(str, tensor.shape))} {tensor.blake3}"
        for tensor in ordered
    ]
    return Shard(
        kind=kind,
        index=index,
        size_bytes=sum(tensor.size_bytes for tensor in ordered),
        blake3=blake3(("\n".join(lines) + "\n").encode()).hexdigest(),
        tensors=tuple(ordered),
    )


def tensor_place(name: str) -> tuple[ShardKind, int]:
    """The shard a tensor belongs to, by llama.cpp's names."""
    if name.startswith("blk."):
        layer = name.split(".", 2)[1]
        if layer.isascii() and layer.isdigit() and len(layer) <= 5:
            return "layer", int(layer)
    if name.startswith(("token_embd", "position_embd", "token_types", "per_layer_token_embd")):
        return "embedding", EMBEDDING_INDEX
    if name.startswith(("output", "cls")):
        return "head", HEAD_INDEX
    return "header", HEADER_INDEX
