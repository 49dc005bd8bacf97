"""Describes a model: identity, hyper-parameters, shards, the tensors that a node needs, and where it is cut.

The ModelId is BLAKE3 over *canonical text* (`canonical_bytes`), and that text is chosen so that the id
stays what it is when the same model is stored differently:

- content, never place: no file offsets, no file order, no alignment, no name of the file or of the model in
  the catalogue. A model put together from layers of several peers has the id of the GGUF it came from, and
  so would a split GGUF;
- a shard's digest covers the names, types, shapes and digests of its tensors, sorted by name. Tensors are
  hashed one by one so that each can be checked on its own (even each MiB of it, see `hashing`), and so
  that the file is read front to back whatever the order of names;
- metadata counts (tokenizer, chat template, RoPE and every other hyper-parameter change what the model
  says), as the raw bytes of each value, sorted by key; only the keys that describe the container are left
  out (`LAYOUT_KEYS`);
- what this program derives (cut alignment, sizes, vocabulary size) does not count: it may be corrected
  without making a model a stranger to its holders;
- lines of plain text rather than JSON or msgpack: there is one way to write them, in any language.

Four kinds of shard: a `layer` each; `embedding` and `head`, which only the ends of a pipeline need; and
`header`, which everybody needs: metadata and the few tensors that all layers share (`rope_freqs`).

A range needs its layers, and the `header` shard (metadata comes with the file, `rope_freqs` and the like are
tensors). The range that begins at 0 embeds the tokens that come back round the ring, as an origin embeds its
prompt, so both need the embedding. The range that ends at the last layer needs the head, and where the head
reads the embedding's matrix, that too. Cutting a segment copies the small tensors of both ends into every
one (norms; nobody reads them there), so everybody gets those: a few KB, against a rule per architecture.

Where a model may be cut, the table of architectures (`swarmllm_proto.architectures`) says as far as it can;
whether that holds for this file somebody has to try, and that takes the whole file
(`swarmllm_workers.engine.cut_check`). What comes of it becomes part of the manifest, which is no part of the
ModelId: the model is the same before and after. A node that fetches layers of the model cannot try, so the
node it learns the model from tells what it found. That is hearsay: it counts until this node can try for
itself, and where the table knows the architecture, only against cuts. It adds nothing to what a node that
gives layers or computes them could do anyway, which is to be wrong about numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from blake3 import blake3
from msgspec import Meta

from swarmllm.models.layers import LayerRange
from swarmllm_proto.architectures import ARCHITECTURES, FAILED, TEXT_ENCODERS
from swarmllm_proto.identifiers import ModelId

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Meta(ge=0)]
ShardKind = Literal["layer", "embedding", "head", "header"]

MMPROJ_INDEX = 2**32 - 1
"""Of the projector of a vision encoder, which is a file of its own and in no manifest (see `projector`)."""
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
    """As `hashing.TensorHasher` computes it."""


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
    """The head reads the embedding's matrix, so a node that runs the head needs the embedding shard too."""
    size_bytes: Count
    shards: tuple[Shard, ...]
    """header, embedding, layers 0 ..., head."""
    n_deepstack: Count = 0
    """Further parts, each `n_embd` wide, that a picture's row has at layer 0: one for each of so many first
    layers."""
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
    def n_embd_input(self) -> int:
        """Width of a picture's rows at layer 0."""
        return self.n_embd * (1 + self.n_deepstack)

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


def needed_tensors(
    manifest: Manifest, layers: LayerRange | None = None, *, origin: bool = False
) -> tuple[TensorEntry, ...]:
    """For running `layers` (None: only what every use needs), and, as `origin`, for embedding prompts; in
    the order of the file."""
    return tuple(sorted(_needed(manifest, layers, origin), key=lambda tensor: tensor.offset))


def _needed(manifest: Manifest, layers: LayerRange | None, origin: bool) -> Iterator[TensorEntry]:
    has_head = layers is not None and layers.end == manifest.n_layers
    wants_embedding = origin or (layers is not None and layers.start == 0)
    wants_embedding |= has_head and manifest.tied_embedding
    wanted = {"header": True, "embedding": wants_embedding, "head": has_head}
    for shard in manifest.shards:
        for tensor in shard.tensors:
            if shard.kind == "layer":
                needed = layers is not None and shard.index in layers
            else:
                needed = wanted[shard.kind] or not is_vocabulary_sized(manifest, tensor)
            if needed:
                yield tensor


def is_vocabulary_sized(manifest: Manifest, tensor: TensorEntry) -> bool:
    """One row per token: the matrices that make the two ends of a model large."""
    return tensor.name.startswith(("token_embd.", "output.")) and tensor.shape[-1] == manifest.n_vocab


def is_text_encoder(manifest: Manifest) -> bool:
    """Whether the model encodes whole texts and generates none."""
    return manifest.architecture in TEXT_ENCODERS


def is_listed(manifest: Manifest) -> bool:
    """Whether the table of architectures says where it may be cut."""
    return manifest.architecture in ARCHITECTURES


def checked_unit(manifest: Manifest) -> int:
    """What a self-check found: layers may be cut at multiples of this, or, where it is the number of layers,
    nowhere; 0: nothing is known beyond the table."""
    if not is_listed(manifest):
        return manifest.cut_alignment
    if not manifest.cuts_checked_with:
        return 0
    return manifest.cut_alignment or manifest.n_layers


def needs_check(manifest: Manifest, engine: str) -> bool:
    """Whether nobody here has tried this model with this version of the engine. What the table says runs
    whole is not tried."""
    if is_text_encoder(manifest) or manifest.cuts_checked_with == engine:
        return False
    if is_listed(manifest):
        is_table = not manifest.cuts_checked_with and manifest.whole_reason != FAILED
        return manifest.cut_alignment > 0 or not is_table
    return True


def with_verdict(manifest: Manifest, cut_alignment: int, whole_reason: str, engine: str) -> Manifest:
    """After a self-check with this version of the engine. `cut_alignment` 0: with the reason."""
    return msgspec.structs.replace(
        manifest, cut_alignment=cut_alignment, whole_reason=whole_reason, cuts_checked_with=engine
    )


def with_reported_unit(manifest: Manifest, unit: int) -> Manifest:
    """After another node has told what it found; 0: nothing. Of an architecture in the table it may only
    forbid cuts that the table allows."""
    if is_text_encoder(manifest) or unit <= 0:
        return manifest
    if is_listed(manifest):
        allowed = manifest.cut_alignment
        if not allowed or (unit % allowed and unit < manifest.n_layers):
            return manifest
        if unit >= manifest.n_layers:
            return msgspec.structs.replace(manifest, cut_alignment=0, whole_reason=FAILED)
    elif unit >= manifest.n_layers:
        return manifest
    return msgspec.structs.replace(manifest, cut_alignment=unit, whole_reason="")
