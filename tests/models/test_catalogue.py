from __future__ import annotations

import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest
from gguf_parts import LLAMA, tensors, write_gguf

from swarmllm.errors import BadModel, Conflict, InvalidRequest, ModelNotFound
from swarmllm.models import Catalogue


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return Catalogue(tmp_path / "catalogue.sqlite")


def other_model(path: Path) -> Path:
    return write_gguf(path, keys={**LLAMA, "general.name": "Other"})


def must_not_hash(done: int, total: int) -> NoReturn:
    raise AssertionError


def test_an_added_model_is_found_by_name_and_by_id(catalogue: Catalogue, tmp_path: Path) -> None:
    entry = catalogue.add(write_gguf(tmp_path / "a.gguf"))
    assert entry.name == "tiny-llama-2"
    assert catalogue.list() == (entry,)
    assert catalogue.get("tiny-llama-2") == entry
    assert catalogue.get(entry.model_id) == entry
    assert catalogue.resolve(entry.model_id[:6]) == entry
    assert Catalogue(tmp_path / "catalogue.sqlite").list() == (entry,)


@pytest.mark.parametrize("wanted", ["tiny", "", "x" * 10_000, "zzz", "' OR 1=1", "%", "abcde"])
def test_an_unknown_model_is_not_found(catalogue: Catalogue, tmp_path: Path, wanted: str) -> None:
    catalogue.add(write_gguf(tmp_path / "a.gguf"))
    with pytest.raises(ModelNotFound) as caught:
        catalogue.get(wanted)
    assert caught.value.field == "model"
    assert len(caught.value.message) < 300


def test_a_typing_error_is_answered_with_a_suggestion(catalogue: Catalogue, tmp_path: Path) -> None:
    catalogue.add(write_gguf(tmp_path / "a.gguf"))
    with pytest.raises(ModelNotFound, match="did you mean tiny-llama-2"):
        catalogue.get("tiny-lama-2")


