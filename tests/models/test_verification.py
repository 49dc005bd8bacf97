"""A wrong byte is found wherever it is, and what had to go is gone also after a kill."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from gguf_parts import LLAMA, gguf_bytes, string, value

from swarmllm.errors import BadModel
from swarmllm.models import Catalogue, CatalogueEntry, Store
from swarmllm.models.damage import FILE_NAME as HEADER_COPY
from swarmllm.models.verification import HEADER, header_is_right
from swarmllm_proto.segment_names import FOLDER, SegmentName

KEYS = {**LLAMA, "general.alignment": 32, "llama.rope.freq_base": 10000.0}
MODEL = gguf_bytes(KEYS)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Catalogue(tmp_path / "catalogue.sqlite"), tmp_path / "models", copies=tmp_path / "copies")


@pytest.fixture
def entry(store: Store, tmp_path: Path) -> CatalogueEntry:
    return take_in(store, tmp_path)


def take_in(store: Store, tmp_path: Path) -> CatalogueEntry:
    path = tmp_path / "incoming.gguf"
    path.write_bytes(MODEL)
    return store.take_in(path, "tiny")


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))


def verify(store: Store, entry: CatalogueEntry) -> tuple[str, ...]:
    return store.verify(store.catalogue.get(entry.model_id), lambda done, total: None)


def unread_bytes() -> set[int]:
    """Padding, and the value of a key that describes the file and not the model: any value under which the
    tensors lie where they do is right."""
    alignment = MODEL.index(string("general.alignment")) + len(string("general.alignment"))
    layout = range(alignment, alignment + len(value(32)))
    bare = MODEL.index(string("output.weight")) + len(string("output.weight")) + 4 + 8 + 4 + 8
    return {*layout, *range(bare, header_bytes())}


def header_bytes() -> int:
    return len(MODEL) - 8 * 32


def test_a_wrong_byte_anywhere_in_a_container_is_found_and_its_header_mended(
    store: Store, entry: CatalogueEntry, tmp_path: Path
) -> None:
    dice = random.Random(41)
    read = sorted({*range(len(MODEL))} - unread_bytes())
    for at in [*dice.sample(read[: -8 * 32], 20), *dice.sample(read[-8 * 32 :], 4)]:
        flip(entry.path, at)
        found = verify(store, entry)
        assert len(found) == 1, at
        if at < header_bytes():
            assert found == (HEADER,), at
            assert entry.path.read_bytes() == MODEL, "mended at once"
        else:
            assert store.catalogue.get("tiny").absent(entry.manifest.tensors), "to be fetched again"
            store.remove(entry)
            entry = take_in(store, tmp_path)
        assert verify(store, entry) == ()


def test_a_header_that_cannot_be_mended_is_named(store: Store, entry: CatalogueEntry) -> None:
    copy = entry.path.with_name(HEADER_COPY)
    copy.unlink()
    assert verify(store, entry) == ()
    assert copy.stat().st_size == len(MODEL), "made again from the right one"
    flip(copy, 30)
    assert verify(store, entry) == (), "nobody reads it"
    flip(entry.path, 30)
    with pytest.raises(BadModel, match="models rm tiny"):
        verify(store, entry)


def test_a_wrong_byte_in_the_header_of_a_users_file_is_found(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(MODEL)
    entry = store.catalogue.add(path, "mine")
    for at in range(0, header_bytes(), 5):
        if at not in unread_bytes():
            flip(path, at)
            assert not header_is_right(path, entry.manifest), at
            flip(path, at)
    flip(path, 40)
    assert verify(store, entry) == (HEADER,)
    flip(path, 40)
    assert verify(store, entry) == ()


def test_a_kill_while_damage_is_removed_is_made_good_at_the_next_start(
    store: Store, entry: CatalogueEntry
) -> None:
    """The catalogue has lost the layer, the segment file that holds it is still there."""
    folder = entry.path.parent / FOLDER
    folder.mkdir()
    segment = folder / str(SegmentName(3, 0, 1))
    segment.write_bytes(b"whatever it was")
    with store.catalogue.database() as database:
        database.execute("DELETE FROM tensors WHERE name = 'blk.0.attn_q.weight'")
    store.sweep()
    assert not segment.exists()
    absent = store.catalogue.get("tiny").absent(entry.manifest.tensors)
    assert {tensor.name for tensor in absent} == {"blk.0.attn_q.weight", "blk.0.ffn_up.weight"}
    assert verify(store, entry) == ()


def test_what_a_killed_worker_left_half_written_is_swept(
    store: Store, entry: CatalogueEntry, tmp_path: Path
) -> None:
    folder, copies = entry.path.parent / FOLDER, tmp_path / "copies"
    folder.mkdir()
    copies.mkdir()
    for each in (folder, copies):
        (each / ".v4-0-1.gguf.4711").write_bytes(b"half")
        (each / "check-abc").mkdir()
        (each / "check-abc" / "part.gguf").write_bytes(b"half")
    (copies / f"{'ab' * 12}-0-1.gguf").write_bytes(b"of a file that has changed since")
    assert store.sweep() == 5
    assert [*folder.iterdir(), *copies.iterdir()] == []
    assert verify(store, entry) == ()
