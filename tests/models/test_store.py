"""Containers on a real disk: what counts is there, whatever happened meanwhile."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_parts import LLAMA, gguf_bytes, tensors, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmllm.errors import BadModel, StoreFull
from swarmllm.models import Catalogue, CatalogueEntry, LayerRange, Store, needed_tensors
from swarmllm.models.hashing import build_manifest
from swarmllm.models.store import FILE_NAME
from swarmllm_proto.swarm import Outline


class Source:
    """Somebody's whole file."""

    def __init__(self, path: Path) -> None:
        self.data = write_gguf(path).read_bytes()
        self.manifest = build_manifest(path)
        self.tensors = self.manifest.tensors
        n_bytes = min(tensor.offset for tensor in self.tensors)
        digests = {tensor.name: tensor.blake3 for tensor in self.tensors}
        self.outline = Outline(header_bytes=n_bytes, size_bytes=len(self.data), digests=digests)
        self.header = self.data[:n_bytes]

    def bytes_of(self, name: str) -> bytes:
        tensor = next(tensor for tensor in self.tensors if tensor.name == name)
        return self.data[tensor.offset : tensor.offset + tensor.size_bytes]

    def adopt(self, store: Store, name: str = "tiny") -> CatalogueEntry:
        return store.adopt(self.manifest.model_id, name, self.outline, self.header)

    def fill(self, store: Store, entry: CatalogueEntry, name: str) -> bool:
        tensor = next(tensor for tensor in self.tensors if tensor.name == name)
        writer = store.open_tensor(entry, tensor)
        try:
            writer.append(self.bytes_of(name)[writer.n_bytes :])
            return writer.finish()
        finally:
            writer.close()


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path / "source.gguf")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(Catalogue(tmp_path / "catalogue.sqlite"), tmp_path / "models")


def test_a_container_filled_tensor_by_tensor_is_the_file_again(source: Source, store: Store) -> None:
    entry = source.adopt(store)
    assert entry.present == frozenset()
    for tensor in source.tensors:
        assert source.fill(store, entry, tensor.name)
    entry = store.seal(entry)
    assert entry.absent(source.tensors) == ()
    assert entry.path.read_bytes() == source.data
    assert build_manifest(entry.path).model_id == entry.model_id
    entry.check_file()


def test_wrong_bytes_never_count(source: Source, store: Store) -> None:
    entry = source.adopt(store)
    tensor = source.tensors[0]
    writer = store.open_tensor(entry, tensor)
    writer.append(bytes(tensor.size_bytes - 1) + b"\x07")
    assert not writer.finish()
    assert writer.n_bytes == 0
    writer.close()
    assert store.catalogue.get("tiny").present == frozenset()
    assert source.fill(store, entry, tensor.name)
    assert store.catalogue.get("tiny").present == {tensor.name}


