"""Processes that add, take in, fetch, cut and mend models are killed at random moments, over and over on one
store: nothing that counts is ever lost or wrong."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from swarmllm.errors import BadModel, ModelNotFound
from swarmllm.guide import GUIDE_PATH
from swarmllm.models import Catalogue, CatalogueEntry, Store, build_manifest
from swarmllm_proto.architectures import ARCHITECTURES
from swarmllm_proto.segment_names import FOLDER
from swarmllm_proto.swarm import Outline
from swarmllm_workers.engine.container_segments import ContainerSegments
from swarmllm_workers.errors import CallError
from swarmllm_workers.gguf_file import GgufFile

pytestmark = pytest.mark.slow

MANIFEST = build_manifest(GUIDE_PATH)
TENSORS = MANIFEST.tensors
HEADER_BYTES = min(tensor.offset for tensor in TENSORS)
KILLS_OF_EACH = 8
LATEST_S = 0.12
RANGES = [(0, 4), (2, 6), (4, 8), (5, 12), (8, 12)]


class Place:
    """The folder of a node that starts anew after each kill."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.catalogue = Catalogue(folder / "catalogue.sqlite")
        self.store = Store(self.catalogue, folder / "models", copies=folder / "copies")
        self.store.sweep()

    def entry(self) -> CatalogueEntry:
        """The container; made known where it is not."""
        try:
            entry = self.catalogue.resolve(MANIFEST.model_id)
            if entry.is_stored:
                return entry
        except (ModelNotFound, BadModel):
            pass
        digests = {tensor.name: tensor.blake3 for tensor in TENSORS}
        outline = Outline(header_bytes=HEADER_BYTES, size_bytes=GUIDE_PATH.stat().st_size, digests=digests)
        header = GUIDE_PATH.read_bytes()[:HEADER_BYTES]
        return self.store.adopt(MANIFEST.model_id, "tiny", outline, header)

    def home(self, entry: CatalogueEntry) -> ContainerSegments:
        return ContainerSegments(entry.path.parent / FOLDER, GgufFile(entry.path), MANIFEST.n_layers)


def add(place: Place, dice: random.Random) -> None:
    mine = place.folder / "mine.gguf"
    if not mine.exists():
        shutil.copyfile(GUIDE_PATH, mine.with_suffix(".part"))
        mine.with_suffix(".part").rename(mine)
    place.catalogue.add(mine, "tiny")
    place.store.remove(place.catalogue.get("tiny"))


def take_in(place: Place, dice: random.Random) -> None:
    # A new file each time: killed before it had removed the last one, the store still shares its bytes.
    incoming = place.folder / "incoming.gguf"
    incoming.unlink(missing_ok=True)
    shutil.copyfile(GUIDE_PATH, incoming)
    place.store.remove(place.store.take_in(incoming, "tiny"))


def transfer(place: Place, dice: random.Random) -> None:
    entry = place.entry()
    absent = list(entry.absent(TENSORS))
    if not absent:
        place.store.remove(entry)
        return
    dice.shuffle(absent)
    for tensor in absent:
        data = GUIDE_PATH.read_bytes()[tensor.offset : tensor.offset + tensor.size_bytes]
        writer = place.store.open_tensor(entry, tensor, place.catalogue.chunk_list(entry.model_id, tensor))
        writer.append(data[writer.n_bytes : max(writer.n_bytes, len(data) // 2)])
        writer.save()
        writer.append(data[writer.n_bytes :])
        assert writer.finish()
        writer.close()
    place.store.seal(entry)


def assemble(place: Place, dice: random.Random) -> None:
    entry = place.entry()
    place.store.copy_tensors(entry, entry.absent(TENSORS), GUIDE_PATH)
    home = place.home(place.store.seal(entry))
    for _ in range(6):
        layers = dice.choice(RANGES)
        home.ensure(ARCHITECTURES["llama"], *layers)
        home.settle({layers})
    home.whole()


def repair(place: Place, dice: random.Random) -> None:
    """Damage, and its removal."""
    entry = place.entry()
    place.store.copy_tensors(entry, entry.absent(TENSORS), GUIDE_PATH)
    home = place.home(place.store.seal(entry))
    layers = dice.choice(RANGES)
    segment = home.ensure(ARCHITECTURES["llama"], *layers)
    home.settle({layers})
    for path in (segment, entry.path):
        with path.open("r+b") as file:
            file.seek(dice.randrange(HEADER_BYTES // 2, path.stat().st_size // 2))
            file.write(b"\x5a")
        place.store.verify(place.entry(), lambda done, total: None)


Act = Callable[[Place, random.Random], None]


def kill_during(act: Act, folder: Path, dice: random.Random) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            place = Place(folder)
            os.write(writer, b"!")
            while True:
                act(place, dice)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as started:
        assert started.read(1)
    # Nothing to wait for: the moment is the point.
    time.sleep(dice.uniform(0.0, LATEST_S))
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def check(folder: Path, *, may_be_damaged: bool) -> None:
    """What the catalogue says is there is there and right, wherever it lies; nothing else is."""
    place = Place(folder)
    for entry in place.catalogue.list():
        damaged = place.store.verify(entry, lambda done, total: None)
        assert may_be_damaged or damaged == ()
        assert place.store.verify(place.catalogue.get(entry.model_id), lambda done, total: None) == ()
    assert place.store.sweep() == 0


def check_can_be_completed(folder: Path) -> None:
    place = Place(folder)
    entry = place.entry()
    place.store.copy_tensors(entry, entry.absent(TENSORS), GUIDE_PATH)
    entry = place.store.seal(entry)
    try:
        whole = place.home(entry).whole().read_bytes()
    except CallError as error:
        raise AssertionError(error.message) from error
    assert whole == GUIDE_PATH.read_bytes()
    assert [path.name for path in (folder / "models").iterdir()] == [entry.model_id]


@pytest.mark.parametrize("act", [add, take_in, transfer, assemble, repair], ids=lambda act: act.__name__)
def test_killed_at_any_moment_the_store_holds_what_it_says(act: Act, tmp_path: Path) -> None:
    dice = random.Random(f"kills {act.__name__}")
    for _ in range(KILLS_OF_EACH):
        kill_during(act, tmp_path, dice)
        check(tmp_path, may_be_damaged=act is repair)
    check_can_be_completed(tmp_path)
