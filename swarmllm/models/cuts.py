"""Where a model may be cut whose architecture is not in the table (`swarmllm_proto.architectures`).

Somebody has to try it, and that takes the whole file (`swarmllm_workers.engine.cut_check`). What comes of it
becomes part of the manifest, which is no part of the ModelId: the model is the same before and after. A node
that fetches layers of the model cannot try, so the node it learns the model from tells what it found. That is
hearsay: it counts only where the table knows nothing, and until this node can try for itself. It adds nothing
to what a node that gives layers or computes them could do anyway, which is to be wrong about numbers.
"""

from __future__ import annotations

import msgspec

from swarmllm.models.manifest import Manifest
from swarmllm_proto.architectures import ARCHITECTURES


def checked_unit(manifest: Manifest) -> int:
    """Layers per part, where that comes from a self-check; 0: from the table, or there was none."""
    return 0 if manifest.architecture in ARCHITECTURES else manifest.cut_alignment


def needs_check(manifest: Manifest, engine: str) -> bool:
    """Whether nobody here has tried this model with this version of the engine."""
    return manifest.architecture not in ARCHITECTURES and manifest.cuts_checked_with != engine


def with_verdict(manifest: Manifest, cut_alignment: int, whole_reason: str, engine: str) -> Manifest:
    """After a self-check with this version of the engine. `cut_alignment` 0: with the reason."""
    return msgspec.structs.replace(
        manifest, cut_alignment=cut_alignment, whole_reason=whole_reason, cuts_checked_with=engine
    )


def with_hearsay(manifest: Manifest, unit: int) -> Manifest:
    """After another node has told what it found; 0: nothing."""
    if manifest.architecture in ARCHITECTURES or not 0 < unit < manifest.n_layers:
        return manifest
    return msgspec.structs.replace(manifest, cut_alignment=unit, whole_reason="")
