"""Projectors that this node has fetched, from a hub or from other nodes: one folder, each file called after
the BLAKE3 of what is in it.

A projector file that the user has attached stays where it is, and does not belong to this store. Everything
here blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

import msgspec

from swarmllm.models.projector import Projector, read_projector

_SUFFIX: Final = ".gguf"
_PART: Final = ".part"


class ProjectorStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def part_of(self, digest: str) -> Path:
        """Where the bytes of a projector may be written that is on its way; its folder is there then."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._folder / f"{digest}{_PART}"

    def take_in(self, path: Path, progress: Callable[[int, int], None] | None = None) -> Projector:
        """Hash a file of this machine's disk, and let it be the store's from now on. Raises BadModel, also
        for a family that is not supported; the file stays where it is then."""
        read = read_projector(path, progress)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = self._folder / f"{read.blake3}{_SUFFIX}"
        path.replace(place)
        return msgspec.structs.replace(read, path=str(place))

    def owns(self, projector: Projector) -> bool:
        return Path(projector.path).parent == self._folder

    def keep(self, used: Collection[Projector], arriving: Collection[str] = ()) -> None:
        """Delete the files of all others, and what has come of those whose digest is not `arriving`."""
        wanted = {each.path for each in used} | {str(self._folder / f"{each}{_PART}") for each in arriving}
        for pattern in (f"*{_SUFFIX}", f"*{_PART}"):
            for path in self._folder.glob(pattern):
                if str(path) not in wanted:
                    path.unlink(missing_ok=True)
