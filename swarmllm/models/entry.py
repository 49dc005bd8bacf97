"""One model of the catalogue: its name, its file, its manifest, and what of it is there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from swarmllm.errors import BadModel
from swarmllm.models.hashing import FileState
from swarmllm.models.manifest import Manifest, TensorEntry


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    model_id: str
    name: str
    path: Path
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
            now = FileState.of(self.path.stat())
        except OSError as error:
            raise BadModel(
                f"the file of model {self.name} cannot be read ({self.path}: {error.strerror}); put it back"
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
