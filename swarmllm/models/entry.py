"""One model of the catalogue: its name, its file, its manifest, and what of it is there.

It also computes the number of parameters and their quantisation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gguf import GGMLQuantizationType

from swarmllm.errors import BadModel
from swarmllm.models.manifest import Manifest, TensorEntry
from swarmllm.models.model_files import FileState, PartFile, joint_state
from swarmllm.models.projector import Projector, ProjectorState
from swarmllm_proto.identifiers import ModelId

_MIXED = frozenset({"Q3_K", "Q4_K", "Q5_K"})
"""Types of which llama.cpp makes mixtures with larger types for some tensors."""


def n_parameters(manifest: Manifest) -> int:
    return sum(math.prod(tensor.shape) for tensor in manifest.tensors)


def parameter_size(manifest: Manifest) -> str:
    """As people say it: 7.2B, 494M."""
    n = n_parameters(manifest)
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n >= unit:
            shown = f"{n / unit:.1f}" if n < 100 * unit and unit == 10**9 else f"{n / unit:.0f}"
            return f"{shown}{letter}"
    return str(n)


def quantisation(manifest: Manifest) -> str:
    """The type of most parameters; of a mixture with llama.cpp's name as far as the tensors tell: Q4_K_M
    where some matrices of the layers have a larger type, else Q4_K_S."""
    n_of: Counter[int] = Counter()
    for tensor in manifest.tensors:
        if len(tensor.shape) > 1:
            n_of[tensor.ggml_type] += math.prod(tensor.shape)
    if not n_of:
        return "unknown"
    most = GGMLQuantizationType(n_of.most_common(1)[0][0])
    name = str(most.name)
    if name not in _MIXED:
        return name
    in_layers = {
        GGMLQuantizationType(tensor.ggml_type).name
        for tensor in manifest.tensors
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1
    }
    return f"{name}_{'M' if in_layers & ({'Q5_K', 'Q6_K'} - {name}) else 'S'}"


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    model_id: ModelId
    name: str
    path: Path
    """Of several files, the first."""
    manifest: Manifest
    state: FileState
    """How the file looked when it was hashed."""
    present: frozenset[str] | None = None
    """Names of the tensors that are there, of a file that the store owns; None: the whole file is the
    user's."""

    pinned: bool = False
    """It is not removed to make room."""
    further_names: tuple[str, ...] = ()
    """Other names that lead to it."""
    parts: tuple[PartFile, ...] = ()
    """The files of a model that the user has in parts; empty for one file."""
    projector: Projector | None = None
    """What makes rows of pictures for it on this node; None also while that is unloaded."""
    projector_state: ProjectorState = "on_demand"
    unloaded_projector: Projector | None = None
    """In the place of `projector` while it is unloaded."""

    @property
    def attached_projector(self) -> Projector | None:
        """Loaded or not."""
        return self.projector or self.unloaded_projector

    @property
    def modified_s(self) -> float:
        """When its file, or the latest of its files, was written, in seconds since 1970."""
        return max((part.mtime_ns for part in self.parts), default=self.state.mtime_ns) / 1e9

    @property
    def is_stored(self) -> bool:
        """The file came from other nodes and belongs to the store."""
        return self.present is not None

    def absent(self, tensors: Iterable[TensorEntry]) -> tuple[TensorEntry, ...]:
        """Those of `tensors` that are not in the file."""
        if self.present is None:
            return ()
        return tuple(tensor for tensor in tensors if tensor.name not in self.present)

    def check_file(self) -> FileState:
        """How the file looks now. Raises BadModel where it is gone or has another size. Blocking."""
        try:
            now = self._file_now()
        except OSError as error:
            place = error.filename or self.path
            raise BadModel(
                f"the file of model {self.name} cannot be read ({place}: {error.strerror}); put it back"
                f" or add the model again from where it is now: swarmllm models add PATH --name {self.name}"
            ) from error
        if now.size_bytes == self.state.size_bytes:
            return now
        if self.is_stored:
            raise BadModel(
                f"the file of model {self.name} was damaged ({self.path}); fetch it anew:"
                f" swarmllm models rm {self.name}, then load it again"
            )
        raise self.has_changed()

    def _file_now(self) -> FileState:
        if not self.parts:
            return FileState.of(self.path.stat())
        found = [Path(part.path).stat() for part in self.parts]
        for part, each in zip(self.parts, found, strict=True):
            if each.st_size != part.size_bytes:
                raise self.has_changed()
        return joint_state(self.state.size_bytes, found)

    def is_as_hashed(self) -> bool:
        """Whether the file is there and looks as it did. Blocking."""
        try:
            return self.check_file() == self.state
        except BadModel:
            return False

    def trouble(self) -> str:
        """What is wrong with the file; "" where nothing is, as far as its size tells. Blocking."""
        try:
            self.check_file()
        except BadModel as error:
            return error.message
        return ""

    def has_changed(self) -> BadModel:
        return BadModel(
            f"the file of model {self.name} has changed since it was added ({self.path}); add it again: "
            f"swarmllm models add {self.path} --name {self.name}"
        )
