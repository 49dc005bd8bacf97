"""Which tensors a node needs for what it does with a model: what travels, and no more.

A range needs its layers, and the `header` shard (metadata comes with the file, `rope_freqs` and the like are
tensors). The range that begins at 0 embeds the tokens that come back round the ring, as an origin embeds its
prompt, so both need the embedding. The range that ends at the last layer needs the head, and where the head
reads the embedding's matrix, that too. Cutting a segment copies the small tensors of both ends into every
one (norms; nobody reads them there), so everybody gets those: a few KB, against a rule per architecture.
"""

from __future__ import annotations

from collections.abc import Iterator

from swarmllm.models.layers import LayerRange
from swarmllm.models.manifest import Manifest, TensorEntry


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