def test_an_unchanged_file_is_not_hashed_again(catalogue: Catalogue, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf")
    entry = catalogue.add(path)
    assert catalogue.add(path, progress=must_not_hash) == entry
    renamed = catalogue.add(path, "short", progress=must_not_hash)
    assert renamed.model_id == entry.model_id
    assert [each.name for each in catalogue.list()] == ["short"]
    assert catalogue.get(entry.name) == renamed, "the first name leads to it still"
    assert catalogue.add(path, progress=must_not_hash).name == "short"


def test_a_changed_file_is_refused_until_it_is_added_again(catalogue: Catalogue, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf")
    before = catalogue.add(path, "m")
    write_gguf(path, data={**tensors(), "output.weight": b"\1" * 32})
    os.utime(path, ns=(0, 0))
    with pytest.raises(BadModel, match=r"has changed .* swarmllm models add .* --name m"):
        catalogue.resolve("m")
    assert catalogue.get("m") == before
    after = catalogue.add(path, "m")
    assert after.model_id != before.model_id
    assert catalogue.list() == (after,)
    assert catalogue.resolve("m") == after


def test_a_file_that_was_only_touched_stays_in_use(
    catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "a.gguf")
    before = catalogue.add(path, "m")
    os.utime(path, ns=(7, 7))
    after = catalogue.resolve("m")
    assert (after.model_id, after.state.mtime_ns) == (before.model_id, 7)
    monkeypatch.setattr("swarmllm.models.catalogue.is_same_content", must_not_hash)
    assert catalogue.resolve("m") == after, "it is read once only"


@pytest.mark.parametrize("at", [60, 300, -33, -1])
def test_a_touched_file_with_another_byte_is_another_one(
    catalogue: Catalogue, tmp_path: Path, at: int
) -> None:
    path = write_gguf(tmp_path / "a.gguf")
    catalogue.add(path, "m")
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(7, 7))
    with pytest.raises(BadModel, match="has changed"):
        catalogue.resolve("m")


def test_equal_content_under_a_second_name_keeps_the_first(catalogue: Catalogue, tmp_path: Path) -> None:
    first = catalogue.add(write_gguf(tmp_path / "a.gguf"), "good")
    both = catalogue.add(write_gguf(tmp_path / "b.gguf"), "other")
    assert (both.name, both.further_names, both.path) == ("good", ("other",), first.path)
    assert catalogue.list() == (both,)
    assert (
        catalogue.resolve("good") == catalogue.resolve("other") == catalogue.resolve(first.model_id) == both
    )
    with pytest.raises(Conflict):
        catalogue.add(other_model(tmp_path / "c.gguf"), "other")
    first.path.unlink()
    moved = catalogue.add(tmp_path / "b.gguf", "other")
    assert (moved.name, moved.further_names, moved.path) == ("other", ("good",), tmp_path / "b.gguf")
    assert catalogue.resolve("good") == moved


def test_a_name_of_several_goes_alone(catalogue: Catalogue, tmp_path: Path) -> None:
    entry = catalogue.add(write_gguf(tmp_path / "a.gguf"), "good")
    catalogue.add(write_gguf(tmp_path / "b.gguf"), "other")
    assert catalogue.drop_name(entry.model_id) is None
    left = catalogue.drop_name("good")
    assert left is not None
    assert (left.name, left.further_names) == ("other", ())
    with pytest.raises(ModelNotFound):
        catalogue.get("good")
    assert catalogue.drop_name("other") is None
    catalogue.add(tmp_path / "a.gguf", "again")
    assert catalogue.drop_name("again") is not None
    catalogue.add(tmp_path / "a.gguf", "again")
    catalogue.remove("again")
    assert catalogue.list() == ()
    with pytest.raises(ModelNotFound):
        catalogue.get("other")


def test_a_program_model_takes_a_further_name_and_leaves_the_model(
    catalogue: Catalogue, tmp_path: Path
) -> None:
    catalogue.add(write_gguf(tmp_path / "a.gguf"), "mine")
    catalogue.add(write_gguf(tmp_path / "b.gguf"), "guide")
    entry = catalogue.ensure(other_model(tmp_path / "c.gguf"), "guide")
    assert catalogue.get("guide") == entry
    assert catalogue.get("mine").further_names == ()


def test_a_file_that_is_gone_is_reported_on_use(catalogue: Catalogue, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf")
    catalogue.add(path, "m")
    path.rename(tmp_path / "b.gguf")
    with pytest.raises(BadModel, match="cannot be read"):
        catalogue.resolve("m")
    moved = catalogue.add(tmp_path / "b.gguf", "m")
    assert catalogue.resolve("m").path == moved.path == tmp_path / "b.gguf"


def test_a_name_belongs_to_one_model(catalogue: Catalogue, tmp_path: Path) -> None:
    first = catalogue.add(write_gguf(tmp_path / "a.gguf"), "m")
    other = other_model(tmp_path / "b.gguf")
    with pytest.raises(Conflict) as caught:
        catalogue.add(other, "m")
    assert caught.value.field == "name"
    assert catalogue.list() == (first,)
    assert [each.name for each in (catalogue.add(other, "n"), catalogue.get("m"))] == ["n", "m"]


def test_a_program_model_takes_its_name_back(catalogue: Catalogue, tmp_path: Path) -> None:
    catalogue.add(write_gguf(tmp_path / "a.gguf"), "guide")
    entry = catalogue.ensure(other_model(tmp_path / "b.gguf"), "guide")
    assert catalogue.get("guide") == entry
    assert catalogue.ensure(tmp_path / "b.gguf", "guide") == entry


@pytest.mark.parametrize("name", ["", "Big", "a b", "../x", "-m", "a" * 101, "é"])
def test_a_bad_name_is_refused_by_name(catalogue: Catalogue, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        catalogue.add(write_gguf(tmp_path / "a.gguf"), name)
    assert caught.value.field == "name"


def test_the_models_own_name_is_made_typeable(catalogue: Catalogue, tmp_path: Path) -> None:
    for content, name in (("  Qwen/2.5 (Instruct)!", "qwen-2.5-instruct"), ("模型", "model")):
        path = write_gguf(tmp_path / f"{name}.gguf", keys={**LLAMA, "general.name": content})
        assert catalogue.add(path).name == name


def test_a_removed_model_is_forgotten_and_its_file_kept(catalogue: Catalogue, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf")
    entry = catalogue.add(path)
    assert catalogue.remove(entry.name) == entry
    assert catalogue.list() == ()
    assert path.exists()
    with pytest.raises(ModelNotFound):
        catalogue.remove(entry.name)


def test_an_ambiguous_id_is_refused(catalogue: Catalogue, tmp_path: Path) -> None:
    entry = catalogue.add(write_gguf(tmp_path / "a.gguf"))
    with closing(sqlite3.connect(tmp_path / "catalogue.sqlite")) as database, database:
        twin = entry.model_id[:10] + "0" * 54
        database.execute(
            "INSERT INTO models SELECT ?, 'twin', path, size_bytes, mtime_ns, added_at, manifest FROM models",
            (twin,),
        )
    with pytest.raises(InvalidRequest, match="several"):
        catalogue.get(entry.model_id[:8])


def test_a_database_of_another_time_or_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(BadModel, match="schema 99"):
        Catalogue(path)
    path.write_text("not a database, certainly not one" * 50)
    with pytest.raises(BadModel, match="cannot be used"):
        Catalogue(path)


@pytest.mark.parametrize("manifest", [b"", b"\x80", b"\x81\xa1\xff\x01", b"\x91" * 5000])
def test_a_row_that_cannot_be_read_is_a_damaged_catalogue(
    catalogue: Catalogue, tmp_path: Path, manifest: bytes
) -> None:
    path = write_gguf(tmp_path / "a.gguf")
    catalogue.add(path)
    with closing(sqlite3.connect(tmp_path / "catalogue.sqlite")) as database, database:
        database.execute("UPDATE models SET manifest = ?", (manifest,))
    with pytest.raises(BadModel, match="is damaged"):
        catalogue.list()
    with pytest.raises(BadModel, match="is damaged"):
        catalogue.add(path)


def test_threads_may_use_it_together(catalogue: Catalogue, tmp_path: Path) -> None:
    paths = [
        write_gguf(tmp_path / f"{i}.gguf", keys={**LLAMA, "general.name": f"model-{i}"}) for i in range(6)
    ]
    threads = [threading.Thread(target=catalogue.add, args=(path,)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [entry.name for entry in catalogue.list()] == [f"model-{i}" for i in range(6)]
