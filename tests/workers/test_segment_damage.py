"""A wrong byte in a segment file, whoever made it, is found, and its layers are made or fetched again."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmllm.models import Catalogue, CatalogueEntry, Store
from swarmllm.models.gguf_header import read_header
from swarmllm_proto.architectures import ARCHITECTURES
from swarmllm_proto.segment_names import FOLDER
from swarmllm_workers.engine.container_segments import ContainerSegments
from swarmllm_workers.engine.segment_maker import SegmentCache
from swarmllm_workers.gguf_file import GgufFile

from .factory import Spec, build

N_LAYERS = 4
RANGES = [(1, 2), (2, N_LAYERS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("damage") / "model.gguf", Spec("llama", n_layers=N_LAYERS))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Catalogue(tmp_path / "catalogue.sqlite"), tmp_path / "models", copies=tmp_path / "copies")


def points(segment: Path, dice: random.Random) -> Iterator[int]:
    """Some bytes of the header, one of each tensor that anybody reads."""
    with segment.open("rb") as file:
        header = read_header(file)
    yield from dice.sample(range(header.data_offset), 6)
    for tensor in header.tensors:
        is_dummy = tensor.name.startswith(("token_embd", "output.")) and tensor.shape[-1] == 32
        if tensor.name != "token_embd.weight" and not is_dummy:
            yield tensor.offset + dice.randrange(tensor.size_bytes)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def verify(store: Store, entry: CatalogueEntry) -> tuple[str, ...]:
    return store.verify(store.catalogue.get(entry.model_id), lambda done, total: None)


def cut_all(entry: CatalogueEntry) -> list[Path]:
    home = ContainerSegments(entry.path.parent / FOLDER, GgufFile(entry.path), N_LAYERS)
    paths = [home.ensure(ARCHITECTURES["llama"], *each) for each in RANGES]
    home.settle(RANGES)
    return paths


def test_where_layers_have_moved_to(store: Store, model: Path, tmp_path: Path) -> None:
    dice = random.Random(9)
    incoming = tmp_path / "incoming.gguf"
    shutil.copyfile(model, incoming)
    entry = store.take_in(incoming, "tiny")
    segments = cut_all(entry)
    assert verify(store, entry) == ()
    whole = tmp_path / "whole"
    shutil.copytree(entry.path.parent, whole)
    for index, segment in enumerate(segments):
        for at in [*points(segment, dice)][index::6]:
            flip(segment, at)
            found = verify(store, entry)
            assert len(found) == 1, (segment.name, at, found)
            assert not segment.exists()
            start, end = RANGES[index]
            absent = {tensor.name for tensor in store.catalogue.get("tiny").absent(entry.manifest.tensors)}
            assert {f"blk.{layer}.attn_q.weight" for layer in range(start, end)} <= absent
            store.copy_tensors(entry, [t for t in entry.manifest.tensors if t.name in absent], model)
            assert verify(store, store.seal(entry)) == ()
            shutil.copyfile(whole / FOLDER / segment.name, segment)


def test_where_layers_of_a_users_file_were_copied_to(store: Store, model: Path, tmp_path: Path) -> None:
    dice = random.Random(10)
    entry = store.catalogue.add(model, "mine")
    cache = SegmentCache(tmp_path / "copies", GgufFile(model))
    for start, end in RANGES:
        for at in points(cache.ensure(ARCHITECTURES["llama"], start, end), dice):
            segment = cache.ensure(ARCHITECTURES["llama"], start, end)
            flip(segment, at)
            assert verify(store, entry) == (f"segment {start}:{end}",), at
            assert not segment.exists()
    kept = cache.ensure(ARCHITECTURES["llama"], 0, 1)
    assert verify(store, entry) == ()
    assert store.sweep() == 0
    store.remove(entry)
    assert not kept.exists()
    assert model.exists()