@settings(max_examples=20)
@given(cuts=st.lists(st.integers(1, 31), max_size=4))
def test_an_interrupted_tensor_goes_on_where_it_was_saved(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    source = Source(folder / "source.gguf")
    store = Store(Catalogue(folder / "catalogue.sqlite"), folder / "models")
    entry = source.adopt(store)
    tensor = source.tensors[0]
    reached = 0
    for cut in cuts:
        writer = store.open_tensor(entry, tensor)
        assert writer.n_bytes == reached
        writer.append(source.bytes_of(tensor.name)[reached : max(reached, cut)])
        writer.save()
        writer.append(source.bytes_of(tensor.name)[writer.n_bytes : writer.n_bytes + 1])
        writer.close()  # what was written after the save is forgotten
        reached = max(reached, cut)
    assert source.fill(store, entry, tensor.name)


OTHER_TENSORS = tensors() | {"output.weight": bytes(32)}
LIES = {
    "other metadata": {"header": gguf_bytes({**LLAMA, "llama.context_length": 65})},
    "a header that is none": {"header": b"GGUF" + bytes(2000)},
    "a short header": {"header": gguf_bytes()[:200]},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_is_not_the_models_is_refused_and_leaves_nothing(
    source: Source, store: Store, tmp_path: Path, lie: str
) -> None:
    header = LIES[lie]["header"][: len(source.header)]
    with pytest.raises(BadModel):
        store.adopt(source.manifest.model_id, "tiny", source.outline, header)
    assert list((tmp_path / "models").iterdir()) == []
    assert store.catalogue.list() == ()


def test_a_digest_that_is_not_the_models_is_refused(source: Source, store: Store) -> None:
    digests = {**source.outline.digests, "output.weight": "0" * 64}
    outline = Outline(
        header_bytes=source.outline.header_bytes, size_bytes=source.outline.size_bytes, digests=digests
    )
    with pytest.raises(BadModel, match="another model"):
        store.adopt(source.manifest.model_id, "tiny", outline, source.header)


def test_a_file_far_larger_than_its_tensors_is_refused(source: Source, store: Store) -> None:
    outline = Outline(
        header_bytes=source.outline.header_bytes, size_bytes=2**40, digests=source.outline.digests
    )
    with pytest.raises(BadModel, match="larger"):
        store.adopt(source.manifest.model_id, "tiny", outline, source.header)


def test_a_full_disk_is_said_and_what_was_there_stays(source: Source, store: Store) -> None:
    entry = source.adopt(store)
    first, second = source.tensors[:2]
    assert source.fill(store, entry, first.name)
    aside = entry.path.with_name("aside")
    entry.path.rename(aside)
    entry.path.symlink_to("/dev/full")
    with pytest.raises(StoreFull, match="No space"):
        source.fill(store, entry, second.name)
    entry.path.unlink()
    aside.rename(entry.path)
    assert store.catalogue.get("tiny").present == {first.name}
    assert source.fill(store, entry, second.name)
    assert store.verify(store.catalogue.get("tiny"), lambda done, total: None) == ()


def test_projectors_that_were_fetched_count_and_stay(tmp_path: Path) -> None:
    projectors = tmp_path / "projectors"
    store = Store(Catalogue(tmp_path / "catalogue.sqlite"), tmp_path / "models", 2**20, projectors=projectors)
    assert store.make_room(2**20, lambda entry: True) == []
    projectors.mkdir()
    (projectors / "a.gguf").write_bytes(b"x" * 2**19)
    assert store.used_bytes() == 2**19
    assert store.make_room(2**19, lambda entry: True) == []
    with pytest.raises(StoreFull, match=r"store\.quota_gib"):
        store.make_room(2**19 + 1, lambda entry: True)
    assert (projectors / "a.gguf").exists()


def test_the_quota_removes_what_may_go_or_nothing_at_all(source: Source, tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path / "catalogue.sqlite")
    store = Store(catalogue, tmp_path / "models", quota_bytes=1)
    entry = source.adopt(store)
    assert store.used_bytes() > 0
    with pytest.raises(StoreFull, match=r"store\.quota_gib"):
        store.make_room(0, lambda entry: False)
    assert entry.path.exists()
    assert store.pin(entry, True).pinned
    with pytest.raises(StoreFull):
        store.make_room(0, lambda entry: True)
    assert not store.pin(entry, False).pinned
    assert [gone.name for gone in store.make_room(0, lambda entry: True)] == ["tiny"]
    assert not entry.path.exists()
    assert catalogue.list() == ()


def test_what_belongs_to_no_model_is_swept(source: Source, store: Store, tmp_path: Path) -> None:
    entry = source.adopt(store)
    (tmp_path / "models" / ".incoming-1").mkdir()
    (tmp_path / "models" / ".incoming-1" / FILE_NAME).write_bytes(b"x")
    (tmp_path / "models" / ("ab" * 32)).mkdir()
    assert store.sweep() == 2
    assert [path.name for path in (tmp_path / "models").iterdir()] == [entry.model_id]
    assert store.sweep() == 0


def crash_at_step(folder: Path, step: int) -> bool:
    """Fetch the whole model in a process that is gone at its `step`-th touch of the disk; whether it came
    to the end instead."""
    pid = os.fork()
    if pid:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, CRASHED)
        return code == 0
    try:
        n_steps = 0

        def touch() -> None:
            nonlocal n_steps
            n_steps += 1
            if n_steps == step:
                os._exit(CRASHED)

        def around(act: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any, **options: Any) -> Any:
                touch()
                result = act(*args, **options)
                touch()
                return result

            return counted

        for name in ("pwrite", "fsync", "fdatasync", "ftruncate", "utime", "rename", "mkdir", "replace"):
            setattr(os, name, around(getattr(os, name)))
        Path.rename = around(Path.rename)  # type: ignore[method-assign]
        Catalogue.database = around(Catalogue.database)  # type: ignore[method-assign]
        fetch_all(folder)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def fetch_all(folder: Path) -> CatalogueEntry:
    """What a daemon does from its start until a model is there."""
    source = Source(folder / "source.gguf")
    store = Store(Catalogue(folder / "catalogue.sqlite"), folder / "models")
    store.sweep()
    known = {entry.model_id: entry for entry in store.catalogue.list()}
    entry = known.get(source.manifest.model_id) or source.adopt(store)
    for tensor in entry.absent(source.tensors):
        writer = store.open_tensor(entry, tensor)
        if tensor is source.tensors[0] and not writer.n_bytes:
            writer.append(source.bytes_of(tensor.name)[:16])
            writer.save()
        writer.append(source.bytes_of(tensor.name)[writer.n_bytes :])
        assert writer.finish()
        writer.close()
    return store.seal(entry)


CRASHED = 9


MEMORY = Path("/dev/shm")


@pytest.fixture
def quick_disk(tmp_path: Path) -> Iterator[Path]:
    """In memory where the system has such a folder. What a process has written outlives it there as well."""
    in_memory = MEMORY if os.access(MEMORY, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=in_memory) as folder:
        yield Path(folder)


@pytest.mark.slow
def test_a_crash_at_any_step_leaves_a_store_that_can_go_on(quick_disk: Path) -> None:
    step = 0
    while True:
        step += 1
        folder = quick_disk / str(step)
        folder.mkdir()
        finished = crash_at_step(folder, step)
        store = Store(Catalogue(folder / "catalogue.sqlite"), folder / "models")
        for entry in store.catalogue.list():
            assert store.verify(entry, lambda done, total: None) == (), f"step {step}"
        if finished:
            break
        entry = fetch_all(folder)
        assert entry.path.read_bytes() == (folder / "source.gguf").read_bytes(), f"step {step}"
        assert len(list((folder / "models").iterdir())) == 1
    assert step > 50


def test_damage_is_found_and_counts_as_absent_from_then_on(source: Source, store: Store) -> None:
    entry = source.adopt(store)
    for tensor in source.tensors:
        source.fill(store, entry, tensor.name)
    entry = store.seal(entry)
    bad = source.tensors[1]
    with entry.path.open("r+b") as file:
        file.seek(bad.offset)
        file.write(b"\xff")
    assert store.verify(entry, lambda done, total: None) == (bad.name,)
    repaired = store.catalogue.get("tiny")
    assert repaired.absent(source.tensors) == (bad,)
    assert repaired.path.stat().st_mtime_ns == repaired.state.mtime_ns > entry.state.mtime_ns
    assert source.fill(store, repaired, bad.name)
    assert store.verify(store.catalogue.get("tiny"), lambda done, total: None) == ()


def test_a_users_file_is_checked_but_never_removed(source: Source, store: Store, tmp_path: Path) -> None:
    entry = store.catalogue.add(tmp_path / "source.gguf", "mine")
    with entry.path.open("r+b") as file:
        file.seek(source.tensors[0].offset)
        file.write(b"\xff")
    assert store.verify(entry, lambda done, total: None) == (source.tensors[0].name,)
    store.remove(entry)
    assert entry.path.exists()
    assert store.catalogue.list() == ()


def test_a_file_of_ones_own_takes_the_place_of_a_container(
    source: Source, store: Store, tmp_path: Path
) -> None:
    stored = source.adopt(store)
    own = store.catalogue.add(tmp_path / "source.gguf")
    assert (own.model_id, own.is_stored) == (stored.model_id, False)
    assert store.sweep() == 1
    assert list((tmp_path / "models").iterdir()) == []


def test_a_taken_name_is_told_apart_by_the_id(source: Source, store: Store, tmp_path: Path) -> None:
    store.catalogue.add(write_gguf(tmp_path / "b.gguf", keys={**LLAMA, "llama.context_length": 9}), "tiny")
    entry = source.adopt(store)
    assert entry.name == f"tiny-{entry.model_id[:12]}"
    assert store.catalogue.get(entry.name).model_id == entry.model_id


def names(source: Source, layers: LayerRange | None, *, origin: bool = False) -> set[str]:
    return {tensor.name for tensor in needed_tensors(source.manifest, layers, origin=origin)}


def test_a_use_needs_its_layers_and_the_ends_it_touches(source: Source) -> None:
    every = {"rope_freqs.weight"}
    small = {tensor.name for tensor in needed_tensors(source.manifest)} - every
    first = {f"blk.0.{part}.weight" for part in ("attn_q", "ffn_up")}
    last = {f"blk.1.{part}.weight" for part in ("attn_q", "ffn_up")}
    assert names(source, LayerRange(0, 1)) == every | small | first | {"token_embd.weight"}
    assert names(source, LayerRange(1, 2)) >= every | last | {"output_norm.weight", "output.weight"}
    assert "token_embd.weight" in names(source, None, origin=True)
    assert names(source, LayerRange(0, 2)) == {tensor.name for tensor in source.tensors}
