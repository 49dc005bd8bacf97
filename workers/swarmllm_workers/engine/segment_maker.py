"""From a model's file to segments in memory: which file a layer range runs from, and where that file is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

from swarmllm_workers.decode.bounded_call import mapping
from swarmllm_workers.engine.cutting import Cuts
from swarmllm_workers.engine.gguf_file import GgufFile
from swarmllm_workers.engine.memory import predict
from swarmllm_workers.engine.ranges import Range
from swarmllm_workers.engine.segment import EngineSettings, Segment
from swarmllm_workers.engine.segment_cache import SegmentCache
from swarmllm_workers.engine.segment_home import SegmentHome
from swarmllm_workers.engine.split_source import files_of

LoadProgress: TypeAlias = Callable[[int, int], None]


class SegmentMaker:
    """Of one model. The whole of it as one segment is the original file; everything else goes through segment
    files."""

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
        self._files: SegmentCache | SegmentHome = (
            SegmentHome(cache_dir, source, n_layers) if owns_path else SegmentCache(cache_dir, source)
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

    def open(self, start: int, end: int, progress: LoadProgress | None = None) -> Segment:
        """Raises CallError. `progress`: bytes loaded, and of how many."""
        is_whole, architecture = (start, end) == (0, self._n_layers), self._cuts.architecture
        if is_whole:
            path = self._files.whole()
        else:
            assert architecture is not None  # cut_rule lets no other model be cut
            path = self._files.ensure(architecture, start, end, progress)
        size_bytes = sum(each.stat().st_size for each in files_of(path))

        def on_progress(fraction: float) -> None:
            if progress is not None:
                progress(int(fraction * size_bytes), size_bytes)

        needed = predict(self._source, self._n_layers, [(start, end)], self._settings)
        with mapping(needed.total_bytes + 2 * size_bytes):
            return Segment(
                path,
                start,
                end,
                n_layers=self._n_layers,
                architecture=None if is_whole and not self._cuts.is_fed_tokens else architecture,
                settings=self._settings,
                on_progress=on_progress if progress is not None else None,
            )

    def settle(self, running: Sequence[Segment]) -> None:
        """Put the files in order, unless the original is mapped and must not change."""
        if not any(segment.is_whole for segment in running):
            self._files.settle({(segment.start, segment.end) for segment in running})
