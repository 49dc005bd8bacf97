"""One model of the catalogue: its name, its file, its manifest, and what of it is there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from swarmllm.errors import BadModel
from swarmllm.models.manifest import Manifest, TensorEntry
from swarmllm.models.model_files import FileState, PartFile, joint_state
from swarmllm_proto.identifiers import ModelId


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
