"""From a model's file to segments in memory: which file a layer range runs from, and where that file is.

A range runs straight from the pages of the model's file, without a copy of it (`shared_weights.py`). Where
that cannot be, it runs from a segment file: with `mlock`, without `mmap`, with layers on a GPU, or where
libllama does not tell where its tensors are.

Segment files that were cut from a file of the user's are a cache (`SegmentCache`): cut once, found again by
name, removed by the daemon when nobody has used them for long. A file's name holds the identity of its source
(path, size, modification time), the layout version of this code and the range, so nothing needs to be
recorded and a changed source is never mistaken. Files appear by rename, complete or not at all. Removing one
that a worker has mapped is harmless: its pages stay until they are unmapped. Those of a container of the
store: `container_segments.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from swarmllm_proto.architectures import Architecture
from swarmllm_proto.segment_names import copy_name, copy_prefix
from swarmllm_proto.split_files import joint_mtime_ns
from swarmllm_workers.decode.bounded_call import mapping
from swarmllm_workers.engine import segment_file, shared_weights
from swarmllm_workers.engine.container_segments import ContainerSegments
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.engine.memory import n_gpu_layers_of, predict
from swarmllm_workers.engine.ranges import Cuts, Range
from swarmllm_workers.engine.segment import Segment
from swarmllm_workers.engine.shared_weights import Part
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import GgufFile, files_of
from swarmllm_workers.kernels import repacking, small_batches

log = logging.getLogger(__name__)


class SegmentCache:
    def __init__(self, folder: Path, source: GgufFile) -> None:
        self._folder = folder
        self._source = source
        files = [(status.st_size, status.st_mtime_ns) for status in (path.stat() for path in source.paths)]
        mtime_ns = files[0][1] if len(files) == 1 else joint_mtime_ns(files)
        self._prefix = copy_prefix(str(source.path.resolve()), sum(size for size, _ in files), mtime_ns)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CallError("bad_message", f"{folder}: {error.strerror}", "cache_dir") from error

    def path(self, start: int, end: int) -> Path:
        return self._folder / copy_name(self._prefix, start, end)

    def ensure(
        self, architecture: Architecture, start: int, end: int, progress: segment_file.Progress | None = None
    ) -> Path:
        """The segment file of [start, end), cut now where it is missing. Raises CallError as `cut` does."""
        path = self.path(start, end)
        try:
            os.utime(path)
        except FileNotFoundError:
            segment_file.cut(self._source, architecture, start, end, path, progress)
        return path

    def places(self, _start: int, _end: int) -> dict[str, tuple[Path, int]]:
        """Files and offsets of tensors that have moved: none."""
        return {}

    def whole(self) -> Path:
        """The file itself."""
        return self._source.path

    def settle(self, running: Collection[Range]) -> None:
        """These are copies of a user's file; nothing is to be put in order."""


LoadProgress: TypeAlias = Callable[[int, int], None]


