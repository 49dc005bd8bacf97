"""A model in several GGUF files, read as one: the first has the metadata, each has some of the tensors.

libllama finds the other parts by their names as well (`swarmllm_proto.split_files`), so the whole model runs
straight from them; segment files are cut from whichever parts have their layers.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from swarmllm_proto.split_files import SPLIT_COUNT, SPLIT_MAX, SPLIT_NO, SPLIT_TENSORS, parse_split_name
from swarmllm_workers.engine.gguf_file import N_TENSORS_MAX, GgufFile, TensorInfo
from swarmllm_workers.errors import CallError


class SplitSource(GgufFile):
    """`path` and `values` are those of the first part, `tensors` those of all, in the order of the parts."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._parts: dict[Path, GgufFile] = {}
        try:
            self._open_parts()
        except CallError:
            self.close()
            raise

    def _open_parts(self) -> None:
        self.paths = files_of(self.path)
        n_tensors = self.integer(SPLIT_TENSORS, -1)
        for number, path in enumerate(self.paths):
            part = GgufFile(path) if number else self
            if number:
                self._parts[path] = part
            if (part.integer(SPLIT_NO, -1), part.integer(SPLIT_COUNT, 1)) != (number, len(self.paths)):
                raise CallError(
                    "bad_model", f"{path.name} is not part {number + 1} of {len(self.paths)}", "path"
                )
            if number:
                self._add(part)
        if len(self.tensors) != n_tensors:
            raise CallError(
                "bad_model",
                f"{self.path.name} announces {n_tensors} tensors, its parts have {len(self.tensors)}",
                "path",
            )

    def _add(self, part: GgufFile) -> None:
        for name, tensor in part.tensors.items():
            if name in self.tensors:
                raise CallError("bad_model", f"{part.path.name} has tensor {name} again", "path")
            self.tensors[name] = tensor
        if len(self.tensors) > N_TENSORS_MAX:
            raise CallError("bad_model", f"the parts have more than {N_TENSORS_MAX} tensors", "path")
        self.size_bytes += part.size_bytes

    def _map_of(self, tensor: TensorInfo) -> mmap.mmap:
        part = self._parts.get(tensor.path)
        return self.map if part is None else part.map

    def close(self) -> None:
        for part in self._parts.values():
            part.close()
        super().close()


def open_source(path: Path) -> GgufFile:
    """The model whose file, or the first of whose files, is `path`. Raises CallError bad_model."""
    if len(files_of(path)) > 1:
        return SplitSource(path)
    source = GgufFile(path)
    if (count := source.integer(SPLIT_COUNT, 1)) > 1:
        source.close()
        raise CallError(
            "bad_model",
            f"{path.name} is one of {count} parts of a model, but not called NAME-00001-of-{count:05}.gguf",
            "path",
        )
    return source


def files_of(path: Path) -> tuple[Path, ...]:
    """All files of a model. Raises CallError bad_model where `path` is a part, but not the first."""
    name = parse_split_name(path.name)
    if name is None:
        return (path,)
    if name.number != 1 or name.count > SPLIT_MAX:
        raise CallError("bad_model", f"{path.name} is not the first of at most {SPLIT_MAX} parts", "path")
    return tuple(path.with_name(str(each)) for each in name.all())