class SegmentMaker:
    """Of one model. The whole of it as one segment is the original file, and other ranges are parts of it;
    where parts cannot be, they are segment files."""

    def __init__(
        self,
        source: GgufFile,
        n_layers: int,
        cuts: Cuts,
        settings: EngineSettings,
        cache_dir: Path,
        *,
        owns_path: bool,
    ) -> None:
        self._source = source
        self._n_layers = n_layers
        self._cuts = cuts
        self._settings = settings
        self._files: SegmentCache | ContainerSegments = (
            ContainerSegments(cache_dir, source, n_layers) if owns_path else SegmentCache(cache_dir, source)
        )

    def whole_file(self) -> Path:
        """The GGUF with everything in it. Nothing may be loaded."""
        return self._files.whole()

    def open_all(self, pieces: Iterable[Range], progress: LoadProgress | None = None) -> list[Segment]:
        """A segment for each piece, or none at all. Raises CallError."""
        opened = []
        with ExitStack() as undo:
            for piece in pieces:
                segment = self.open(*piece, progress)
                undo.callback(segment.close)
                opened.append(segment)
            undo.pop_all()
        return opened

    def shares(self, within: Segment) -> bool:
        """Whether parts of this segment, closed or not, have the same pages of its file."""
        return within.is_shared and _shares_pages(self._settings)

    def open(
        self, start: int, end: int, progress: LoadProgress | None = None, within: Segment | None = None
    ) -> Segment:
        """Raises CallError. `progress`: bytes loaded, and of how many. `within`: a segment, closed or not,
        that has these layers and more: their pages are in memory."""
        is_whole, architecture = (start, end) == (0, self._n_layers), self._cuts.architecture
        path = self._files.whole() if is_whole else None
        n_gpu_layers = n_gpu_layers_of(self._source, self._n_layers, (start, end), self._settings)
        settings = replace(self._settings, n_gpu_layers=n_gpu_layers)
        part = self._part(architecture, start, end, settings)
        if part is not None:
            try:
                return self._open_part(part, settings, start, end, progress, is_new=within is None)
            except CallError as error:
                if error.kind != "bad_model":
                    raise
                log.info("layers %d:%d are loaded from a file of their own: %s", start, end, error.message)
        if path is None:
            assert architecture is not None  # cut_rule lets no other model be cut
            path = self._files.ensure(architecture, start, end, progress)
        size_bytes = sum(each.stat().st_size for each in files_of(path))
        needed = predict(self._source, self._n_layers, [(start, end)], settings)
        with mapping(needed.total_bytes + 2 * size_bytes):
            return Segment(
                path,
                start,
                end,
                n_layers=self._n_layers,
                architecture=self._architecture_of(start, end),
                settings=settings,
                on_progress=_in_bytes(progress, size_bytes),
            )

    def _architecture_of(self, start: int, end: int) -> Architecture | None:
        is_whole = (start, end) == (0, self._n_layers)
        return None if is_whole and not self._cuts.is_fed_tokens else self._cuts.architecture

    def _part(
        self, architecture: Architecture | None, start: int, end: int, settings: EngineSettings
    ) -> Part | None:
        """None: it has to be a file, the original or a segment file. The original does where ggml rearranges
        none of its matrices; where it does, only parts have these once together."""
        if not _shares_pages(settings):
            return None
        if (start, end) == (0, self._n_layers):
            arranges = small_batches.leaves_weights() and repacking.rearranges(files_of(self._source.path))
            return segment_file.plan_whole(self._source) if arranges else None
        assert architecture is not None  # cut_rule lets no other model be cut
        places = self._files.places(start, end)
        return segment_file.plan_part(self._source, architecture, start, end, places)

    def _open_part(
        self,
        part: Part,
        settings: EngineSettings,
        start: int,
        end: int,
        progress: LoadProgress | None,
        *,
        is_new: bool,
    ) -> Segment:
        needed = predict(self._source, self._n_layers, [(start, end)], settings)
        with mapping(needed.total_bytes + part.mapped_bytes):
            if is_new:
                part.read_in(_in_bytes(progress, needed.weights_bytes))
            return Segment(
                self._source.path,
                start,
                end,
                n_layers=self._n_layers,
                architecture=self._architecture_of(start, end),
                settings=settings,
                part=part,
                file_layers=(0, self._n_layers),
            )

    def settle(self, running: Sequence[Segment]) -> None:
        """Put segment files in order, unless the original is mapped and must not change."""
        if not any(self.maps_source(segment) for segment in running):
            self._files.settle({segment.file_layers for segment in running})

    def maps_source(self, segment: Segment) -> bool:
        """Whether the original must not change as long as this segment is there."""
        return segment.path == self._source.path


def _shares_pages(settings: EngineSettings) -> bool:
    is_mapped = settings.use_mmap and not settings.use_mlock and not settings.n_gpu_layers
    return is_mapped and shared_weights.is_supported()


def _in_bytes(progress: LoadProgress | None, size_bytes: int) -> Callable[[float], None] | None:
    """Of a fraction."""
    if progress is None:
        return None
    return lambda fraction: progress(int(fraction * size_bytes), size_bytes)
